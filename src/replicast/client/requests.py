"""How a running job is asked for something, and what keeps it from answering."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from replicast.audits.report import AuditReport, workers_text
from replicast.client.author import this_user
from replicast.client.notes import is_running, not_running_text, polls
from replicast.client.views import Pulled
from replicast.errors import CheckpointError, NoAnswer, NotFound, RequestFailed, RequestRefused, UpdateRefused
from replicast.storage import requests
from replicast.storage.checkpoint import CheckpointStore
from replicast.storage.requests import Answer, Kind, Rows
from replicast.storage.runfiles import WorkerNote, read_run_info, read_worker_notes
from replicast.storage.states import absent_secs, age
from replicast.update.digest import digest_array
from replicast.update.edits import Array
from replicast.update.schema import Variable

_LATE_SECS = 3.0  # A worker writes a note every second: below this, which note is the oldest is chance.
_WHAT = {"audit": "an audit", "save": "a checkpoint", "leave": "stopping", "pull": "the values"}


def ask(
    run: Path, kind: Kind, timeout_secs: float, author: str = "", *, name: str = "", rows: Rows = ()
) -> tuple[Answer, Array | None]:
    """Asks the job for something and waits for its answer, at most `timeout_secs`.

    Returns:
        The answer, and the values that were asked for.

    Raises:
        NoAnswer: The job is not running or has ended, or the time has passed.
        RequestRefused: The job refuses it.
        RequestFailed: The request cannot be written.
    """
    notes = read_worker_notes(run)
    if not is_running(notes):
        raise NoAnswer(f"{not_running_text(notes)}: only a running job can be asked for {_WHAT[kind]}.")
    try:
        asked = requests.submit(
            run, kind, author=author or this_user(), timeout_secs=timeout_secs, name=name, rows=rows
        )
    except OSError as error:
        raise RequestFailed(
            f"The request cannot be written to {run / 'inbox'} ({error.strerror})."
        ) from error
    answer = None
    try:
        for notes, _, _ in polls(run, timeout_secs):
            answer = requests.read_answer(run, asked.id)  # After the notes: a job may write it as it ends.
            if answer is not None and answer.done:
                return answer, requests.read_values(run, asked.id) if kind == "pull" else None
            if answer is not None:
                raise RequestRefused(f"The job refused it, at step {answer.step}: {answer.problem}")
            if not is_running(notes):
                raise NoAnswer(f"{not_running_text(notes)}: it ended without {_WHAT[kind]}.")
        waited_for = _waited_for(read_worker_notes(run), read_run_info(run).workers)
        raise NoAnswer(f"{timeout_secs:g} s have passed without {_WHAT[kind]}. {waited_for}")
    finally:
        if kind != "leave" or answer is None:  # otherwise the launcher reads who has stopped the job
            requests.forget(run, asked.id)


def audit(run: Path, timeout_secs: float, author: str = "") -> AuditReport:
    """Asks the job for an audit; raises as `ask` does."""
    return AuditReport.from_json(ask(run, "audit", timeout_secs, author)[0].details)


def pull(run: Path, name: str, rows: Sequence[int] | None, timeout_secs: float) -> Pulled:
    """The values of a variable in the running job, or in the last checkpoint; as `Run.pull` says."""
    try:
        variable = read_run_info(run).schema.resolve(name)
        ranges = () if rows is None else ranges_of(rows)
        requests.check_rows(ranges, variable.name, variable.shape)
    except UpdateRefused as error:
        raise NotFound(str(error)) from error
    wanted = None if rows is None else tuple(rows)
    if rows is not None and not wanted:
        raise NotFound("Rows are wanted, and none is named.")
    if not is_running(read_worker_notes(run)):
        return _from_checkpoint(run, variable, wanted, ranges)
    answer, values = ask(run, "pull", timeout_secs, name=variable.name, rows=ranges)
    if values is None:
        raise NoAnswer("The job has answered without values.")
    digests = {int(rank): str(digest) for rank, digest in answer.details["digests"].items()}
    return Pulled(variable.name, answer.step, digests[0], "job", values, wanted, digests)


def _from_checkpoint(run: Path, variable: Variable, wanted: tuple[int, ...] | None, ranges: Rows) -> Pulled:
    store = CheckpointStore(run)
    steps = [one.step for one in store.list()]
    if not steps:
        raise NotFound(f"{not_running_text(read_worker_notes(run))}, and it has no checkpoint.")
    with store.open(steps[-1]) as reader:
        try:
            array = reader.read(variable.name) if wanted is None else reader.read_rows(variable.name, ranges)
        except CheckpointError as error:
            raise NotFound(str(error)) from error
    source = f"checkpoint {steps[-1]}"
    return Pulled(variable.name, steps[-1], digest_array(array), source, array, wanted)


def ranges_of(rows: Sequence[int]) -> Rows:
    """Single rows as ranges, in the given order: each from its first row to the one behind its last."""
    ranges: list[tuple[int, int]] = []
    for row in rows:
        if ranges and ranges[-1][1] == row:
            ranges[-1] = ranges[-1][0], row + 1
        else:
            ranges.append((row, row + 1))
    return tuple(ranges)


def _waited_for(notes: list[WorkerNote], workers: int) -> str:
    """What keeps a job from answering, as far as the workers' notes tell."""
    now = time.time()
    limit = absent_secs(workers)
    heard = {note.rank: note for note in notes if now - note.time <= limit}
    silent = [rank for rank in range(workers) if rank not in heard]
    if silent:
        return f"Waited for {workers_text(silent)}, not heard of for {age(limit)} or more."
    if not any(note.training for note in heard.values()):
        return "Waited for the training to begin: no worker is inside a training loop."
    steps = sorted({note.step for note in heard.values()})
    if len(steps) > 1:
        behind = workers_text(sorted(note.rank for note in heard.values() if note.step == steps[0]))
        verb = "are" if " and " in behind else "is"
        return f"Waited for the next step: {behind} {verb} behind, at step {steps[0]}, others at {steps[-1]}."
    oldest = min(heard.values(), key=lambda note: note.time)
    told = f"; worker {oldest.rank} was not heard of for the longest, {age(now - oldest.time)}"
    return (
        f"Waited for the next step: every worker is at step {steps[0]}, and one that hangs keeps the "
        f"others there{told if now - oldest.time > _LATE_SECS else ''}. Look into the logs of all."
    )
