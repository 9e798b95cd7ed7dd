"""GET /metrics: all runs in the text format of Prometheus."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from replicast.page.live import RunWatch
from replicast.storage.journal import UpdateView
from replicast.storage.run_files import JobState

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_COUNT_SECS = 10.0
_HELP = {
    "running": "Whether a worker of the run was heard from lately",
    "state": "Whether the run is in this state: 1 for one state, 0 for all others",
    "workers": "The number of workers of the job",
    "attempt": "The attempt of the job, from 0: each start and each restart begins another",
    "restarts_total": "How often the launcher has restarted the job",
    "step": "The last step that each worker has finished",
    "seconds_since_note": "Seconds since each worker was last heard from",
    "seconds_since_step": "Seconds since each worker finished a step",
    "step_seconds": "The mean time of the last steps of each worker",
    "memory_bytes": "The memory of each worker's process",
    "metric": "The last value of each metric of the training",
    "updates": "Updates in the journal by their stage",
    "updates_waiting": "Updates that wait in the inbox or for their step",
    "update_prepare_seconds": "From the proposal of an update until every worker has its bytes",
    "update_stall_seconds": "The longest time that an update stopped the training of a worker",
    "update_apply_seconds": "From the commit of an update until every worker has applied it",
    "update_verify_seconds": "From then, or from the end of its trial, until the digests are compared",
    "last_audit_step": "The step of the last audit",
    "last_audit_equal": "Whether all replicas were equal in the last audit",
}
_HISTOGRAMS = {f"update_{part}_seconds": part for part in ("prepare", "stall", "apply", "verify")}
_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, math.inf)
# A name of `_HELP`, labels, and a number; None for no sample, and a list for a histogram.
_Sample = tuple[str, dict[str, str], Any]


async def exposition(watches: Iterable[RunWatch]) -> str:
    samples: dict[str, list[str]] = {name: [] for name in _HELP}
    for watch in watches:
        for name, labels, value in await _samples(watch):
            told = {"run": watch.name, **labels}
            if isinstance(value, list):
                for bound in _BOUNDS:
                    within = sum(one <= bound for one in value)
                    samples[name].append(_line(f"{name}_bucket", told | {"le": _number(bound)}, within))
                samples[name].append(_line(f"{name}_sum", told, sum(value)))
                samples[name].append(_line(f"{name}_count", told, len(value)))
            elif value is not None:
                samples[name].append(_line(name, told, value))
    text = ""
    for name, lines in samples.items():
        if lines:
            kind = "histogram" if name in _HISTOGRAMS else "counter" if name.endswith("_total") else "gauge"
            text += f"# HELP replicast_{name} {_HELP[name]}\n# TYPE replicast_{name} {kind}\n{''.join(lines)}"
    return text


async def _samples(watch: RunWatch) -> list[_Sample]:
    try:
        status = await watch.status()
        of_updates = await watch.read("of_updates", lambda: _of_updates(watch.run.log()), _COUNT_SECS)
    except Exception:  # The other runs are of interest all the same; the page says what is wrong with it.
        return [("running", {}, 0)]
    return [*_of_status(status), *of_updates]


def _of_updates(updates: Sequence[UpdateView]) -> list[_Sample]:
    stages = Counter(str(one.stage) for one in updates)
    samples: list[_Sample] = [("updates", {"stage": one}, count) for one, count in sorted(stages.items())]
    for name, part in _HISTOGRAMS.items():
        timings = (one.timings[part] for one in updates if part in one.timings)
        samples.append((name, {}, [ended - begun for begun, ended in timings]))
    return samples


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


def _line(name: str, labels: Mapping[str, str], value: Any) -> str:
    quoted = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
    return f"replicast_{name}{{{quoted}}} {_number(float(value))}\n"


def _escaped(value: str) -> str:
    text = "".join(one if one.isprintable() or one == "\n" else "\ufffd" for one in value)
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return ("+Inf" if value > 0 else "-Inf") if math.isinf(value) else repr(value)
