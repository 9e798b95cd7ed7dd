"""MultiWorkerMirroredStrategy that Keras 3 can train on.

This package and `replicast.coordination` are the only places that use private TensorFlow or Keras APIs. Each
use says why in a comment, and `tests/workers/test_private_apis.py` fails when one of them changes.

    strategy       the public class; what Keras asks of a strategy, for several workers; the start of a
                   worker; the job of a strategy, ours or TensorFlow's
    keras_call     which Keras call is running, on which model, with which callbacks
    feeding        each worker's share of every batch, without a transfer per step; comparison of the data
    step           one training step of a Keras model: weighted gradients, exact metrics, equal statistics
    collectives    tensor exchange between workers, with keys that work inside loops
    graphs         what a tensor of a step comes from; whether all workers compute the same
    variables      the variables of a job: how they read, where they are created, who holds them, shared seeds
    rows           large tables: lookups and optimizers that touch single rows
    row_optimizers `LazyAdam` and `RowWiseAdagrad`
    writing        files that one worker writes for all; callbacks that write files
    resuming       where `fit`, or a custom training loop, continues after a restore
    tensorflow_state what a user gives to `Replicas`: its variables by name, their values, edits, digests
"""

import gc

# Registers its optimizers with Keras: `load_model` finds them in every process of a job.
from replicast.training import row_optimizers as row_optimizers
from replicast.training.graphs import per_worker
from replicast.training.resuming import start_at_epoch
from replicast.training.strategy import Strategy, StrategyJob, job_of
from replicast.training.tensorflow_state import Source, TensorFlowState

__all__ = ["Source", "Strategy", "StrategyJob", "TensorFlowState", "job_of", "per_worker", "start_at_epoch"]

# What the imports made lives as long as the process. Without this, Python's last collection walks through
# all that TensorFlow and Keras have made: 1 s of processor time at the end of each worker.
gc.freeze()
