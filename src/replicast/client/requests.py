"""How a running job is asked for something, and what keeps it from answering."""

from __future__ import annotations

from collections.abc import Sequence

from replicast.client.author import this_user
from replicast.client.notes import Seen, not_running_text, polls, schema_of, see
from replicast.client.run import Pulled
from replicast.errors import CheckpointError, NoAnswer, NotFound, RequestFailed, RequestRefused, UpdateRefused
from replicast.files import RunDir, below
from replicast.storage import requests
from replicast.storage.checkpoints import CheckpointStore
from replicast.storage.requests import Answer, Kind, Rows
from replicast.storage.run_files import absent_secs, age, read_run_info
from replicast.update.audit_report import AuditReport, workers_text
from replicast.update.digest import digest_array
from replicast.update.edits import Array
from replicast.update.schema import Variable

_LATE_SECS = 3.0  # A worker writes a note every second: below this, which note is the oldest is chance.
_WHAT = {"audit": "an audit", "save": "a checkpoint", "leave": "stopping", "pull": "the values"}


def ask(
    run: RunDir,
    kind: Kind,
    timeout_secs: float,
    author: str = "",
    *,
    variable: Variable | None = None,
    rows: Rows = (),
) -> tuple[Answer, Array | None]:
    """Asks the job for something and waits for its answer, at most `timeout_secs`."""
    seen = see(run)
    if not seen.running:
        raise NoAnswer(f"{not_running_text(seen)}: only a running job can be asked for {_WHAT[kind]}.")
    try:
        asked = requests.submit(
            run,
            kind,
            author=author or this_user(),
            timeout_secs=timeout_secs,
            now=seen.now,
            name="" if variable is None else variable.name,
            rows=rows,
        )
    except OSError as error:
        raise RequestFailed(
            f"The request cannot be written to {below(run) / 'inbox'} ({error.strerror})."
        ) from error
    answer = None
    try:
        for seen, _, _ in polls(run, timeout_secs):
            answer = requests.read_answer(run, asked.id)  # After the notes: a job may write it as it ends.
            if answer is not None and answer.done:
                if variable is None:
                    return answer, None
                count = sum(stop - start for start, stop in rows)
                shape = (count, *variable.shape[1:]) if rows else variable.shape
                return answer, requests.read_values(run, asked.id, shape, variable.dtype)
            if answer is not None:
                raise RequestRefused(f"The job refused it, at step {answer.step}: {answer.problem}")
            if not seen.running:
                raise NoAnswer(f"{not_running_text(seen)}: it ended without {_WHAT[kind]}.")
        waited_for = _waited_for(see(run), read_run_info(run).workers)
        raise NoAnswer(f"{timeout_secs:g} s have passed without {_WHAT[kind]}. {waited_for}")
    finally:
        if kind != "leave" or answer is None:  # otherwise the launcher reads who has stopped the job
            requests.forget(run, asked.id)


def audit(run: RunDir, timeout_secs: float, author: str = "") -> AuditReport:
    """Asks the job for an audit; raises as `ask` does."""
    return AuditReport.from_json(ask(run, "audit", timeout_secs, author)[0].details)


def pull(
    run: RunDir, name: str, rows: Sequence[int] | None, timeout_secs: float, max_bytes: int | None = None
) -> Pulled:
    """The values of a variable in the running job, or in the last checkpoint; as `Run.pull` says."""
    try:
        variable = schema_of(run).resolve(name)
        ranges = () if rows is None else ranges_of(rows)
        requests.check_rows(ranges, variable.name, variable.shape)
        _check_size(variable, ranges, max_bytes)
    except UpdateRefused as error:
        raise NotFound(str(error)) from error
    wanted = None if rows is None else tuple(rows)
    if rows is not None and not wanted:
        raise NotFound("Rows are wanted, and none is named.")
    if not (seen := see(run)).running:
        return _from_checkpoint(run, seen, variable, wanted, ranges, max_bytes)
    answer, values = ask(run, "pull", timeout_secs, variable=variable, rows=ranges)
    if values is None:
        raise NoAnswer("The job has answered without values.")
    digests = {int(rank): str(digest) for rank, digest in answer.details["digests"].items()}
    return Pulled(variable.name, answer.step, digests[0], "job", values, wanted, digests)


def _check_size(variable: Variable, ranges: Rows, max_bytes: int | None) -> None:
    nbytes = variable.nbytes
    if ranges:
        nbytes = nbytes // max(1, variable.shape[0]) * sum(stop - start for start, stop in ranges)
    if max_bytes is not None and nbytes > max_bytes:
        raise RequestRefused(
            f"These are too many values of {variable.name}. Expected: at most {max_bytes} bytes. "
            f"Received: {nbytes}. Ask for some rows at a time"
        )


def _from_checkpoint(
    run: RunDir,
    seen: Seen,
    variable: Variable,
    wanted: tuple[int, ...] | None,
    ranges: Rows,
    max_bytes: int | None,
) -> Pulled:
    store = CheckpointStore(run)
    last = store.last()
    if last is None:
        raise NotFound(f"{not_running_text(seen)}, and it has no checkpoint.")
    with store.open(last.step) as reader:
        try:  # The variable may have another shape there.
            _check_size(reader.manifest.schema.resolve(variable.name), ranges, max_bytes)
            array = reader.read(variable.name) if wanted is None else reader.read_rows(variable.name, ranges)
        except (CheckpointError, UpdateRefused) as error:
            raise NotFound(str(error)) from error
    return Pulled(variable.name, last.step, digest_array(array), f"checkpoint {last.step}", array, wanted)


def ranges_of(rows: Sequence[int]) -> Rows:
    """Single rows as ranges, in the given order: each from its first row to the one behind its last."""
    ranges: list[tuple[int, int]] = []
    for row in rows:
        if ranges and ranges[-1][1] == row:
            ranges[-1] = ranges[-1][0], row + 1
        else:
            ranges.append((row, row + 1))
    return tuple(ranges)


def _waited_for(seen: Seen, workers: int) -> str:
    """What keeps a job from answering, as far as the workers' notes tell."""
    now = seen.now
    limit = absent_secs(workers)
    heard = {note.rank: note for note in seen.notes if now - note.time <= limit}
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
