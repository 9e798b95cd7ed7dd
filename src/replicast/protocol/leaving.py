"""A worker's part in leaving: all workers were told to end, save at one boundary, and go.

Somebody sends SIGTERM to one worker, or to all. Whoever hears it asks for the action "leave"; the coordinator
has all do it at one boundary, once, and from then on decides nothing for that boundary or an earlier one. A
worker that has left settles nothing more: a trial that is under way, and what waits, is for the next start.

A script may have several models. The one that comes to a boundary first leaves, and saves those of the others
too: all workers stand at the same line of the script then.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from replicast.config import TOLD_TO_END
from replicast.errors import ReplicastError, UpdateRefused

if TYPE_CHECKING:
    from replicast.protocol.member import Member

logger = logging.getLogger("replicast")

WRONG_CALLS = 100
"""So many calls of others may come between this worker and the end of them all."""


def told_to_end(leavings: Sequence[Leaving]) -> None:
    """SIGTERM has come: whatever is trained leaves at one boundary. Outside of a training, at once.

    Args:
        leavings: Those of all models that are not closed.

    Raises:
        SystemExit: Nothing is trained, and the script has not come to its end either.
    """
    training = [one for one in leavings if one.is_training()]
    for one in training:
        one.ask()
    if not training and not any(one.left or one.ends for one in leavings):
        logger.warning("this worker was told to end outside of a training: nothing is saved")
        sys.exit(TOLD_TO_END)


class Leaving:
    """One worker's part in leaving. For the training thread; `ask` for any thread and signal handler.

    Args:
        member: This worker's part in the protocol.
        save: Makes a checkpoint of this boundary, waits for it within bounds, and says what became of it.

    Attributes:
        companions: Those of all models of this worker, in the same order on all workers; this one among them.
        is_training: Whether the model is trained now. Written before the first boundary.
        has_trained: Whether it ever was. Written before the first boundary.
        left: Whether this worker has left the training, at the boundary of all others.
        ends: Whether the script has come to its end: then nothing needs to end it any more.
    """

    def __init__(self, member: Member, save: Callable[[], str]) -> None:
        self._member = member
        self._save = save
        self.companions: list[Leaving] = [self]
        self.is_training: Callable[[], bool] = lambda: False
        self.has_trained: Callable[[], bool] = lambda: False
        self.left = False
        self.ends = False
        member.actions["leave"] = self.leave

    def ask(self) -> None:
        """Asks all workers to leave at one boundary. Returns at once."""
        if not self.left and not self.ends:
            self._member.wish("leave")

    def leave(self) -> None:
        """Saves all models, except those on trial, and ends the script. Blocks until all others are here too.

        Raises:
            SystemExit: The first time, unless the script ends anyway.
        """
        if self.left:
            return
        self._save_or_say_why_not()
        for other in self.companions:
            if not other.left and other.has_trained():
                other._save_or_say_why_not()
        # Worker 0 takes the coordinator with it: somebody may wait for its word just before this.
        with contextlib.suppress(ReplicastError):
            self._member.channel.agree("leave", "", self._member.patience.answer_secs)
        if not self.ends:
            sys.exit(TOLD_TO_END)

    def _save_or_say_why_not(self) -> None:
        self.left = True
        rank, trial_ends = self._member.channel.rank, self._member.gate.trial_ends
        which = f" ({self._member.channel.name})" if len(self.companions) > 1 else ""
        if trial_ends is None:
            try:
                said = self._save()
            except (ReplicastError, OSError) as error:
                said = f"the state is not saved. {error}"
            logger.warning("worker %d was told to end: %s%s", rank, said, which)
        else:
            logger.warning(
                "worker %d was told to end in the middle of a trial, which ends at step %d: the state is not "
                "saved%s. The job goes on from the checkpoint before, and the trial begins anew",
                rank,
                trial_ends,
                which,
            )

    def settle(self) -> None:
        """Settles what is open together with all others, unless all have left already."""
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
