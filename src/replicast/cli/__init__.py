"""The command line. `main` is its entry point; a command is loaded when it is used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

from replicast import __version__
from replicast.errors import (
    CheckpointError,
    FileDamaged,
    NoAnswer,
    NotFound,
    ReplicastError,
    RequestFailed,
    RequestRefused,
    UpdateRefused,
)

COMMANDS = {
    "run": "Start the workers of a job on this machine and supervise them.",
    "push": "Change the weights of a running job, on every worker.",
    "status": "Show the workers, the metrics and the updates of a run.",
    "log": "List the updates that a run has committed.",
    "show": "Show everything about one update.",
    "inspect": "Say what a file would do; list a run's variables.",
    "revert": "Undo a committed update by a new one.",
    "pull": "Write the live values of one variable to a file.",
    "withdraw": "Take back an update that is not committed yet.",
    "audit": "Show whether the replicas are equal; --now compares them.",
    "report": "Write a report on a run into one HTML file.",
    "checkpoint": "List, verify, compare and patch checkpoints; make one now.",
    "stop": "Stop a running job with a checkpoint.",
    "serve": "See a job and steer it, from a browser or by HTTP.",
    "demo": "See it work, in under a minute.",
    "bench": "Measure what each operation costs on this machine.",
    "doctor": "Check this machine, and say how to fix what is wrong.",
}
"""Each command and its line in `replicast --help`; `replicast.cli.NAME` has the command NAME."""


_FAILURES = (NoAnswer, NotFound, RequestFailed, RequestRefused)
"""What ends a command with exit code 1: the command is right, and cannot be done."""


class Failed(click.ClickException):
    """The command ends with a message and no traceback: exit code 1 unless another is given."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]


class LazyGroup(click.Group):
    """Loads a command's module only when that command is used, so that help is quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Loads one command."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(import_module(f"replicast.cli.{cmd_name}"), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the list of commands without loading any."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command; an error of ours becomes a message and an exit code."""
        try:
            return super().invoke(ctx)
        except ReplicastError as error:
            raise _failed(error) from error
        except OSError as error:
            if error.filename is None:  # For example a closed pipe, which click handles.
                raise
            raise _failed(error) from error


def _failed(error: ReplicastError | OSError) -> Failed:
    from replicast.cli import texts  # Loads numpy, which help must not wait for.

    if isinstance(error, UpdateRefused | CheckpointError | FileDamaged):
        return Failed(texts.error(error))
    if isinstance(error, OSError):
        return Failed(texts.printable(f"{error.filename}: {error.strerror}"), 2)
    return Failed(texts.printable_lines(error), 1 if isinstance(error, _FAILURES) else 2)


def _with_hyphens(name: str) -> str:
    """The name of an option: --node_rank is --node-rank, as for `torchrun`. Not applied to values."""
    return name.replace("_", "-")


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": _with_hyphens},
)
@click.version_option(__version__, prog_name="replicast")
def main() -> None:
    """One worker writes, every replica follows: Keras 3 on several workers.

    \b
    Examples:
      replicast run -n 2 --run-dir runs/first train.py
      replicast push runs/first --set optimizer/learning_rate=0.0005 --wait
      replicast status runs/first
      replicast doctor
    """
