"""Variables that a model creates while its step is traced.

Under a strategy, Keras builds a model by calling it on a symbolic batch. That fails for a model without
`call`, and for one whose `train_step` calls it on something other than the data. Without a strategy, Keras
does not try: the first step creates what is missing. Here, Keras' attempt may fail, and variables that the
first step then creates become variables of the job, as if they had been created in `strategy.scope()`.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from replicast.errors import ReplicastError

logger = logging.getLogger("replicast")

_ARGUMENTS = ("trainable", "name", "dtype", "constraint", "synchronization", "aggregation", "shape")


@contextlib.contextmanager
def may_fail(scope: Any) -> Iterator[None]:
    """Wraps the scope in which Keras tries to build a model; if that fails, the first step builds it.

    A mistake in the model or the data is raised again when the step is traced, as in plain Keras. Warnings
    from a failed attempt say nothing about the model, and are dropped.
    """
    try:
        with scope, warnings.catch_warnings(record=True) as recorded:
            yield
    except (ReplicastError, tf.errors.OpError):
        raise  # the job has failed, not the attempt
    except Exception as error:
        logger.debug("The first step will build the model: %s", error)
        return
    for warning in recorded:
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def creator_in_scope(strategy: tf.distribute.Strategy) -> Callable[..., Any]:
    """A variable creator that creates variables in the strategy's scope, also while tracing."""

    def create(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        if tf.executing_eagerly() and tf.distribute.has_strategy():
            return next_creator(**kwargs)
        initial_value = kwargs["initial_value"]
        if isinstance(initial_value, tf.Tensor) and not hasattr(initial_value, "numpy"):
            initial_value = tf.get_static_value(initial_value)
        given = {name: kwargs[name] for name in _ARGUMENTS if kwargs.get(name) is not None}
        with tf.init_scope():
            inside = tf.distribute.has_strategy()
            with contextlib.nullcontext() if inside else strategy.scope():
                return tf.Variable(initial_value, **given)

    return create


def creating_in_scope(strategy: tf.distribute.Strategy, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a replica function so that it creates variables in the strategy's scope."""

    def creating(*args: Any, **kwargs: Any) -> Any:
        with tf.variable_creator_scope(creator_in_scope(strategy)):
            return function(*args, **kwargs)

    return creating


def is_built(model: Any) -> bool:
    """Whether all variables of the model and its metrics exist, as far as can be told.

    A model without `call` is never built itself; only its layers are.
    """
    # Private: Keras checks the same three before it builds a model.
    own = type(model).call not in (keras.layers.Layer.call, keras.Model.call)
    parts = [*model._flatten_layers(include_self=own), model._compile_metrics, model._compile_loss]
    return all(part is None or part.built for part in parts)


def trace_once(step: Callable[..., Any], args: Any) -> None:
    """Traces a step once and discards the graph, so that the variables it creates exist.

    The real trace needs to know the metrics and statistics before it starts. Nothing is computed here. A step
    that runs eagerly may not be traceable; it then creates its variables when it runs.
    """
    try:
        tf.function(step, autograph=False).get_concrete_function(*args)
    except Exception as error:
        if not tf.executing_eagerly():
            raise
        logger.debug("The step will create its variables when it runs: %s", error)
