"""What `replicast push` does: assemble, check, submit, follow."""

from __future__ import annotations

import contextlib
import shlex
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console

from replicast import inbox
from replicast.cli.assembling import Head, Part, assembled, number_part, saved_part, tensors_part
from replicast.cli.examination import Examination, examine
from replicast.cli.following import Sight, follow, line
from replicast.cli.rundirs import is_running, not_running_text, running_beside
from replicast.cli.standings import Standing, committed
from replicast.cli.tables import edits_table, make_console
from replicast.cli.texts import (
    counted,
    digest_text,
    one_line,
    outcome_text,
    printable,
    refusal_text,
    seconds_text,
    size_text,
    trial_text,
)
from replicast.edits import Operation
from replicast.errors import UpdateRefused
from replicast.journal import Journal
from replicast.runfiles import read_run_info, read_worker_notes
from replicast.schema import Schema
from replicast.trial import Trial
from replicast.update import Stage, Update
from replicast.validate import planned

TIME_IS_UP = 3
REVERTED = 4
_LARGE = 16 * 10**6


@dataclass(frozen=True, slots=True)
class Wish:
    """What the command line asks for.

    Attributes:
        run: The run directory.
        operations: Each operation and its file, or its variable and number; `saved` is a saved update.
        weight: Of a blend.
        note: Why.
        author: Who.
        id: The id of the update.
        at_step: When; as soon as possible unless given.
        reset_slots: Whether to reset the optimizer's memory of what is touched.
        allow_nonfinite: Whether to accept NaN and infinity.
        wait_secs: How long to follow it; None for not at all.
        trial: What it has to prove; None for nothing.
    """

    run: Path
    operations: tuple[tuple[str, Path | tuple[str, float | int | bool]], ...]
    weight: float | None
    note: str | None
    author: str | None
    id: str | None
    at_step: int | None
    reset_slots: bool
    allow_nonfinite: bool
    wait_secs: float | None
    trial: Trial | None = None


def carry_out(wish: Wish, *, dry_run: bool) -> int:
    """Does what is asked for and says what happened.

    Returns:
        The exit code.

    Raises:
        UpdateRefused: The update cannot be assembled or submitted.
        FileDamaged: A file of the run cannot be trusted.
    """
    console = make_console()
    schema = read_run_info(wish.run).schema
    update, found = _checked(wish, schema, console)
    if dry_run:
        print_examination(found, console)
        if not found.problems:
            _say_what_else_it_meets(wish, console)
        return 1 if found.problems else 0
    if found.problems:
        print_problems(found)
        return 1
    known = _known(wish, update, schema)
    if known is not None:
        click.echo(f"Update {update.id} is in the journal already, as number {known}: nothing to push.")
    else:
        _submit(wish, update, console)
    if wish.wait_secs is None:
        _say_how_to_follow(wish.run, update.id)
        return 0
    return _wait(wish.run, update.id, wish.wait_secs, console)


def print_examination(found: Examination, console: Console) -> None:
    """The table of edits, and below it what is wrong."""
    console.print(edits_table(found.edits, extremes=False))
    if found.problems:
        print_problems(found)
    else:
        size = size_text(sum(edit.nbytes for edit in found.edits))
        console.print(f"{counted(len(found.edits), 'edit')}, {size} of values. Nothing is wrong with it.")


def _say_what_else_it_meets(wish: Wish, console: Console) -> None:
    """What a dry run cannot check, because only the job knows it."""
    if wish.trial is not None:
        judged = one_line(trial_text(wish.trial.to_json()))
        console.print(f"On trial: {judged}. The metrics of the job decide.")
    console.print("A guard of the job is not known here: should it have one, it may still refuse this.")


def print_problems(found: Examination) -> None:
    """Everything that is wrong, on standard error."""
    for problem in found.problems:
        click.echo(f"Refused: {refusal_text(problem)}", err=True)


def _checked(wish: Wish, schema: Schema, console: Console) -> tuple[Update, Examination]:
    head = Head(wish.id, wish.author, wish.note, wish.reset_slots, wish.allow_nonfinite)
    files = [value for _, value in wish.operations if isinstance(value, Path)]
    nbytes = sum(path.stat().st_size for path in files)
    with _spinner(console, nbytes, f"Reading and checking {size_text(nbytes)}"):
        update = assembled([_part(wish, *operation) for operation in wish.operations], head)
        return update, examine(update, schema)


def _part(wish: Wish, name: str, value: Path | tuple[str, float | int | bool]) -> Part:
    if not isinstance(value, Path):
        return number_part(Operation(name), *value)
    if name == "saved":
        return saved_part(value)
    return tensors_part(value, Operation(name), wish.weight if name == Operation.BLEND else None)


