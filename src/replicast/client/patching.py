"""Applies an update to a checkpoint of a run whose job is not running, as an update of the run's journal.

    claim the run                 as a start does: what an earlier group writes from now on does not count
    write the new checkpoint      under a temporary name; every byte of the old one is checked
    write the record              the commit: whatever happens from here on, the next start has the update
    name the new checkpoint       it contains the update, so that a start does not apply it again
    write the receipt             and end the claim

Between the record and the name, a start from the old checkpoint applies the update from the journal, at the
same step and with the same bits. A checkpoint that contains an update without a record never exists.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from msgspec.structs import replace

from replicast.client.notes import see
from replicast.core.entries import Before, Committed, History, Payload, Receipt
from replicast.core.records import Stage
from replicast.errors import ClusterError, UpdateRefused
from replicast.files import RunDir, RunPath
from replicast.storage.checkpoint_tools import patched_draft, patched_variables
from replicast.storage.checkpoints import CheckpointReader, CheckpointStore, Manifest, Progress, saved_of
from replicast.storage.claims import Fence, last_claim
from replicast.storage.journal import FileJournal, Updates
from replicast.storage.run_files import check_free, read_run_info
from replicast.update.digest import digest_array, digest_of_digests
from replicast.update.distance import MEASURED_BYTES, effects
from replicast.update.edits import RESETS, Array, Edit
from replicast.update.inverse import bytes_to_keep, parts_to_keep, update_before
from replicast.update.schema import Limits, planned
from replicast.update.state import touched_parts
from replicast.update.update import Update

_ELSEWHERE = "-o OUT writes a patched checkpoint elsewhere"


@dataclass(frozen=True, slots=True)
class Patched:
    """A checkpoint that was patched in place."""

    sequence: int
    path: RunPath
    before: Manifest
    after: Manifest


def check_patch(run: RunDir, step: int, update: Update) -> None:
    """Checks whether a checkpoint of a run can be patched in place now. Changes nothing."""
    state = see(run).state
    if state.state.is_running:
        raise _job_is_running(state.sentence)
    if not read_run_info(run).journaled:
        raise UpdateRefused('The run has no journal: its job has durability="memory"', remedy=_ELSEWHERE)
    manifest = CheckpointStore(run).manifest(step)
    _check_history(Updates(run).history, manifest, planned(update, manifest.schema))


def patch_in_place(run: RunDir, step: int, update: Update, *, progress: Progress | None = None) -> Patched:
    """Applies an update to a checkpoint of a run, as the next update of its journal.

    The patched checkpoint replaces the one of its step, and is the one that the next start goes on from, even
    if there are checkpoints of later steps. Updates that were committed at later steps are applied again.
    """
    check_patch(run, step, update)
    with _claimed(run) as fence:
        journal, store = FileJournal(run, fence), CheckpointStore(run, fence)
        with store.open(step) as reader:
            before, history = reader.manifest, journal.history()
            plan = planned(update, before.schema)
            _check_history(history, before, plan)
            touched = [edit for edit in plan.edits if edit.operation not in RESETS]
            values = _values_of(reader, touched)
            attempt, sequence = _attempt(run), history.next_sequence
            saved = saved_of(before)
            draft = patched_draft(reader, update).with_updates(replace(saved, holds=saved.holds | {sequence}))
            record = Committed(sequence, plan.id, plan.content_digest(), step, attempt)

            def commit() -> None:
                """Writes the update to the journal, with the values that a revert needs."""
                overwritten = _values_before(journal, reader, record, plan)
                journal.write(Payload(plan.id, record.digest, None, plan.author, plan.note), plan)
                journal.write(record)
                if overwritten is not None:
                    journal.write(overwritten)

            after = store.replace(draft, patched_variables(reader, plan, progress), commit)
        path = store.find(step)
        with store.open(step) as reader:
            digest = _digest_of_touched(reader, plan)
            done = effects(touched, before.schema, values, _values_of(reader, touched))
        applied = sequence, plan.id, step, {0: digest}, 0.0, 0.0, time.time(), Stage.VERIFIED
        journal.write(Receipt(*applied, attempt=attempt, checkpoint=path.name, effects=done))
    return Patched(sequence, path, before, after)


@contextmanager
def _claimed(run: RunDir) -> Iterator[Fence]:
    """Claims the run as its next group, and ends the claim."""
    try:
        check_free(run)
        fence = Fence(run, _attempt(run))
    except ClusterError as error:
        raise _job_is_running(str(error)) from error
    try:
        yield fence
    finally:
        fence.release()


def _attempt(run: RunDir) -> int:
    claim = last_claim(run)
    return 0 if claim is None else claim.attempt


def _job_is_running(sentence: str) -> UpdateRefused:
    return UpdateRefused(
        f"A job is running in this directory: {sentence}",
        remedy="Push the update to it (replicast push), or stop it first (replicast stop)",
    )


def _check_history(history: History, manifest: Manifest, plan: Update) -> None:
    """Checks that the journal has room for this update at the end of what the checkpoint contains."""
    known = history.by_id.get(plan.id)
    if known is not None:
        raise UpdateRefused(
            f"An update with this id is in the journal, as number {known.sequence}, at step {known.step}",
            expected="a new id",
            received=plan.id,
        )
    if plan.id in history.withdrawn or plan.id in history.scheduled:
        what = "was withdrawn" if plan.id in history.withdrawn else "is scheduled for a later step"
        raise UpdateRefused(f"An update with this id {what}", expected="a new id", received=plan.id)
    holds = saved_of(manifest).holds
    if not holds <= history.committed.keys():
        raise UpdateRefused(
            f"The checkpoint of step {manifest.step} contains update {max(holds)}, and the journal does not",
            remedy=_ELSEWHERE,
        )
    for record in history.after(holds):
        if record.step <= manifest.step:
            raise UpdateRefused(
                f"The checkpoint of step {manifest.step} does not contain update {record.sequence}, which "
                f"was committed at step {record.step} and has to be applied first",
                remedy=f"Start the job and make a checkpoint (replicast checkpoint now), or {_ELSEWHERE}",
            )


def _values_before(
    journal: FileJournal, reader: CheckpointReader, record: Committed, plan: Update
) -> Before | None:
    """Makes the values durable that the update overwrites; None if a revert does not need them."""
    schema, most = reader.manifest.schema, Limits().max_before_bytes
    whole, rows = parts_to_keep(plan.edits, schema)
    if not whole and not rows:
        return None
    nbytes = bytes_to_keep(whole, rows, schema)
    if nbytes > most:
        problem = f"it has overwritten {nbytes / 2**20:,.1f} MiB, and only up to {most / 2**20:,.1f} are kept"
        problem = f"Update {record.sequence} cannot be reverted: {problem}"
        return Before(record.sequence, plan.id, problem=problem)
    parts = {name: (indices, _rows(reader, name, indices)) for name, indices in rows.items()}
    values = update_before(plan.id, {name: reader.read(name) for name in whole}, parts)
    return Before(record.sequence, plan.id, journal.stage_before(values))


def _values_of(reader: CheckpointReader, edits: Sequence[Edit]) -> dict[str, Array]:
    """What these edits touch in a checkpoint; nothing if that is more than is measured."""
    whole, rows = touched_parts(edits)
    if bytes_to_keep(whole, rows, reader.manifest.schema) > MEASURED_BYTES:
        return {}
    return {name: reader.read(name) for name in whole} | {
        name: _rows(reader, name, indices) for name, indices in rows.items()
    }


def _digest_of_touched(reader: CheckpointReader, plan: Update) -> str:
    """The digest that a worker reports that has applied the update: of what it touches."""
    whole, rows = touched_parts(plan.edits)
    digests = {name: reader.manifest.digests[name] for name in whole}
    for name, indices in rows.items():
        digests[f"{name}[rows]"] = digest_array(_rows(reader, name, indices))
    return digest_of_digests(digests)


def _rows(reader: CheckpointReader, name: str, indices: Array) -> Array:
    return reader.read_rows(name, [(int(index), int(index) + 1) for index in indices])
