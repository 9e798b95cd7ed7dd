"""Every private API of TensorFlow and Keras that replicast uses: if one changes, a test names it.

The message says which API it is, which file of ours uses it and what we need of it: see `private_apis.py`.
"""

from __future__ import annotations

import inspect
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.legacy.saving import legacy_h5_format
from keras.src.saving import saving_api, saving_lib
from tensorflow.python.ops import array_ops

from replicast.training import feeding
from replicast.training.keras_call import Trainer, keras_call, only_looks_at_shapes
from replicast.training.resuming import _running_fit as running_fit
from replicast.training.resuming import callbacks_of
from tests.pool import Pool
from tests.workers import private_apis
from tests.workers.private_apis import PrivateApi, named
from tests.workers.recipes import arrays, perceptron


def parameters(function: Any) -> list[str]:
    return [*private_apis.parameters(function)]


@pytest.mark.parametrize("api", private_apis.NAMES, ids=str)
def test_a_private_function_or_class_is_where_it_was_and_is_called_as_it_was(api: PrivateApi) -> None:
    try:
        found = private_apis.resolved(api.name)
    except (ImportError, AttributeError) as error:
        pytest.fail(api.changed(error, "it is there"))
    if api.parameters is not None:
        now = private_apis.parameters(found)
        assert now == api.parameters, api.changed(now, api.parameters)


def objects(strategy: Any) -> dict[str, Any]:
    """One object of each kind whose private fields we use."""
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
    return {
        "keras.Variable": model.trainable_variables[0],
        "Handle": model.trainable_variables[0].value.values[0].handle,
        "Adagrad": adagrad,
        "Adam": adam,
        private_apis.ARRAYS: ArrayDataAdapter(np.zeros((5, 2)), np.zeros(5), batch_size=2, shuffle="batch"),
        private_apis.GENERATOR: GeneratorDataAdapter(iter([(np.zeros((3, 2)),)])),
        private_apis.PY_DATASET: PyDatasetAdapter(Batches()),
        private_apis.ITERATOR: noting.iterator,
        private_apis.STRATEGY: strategy.extended,
        private_apis.REDUCTION: strategy.extended._cross_device_ops,
        private_apis.LAUNCHER: strategy.extended._cross_device_ops._launchers[0],
        private_apis.OPTIMIZER: model.optimizer,
        private_apis.DATASET: tf.data.Dataset.range(1),
        "ShuffledDataset": tf.data.Dataset.range(1).shuffle(1),
        private_apis.SEEDED: context.context(),
        private_apis.MODEL: model,
        private_apis.BACKUP: keras.callbacks.BackupAndRestore("backup"),
        private_apis.BOARD: keras.callbacks.TensorBoard("board"),
        private_apis.MIRRORED: model.trainable_variables[0].value,
        private_apis.WRAPPER: keras.metrics.MeanSquaredError(),
        "Tensor": keras.layers.Embedding(3, 2, mask_zero=True)(np.ones((1, 2))),
    }


def fields(strategy: Any) -> tuple[set[str], dict[str, tuple[Any, Any]]]:
    """The fields that are missing, and what some of them hold."""
    made = objects(strategy)
    expected = [api for api in private_apis.FIELDS if api.is_expected]
    missing = {api.name for api in expected if not hasattr(made[api.name.rpartition(".")[0]], api.last)}
    array, generator = made[private_apis.ARRAYS], made[private_apis.GENERATOR]
    return missing, {
        "_shuffle": (array._shuffle, "batch"),
        "batch_size": (array.batch_size, 2),
        "_inputs": ([part.shape for part in array._inputs], [(5, 2), (5,)]),
        "_first_batches": (generator._first_batches[0][0].shape, (3, 2)),
    }


def test_objects_have_the_private_fields_that_we_use_and_these_hold_what_they_held(pool1: Pool) -> None:
    ((missing, held),) = pool1.run(fields)
    assert not missing, "".join(
        api.changed("no such field", "a field") for api in private_apis.FIELDS if api.name in missing
    )
    for name, (value, expected) in held.items():
        assert value == expected, named(name).changed(value, expected)


def test_every_private_api_that_we_use_is_known_here_and_used_where_it_may_be() -> None:
    known = {part for api in private_apis.ALL for part in api.name.split(".")}
    for name, file in private_apis.used():
        assert name in known, f"src/replicast/{file} uses {name}: add it to {private_apis.__name__}"
        assert file.startswith(private_apis.OURS), f"{name} in {file}: private APIs belong to training/"
    for api in (*private_apis.NAMES, *private_apis.FIELDS):
        source = (private_apis.SOURCE / api.used_in).read_text()
        assert api.last in source, f"{private_apis.__name__}: {api.used_in} does not use {api.name}"


def test_a_transfer_draws_its_key_where_we_give_ours() -> None:
    api = named("_next_instance_key")
    source = inspect.getsource(private_apis.resolved(api.name.rpartition(".")[0]))
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
        assert parameters(kind.__init__)[:4] == ["self", "strategy", "values", "aggregation"]
        assert isinstance(kind.handle, property)
    assert parameters(SyncOnReadVariable.assign)[:2] == ["self", "value"]


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
    (_FIT, "self._maybe_symbolic_build(iterator=epoch_iterator)"),
    (_FIT, "self._initial_epoch or initial_epoch"),
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
    if hasattr(_CALLBACKS, "OrbaxCheckpoint"):  # not in every Keras 3
        assert parameters(_CALLBACKS.OrbaxCheckpoint._save_checkpoint) == ["self", "step", "logs"]
    methods = [keras.Model.save, keras.Model.save_weights, keras.Model.export]
    functions = [saving_lib.save_model, saving_lib.save_weights_only, legacy_h5_format.save_model_to_hdf5]
    for save in (*methods, *functions, keras.export.ExportArchive.write_out):
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
    tell, read, written = private_apis.resolved(api.name), tf.Variable(1.0), tf.Variable(1.0)

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
