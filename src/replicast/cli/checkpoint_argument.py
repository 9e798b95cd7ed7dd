"""The argument of commands about a checkpoint: its directory, or a run and a step."""

from __future__ import annotations

from pathlib import Path

import click

from replicast.cli import texts
from replicast.cli.arguments import directory_of
from replicast.errors import CheckpointError
from replicast.paths import RunDir, RunPath, below
from replicast.storage.checkpoint_files import COMMITTED, MANIFEST, STATE
from replicast.storage.checkpoints import CheckpointStore

PATH = click.Path(path_type=Path)
path_argument = click.argument("path", type=PATH, metavar="PATH|RUN")
step_argument = click.argument("step", type=click.IntRange(min=0), required=False)


def is_checkpoint(path: RunDir) -> bool:
    """Whether a directory looks like a checkpoint, complete or not."""
    return any((below(path) / name).exists() for name in (COMMITTED, MANIFEST, STATE))


def the_checkpoint(path: Path, step: int | None) -> RunPath:
    """The directory of the checkpoint that is meant: of a run, that of the step, or the last."""
    if is_checkpoint(path):
        if step is not None:
            raise click.UsageError(f"{texts.printable(path)} is a checkpoint itself: leave the step out.")
        return below(path)
    store = CheckpointStore(directory_of(path))
    if step is not None:
        return store.find(step)
    last, skipped = store.last_and_skipped()
    for problem in skipped:
        click.echo(f"Skipped: {texts.printable(problem)}", err=True)
    if last is None:
        raise CheckpointError(
            "The run has no checkpoint that can be used",
            path=path / "checkpoints",
            received="none",
            remedy=f"See: replicast checkpoint list {path}",
        )
    return store.find(last.step)
