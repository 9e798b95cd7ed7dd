"""`replicast checkpoint`: list, show, verify, compare and patch checkpoints, without a job or TensorFlow."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from rich.table import Table
from rich.text import Text

from replicast.cli import Failed, texts
from replicast.cli.arguments import directory_of, run_argument, timeout_option
from replicast.cli.checkpoint_argument import (
    PATH,
    is_checkpoint,
    path_argument,
    step_argument,
    the_checkpoint,
)
from replicast.cli.patch import patch
from replicast.cli.tables import facts_table, make_console, make_table, progress_bar
from replicast.client import Run
from replicast.errors import FileDamaged, NoAnswer
from replicast.paths import RunPath
from replicast.storage.checkpoint_files import open_checkpoint
from replicast.storage.checkpoint_format import Manifest
from replicast.storage.checkpoint_tools import Comparison, Verdict
from replicast.storage.checkpoint_tools import diff as compare
from replicast.storage.checkpoints import CheckpointStore

_NO_ANSWER = 3
_NONE_YET = "The run has no checkpoints yet."


@click.group()
def checkpoint() -> None:
    """List, show, verify, compare and patch checkpoints; make one now.

    A checkpoint is a directory such as RUN/checkpoints/00001200-1. TensorFlow is not needed here.

    \b
    Examples:
      replicast checkpoint list runs/first
      replicast checkpoint now runs/first
      replicast checkpoint verify runs/first
      replicast checkpoint patch runs/first --in-place --add delta.safetensors
    """


@checkpoint.command("list")
@click.argument("run", type=PATH)
@click.option("--json", "as_json", is_flag=True, help="One object per line, without the list of variables.")
def list_(run: Path, as_json: bool) -> None:
    """List the committed checkpoints of a run.

    \b
    Examples:
      replicast checkpoint list runs/first
      replicast checkpoint list runs/first --json | jq .step

    Exit code: 0; 1 when one is damaged, which is named; 2 when RUN is not a run directory.
    """
    store = CheckpointStore(directory_of(run))
    manifests, problems = store.list(), store.problems()
    if as_json:
        for manifest in manifests:
            fields = manifest.to_json() | {"path": str(store.path(manifest.step).as_path())}
            click.echo(
                json.dumps({name: fields[name] for name in fields if name not in ("schema", "digests")})
            )
    elif manifests:
        make_console().print(_checkpoints_table(manifests))
        if (last := store.last()) is not None and last.step != manifests[-1].step:
            click.echo(f"The next start goes on from step {last.step}: training went back to it.")
    elif not problems:
        click.echo(_NONE_YET)
    _print_damaged(problems)
    sys.exit(1 if problems else 0)


@checkpoint.command()
@run_argument
@timeout_option
def now(run: Run, timeout: float) -> None:
    """Have a running job make a checkpoint at its next step.

    It is written in the background while training goes on, and this waits until it is durable. If another
    one is being written, it is made after that.

    \b
    Examples:
      replicast checkpoint now runs/first
      replicast checkpoint now https://host:8080/first

    Exit code: 0 when it is durable; 1 when the job cannot make one; 2 when the command is wrong; 3 when the
    job is not running or does not answer.
    """
    try:
        step = run.checkpoint(timeout)
    except NoAnswer as error:
        raise Failed(texts.printable(error), _NO_ANSWER) from error
    click.echo(f"saved the checkpoint of step {step}")


@checkpoint.command()
@path_argument
@step_argument
@click.option("--json", "as_json", is_flag=True, help="The manifest as one JSON object.")
def show(path: Path, step: int | None, as_json: bool) -> None:
    """Show the manifest of a checkpoint, and its variables.

    Of a RUN, the checkpoint of STEP, or the last one.

    \b
    Examples:
      replicast checkpoint show runs/first
      replicast checkpoint show runs/first 1200
      replicast checkpoint show runs/first/checkpoints/00001200-1 --json | jq .metrics

    Exit code: 0; 1 when there is no such checkpoint or it is damaged; 2 when the command is wrong.
    """
    found = the_checkpoint(path, step)
    with open_checkpoint(found) as reader:
        manifest = reader.manifest
    if as_json:
        click.echo(json.dumps(manifest.to_json() | {"path": str(found.as_path())}))
        return
    table = make_table("variable", "shape", "dtype", "digest", whole=("dtype", "digest"))
    for variable in manifest.schema:
        digest = texts.printable(manifest.digests[variable.name])[:16]
        table.add_row(texts.printable(variable.name), texts.shape(variable.shape), variable.dtype, digest)
    console = make_console()
    console.print(facts_table(_facts(found, manifest)))
    console.print()
    console.print(table)


@checkpoint.command()
@path_argument
@step_argument
def verify(path: Path, step: int | None) -> None:
    """Read every byte of one checkpoint, or of all of a run, and compare their digests.

    \b
    Examples:
      replicast checkpoint verify runs/first
      replicast checkpoint verify runs/first 1200
      replicast checkpoint verify backup/00001200

    Exit code: 0 when all is what was written; 1 when something is damaged, which is named; 2 when the command
    is wrong.
    """
    if step is not None or is_checkpoint(path):
        sys.exit(0 if _verified(the_checkpoint(path, step)) else 1)
    store = CheckpointStore(directory_of(path))
    manifests, problems = store.list(), store.problems()
    verified = [_verified(store.find(manifest.step)) for manifest in manifests]
    _print_damaged(problems)
    if not manifests and not problems:
        click.echo(_NONE_YET)
    sys.exit(0 if all(verified) and not problems else 1)


@checkpoint.command()
@click.argument("first", type=PATH, metavar="A")
@click.argument("second", type=PATH, metavar="B")
@click.option("--digests-only", is_flag=True, help="Only say which differ, without reading their values.")
@click.option("--all", "also_equal", is_flag=True, help="List equal variables too.")
@click.option("--json", "as_json", is_flag=True, help="One object per line: a variable.")
def diff(first: Path, second: Path, digests_only: bool, also_equal: bool, as_json: bool) -> None:
    """Compare two checkpoints, variable by variable and bit for bit.

    A and B are checkpoints, or runs, of which the last is taken.

    \b
    Examples:
      replicast checkpoint diff runs/first/checkpoints/00001200-1 patched
      replicast checkpoint diff runs/first runs/second --digests-only

    Exit code: 0 when every bit is equal; 1 when not, or when one is damaged; 2 when the command is wrong.
    """
    paths = the_checkpoint(first, None), the_checkpoint(second, None)
    with progress_bar("comparing") as progress:
        comparisons = compare(*paths, values=not digests_only, progress=progress)
    unequal = [each for each in comparisons if each.verdict is not Verdict.EQUAL]
    shown = comparisons if also_equal else unequal
    for each in shown if as_json else ():
        click.echo(json.dumps(each.to_json()))
    if not as_json:
        if shown:
            make_console().print(_comparisons_table(shown))
        equal, variables = len(comparisons) - len(unequal), texts.counted(len(comparisons), "variable")
        click.echo(f"{f'{equal} of' if unequal else 'All'} {variables} are equal, bit for bit.")
    sys.exit(1 if unequal else 0)


checkpoint.add_command(patch)


def _verified(path: RunPath) -> bool:
    """Verifies one checkpoint and says how it is."""
    try:
        with open_checkpoint(path) as reader, progress_bar(path.name) as progress:
            reader.verify(progress)
            manifest = reader.manifest
    except FileDamaged as error:
        click.echo(f"{texts.printable(path.name)}  damaged")
        _print_damaged([error])
        return False
    size, variables = texts.size(manifest.nbytes), texts.counted(len(manifest.schema), "variable")
    click.echo(f"{texts.printable(path.name)}  as it was written: {variables}, {size}")
    return True


def _print_damaged(problems: list[FileDamaged]) -> None:
    for problem in problems:
        click.echo(f"Damaged: {texts.printable(problem)}", err=True)


def _checkpoints_table(manifests: list[Manifest]) -> Table:
    numbers = ("step", "epoch", "batch", "update", "size")
    table = make_table(*numbers, "when", "metrics", right=numbers, whole=(*numbers, "when"))
    for each in manifests:
        note = Text(texts.metrics(each.metrics))
        if each.parent is not None:
            note = Text(f"patched by {_patched_by(each)}", style="dim")
        cells = str(each.step), str(each.epoch), str(each.batch), str(each.sequence), texts.size(each.nbytes)
        table.add_row(*cells, texts.when(each.created_at), note)
    return table


def _facts(path: RunPath, manifest: Manifest) -> list[tuple[str, str | Text]]:
    sequence = manifest.sequence
    versions = ", ".join(f"{name} {value}" for name, value in manifest.versions.items())
    patched = ""
    if manifest.parent is not None:
        patched = f"from {texts.one_line(manifest.parent.get('path', ''))} by update {_patched_by(manifest)}"
    return [
        ("checkpoint", texts.printable(path)),
        ("step", f"{manifest.step}, batch {manifest.batch} of epoch {manifest.epoch}"),
        ("journal", f"update {sequence} is the last in it" if sequence else "no update is in it"),
        ("pending", texts.one_line(", ".join(one.id for one in manifest.pending))),
        ("written", f"{texts.date(manifest.created_at)}, attempt {manifest.attempt}"),
        ("workers", str(manifest.workers)),
        ("metrics", texts.metrics(manifest.metrics)),
        ("versions", texts.one_line(versions)),
        ("file", texts.size(manifest.nbytes)),
        ("state", texts.printable(manifest.state_digest)),
        ("patched", patched),
    ]


def _comparisons_table(comparisons: list[Comparison]) -> Table:
    numbers = ("differ", "of", "max abs", "max rel")
    table = make_table("variable", "verdict", *numbers, right=numbers, whole=numbers)
    for each in comparisons:
        verdict = Text(each.verdict, style="green" if each.verdict is Verdict.EQUAL else "yellow")
        if each.verdict is Verdict.CHANGED:
            verdict.append(f"\n{each.first}, {each.second}", style="dim")
        if each.one_is_nan:
            verdict.append(f"\n{each.one_is_nan} NaN in one only", style="dim")
        counts = ["" if number is None else str(number) for number in (each.differing, each.elements)]
        distances = texts.number(each.max_absolute), texts.number(each.max_relative)
        table.add_row(texts.printable(each.name), verdict, *counts, *distances)
    return table


def _patched_by(manifest: Manifest) -> str:
    return texts.one_line((manifest.parent or {}).get("update_id", "an update"))
