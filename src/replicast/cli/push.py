"""`replicast push`: reads what is to be changed, checks it against the run, and hands it to the job."""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from replicast.cli import texts
from replicast.cli.edit_options import EditCommand, check_usage, edit_options, files_of, update_of
from replicast.cli.examination import examine, print_examination, print_problems
from replicast.cli.rundirs import (
    is_running,
    not_running_text,
    polls,
    run_argument,
    running_beside,
    timeout_option,
)
from replicast.cli.tables import is_live, make_console
from replicast.cli.update_views import UpdateView, damage_text, look
from replicast.core.stage import Stage
from replicast.errors import UpdateRefused
from replicast.storage import inbox
from replicast.storage.runfiles import WITHOUT_CALLBACK, WorkerNote, read_run_info, read_worker_notes
from replicast.storage.updates import Updates
from replicast.update.schema import Schema
from replicast.update.trial import Trial
from replicast.update.update import Update
from replicast.update.validate import planned

TIME_IS_UP, REVERTED, STOPPED = 3, 4, 128 + signal.SIGINT
_FROM_0, _FROM_1 = click.IntRange(min=0), click.IntRange(min=1)
_LARGE = 16 * 10**6
_BEFORE_COMMIT = (Stage.PROPOSED, Stage.PREPARED, Stage.SCHEDULED)
_TRIAL_OPTIONS = ("trial_metric", "max_increase", "trial_mode")


@click.command(cls=EditCommand, context_settings={"show_default": True})
@run_argument
@edit_options
@click.option("--note", metavar="TEXT", help="Why, for whoever reads the journal.")
@click.option("--author", metavar="TEXT", help="Who. [default: user@host]")
@click.option("--id", metavar="ID", help="Makes pushing it twice a no-op. [default: random]")
@click.option("--at-step", type=_FROM_0, metavar="N", help="When. [default: as soon as possible]")
@click.option("--trial-steps", type=_FROM_1, metavar="N", help="Try it for N steps, then keep or revert it.")
@click.option("--trial-metric", default="loss", metavar="NAME", help="What decides a trial.")
@click.option("--max-increase", default=0.0, metavar="PART", help="How much worse it may get: 0.05 is 5 %.")
@click.option(
    "--trial-mode",
    type=click.Choice(["min", "max"]),
    default="min",
    help="Whether smaller or larger is better.",
)
@click.option(
    "--wait",
    is_flag=True,
    help="Follow it until it is verified, or its trial is decided.",
)
@timeout_option
@click.pass_context
def push(context: click.Context, /, run: Path, **options: Any) -> None:
    """Change the weights of a running job, on every worker.

    The change is checked against the variables of RUN, put into its inbox, and applied by all workers at the
    same step, or by none. Several operations make one update, in the order in which they are given. FILE is a
    safetensors file whose tensors are named like variables; any unique suffix works, for example dense/bias.
    A guard of the job is not known here: it may still refuse the update. TensorFlow is not needed here.

    \b
    Examples:
      replicast push runs/first --set optimizer/learning_rate=0.0005 --wait
      replicast push runs/first --add delta.safetensors --note "fix drifted bias"
      replicast push runs/first --scale dense/kernel=0.5 --reset-slots --at-step 2000
      replicast push runs/first --blend average.safetensors --weight 0.1 --dry-run
      replicast push runs/first --add delta.safetensors --trial-steps 50 --max-increase 0.05 --wait

    Exit code: 0 when it is in the inbox, with --wait when it is verified on all workers; 1 when it is refused
    or has failed; 2 when the command is wrong; 3 when --timeout has passed; 4 when its trial failed and it
    was reverted; 130 after Ctrl-C.
    """  # noqa: D301 - click wants a real backspace
    check_usage(options)
    trial = _trial(context, options)
    try:
        sys.exit(_push(context, run, options, trial))
    except KeyboardInterrupt:  # Handled elsewhere once it is pushed.
        click.echo("Stopped. Nothing was pushed.", err=True)
        sys.exit(STOPPED)


