"""The private APIs of TensorFlow and Keras that we rest on: what each is, who uses it, and what for.

The tests look whether they are as described here, and whether any is used that is not. If one changes, a test
says which it is, which file of ours uses it and what we need of it.
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
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.legacy.saving import legacy_h5_format
from keras.src.losses import loss
from keras.src.saving import saving_api, saving_lib
from keras.src.trainers import compile_utils
from tensorflow.python.ops import array_ops

import replicast
from replicast.cli.launch import release
from replicast.training import feeding
from replicast.training.keras_call import Trainer, keras_call, only_looks_at_shapes
from replicast.training.resuming import _running_fit as running_fit
from replicast.training.resuming import callbacks_of
from tests.pool import Pool
from tests.workers.recipes import arrays, perceptron

SOURCE = Path(replicast.__file__).parent
OURS = ("training", "coordination.py")  # where private APIs may be used
# Names with an underscore that Python documents, and what `python -m` itself calls.
NOT_PRIVATE = frozenset({"_exit", "_getframe", "_replace", "_run_module_as_main", "_value_"})


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
    "<random>": "tensorflow.python.ops.gen_stateless_random_ops_v2",
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
  keras.Variable._initialize_with_initializer(self, initializer):
      makes TensorFlow's variable behind one of Keras, where its initial value is to be drawn
  tensorflow.python.ops.control_flow_util.GraphOrParentsInXlaContext(graph):
      whether XLA compiles what is traced: it lacks an operation with which we compute Adam
  <random>.stateless_random_uniform_v2(shape, key, counter, alg, dtype, name):
      draws from a counter, as a part of what Keras draws
  <random>.stateless_random_normal_v2(shape, key, counter, alg, dtype, name):
      draws from a counter, as a part of what Keras draws
  <random>.stateless_truncated_normal_v2(shape, key, counter, alg, dtype, name):
      draws from a counter, as a part of what Keras draws
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
  <extended>._gather_to_implementation(self, value, destinations, axis, options): needs to be told a device
  <extended>._container_strategy: the strategy that it is of
  keras.optimizers.LossScaleOptimizer._tf_apply(self, grads, trainable_variables):
      refuses to work in a scope outside of strategy.run
  keras.optimizers.LossScaleOptimizer._common_apply(self, grads, trainable_variables):
      applies the gradients if they are finite
training/tensorflow_state.py
  keras.optimizers.Optimizer._get_current_learning_rate(self): what every step takes as its learning rate
training/step.py
  keras.src.trainers.compile_utils.CompileMetrics.metrics: the metrics of compile, one by one
  tensorflow.python.framework.auto_control_deps_utils.get_read_write_resource_inputs(op):
      tells which variables an operation writes
  tensorflow.python.eager.record.could_possibly_record(): whether a tape is recording
training/feeding.py
  <context>.global_seed(): the seed that the user has set
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
training/writing.py
  keras.callbacks.BackupAndRestore._save_model(self): writes weights, and other files beside them
  keras.callbacks.ModelCheckpoint._get_file_path(self, epoch, batch, logs): where it writes
  keras.callbacks.ModelCheckpoint._save_model: when it writes
  keras.src.saving.saving_lib.save_model: writes every .keras file or folder
  keras.src.saving.saving_lib.save_weights_only: writes every .weights.h5
  keras.src.legacy.saving.legacy_h5_format: to replace its function
  keras.src.legacy.saving.legacy_h5_format.save_model_to_hdf5: writes every .h5 file
""")

WRAPPER = "MeanMetricWrapper"
ARRAYS, GENERATOR, PY_DATASET = "ArrayDataAdapter", "GeneratorDataAdapter", "PyDatasetAdapter"
ITERATOR, STRATEGY, LAUNCHER = "EpochIterator", "Strategy.extended", "CollectiveReplicaLauncher"
MODEL, BACKUP, MIRRORED = "keras.Model", "BackupAndRestore", "MirroredVariable"
BOARD = "TensorBoard"
REDUCTION, OPTIMIZER, DATASET, SEEDED = "CollectiveAllReduce", "Optimizer", "Dataset", "Context"

