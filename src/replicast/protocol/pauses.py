"""Who stands in a pause, until all workers do."""

from __future__ import annotations

import logging
import time

from replicast.errors import UpdateRefused
from replicast.protocol.channel import Channel
from replicast.protocol.messages import Paused, Resume

logger = logging.getLogger("replicast")

REMIND_SECS = 30.0


class Pauses:
    """One pause after the other: a worker is in at most one. For the coordinator's thread only."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._ended: set[tuple[int, int]] = set()
        self._reminded = 0.0
        self._resumed: tuple[int, int] | None = None
        self.there: dict[int, Paused] = {}
        """Those that are there already, by rank."""

    def note(self, paused: Paused) -> dict[int, Paused] | None:
        """A worker has come.

        Returns:
            All of them, when it was the last one; they stand there until `resume`.
        """
        if (paused.rank, paused.token) in self._ended:  # what it says was on its way when it ended
            return None
        if not self.there:
            self._reminded = time.monotonic()
        self.there[paused.rank] = paused
        if len(self.there) < self._channel.size:
            return None
        there, self.there = self.there, {}
        if self._resumed is not None:  # whoever pauses again has read that
            self._channel.all_have_read(*self._resumed)
        return there

    def resume(self, there: dict[int, Paused], refused: UpdateRefused | None) -> None:
        """Lets all go on, or raise."""
        tokens = [there[rank].token for rank in range(self._channel.size)]
        proposals = self._channel.proposals_read
        number = self._channel.append(Resume(tokens, None if refused is None else refused.to_json()))
        self._resumed = number, proposals

    def end(self, tokens: dict[int, int | None]) -> None:
        """All training threads are about to raise, some of them out of a pause: then that one has ended.

        Args:
            tokens: By rank; None for a worker that is in no pause.
        """
        self._ended = {(rank, token) for rank, token in tokens.items() if token is not None}
        self.there = {rank: one for rank, one in self.there.items() if (rank, one.token) not in self._ended}

    def remind(self) -> None:
        """Says, now and then, who is waited for."""
        if self.there and time.monotonic() - self._reminded > REMIND_SECS:
            self._reminded = time.monotonic()
            missing = sorted(set(range(self._channel.size)) - set(self.there))
            intent = next(iter(self.there.values())).intent.split("\n")[0]
            logger.warning("worker %s waits (%s) for worker %s", sorted(self.there), intent, missing)


def apart(there: dict[int, Paused]) -> UpdateRefused | None:
    """Why those who wait for each other do not wait for the same; None when they do."""
    if len({(one.step, one.intent) for one in there.values()}) == 1:
        return None
    said = "; ".join(f"worker {r} at step {p.step}: {_short(p)}" for r, p in sorted(there.items()))
    return UpdateRefused(
        "The workers wait for each other at different places of their scripts", received=said
    )


def _short(paused: Paused) -> str:
    """What a worker waits for, in a few words: the intent, and how it differs at most."""
    intent, *arguments = paused.intent.split("\n")
    if intent in ("compare", "sync"):
        return f"sync(source={arguments[0]}) of {len(arguments) - 1} variables"
    return intent
