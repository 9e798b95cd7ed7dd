"""GET /metrics: all runs in the text format of Prometheus."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from replicast.page.live import RunWatch
from replicast.storage.run_files import JobState

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_COUNT_SECS = 10.0
_HELP = {
    "replicast_running": ("gauge", "Whether a worker of the run was heard of lately"),
    "replicast_state": ("gauge", "Whether the run is in this state: 1 for one state, 0 for all others"),
    "replicast_workers": ("gauge", "The number of workers of the job"),
    "replicast_attempt": (
        "gauge",
        "The attempt of the job, from 0: each start and each restart begins another",
    ),
    "replicast_restarts_total": ("counter", "How often the launcher has restarted the job"),
    "replicast_step": ("gauge", "The last step that each worker has finished"),
    "replicast_seconds_since_note": ("gauge", "Seconds since each worker was last heard of"),
    "replicast_seconds_since_step": ("gauge", "Seconds since each worker finished a step"),
    "replicast_step_seconds": ("gauge", "The mean time of the last steps of each worker"),
    "replicast_memory_bytes": ("gauge", "The memory of each worker's process"),
    "replicast_metric": ("gauge", "The last value of each metric of the training"),
    "replicast_updates": ("gauge", "Updates in the journal by their stage"),
    "replicast_updates_waiting": ("gauge", "Updates that wait in the inbox or for their step"),
    "replicast_last_audit_step": ("gauge", "The step of the last audit"),
    "replicast_last_audit_equal": ("gauge", "Whether all replicas were equal in the last audit"),
}


async def exposition(watches: Iterable[RunWatch]) -> str:
    samples: dict[str, list[str]] = {name: [] for name in _HELP}
    for watch in watches:
        for name, labels, value in await _samples(watch):
            samples[name].append(f"{name}{_labels({'run': watch.name, **labels})} {_number(value)}\n")
    text = ""
    for name, lines in samples.items():
        kind, help_text = _HELP[name]
        text += f"# HELP {name} {help_text}\n# TYPE {name} {kind}\n{''.join(lines)}" if lines else ""
    return text


async def _samples(watch: RunWatch) -> list[tuple[str, dict[str, str], float]]:
    try:
        status = await watch.status()
        stages = await watch.read(
            "stages", lambda: Counter(str(one.stage) for one in watch.run.log()), _COUNT_SECS
        )
    except (
        Exception
    ):  # The other runs are of interest all the same; the page says what is wrong with this one.
        return [("replicast_running", {}, 0.0)]
    updates = [
        ("replicast_updates", {"stage": stage}, float(count)) for stage, count in sorted(stages.items())
    ]
    return [*_of_status(status), *updates]


def _of_status(status: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, str], float]]:
    yield "replicast_running", {}, float(status["running"])
    for state in JobState:
        yield "replicast_state", {"state": str(state)}, float(status["state"] == state)
    yield "replicast_restarts_total", {}, float(status["restarted"])
    yield "replicast_workers", {}, float(status["size"])
    yield "replicast_attempt", {}, float(status["attempt"])
    yield "replicast_updates_waiting", {}, float(len(status["waiting"]) + len(status["scheduled"]))
    for note in status["workers"]:
        worker = {"worker": str(note["rank"])}
        yield "replicast_step", worker, float(note["step"])
        yield "replicast_seconds_since_note", worker, note["age_secs"]
        if note.get("stepped_at"):
            yield "replicast_seconds_since_step", worker, status["time"] - note["stepped_at"]
        if note.get("step_secs"):
            yield "replicast_step_seconds", worker, note["step_secs"]
        if note.get("memory_bytes"):
            yield "replicast_memory_bytes", worker, float(note["memory_bytes"])
    for name, value in ((status["metrics"] or {}).get("values") or {}).items():
        yield "replicast_metric", {"name": name}, float(value)
    audit = status["audit"]
    if audit is not None:
        yield "replicast_last_audit_step", {}, float(audit["step"])
        yield "replicast_last_audit_equal", {}, float(audit["equal"])


def _labels(labels: Mapping[str, str]) -> str:
    quoted = (f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return "{" + ",".join(quoted) + "}"


def _escaped(value: str) -> str:
    text = "".join(one if one.isprintable() or one == "\n" else "\ufffd" for one in value)
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return ("+Inf" if value > 0 else "-Inf") if math.isinf(value) else repr(float(value))
