"""The command line. `main` is its entry point; a command is loaded when it is used.

A command returns its exit code, None for 0. Errors become messages and exit codes here and nowhere else:

    0      done
    1      refused, failed or not found: the command is right, and cannot be done
    2      the command is wrong: usage, no such run directory, nothing was started
    3      the job is not running, or did not answer in time
    130    Ctrl-C
"""

from __future__ import annotations

import re
import signal
from importlib import import_module
from typing import IO, Any

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
    UpdateFailed,
    UpdateRefused,
    printable,
)

# Each command, the module of this package that has it, and its line in `replicast --help`.
COMMANDS = {
    "run": ("launch", "Start the workers of a job on this machine and supervise them."),
    "push": ("push", "Change the weights of a running job, on every worker."),
    "status": ("runs", "Show the workers, the metrics and the updates of a run."),
    "list": ("runs", "List the runs in a directory."),
    "log": ("runs", "List the updates that a run has committed."),
    "show": ("runs", "Show everything about one update."),
    "logs": ("runs", "Print the last lines of a worker's log; -f follows it."),
    "inspect": ("push", "List the variables of a run, or what is in a file."),
    "revert": ("push", "Undo a committed update with a new one."),
    "pull": ("push", "Write the live values of one variable to a file."),
    "withdraw": ("push", "Withdraw an update that is not committed yet."),
    "note": ("runs", "Keep a note and tags with a run or an update."),
    "audit": ("runs", "Show whether the replicas are equal; --now compares them."),
    "report": ("runs", "Write a report on a run into one HTML file."),
    "checkpoint": ("checkpoint", "List, verify, compare and patch checkpoints; make one now."),
    "stop": ("runs", "Stop a running job with a checkpoint."),
    "serve": ("launch", "See a job and steer it, from a browser or by HTTP."),
    "demo": ("story", "See it work, in under a minute."),
    "doctor": ("launch", "Check this machine, and say how to fix what is wrong."),
}
NO_ANSWER, STOPPED = 3, 128 + signal.SIGINT
_EXIT_CODES = {NoAnswer: NO_ANSWER} | dict.fromkeys(
    (NotFound, RequestFailed, RequestRefused, UpdateRefused, UpdateFailed, CheckpointError, FileDamaged), 1
)
_SAME = {name: name for name in ("step", "variable", "worker", "expected", "received")}
_FACTS = {"path": "checkpoint", **_SAME, "remedy": "what to do"}
_ARGUMENT = re.compile(r"\b(allow_nonfinite|next_start|force)=True")


class Failed(click.ClickException):
    """The command ends with a message and no traceback."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]

    def show(self, file: IO[Any] | None = None) -> None:
        is_error = self.exit_code != STOPPED
        click.echo(f"Error: {self.message}" if is_error else self.message, file, err=True)


class LazyGroup(click.Group):
    """Loads a command's module only when that command is used, so that help is quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        name = {"list": "list_runs"}.get(cmd_name, cmd_name)
        command: click.Command = getattr(import_module(f"replicast.cli.{COMMANDS[cmd_name][0]}"), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            ctx.exit(super().invoke(ctx) or 0)
        except ReplicastError as error:
            code = next((code for kind, code in _EXIT_CODES.items() if isinstance(error, kind)), 2)
            raise Failed(error_text(error), code) from error
        except OSError as error:
            if error.filename is None:  # For example a closed pipe, which click handles.
                raise
            raise Failed(printable(f"{error.filename}: {error.strerror}"), 2) from error
        except KeyboardInterrupt as error:
            raise Failed("Stopped.", STOPPED) from error


def error_text(error: ReplicastError) -> str:
    """An error, one fact per line; where it names an argument of Python, the option of the command line."""
    if not isinstance(error, UpdateRefused | CheckpointError | FileDamaged):
        return printable_lines(error)
    is_damage = isinstance(error, FileDamaged)  # Its headline has the path.
    lines = [one_line(getattr(error, "headline", error.problem))]
    for name, label in _FACTS.items():
        value = getattr(error, name, None)
        if value is not None and not (is_damage and name == "path"):
            lines.append(f"{label}: {one_line(value)}")
    text = "\n  ".join(lines)
    return _ARGUMENT.sub(lambda found: f"--{found[1].replace('_', '-')}", text)


def printable_lines(text: object) -> str:
    """Text of several lines, each made harmless for a terminal."""
    return "\n".join(printable(line) for line in str(text).split("\n"))


def one_line(text: object) -> str:
    """Text from a file in one line, made harmless for a terminal."""
    return printable(" ".join(str(text).split()))


@click.group(
    cls=LazyGroup,
    context_settings={
        "help_option_names": ["-h", "--help"],
        # --node_rank is --node-rank, as for `torchrun`. Not applied to values.
        "token_normalize_func": lambda name: name.replace("_", "-"),
    },
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

    Exit codes of all commands: 2 when the command is wrong, 3 when a job that is asked does not answer or is
    not running (1 for a push, which is refused), 130 after Ctrl-C. The help of each command says more.
    """
