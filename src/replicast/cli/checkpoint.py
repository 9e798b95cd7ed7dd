"""`replicast checkpoint`: list, show, verify, compare and patch checkpoints, without a job or TensorFlow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.text import Text

from replicast.cli import STOPPED, Failed, one_line, texts
from replicast.cli.options import PATH, EditCommand, asks, directory_of, json_option, update_of
from replicast.client import Run
from replicast.errors import CheckpointError, FileDamaged, printable
from replicast.files import RunDir, RunPath, below
from replicast.storage import checkpoints
from replicast.update.guard import examine

_NONE_YET = "The run has no checkpoints yet."
path_argument = click.argument("path", type=PATH, metavar="PATH|RUN")
step_argument = click.argument("step", type=click.IntRange(min=0), required=False)


@click.group()
def checkpoint() -> None:
    """List, show, verify, compare and patch checkpoints; make one now.

    A checkpoint is a directory such as RUN/checkpoints/00001200-1. TensorFlow is not needed here.

    \b
    Examples:
      replicast checkpoint list runs/first
      replicast checkpoint now runs/first
      replicast checkpoint verify runs/first
      replicast checkpoint patch runs/first --add delta.safetensors -o patched
    """


@checkpoint.command("list")
@click.argument("run", type=PATH)
@json_option("One object per line, without the list of variables.")
def list_(run: Path, as_json: bool) -> int:
    """List the committed checkpoints of a run.

    \b
    Examples:
      replicast checkpoint list runs/first
      replicast checkpoint list runs/first --json | jq .step

    Exit code: 0; 1 when one is damaged, which is named.
    """
    store = checkpoints.CheckpointStore(directory_of(run))
    manifests, problems = store.manifests(), store.problems()
    if as_json:
        for manifest in manifests:
            fields = manifest.to_json() | {"path": str(store.path(manifest.step).as_path())}
            texts.print_json({name: fields[name] for name in fields if name not in ("schema", "digests")})
    elif manifests:
        table = texts.make_table(">step", ">epoch", ">batch", ">update", ">size", "=when", "metrics")
        for one in manifests:
            note = Text(texts.metrics(one.metrics))
            if one.parent is not None:
                by = one_line(one.parent.get("update_id", "an update"))
                note = Text(f"patched by {by}", style="dim")
            numbers = str(one.step), *_position(one), str(one.sequence), texts.size(one.nbytes)
            table.add_row(*numbers, texts.when(one.created_at), note)
        texts.make_console().print(table)
        if (last := store.last()) is not None and last.step != manifests[-1].step:
            click.echo(f"The next start continues from step {last.step}: training went back to it.")
    elif not problems:
        click.echo(_NONE_YET)
    return _print_damaged(problems)


@asks("checkpoint", make=checkpoint.command)
def now(run: Run, timeout: float) -> None:
    """Have a running job make a checkpoint at its next step.

    It is written in the background while training continues, and this waits until it is durable. If another
    one is being written, it is made after that.

    \b
    Examples:
      replicast checkpoint now runs/first
      replicast checkpoint now https://host:8080/first

    Exit code: 0 when it is durable; 1 when the job cannot make one; 3 when no job is running, or
    --timeout has passed.
    """
    click.echo(f"saved the checkpoint of step {run.checkpoint(timeout)}")


@checkpoint.command()
@path_argument
@step_argument
@json_option("The manifest as one JSON object.")
def show(path: Path, step: int | None, as_json: bool) -> None:
    """Show the manifest of a checkpoint, and its variables.

    Of a RUN, the checkpoint of STEP, or the last one.

    \b
    Examples:
      replicast checkpoint show runs/first
      replicast checkpoint show runs/first 1200
      replicast checkpoint show runs/first/checkpoints/00001200-1 --json | jq .metrics

    Exit code: 0; 1 when there is no such checkpoint or it is damaged.
    """
    found = _the_checkpoint(path, step)
    with checkpoints.open_checkpoint(found) as reader:
        manifest = reader.manifest
    if as_json:
        texts.print_json(manifest.to_json() | {"path": str(found.as_path())})
        return
    versions = ", ".join(f"{name} {value}" for name, value in manifest.versions.items())
    parent = {} if manifest.parent is None else manifest.parent
    by = f"by update {one_line(parent.get('update_id', 'unknown'))}"
    patched = f"from {one_line(parent.get('path', ''))} {by}" if parent else ""
    last = f"update {manifest.sequence} is the last in it" if manifest.sequence else "no update is in it"
    facts = {
        "checkpoint": printable(found),
        "step": "{}, epoch {}, batch {}".format(manifest.step, *_position(manifest)),
        "journal": last,
        "pending": one_line(", ".join(one.proposal.id for one in manifest.pending)),
        "written": f"{texts.date(manifest.created_at)}, attempt {manifest.attempt}",
        "workers": str(manifest.workers),
        "metrics": texts.metrics(manifest.metrics),
        "versions": one_line(versions),
        "file": texts.size(manifest.nbytes),
        "state": printable(manifest.state_digest),
        "patched": patched,
    }
    variables = (
        (printable(one.name), texts.shape(one.shape), one.dtype, printable(manifest.digests[one.name])[:16])
        for one in manifest.schema
    )
    texts.make_console().print(texts.facts_table(facts.items()), "")
    texts.print_table("variable", "shape", "=dtype", "=digest", rows=variables)


@checkpoint.command()
@path_argument
@step_argument
def verify(path: Path, step: int | None) -> int:
    """Compare every byte of a checkpoint with its digests.

    Of a RUN, the checkpoint of STEP, or all of them.

    \b
    Examples:
      replicast checkpoint verify runs/first
      replicast checkpoint verify runs/first 1200
      replicast checkpoint verify backup/00001200

    Exit code: 0 when all is intact; 1 when something is damaged, which is named.
    """
    if step is not None or _is_checkpoint(path):
        found, problems = [_the_checkpoint(path, step)], list[FileDamaged]()
    else:
        store = checkpoints.CheckpointStore(directory_of(path))
        found, problems = [store.find(manifest.step) for manifest in store.manifests()], store.problems()
        if not found and not problems:
            click.echo(_NONE_YET)
    for one in found:
        try:
            with checkpoints.open_checkpoint(one) as reader, texts.progress_bar(one.name) as progress:
                reader.verify(progress)
            said = f"intact: {texts.counted(len(reader.manifest.schema), 'variable')}"  # Without the bar.
            click.echo(f"{printable(one.name)}  {said}, {texts.size(reader.manifest.nbytes)}")
        except FileDamaged as error:
            click.echo(f"{printable(one.name)}  damaged")
            problems.append(error)
    return _print_damaged(problems)


@checkpoint.command()
@click.argument("first", type=PATH, metavar="A")
@click.argument("second", type=PATH, metavar="B")
@click.option("--digests-only", is_flag=True, help="Only say which differ, without reading their values.")
@click.option("--all", "also_equal", is_flag=True, help="List equal variables too.")
@json_option("One object per line: a variable.")
def diff(first: Path, second: Path, digests_only: bool, also_equal: bool, as_json: bool) -> int:
    """Compare two checkpoints, variable by variable and bit for bit.

    A and B are checkpoints, or runs, of which the last is taken.

    \b
    Examples:
      replicast checkpoint diff runs/first/checkpoints/00001200-1 patched
      replicast checkpoint diff runs/first runs/second --digests-only

    Exit code: 0 when every bit is equal; 1 when not, or when one is damaged.
    """
    paths = _the_checkpoint(first, None), _the_checkpoint(second, None)
    with texts.progress_bar("comparing") as progress:
        comparisons = checkpoints.diff(*paths, values=not digests_only, progress=progress)
    unequal = [each for each in comparisons if each.verdict is not checkpoints.Equality.EQUAL]
    shown = comparisons if also_equal else unequal
    if as_json:
        texts.print_json(*shown)
        return 1 if unequal else 0
    if shown:
        table = texts.make_table("variable", "verdict", ">differ", ">of", ">max abs", ">max rel")
        for each in shown:
            style = "green" if each.verdict is checkpoints.Equality.EQUAL else "yellow"
            verdict = Text(each.verdict, style=style)
            if each.verdict is checkpoints.Equality.CHANGED:
                verdict.append(f"\n{each.first}, {each.second}", style="dim")
            if each.one_is_nan:
                verdict.append(f"\n{each.one_is_nan} NaN in one only", style="dim")
            counts = ("" if count is None else str(count) for count in (each.differing, each.elements))
            largest = map(texts.number, (each.max_absolute, each.max_relative))
            table.add_row(printable(each.name), verdict, *counts, *largest)
        texts.make_console().print(table)
    equal, variables = len(comparisons) - len(unequal), texts.counted(len(comparisons), "variable")
    click.echo(f"{f'{equal} of' if unequal else 'All'} {variables} are equal, bit for bit.")
    return 1 if unequal else 0


@checkpoint.command(cls=EditCommand)
@path_argument
@step_argument
@click.option("-o", "--output", type=PATH, metavar="OUT", help="The new checkpoint; must not exist yet.")
@click.pass_context
def patch(
    context: click.Context, /, path: Path, step: int | None, output: Path | None, **options: Any
) -> int:
    """Apply an update to a checkpoint: into a new one.

    A new checkpoint has the bits that every replica would have had if the update had been applied at that
    step; it names the one it was made from. Operations and files are those of `replicast push`, in the order
    in which they are given. Memory is needed for the update, not for the checkpoint.

    To have a stopped job apply it where its next start continues: `replicast push RUN --next-start`.

    \b
    Examples:
      replicast checkpoint patch runs/first --set learning_rate=1e-4 --dry-run
      replicast checkpoint patch runs/first/checkpoints/00001200-1 --add delta.safetensors -o patched
      replicast checkpoint patch old/00001200-1 --update fix.safetensors -o runs/second/checkpoints/00001200

    Exit code: 0; 1 when the update is refused, the checkpoint is damaged, or OUT exists.
    """
    source = _the_checkpoint(path, step)
    with checkpoints.open_checkpoint(source) as reader:
        before = reader.manifest
    update = update_of(context, options, lambda: before.schema)
    found = examine(update, before.schema)
    if options["dry_run"]:
        return texts.print_examination(found)
    if output is None:
        raise click.UsageError("Missing option '-o' / '--output' for the new checkpoint.")
    if texts.print_problems(found):
        return 1
    try:
        with texts.progress_bar(f"patching {source.name}") as progress:
            after = checkpoints.patch(source, update, output, progress=progress)
    except (OSError, KeyboardInterrupt) as error:
        reason = one_line(error.strerror if isinstance(error, OSError) else "Stopped")
        what = f"Could not patch the checkpoint of step {before.step}: {reason}"
        raise Failed(
            f"{what}. {printable(output)} was not created.",
            STOPPED if isinstance(error, KeyboardInterrupt) else 1,
        ) from error
    changed = sum(after.digests[name] != digest for name, digest in before.digests.items())
    of = f"{changed} of {texts.counted(len(after.digests), 'variable')} changed"
    click.echo(f"patched {printable(output)}: {of}, {texts.size(after.nbytes)}, step {after.step}")
    click.echo(f"  state {after.state_digest}")
    return 0


def _position(manifest: checkpoints.Manifest) -> tuple[str, str]:
    """The epoch, counted from 1 as Keras does, and how many of its batches are done; "end" after the last."""
    ended = manifest.epoch > 0 and manifest.batch == 0
    return (str(manifest.epoch), "end") if ended else (str(manifest.epoch + 1), str(manifest.batch))


def _is_checkpoint(path: RunDir) -> bool:
    """Whether a directory looks like a checkpoint, complete or not."""
    return any((below(path) / name).exists() for name in (checkpoints.MANIFEST, checkpoints.STATE))


def _the_checkpoint(path: Path, step: int | None) -> RunPath:
    """The directory of the checkpoint that is meant: of a run, that of the step, or the last."""
    if _is_checkpoint(path):
        if step is not None:
            raise click.UsageError(f"{printable(path)} is a checkpoint itself: leave the step out.")
        return below(path)
    store = checkpoints.CheckpointStore(directory_of(path))
    if step is not None:
        return store.find(step)
    last, skipped = store.last_and_skipped()
    for problem in skipped:
        click.echo(f"Skipped: {printable(problem)}", err=True)
    if last is None:
        raise CheckpointError(
            "The run has no checkpoint that can be used",
            path=path / "checkpoints",
            received="none",
            remedy=f"See: replicast checkpoint list {path}",
        )
    return store.find(last.step)


def _print_damaged(problems: list[FileDamaged]) -> int:
    """Names what is damaged; returns the exit code."""
    for problem in problems:
        click.echo(f"Damaged: {printable(problem)}", err=True)
    return 1 if problems else 0
