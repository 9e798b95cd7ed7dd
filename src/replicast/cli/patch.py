"""`replicast checkpoint patch`: applies an update to a checkpoint, into a new one or in place."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import click

from replicast.cli import Failed, texts
from replicast.cli.arguments import directory_of
from replicast.cli.checkpoint_argument import (
    PATH,
    is_checkpoint,
    path_argument,
    step_argument,
    the_checkpoint,
)
from replicast.cli.edit_options import EditCommand, check_usage, edit_options, update_of
from replicast.cli.tables import progress_bar
from replicast.cli.update_tables import print_examination, print_problems
from replicast.client import connect
from replicast.client.examination import examine
from replicast.client.patching import check_patch, checkpoint_to_patch, patch_in_place
from replicast.errors import JobFailed
from replicast.paths import RunPath
from replicast.storage.checkpoint_files import open_checkpoint
from replicast.storage.checkpoint_format import Manifest
from replicast.storage.checkpoint_tools import patch as patch_checkpoint
from replicast.storage.journal import NotWritten, PerhapsWritten
from replicast.update.update import Update


@click.command(cls=EditCommand)
@path_argument
@step_argument
@edit_options
@click.option("-o", "--output", type=PATH, metavar="OUT", help="The new checkpoint; must not exist yet.")
@click.option("--in-place", is_flag=True, help="Replace the checkpoint of RUN, as an update of its journal.")
@click.option("--note", metavar="TEXT", help="Why. Readers of the journal see it.")
@click.option("--author", metavar="TEXT", help="Who. [default: user@host]")
@click.pass_context
def patch(
    context: click.Context,
    /,
    path: Path,
    step: int | None,
    output: Path | None,
    in_place: bool,
    **options: Any,
) -> None:
    """Apply an update to a checkpoint: into a new one, or in place.

    The new checkpoint has the bits that every replica would have had if the update had been applied at that
    step; it names the one it was made from. Operations and files are those of `replicast push`, in the order
    in which they are given. Memory is needed for the update, not for the checkpoint.

    With --in-place, the update becomes part of the journal of RUN: `replicast log` shows it, and the next
    start goes on from the patched checkpoint, that of STEP or the last one. No job may be running.

    \b
    Examples:
      replicast checkpoint patch runs/first --in-place --add delta.safetensors --note "fix drifted bias"
      replicast checkpoint patch runs/first 1200 --in-place --set learning_rate=1e-4 --dry-run
      replicast checkpoint patch runs/first/checkpoints/00001200-1 --add delta.safetensors -o patched
      replicast checkpoint patch old/00001200-1 --update fix.safetensors -o runs/second/checkpoints/00001200

    Exit code: 0; 1 when the update is refused, the checkpoint is damaged, OUT exists, or a job is running in
    RUN; 2 when the command is wrong.
    """
    check_usage(options)
    if in_place and output is not None:
        raise click.UsageError("--in-place replaces the checkpoint of the run: leave -o out.")
    if in_place and is_checkpoint(path):
        raise click.UsageError(f"--in-place needs the run, and the step: {texts.printable(path)} is neither.")
    if not in_place and output is None and not options["dry_run"]:
        raise click.UsageError(
            "Missing option '-o' / '--output': where to write the new checkpoint; or --in-place."
        )
    source = the_checkpoint(path, checkpoint_to_patch(directory_of(path), step).step if in_place else step)
    with open_checkpoint(source) as reader:
        before = reader.manifest
    update = update_of(context, options)
    found = examine(update, before.schema)
    if options["dry_run"]:
        print_examination(found)
    else:
        print_problems(found)
    if found.problems:
        sys.exit(1)
    if in_place and options["dry_run"]:
        check_patch(path, before.step, update)
    if options["dry_run"]:
        return
    if output is None:
        _patch_in_place(path, before.step, update)
    else:
        _patch_into(output, source, before, update)


def _patch_into(output: Path, source: RunPath, before: Manifest, update: Update) -> None:
    """Writes the patched checkpoint elsewhere, and says what has changed."""
    try:
        with progress_bar(f"patching {source.name}") as progress:
            after = patch_checkpoint(source, update, output, progress=progress)
    except OSError as error:
        raise Failed(
            f"{texts.printable(output)} cannot be written ({error.strerror}): nothing is left there."
        ) from error
    except KeyboardInterrupt:
        click.echo("Stopped. Nothing is left at the destination.", err=True)
        sys.exit(128 + signal.SIGINT)
    click.echo(f"patched {texts.printable(output)}: {_changed_text(before, after)}")
    click.echo(f"  state {after.state_digest}")


def _patch_in_place(run: Path, step: int, update: Update) -> None:
    """Replaces a checkpoint of a run, and says what has changed and where the update stands."""
    try:
        with progress_bar(f"patching step {step}") as progress:
            done = patch_in_place(run, step, update, progress=progress)
    except (OSError, JobFailed, NotWritten, PerhapsWritten, KeyboardInterrupt) as error:
        said = texts.one_line(error.strerror if isinstance(error, OSError) else str(error) or "Stopped")
        known = any(view.id == update.id for view in connect(run).log())
        fate = (
            "The journal has the update: the next start applies it at its step, or at once if it is past it."
            if known
            else "Nothing has changed."
        )
        code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        raise Failed(
            f"The checkpoint of step {step} is not patched: {said.rstrip('.')}. {fate}", code
        ) from error
    click.echo(f"patched {texts.printable(done.path)}: {_changed_text(done.before, done.after)}")
    click.echo(f"  state {done.after.state_digest}")
    click.echo(f"  update {done.sequence} of the journal ({texts.printable(update.id)})")
    click.echo("  the next start of the job goes on from it")


def _changed_text(before: Manifest, after: Manifest) -> str:
    changed = sum(after.digests[name] != digest for name, digest in before.digests.items())
    of = f"{changed} of {texts.counted(len(after.digests), 'variable')} changed"
    return f"{of}, {texts.size(after.nbytes)}, step {after.step}"
