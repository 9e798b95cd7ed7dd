"""Seeds that all workers share, so that all shuffle alike."""

from __future__ import annotations

import secrets

# Private: whether the user has set a global seed, and whether it was set again: `tf.random` does not tell.
from tensorflow.python.eager import context

from replicast.coordination import Coordination
from replicast.errors import JobFailed

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
