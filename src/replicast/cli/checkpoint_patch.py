"""`replicast checkpoint patch`: an update applied to a checkpoint. Its operations are those of `push`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from replicast.cli.push import OPERATIONS, ORDER, InOrder, check_usage, in_order, push

if TYPE_CHECKING:
    from replicast.checkpoint import Manifest
    from replicast.update import Update

_SHARED = (*OPERATIONS, "weight", "reset_slots", "allow_nonfinite", "dry_run")


@click.command(cls=InOrder, params=[option for option in push.params if option.name in _SHARED])
@click.argument("path", type=click.Path(path_type=Path), metavar="PATH")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="OUT",
    help="The directory of the new checkpoint, which must not be there yet. Needed but for --dry-run.",
)
@click.pass_context
def patch(context: click.Context, /, path: Path, output: Path | None, **options: Any) -> None:
    """Apply an update to a checkpoint, into a new one.

    The new checkpoint has the bits that every replica would have had, had the update been applied at that
    step; it names the one it was made from. Operations and files are those of `replicast push`, in the order
    in which they are given. Memory is needed for the update, not for the checkpoint.

    \b
    Examples:
      replicast checkpoint patch runs/first/checkpoints/00001200-1 --add delta.safetensors -o patched
      replicast checkpoint patch runs/first/checkpoints/00001200-1 --set learning_rate=1e-4 -o patched
      replicast checkpoint patch old/00001200-1 --update fix.safetensors -o runs/second/checkpoints/00001200

    Exit code: 0; 1 when the update is refused, the checkpoint is damaged, or OUT is there already; 2 when the
    command is wrong.
    """  # noqa: D301 - click wants a real backspace
    check_usage(options)
    if output is None and not options["dry_run"]:
        raise click.UsageError("Missing option '-o' / '--output': where the new checkpoint is to be.")
    operations = in_order(context.meta[ORDER], options)
    from replicast.checkpoint import open_checkpoint
    from replicast.cli.assembling import Head, assembled
    from replicast.cli.checkpoint_targets import the_checkpoint
    from replicast.cli.examination import examine
    from replicast.cli.pushing import print_examination, print_problems
    from replicast.cli.tables import make_console

    source = the_checkpoint(path, None)
    with open_checkpoint(source) as reader:
        before = reader.manifest
    head = Head(reset_slots=options["reset_slots"], allow_nonfinite=options["allow_nonfinite"])
    parts = [_part(name, value, options["weight"]) for name, value in operations]
    update = assembled(parts, head)
    found = examine(update, before.schema)
    if output is None or options["dry_run"]:
        print_examination(found, make_console())
        sys.exit(1 if found.problems else 0)
    if found.problems:
        print_problems(found)
        sys.exit(1)
    _say(before, _patched(source, update, output), output)


def _part(name: str, value: Any, weight: float | None) -> Any:
    from replicast.cli.assembling import number_part, saved_part, tensors_part
    from replicast.edits import Operation

    if not isinstance(value, Path):
        return number_part(Operation(name), *value)
    if name == "saved":
        return saved_part(value)
    return tensors_part(value, Operation(name), weight if name == Operation.BLEND else None)


def _patched(source: Path, update: Update, output: Path) -> Manifest:
    from replicast.checkpoint import patch as patch_checkpoint
    from replicast.cli import Refused
    from replicast.cli.checkpoint_views import progress_bar
    from replicast.cli.texts import printable

    try:
        with progress_bar(f"patching {source.name}") as progress:
            return patch_checkpoint(source, update, output, progress=progress)
    except OSError as error:
        raise Refused(
            f"{printable(str(output))} cannot be written ({error.strerror}): nothing is left there."
        ) from error
    except KeyboardInterrupt:
        click.echo("Stopped. Nothing is left at the destination.", err=True)
        sys.exit(130)


def _say(before: Manifest, after: Manifest, output: Path) -> None:
    from replicast.cli.texts import counted, printable, size_text

    changed = sum(after.digests[name] != digest for name, digest in before.digests.items())
    click.echo(
        f"patched {printable(str(output))}: {changed} of {counted(len(after.digests), 'variable')} changed, "
        f"{size_text(after.nbytes)}, step {after.step}\n  state {after.state_digest}"
    )
