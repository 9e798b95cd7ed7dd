"""MultiWorkerMirroredStrategy that Keras 3 can train on.

This package and `replicast.coordination` are the only places that use private TensorFlow or Keras APIs. Each
use says why in a comment, and `tests/workers/test_private_apis.py` fails when one of them changes.

    strategy       the public class; implements for several workers what Keras asks of a strategy
    collectives    tensor exchange between workers, with keys that work inside loops
    step           one training step of a Keras model: weighted gradients, exact metrics, equal statistics
    slices         row-sparse gradients summed to the slices of one process
    metrics        how a step updates each metric; which of the values that it returns are their results
    rows           which arrays of a batch are rows, how many there are, a placeholder if there are none
    writes         which variables a step writes
    building       variables that a model creates while its step is traced
    outside        variables created outside the scope: moved into it, or refused
    optimizers     the optimizers of a model and of its layers
    replicated     the variables of a job, which read like those of one process
    caller         which Keras call is running, on which model, with which callbacks
    inputs         how the data of a Keras call is divided, by the kind of data
    feeding        each worker's share of every batch, without a transfer per step
    samples        comparison of the workers' data
    functions      comparison of what the workers compute, when a step is traced
    writing        files that one worker writes for all
    callbacks      callbacks that write files
    variables      the state of a model: its variables by name, and how edits change them
    device_digest  digests of variables computed on an accelerator
    resuming       where `fit` continues after a restore
    passes         where a custom training loop continues after a restore
    progress       the progress bar of a resumed epoch
    seeds          the same shuffle and the same unseeded draws on every worker
"""

import gc

from replicast.training.functions import per_worker
from replicast.training.keras_state import KerasState, optimizers_by_name
from replicast.training.resuming import start_at_epoch
from replicast.training.strategy import Strategy

__all__ = ["KerasState", "Strategy", "optimizers_by_name", "per_worker", "start_at_epoch"]

# What the imports made lives as long as the process. Without this, Python's last collection walks through
# all that TensorFlow and Keras have made: 1 s of processor time at the end of each worker.
gc.freeze()
