"""Which checkpoint a command line means: one by its directory, or one of a run."""

from __future__ import annotations

import os
from pathlib import Path

import click

from replicast.checkpoint import CheckpointStore
from replicast.checkpoint.writing import COMMITTED, MANIFEST, STATE
from replicast.cli.rundirs import is_run
from replicast.cli.texts import printable
from replicast.errors import CheckpointError


def is_checkpoint(path: Path) -> bool:
    """Whether a directory looks like a checkpoint, whole or not."""
    return any((path / name).exists() for name in (COMMITTED, MANIFEST, STATE))


def checked_run(path: Path) -> Path:
    """A run directory.

    Raises:
        click.BadParameter: It is none.
    """
    name = printable(str(path))
    if not path.is_dir():
        raise click.BadParameter(f"There is no directory {name}.")
    if not os.access(path, os.R_OK | os.X_OK):
        raise click.BadParameter(f"The directory {name} cannot be read by this user.")
    if is_run(path) or (path / "checkpoints").is_dir():
        return path
    near = path.parent if path.name == "checkpoints" else None
    hint = f" Perhaps: {printable(str(near))}." if near is not None else ""
    raise click.BadParameter(f"{name} is not a run directory: it has neither groups nor checkpoints.{hint}")


def the_checkpoint(path: Path, step: int | None) -> Path:
    """The directory of the checkpoint that is meant: of a run, that of the step, or the last.

    Raises:
        click.UsageError: Neither a checkpoint nor a run, or a step of a single checkpoint.
        CheckpointError: The run has none.
    """
    if is_checkpoint(path):
        if step is not None:
            raise click.UsageError(f"{path} is a checkpoint itself: leave the step out.")
        return path
    store = CheckpointStore(checked_run(path))
    if step is not None:
        return store.find(step)
    last, skipped = store.last_and_skipped()
    for problem in skipped:
        click.echo(f"Skipped: {printable(str(problem))}", err=True)
    if last is None:
        raise CheckpointError(
            "The run has no checkpoint that can be used",
            path=path / "checkpoints",
            received="none",
            remedy=f"See: replicast checkpoint list {path}",
        )
    return store.find(last.step)
