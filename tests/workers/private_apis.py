"""The private APIs of TensorFlow and Keras that we rest on: what each is, who uses it, and what for.

`test_private_apis.py` looks whether they are as described here, and whether any is used that is not.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import replicast
from replicast.launcher.checks import release

SOURCE = Path(replicast.__file__).parent
OURS = ("training", "coordination.py")
"""Where private APIs may be used."""
NOT_PRIVATE = frozenset({"_exit", "_getframe", "_replace"})
"""Names with an underscore that Python documents."""


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


_CONTEXT = "tensorflow.python.eager.context"
_LAUNCHER = "tensorflow.python.distribute.cross_device_utils.CollectiveReplicaLauncher"
_EXTENDED = "tensorflow.python.distribute.collective_all_reduce_strategy.CollectiveAllReduceExtended"
_ADAPTERS = "keras.src.trainers.data_adapters"
_ITERATOR = "keras.src.trainers.epoch_iterator.EpochIterator"
_SEND = ("self", "input_tensor", "control_input", "options")

NAMES = [
    PrivateApi(
        f"{_CONTEXT}.Context.set_config_key_value",
        "coordination.py",
        "writes a key of the coordination service unless it is there",
        ("self", "key", "value"),
    ),
    PrivateApi(
        f"{_CONTEXT}.Context.get_config_key_value",
        "coordination.py",
        "waits for a key, at most so many milliseconds",
        ("self", "key", "timeout_in_ms"),
    ),
    PrivateApi(
        f"{_CONTEXT}.Context.delete_config_key_value", "coordination.py", "removes a key", ("self", "key")
    ),
    PrivateApi(
        f"{_CONTEXT}.Context.get_task_states",
        "coordination.py",
        "returns the error of each task that the service has lost, by job and index",
        ("self", "job_configs"),
    ),
    PrivateApi(
        f"{_CONTEXT}.Context.abort_collective_ops",
        "coordination.py",
        "ends transfers that wait for a worker that has failed",
        ("self", "code", "message"),
    ),
    PrivateApi(f"{_CONTEXT}.context", "coordination.py", "the context of this process", ()),
    PrivateApi(f"{_CONTEXT}.global_seed", "training/variables.py", "the seed that the user has set", ()),
    PrivateApi(
        f"{_LAUNCHER}.__init__",
        "training/collectives.py",
        "makes a launcher like another one",
        ("self", "group_key", "group_size", "collective_keys", "device", "options"),
    ),
    PrivateApi(
        f"{_EXTENDED}._update_config_proto",
        "training/collectives.py",
        "its result configures the server and the coordination service",
        ("self", "config_proto"),
    ),
    PrivateApi(
        f"{_LAUNCHER}.all_reduce",
        "training/collectives.py",
        "starts every dense transfer, and is given its tensor first",
        _SEND,
    ),
    PrivateApi(
        f"{_LAUNCHER}._all_gather",
        "training/collectives.py",
        "starts every sparse transfer, and is given its tensor first",
        ("self", "input_tensor", "options"),
    ),
    PrivateApi(
        f"{_LAUNCHER}._next_instance_key",
        "training/collectives.py",
        "is where a transfer draws its key",
        ("self",),
    ),
    PrivateApi(
        f"{_EXTENDED}.__init__",
        "training/collectives.py",
        "makes what is behind MultiWorkerMirroredStrategy",
        ("self", "container_strategy", "cluster_resolver", "communication_options", "devices"),
    ),
    PrivateApi(
        f"{_EXTENDED}._call_for_each_replica",
        "training/collectives.py",
        "runs a function in the thread of each replica",
        ("self", "fn", "args", "kwargs"),
    ),
    PrivateApi(
        f"{_EXTENDED}._use_merge_call",
        "training/collectives.py",
        "says whether optimizers merge replicas, which they cannot inside tf.cond",
        ("self",),
    ),
    PrivateApi(
        f"{_EXTENDED}._create_variable",
        "training/collectives.py",
        "makes every variable of the scope",
        ("self", "next_creator", "kwargs"),
    ),
    PrivateApi(
        f"{_EXTENDED}._get_variable_creator_initial_value",
        "training/collectives.py",
        "broadcasts worker 0's initial value",
        ("self", "replica_id", "device", "primary_var", "kwargs"),
    ),
    PrivateApi(
        f"{_EXTENDED}._replica_ctx_all_reduce",
        "training/collectives.py",
        "is how an optimizer sums its gradients",
        ("self", "reduce_op", "value", "options"),
    ),
    PrivateApi(
        "tensorflow.python.framework.auto_control_deps_utils.get_read_write_resource_inputs",
        "training/variables.py",
        "tells which variables an operation writes",
        ("op",),
    ),
    PrivateApi(
        f"{_ITERATOR}.catch_stop_iteration",
        "training/feeding.py",
        "surrounds all steps of fit, evaluate and predict",
        ("self",),
    ),
    PrivateApi(
        "keras.src.callbacks.callback_list",
        "training/feeding.py",
        "to recognise its frames, which call callbacks",
    ),
    PrivateApi(_ITERATOR, "training/keras_call.py", "its constructor asks a strategy for the data of a call"),
    PrivateApi(f"{_ADAPTERS}.array_data_adapter.ArrayDataAdapter", "training/strategy.py", "holds arrays"),
    PrivateApi(
        f"{_ADAPTERS}.generator_data_adapter.GeneratorDataAdapter", "training/resuming.py", "a generator"
    ),
    PrivateApi(f"{_ADAPTERS}.py_dataset_adapter.PyDatasetAdapter", "training/resuming.py", "a PyDataset"),
    PrivateApi(f"{_ADAPTERS}.tf_dataset_adapter.TFDatasetAdapter", "training/strategy.py", "a tf.data"),
    PrivateApi(
        "tensorflow.python.distribute.values.MirroredVariable",
        "training/variables.py",
        "the class of variables that are equal on all workers",
    ),
    PrivateApi(
        "tensorflow.python.distribute.values.SyncOnReadVariable",
        "training/variables.py",
        "the class of variables that each worker writes",
    ),
    PrivateApi(
        "tensorflow.python.distribute.values.SyncOnReadVariable._update_replica",
        "training/variables.py",
        "how a replica writes such a variable",
    ),
    PrivateApi(
        "tensorflow.python.distribute.values.SyncOnReadVariable._get_cross_replica",
        "training/variables.py",
        "how such a variable is read outside a step",
    ),
    PrivateApi(
        "tensorflow.python.ops.resource_variable_ops.ResourceVariable",
        "training/variables.py",
        "a variable that is none of the strategy's, also when it is created in the scope",
    ),
    PrivateApi(
        "tensorflow.python.distribute.values_util.is_saving_non_distributed",
        "training/variables.py",
        "whether a model is being exported without its strategy",
    ),
    PrivateApi(
        "tensorflow.python.distribute.values.SyncOnReadVariable._get",
        "training/variables.py",
        "how a replica reads such a variable",
    ),
    PrivateApi(
        "tensorflow.python.distribute.values.SyncOnReadVariable._gather_saveables_for_checkpoint",
        "training/variables.py",
        "what a tf.train.Checkpoint saves of such a variable",
    ),
    PrivateApi(
        "tensorflow.python.distribute.values._SyncOnReadSaveable.restore",
        "training/variables.py",
        "how a tf.train.Checkpoint restores such a variable",
    ),
    PrivateApi(
        "tensorflow.python.distribute.values.DistributedVariable._primary",
        "training/variables.py",
        "the variable on this worker",
    ),
    PrivateApi(
        "tensorflow.python.data.ops.iterator_ops.OwnedIterator",
        "training/feeding.py",
        "what iter(dataset) makes",
    ),
    PrivateApi(
        "keras.src.backend.tensorflow.trainer",
        "training/keras_call.py",
        "the module of the class that has fit",
    ),
    PrivateApi("keras.src.saving.saving_lib", "training/keras_call.py", "to recognise its frames"),
    PrivateApi(
        "tensorflow.python.eager.record.could_possibly_record",
        "training/step.py",
        "whether a tape is recording",
        (),
    ),
    PrivateApi(
        "keras.src.trainers.compile_utils.CompileMetrics.metrics",
        "training/step_metrics.py",
        "the metrics of compile, one by one",
    ),
    PrivateApi("keras.Model._flatten_layers", "training/variables.py", "all layers at any depth"),
    PrivateApi("keras.callbacks.ModelCheckpoint._get_file_path", "training/writing.py", "where it writes"),
    PrivateApi("keras.callbacks.ModelCheckpoint._save_model", "training/writing.py", "when it writes"),
    PrivateApi(
        "keras.Variable._initialize",
        "training/variables.py",
        "makes TensorFlow's variable behind one of Keras",
    ),
    PrivateApi(
        f"{_EXTENDED}._container_strategy",
        "training/collectives.py",
        "the strategy that it is of",
    ),
    PrivateApi(
        "keras.optimizers.LossScaleOptimizer._tf_apply",
        "training/collectives.py",
        "refuses to work in a scope outside of strategy.run",
        ("self", "grads", "trainable_variables"),
    ),
    PrivateApi(
        "keras.optimizers.LossScaleOptimizer._common_apply",
        "training/collectives.py",
        "applies the gradients if they are finite",
        ("self", "grads", "trainable_variables"),
    ),
    PrivateApi(
        "keras.src.backend.common.global_state",
        "training/variables.py",
        "holds the generator of unseeded draws, for each thread",
    ),
    PrivateApi(
        "keras.src.random.seed_generator.GLOBAL_SEED_GENERATOR",
        "training/variables.py",
        "the name of that generator",
    ),
    PrivateApi(
        "keras.src.saving.saving_lib.save_model", "training/writing.py", "writes every .keras file or folder"
    ),
    PrivateApi(
        "keras.src.saving.saving_lib.save_weights_only", "training/writing.py", "writes every .weights.h5"
    ),
    PrivateApi("keras.src.legacy.saving.legacy_h5_format", "training/writing.py", "to replace its function"),
    PrivateApi(
        "keras.src.legacy.saving.legacy_h5_format.save_model_to_hdf5",
        "training/writing.py",
        "writes every .h5 file",
    ),
    PrivateApi("keras.src.utils.io_utils", "training/writing.py", "to replace its function"),
    PrivateApi(
        "keras.src.utils.io_utils.ask_to_proceed_with_overwrite",
        "training/writing.py",
        "asks whether to replace a file",
        ("filepath",),
    ),
    PrivateApi(
        "keras.utils.Progbar._estimate_step_duration",
        "training/resuming.py",
        "the time per batch that a progress bar shows",
        ("self", "current", "now"),
    ),
]
"""Functions and classes, by the names they are found under."""

WRAPPER = "MeanMetricWrapper"
ARRAYS, GENERATOR, PY_DATASET = "ArrayDataAdapter", "GeneratorDataAdapter", "PyDatasetAdapter"
ITERATOR, STRATEGY, LAUNCHER = "EpochIterator", "Strategy.extended", "CollectiveReplicaLauncher"
MODEL, BACKUP, MIRRORED = "keras.Model", "BackupAndRestore", "MirroredVariable"
BOARD = "TensorBoard"
REDUCTION, OPTIMIZER, DATASET, SEEDED = "CollectiveAllReduce", "Optimizer", "Dataset", "Context"

FIELDS = [
    PrivateApi(f"{WRAPPER}._fn", "training/step_metrics.py", "the function whose values it averages"),
    PrivateApi(
        f"{MODEL}._loss_tracker", "training/step.py", "the metric that Keras weights by its first input"
    ),
    PrivateApi("Tensor._keras_mask", "training/step_metrics.py", "the mask of what a model returns"),
    PrivateApi(f"{ARRAYS}._inputs", "training/strategy.py", "the arrays, which each worker slices"),
    PrivateApi(f"{ARRAYS}._shuffle", "training/strategy.py", "what fit was told about the order"),
    PrivateApi(f"{ARRAYS}.batch_size", "training/strategy.py", "the rows of a batch"),
    PrivateApi(f"{GENERATOR}._first_batches", "training/strategy.py", "what was taken to see the shapes"),
    PrivateApi(f"{PY_DATASET}.py_dataset", "training/resuming.py", "the PyDataset of the user"),
    PrivateApi(f"{PY_DATASET}.enqueuer", "training/resuming.py", "whether batches are read ahead"),
    PrivateApi(f"{PY_DATASET}.shuffle", "training/resuming.py", "whether the order of batches is drawn"),
    PrivateApi(f"{PY_DATASET}.num_batches", "training/resuming.py", "how many there are"),
    PrivateApi(
        f"{PY_DATASET}._epoch",
        "training/resuming.py",
        "from Keras 3.16 on, the number from which it draws the order of batches",
        since_keras=(3, 16),
    ),
    PrivateApi(f"{ITERATOR}.data_adapter", "training/resuming.py", "what the user passed as data"),
    PrivateApi(f"{ITERATOR}.steps_per_epoch", "training/resuming.py", "how many batches an epoch has"),
    PrivateApi(f"{ITERATOR}.steps_per_execution", "training/resuming.py", "how many batches a call takes"),
    PrivateApi(f"{ITERATOR}._num_batches", "training/resuming.py", "the length of the data"),
    PrivateApi(f"{ITERATOR}._current_iterator", "training/resuming.py", "the iterator that fit goes on with"),
    PrivateApi(f"{ITERATOR}._steps_seen", "training/resuming.py", "how much of it was used"),
    PrivateApi(f"{ITERATOR}._distributed_dataset", "training/resuming.py", "what the strategy made of it"),
    PrivateApi(f"{STRATEGY}._cross_device_ops", "training/collectives.py", "transfers between devices"),
    PrivateApi(f"{STRATEGY}._host_cross_device_ops", "training/collectives.py", "transfers between hosts"),
    PrivateApi(f"{STRATEGY}._local_device_type", "training/strategy.py", "CPU or GPU"),
    PrivateApi(f"{STRATEGY}._num_workers", "training/collectives.py", "whether there are other workers"),
    PrivateApi(f"{STRATEGY}._num_replicas_in_sync", "training/strategy.py", "the number of workers"),
    PrivateApi(f"{REDUCTION}._launchers", "training/collectives.py", "the list of launchers to replace"),
    PrivateApi(f"{LAUNCHER}._group_key", "training/collectives.py", "to make a launcher like it"),
    PrivateApi(f"{LAUNCHER}._group_size", "training/collectives.py", "to make a launcher like it"),
    PrivateApi(f"{LAUNCHER}._collective_keys", "training/collectives.py", "to make a launcher like it"),
    PrivateApi(f"{LAUNCHER}._device", "training/collectives.py", "to make a launcher like it"),
    PrivateApi(f"{LAUNCHER}._options", "training/collectives.py", "to make a launcher like it"),
    PrivateApi(f"{OPTIMIZER}._distribution_strategy", "training/strategy.py", "in which scope it was made"),
    PrivateApi(f"{STRATEGY}._task_id", "training/collectives.py", "which worker this is"),
    PrivateApi(f"{OPTIMIZER}._trainable_variables", "training/collectives.py", "what it was built with"),
    PrivateApi(f"{MODEL}._distribute_strategy", "training/strategy.py", "in which scope it was made"),
    PrivateApi(f"{MODEL}._compile_loss", "training/variables.py", "whether Keras has built the loss"),
    PrivateApi(f"{MODEL}._compile_metrics", "training/variables.py", "whether Keras has built the metrics"),
    PrivateApi(f"{BACKUP}._training_metadata_path", "training/writing.py", "where it notes the epoch"),
    PrivateApi(f"{BOARD}._should_trace", "training/writing.py", "whether it profiles"),
    PrivateApi(f"{MIRRORED}._distribute_strategy", "training/variables.py", "the strategy that made it"),
    PrivateApi(f"{DATASET}._variant_tensor", "training/feeding.py", "to make a dataset of our own class"),
    PrivateApi(f"{SEEDED}._rng", "training/variables.py", "is another one when a seed is set again"),
]
"""Fields of objects. `test_private_apis.py` makes the objects."""

INITIAL_EPOCH = PrivateApi(
    "keras.Model._initial_epoch", "training/resuming.py", "fit begins with it, read after on_train_begin"
)
LOCALS = {
    "fit": PrivateApi(
        "keras.Model.fit",
        "training/resuming.py",
        "its local names callbacks, epoch_iterator, initial_epoch",
    ),
    "data": PrivateApi(
        "keras.Model.fit, evaluate, predict",
        "training/keras_call.py",
        "each makes its EpochIterator itself, whose __init__ calls experimental_distribute_dataset",
    ),
    "step": PrivateApi(
        "keras.Model._make_function",
        "training/strategy.py",
        "gives the strategy a step of a model as the model's own method",
    ),
    "predict": PrivateApi(
        "keras.Model.make_predict_function",
        "training/keras_call.py",
        "runs predict_step in a function that is called one_step_on_data_distributed",
    ),
    "build": PrivateApi(
        "keras.Model._maybe_symbolic_build",
        "training/keras_call.py",
        "takes one batch to see its shapes, in fit",
    ),
    "iterators": PrivateApi(
        f"{_ITERATOR}._enumerate_iterator",
        "training/resuming.py",
        "makes two iterators an epoch where it knows the length, and uses the first; else one",
    ),
    "order": PrivateApi(
        "keras.callbacks.CallbackList.callbacks",
        "replicas/callback.py",
        "whoever is added to it in on_train_begin is called after all others from then on",
    ),
    "names": PrivateApi(
        "keras.Optimizer.variables",
        "training/keras_state.py",
        "what remembers something of a weight is named after it, in the order of the weights",
    ),
}
"""How Keras calls us, and in which order."""

ALL = [*NAMES, *FIELDS, INITIAL_EPOCH, *LOCALS.values()]


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
