"""`replicast inspect`: what a file would do as an update, whether a run would take it, and what a run has."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from replicast.cli.rundirs import checked_run, run_option

if TYPE_CHECKING:
    from replicast.edits import Array

_AS = ("add", "assign", "scale", "blend", "add-rows", "assign-rows", "add-low-rank")


@click.command()
@click.argument("file", type=click.Path(exists=True, path_type=Path), metavar="FILE|RUN")
@run_option
@click.option("--as", "operation", type=click.Choice(_AS), help="What to do with a plain file's tensors.")
@click.option("--weight", type=float, metavar="W", help="With --as blend.")
def inspect(file: Path, run: Path | None, operation: str | None, weight: float | None) -> None:
    """Say what a file would do as an update, or list the variables of a run.

    FILE is a saved Update, or a plain safetensors file with --as; without --as, its tensors are listed.
    Of a run directory, all variables are listed by the names that an update may use. Nothing is sent to the
    job.

    \b
    Examples:
      replicast inspect runs/first
      replicast inspect delta.safetensors --as add --run runs/first
      replicast inspect saved-update.safetensors
      replicast inspect runs/first/groups/000001/000042.safetensors

    Exit code: 0; 1 when it would be refused; 2 when the command is wrong, or --run is given without --as.
    """  # noqa: D301 - click wants a real backspace
    if (operation == "blend") != (weight is not None):
        raise click.UsageError("--as blend and --weight belong together: one needs the other.")
    if file.is_dir():
        if operation is not None or run is not None:
            raise click.UsageError(f"{file} is a directory: --as and --run belong to a file.")
        _list_variables(checked_run(file))
        return
    from replicast.cli.assembling import Head, Part, assembled, read_file
    from replicast.cli.examination import examine
    from replicast.cli.pushing import print_examination
    from replicast.cli.tables import make_console
    from replicast.edits import Operation
    from replicast.parts import edits_of_tensors
    from replicast.runfiles import read_run_info
    from replicast.update import Update

    found = read_file(file)
    if isinstance(found, Update):
        if operation is not None:
            raise click.UsageError(f"{file} is a saved update, which says what to do: leave --as out.")
        part = Part(found.edits, found)
    elif operation is None:
        _list_tensors(found.tensors)
        click.echo("These are tensors without what to do with them: say it with --as, such as --as add.")
        sys.exit(0 if run is None else 2)
    else:
        part = Part(edits_of_tensors(found.tensors, Operation(operation.replace("-", "_")), weight))
    schema = None if run is None else read_run_info(run).schema
    examination = examine(assembled([part], Head()), schema)
    print_examination(examination, make_console())
    sys.exit(1 if examination.problems else 0)


def _list_variables(run: Path) -> None:
    """The variables of a run, by the names that an update may use."""
    from replicast.cli.tables import make_console, make_table
    from replicast.cli.texts import counted, printable, shape_text, size_text
    from replicast.runfiles import read_run_info

    schema = read_run_info(run).schema
    table = make_table("variable", "shape", "dtype", "size", "kind", right=("size",), whole=("dtype", "size"))
    for variable in schema:
        cells = shape_text(variable.shape), variable.dtype, size_text(variable.nbytes)
        table.add_row(printable(variable.name), *cells, variable.kind.replace("_", "-"))
    make_console().print(table)
    click.echo(f"{counted(len(schema), 'variable')}, {size_text(sum(one.nbytes for one in schema))}")


def _list_tensors(tensors: Mapping[str, Array]) -> None:
    """The tensors of a plain file."""
    from replicast.cli.examination import numbers_of
    from replicast.cli.tables import make_console, make_table
    from replicast.cli.texts import number_text, printable, shape_text, size_text

    table = make_table(
        "tensor", "shape", "dtype", "size", "norm", right=("size", "norm"), whole=("size", "norm")
    )
    for name, tensor in tensors.items():
        norm = number_text(numbers_of(tensor).norm)
        cells = shape_text(tensor.shape), tensor.dtype.name, size_text(tensor.nbytes), norm
        table.add_row(printable(name), *cells)
    make_console().print(table)
