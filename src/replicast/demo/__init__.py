"""`replicast demo`: two real workers train one model, and the screen shows what becomes of their replicas.

- `train`: the training script, to read and to copy; the only file here that loads TensorFlow.
- `story`: the three parts: what is run, what must come of it, what the screen says about it.
- `job`: `replicast run` and the other commands, as processes.
"""
