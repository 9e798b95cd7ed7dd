"""`replicast pull`: the live values of one variable, as a file."""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np

from replicast.cli import Failed, texts
from replicast.cli.arguments import run_argument, timeout_option
from replicast.client import Run
from replicast.errors import NoAnswer
from replicast.files import tensor_chunks, write_durably
from replicast.strictjson import parse_integer

NO_ANSWER, DIFFER = 3, 4
_MAX_ROWS = 10_000_000


class RowsType(click.ParamType):  # type: ignore[type-arg]
    """Rows and ranges of rows: 1,5,10:20."""

    name = "rows"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """The rows, in the given order."""
        rows: list[int] = []
        for part in str(value).split(","):
            first, colon, end = part.strip().partition(":")
            try:
                start = parse_integer(first)
                stop = parse_integer(end) if colon else start + 1
            except ValueError as error:
                said = f"Rows are given as 1,5,10:20, where 20 is not included; {error}."
                self.fail(f"{said} Received: {part[:80]}", param, ctx)
            if not 0 <= start < stop or len(rows) + stop - start > _MAX_ROWS:
                self.fail(f"A range has rows, at most {_MAX_ROWS} in all. Received: {part[:80]}", param, ctx)
            rows.extend(range(start, stop))
        return tuple(rows)


@click.command()
@run_argument
@click.argument("name")
@click.option("--rows", type=RowsType(), metavar="1,5,10:20", help="Only these rows. [default: all]")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    metavar="FILE",
    help="Ends in .npy or .safetensors.",
)
@timeout_option
def pull(run: Run, name: str, rows: tuple[int, ...] | None, output: Path, timeout: float) -> None:
    """Write the live values of one variable of a job to a file.

    All workers stop at one step for a moment and compare their digests; worker 0 gives the values. When no
    job runs, they are those of the last checkpoint. NAME is the variable's name; any unique suffix works.

    \b
    Examples:
      replicast pull runs/first dense/bias -o bias.npy
      replicast pull runs/first embeddings --rows 1,5,10:20 -o rows.safetensors

    Exit code: 0 when the file is written; 1 when there is no such variable or row, or the job refuses it; 2
    when the command is wrong; 3 when the job does not answer; 4 when the file is written and the workers have
    different values: it has those of worker 0.
    """
    if output.suffix not in (".npy", ".safetensors"):
        raise click.BadParameter("It must end in .npy or .safetensors.", param_hint="--output")
    try:
        pulled = run.pull(name, rows, timeout)
    except NoAnswer as error:
        raise Failed(texts.printable(error), NO_ANSWER) from error
    array = np.asarray(pulled.array)
    if output.suffix == ".npy":
        if array.dtype.name == "bfloat16":
            raise Failed("A .npy file has no bfloat16: write a .safetensors file.", 2)
        with output.open("wb") as file:
            np.save(file, array, allow_pickle=False)
    else:
        write_durably(output, tensor_chunks({pulled.name: array}, {"step": str(pulled.step)}))
    click.echo(
        f"{texts.printable(pulled.name)}: {texts.shape(array.shape)} {array.dtype.name} "
        f"at step {pulled.step}, from the {pulled.source}, digest {pulled.digest}"
    )
    if pulled.differing:
        workers = ", ".join(map(str, pulled.differing))
        raise Failed(
            f"The workers have different values: those of worker {workers} are not those of worker 0, which "
            f"are in {output}. Compare all: replicast audit {run.where} --now",
            DIFFER,
        )
