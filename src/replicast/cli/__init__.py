"""The command line. `main` is its entry point; a command is loaded when it is used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

from replicast import __version__
from replicast.errors import FileDamaged, ReplicastError, UpdateRefused

COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("replicast.cli.run:run", "Start the workers of a job on this machine and watch over them."),
    "push": ("replicast.cli.push:push", "Change the weights of a running job, on every worker."),
    "status": ("replicast.cli.status:status", "Show the workers, the metrics and the updates of a run."),
    "log": ("replicast.cli.log:log", "List the updates that a run has committed."),
    "show": ("replicast.cli.show:show", "Show everything about one update."),
    "inspect": ("replicast.cli.inspect:inspect", "Say what a file would do; list a run's variables."),
    "withdraw": ("replicast.cli.withdraw:withdraw", "Take back an update that is not applied yet."),
    "audit": ("replicast.cli.audit:audit", "Show whether the replicas are equal; --now looks."),
    "checkpoint": ("replicast.cli.checkpoint:checkpoint", "List, verify, compare and patch checkpoints."),
    "demo": ("replicast.cli.demo:demo", "See it work, in under a minute."),
    "doctor": ("replicast.cli.doctor:doctor", "Check this machine, and say how to fix what is wrong."),
}
"""Each command's place and its line in `replicast --help`."""


class Refusal(click.ClickException):
    """An error that people can do something about: no traceback. Nothing was begun."""

    exit_code = 2


class Refused(Refusal):
    """An update is refused, or a file of the run cannot be trusted."""

    exit_code = 1


class LazyGroup(click.Group):
    """Loads a command's module only when that command is used, so that help is quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Loads one command."""
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        command = getattr(import_module(module), name)
        if not isinstance(command, click.Command):
            raise TypeError(f"{COMMANDS[cmd_name][0]} is no command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the list of commands without loading any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command; an error of ours becomes a message and an exit code."""
        try:
            return super().invoke(ctx)
        except UpdateRefused as error:
            from replicast.cli.texts import refusal_text

            raise Refused(refusal_text(error)) from error
        except FileDamaged as error:
            from replicast.cli.texts import printable

            raise Refused(printable(str(error))) from error
        except ReplicastError as error:
            from replicast.cli.texts import printable_lines

            raise Refusal(printable_lines(str(error))) from error
        except OSError as error:
            if error.filename is None:  # a pipe that nobody reads, for one, which click knows how to end
                raise
            from replicast.cli.texts import printable

            raise Refusal(printable(f"{error.filename}: {error.strerror}")) from error


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="replicast")
def main() -> None:
    """One worker writes, every replica follows: Keras 3 on several workers.

    \b
    Examples:
      replicast run -n 2 --run-dir runs/first train.py
      replicast push runs/first --set optimizer/learning_rate=0.0005 --wait
      replicast status runs/first
      replicast doctor
    """  # noqa: D301 - click wants a real backspace