def _push(context: click.Context, run: Path, options: dict[str, Any], trial: Trial | None) -> int:
    console, schema = make_console(), read_run_info(run).schema
    nbytes = sum(path.stat().st_size for path in files_of(options))
    with _spinner(console, nbytes, "Reading and checking"):
        update = update_of(context, options)
        edits, problems = examine(update, schema)
    if options["dry_run"]:
        print_examination(edits, problems)
        if trial is not None and not problems:
            console.print(f"On trial: {texts.trial(trial)}. The metrics of the job decide.")
        if not problems:
            console.print("A guard of the job is not known here: if there is one, it may still refuse this.")
    print_problems([] if options["dry_run"] else problems)
    if problems or options["dry_run"]:
        return 1 if problems else 0
    number = _number_in_journal(run, update, schema)
    if number is not None:
        click.echo(f"Update {update.id} is in the journal already, as number {number}: nothing to push.")
    else:
        _submit(run, update, options["at_step"], trial, console)
    if options["wait"]:
        return _wait(run, update.id, options["timeout"], console)
    where = shlex.quote(str(run))
    click.echo(f"Follow it: replicast status {where}, or replicast show {where} {update.id}")
    return 0


def _trial(context: click.Context, options: dict[str, Any]) -> Trial | None:
    given = click.core.ParameterSource.COMMANDLINE
    if options["trial_steps"] is None:
        if any(context.get_parameter_source(name) is given for name in _TRIAL_OPTIONS):
            raise click.UsageError("--trial-metric, --max-increase and --trial-mode are for --trial-steps N.")
        return None
    try:
        return Trial(options["trial_steps"], *(options[name] for name in _TRIAL_OPTIONS))
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _number_in_journal(run: Path, update: Update, schema: Schema) -> int | None:
    """The place that the same update has in the journal already; another one with its id is refused."""
    journal = Updates(run)
    if journal.damaged:  # The job knows what it has: it decides.
        click.echo(damage_text(journal), err=True)
    if update.id in journal.withdrawn:
        raise UpdateRefused("An update with this id was withdrawn", expected="a new id", received=update.id)
    for number, (record, _) in journal.committed.items():
        if record.id == update.id:
            if record.digest in (update.content_digest(), planned(update, schema).content_digest()):
                return number
            raise UpdateRefused(
                f"Another update with this id is in the journal, as number {number}",
                expected="a new id, or the same content",
                received=update.id,
            )
    return None


def _submit(run: Path, update: Update, at_step: int | None, trial: Trial | None, console: Console) -> None:
    notes = read_worker_notes(run)
    step = max((note.step for note in notes), default=0)
    if at_step is not None and at_step <= step and is_running(notes):
        raise UpdateRefused(
            f"Step {at_step} is past",
            expected=f"a step after {step}, where the job is",
            received=f"--at-step {at_step}",
        )
    try:
        with _spinner(console, update.nbytes, "Writing"):
            inbox.submit(run, update, at_step, trial)
    except OSError as error:
        raise UpdateRefused(
            f"The update cannot be written to {run / 'inbox'} ({error.strerror})",
            received=texts.size(update.nbytes),
            remedy="Free some space there, or let this user write there, and push it again",
        ) from error
    click.echo(f"pushed {update.id}")
    if not is_running(notes):
        click.echo(f"{not_running_text(notes)}: it will take the update when it is started again.")
        beside = running_beside(run)
        if beside:
            click.echo(f"{beside} To take this one back: replicast withdraw {run} {update.id}")


def _wait(run: Path, update_id: str, timeout_secs: float, console: Console) -> int:
    """Follows an update until it has ended or the time is up; says what became of it, for the exit code."""
    try:
        with live_line(console) as show:
            view, notes = follow(run, update_id, timeout_secs, show)
        stopped, why = TIME_IS_UP, f"{timeout_secs:g} s have passed"
    except KeyboardInterrupt:
        view, notes = look(run, update_id, thoroughly=True), read_worker_notes(run)
        stopped, why = STOPPED, "Stopped waiting"
    if view.stage.is_final:
        code = _say_how_it_ended(run, view)
        return stopped if stopped == STOPPED else code
    click.echo(f"{why}: update {view.id} is {progress_text(view, notes, moving=True)}.", err=True)
    if view.trial_until is not None:
        where = f"{shlex.quote(str(run))} {view.id}"
        click.echo(f"Its trial decides whether it is kept. For the verdict: replicast show {where}", err=True)
    elif view.stage in _BEFORE_COMMIT:
        click.echo(f"To take it back: replicast withdraw {shlex.quote(str(run))} {view.id}", err=True)
    else:
        click.echo("Every worker applies it.", err=True)
    return stopped


