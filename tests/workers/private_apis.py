"""The private APIs of TensorFlow and Keras that we rest on: what each is, who uses it, and what for.

`test_private_apis.py` looks whether they are as described here, and whether any is used that is not.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import replicast
from replicast.launcher.checks import release

SOURCE = Path(replicast.__file__).parent
OURS = ("training", "coordination.py")  # where private APIs may be used
NOT_PRIVATE = frozenset(
    {"_exit", "_getframe", "_replace", "_value_"}
)  # names with an underscore that Python documents


@dataclass(frozen=True)
class PrivateApi:
    """One private API.

    Attributes:
        name: Its full name; or, of a field, where it is found.
        used_in: The file of ours that uses it.
        needed: What we need of it.
        parameters: What it is called with; None if it is not called, or not by us.
        since_keras: The version of Keras that has it; all that we support if empty.
    """

    name: str
    used_in: str
    needed: str
    parameters: tuple[str, ...] | None = None
    since_keras: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.name

    @property
    def is_expected(self) -> bool:
        """Whether this version of Keras has it."""
        return release(keras.__version__) >= self.since_keras

    @property
    def last(self) -> str:
        """The last part of its name."""
        return self.name.rpartition(".")[2]

    def changed(self, found: object, expected: object = "as it was") -> str:
        """What to say when it is not as we need it."""
        return (
            f"\n{self.name} has changed.\n"
            f"  versions: TensorFlow {tf.__version__}, Keras {keras.__version__}\n"
            f"  used in:  src/replicast/{self.used_in}\n"
            f"  we need:  {self.needed}\n"
            f"  expected: {expected}\n"
            f"  found:    {found}"
        )


_SHORT = {
    "<context>": "tensorflow.python.eager.context",
    "<values>": "tensorflow.python.distribute.values",
    "<launcher>": "tensorflow.python.distribute.cross_device_utils.CollectiveReplicaLauncher",
    "<extended>": "tensorflow.python.distribute.collective_all_reduce_strategy.CollectiveAllReduceExtended",
    "<adapters>": "keras.src.trainers.data_adapters",
    "<iterator>": "keras.src.trainers.epoch_iterator.EpochIterator",
}
_ROW = re.compile(r"(?P<name>[^ :(]+)(\((?P<given>.*)\))?( \[Keras (?P<since>[\d.]+)\])?: (?P<needed>.*)")


def _table(text: str) -> list[PrivateApi]:
    """Each file of ours, and below it what it uses: name(parameters) [first version of Keras]: what for."""
    found: list[PrivateApi] = []
    file = ""
    for line in re.sub(r"\n {6,}", " ", text.strip()).splitlines():
        if not line.startswith(" "):
            file = line
            continue
        row = _ROW.fullmatch(line.strip())
        assert row is not None, line
        name = re.sub("<.*>", lambda short: _SHORT[short[0]], row["name"])
        given = None if row["given"] is None else tuple(filter(None, row["given"].split(", ")))
        since = tuple(map(int, row["since"].split("."))) if row["since"] else ()
        found.append(PrivateApi(name, file, row["needed"], given, since))
    return found


# Functions and classes, by the names they are found under.
NAMES = _table("""
coordination.py
  <context>.Context.set_config_key_value(self, key, value):
      writes a key of the coordination service unless it is there
  <context>.Context.get_config_key_value(self, key, timeout_in_ms):
      waits for a key, at most so many milliseconds
  <context>.Context.delete_config_key_value(self, key): removes a key
  <context>.Context.get_task_states(self, job_configs):
      returns the error of each task that the service has lost, by job and index
  <context>.Context.abort_collective_ops(self, code, message):
      ends transfers that wait for a worker that has failed
  <context>.context(): the context of this process
