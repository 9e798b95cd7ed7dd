"""`replicast inspect`: what a file would do as an update, whether a run would take it, and what a run has."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from replicast.cli import texts
from replicast.cli.arguments import RunType
from replicast.cli.edit_options import read_file, update_of_tensors
from replicast.cli.tables import make_console, make_table
from replicast.cli.update_tables import print_examination
from replicast.client import Run
from replicast.client.examination import examine, values_of
from replicast.update.edits import Array
from replicast.update.update import Update

_AS = ("add", "assign", "scale", "blend", "add-rows", "assign-rows", "add-low-rank")


@click.command()
@click.argument("file", type=click.Path(exists=True, path_type=Path), metavar="FILE|RUN")
@click.option(
    "--run",
    type=RunType(),
    metavar="RUN",
    help="Check the file against the variables of this run.",
)
@click.option("--as", "operation", type=click.Choice(_AS), help="What to do with a plain file's tensors.")
@click.option("--weight", type=float, metavar="W", help="With --as blend.")
def inspect(file: Path, run: Run | None, operation: str | None, weight: float | None) -> None:
    """Say what a file would do as an update, or list the variables of a run.

    FILE is a saved Update, or a plain safetensors file with --as; without --as, its tensors are listed. For a
    run directory, all variables are listed by the names that an update may use. Nothing is sent to the job.

    \b
    Examples:
      replicast inspect runs/first
      replicast inspect delta.safetensors --as add --run runs/first
      replicast inspect saved-update.safetensors
      replicast inspect runs/first/groups/000001/000042.safetensors

    Exit code: 0; 1 when it would be refused; 2 when the command is wrong, or --run is given without --as.
    """
    if (operation == "blend") != (weight is not None):
        raise click.UsageError("--as blend and --weight belong together: one needs the other.")
    if file.is_dir():
        if operation is not None or run is not None:
            raise click.UsageError(
                f"{texts.printable(file)} is a directory: --as and --run belong to a file."
            )
        _list_variables(RunType().convert(file, None, None))
        return
    found = read_file(file)
    if isinstance(found, Update):
        if operation is not None:
            raise click.UsageError("A saved update says itself what to do: leave --as out.")
        update = found
    elif operation is None:
        _list_tensors(found)
        click.echo("These are tensors without what to do with them: say it with --as, such as --as add.")
        sys.exit(0 if run is None else 2)
    else:
        update = update_of_tensors(found, operation, weight)
    examined = examine(update, None) if run is None else run.examine(update)
    print_examination(examined)
    sys.exit(1 if examined.problems else 0)


def _list_variables(run: Run) -> None:
    """The variables of a run, by the names that an update may use."""
    schema = run.schema()
    table = make_table("variable", "shape", "dtype", "size", "kind", right=("size",), whole=("dtype", "size"))
    for variable in schema:
        cells = texts.shape(variable.shape), variable.dtype, texts.size(variable.nbytes)
        table.add_row(texts.printable(variable.name), *cells, variable.kind.replace("_", "-"))
    make_console().print(table)
    click.echo(f"{texts.counted(len(schema), 'variable')}, {texts.size(sum(one.nbytes for one in schema))}")


def _list_tensors(tensors: dict[str, Array]) -> None:
    """The tensors of a plain file."""
    numbers = ("size", "norm")
    table = make_table("tensor", "shape", "dtype", *numbers, right=numbers, whole=numbers)
    for name, tensor in tensors.items():
        cells = texts.shape(tensor.shape), tensor.dtype.name, texts.size(tensor.nbytes)
        table.add_row(texts.printable(name), *cells, texts.number(values_of(tensor).norm))
    make_console().print(table)
