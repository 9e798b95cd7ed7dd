"""Every private API of TensorFlow and Keras that we rest on: these fail, by name, on the day one changes."""

from __future__ import annotations

import inspect
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from replicast.strategy import feeding, start_at_epoch
from replicast.strategy.caller import keras_call, only_looks_at_shapes
from replicast.strategy.resuming import callbacks_of
from tests.pool import Pool
from tests.workers.recipes import arrays, perceptron


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_coordination_service_calls() -> None:
    from tensorflow.python.eager import context

    kind = context.Context
    assert parameters(kind.set_config_key_value) == ["self", "key", "value"]
    assert parameters(kind.get_config_key_value) == ["self", "key", "timeout_in_ms"]
    assert parameters(kind.abort_collective_ops) == ["self", "code", "message"]
    assert parameters(context.global_seed) == []


def test_the_launcher_draws_its_keys_where_we_give_ours() -> None:
    from tensorflow.python.distribute import cross_device_ops, cross_device_utils

    launcher = cross_device_utils.CollectiveReplicaLauncher
    fields = ["self", "group_key", "group_size", "collective_keys", "device", "options"]
    assert parameters(launcher.__init__) == fields
    source = inspect.getsource(launcher)
    assert source.count("self._next_instance_key()") == 2, "a collective that draws its key elsewhere"
    assert "_launchers" in inspect.getsource(cross_device_ops.CollectiveAllReduce.__init__)


def test_the_class_behind_the_strategy_has_the_methods_that_we_replace() -> None:
    from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended

    assert parameters(CollectiveAllReduceExtended._use_merge_call) == ["self"]
    reduce = CollectiveAllReduceExtended._replica_ctx_all_reduce
    assert parameters(reduce) == ["self", "reduce_op", "value", "options"]
    assert parameters(CollectiveAllReduceExtended._create_variable) == ["self", "next_creator", "kwargs"]
    created = parameters(CollectiveAllReduceExtended.__init__)
    assert created[:4] == ["self", "container_strategy", "cluster_resolver", "communication_options"]


def test_the_classes_of_variables_have_the_methods_that_we_replace() -> None:
    from tensorflow.python.distribute.values import MirroredVariable, SyncOnReadVariable

    for kind in (MirroredVariable, SyncOnReadVariable):
        assert parameters(kind.__init__)[:4] == ["self", "strategy", "values", "aggregation"]
        assert isinstance(kind.handle, property)
    assert parameters(SyncOnReadVariable._update_replica) == ["self", "update_fn", "value", "kwargs"]
    assert parameters(SyncOnReadVariable._get_cross_replica) == ["self"]
    assert parameters(SyncOnReadVariable.assign)[:2] == ["self", "value"]


def test_an_optimizer_asks_the_strategy_where_we_answer() -> None:
    kind = keras.optimizers.Optimizer
    assert "apply_grad_to_update_var" in inspect.getsource(kind._distributed_tf_update_step)
    assert "get_replica_context().all_reduce(" in inspect.getsource(kind._all_reduce_sum_gradients)
    assert "extended.colocate_vars_with(" in inspect.getsource(kind.add_variable_from_reference)
    assert keras.optimizers.SGD()._distribution_strategy is tf.distribute.get_strategy()


def test_keras_builds_a_model_in_the_scope_of_its_strategy() -> None:
    from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

    assert issubclass(keras.Model, TensorFlowTrainer)
    source = inspect.getsource(TensorFlowTrainer._maybe_symbolic_build)
    assert "with self.distribute_strategy.scope():\n            self._symbolic_build(" in source


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
    from tensorflow.python.framework.auto_control_deps_utils import get_read_write_resource_inputs

    read, written = tf.Variable(1.0), tf.Variable(1.0)

    @tf.function
    def both() -> None:
        written.assign(read + 1.0)

    writes = [
        get_read_write_resource_inputs(op)[1] for op in both.get_concrete_function().graph.get_operations()
    ]
    assert sum(len(handles) for handles in writes) == 1


def test_keras_gives_a_step_of_a_model_to_the_strategy_as_its_own_method() -> None:
    source = inspect.getsource(keras.Model._make_function)
    assert "self.distribute_strategy.run(step_function, args=(data,))" in source
    assert "self._make_function(self.train_step)" in inspect.getsource(keras.Model.make_train_function)


def test_keras_fields_of_arrays_and_generators() -> None:
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
    from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter

    adapter = ArrayDataAdapter(np.zeros((5, 2)), np.zeros(5), batch_size=2, shuffle="batch")
    assert (adapter._shuffle, adapter.batch_size) == ("batch", 2)
    assert [part.shape for part in adapter._inputs] == [(5, 2), (5,)]
    generator = GeneratorDataAdapter(iter([(np.zeros((3, 2)),)]))
    assert generator._first_batches[0][0].shape == (3, 2)


class Spy(keras.callbacks.Callback):
    pass


def calls_seen(strategy: Any) -> list[Any]:
    from replicast.strategy import strategy as module

    seen: list[Any] = []
    original = module.keras_call

    def looking() -> Any:
        # One frame more than usual lies between us and Keras.
        import sys

        frame = sys._getframe(2)
        seen.append((frame.f_code.co_name, frame.f_back.f_code.co_name))
        return None

    module.keras_call = looking
    try:
        model = perceptron(strategy)
        model.fit(*arrays(), verbose=0, validation_split=0.5, callbacks=[Spy()])
        model.evaluate(*arrays(), verbose=0)
        model.predict(arrays()[0], verbose=0)
    finally:
        module.keras_call = original
    return seen


