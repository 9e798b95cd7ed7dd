"""The resources of this machine that local workers share: cores and GPUs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
_DEVICES = Path("/dev")
_MIN_INTEROP_THREADS = 2
"""With one inter-op thread, a collective that waits for another worker could block the rest of the step."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The resources that local workers share."""

    cores: int
    gpus: tuple[str, ...] = ()


def this_machine(environ: Mapping[str, str]) -> Machine:
    """Detects the resources of the current machine."""
    nodes = [entry.name for entry in _DEVICES.glob("nvidia[0-9]*")]
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        gpus=visible_gpus(environ.get(CUDA_VISIBLE_DEVICES), nodes),
    )


def visible_gpus(setting: str | None, device_nodes: Sequence[str]) -> tuple[str, ...]:
    """The GPUs that may be used: those that the user listed, else all that have a device node."""
    present = sorted(int(found[1]) for node in device_nodes if (found := re.fullmatch(r"nvidia(\d+)", node)))
    if not present:
        return ()
    if setting is None:
        return tuple(str(index) for index in present)
    listed = [device.strip() for device in setting.split(",")]
    # CUDA itself stops at the first entry that is not a device.
    hidden = next((i for i, device in enumerate(listed) if device in ("", "-1")), len(listed))
    return tuple(listed[:hidden])


def assign_gpus(gpus: Sequence[str], workers: int) -> tuple[str | None, ...]:
    """Assigns one GPU to each local worker: one replica per worker."""
    if len(gpus) < 2:
        return (None,) * workers
    return tuple(gpus[index % len(gpus)] for index in range(workers))


def thread_settings(cores: int, workers: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Divides the cores among local workers. Keeps what the user set; a single worker gets all cores."""
    if workers < 2:
        return {}
    share = max(1, cores // workers)
    wanted = {
        "TF_NUM_INTRAOP_THREADS": str(share),
        "TF_NUM_INTEROP_THREADS": str(max(_MIN_INTEROP_THREADS, share)),
        "OMP_NUM_THREADS": str(share),
    }
    return {name: value for name, value in wanted.items() if name not in environ}
