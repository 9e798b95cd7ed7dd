"""Finds the Keras call that is running: the model, its callbacks and its data.

Keras passes a strategy only a dataset: not the model that will train on it, not the callbacks, not the arrays
behind it. All of these are in the two calling frames, and they are needed before training starts: to refuse
what cannot work, to shuffle alike on every worker, to let one worker write the files. So this module inspects
these frames; no other module does. If the caller is not Keras, it finds nothing, and the strategy behaves as
TensorFlow's does.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import keras

# Private: the module of the class that has `fit`, whose name differs between versions of Keras; and the
# module and the class whose constructor calls `experimental_distribute_dataset`, to recognize their frames.
from keras.src.backend.tensorflow import trainer
from keras.src.saving import saving_lib
from keras.src.trainers.epoch_iterator import EpochIterator

# The class that has `fit`: keras.Model is one of its subclasses.
Trainer = next(kind for kind in keras.Model.__mro__ if kind.__module__ == trainer.__name__)
FRAMES_OF_A_VARIABLE = 40  # at most, between a call in Keras and the variable creation that it causes


@dataclass(frozen=True, slots=True)
class KerasCall:
    """A call of `fit`, `evaluate` or `predict` that is about to start."""

    model: Any
    method: str
    adapter: Any
    steps: int | None
    callbacks: Any

    @property
    def data_name(self) -> str:
        names = {"fit": "training data", "validation": "validation data"}
        return names.get(self.method, f"data for {self.method}")


def keras_call() -> KerasCall | None:
    """The Keras call that called the caller of this function; None if it is something else."""
    frame = _frame_of("__init__", 1)
    iterator: Any = None if frame is None else frame.f_locals.get("self")
    outer = frame.f_back if isinstance(iterator, EpochIterator) else None
    model = None if outer is None else outer.f_locals.get("self")
    if outer is None or not isinstance(model, Trainer):
        return None
    # `fit` opens its validation data after its training data, which this variable then holds.
    validates = outer.f_code.co_name == "fit" and "epoch_iterator" in outer.f_locals
    steps, execution = iterator.steps_per_epoch, iterator.steps_per_execution
    return KerasCall(
        model=model,
        method="validation" if validates else outer.f_code.co_name,
        adapter=iterator.data_adapter,
        steps=None if steps is None else -(-steps // execution) * execution,
        callbacks=outer.f_locals.get("callbacks"),
    )


def locals_of_fit(model: keras.Model) -> dict[str, Any]:
    """The local variables of the running `fit`, if it is found. Private: `fit` keeps these nowhere else."""
    frame: Any = sys._getframe(2)
    while frame is not None and not (frame.f_code.co_name == "fit" and frame.f_locals.get("self") is model):
        frame = frame.f_back
    return {} if frame is None else dict(frame.f_locals)


def predicting_model() -> Any:
    """The model whose `predict` called the caller of this function, with a function instead of a method."""
    return _self_of("one_step_on_data_distributed", 1)


def model_to_build() -> Any:
    """The model that Keras is about to build; None if the caller was called for something else."""
    return _self_of("_maybe_symbolic_build", 1)


def keras_scales_a_loss() -> bool:
    """Whether a Keras loss asks for the number of replicas, to divide by it."""
    asking = _frame_of("scale_loss_for_distribution", 1) or _frame_of("unscale_loss_for_distribution", 1)
    return asking is not None


def optimizer_that_sums() -> keras.optimizers.Optimizer | None:
    """The optimizer whose gradients are about to be summed; None if something else is summed."""
    # `all_reduce`, and what TensorFlow wraps around it
    return _self_of("_all_reduce_sum_gradients", 16, keras.optimizers.Optimizer)


def optimizer_that_applies() -> keras.optimizers.Optimizer | None:
    """The optimizer that updates a variable in a loop without `strategy.run`."""
    return _self_of("_distributed_tf_update_step", 16, keras.optimizers.Optimizer)


def only_looks_at_shapes() -> bool:
    """Whether Keras is about to take one batch only to build the model, and discard it.

    It does so before every `fit` and `evaluate` under a strategy. If the batch were taken from the real
    input, it and the prefetched batches after it would be missing from a generator's data.
    """
    # __iter__ < _enumerate_iterator < __next__ < _maybe_symbolic_build
    return _frame_of("_maybe_symbolic_build", 4) is not None


def compiled_model() -> keras.Model | None:
    """The model whose `compile` creates the current variable; None if something else creates it.

    `compile` creates the metric that tracks the loss, so every model compiled in the scope is seen.
    """
    return _self_of("compile", FRAMES_OF_A_VARIABLE, keras.Model)


def keras_looks_at_attributes() -> bool:
    """Whether Keras creates an object only to inspect it, as each optimizer that it saves or loads."""
    frame = _frame_of("get_attr_skipset", FRAMES_OF_A_VARIABLE)
    return frame is not None and frame.f_globals.get("__name__") == saving_lib.__name__


@contextlib.contextmanager
def replaced(thing: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, this object has another attribute; never its class. Keras has no hook where this is used."""
    own = vars(thing).get(name, replaced)  # the script, or the constructor, may have set it on this object
    object.__setattr__(thing, name, value)  # past Keras, which tracks attributes
    try:
        yield
    finally:
        if vars(thing).get(name) is value:  # else the script has set another one since
            object.__delattr__(thing, name)
            if own is not replaced:
                object.__setattr__(thing, name, own)


def _self_of(function: str, furthest: int, kind: type = object) -> Any:
    frame = _frame_of(function, furthest, depth=4)
    found = None if frame is None else frame.f_locals.get("self")
    return found if isinstance(found, kind) else None


def _frame_of(function: str, furthest: int, depth: int = 3) -> Any:
    """The nearest frame of this function around the caller of the caller, at most so many frames away."""
    frame: Any = sys._getframe(depth)
    for _ in range(furthest):
        if frame is None or frame.f_code.co_name == function:
            return frame
        frame = frame.f_back
    return None
