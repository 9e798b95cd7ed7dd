"""Keras optimizers for large embeddings: a step changes the rows that it has gradients for, and no others."""

from replicast.training.row_optimizers import LazyAdam, RowWiseAdagrad

__all__ = ["LazyAdam", "RowWiseAdagrad"]
