"""Keras optimizers for large embeddings: a step changes the rows that it has gradients for, and no others.

They are ordinary Keras 3 optimizers: they also train in one process without a strategy, and a model that uses
them is saved and loaded as usual. Gradients that are not row-sparse are applied as by the optimizer of Keras.
Weight decay and `use_ema` change every row in every step, and cost what the whole table costs.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from replicast.training.rows import adam_rate, once_for_each_row


@keras.saving.register_keras_serializable(package="replicast")
class LazyAdam(keras.optimizers.Adam):
    """Adam, except that the moments of a row decay only in the steps that look the row up.

    In Adam, the moments of every row decay in every step, and a row that was looked up once keeps moving
    afterwards. Here a row that a step does not look up keeps all of its bits, and those of its moments. The
    gradients of a row that is looked up several times in a step are added up first. TensorFlow Addons'
    `LazyAdam` and torch's `SparseAdam` do the same.

    Example:
        model.compile(replicast.optimizers.LazyAdam(1e-3), "binary_crossentropy")

    The arguments are those of `keras.optimizers.Adam`. To load a model that was compiled with it, without a
    `replicast.Strategy`, `import replicast.optimizers` first.
    """

    sums_repeated_rows = True

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Changes a variable, and the moments of the rows that the gradient has."""
        if not isinstance(gradient, tf.IndexedSlices):
            super().update_step(gradient, variable, learning_rate)
            return
        place, dtype = self._get_variable_index(variable), variable.dtype
        momentum, velocity = self._momentums[place], self._velocities[place]
        rows = once_for_each_row(tf.cast(gradient, dtype))
        values, indices = rows.values, rows.indices
        rate = tf.cast(adam_rate(self, learning_rate, _precise(dtype)), dtype)
        m = self._moved(momentum, indices, values, self.beta_1)
        v = self._moved(velocity, indices, tf.square(values), self.beta_2)
        if self.amsgrad:
            largest = self._velocity_hats[place]
            v = tf.maximum(v, tf.gather(largest.value, indices))
            self.assign(largest, tf.IndexedSlices(v, indices))
        self.assign_sub(variable, tf.IndexedSlices(m * rate / (tf.sqrt(v) + self.epsilon), indices))

    def _moved(self, average: Any, indices: tf.Tensor, values: tf.Tensor, beta: float) -> tf.Tensor:
        """The rows of a running average, after these values were added to it."""
        before = tf.gather(average.value, indices)
        after = before + (values - before) * (1 - beta)
        self.assign(average, tf.IndexedSlices(after, indices))
        return after


@keras.saving.register_keras_serializable(package="replicast")
class RowWiseAdagrad(keras.optimizers.Optimizer):
    """Adagrad with one accumulator for each row of a variable, instead of one for each element.

    The accumulator of a row grows by the mean of its squared gradients, and all elements of the row share one
    rate: `row -= learning_rate * gradient / (sqrt(accumulator) + epsilon)`. DLRM trains its embeddings this
    way. For rows of 64 elements the state takes 1/64 of Adagrad's. A row without a gradient keeps all of its
    bits. The gradients of a row that is looked up several times in a step are added up first. A variable with
    fewer than two dimensions has one accumulator for each element, as in Adagrad. The accumulators of a
    float16 or bfloat16 variable are float32. To load a model that was compiled with it, without a
    `replicast.Strategy`, `import replicast.optimizers` first.

    Example:
        model.compile(replicast.optimizers.RowWiseAdagrad(0.01), "binary_crossentropy")

    Args:
        learning_rate: A number, a schedule, or a function without arguments that returns a number.
        initial_accumulator_value: The value with which each accumulator starts.
        epsilon: Added to the square root, so that nothing is divided by 0.
        **kwargs: As for every optimizer of Keras: `name`, `clipnorm`, `weight_decay`, `use_ema`, …
    """

    sums_repeated_rows = True

    def __init__(
        self,
        learning_rate: Any = 0.01,
        *,
        initial_accumulator_value: float = 0.0,
        epsilon: float = 1e-8,
        name: str = "row_wise_adagrad",
        **kwargs: Any,
    ) -> None:
        if initial_accumulator_value < 0:
            raise ValueError(
                f"initial_accumulator_value must not be negative. Received: {initial_accumulator_value!r}"
            )
        if epsilon <= 0:
            raise ValueError(f"epsilon must be positive. Received: {epsilon!r}")
        super().__init__(learning_rate=learning_rate, name=name, **kwargs)
        self.initial_accumulator_value = initial_accumulator_value
        self.epsilon = epsilon
        self._accumulators: list[Any] = []

    def build(self, variables: list[Any]) -> None:
        """Creates the accumulators."""
        if self.built:
            return
        super().build(variables)
        initializer = keras.initializers.Constant(self.initial_accumulator_value)
        self._accumulators = [
            self.add_variable(
                shape=variable.shape if len(variable.shape) < 2 else variable.shape[:1],
                initializer=initializer,
                dtype=_precise(variable.dtype),
                name=f"{variable.path.replace('/', '_')}_accumulator",
            )
            for variable in variables
        ]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Changes a variable, and the accumulators of the rows that the gradient has."""
        dtype, axes = _precise(variable.dtype), list(range(1, len(variable.shape)))
        accumulator = self._accumulators[self._get_variable_index(variable)]
        rate, gradient = tf.cast(learning_rate, dtype), tf.cast(gradient, dtype)
        indices, values, before = None, gradient, accumulator.value
        if isinstance(gradient, tf.IndexedSlices):
            rows = once_for_each_row(gradient)
            indices, values = rows.indices, rows.values
            before = tf.gather(before, indices)
        accumulated = before + tf.reduce_mean(tf.square(values), axes)
        roots = tf.sqrt(accumulated)[(..., *[tf.newaxis] * len(axes))]
        change = rate * values / (roots + self.epsilon)

        def in_rows(new: tf.Tensor) -> Any:
            return new if indices is None else tf.IndexedSlices(new, indices)

        self.assign(accumulator, in_rows(accumulated))
        self.assign_sub(variable, in_rows(change))

    def get_config(self) -> dict[str, Any]:
        """The arguments with which the optimizer was created."""
        own = {"initial_accumulator_value": self.initial_accumulator_value, "epsilon": self.epsilon}
        return {**super().get_config(), **own}


def _precise(dtype: Any) -> str:
    """In half precision epsilon, small squares or 1 - 0.999 are 0: a row would become NaN, or not move."""
    return "float64" if tf.as_dtype(dtype) == tf.float64 else "float32"