def follow(
    run: Path, update_id: str, timeout_secs: float, show: Callable[[UpdateView, list[WorkerNote]], None]
) -> tuple[UpdateView, list[WorkerNote]]:
    """Blocks until the update has ended, at most `timeout_secs`; returns what was seen last."""
    for notes, is_fresh, is_last in polls(run, timeout_secs):
        # A job that died may not have written its last note; the journal has it.
        view = look(run, update_id, thoroughly=is_last or (is_fresh and not is_running(notes)))
        show(view, notes)
        if view.stage.is_final:
            break
    return view, notes


@contextlib.contextmanager
def live_line(console: Console) -> Iterator[Callable[[UpdateView, list[WorkerNote]], None]]:
    """One live line on a terminal, removed in the end; elsewhere a line for each change."""
    if is_live(console):
        with console.status(Stage.PROPOSED) as status:
            # As `Text`: in a string, markup would be interpreted, and others have written some of it.
            yield lambda view, notes: status.update(Text(progress_text(view, notes, moving=True)))
        return
    last = ""

    def show(view: UpdateView, notes: list[WorkerNote]) -> None:
        nonlocal last
        text = progress_text(view, notes, moving=False)
        if text != last and not view.stage.is_final:  # How it ended is said in full afterwards.
            last = text
            console.print(text, soft_wrap=True)

    yield show


def progress_text(view: UpdateView, notes: list[WorkerNote], *, moving: bool) -> str:
    """Where an update is, in one line; if `moving`, also what changes all the time, as the step does."""
    text = str(view.stage)
    on_trial = view.trial_until is not None
    if view.step is not None and (on_trial or view.stage in (Stage.SCHEDULED, Stage.COMMITTED)):
        text += f" {'for' if view.stage is Stage.SCHEDULED else 'at'} step {view.step}"
    if on_trial:
        text += f", on trial until step {view.trial_until}"
    if moving and notes and (on_trial or view.stage is Stage.SCHEDULED):
        text += f", the job is at step {max(note.step for note in notes)}"
    waits_for = view.waits_for
    if any(note.waiting_for == WITHOUT_CALLBACK for note in notes):
        waits_for = WITHOUT_CALLBACK
    if waits_for and view.stage in _BEFORE_COMMIT:
        text += f" and waits for {texts.one_line(waits_for)}"
    if not is_running(notes):
        said = not_running_text(notes) if moving else "The job is not running"
        text += f". {said}: it continues with this when it is started again"
    return text


def _say_how_it_ended(run: Path, view: UpdateView) -> int:
    """Prints the receipt or the reason, and returns the exit code."""
    receipt, outcome = view.receipt, view.outcome
    if view.stage is Stage.REFUSED:
        reason = "no reason is known" if view.refusal is None else texts.error(view.refusal)
        click.echo(f"Refused: {reason}\nNo replica has changed.", err=True)
        return 1
    if view.stage is Stage.WITHDRAWN:
        click.echo("Withdrawn before it was committed. No replica has changed.", err=True)
        return 1
    if view.stage is not Stage.FAILED and receipt is not None:
        click.echo(
            f"{view.stage}: number {receipt.sequence}, applied at step {receipt.step}\n"
            f"  digest {texts.digests(receipt.digests)}\n"
            f"  {texts.seconds(receipt.propose_to_applied_secs)} from proposed to applied by all; "
            f"training stood still for {texts.seconds(receipt.stall_secs)}"
        )
        if outcome is not None:
            click.echo(f"  {texts.outcome(outcome)}")
        return REVERTED if view.stage is Stage.REVERTED else 0
    digests = f"\n  digest {texts.digests(receipt.digests)}" if receipt is not None else ""
    click.echo(f"Failed{': ' if view.reason else ''}{texts.one_line(view.reason)}{digests}", err=True)
    click.echo(f"See: replicast show {shlex.quote(str(run))} {texts.printable(view.id)}", err=True)
    return 1


def _spinner(console: Console, nbytes: int, doing: str) -> contextlib.AbstractContextManager[object]:
    """A spinner on a terminal while much is read or written."""
    if nbytes < _LARGE or not is_live(console):
        return contextlib.nullcontext()
    return console.status(f"{doing} {texts.size(nbytes)}")