training/variables.py
  <context>.global_seed(): the seed that the user has set
  <values>.MirroredVariable: the class of variables that are equal on all workers
  <values>.SyncOnReadVariable: the class of variables that each worker writes
  <values>.SyncOnReadVariable._update_replica(self, update_fn, value, kwargs):
      how a replica writes such a variable
  <values>.SyncOnReadVariable._get_cross_replica(self): how such a variable is read outside a step
  tensorflow.python.ops.resource_variable_ops.ResourceVariable:
      a variable that is none of the strategy's, also when it is created in the scope
  tensorflow.python.distribute.values_util.is_saving_non_distributed:
      whether a model is being exported without its strategy
  <values>.SyncOnReadVariable._get: how a replica reads such a variable
  <values>.SyncOnReadVariable._gather_saveables_for_checkpoint:
      what a tf.train.Checkpoint saves of such a variable
  <values>._SyncOnReadSaveable.restore: how a tf.train.Checkpoint restores such a variable
  <values>.DistributedVariable._primary: the variable on this worker
  keras.Model._flatten_layers: all layers at any depth
  keras.Variable._initialize: makes TensorFlow's variable behind one of Keras
  keras.src.backend.common.global_state: holds the generator of unseeded draws, for each thread
  keras.src.random.seed_generator.GLOBAL_SEED_GENERATOR: the name of that generator
training/rows.py
  keras.src.backend.tensorflow.numpy.take(x, indices, axis): how `keras.ops.take` looks rows up
  keras.src.backend.tensorflow.core.Variable: `tf.gather` asks it for `sparse_read`
  keras.src.backend.common.stateless_scope.in_stateless_scope(): whether a variable stands for another value
  keras.Variable._maybe_autocast(self, value): the value in the precision of the layer that runs
  keras.optimizers.Optimizer._get_variable_index(self, variable): the place of what remembers something of it
training/collectives.py
  <launcher>.__init__(self, group_key, group_size, collective_keys, device, options):
      makes a launcher like another one
  <extended>._update_config_proto(self, config_proto):
      its result configures the server and the coordination service
  <launcher>.all_reduce(self, input_tensor, control_input, options):
      starts every dense transfer, and is given its tensor first
  <launcher>._all_gather(self, input_tensor, options):
      starts every sparse transfer, and is given its tensor first
  <launcher>._next_instance_key(self): is where a transfer draws its key
  <extended>.__init__(self, container_strategy, cluster_resolver, communication_options, devices):
      makes what is behind MultiWorkerMirroredStrategy
  <extended>._call_for_each_replica(self, fn, args, kwargs): runs a function in the thread of each replica
  <extended>._use_merge_call(self): says whether optimizers merge replicas, which they cannot inside tf.cond
  <extended>._create_variable(self, next_creator, kwargs): makes every variable of the scope
  <extended>._get_variable_creator_initial_value(self, replica_id, device, primary_var, kwargs):
      broadcasts worker 0's initial value
  <extended>._replica_ctx_all_reduce(self, reduce_op, value, options): is how an optimizer sums its gradients
  <extended>._container_strategy: the strategy that it is of
  keras.optimizers.LossScaleOptimizer._tf_apply(self, grads, trainable_variables):
      refuses to work in a scope outside of strategy.run
  keras.optimizers.LossScaleOptimizer._common_apply(self, grads, trainable_variables):
      applies the gradients if they are finite
training/step.py
  tensorflow.python.framework.auto_control_deps_utils.get_read_write_resource_inputs(op):
      tells which variables an operation writes
  tensorflow.python.eager.record.could_possibly_record(): whether a tape is recording
training/feeding.py
  <iterator>.catch_stop_iteration(self): surrounds all steps of fit, evaluate and predict
  keras.src.callbacks.callback_list: to recognise its frames, which call callbacks
  <adapters>.array_data_adapter.ArrayDataAdapter: holds arrays
  tensorflow.python.data.ops.iterator_ops.OwnedIterator: what iter(dataset) makes
  tensorflow.python.data.ops.repeat_op._RepeatDataset: what dataset.repeat() makes
  tensorflow.python.data.ops.shuffle_op._ShuffleDataset: what dataset.shuffle() makes
training/keras_call.py
  <iterator>: its constructor asks a strategy for the data of a call
  keras.src.backend.tensorflow.trainer: the module of the class that has fit
  keras.src.saving.saving_lib: to recognise its frames
