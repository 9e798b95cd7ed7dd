"""The machine that a run measures: what others compare theirs with, and what it has room for."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path


def machine_facts() -> dict[str, str]:
    """Cores, memory, kernel and load, for comparisons with other machines."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [text.split(":", 1)[1].strip() for text in lines if text.startswith("model name")]
    processor = names[0] if names else platform.processor() or platform.machine()
    return {
        "cores": f"{len(os.sched_getaffinity(0))}, {processor}",
        "memory": f"{memory:.0f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "load at the start": " ".join(f"{load:.1f}" for load in os.getloadavg()),
    }


def available_memory() -> int:
    """The bytes that new processes may use without swapping."""
    meminfo = Path("/proc/meminfo")
    found = re.search(r"MemAvailable: *(\d+) kB", meminfo.read_text()) if meminfo.exists() else None
    if found is not None:
        return int(found[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
