"""`replicast demo`: two real workers train one model, and the screen compares their replicas.

- `train`: the training script, to read and to copy; the only file here that imports TensorFlow.
- `story`: the three parts: their commands, the expected results, and the text on the screen.
- `job`: `replicast run` and the other commands, as processes.
"""
