"""MultiWorkerMirroredStrategy that Keras 3 can train on.

This package and `replicast.coordination` are the only places that use private TensorFlow or Keras APIs. Each
use says why in a comment, and `tests/workers/test_private_apis.py` fails when one of them changes.

    strategy       the public class; what Keras asks of a strategy, for several workers; the start of a
                   worker; the job of a strategy, ours or TensorFlow's
    keras_call     which Keras call is running, on which model, with which callbacks
    feeding        each worker's share of every batch, without a transfer per step; comparison of the data
    step           one training step of a Keras model: weighted gradients, exact metrics, equal statistics
    origins        what a tensor of a step comes from: rows, common values, constants, a call
    collectives    tensor exchange between workers, with keys that work inside loops
    functions      comparison of what the workers compute, when a step is traced
    variables      the variables of a job: how they read, where they are created, who holds them, shared seeds
    rows           large tables: lookups and optimizers that touch single rows
    row_optimizers `LazyAdam` and `RowWiseAdagrad`
    writing        files that one worker writes for all; callbacks that write files
    resuming       where `fit`, or a custom training loop, continues after a restore
    named_variables  what a user gives to `Replicas`: the names of its variables, the slots of its optimizers
    tensorflow_state named variables on this worker, with all its replicas: how edits change them, digests
"""

import gc

from replicast.training.functions import per_worker
from replicast.training.named_variables import Source
from replicast.training.resuming import start_at_epoch
from replicast.training.strategy import Strategy, StrategyJob, job_of
from replicast.training.tensorflow_state import TensorFlowState

__all__ = ["Source", "Strategy", "StrategyJob", "TensorFlowState", "job_of", "per_worker", "start_at_epoch"]

# What the imports made lives as long as the process. Without this, Python's last collection walks through
# all that TensorFlow and Keras have made: 1 s of processor time at the end of each worker.
gc.freeze()