training/resuming.py
  <adapters>.generator_data_adapter.GeneratorDataAdapter: a generator
  <adapters>.py_dataset_adapter.PyDatasetAdapter: a PyDataset
  <adapters>.tf_dataset_adapter.TFDatasetAdapter: a tf.data
  keras.utils.Progbar._estimate_step_duration(self, current, now):
      the time per batch that a progress bar shows
training/step_metrics.py
  keras.src.trainers.compile_utils.CompileMetrics.metrics: the metrics of compile, one by one
training/writing.py
  keras.callbacks.BackupAndRestore._save_model(self): writes weights, and other files beside them
  keras.callbacks.ModelCheckpoint._get_file_path(self, epoch, batch, logs): where it writes
  keras.callbacks.ModelCheckpoint._save_model: when it writes
  keras.src.saving.saving_lib.save_model: writes every .keras file or folder
  keras.src.saving.saving_lib.save_weights_only: writes every .weights.h5
  keras.src.legacy.saving.legacy_h5_format: to replace its function
  keras.src.legacy.saving.legacy_h5_format.save_model_to_hdf5: writes every .h5 file
  keras.src.utils.io_utils: to replace its function
  keras.src.utils.io_utils.ask_to_proceed_with_overwrite(filepath): asks whether to replace a file
""")

WRAPPER = "MeanMetricWrapper"
ARRAYS, GENERATOR, PY_DATASET = "ArrayDataAdapter", "GeneratorDataAdapter", "PyDatasetAdapter"
ITERATOR, STRATEGY, LAUNCHER = "EpochIterator", "Strategy.extended", "CollectiveReplicaLauncher"
MODEL, BACKUP, MIRRORED = "keras.Model", "BackupAndRestore", "MirroredVariable"
BOARD = "TensorBoard"
REDUCTION, OPTIMIZER, DATASET, SEEDED = "CollectiveAllReduce", "Optimizer", "Dataset", "Context"

# Fields of objects. `test_private_apis.py` makes the objects.
FIELDS = _table("""
training/step_metrics.py
  MeanMetricWrapper._fn: the function whose values it averages
  keras.Model._loss_tracker: the metric that Keras weights by its first input
  Tensor._keras_mask: the mask of what a model returns
training/feeding.py
  ArrayDataAdapter._inputs: the arrays, which each worker slices
  ArrayDataAdapter._shuffle: what fit was told about the order
  ArrayDataAdapter.batch_size: the rows of a batch
  GeneratorDataAdapter._first_batches: what was taken to see the shapes
  Dataset._variant_tensor: to make a dataset of our own class
  ShuffledDataset._reshuffle_each_iteration: whether every repetition has another order
training/resuming.py
  PyDatasetAdapter.py_dataset: the PyDataset of the user
  PyDatasetAdapter.enqueuer: whether batches are read ahead
  PyDatasetAdapter.shuffle: whether the order of batches is drawn
  PyDatasetAdapter.num_batches: how many there are
  PyDatasetAdapter._epoch [Keras 3.16]:
      from Keras 3.16 on, the number from which it draws the order of batches
  EpochIterator.data_adapter: what the user passed as data
  EpochIterator.steps_per_epoch: how many batches an epoch has
  EpochIterator.steps_per_execution: how many batches a call takes
  EpochIterator._num_batches: the length of the data
  EpochIterator._current_iterator: the iterator that fit goes on with
  EpochIterator._steps_seen: how much of it was used
  EpochIterator._distributed_dataset: what the strategy made of it
  keras.Model._initial_epoch: fit begins with it, read after on_train_begin
training/collectives.py
  Strategy.extended._cross_device_ops: transfers between devices
  Strategy.extended._host_cross_device_ops: transfers between hosts
  Strategy.extended._num_workers: whether there are other workers
  CollectiveAllReduce._launchers: the list of launchers to replace
  CollectiveReplicaLauncher._group_key: to make a launcher like it
  CollectiveReplicaLauncher._group_size: to make a launcher like it
  CollectiveReplicaLauncher._collective_keys: to make a launcher like it
  CollectiveReplicaLauncher._device: to make a launcher like it
  CollectiveReplicaLauncher._options: to make a launcher like it
  Strategy.extended._task_id: which worker this is
  Optimizer._trainable_variables: what it was built with
