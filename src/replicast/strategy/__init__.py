"""MultiWorkerMirroredStrategy that Keras 3 can train on.

This package and `replicast.coordination` are the only places that use private TensorFlow or Keras APIs. Each
use says why in a comment, and `tests/workers/test_private_apis.py` fails on the day one of them changes.

    strategy     the class people use; what Keras asks of a strategy, answered for several workers
    collectives  how the workers exchange tensors: keys that work inside loops
    step         one training step of a Keras model: weighted gradients, exact metrics, equal statistics
    slices       row-sparse gradients summed to the slices of one process
    results      which of the values that a step returns are results of metrics
    rows         how many rows a share has, and a stand-in where there are none
    writes       which variables a step writes
    building     variables that a model creates while its step is traced
    outside      what was made outside the scope: taken over, or refused
    optimizers   the optimizers of a model and of its layers
    replicated   the variables of a job, which read as those of one process
    caller       which model is asking, and with which callbacks
    feeding      each worker's share of every batch, without a transfer per step
    writing      files that one worker writes for all
    callbacks    callbacks that write, and who runs them
    variables    the state of a model: its variables by name, and how edits change them
    resuming     the epoch at which `fit` goes on
    seeds        the same shuffle on every worker
"""

from replicast.strategy.resuming import start_at_epoch
from replicast.strategy.strategy import Strategy
from replicast.strategy.variables import KerasState, optimizers_by_name

__all__ = ["KerasState", "Strategy", "optimizers_by_name", "start_at_epoch"]