def _known(wish: Wish, update: Update, schema: Schema) -> int | None:
    """The place that the same update has in the journal already; another one of its id is refused."""
    standings = (one for one in committed(wish.run) if one.stage is not Stage.WITHDRAWN)
    record = next((one.record for one in standings if one.id == update.id), None)
    if record is None:
        return None
    written = Journal(wish.run).load(record.sequence)
    if written.content_digest() != planned(update, schema).content_digest():
        raise UpdateRefused(
            f"Another update of this id is in the journal, as number {record.sequence}",
            expected="an id of its own, or the same content",
            received=update.id,
        )
    return record.sequence


def _submit(wish: Wish, update: Update, console: Console) -> None:
    notes = read_worker_notes(wish.run)
    running = is_running(notes, time.time())
    step = max((note.step for note in notes), default=0)
    if running and wish.at_step is not None and wish.at_step <= step:
        raise UpdateRefused(
            f"Step {wish.at_step} is past",
            expected=f"a step after {step}, where the job is",
            received=f"--at-step {wish.at_step}",
        )
    try:
        with _spinner(console, update.nbytes, f"Writing {size_text(update.nbytes)}"):
            inbox.submit(wish.run, update, wish.at_step, wish.trial)
    except OSError as error:
        raise UpdateRefused(
            f"The update cannot be written to {wish.run / 'inbox'} ({error.strerror})",
            received=f"{size_text(update.nbytes)}",
            remedy="Make room there, or let this user write there, and push it again",
        ) from error
    click.echo(f"pushed {update.id}")
    if not running:
        click.echo(f"{not_running_text(notes, time.time())}: its next start will take the update.")
        beside = running_beside(wish.run, time.time())
        if beside:
            click.echo(f"{beside} replicast withdraw {wish.run} {update.id} takes this one back.")


def _say_how_to_follow(run: Path, update_id: str) -> None:
    where = shlex.quote(str(run))
    click.echo(f"Follow it: replicast status {where}, or replicast show {where} {update_id}")


def _wait(run: Path, update_id: str, timeout_secs: float, console: Console) -> int:
    try:
        with line(console, str(Stage.PROPOSED)) as show:
            sight = follow(run, update_id, timeout_secs, show)
    except KeyboardInterrupt:
        sight = follow(run, update_id, 0.0, lambda _sight: None)
        if not sight.is_settled:
            _say_it_stays(run, sight, "Stopped waiting")
        else:
            _say_how_it_ended(run, sight.standing)
        return 128 + signal.SIGINT
    if not sight.is_settled:
        _say_it_stays(run, sight, f"{timeout_secs:g} s have passed")
        return TIME_IS_UP
    return _say_how_it_ended(run, sight.standing)


def _say_it_stays(run: Path, sight: Sight, why: str) -> None:
    standing, where = sight.standing, shlex.quote(str(run))
    back = f"to take it back: replicast withdraw {where} {standing.id}"
    if standing.stage is Stage.APPLIED:
        stays = "Every worker has applied it."
    elif standing.stage is Stage.COMMITTED:
        stays = f"Every worker will apply it; {back}"
    elif sight.waits_for:
        stays = f"The job has taken it, and decides about it then; {back}"
    else:
        stays = f"It stays in the inbox until the job takes it; {back}"
    click.echo(f"{why}: update {standing.id} is {sight.text(moving=True)}.\n{stays}", err=True)


def _say_how_it_ended(run: Path, standing: Standing) -> int:
    """Prints the receipt or the reason, and returns the exit code."""
    receipt = standing.receipt
    if standing.stage is Stage.REFUSED:
        reason = refusal_text(standing.refusal) if standing.refusal is not None else "no reason is known"
        click.echo(f"Refused: {reason}\nNo replica has changed.", err=True)
        return 1
    if standing.stage is Stage.WITHDRAWN:
        click.echo("Withdrawn: it was taken back before it was applied. No replica has changed.", err=True)
        return 1
    if standing.stage is Stage.VERIFIED and receipt is not None:
        secs, stall = seconds_text(receipt.propose_to_applied_secs), seconds_text(receipt.stall_secs)
        reverted = receipt.trial is not None and receipt.trial.outcome == "reverted"
        how = "reverted" if reverted else "verified"
        click.echo(
            f"{how}: number {receipt.sequence}, applied at step {receipt.step}\n"
            f"  digest {digest_text(dict(receipt.digests))}\n"
            f"  {secs} from proposed to applied by all; training stood still for {stall}"
        )
        if receipt.trial is not None:
            click.echo(f"  {outcome_text(receipt.trial)}")
            return REVERTED if reverted else 0
        return 0
    digests = f"\n  digest {digest_text(dict(receipt.digests))}" if receipt is not None else ""
    reason = f": {one_line(standing.reason)}" if standing.reason else ""
    click.echo(f"Failed{reason}{digests}", err=True)
    click.echo(f"See: replicast show {shlex.quote(str(run))} {printable(standing.id)}", err=True)
    return 1


@contextlib.contextmanager
def _spinner(console: Console, nbytes: int, doing: str) -> Iterator[None]:
    """Something that turns while much is read or written."""
    if nbytes < _LARGE or not console.is_terminal or console.is_dumb_terminal:
        yield
        return
    with console.status(doing):
        yield