training/strategy.py
  Strategy.extended._local_device_type: CPU or GPU
  Strategy.extended._num_replicas_in_sync: the number of workers
  keras.Model._distribute_strategy: in which scope it was made
training/variables.py
  Optimizer._distribution_strategy: in which scope it was made
  keras.Model._compile_loss: whether Keras has built the loss
  keras.Model._compile_metrics: whether Keras has built the metrics
  MirroredVariable._distribute_strategy: the strategy that made it
  Context._rng: is another one when a seed is set again
training/rows.py
  keras.Variable._value: TensorFlow's variable behind it
  Handle._distributed_container: the variable of the job, by its value on this worker
  Adagrad._accumulators: one for each variable
training/row_optimizers.py
  Adam._momentums: one for each variable
  Adam._velocities: one for each variable
  Adam._velocity_hats: one for each variable, with amsgrad
training/writing.py
  BackupAndRestore._training_metadata_path: where it notes the epoch
  TensorBoard._should_trace: whether it profiles
""")

# How Keras calls us, and in which order.
CALLS = _table("""
training/resuming.py
  keras.Model.fit: its local names callbacks, epoch_iterator, initial_epoch
  <iterator>._enumerate_iterator:
      makes two iterators an epoch where it knows the length, and uses the first; else one
training/keras_call.py
  <iterator>.__init__: is called by fit, evaluate and predict, and calls experimental_distribute_dataset
  keras.Model.make_predict_function: runs predict_step in a function one_step_on_data_distributed
  keras.Model._maybe_symbolic_build: takes one batch to see its shapes, in fit
training/strategy.py
  keras.Model._make_function: gives the strategy a step of a model as the model's own method
replicas/callback.py
  keras.callbacks.CallbackList.callbacks:
      whoever is added to it in on_train_begin is called after all others from then on
training/keras_state.py
  keras.Optimizer.variables:
      what remembers something of a weight is named after it, in the order of the weights
""")

ALL = [*NAMES, *FIELDS, *CALLS]


def named(ending: str) -> PrivateApi:
    """The API whose name ends like this."""
    return next(api for api in ALL[::-1] if api.name.endswith(f".{ending}"))


def resolved(name: str) -> Any:
    """What a full name stands for."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


def parameters(function: Any) -> tuple[str, ...]:
    """The names of a function's parameters."""
    return tuple(inspect.signature(function).parameters)


def used() -> Iterator[tuple[str, str]]:
    """Every private name of TensorFlow and Keras in our source, and the file that has it."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}
    everywhere = set().union(*(_defined(tree) for tree in trees.values()))
    for path, tree in trees.items():
        file = str(path.relative_to(SOURCE))
        # Only these files derive from classes of TensorFlow and Keras.
        here, inherited = (_defined(tree), _inherited(tree)) if file.startswith(OURS) else (everywhere, set())
        for name in _private_names(tree):
            if name not in NOT_PRIVATE and (name not in here or name in inherited):
                yield name, file


def _private_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            ("keras.src", "tensorflow.python")
        ):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute) and _is_private(node.attr):
            yield node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr":
            name = node.args[1]
            if isinstance(name, ast.Constant) and _is_private(str(name.value)):
                yield str(name.value)


def _defined(tree: ast.AST) -> set[str]:
    """The names that a file gives to something of its own."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names |= {node.attr} if getattr(node.value, "id", "") == "self" else set()
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def _inherited(tree: ast.AST) -> set[str]:
    """Methods that a file overrides and calls by `super()`."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Call)
        and getattr(node.value.func, "id", "") == "super"
    }


def _is_private(name: str) -> bool:
    """Whether a name is somebody's own; `_replicast_…` is a mark of ours on an object of theirs."""
    return name.startswith("_") and not name.startswith(("__", "_replicast"))
