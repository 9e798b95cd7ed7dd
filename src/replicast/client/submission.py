"""How an update from outside enters the inbox of a run: checked first, and only if a job will take it."""

from __future__ import annotations

from replicast.client.author import this_user
from replicast.client.notes import Seen, described_run, running_beside, see
from replicast.client.updates import damage_text
from replicast.errors import UpdateIdInUse, UpdateRefused
from replicast.files import RunDir, below
from replicast.storage import inbox
from replicast.storage.run_files import read_state
from replicast.storage.updates import Updates
from replicast.update.schema import planned
from replicast.update.trial import Trial
from replicast.update.update import Update


def submit(
    run: RunDir, update: Update, at_step: int | None, trial: Trial | None, *, next_start: bool
) -> tuple[int | None, str]:
    """Puts an update into the inbox, as `Run.push` says."""
    info = described_run(run)  # While the first workers start, the job checks the update when it takes it.
    plan = update if info is None else planned(update, info.schema)
    journal = Updates(run)
    number = _number_in_journal(journal, update, plan)
    if number is not None:
        return number, ""
    seen = see(run)
    _check_step(at_step, seen)
    warning = check_running(run, update, seen, next_start=next_start)
    try:
        inbox.submit(run, update.signed(this_user()), at_step, trial)
    except OSError as error:
        raise UpdateRefused(
            f"The update cannot be written to {below(run) / 'inbox'} ({error.strerror})",
            received=f"{update.nbytes} bytes",
            remedy="Free some space there, or let this user write there, and push it again",
        ) from error
    damage = damage_text(journal)  # The job knows what it has: it decides.
    return None, f"{damage}\n{warning}".strip()


def _number_in_journal(journal: Updates, update: Update, plan: Update) -> int | None:
    """The place that the same update has in the journal already; another one with its id is refused."""
    if update.id in journal.withdrawn:
        raise UpdateRefused("An update with this id was withdrawn", expected="a new id", received=update.id)
    for number, (record, _) in journal.committed.items():
        if record.id == update.id:
            if record.digest in (update.content_digest(), plan.content_digest()):
                return number
            raise UpdateIdInUse(
                f"Another update with this id is in the journal, as number {number}",
                expected="a new id, or the same content",
                received=update.id,
            )
    return None


def _check_step(at_step: int | None, seen: Seen) -> None:
    step = max((note.step for note in seen.notes), default=0)
    if at_step is not None and at_step <= step and seen.running:
        raise UpdateRefused(
            f"Step {at_step} is past",
            expected=f"a step after {step}, where the job is",
            received=f"step {at_step}",
        )


def check_running(run: RunDir, update: Update, seen: Seen, *, next_start: bool) -> str:
    """Refuses what nobody would take, unless that is wanted or it waits there already."""
    now = read_state(run, seen.notes, seen.now)
    if now.state.is_running:
        return ""
    said, beside = now.sentence, running_beside(run, seen.now)
    if next_start or any(one.id == update.id for one in inbox.waiting(run)):
        return f"{said}. It will take the update when it is started again. {beside}".rstrip()
    raise UpdateRefused(
        said,
        expected="a running job",
        remedy=beside if beside else "Do it again when the job runs, or for its next start: next_start=True",
    )
