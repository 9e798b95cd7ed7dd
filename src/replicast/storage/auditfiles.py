"""Audits in the run directory: their reports, and requests from outside the job.

audits.jsonl              one line for each audit, written by worker 0
inbox/<id>.audit.json     requests an audit from a running job; removed once a report with this id is written

A request stays until it is answered, so that a job that dies before that answers it in its next attempt.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from replicast.audits.report import AuditReport
from replicast.errors import ReplicastError
from replicast.files import write_quickly
from replicast.storage.runfiles import append_line, lines_from_the_end, read_run_info
from replicast.strictjson import parse_object

_REQUEST = ".audit.json"


def append_audit(run_dir: Path, report: AuditReport) -> None:
    """Appends the report of an audit, then removes the requests that it answers. Only worker 0.

    Raises:
        OSError: It cannot be written.
    """
    with contextlib.suppress(ReplicastError, OSError):  # audit numbers start over with each attempt
        report = replace(report, attempt=read_run_info(run_dir).attempt)
    append_line(Path(run_dir) / "audits.jsonl", json.dumps(report.to_json()))
    for request in report.requests:
        withdraw_request(run_dir, request)


def last_audits(run_dir: Path, count: int) -> list[AuditReport]:
    """The last reports, oldest first. Reads only the end of the file; a damaged line is skipped."""
    return list(itertools.islice(_from_the_end(run_dir), count))[::-1]


def request_audit(run_dir: Path) -> str:
    """Requests an audit from the running job.

    Returns:
        An id, which will be among the `requests` of the report.

    Raises:
        OSError: It cannot be written.
    """
    request = uuid.uuid4().hex
    inbox = Path(run_dir) / "inbox"
    inbox.mkdir(parents=True, exist_ok=True)
    write_quickly(inbox / f"{request}{_REQUEST}", json.dumps({"requested_at": time.time()}))
    return request


def audit_requests(run_dir: Path) -> tuple[str, ...]:
    """The ids of the open requests. An audit that begins after this call answers all of them."""
    inbox = Path(run_dir) / "inbox"
    found = [path.name for path in inbox.glob(f"*{_REQUEST}")] if inbox.is_dir() else []
    return tuple(sorted(name.removesuffix(_REQUEST) for name in found if not name.startswith(".")))


def withdraw_request(run_dir: Path, request: str) -> None:
    """Removes a request; no-op if it is gone."""
    if Path(request).name == request:
        with contextlib.suppress(FileNotFoundError):
            (Path(run_dir) / "inbox" / f"{request}{_REQUEST}").unlink()


def answer_to(run_dir: Path, request: str, most: int = 10_000) -> AuditReport | None:
    """The report that answers a request, if it is among the last `most` reports."""
    named = json.dumps(request).encode()
    for line in itertools.islice(lines_from_the_end(Path(run_dir) / "audits.jsonl"), most):
        # Short epochs produce many audits: only a line that contains the request is parsed.
        report = _report(line) if named in line else None
        if report is not None and request in report.requests:
            return report
    return None


def _from_the_end(run_dir: Path) -> Iterator[AuditReport]:
    for line in lines_from_the_end(Path(run_dir) / "audits.jsonl"):
        report = _report(line)
        if report is not None:
            yield report


def _report(line: bytes) -> AuditReport | None:
    try:
        return AuditReport.from_json(parse_object(line))
    except (ValueError, AttributeError):
        return None
