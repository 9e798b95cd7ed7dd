"""Commands about updates: push, revert, withdraw, inspect; and pull, which reads what they would change."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.text import Text

from replicast.cli import NO_ANSWER, STOPPED, Failed, one_line, printable_lines, texts
from replicast.cli.options import PATH, EditCommand, Parsed, asks, update_of
from replicast.client import Pushed, Run, connect
from replicast.client.connection import is_address
from replicast.client.run import Brief, progress_of
from replicast.core.entries import Stage
from replicast.errors import NotFound, UpdatePending, printable
from replicast.files import write_durably
from replicast.storage.journal import UpdateView
from replicast.update.guard import examine, values_of
from replicast.update.tensorfiles import read_tensor_bytes, tensor_chunks, tensors_in
from replicast.update.trial import Trial
from replicast.update.update import update_in

_DIFFER = _REVERTED = 4
_BEFORE_COMMIT = (Stage.PROPOSED, Stage.PREPARED, Stage.SCHEDULED)
_TRIAL_OPTIONS = ("trial_metric", "max_increase", "trial_mode")


@asks("push", cls=EditCommand, context_settings={"show_default": True})
@click.option("--id", metavar="ID", help="Makes pushing it twice a no-op. [default: random]")
@click.option("--trial-steps", type=click.IntRange(1), metavar="N", help="Keep or revert it after N steps.")
@click.option("--trial-metric", default="loss", metavar="NAME", help="What decides a trial.")
@click.option("--max-increase", default=0.0, metavar="PART", help="How much worse it may get: 0.05 is 5 %.")
@click.option("--trial-mode", type=click.Choice(["min", "max"]), default="min", help="Which value is better.")
@click.pass_context
def push(context: click.Context, /, run: Run, **options: Any) -> int:
    """Change the weights of a running job, on every worker.

    The change is checked against the variables of RUN, put into its inbox, and applied by all workers at the
    same step, or by none. RUN is a run directory, or the address of a served run, for which REPLICAST_TOKEN
    has the token. Several operations make one update, in the order in which they are given. FILE is a
    safetensors, .npz or .weights.h5 file whose tensors are named like variables; any unique suffix works, for
    example dense/bias. A .npy file has the name of the file, unless it is given as NAME=FILE.
    A guard of the job is not known here: it may still refuse the update. TensorFlow is not needed here.

    \b
    Examples:
      replicast push runs/first --set optimizer/learning_rate=0.0005 --wait
      replicast push runs/first --add delta.safetensors --note "fix drifted bias"
      replicast push runs/first --scale dense/kernel=0.5 --reset-slots --at-step 2000
      replicast push runs/first --blend average.safetensors --weight 0.1 --dry-run
      replicast push runs/first --add delta.safetensors --trial-steps 50 --max-increase 0.05 --wait
      replicast push runs/first --add dense/bias=bias.npy
      replicast push runs/first --adapter lora/ --names 'layers.{n}.q_proj=block_{n}/query/kernel'
      replicast push https://host:8080/first --add delta.safetensors --wait

    Exit code: 0 when it is in the inbox, with --wait when it is verified on all workers; 1 when it is refused
    or has failed; 3 when --timeout has passed; 4 when its trial failed and it was reverted.
    """
    trial = _trial(context, options)
    try:
        update = update_of(context, options, run.schema)
        found = run.examine(update)
        if options["dry_run"]:
            code = texts.print_examination(found)
            if trial is not None and not code:
                click.echo(f"On trial: {texts.trial(trial)}. The metrics of the job decide.")
            if not code:
                click.echo("The job may have a guard, which is not known here and may refuse this.")
            return code
        if texts.print_problems(found):
            return 1
        for note in found.notes:
            click.echo(one_line(note), err=True)
        pushed = run.push(update, options["at_step"], trial, next_start=options["next_start"])
    except KeyboardInterrupt as error:
        raise Failed("Stopped. Nothing was pushed.", STOPPED) from error
    told = [line for line in pushed.warning.splitlines() if line not in found.warnings]
    pushed.warning = "\n".join(told)
    if pushed.number is not None:
        click.echo(f"Update {update.id} is already in the journal, as number {pushed.number}.")
    return _pushed(pushed, options["wait"], options["timeout"])


@asks("revert")
def revert(run: Run, which: str, wait: bool, timeout: float, **how: Any) -> int:
    """Undo a committed update of a running job, on every worker.

    The job makes a new update, which every worker applies at the same step, or none. What was added is
    subtracted and what was scaled is divided: training since then stays. What was assigned or blended, and
    optimizer slots that were reset, go back to exactly what they were before the update: training since then
    is lost for these values. A revert can be reverted like any update.

    It is refused when later updates have changed the same variables so that it would discard them, or would
    subtract from other values than it was added to; --force reverts it all the same.

    \b
    Examples:
      replicast revert runs/first 12 --dry-run
      replicast revert runs/first 12 --note "loss went up" --wait

    Exit code: 0 when it is in the inbox, with --wait when it is verified on all workers; 1 when it is refused
    or there is no such update; 3 when --timeout has passed.
    """
    found = run.revert(which, **how)
    if isinstance(found, Pushed):
        return _pushed(found, wait, timeout, f", which reverts update {printable(which)}")
    return texts.print_examination(found)


@asks("withdraw")
def withdraw(run: Run, update_id: str, note: str) -> None:
    """Withdraw an update of RUN that is not committed yet.

    It may wait in the inbox, behind a trial, or for the step that it is scheduled for. A running job is
    asked, and answers within a few steps of its training. ID may be the beginning of one.

    \b
    Examples:
      replicast withdraw runs/first 3f2a91c4 --note "wrong sign"
      replicast withdraw https://host:8080/first 3f2a91c4

    Exit code: 0 when it is withdrawn and will not be applied; 1 when it is too late or there is none.
    """
    click.echo(f"withdrawn {printable(run.withdraw(update_id, note).id)}: it will not be applied.")


def _file_or_run(text: str) -> Path | Run:
    if not is_address(text) and not Path(text).exists():
        raise NotFound(f"There is no file or run {text}.")
    return Path(text) if Path(text).is_file() else connect(text)


@click.command()
@click.argument("what", type=Parsed("file or run", _file_or_run), metavar="FILE|RUN")
def inspect(what: Path | Run) -> int:
    """List the variables of a run, the edits of a saved Update, or the tensors of a plain file.

    The variables of a run have the names that an update may use. What a file would do to a run says
    `replicast push RUN --add FILE --dry-run`.

    \b
    Examples:
      replicast inspect runs/first
      replicast inspect delta.safetensors
      replicast inspect runs/first/groups/000001/000042.safetensors

    Exit code: 0; 1 when the file is damaged, or no update could be made of it.
    """
    if isinstance(what, Run):
        schema = what.schema()
        variables = ((*texts.array_cells(one.name, one), one.kind.replace("_", "-")) for one in schema)
        texts.print_table("variable", "shape", "=dtype", ">size", "kind", rows=variables)
        nbytes = sum(one.nbytes for one in schema)
        click.echo(f"{texts.counted(len(schema), 'variable')}, {texts.size(nbytes)}")
        return 0
    content = read_tensor_bytes(what, other_formats=True)
    file = tensors_in(content, str(what))
    if "replicast" in file.metadata:
        return texts.print_examination(examine(update_in(content, str(what), None, None), None))
    rows = (
        (*texts.array_cells(name, one), texts.number(values_of(one).norm))
        for name, one in file.tensors.items()
    )
    texts.print_table("tensor", "shape", "=dtype", ">size", ">norm", rows=rows)
    return 0


@asks("pull")
@click.option("-o", "--output", type=PATH, required=True, metavar="FILE", help="A .npy or .safetensors file.")
def pull(run: Run, name: str, rows: tuple[int, ...] | None, output: Path, timeout: float) -> None:
    """Write the live values of one variable of a job to a file.

    All workers stop at one step for a moment and compare their digests; worker 0 gives the values. When no
    job runs, they are those of the last checkpoint. NAME is the variable's name; any unique suffix works.

    \b
    Examples:
      replicast pull runs/first dense/bias -o bias.npy
      replicast pull runs/first embeddings --rows 1,5,10:20 -o rows.safetensors
      replicast push runs/first --assign-rows rows.safetensors

    Exit code: 0 when the file is written; 1 when there is no such variable or row, or the job refuses it; 3
    when --timeout has passed; 4 when the file is written and the workers have different values: it has those
    of worker 0.
    """
    if output.suffix not in (".npy", ".safetensors"):
        raise click.BadParameter("It must end in .npy or .safetensors.", param_hint="--output")
    if rows is not None and output.suffix == ".npy":
        said = "A .npy file has no place for the indices of rows. Write a .safetensors file."
        raise click.BadParameter(said, param_hint="--output")
    pulled = run.pull(name, rows, timeout)
    array = np.asarray(pulled.array)
    if output.suffix == ".npy":
        if array.dtype.name == "bfloat16":
            raise Failed("A .npy file cannot hold bfloat16. Write a .safetensors file.", 2)
        with output.open("wb") as file:
            np.save(file, array, allow_pickle=False)
    else:
        write_durably(output, tensor_chunks(pulled.tensors(), {"step": str(pulled.step)}))
    click.echo(
        f"{printable(pulled.name)}: {texts.shape(array.shape)} {array.dtype.name} "
        f"at step {pulled.step}, from the {pulled.source}, digest {pulled.digest}"
    )
    if pulled.differing:
        workers = ", ".join(map(str, pulled.differing))
        raise Failed(
            f"The workers have different values: worker {workers} differs from worker 0, whose values are in "
            f"{output}. To compare all variables: replicast audit {run.where} --now",
            _DIFFER,
        )


def _trial(context: click.Context, options: dict[str, Any]) -> Trial | None:
    given = click.core.ParameterSource.COMMANDLINE
    if options["trial_steps"] is None:
        if any(context.get_parameter_source(name) is given for name in _TRIAL_OPTIONS):
            raise click.UsageError("--trial-metric, --max-increase and --trial-mode need --trial-steps N.")
        return None
    try:
        return Trial(options["trial_steps"], *(options[name] for name in _TRIAL_OPTIONS))
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _pushed(pushed: Pushed, wait: bool, timeout_secs: float, what: str = "") -> int:
    """Says what was pushed, and follows it if asked to; returns the exit code."""
    run, update = shlex.quote(pushed.run.where), printable(pushed.id)
    if pushed.number is None:
        click.echo(f"pushed {update}{what}")
    if pushed.warning:
        click.echo(
            f"{printable_lines(pushed.warning)}\nTo withdraw it: replicast withdraw {run} {update}", err=True
        )
    if wait:
        return _follow(pushed, timeout_secs)
    click.echo(f"To follow it: replicast status {run}, or replicast show {run} {update}")
    return 0


def _follow(pushed: Pushed, timeout_secs: float) -> int:
    """Follows an update until it has ended or the time is up, and prints its receipt."""
    where = f"{shlex.quote(pushed.run.where)} {printable(pushed.id)}"
    try:
        with live_line(texts.make_console()) as show:
            receipt = pushed.result(timeout_secs, show)
    except UpdatePending as error:
        withdraw = f" To withdraw it: replicast withdraw {where}." if error.stage in _BEFORE_COMMIT else ""
        raise Failed(f"{printable(error)} To see it: replicast show {where}.{withdraw}", NO_ANSWER) from error
    except KeyboardInterrupt as error:
        raise Failed(f"Stopped waiting. To see what became of it: replicast show {where}", STOPPED) from error
    view = pushed.view()
    click.echo(
        f"{view.stage}: number {receipt.sequence}, applied at step {receipt.step}\n"
        f"  digest {texts.digests(receipt.digests)}\n"
        f"  {texts.seconds(receipt.propose_to_applied_secs)} from proposed to applied by all; "
        f"training paused for {texts.seconds(receipt.stall_secs)}"
    )
    if view.outcome is not None:
        click.echo(f"  {texts.outcome(view.outcome)}")
    return _REVERTED if view.stage is Stage.REVERTED else 0


@contextlib.contextmanager
def live_line(console: Console) -> Iterator[Callable[[UpdateView, Brief], None]]:
    """One live line on a terminal, removed in the end; elsewhere a line for each change."""
    if texts.is_live(console):
        with console.status(Stage.PROPOSED) as status:
            # As `Text`: in a string, markup would be interpreted, and others have written some of it.
            yield lambda view, brief: status.update(Text(one_line(progress_of(view, brief, moving=True))))
        return
    said = [""]

    def show(view: UpdateView, brief: Brief) -> None:
        text = one_line(progress_of(view, brief, moving=False))
        if text != said[-1] and not view.stage.is_final:  # How it ended is said in full afterwards.
            said.append(text)
            console.print(text, soft_wrap=True)

    yield show
