"""`replicast checkpoint`: what can be done with checkpoints from a command line. Loads little by itself."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from replicast.cli.checkpoint_patch import patch
from replicast.errors import CheckpointError

_PATH = click.Path(path_type=Path)


class CheckpointGroup(click.Group):
    """Commands in the order in which they were added."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """As in the code below."""
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs a command; a checkpoint that cannot be used becomes a message and exit code 1."""
        try:
            return super().invoke(ctx)
        except CheckpointError as error:
            from replicast.cli import Refused
            from replicast.cli.checkpoint_views import error_text

            raise Refused(error_text(error)) from error


@click.group(cls=CheckpointGroup)
def checkpoint() -> None:
    """List, show, verify, compare and patch checkpoints.

    A checkpoint is a directory such as RUN/checkpoints/00001200-1. TensorFlow is not needed here.

    \b
    Examples:
      replicast checkpoint list runs/first
      replicast checkpoint verify runs/first
      replicast checkpoint patch runs/first/checkpoints/00001200-1 --add delta.safetensors -o patched
    """  # noqa: D301 - click wants a real backspace


@checkpoint.command("list")
@click.argument("run", type=_PATH, metavar="RUN")
@click.option("--json", "as_json", is_flag=True, help="One object a line, without the list of variables.")
def list_(run: Path, as_json: bool) -> None:
    """List the committed checkpoints of a run.

    \b
    Examples:
      replicast checkpoint list runs/first
      replicast checkpoint list runs/first --json | jq .step

    Exit code: 0; 1 when one is damaged, which is named; 2 when RUN is not a run directory.
    """  # noqa: D301 - click wants a real backspace
    from replicast.cli.checkpoint_targets import checked_run
    from replicast.cli.checkpoint_views import print_list

    sys.exit(print_list(checked_run(run), as_json=as_json))


@checkpoint.command()
@click.argument("path", type=_PATH, metavar="PATH|RUN")
@click.argument("step", type=click.IntRange(min=0), required=False)
@click.option("--json", "as_json", is_flag=True, help="The manifest as one JSON object.")
def show(path: Path, step: int | None, as_json: bool) -> None:
    """Show what a checkpoint says of itself, and its variables.

    Of a RUN, the checkpoint of STEP, or the last one.

    \b
    Examples:
      replicast checkpoint show runs/first
      replicast checkpoint show runs/first 1200
      replicast checkpoint show runs/first/checkpoints/00001200-1 --json | jq .metrics

    Exit code: 0; 1 when there is no such checkpoint or it is damaged; 2 when the command is wrong.
    """  # noqa: D301 - click wants a real backspace
    from replicast.cli.checkpoint_targets import the_checkpoint
    from replicast.cli.checkpoint_views import print_checkpoint

    print_checkpoint(the_checkpoint(path, step), as_json=as_json)


@checkpoint.command()
@click.argument("path", type=_PATH, metavar="PATH|RUN")
@click.argument("step", type=click.IntRange(min=0), required=False)
def verify(path: Path, step: int | None) -> None:
    """Read every byte of one checkpoint, or of all of a run, and compare their digests.

    \b
    Examples:
      replicast checkpoint verify runs/first
      replicast checkpoint verify runs/first 1200
      replicast checkpoint verify backup/00001200

    Exit code: 0 when all is what was written; 1 when something is damaged, which is named; 2 when the command
    is wrong.
    """  # noqa: D301 - click wants a real backspace
    from replicast.cli.checkpoint_targets import is_checkpoint, the_checkpoint
    from replicast.cli.checkpoint_views import verify_all, verify_one

    if step is None and not is_checkpoint(path):
        from replicast.cli.checkpoint_targets import checked_run

        sys.exit(verify_all(checked_run(path)))
    sys.exit(verify_one(the_checkpoint(path, step)))


@checkpoint.command()
@click.argument("first", type=_PATH, metavar="A")
@click.argument("second", type=_PATH, metavar="B")
@click.option("--digests-only", is_flag=True, help="Only say which differ, without reading their values.")
@click.option("--all", "also_equal", is_flag=True, help="List equal variables too.")
@click.option("--json", "as_json", is_flag=True, help="One object a line: a variable.")
def diff(first: Path, second: Path, digests_only: bool, also_equal: bool, as_json: bool) -> None:
    """Compare two checkpoints, variable by variable and bit for bit.

    A and B are checkpoints, or runs, of which the last is taken.

    \b
    Examples:
      replicast checkpoint diff runs/first/checkpoints/00001200-1 patched
      replicast checkpoint diff runs/first runs/second --digests-only

    Exit code: 0 when every bit is equal; 1 when not, or when one is damaged; 2 when the command is wrong.
    """  # noqa: D301 - click wants a real backspace
    from replicast.cli.checkpoint_targets import the_checkpoint
    from replicast.cli.checkpoint_views import print_diff

    paths = the_checkpoint(first, None), the_checkpoint(second, None)
    sys.exit(print_diff(*paths, values=not digests_only, also_equal=also_equal, as_json=as_json))


checkpoint.add_command(patch)
