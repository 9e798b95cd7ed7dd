"""Worker 0 writes down what becomes of a job that no launcher watches (`storage/states.py`)."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from pathlib import Path

from replicast.config import read_launch
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

    def __init__(self, run_dir: Path | None, rank: int, workers: int, attempt: int) -> None:
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
            self.abandoned(step)
        else:
            self._write(State.STOPPED if told_to else State.FINISHED, step, "SIGTERM" if told_to else "")

    def abandoned(self, step: int) -> None:
        """The process exits without having come to the end."""
        error = getattr(sys, "last_value", None)  # what ended the script, set before exit handlers run
        lines = traceback.format_exception_only(error) if error is not None else []
        reason = lines[-1].strip() if lines else "it exited before its end"
        stopped = isinstance(error, KeyboardInterrupt)
        self._write(State.STOPPED if stopped else State.FAILED, step, "Ctrl-C" if stopped else reason)

    def _write(self, state: State, step: int | None = None, reason: str = "") -> None:
        if self._run_dir is None:
            return
        failed = 0 if state is State.FAILED else None
        change = Change(
            state,
            self._attempt,
            by="worker 0",
            workers=self._workers,
            step=step,
            worker=failed,
            reason=reason,
        )
        try:
            write_change(self._run_dir, change)
        except OSError as error:
            logger.warning("the state of the job cannot be written: %s", error)
