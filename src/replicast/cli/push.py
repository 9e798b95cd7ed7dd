"""`replicast push`: reads what is to be changed, hands it to the job, and follows it."""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from replicast.cli import texts
from replicast.cli.arguments import run_argument, timeout_option
from replicast.cli.edit_options import EditCommand, check_usage, edit_options, files_of, update_of
from replicast.cli.tables import is_live, make_console
from replicast.cli.update_tables import print_examination, print_problems
from replicast.client import Pushed, Run
from replicast.client.updates import UpdateView
from replicast.client.views import Brief
from replicast.core.records import Stage
from replicast.update.trial import Trial
from replicast.update.update import Update

TIME_IS_UP, REVERTED, STOPPED = 3, 4, 128 + signal.SIGINT
_FROM_0, _FROM_1 = click.IntRange(min=0), click.IntRange(min=1)
_LARGE = 16 * 10**6
_BEFORE_COMMIT = (Stage.PROPOSED, Stage.PREPARED, Stage.SCHEDULED)
_TRIAL_OPTIONS = ("trial_metric", "max_increase", "trial_mode")


@click.command(cls=EditCommand, context_settings={"show_default": True})
@run_argument
@edit_options
@click.option("--note", metavar="TEXT", help="Why. Readers of the journal see it.")
@click.option("--author", metavar="TEXT", help="Who. [default: user@host]")
@click.option("--id", metavar="ID", help="Makes pushing it twice a no-op. [default: random]")
@click.option("--at-step", type=_FROM_0, metavar="N", help="When. [default: as soon as possible]")
@click.option("--next-start", is_flag=True, help="Also when the job is not running: for its next start.")
@click.option("--trial-steps", type=_FROM_1, metavar="N", help="Try it for N steps, then keep or revert it.")
@click.option("--trial-metric", default="loss", metavar="NAME", help="What decides a trial.")
@click.option("--max-increase", default=0.0, metavar="PART", help="How much worse it may get: 0.05 is 5 %.")
@click.option(
    "--trial-mode",
    type=click.Choice(["min", "max"]),
    default="min",
    help="Whether smaller or larger is better.",
)
@click.option("--wait", is_flag=True, help="Follow it until it is verified, or its trial is decided.")
@timeout_option
@click.pass_context
def push(context: click.Context, /, run: Run, **options: Any) -> None:
    """Change the weights of a running job, on every worker.

    The change is checked against the variables of RUN, put into its inbox, and applied by all workers at the
    same step, or by none. RUN is a run directory, or the address of a served run, for which REPLICAST_TOKEN
    has the token. Several operations make one update, in the order in which they are given. FILE is a
    safetensors file whose tensors are named like variables; any unique suffix works, for example dense/bias.
    A guard of the job is not known here: it may still refuse the update. TensorFlow is not needed here.

    \b
    Examples:
      replicast push runs/first --set optimizer/learning_rate=0.0005 --wait
      replicast push runs/first --add delta.safetensors --note "fix drifted bias"
      replicast push runs/first --scale dense/kernel=0.5 --reset-slots --at-step 2000
      replicast push runs/first --blend average.safetensors --weight 0.1 --dry-run
      replicast push runs/first --add delta.safetensors --trial-steps 50 --max-increase 0.05 --wait
      replicast push https://host:8080/first --add delta.safetensors --wait

    Exit code: 0 when it is in the inbox, with --wait when it is verified on all workers; 1 when it is refused
    or has failed; 2 when the command is wrong; 3 when --timeout has passed; 4 when its trial failed and it
    was reverted; 130 after Ctrl-C.
    """
    check_usage(options)
    trial = _trial(context, options)
    try:
        sys.exit(_push(context, run, options, trial))
    except KeyboardInterrupt:  # Handled elsewhere once it is pushed.
        click.echo("Stopped. Nothing was pushed.", err=True)
        sys.exit(STOPPED)


def _push(context: click.Context, run: Run, options: dict[str, Any], trial: Trial | None) -> int:
    console, nbytes = make_console(), sum(path.stat().st_size for path in files_of(options))
    with _spinner(console, nbytes, "Reading and checking"):
        update = update_of(context, options)
        found = run.examine(update)
    if options["dry_run"]:
        print_examination(found)
        if trial is not None and not found.problems:
            console.print(f"On trial: {texts.trial(trial)}. The metrics of the job decide.")
        if not found.problems:
            console.print("A guard of the job is not known here: if there is one, it may still refuse this.")
        return 1 if found.problems else 0
    print_problems(found)
    if found.problems:
        return 1
    pushed = _pushed(run, update, options, trial, console)
    if options["wait"]:
        return follow(pushed, options["timeout"], console)
    where = shlex.quote(run.where)
    click.echo(f"Follow it: replicast status {where}, or replicast show {where} {update.id}")
    return 0


