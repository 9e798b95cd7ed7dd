"""How the commands about checkpoints look, and what they print."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from rich.text import Text

from replicast.checkpoint import CheckpointStore, Comparison, Manifest, Verdict, diff, open_checkpoint
from replicast.cli.tables import facts_table, make_console, make_table
from replicast.cli.texts import (
    counted,
    full_time_text,
    number_text,
    one_line,
    printable,
    shape_text,
    short_digest,
    size_text,
    when_text,
)
from replicast.errors import CheckpointError, FileDamaged

_REFRESH_SECS = 0.1


def print_list(run: Path, *, as_json: bool) -> int:
    """The checkpoints of a run; damaged ones on standard error.

    Returns:
        The exit code.
    """
    store = CheckpointStore(run)
    manifests, problems = store.list(), store.problems()
    if as_json:
        for manifest in manifests:
            described = manifest.to_json() | {"path": str(store.path(manifest.step))}
            short = {name: value for name, value in described.items() if name not in ("schema", "digests")}
            click.echo(json.dumps(short))
    elif manifests:
        make_console().print(_checkpoints_table(manifests))
    elif not problems:
        click.echo("The run has no checkpoints yet.")
    _print_problems(problems)
    return 1 if problems else 0


def print_checkpoint(path: Path, *, as_json: bool) -> None:
    """What one checkpoint says of itself.

    Raises:
        CheckpointError: It is not committed.
        FileDamaged: It is not what was written.
    """
    with open_checkpoint(path) as reader:
        manifest = reader.manifest
    if as_json:
        click.echo(json.dumps(manifest.to_json() | {"path": str(path)}))
        return
    console = make_console()
    console.print(facts_table(_facts(path, manifest)))
    console.print()
    console.print(_variables_table(manifest))


def verify_one(path: Path) -> int:
    """Verifies one checkpoint and says how it is.

    Returns:
        The exit code.

    Raises:
        CheckpointError: It is not committed.
    """
    try:
        with open_checkpoint(path) as reader, progress_bar(path.name) as progress:
            reader.verify(progress)
            manifest = reader.manifest
    except FileDamaged as error:
        click.echo(f"{printable(path.name)}  damaged")
        _print_problems([error])
        return 1
    size, variables = size_text(manifest.nbytes), counted(len(manifest.schema), "variable")
    click.echo(f"{printable(path.name)}  as it was written: {variables}, {size}")
    return 0


def verify_all(run: Path) -> int:
    """Verifies all checkpoints of a run.

    Returns:
        The exit code.
    """
    store = CheckpointStore(run)
    manifests, problems = store.list(), store.problems()
    codes = [verify_one(store.find(manifest.step)) for manifest in manifests]
    _print_problems(problems)
    if not manifests and not problems:
        click.echo("The run has no checkpoints yet.")
    return 1 if problems or any(codes) else 0


def print_diff(first: Path, second: Path, *, values: bool, also_equal: bool, as_json: bool) -> int:
    """What differs between two checkpoints.

    Returns:
        The exit code.

    Raises:
        CheckpointError: One is not committed.
        FileDamaged: One is not what was written.
    """
    with progress_bar("comparing") as progress:
        comparisons = diff(first, second, values=values, progress=progress)
    unequal = [each for each in comparisons if each.verdict is not Verdict.EQUAL]
    shown = comparisons if also_equal else unequal
    if as_json:
        for each in shown:
            click.echo(json.dumps(each.to_json()))
        return 1 if unequal else 0
    if shown:
        make_console().print(_comparisons_table(shown))
    equal = len(comparisons) - len(unequal)
    click.echo(
        f"{equal} of {counted(len(comparisons), 'variable')} are equal, bit for bit."
        if unequal
        else f"All {counted(len(comparisons), 'variable')} are equal, bit for bit."
    )
    return 1 if unequal else 0


def error_text(error: CheckpointError) -> str:
    """An error, one fact in a line."""
    labelled = {
        "checkpoint": error.path,
        "step": error.step,
        "variable": error.variable,
        "expected": error.expected,
        "received": error.received,
        "what to do": error.remedy,
    }
    lines = [f"{label}: {one_line(str(value))}" for label, value in labelled.items() if value is not None]
    return "\n  ".join([one_line(error.problem), *lines])


@contextlib.contextmanager
def progress_bar(doing: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on a terminal, that is gone afterwards; None where there is no terminal."""
    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    if not console.is_terminal or console.is_dumb_terminal:
        yield None
        return
    columns = TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn()
    # Drawn by this thread alone: nothing is left behind when Ctrl-C comes.
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
        task, drawn = bar.add_task(printable(doing), total=None), 0.0

        def progress(done: int, total: int) -> None:
            nonlocal drawn
            now = time.monotonic()
            if now - drawn >= _REFRESH_SECS or done == total:
                drawn = now
                bar.update(task, completed=done, total=total, refresh=True)

        yield progress


