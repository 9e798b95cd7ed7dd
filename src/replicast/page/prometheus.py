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
    "running": "Whether a worker of the run was heard of lately",
    "state": "Whether the run is in this state: 1 for one state, 0 for all others",
    "workers": "The number of workers of the job",
    "attempt": "The attempt of the job, from 0: each start and each restart begins another",
    "restarts_total": "How often the launcher has restarted the job",
    "step": "The last step that each worker has finished",
    "seconds_since_note": "Seconds since each worker was last heard of",
    "seconds_since_step": "Seconds since each worker finished a step",
    "step_seconds": "The mean time of the last steps of each worker",
    "memory_bytes": "The memory of each worker's process",
    "metric": "The last value of each metric of the training",
    "updates": "Updates in the journal by their stage",
    "updates_waiting": "Updates that wait in the inbox or for their step",
    "last_audit_step": "The step of the last audit",
    "last_audit_equal": "Whether all replicas were equal in the last audit",
}
_Sample = tuple[str, dict[str, str], Any]  # A name of `_HELP`, labels, and a number; None for no sample.


async def exposition(watches: Iterable[RunWatch]) -> str:
    samples: dict[str, list[str]] = {name: [] for name in _HELP}
    for watch in watches:
        for name, labels, value in await _samples(watch):
            if value is not None:
                told = {"run": watch.name, **labels}
                quoted = ",".join(f'{label}="{_escaped(text)}"' for label, text in told.items())
                samples[name].append(f"replicast_{name}{{{quoted}}} {_number(float(value))}\n")
    text = ""
    for name, lines in samples.items():
        if lines:
            kind = "counter" if name.endswith("_total") else "gauge"
            text += f"# HELP replicast_{name} {_HELP[name]}\n# TYPE replicast_{name} {kind}\n{''.join(lines)}"
    return text


async def _samples(watch: RunWatch) -> list[_Sample]:
    try:
        status = await watch.status()
        stages = await watch.read(
            "stages", lambda: Counter(str(one.stage) for one in watch.run.log()), _COUNT_SECS
        )
    except Exception:  # The other runs are of interest all the same; the page says what is wrong with it.
        return [("running", {}, 0)]
    updates: list[_Sample] = [("updates", {"stage": one}, count) for one, count in sorted(stages.items())]
    return [*_of_status(status), *updates]


def _of_status(status: Mapping[str, Any]) -> Iterator[_Sample]:
    yield "running", {}, status["running"]
    for state in JobState:
        yield "state", {"state": str(state)}, status["state"] == state
    yield "restarts_total", {}, status["restarted"]
    yield "workers", {}, status["size"]
    yield "attempt", {}, status["attempt"]
    yield "updates_waiting", {}, len(status["waiting"]) + len(status["scheduled"])
    for note in status["workers"]:
        worker, stepped_at = {"worker": str(note["rank"])}, note.get("stepped_at")
        yield "step", worker, note["step"]
        yield "seconds_since_note", worker, note["age_secs"]
        yield "seconds_since_step", worker, status["time"] - stepped_at if stepped_at else None
        yield "step_seconds", worker, note.get("step_secs") or None
        yield "memory_bytes", worker, note.get("memory_bytes") or None
    for name, value in ((status["metrics"] or {}).get("values") or {}).items():
        yield "metric", {"name": name}, value
    if (audit := status["audit"]) is not None:
        yield "last_audit_step", {}, audit["step"]
        yield "last_audit_equal", {}, audit["equal"]


def _escaped(value: str) -> str:
    text = "".join(one if one.isprintable() or one == "\n" else "\ufffd" for one in value)
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return ("+Inf" if value > 0 else "-Inf") if math.isinf(value) else repr(value)