def _pushed(
    run: Run, update: Update, options: dict[str, Any], trial: Trial | None, console: Console
) -> Pushed:
    with _spinner(console, update.nbytes, "Writing"):
        pushed = run.push(update, options["at_step"], trial, next_start=options["next_start"])
    if pushed.number is not None:
        click.echo(
            f"Update {update.id} is in the journal already, as number {pushed.number}: nothing to push."
        )
        return pushed
    click.echo(f"pushed {update.id}")
    if pushed.warning:
        back = f"replicast withdraw {shlex.quote(run.where)} {update.id}"
        click.echo(f"{texts.printable_lines(pushed.warning)}\nTo take it back: {back}", err=True)
    return pushed


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


def follow(pushed: Pushed, timeout_secs: float, console: Console) -> int:
    """Follows an update until it has ended or the time is up; says what became of it, for the exit code."""
    run = pushed.run
    try:
        with live_line(console) as show:
            for view, brief in run.follow(pushed.id, timeout_secs):
                show(view, brief)
        stopped, why = TIME_IS_UP, f"{timeout_secs:g} s have passed"
    except KeyboardInterrupt:
        view, brief = run.look(pushed.id, thoroughly=True), run.brief()
        stopped, why = STOPPED, "Stopped waiting"
    if view.stage.is_final:
        code = _say_how_it_ended(run, view)
        return stopped if stopped == STOPPED else code
    click.echo(f"{why}: update {view.id} is {progress_text(view, brief, moving=True)}.", err=True)
    if view.trial_until is not None:
        where = f"{shlex.quote(run.where)} {view.id}"
        click.echo(f"Its trial decides whether it is kept. For the verdict: replicast show {where}", err=True)
    elif view.stage in _BEFORE_COMMIT:
        click.echo(f"To take it back: replicast withdraw {shlex.quote(run.where)} {view.id}", err=True)
    else:
        click.echo("Every worker applies it.", err=True)
    return stopped


@contextlib.contextmanager
def live_line(console: Console) -> Iterator[Callable[[UpdateView, Brief], None]]:
    """One live line on a terminal, removed in the end; elsewhere a line for each change."""
    if is_live(console):
        with console.status(Stage.PROPOSED) as status:
            # As `Text`: in a string, markup would be interpreted, and others have written some of it.
            yield lambda view, brief: status.update(Text(progress_text(view, brief, moving=True)))
        return
    last = ""

    def show(view: UpdateView, brief: Brief) -> None:
        nonlocal last
        text = progress_text(view, brief, moving=False)
        if text != last and not view.stage.is_final:  # How it ended is said in full afterwards.
            last = text
            console.print(text, soft_wrap=True)

    yield show


def progress_text(view: UpdateView, brief: Brief, *, moving: bool) -> str:
    """Where an update is, in one line; if `moving`, also what changes all the time, as the step does."""
    text = str(view.stage)
    on_trial = view.trial_until is not None
    if view.step is not None and (on_trial or view.stage in (Stage.SCHEDULED, Stage.COMMITTED)):
        text += f" {'for' if view.stage is Stage.SCHEDULED else 'at'} step {view.step}"
    if on_trial:
        text += f", on trial until step {view.trial_until}"
    if moving and brief.step is not None and (on_trial or view.stage is Stage.SCHEDULED):
        text += f", the job is at step {brief.step}"
    waits_for = brief.waits_for if brief.waits_for else view.waits_for
    if waits_for and view.stage in _BEFORE_COMMIT:
        text += f" and waits for {texts.one_line(waits_for)}"
    if not brief.running:
        said = texts.printable(brief.sentence) if moving else "The job is not running"
        waits = view.stage is Stage.PROPOSED
        text += f". {said}: " + (
            "the update waits in the inbox, and the next start that trains takes it"
            if waits
            else "it continues with this when it is started again"
        )
    return text


def _say_how_it_ended(run: Run, view: UpdateView) -> int:
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
    click.echo(f"See: replicast show {shlex.quote(run.where)} {texts.printable(view.id)}", err=True)
    return 1


def _spinner(console: Console, nbytes: int, doing: str) -> contextlib.AbstractContextManager[object]:
    """A spinner on a terminal while much is read or written."""
    if nbytes < _LARGE or not is_live(console):
        return contextlib.nullcontext()
    return console.status(f"{doing} {texts.size(nbytes)}")
