"""Seeds that all workers share, so that all shuffle and draw alike."""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

# Private: Keras keeps the generator of unseeded draws under a name of its global state, which no public
# function reads or sets.
from keras.src.backend.common import global_state
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR

# Private: whether the user has set a global seed, and whether it was set again: `tf.random` does not tell.
from tensorflow.python.eager import context

from replicast.coordination import Coordination
from replicast.errors import JobFailed
from replicast.strategy.building import creator_in_scope
from replicast.strategy.outside import is_distributed, move

logger = logging.getLogger("replicast")

AGREE_SECS = 600.0


class Seeds:
    """Returns one seed per use: the n-th seed is the same on every worker.

    Seeds are derived from the user's global seed, if there is one, and start again when it is set again;
    otherwise from a random number of worker 0. No random generator of the user is changed.
    """

    def __init__(self, coordination: Coordination, rank: int) -> None:
        self._coordination = coordination
        self._generator: object = self  # differs from any context's generator
        self._random: int | None = None
        self._uses = 0
        if rank == 0:  # at once, so that nobody waits for worker 0's first use
            coordination.put("replicast/seed", str(secrets.randbits(32)))

    def next(self) -> tuple[int, ...]:
        """The next seed."""
        generator = getattr(context.context(), "_rng", None)  # absent until a seed is set
        if generator is not self._generator:
            self._generator = generator
            self._uses = 0
        self._uses += 1
        chosen = context.global_seed()
        return (self._agreed() if chosen is None else int(chosen) & 0xFFFFFFFF, self._uses)

    def _agreed(self) -> int:
        if self._random is None:
            seed = self._coordination.get("replicast/seed", AGREE_SECS)
            if seed is None:
                raise JobFailed(f"worker 0 did not publish a seed within {AGREE_SECS:.0f} s", worker=0)
            self._random = int(seed)
        return self._random


def global_seed_generator() -> Any:
    """The generator of this thread from which Keras draws without a seed; None before the first draw."""
    return global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)


@contextlib.contextmanager
def sharing_seed_generator(strategy: Any) -> Iterator[Callable[[Callable[..., Any]], Any]]:
    """Yields a function that wraps a step, so that its unseeded draws come from the caller's generator.

    Keras has one generator for each thread, and TensorFlow runs a step in a new thread. Each trace of a step
    would make a generator of its own, which TensorFlow refuses from the second trace on.
    """
    shared = global_seed_generator()

    def wrap(step: Callable[..., Any]) -> Any:
        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]  # TensorFlow has no types
        def drawing(*args: Any, **kwargs: Any) -> Any:
            nonlocal shared
            global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, _Joining(strategy, shared))
            try:
                return step(*args, **kwargs)
            finally:
                found = global_seed_generator()
                shared = found.generator if isinstance(found, _Joining) else found

        return drawing

    try:
        yield wrap
    finally:
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, shared)


class _Joining:
    """Stands for the generator until a step draws from it: only then must it be part of the job.

    All workers trace the same step, but perhaps only one of them has drawn before. As in plain Keras, a new
    generator takes its seed from Python's `random` at its first draw, not earlier: another order would give
    other initial weights.
    """

    def __init__(self, strategy: Any, generator: Any) -> None:
        self._strategy = strategy
        self.generator = generator

    def next(self, ordered: bool = True) -> Any:
        if self.generator is None or not is_distributed(self.generator.state):
            self._join()
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, self.generator)
        return self.generator.next(ordered=ordered)

    def _join(self) -> None:
        if self.generator is None:
            with tf.variable_creator_scope(creator_in_scope(self._strategy)):
                self.generator = keras.random.SeedGenerator()
        move(self._strategy, [self.generator.state])
        if self._strategy.leavings and self._strategy.rank == 0:
            logger.warning(
                "A step draws random numbers from keras.random without a seed. The state of Keras' global "
                "seed generator is not in the checkpoints and audits of this job's Replicas, because it was "
                "created later: after a restart, the step draws other numbers. Make a "
                "keras.random.SeedGenerator an attribute of the model, and pass it as seed=."
            )