def test_keras_asks_for_its_data_from_where_we_look(pool1: Pool) -> None:
    asked = pool1.run(calls_seen)[0]
    assert asked == [("__init__", name) for name in ("fit", "fit", "evaluate", "predict")]


def callbacks_found(strategy: Any) -> list[Any]:
    found: list[Any] = []
    prepare = strategy._prepare

    def noted(call: Any) -> None:
        found.append(
            (call.method, type(call.adapter).__name__, [type(c).__name__ for c in call.callbacks or []])
        )
        prepare(call)

    strategy._prepare = noted
    try:
        perceptron(strategy).fit(*arrays(), verbose=0, callbacks=[Spy()])
    finally:
        del strategy._prepare
    return found


def test_the_callbacks_are_found_before_keras_calls_any(pool1: Pool) -> None:
    assert pool1.run(callbacks_found)[0] == [("fit", "ArrayDataAdapter", ["Spy"])]


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
            assert [name for name in last if name in expected] == expected, type(optimizer).__name__
    assert keras.optimizers.Adagrad(initial_accumulator_value=0.25).initial_accumulator_value == 0.25
    adam = keras.optimizers.Adam()
    assert keras.optimizers.LossScaleOptimizer(adam).inner_optimizer is adam


class StartsLater(keras.callbacks.Callback):
    """Does in `on_train_begin` what a restored job does."""

    def __init__(self, epoch: int) -> None:
        super().__init__()
        self._epoch = epoch
        self.epochs: list[int] = []

    def on_train_begin(self, logs: Any = None) -> None:
        start_at_epoch(self.model, self._epoch)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epochs.append(epoch)


def epochs_seen(strategy: Any) -> list[list[int]]:
    model, seen = perceptron(strategy), []
    for epoch in (2, 0):
        callback = StartsLater(epoch)
        model.fit(*arrays(), verbose=0, epochs=4, callbacks=[callback])
        seen.append(callback.epochs)
    return seen


def test_fit_looks_for_its_first_epoch_after_the_beginning_of_training(pool1: Pool) -> None:
    assert pool1.run(epochs_seen)[0] == [[2, 3], [0, 1, 2, 3]]


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


def data_of_fit(strategy: Any) -> list[tuple[str, int | None]]:
    called, make = [], strategy.experimental_distribute_dataset

    def noting(dataset: Any) -> Any:
        call = keras_call()
        called.append((call.method, call.steps))
        return make(dataset)

    model, (x, y) = perceptron(strategy), arrays()
    rows = tf.data.Dataset.from_tensor_slices((x, y)).batch(10)
    with mock.patch.object(strategy, "experimental_distribute_dataset", noting):
        model.fit(rows, validation_data=rows.repeat(), validation_steps=3, epochs=2, verbose=0)
        model.evaluate(rows, verbose=0)
        model.predict(rows.map(lambda x, y: x), steps=2, verbose=0)
    return called


def test_validation_data_is_told_from_training_data_with_its_steps(pool1: Pool) -> None:
    (called,) = pool1.run(data_of_fit)
    assert called == [("fit", None), ("validation", 3), ("evaluate", None), ("predict", 2)]


def test_the_iterator_of_a_dataset_is_one_that_keras_hands_to_its_graphs() -> None:
    iterator = feeding.Pass(tf.data.Dataset.range(3), None)
    assert isinstance(iterator, tf.data.Iterator)
    assert type(iter(tf.data.Dataset.range(3))) in feeding.Pass.__mro__
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
    assert found == {"known": ([1, 3, 5], 6), "unknown": ([1, 2, 3], 3), "none": ([1, 1, 1], 1)}


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
    assert said == [
        "first begins",
        "second begins",
        "added begins",
        "first ends",
        "second ends",
        "added ends",
    ]
    assert callbacks_of(model) is None


def test_keras_makes_an_optimizer_to_see_its_attributes_where_we_look() -> None:
    from keras.src.saving import saving_lib

    assert "ref_obj = Optimizer(1.0)" in inspect.getsource(saving_lib.get_attr_skipset)


def test_keras_makes_a_variable_in_compile() -> None:
    assert "self._loss_tracker = metrics_module.Mean" in inspect.getsource(keras.Model.compile)


def test_callbacks_write_in_the_methods_that_we_replace() -> None:
    kinds = keras.callbacks
    assert parameters(kinds.BackupAndRestore._save_model) == ["self"]
    assert "self._training_metadata_path" in inspect.getsource(kinds.BackupAndRestore._load_model)
    assert parameters(kinds.ModelCheckpoint._get_file_path) == ["self", "epoch", "batch", "logs"]
    assert "self.log_dir" in inspect.getsource(kinds.TensorBoard.set_model)
    assert "self.filename" in inspect.getsource(kinds.CSVLogger.on_train_begin)
    if hasattr(kinds, "OrbaxCheckpoint"):  # not in every Keras 3
        assert parameters(kinds.OrbaxCheckpoint._save_checkpoint) == ["self", "step", "logs"]
