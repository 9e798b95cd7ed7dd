"""What the commands about a run share: the argument RUN, and how long to wait for the job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from replicast.cli import texts
from replicast.client import Run, connect
from replicast.errors import NotFound
from replicast.paths import below


class RunType(click.ParamType):  # type: ignore[type-arg]
    """A run directory, or the address of a served run."""

    name = "run"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Run:
        """The run that is meant; a usage error names those near it."""
        if isinstance(value, Run):
            return value
        try:
            return connect(value)
        except NotFound as error:
            raise click.BadParameter(texts.printable(error), ctx, param) from error


run_argument = click.argument("run", type=RunType())
timeout_option = click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    default=300.0,
    metavar="SECS",
    show_default=True,
    help="How long to wait for the job.",
)


def directory_of(path: Path) -> Path:
    """The path, if it is a run directory or has checkpoints; else a usage error that names those near it."""
    if not (below(path) / "checkpoints").is_dir():
        RunType().convert(path, None, None)
    return path