# Fields of objects, which `objects` makes.
FIELDS = _table("""
training/step.py
  MeanMetricWrapper._fn: the function whose values it averages
  CompileMetrics._flat_metrics: lists of metrics, each with the name of its output
  CompileMetrics._flat_weighted_metrics: the same of those with weights
  keras.Model._loss_tracker: the metric that Keras weights by its first input
  keras.Model._compile_loss: the metrics of the losses of several outputs
  Tensor._keras_mask: the mask of what a model returns
training/feeding.py
  Context._rng: is another one when a seed is set again
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
  tf_keras.Model._training_state: its fit asks it where to begin, after on_train_begin
training/tensorflow_state.py
  Optimizer._learning_rate: the stored rate, a schedule, or a function
  tf_keras.optimizers.legacy._create_all_weights: makes the slots of a legacy optimizer
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
training/strategy.py
  Strategy.extended._collective_keys: from which a key is drawn for each transfer
  CollectiveKeys._instance_key_table: the last key of each group and device
  Strategy.extended._local_device_type: CPU or GPU
  Strategy.extended._num_replicas_in_sync: the number of workers
  keras.Model._distribute_strategy: in which scope it was made
training/variables.py
  Optimizer._distribution_strategy: in which scope it was made
  keras.Model._compile_loss: whether Keras has built the loss
  keras.Model._compile_metrics: whether Keras has built the metrics
  MirroredVariable._distribute_strategy: the strategy that made it
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
  keras.Model.make_predict_function.one_step_on_data_distributed: the function in which it runs predict_step
  keras.Model._maybe_symbolic_build: takes one batch to see its shapes, in fit
  keras.Optimizer._all_reduce_sum_gradients: sums the gradients of an optimizer
  keras.Optimizer._distributed_tf_update_step: updates a variable in a loop without strategy.run
  keras.src.saving.saving_lib.get_attr_skipset: makes an optimizer only to look at its attributes
  keras.src.losses.loss.scale_loss_for_distribution: divides a loss by the number of replicas
  keras.src.losses.loss.unscale_loss_for_distribution: multiplies a loss by it
training/graphs.py
  tensorflow.vectorized_map.loop_body: the name scope in which its function is traced
training/strategy.py
  keras.Model._make_function: gives the strategy a step of a model as the model's own method
replicas/callback.py
  keras.callbacks.CallbackList.callbacks:
      whoever is added to it in on_train_begin is called after all others from then on
training/tensorflow_state.py
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
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("_self_of", "_frame_of"):
            # The functions of Keras among our callers, by their names. Those of its public methods are known.
            name = node.args[0]
            if isinstance(name, ast.Constant) and name.value not in ("__init__", "compile"):
                yield str(name.value)
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


# The tests.


@pytest.mark.parametrize("api", NAMES, ids=str)
def test_a_private_function_or_class_is_where_it_was_and_is_called_as_it_was(api: PrivateApi) -> None:
    try:
        found = resolved(api.name)
    except (ImportError, AttributeError) as error:
        pytest.fail(api.changed(error, "it is there"))
    if api.parameters is not None:
        now = parameters(found)
        assert now == api.parameters, api.changed(now, api.parameters)


def objects(strategy: Any) -> dict[str, Any]:
    """One object of each kind whose private fields we use."""
    import tf_keras
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
    from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
    from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
    from tensorflow.python.eager import context

    class Noting(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            self.iterator = running_fit(self.model)[0]

    class Batches(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, number: int) -> Any:
            return arrays(8)

    noting, model = Noting(), perceptron(strategy)
    model.fit(tf.data.Dataset.from_tensor_slices(arrays(8)).batch(4), verbose=0, callbacks=[noting])
    tf.random.set_seed(1)
    with strategy.scope():
        adagrad, adam = keras.optimizers.Adagrad(), keras.optimizers.Adam(amsgrad=True)
        for optimizer in (adagrad, adam):
            optimizer.build(model.trainable_variables)
    compiled = compile_utils.CompileMetrics(["mae"], ["mae"])
    compiled.build(np.zeros((2, 1)), np.zeros((2, 1)))
    return {
        "keras.Variable": model.trainable_variables[0],
        "Handle": model.trainable_variables[0].value.values[0].handle,
        "Adagrad": adagrad,
        "Adam": adam,
        ARRAYS: ArrayDataAdapter(np.zeros((5, 2)), np.zeros(5), batch_size=2, shuffle="batch"),
        GENERATOR: GeneratorDataAdapter(iter([(np.zeros((3, 2)),)])),
        PY_DATASET: PyDatasetAdapter(Batches()),
        ITERATOR: noting.iterator,
        STRATEGY: strategy.extended,
        REDUCTION: strategy.extended._cross_device_ops,
        LAUNCHER: strategy.extended._cross_device_ops._launchers[0],
        OPTIMIZER: model.optimizer,
        DATASET: tf.data.Dataset.range(1),
        "ShuffledDataset": tf.data.Dataset.range(1).shuffle(1),
        SEEDED: context.context(),
        MODEL: model,
        BACKUP: keras.callbacks.BackupAndRestore("backup"),
        BOARD: keras.callbacks.TensorBoard("board"),
        MIRRORED: model.trainable_variables[0].value,
        WRAPPER: keras.metrics.MeanSquaredError(),
        "CompileMetrics": compiled,
        "tf_keras.Model": tf_keras.Sequential(),
        "tf_keras.optimizers.legacy": tf_keras.optimizers.legacy.SGD(),
        "CollectiveKeys": strategy.extended._collective_keys,
        "Tensor": keras.layers.Embedding(3, 2, mask_zero=True)(np.ones((1, 2))),
    }


def fields(strategy: Any) -> tuple[set[str], dict[str, tuple[Any, Any]]]:
    """The fields that are missing, and what some of them hold."""
    made = objects(strategy)
    expected = [api for api in FIELDS if api.is_expected]
    missing = {api.name for api in expected if not hasattr(made[api.name.rpartition(".")[0]], api.last)}
    array, generator = made[ARRAYS], made[GENERATOR]
    return missing, {
        "_shuffle": (array._shuffle, "batch"),
        "batch_size": (array.batch_size, 2),
        "_inputs": ([part.shape for part in array._inputs], [(5, 2), (5,)]),
        "_first_batches": (generator._first_batches[0][0].shape, (3, 2)),
    }


def test_objects_have_the_private_fields_that_we_use_and_these_hold_what_they_held(pool1: Pool) -> None:
    ((missing, held),) = pool1.run(fields)
    assert not missing, "".join(
        api.changed("no such field", "a field") for api in FIELDS if api.name in missing
    )
    for name, (value, expected) in held.items():
        assert value == expected, named(name).changed(value, expected)


def test_every_private_api_that_we_use_is_known_here_and_used_where_it_may_be() -> None:
    known = {part for api in ALL for part in api.name.split(".")}
    for name, file in used():
        assert name in known, f"src/replicast/{file} uses {name}: add it to the tables above"
        assert file.startswith(OURS), f"{name} in {file}: private APIs belong to training/"
    for api in (*NAMES, *FIELDS):
        source = (SOURCE / api.used_in).read_text()
        assert api.last in source, f"{api.used_in} does not use {api.name}"


def test_a_transfer_draws_its_key_where_we_give_ours() -> None:
    api = named("_next_instance_key")
    source = inspect.getsource(resolved(api.name.rpartition(".")[0]))
    calls = source.count("self._next_instance_key()")
    assert calls == 2, api.changed(f"{calls} places that draw a key", "all_reduce and _all_gather alone")


def test_the_coordination_service_has_the_limits_that_we_set() -> None:
    service = tf.compat.v1.ConfigProto().experimental.coordination_config
    service.cluster_register_timeout_in_ms = 30_000
    service.cluster_register_with_barrier = True
    service.heartbeat_timeout_in_ms = 10_000


def test_the_classes_of_variables_have_the_methods_that_we_replace() -> None:
    from tensorflow.python.distribute.values import MirroredVariable, SyncOnReadVariable

    for kind in (MirroredVariable, SyncOnReadVariable):
        assert parameters(kind.__init__)[:4] == ("self", "strategy", "values", "aggregation")
        assert isinstance(kind.handle, property)
    assert parameters(SyncOnReadVariable.assign)[:2] == ("self", "value")


_FIT = inspect.unwrap(keras.Model.fit)
_OPTIMIZER, _CALLBACKS = keras.optimizers.Optimizer, keras.callbacks
# What the source of Keras must say where we take part in it.
SAYS: list[tuple[Any, str]] = [
    (_OPTIMIZER._distributed_tf_update_step, "apply_grad_to_update_var"),
    (_OPTIMIZER._all_reduce_sum_gradients, "get_replica_context().all_reduce("),
    (_OPTIMIZER.add_variable_from_reference, "extended.colocate_vars_with("),
    (keras.ops.take, "backend.numpy.take("),
    (array_ops.gather, "params.sparse_read("),
    (
        Trainer._maybe_symbolic_build,
        "with self.distribute_strategy.scope():\n            self._symbolic_build(",
    ),
    (keras.Model._make_function, "self.distribute_strategy.run(step_function, args=(data,))"),
    (keras.Model.make_train_function, "self._make_function(self.train_step)"),
    (keras.Model.make_predict_function, "def one_step_on_data_distributed("),
    (keras.Model.compile, "self._loss_tracker = metrics_module.Mean"),
    (keras.Model.compile, "self._compile_loss = CompileLoss("),
    (_FIT, "self._maybe_symbolic_build(iterator=epoch_iterator)"),
    (_FIT, "self._initial_epoch or initial_epoch"),
    (loss.scale_loss_for_distribution, "num_replicas_in_sync"),
    (loss.unscale_loss_for_distribution, "num_replicas_in_sync"),
    (importlib.import_module(tf.vectorized_map.__module__), 'ops.name_scope("loop_body")'),
    (saving_lib.get_attr_skipset, "ref_obj = Optimizer(1.0)"),
    (saving_api, "saving_lib.save_model("),
    (saving_api, "saving_lib.save_weights_only("),
    (saving_api, ".save_model_to_hdf5("),
    (_CALLBACKS.BackupAndRestore._load_model, "self._training_metadata_path"),
    (_CALLBACKS.TensorBoard.set_model, "self.log_dir"),
    (_CALLBACKS.TensorBoard.on_train_batch_begin, "not self._should_trace"),
    (_CALLBACKS.CSVLogger.on_train_begin, "self.filename"),
]


@pytest.mark.parametrize(("where", "text"), SAYS, ids=[text for _, text in SAYS])
def test_keras_calls_and_keeps_what_we_replace_or_look_for(where: Any, text: str) -> None:
    source = inspect.getsource(where)
    assert text in source, f"{where} has changed: src/replicast/training needs {text!r} in it\n{source}"


def test_the_locals_of_fit_have_the_names_that_we_know() -> None:
    for name in ("callbacks", "epoch_iterator", "initial_epoch"):
        assert name in _FIT.__code__.co_varnames, named("Model.fit").changed(_FIT.__code__.co_varnames, name)
    assert keras.optimizers.SGD()._distribution_strategy is tf.distribute.get_strategy()


def test_callbacks_and_functions_that_save_have_the_parameters_that_we_replace() -> None:
    methods = [keras.Model.save, keras.Model.save_weights, keras.Model.export]
    functions = [saving_lib.save_model, saving_lib.save_weights_only, legacy_h5_format.save_model_to_hdf5]
    for save in (*methods, *functions, type(keras.export.ExportArchive()).write_out):
        assert "filepath" in parameters(save)


def test_keras_tells_what_of_a_model_is_built() -> None:
    model = keras.Sequential([keras.Sequential([keras.layers.Dense(1)])])
    model.compile("sgd", "mse", metrics=["mae"])
    parts = [*model._flatten_layers(include_self=False), model._compile_metrics, model._compile_loss]
    assert [part.built for part in parts] == [False, False, False, False]
    model.fit(np.zeros((2, 1)), np.zeros((2, 1)), verbose=0)
    assert [part.built for part in parts] == [True, True, True, True]


def test_a_model_without_call_has_that_of_keras() -> None:
    class Without(keras.Model):
        pass

    assert Without.call is keras.Model.call
    assert keras.Sequential.call is not keras.Model.call


def test_the_variable_behind_a_variable_of_keras_can_be_made_again() -> None:
    variable = keras.Variable(np.array([1.0, 2.0], "float32"))
    first = variable.value
    variable._initialize(variable.numpy())
    assert variable.value is not first
    assert variable.numpy().tolist() == [1.0, 2.0]


def test_a_variable_that_is_written_is_told_from_one_that_is_read() -> None:
    api = named("get_read_write_resource_inputs")
    tell, read, written = resolved(api.name), tf.Variable(1.0), tf.Variable(1.0)

    @tf.function
    def both() -> None:
        written.assign(read + 1.0)

    writes = [tell(op)[1] for op in both.get_concrete_function().graph.get_operations()]
    found = sum(len(handles) for handles in writes)
    assert found == 1, api.changed(f"{found} writes", "1 write")


def calls_seen(strategy: Any) -> list[Any]:
    called, make = [], strategy.experimental_distribute_dataset

    def noting(dataset: Any) -> Any:
        call = keras_call()
        called.append(call and (call.method, call.steps, type(call.adapter).__name__, type(call.callbacks)))
        return make(dataset)

    model, (x, y) = perceptron(strategy), arrays()
    rows = tf.data.Dataset.from_tensor_slices((x, y)).batch(10)
    with mock.patch.object(strategy, "experimental_distribute_dataset", noting):
        validation: dict[str, Any] = {"validation_data": rows.repeat(), "validation_steps": 3}
        model.fit(x, y, **validation, epochs=2, verbose=0, callbacks=[keras.callbacks.Callback()])
        model.evaluate(rows, verbose=0)
        model.predict(rows.map(lambda x, y: x), steps=2, verbose=0)
    return called


def test_keras_asks_for_its_data_from_where_we_look_before_it_calls_any_callback(pool1: Pool) -> None:
    (found,) = pool1.run(calls_seen)
    expected = [
        ("fit", None, "ArrayDataAdapter", list),
        ("validation", 3, "TFDatasetAdapter", keras.callbacks.CallbackList),
        ("evaluate", None, "TFDatasetAdapter", type(None)),
        ("predict", 2, "TFDatasetAdapter", type(None)),
    ]
    assert found == expected, named("EpochIterator.__init__").changed(found, expected)


def test_an_optimizer_names_what_it_remembers_after_the_weight_in_the_order_of_the_weights() -> None:
    weights = [keras.Variable(np.zeros(2), name=name) for name in ("kernel", "bias")]
    remembered = {
        keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True): ["momentum", "average"],
        keras.optimizers.Adam(): ["momentum", "velocity"],
        keras.optimizers.Adagrad(initial_accumulator_value=0.25): ["accumulator"],
    }
    for optimizer, kinds in remembered.items():
        optimizer.build(weights)
        last = [variable.path.rpartition("/")[2] for variable in optimizer.variables]
        for kind in kinds:
            expected = [f"{weight.path.replace('/', '_')}_{kind}" for weight in weights]
            found = [name for name in last if name in expected]
            assert found == expected, named("Optimizer.variables").changed(found, expected)
    assert keras.optimizers.Adagrad(initial_accumulator_value=0.25).initial_accumulator_value == 0.25
    adam = keras.optimizers.Adam()
    assert keras.optimizers.LossScaleOptimizer(adam).inner_optimizer is adam


class Counted(keras.callbacks.Callback):
    """Notes how many iterators there were at the first batch of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0
        self.at_first_batch: list[int] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == 0:
            self.at_first_batch.append(self.made)


def iterators_made(strategy: Any) -> dict[str, tuple[list[int], int]]:
    make, found = feeding.Share.__iter__, {}
    rows = tf.data.Dataset.from_tensor_slices(arrays())
    lengths = {
        "known": {"x": rows.batch(50)},
        "unknown": {"x": rows.batch(50).filter(lambda x, y: True)},
        "none": {"x": rows.repeat().batch(50), "steps_per_epoch": 3},
    }
    for name, data in lengths.items():
        counted = Counted()

        def counting(share: Any, counted: Counted = counted) -> Any:
            counted.made += not only_looks_at_shapes()
            return make(share)

        with mock.patch.object(feeding.Share, "__iter__", counting):
            perceptron(strategy).fit(**data, epochs=3, verbose=0, shuffle=False, callbacks=[counted])
        found[name] = (counted.at_first_batch, counted.made)
    return found


def test_the_iterator_of_a_dataset_is_one_that_keras_hands_to_its_graphs() -> None:
    iterator = feeding.DataPass(tf.data.Dataset.range(3), None)
    assert isinstance(iterator, tf.data.Iterator)
    assert type(iter(tf.data.Dataset.range(3))) in feeding.DataPass.__mro__
    assert [int(tf.function(lambda it: it.get_next())(iterator)), *map(int, iterator)] == [0, 1, 2]


def test_keras_reads_ahead_of_a_generator_in_the_last_stage_of_its_dataset() -> None:
    from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter

    read = []

    def numbers() -> Any:
        for number in range(100):
            read.append(number)
            yield (np.full(1, number),)

    (inner,) = GeneratorDataAdapter(numbers()).get_tf_dataset()._inputs()
    assert [int(batch[0][0]) for batch in inner.take(5)] == [0, 1, 2, 3, 4]
    assert len(read) <= 5


def test_keras_makes_two_iterators_an_epoch_where_it_knows_the_length_and_uses_the_first(
    pool1: Pool,
) -> None:
    (found,) = pool1.run(iterators_made)
    expected = {"known": ([1, 3, 5], 6), "unknown": ([1, 2, 3], 3), "none": ([1, 1, 1], 1)}
    assert found == expected, named("_enumerate_iterator").changed(found, expected)


def test_a_callback_that_is_added_to_those_of_a_running_fit_is_called_last() -> None:
    said: list[str] = []

    class Speaking(keras.callbacks.Callback):
        def __init__(self, name: str, adds: keras.callbacks.Callback | None = None) -> None:
            super().__init__()
            self.name, self.adds = name, adds

        def on_train_begin(self, logs: Any = None) -> None:
            said.append(f"{self.name} begins")
            if self.adds is not None:
                found = callbacks_of(self.model)
                assert found is not None
                found.append(self.adds)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            said.append(f"{self.name} ends")

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    callbacks = [Speaking("first", adds=Speaking("added")), Speaking("second")]
    model.fit(np.zeros((4, 2)), np.zeros((4, 1)), verbose=0, callbacks=callbacks)
    names = ("first", "second", "added")
    expected = [f"{name} {what}" for what in ("begins", "ends") for name in names]
    assert said == expected, named("CallbackList.callbacks").changed(said, expected)
    assert callbacks_of(model) is None


def test_keras_draws_without_a_seed_from_the_generator_of_the_thread() -> None:
    from replicast.training.variables import global_seed_generator

    keras.utils.set_random_seed(1)
    assert global_seed_generator() is None
    keras.random.uniform(())
    assert isinstance(global_seed_generator(), keras.random.SeedGenerator)
    source = inspect.getsource(inspect.getmodule(keras.random.SeedGenerator).draw_seed)
    assert "global_seed_generator().next(ordered=False)" in source
