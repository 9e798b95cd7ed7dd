"""How a worker's part in the updates of one model ends."""

from __future__ import annotations

import abc
import logging
from typing import Any

from replicast.errors import ReplicastError
from replicast.replicas.looping import OwnLoop

logger = logging.getLogger("replicast")


class Ending(OwnLoop, abc.ABC):
    """The part of `Replicas` with which a worker leaves."""

    def leave(self) -> None:
        """Has all workers save at one of their next boundaries and end with exit code 143, as SIGTERM does.

        For signal handlers of your own, and trainings that do not run in the main thread. Any thread of any
        worker; returns at once. One call is enough for all workers.
        """
        self._active().recovery.leaving.ask()

    def close(self) -> None:
        """Ends the worker's part: settles what is open, together with all others, and stops the threads.

        Called by itself at the end of the script. A second time does nothing. What is open when all were told
        to end is for the next start.
        """
        if self._closed or self._parts is None:
            return
        self._housekeeping.training = False
        try:
            self._counted()
            self.recovery.settle()
            self.recovery.leaving.settle()
        except ReplicastError as error:
            logger.debug("the updates could not be settled at the end: %s", error)
        self.recovery.say_what_was_left()
        self._stop()
        self._closed = True
        self._strategy.on_fit.remove(self._fit_begins)
        if not self.recovery.leaving.ends:  # else whoever tells the script to end need not
            self._strategy.leavings.remove(self.recovery.leaving)

    def _close_at_the_end(self) -> None:
        leavings = self._strategy.leavings
        if self.recovery.leaving not in leavings:  # closed before, and the script went on
            leavings.append(self.recovery.leaving)
        for leaving in leavings:
            leaving.ends = True
        self.close()

    def _abandon(self) -> None:
        if self._parts is not None and not self._closed:
            self._parts.member.abandon()
            self._parts.housekeeping.say_ended()
            self._parts.recovery.leaving.ends = True  # whoever tells it to end now need not

    def _stop(self) -> None:
        self._opened().member.stop()
        self._housekeeping.finish()

    @abc.abstractmethod
    def _fit_begins(self, model: Any, callbacks: Any) -> None: ...
