"""A worker's part in leaving: on SIGTERM, all workers save at one boundary and exit.

SIGTERM arrives at one worker or at all, or a script calls `replicas.leave()`. Each such worker requests the
operation "leave" (`core/operations/attempt.py`): all save at one boundary, and the processes exit with 143.

A script may have several models. The one that reaches a boundary first leaves, and saves the other models
too: all workers are at the same line of the script then.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Sequence

from replicast.config import TOLD_TO_END
from replicast.errors import ClusterError, ReplicastError
from replicast.replicas.job_checkpoints import Checkpoints
from replicast.replicas.session import Session
from replicast.sigterm import on_sigterm

logger = logging.getLogger("replicast")

WRONG_CALLS = 100  # how often the end of a script retries while another worker is still at another call


def told_to_end(departures: Sequence[Departure]) -> None:
    """Handles SIGTERM: models in training leave at one boundary; outside of training the process exits."""
    training = [one for one in departures if one.is_training()]
    for one in training:
        one.ask()
    if not training and not any(one.left or one.ends for one in departures):
        logger.warning("this worker was told to exit outside of a training: nothing is saved")
        sys.exit(TOLD_TO_END)


def leave_on_sigterm(departure: Departure, departures: list[Departure]) -> None:
    """Makes this model and all others of the script leave on SIGTERM."""
    departures.append(departure)
    if not on_sigterm(lambda: told_to_end(departures)):
        logger.warning(
            "On SIGTERM this worker saves nothing: only the main thread can set a signal handler, and this "
            "Replicas was created in another thread. Call replicas.leave() when the machine is to be taken "
            "away"
        )


class Departure:
    """One model's part in leaving. For the training thread; `ask` for any thread and signal handler.

    `companions` are those of all models of the script. `answer` tells those outside the job who have asked
    the workers to exit why the state was not saved, or nothing.
    """

    def __init__(
        self,
        session: Session,
        checkpoints: Checkpoints,
        companions: list[Departure],
        *,
        is_training: Callable[[], bool],
        has_trained: Callable[[], bool],
        answer: Callable[[str], None],
    ) -> None:
        self._session = session
        self._checkpoints = checkpoints
        self._companions = companions
        self._has_trained = has_trained
        self._answer = answer
        self._ends = False
        self.is_training = is_training
        self.left = False

    @property
    def ends(self) -> bool:
        """Whether the script has reached its end and need not be told to exit."""
        return self._ends

    @ends.setter
    def ends(self, ends: bool) -> None:
        self._ends = ends
        if ends:
            self._session.script_ends()

    def ask(self) -> None:
        """Asks all workers to leave at one boundary. Returns at once."""
        if not self.left and not self.ends:
            self._session.request("leave")

    def settle(self) -> None:
        """Settles open proposals together with all workers, unless all have left already."""
        for _ in range(WRONG_CALLS):
            if self.left:
                return
            try:
                self._session.begin()
                if not self.left:
                    self._session.rest("close")
            except ClusterError as error:
                # Another worker is at another call: both get this error, and it reaches its end later.
                logger.warning("worker %d is at the end of its script. %s", self._session.rank, error)
            else:
                return

    def leave(self, problem: str, asked_by: tuple[str, ...]) -> None:
        """Called at a boundary of all workers, after the save; then the process exits."""
        if not self._checkpoints.has_place:
            problem = "There is no run directory"
        elif problem:
            problem = self._checkpoints.why_not_written() or problem
        self._say(problem)
        if asked_by:
            self._answer(problem)
        for other in self._companions:
            if not other.left and other._has_trained():
                other._save_too()
        # Worker 0 hosts the coordination service: the others may still read from it.
        with contextlib.suppress(ReplicastError):
            self._session.exchange.agree("leave", "", self._session.timeouts.answer_secs)

    def _save_too(self) -> None:
        """Saves this model while another one leaves. All workers do so, and worker 0 reports the result."""
        try:
            problem = self._checkpoints.save_before_leaving()
        except (ReplicastError, OSError) as error:
            problem = str(error)
        with contextlib.suppress(ReplicastError):
            secs = self._session.timeouts.join_secs
            problem = self._session.exchange.agree("saved", problem, secs)[0] or problem
        self._say(problem)

    def _say(self, problem: str) -> None:
        self.left = True
        which = f" ({self._session.exchange.name})" if len(self._companions) > 1 else ""
        said = f"the state is not saved. {problem}" if problem else "the state is saved"
        logger.warning("worker %d was told to exit: %s%s", self._session.rank, said, which)
