"""Adds an update to the journal of a run whose job is not running: the next start applies it.

It is committed at the step of the last checkpoint, from which that start continues. So the start applies it
before it trains, as it would after a crash: at this step, with the bits of a live update there, and with a
receipt. The checkpoint stays as it is. The record is the commit: before it nothing has changed, and after it
nothing is left to do.
"""

from __future__ import annotations

from replicast.client.notes import see
from replicast.core.entries import Committed, Payload
from replicast.errors import ClusterError, UpdateRefused
from replicast.files import RunDir
from replicast.storage.checkpoints import CheckpointStore
from replicast.storage.claims import Fence, last_claim
from replicast.storage.journal import FileJournal, Updates
from replicast.storage.run_files import check_free, read_run_info
from replicast.update.schema import planned
from replicast.update.update import Update

_ELSEWHERE = "-o OUT writes a patched checkpoint elsewhere"


def check_patch(run: RunDir, step: int, update: Update) -> Update:
    """The update as the journal would have it, if it can be added at this step now. Changes nothing."""
    state = see(run).state
    if state.state.is_running:
        raise _job_is_running(state.sentence)
    if not read_run_info(run).journaled:
        raise UpdateRefused('The run has no journal: its job has durability="memory"', remedy=_ELSEWHERE)
    return _planned(run, step, update)


def _planned(run: RunDir, step: int, update: Update) -> Update:
    last = CheckpointStore(run).last()
    if last is None or last.step != step:
        raise UpdateRefused(
            "Only the checkpoint that the next start continues from can be patched in place",
            expected="none: the run has none" if last is None else f"step {last.step}",
            received=f"step {step}",
            remedy=_ELSEWHERE,
        )
    plan, history = planned(update, last.schema), Updates(run).history
    known = history.by_id.get(plan.id)
    if known is not None:
        what = f"is in the journal, as number {known.sequence}, at step {known.step}"
    elif plan.id in history.withdrawn or plan.id in history.scheduled:
        what = "was withdrawn" if plan.id in history.withdrawn else "is scheduled for a later step"
    else:
        return plan
    raise UpdateRefused(f"An update with this id {what}", expected="a new id", received=plan.id)


def patch_in_place(run: RunDir, step: int, update: Update) -> Committed:
    """Adds an update to the journal at the step of the last checkpoint. Claims the run, as a start does."""
    check_patch(run, step, update)
    claim = last_claim(run)
    attempt = 0 if claim is None else claim.attempt
    try:
        check_free(run)
        fence = Fence(run, attempt)
    except ClusterError as error:
        raise _job_is_running(str(error)) from error
    try:
        plan = _planned(run, step, update)  # Again: another job or patch may have come before the claim.
        journal, digest = FileJournal(run, fence), plan.content_digest()
        record = Committed(journal.history().next_sequence, plan.id, digest, step, attempt)
        journal.write(Payload(plan.id, digest, None, plan.author, plan.note), plan)
        journal.write(record)
    finally:
        fence.release()
    return record


def _job_is_running(sentence: str) -> UpdateRefused:
    return UpdateRefused(
        f"A job is running in this directory: {sentence}",
        remedy="Push the update to it (replicast push), or stop it first (replicast stop)",
    )
