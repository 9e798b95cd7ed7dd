"""Worker 0 writes down what becomes of a job that no launcher watches (`storage/states.py`)."""

from __future__ import annotations

import logging
import os
import sys
import traceback

from replicast.config import read_launch
from replicast.errors import JobFailed
from replicast.files import RunDir
from replicast.storage.states import Change, State, write_change

logger = logging.getLogger("replicast")


class RunStates:
    """The states of a job without a launcher. Does nothing on other workers, or under a launcher.

    Args:
        run_dir: The run directory, if there is one.
        rank: Which worker this is.
        workers: How many workers the job has.
        attempt: The number of this attempt of the job.
    """

    def __init__(self, run_dir: RunDir | None, rank: int, workers: int, attempt: int) -> None:
        writes = rank == 0 and not read_launch(os.environ).launched
        self._run_dir = run_dir if writes else None
        self._workers = workers
        self._attempt = attempt

    def starting(self) -> None:
        """The workers have met."""
        self._write(State.STARTING)

    def ended(self, step: int, *, told_to: bool, at_exit: bool) -> None:
        """The script has come to its end, or all workers were told to save and exit.

        At the exit of the process it may have raised: a job of one worker is closed all the same. An exit by
        `sys.exit` cannot be told from the end of the script.
        """
        if at_exit and not told_to and getattr(sys, "last_value", None) is not None:
            self.abandoned(step, None)
        else:
            self._write(State.STOPPED if told_to else State.FINISHED, step, "SIGTERM" if told_to else "")

    def abandoned(self, step: int, failure: JobFailed | None) -> None:
        """The process exits without having come to the end.

        Args:
            step: The last step.
            failure: Why the job failed, if that is known: often another worker is the cause.
        """
        error = getattr(sys, "last_value", None)  # what ended the script, set before exit handlers run
        if failure is not None and failure.worker not in (None, 0):
            self._write(State.FAILED, step, str(failure), failure.worker)
        elif isinstance(error, KeyboardInterrupt):
            self._write(State.STOPPED, step, "Ctrl-C")
        else:
            self._write(State.FAILED, step, _said(error), 0)

    def _write(
        self, state: State, step: int | None = None, reason: str = "", worker: int | None = None
    ) -> None:
        if self._run_dir is None:
            return
        change = Change(
            state,
            self._attempt,
            by="worker 0",
            workers=self._workers,
            step=step,
            worker=worker,
            reason=reason,
        )
        try:
            write_change(self._run_dir, change)
        except OSError as error:
            logger.warning("the state of the job cannot be written: %s", error)


def _said(error: BaseException | None) -> str:
    """What ended the script, in one line: TensorFlow's errors have hundreds."""
    if error is None:
        return "it exited before its end"
    lines = "".join(traceback.format_exception_only(error)).split("\n")
    return next((line.strip() for line in lines if line.strip()), type(error).__name__)
