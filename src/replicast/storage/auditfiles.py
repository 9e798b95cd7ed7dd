"""The reports of audits in the run directory: `audits.jsonl`, one line for each, written by worker 0."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import replace

from replicast.audits.report import AuditReport
from replicast.errors import ReplicastError
from replicast.files import RunDir, below
from replicast.storage.runfiles import append_line, lines_from_the_end, read_run_info
from replicast.strictjson import parse_object


def append_audit(run_dir: RunDir, report: AuditReport) -> None:
    """Appends the report of an audit. Only worker 0.

    Raises:
        OSError: It cannot be written.
    """
    with contextlib.suppress(ReplicastError, OSError):  # audit numbers start over with each attempt
        report = replace(report, attempt=read_run_info(run_dir).attempt)
    append_line(below(run_dir) / "audits.jsonl", json.dumps(report.to_json()))


def last_audits(run_dir: RunDir, count: int) -> list[AuditReport]:
    """The last reports, oldest first. Reads only the end of the file; a damaged line is skipped."""
    return list(itertools.islice(_from_the_end(run_dir), min(count, sys.maxsize)))[::-1]


def _from_the_end(run_dir: RunDir) -> Iterator[AuditReport]:
    for line in lines_from_the_end(below(run_dir) / "audits.jsonl"):
        report = _report(line)
        if report is not None:
            yield report


def _report(line: bytes) -> AuditReport | None:
    try:
        return AuditReport.from_json(parse_object(line))
    except (ValueError, AttributeError):
        return None
