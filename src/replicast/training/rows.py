"""Tables: a step on a few rows of a large embedding costs what these rows cost.

Stock Keras reads a whole table to look up a few rows. That read is free until the first row-sparse write.
From then on, TensorFlow copies the variable on every read, because it can no longer tell whether somebody
still uses what was read before: the step costs a copy of the table. Keras' Adagrad then computes on the whole
accumulator. So, for the variables of a `replicast.Strategy`:

    lookups      `ops.take` and `tf.gather` along axis 0 read the rows that they return, and nothing else. In
                 a graph it is not enough to leave a read unused: TensorFlow makes each write wait for every
                 earlier read of the variable, so the read would be made.
    writes       SGD without momentum writes rows already. Adagrad changes nothing in a row whose gradient is
                 zero, so it is computed on the touched rows, with the operations of Keras, to the same bits.
                 With the other optimizers of Keras every row moves in every step. Adam goes over the table
                 and its moments block by block, in the cache: 3 reads and 3 writes of a table, where Keras,
                 which makes tables of all in between, has 30. The others stay as they are.
    exchange     if all that uses a gradient is an optimizer that adds up the slices of a repeated row
                 (`sums_repeated_rows`), each worker sends each of its rows once.
    start        a random or constant initial value (Adagrad's) is drawn part by part, to the bits of Keras:
                 as a whole it takes up to three tables on the way (`InitialRows`).
    audits       variables that are written by rows (`is_written_by_rows`) are compared in turns, slice by
                 slice: see `replicas/job_audits.py`.

What is left as it is, right and slow: a lookup along another axis, of a table that a layer computes (LoRA,
quantization), with sparse indices, by `tf.gather` with ragged ones, by `tf.gather_nd` or
`tf.nn.embedding_lookup`, in a loop, `tf.vectorized_map`, `stateless_call` or what is recomputed for the
gradient; a regularizer or a constraint of the table.

Replaced in Keras, because there is no hook: `take` of the backend, `Variable.sparse_read`, which `tf.gather`
looks for, `update_step` of Adagrad and Adam, and `assign`, `assign_add` and `assign_sub` of all optimizers:
they note which variables are written by rows. And TensorFlow's `scatter_add` shares more than 1024 slices out
to the threads of a worker, which add those of a repeated row in any order: the rows would then differ in
their last bits from worker to worker.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

# Private: the backend's function behind `keras.ops.take`, its class of variables, and whether variables stand
# for other values just now. There is no public place to replace a lookup, and none to ask.
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.backend.tensorflow import core as keras_core
from keras.src.backend.tensorflow import numpy as keras_numpy

# Private: whether XLA compiles what is traced. It has no `DisableCopyOnRead`, and nothing public tells.
from tensorflow.python.ops import control_flow_util

# Private: the operations behind `tf.random.stateless_...`, which start at a counter. A seed is all that the
# public functions take.
from tensorflow.python.ops import gen_stateless_random_ops_v2 as random_ops

# Private: a variable that bypasses creators; in a scope, `tf.Variable` would create one of the strategy.
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from replicast.training.graphs import in_vectorized_map
from replicast.training.variables import ReplicatedVariable, tf_variable, write_rows

BLOCK_BYTES = 2**21  # of a table: Adam computes on six blocks of this size at a time, which stay in a cache
# Half-precision values are summed in this dtype and rounded once: a sum of many small ones would stand still.
SUMMED_AS = {tf.float16: tf.float32, tf.bfloat16: tf.float32}


def replicated_table(value: Any) -> ReplicatedVariable | None:
    """The variable of the job behind a variable, if its rows can be read one by one.

    Not in a vectorized map: TensorFlow would make a loop of the lookup, which adds up the slices of a row.
    """
    if in_vectorized_map():
        return None
    if isinstance(value, keras.Variable):
        value = None if in_stateless_scope() else value._value
    elif isinstance(value, tf.Variable) and not isinstance(value, ReplicatedVariable):
        value = container_of(value)
    is_table = isinstance(value, ReplicatedVariable) and value.dtype.is_floating and value.shape.rank
    return value if is_table else None


def container_of(variable: Any) -> Any:
    """The variable of the job whose value on this worker is `variable`; None if there is none."""
    while isinstance(variable, keras.Variable):
        variable = variable.value
    # Private: a lookup or an optimizer only has this worker's value, and nothing public leads back from it.
    container = getattr(getattr(variable, "handle", None), "_distributed_container", None)
    return None if container is None else container()


def is_written_by_rows(variable: Any) -> bool:
    """Whether training writes this variable by rows; known once its step was traced, on all workers alike."""
    return bool(getattr(container_of(variable), "written_by_rows", False))


def once_for_each_row(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """The slices of a row-sparse gradient, with those of the same row added up."""
    indices, places = tf.unique(slices.indices)
    precise = tf.cast(slices.values, SUMMED_AS.get(slices.dtype, slices.dtype))
    values = tf.math.unsorted_segment_sum(precise, places, tf.size(indices))
    return tf.IndexedSlices(tf.cast(values, slices.dtype), indices, slices.dense_shape)


def once_if_summed(gradients: Iterable[Any], optimizer: Any) -> list[Any]:
    """The gradients to send for this optimizer: it may need every slice of a row, or their sum."""
    once = optimizer is not None and sums_repeated_rows(optimizer)
    return [once_for_each_row(g) if once and isinstance(g, tf.IndexedSlices) else g for g in gradients]


class UndecidedSlices(tf.IndexedSlices):
    """Slices of which it is not known yet whether single ones are needed, or the sum for each row.

    A custom `train_step` may clip by a norm of single slices, or log one, after its tape has returned them
    and before it applies them. So the graph can send both, and a variable tells which: it is set when the
    trace has ended and all users of the slices are known.
    """

    def __init__(self, slices: tf.IndexedSlices) -> None:
        super().__init__(slices.values, slices.indices, slices.dense_shape)
        with tf.init_scope(), tf.device("CPU:0"):
            self.once = ResourceVariable(False, trainable=False, name="each_row_once")

    def decided(self, part: tf.IndexedSlices) -> tf.IndexedSlices:
        """What to send of a part of the slices."""

        def sums() -> tuple[tf.Tensor, tf.Tensor]:
            rows = once_for_each_row(part)
            return rows.values, rows.indices

        values, indices = tf.cond(self.once, sums, lambda: (part.values, part.indices))
        return tf.IndexedSlices(values, indices, part.dense_shape)


def sums_repeated_rows(optimizer: Any) -> bool:
    """Whether an optimizer does the same with one slice for each row as with all slices of the row.

    Not if it clips: clipping uses single slices, as in plain Keras.
    """
    clipping = ("clipnorm", "global_clipnorm", "clipvalue")
    clips = any(getattr(optimizer, name, None) is not None for name in clipping)
    is_plain_sgd = type(optimizer) is keras.optimizers.SGD and optimizer.momentum == 0
    writes_rows = getattr(optimizer, "sums_repeated_rows", False) or is_plain_sgd
    return bool(writes_rows) and not clips and not optimizer.gradient_accumulation_steps


def read_by_rows() -> None:
    """Makes lookups and optimizers touch rows only. Once per process."""
    if hasattr(keras_numpy.take, "__wrapped__"):
        return
    keras_numpy.take = _taking_rows(keras_numpy.take)
    kind, every = keras_core.Variable, keras.optimizers.Optimizer
    kind.sparse_read = property(_sparse_read)
    kind._initialize_with_initializer = _drawing_rows(kind._initialize_with_initializer)
    every.assign = _writing_rows(every.assign, tf.raw_ops.ResourceScatterNdUpdate)
    every.assign_add = _writing_rows(every.assign_add, tf.raw_ops.ResourceScatterNdAdd)
    every.assign_sub = _writing_rows(every.assign_sub, tf.raw_ops.ResourceScatterNdSub)
    keras.optimizers.Adagrad.update_step = _adagrad_step(keras.optimizers.Adagrad.update_step)
    keras.optimizers.Adam.update_step = _adam_step(keras.optimizers.Adam.update_step)


_DRAWN = tuple(
    getattr(keras.initializers, name).__call__
    for name in ("RandomUniform", "RandomNormal", "TruncatedNormal", "VarianceScaling", "Constant")
)
# What four numbers of a tensor take of the counter.
_COUNTS = {
    "stateless_random_uniform_v2": 1,
    "stateless_random_normal_v2": 1,
    "stateless_truncated_normal_v2": 256,
}
_patching = threading.Lock()  # these are replaced while rows are drawn


def _drawing_rows(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def initialize(self: Any, initializer: Any) -> None:
        source = getattr(initializer, "seed", getattr(initializer, "value", None))  # may also be an array
        is_drawn = type(initializer).__call__ in _DRAWN and isinstance(source, int | float)
        if is_drawn and self.dtype == "float32" and len(self.shape) > 1:
            self._initialize(InitialRows(initializer, self.shape))
        else:
            stock(self, initializer)

    return initialize


class InitialRows:
    """A random or constant initial value of Keras, of which rows can be drawn alone.

    Random ones come from a counter by an algorithm (Philox) in which each number depends on its place alone.
    """

    def __init__(self, initializer: Callable[..., tf.Tensor], shape: Sequence[int]) -> None:
        self._initializer = initializer
        self.shape = tf.TensorShape(shape)

    def __call__(self) -> tf.Tensor:
        return self._initializer(self.shape.as_list(), dtype="float32")

    def can_be_drawn(self, most_bytes: int) -> bool:
        """Whether it is larger, and on a CPU: a GPU may use the counter in another way."""
        is_on_cpu = tf.executing_eagerly() and not tf.config.list_logical_devices("GPU")
        return is_on_cpu and 4 * (self.shape.num_elements() or 0) > most_bytes

    def rows(self, part: slice) -> tf.Tensor:
        """The rows of a part. Before it is a multiple of four numbers: the generator makes four at a time."""
        rest, count = self.shape[1:], part.stop - part.start
        if isinstance(self._initializer, keras.initializers.Constant):
            return self._initializer([count, *rest], dtype="float32")
        with _patching:
            here, stock = threading.get_ident(), {name: getattr(random_ops, name) for name in _COUNTS}

            def draw(shape: Any, *, key: Any, counter: tf.Tensor, of: str, **more: Any) -> tf.Tensor:
                if threading.get_ident() == here:
                    low, high = map(int, counter)
                    place = (high << 64) + low + part.start * rest.num_elements() // 4 * _COUNTS[of]
                    counter = tf.constant([place % 2**64, (place >> 64) % 2**64], tf.uint64)
                    shape = [count, *rest]
                return stock[of](shape, key=key, counter=counter, **more)

            try:
                for name in _COUNTS:
                    setattr(random_ops, name, functools.partial(draw, of=name))
                return self()
            finally:
                for name, function in stock.items():
                    setattr(random_ops, name, function)


def _sparse_read(variable: Any) -> Callable[..., tf.Tensor]:
    """`tf.gather` takes rows by this method of its argument, and the whole value if there is none."""
    table = replicated_table(variable)
    if table is None:
        raise AttributeError("sparse_read")
    # Private: in a layer with a policy of mixed precision, the value of a variable is a lower-precision one.
    return lambda indices, name=None: variable._maybe_autocast(table.sparse_read(indices, name))


def _taking_rows(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def take(x: Any, indices: Any, axis: int | None = None) -> Any:
        table = replicated_table(x)
        if table is None or axis != 0 or isinstance(indices, tf.SparseTensor):
            return stock(x, indices, axis)

        def rows(ids: tf.Tensor) -> tf.Tensor:
            # As in Keras, -1 is the last row.
            return tf.gather(x, tf.where(ids < 0, ids + tf.cast(table.shape[0], ids.dtype), ids))

        if isinstance(indices, tf.RaggedTensor):
            return indices.with_flat_values(rows(indices.flat_values))
        return rows(keras.ops.convert_to_tensor(indices))

    return take


def _writing_rows(stock: Callable[..., None], scatter: Callable[..., Any]) -> Callable[..., None]:
    @functools.wraps(stock)
    def assign(self: Any, variable: Any, value: Any) -> None:
        container = container_of(variable)
        if container is None or not isinstance(value, tf.IndexedSlices):
            stock(self, variable, value)
            return
        container.written_by_rows = True
        indices, values = tf.expand_dims(value.indices, 1), tf.cast(value.values, container.dtype)
        scatter(ref=container.handle, indices=indices, updates=values)

    return assign


def _adagrad_step(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def update_step(self: Any, gradient: Any, variable: Any, learning_rate: Any) -> None:
        is_table = isinstance(gradient, tf.IndexedSlices) and replicated_table(variable) is not None
        # Without an epsilon, a row whose accumulator is 0 becomes NaN, touched or not.
        if not is_table or not self.epsilon:
            stock(self, gradient, variable, learning_rate)
            return
        accumulator = self._accumulators[self._get_variable_index(variable)]
        values, rate = tf.cast(gradient.values, variable.dtype), tf.cast(learning_rate, variable.dtype)
        self.assign_add(accumulator, tf.IndexedSlices(tf.square(values), gradient.indices))
        accumulated = tf.gather(accumulator, gradient.indices)
        # Not by `/`: TensorFlow's optimizer of graphs makes a product with a reciprocal root of it, which has
        # other bits. In Keras' own graph a conditional between the two keeps it from doing so.
        change = tf.math.divide_no_nan(rate * values, tf.sqrt(accumulated + self.epsilon))
        self.assign_sub(variable, tf.IndexedSlices(change, gradient.indices))

    return update_step


def _adam_step(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def update_step(self: Any, gradient: Any, variable: Any, learning_rate: Any) -> None:
        is_table = isinstance(gradient, tf.IndexedSlices) and replicated_table(variable) is not None
        in_xla = control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())
        if not is_table or self.amsgrad or in_xla:
            stock(self, gradient, variable, learning_rate)
            return
        dtype, shape, place = variable.dtype, variable.shape, self._get_variable_index(variable)
        tables = [self._momentums[place], self._velocities[place], variable]
        handles, rate = [tf_variable(one).handle for one in tables], adam_rate(self, learning_rate, dtype)

        def moved(m: tf.Tensor, v: tf.Tensor, rows: tf.Tensor, *sums: tf.Tensor) -> tuple[tf.Tensor, ...]:
            # Keras adds (gradient - average) * (1 - beta). The gradient is 0 except in the touched rows.
            from_m, from_v = (m - sums[0], v - sums[1]) if sums else (m, v)
            m, v = m - from_m * (1 - self.beta_1), v - from_v * (1 - self.beta_2)
            return m, v, rows - m * rate / (tf.sqrt(v) + self.epsilon)

        def read(part: slice) -> Iterator[tf.Tensor]:
            for handle in handles:
                tf.raw_ops.DisableCopyOnRead(resource=handle)  # which each lookup turns on
                flat = tf.reshape(tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype), [-1])
                yield tf.reshape(flat[part], [-1, *shape[1:]])

        def move_block(start: tf.Tensor) -> tf.Tensor:
            end = tf.minimum(start + count, shape[0])
            write_rows(handles, tf.range(start, end), moved(*read(slice(start * width, end * width))))
            return end

        g, (indices, places) = tf.cast(gradient.values, dtype), tf.unique(gradient.indices)
        sums = [tf.math.unsorted_segment_sum(x, places, tf.size(indices)) for x in (g, tf.square(g))]
        before = [tf.raw_ops.ResourceGather(resource=one, indices=indices, dtype=dtype) for one in handles]
        width = shape[1:].num_elements()
        # A power of 2: a part of a tensor is not copied if it starts and ends at a multiple of 64 bytes.
        count = 1 << max(1, BLOCK_BYTES // max(1, width * dtype.size)).bit_length() - 1
        # Rows are written one by one: not if they are short. A GPU has no such caches. And without a graph,
        # what is read of a table is in use until the end of the block: the write would copy the table.
        in_blocks = count < shape[0] and width * dtype.size >= 32 and "GPU" not in variable.device
        if in_blocks and not tf.executing_eagerly():
            tf.while_loop(lambda start: start < shape[0], move_block, [tf.constant(0, tf.int64)])
        else:
            for table, after in zip(tables, moved(*read(slice(None))), strict=True):
                self.assign(table, after)
        write_rows(handles, indices, moved(*before, *sums))

    return update_step


def adam_rate(adam: Any, learning_rate: Any, dtype: Any) -> tf.Tensor:
    """The learning rate of a step, corrected for moments that started at 0."""
    step, rate = tf.cast(adam.iterations + 1, dtype), tf.cast(learning_rate, dtype)
    powers = [tf.pow(tf.cast(beta, dtype), step) for beta in (adam.beta_1, adam.beta_2)]
    return rate * tf.sqrt(1 - powers[1]) / (1 - powers[0])