def _print_problems(problems: list[FileDamaged]) -> None:
    for problem in problems:
        click.echo(f"Damaged: {printable(str(problem))}", err=True)


def _checkpoints_table(manifests: list[Manifest]) -> Any:
    numbers = ("step", "epoch", "batch", "update", "size")
    table = make_table(*numbers, "when", "metrics", right=numbers, whole=(*numbers, "when"))
    now = time.time()
    for manifest in manifests:
        cells = manifest.step, manifest.epoch, manifest.batch, manifest.sequence
        note = Text(_metrics_text(manifest))
        if manifest.parent is not None:
            note = Text(f"patched by {_parent_id(manifest)}", style="dim")
        table.add_row(*map(str, cells), size_text(manifest.nbytes), when_text(manifest.created_at, now), note)
    return table


def _facts(path: Path, manifest: Manifest) -> list[tuple[str, str | Text]]:
    facts = [
        ("checkpoint", printable(str(path))),
        ("step", f"{manifest.step}, batch {manifest.batch} of epoch {manifest.epoch}"),
        (
            "journal",
            f"update {manifest.sequence} is the last in it" if manifest.sequence else "no update is in it",
        ),
        ("written", f"{full_time_text(manifest.created_at)}, attempt {manifest.attempt}"),
        ("workers", str(manifest.workers)),
        ("metrics", _metrics_text(manifest)),
        ("versions", one_line(", ".join(f"{name} {value}" for name, value in manifest.versions.items()))),
        ("file", size_text(manifest.nbytes)),
        ("state", printable(manifest.state_digest)),
    ]
    if manifest.parent is not None:
        made_from = one_line(str(manifest.parent.get("path", "")))
        facts.append(("patched", f"from {made_from} by update {_parent_id(manifest)}"))
    return [(name, value) for name, value in facts if value]


def _variables_table(manifest: Manifest) -> Any:
    table = make_table("variable", "shape", "dtype", "digest", whole=("dtype", "digest"))
    for variable in manifest.schema:
        digest = short_digest(manifest.digests[variable.name])
        table.add_row(printable(variable.name), shape_text(variable.shape), variable.dtype, digest)
    return table


def _comparisons_table(comparisons: list[Comparison]) -> Any:
    numbers = ("differ", "of", "max abs", "max rel")
    table = make_table("variable", "verdict", *numbers, right=numbers, whole=numbers)
    for each in comparisons:
        verdict = Text(str(each.verdict), style="green" if each.verdict is Verdict.EQUAL else "yellow")
        if each.verdict is Verdict.CHANGED:
            verdict.append(f"\n{each.first}, {each.second}", style="dim")
        if each.one_is_nan:
            verdict.append(f"\n{each.one_is_nan} NaN in one only", style="dim")
        cells = ["" if number is None else str(number) for number in (each.differing, each.elements)]
        cells += [
            "" if value is None else number_text(value) for value in (each.max_absolute, each.max_relative)
        ]
        table.add_row(printable(each.name), verdict, *cells)
    return table


def _metrics_text(manifest: Manifest) -> str:
    return one_line(", ".join(f"{name} {number_text(value)}" for name, value in manifest.metrics.items()))


def _parent_id(manifest: Manifest) -> str:
    return one_line(str((manifest.parent or {}).get("update_id", "an update")))
