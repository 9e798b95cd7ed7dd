"""Seeds that all workers have in common, so that all shuffle alike."""

from __future__ import annotations

import secrets

# Private: whether the user set a global seed, and when anew: `tf.random` does not tell.
from tensorflow.python.eager import context

from replicast.coordination import Coordination
from replicast.errors import JobFailed

AGREE_SECS = 600.0


class Seeds:
    """Gives out one seed per use, the same to every worker that asks equally often.

    They follow from the user's global seed, if there is one, and start again when it is set again; else from
    a random number of worker 0. Nobody's random generators are touched.
    """

    def __init__(self, coordination: Coordination, rank: int) -> None:
        self._coordination = coordination
        self._generator: object = self  # of no context
        self._random: int | None = None
        self._uses = 0
        if rank == 0:  # at once, so that nobody has to wait for worker 0 to come to its first use
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
                raise JobFailed(f"worker 0 did not give a seed within {AGREE_SECS:.0f} s", worker=0)
            self._random = int(seed)
        return self._random
