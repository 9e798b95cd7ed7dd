"""What a process outside of the job does in the middle of an act: a command, as people type it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

STOP_SECS = 3.0


@dataclass(frozen=True, slots=True)
class Errand:
    """One command.

    Attributes:
        announcement: What the screen says before it.
        arguments: What follows the program on the command line.
        directory: Where it is run.
        program: `replicast`, or a command that every shell has.
        then: What the progress bar says when it has ended, until a worker tells more.
    """

    announcement: str
    arguments: tuple[str, ...]
    directory: Path
    program: str = "replicast"
    then: str = ""

    @property
    def command(self) -> str:
        """The command as people type it."""
        return f"{self.program} {shlex.join(self.arguments)}"


class RunningErrand(Protocol):
    """A process on its way."""

    def exit_code(self, wait_secs: float = 0.0) -> int | None:
        """Its exit code, or None when it has not ended within so many seconds."""

    def output(self) -> str:
        """What it has printed so far, errors included."""

    def stop(self) -> None:
        """Ends it if it has not ended."""


def start(errand: Errand, width: int) -> RunningErrand:
    """Starts a process of its own for an errand.

    Args:
        errand: What to run.
        width: How many columns its output may take.
    """
    return _Process(errand, width)


class _Process:
    def __init__(self, errand: Errand, width: int) -> None:
        ours = errand.program == "replicast"
        # Into a file: nobody has to read it while the process runs.
        self._output = errand.directory / f"{errand.arguments[0] if ours else errand.program}.log"
        # -P: a file of the current directory must not take the place of a module.
        command = [sys.executable, "-P", "-m", "replicast.cli", *errand.arguments]
        if not ours:
            command = ["sh", "-c", errand.command]  # Not every machine has a `kill` outside of its shell.
        with self._output.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                cwd=errand.directory,
                env={**os.environ, "COLUMNS": str(width)},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                process_group=0,  # Ctrl-C is for the demo, which then stops it.
            )

    def exit_code(self, wait_secs: float = 0.0) -> int | None:
        """Its exit code, or None when it has not ended within so many seconds."""
        try:
            return self._process.wait(wait_secs)
        except subprocess.TimeoutExpired:
            return None

    def output(self) -> str:
        """What it has printed so far, errors included."""
        return self._output.read_text(encoding="utf-8", errors="replace")

    def stop(self) -> None:
        """Ends it if it has not ended: asked first, then made to."""
        if self.exit_code() is None:
            self._process.terminate()
        if self.exit_code(STOP_SECS) is None:
            self._process.kill()
            self._process.wait()
