"""A worker's part in leaving: all workers were told to end, save at one boundary, and go.

Somebody sends SIGTERM to one worker, or to all. Whoever hears it asks for the action "leave"; the coordinator
has all do it at one boundary, once, and from then on decides nothing for that boundary or an earlier one. A
worker that has left settles nothing more: a trial that is under way, and what waits, is for the next start.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from replicast.config import TOLD_TO_END
from replicast.errors import ReplicastError, UpdateRefused

if TYPE_CHECKING:
    from replicast.protocol.member import Member

logger = logging.getLogger("replicast")

WRONG_CALLS = 100
"""So many calls of others may come between this worker and the end of them all."""


class Leaving:
    """One worker's part in leaving. For the training thread; `asked` also for a signal handler in it.

    Args:
        member: This worker's part in the protocol.
        save: Makes a checkpoint of this boundary, waits for it within bounds, and says what became of it.

    Attributes:
        left: Whether this worker has left the training, at the boundary of all others.
        ends: Whether the script has come to its end: then nothing needs to end it any more.
    """

    def __init__(self, member: Member, save: Callable[[], str]) -> None:
        self._member = member
        self._save = save
        self.left = False
        self.ends = False
        member.actions["leave"] = self.leave

    def asked(self, *, training: bool) -> None:
        """SIGTERM has come: all workers leave at one boundary. Outside of a training, at once."""
        if self.left or self.ends:
            return
        if not training:
            rank = self._member.channel.rank
            logger.warning("worker %d was told to end outside of a training: nothing is saved", rank)
            sys.exit(TOLD_TO_END)
        self._member.wish("leave")

    def leave(self) -> None:
        """Saves, unless a trial is under way, and ends the script. Blocks until all others are here too.

        Raises:
            SystemExit: The first time, unless the script ends anyway.
        """
        if self.left:
            return
        self.left = True
        rank, trial_ends = self._member.channel.rank, self._member.gate.trial_ends
        if trial_ends is None:
            try:
                said = self._save()
            except (ReplicastError, OSError) as error:
                said = f"the state is not saved. {error}"
            logger.warning("worker %d was told to end: %s", rank, said)
        else:
            logger.warning(
                "worker %d was told to end in the middle of a trial, which ends at step %d: the state is not "
                "saved. The job goes on from the checkpoint before, and the trial begins anew",
                rank,
                trial_ends,
            )
        # Worker 0 takes the coordinator with it: somebody may wait for its word just before this.
        with contextlib.suppress(ReplicastError):
            self._member.channel.agree("leave", "", self._member.patience.answer_secs)
        if not self.ends:
            sys.exit(TOLD_TO_END)

    def come_to_the_end(self) -> None:
        """The script ends: settles what is open together with all others, unless all have left already."""
        self.ends = True
        for intent in ("drain", "close"):
            if not self.left:
                self._pause(intent)

    def _pause(self, intent: str) -> None:
        """Another worker may be elsewhere: both are told so, and that one comes to its end later."""
        for _ in range(WRONG_CALLS):
            try:
                self._member.pause(intent)
            except UpdateRefused as error:
                logger.warning("worker %d is at the end of its script. %s", self._member.channel.rank, error)
            else:
                return
