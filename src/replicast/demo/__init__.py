"""`train.py` is the training script of `replicast demo`, to read and to copy."""
