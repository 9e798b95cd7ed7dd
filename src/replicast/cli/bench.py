"""`replicast bench`: starts real workers that measure what each operation costs, and shows what they wrote.

`demo/measure.py` is what the workers run.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click

from replicast import __version__
from replicast.cli import Failed
from replicast.cli.options import Parsed, json_option
from replicast.cli.story import OwnJob, check_installed
from replicast.config import shared_memory_directory
from replicast.demo import FLOOR, MEASURES, WARM_UP, figures_file
from replicast.errors import LaunchRefused
from replicast.transport.shared_file import remove_leftovers

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
_SMALLEST = 10**4
# State, staged update, tensors of the all-reduce, its result, a checkpoint's copy, a copy in memory.
_COPIES_PER_WORKER = 6
_FILES = 5  # Checkpoints that are kept, one that is being written, and the journal's latest payload.
_SILENCE_SECS = 300.0  # How long the workers may take for their start, or for one measure.
_LOOK_SECS = 0.1


def parse_size(text: str) -> int:
    """The number of bytes in a text such as 100MB."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(KB|MB|GB)", text.strip().upper())
    if found is None:
        raise ValueError(f"expected a size such as 500KB, 100MB or 1GB. Received: {text!r}")
    nbytes = int(float(found[1]) * _UNITS[found[2]])
    if nbytes < _SMALLEST:
        raise ValueError(f"must be at least {_SMALLEST // 1000}KB. Received: {text!r}")
    return nbytes


@click.command(context_settings={"show_default": True})
@click.option(
    "-n", "--workers", type=click.IntRange(1, 64), default=2, metavar="N", help="Number of workers."
)
@click.option(
    "--size",
    type=Parsed("size", parse_size),
    default="100MB",
    metavar="SIZE",
    help="Size of the state: 500KB, 100MB, 1GB.",
)
@click.option("--rounds", type=click.IntRange(1, 1000), default=5, metavar="K", help="How often to measure.")
@json_option("Print every figure as JSON.")
def bench(workers: int, size: int, rounds: int, as_json: bool) -> None:
    """Measure what each operation costs on this machine.

    Starts real workers with a state of SIZE each, and measures an all-reduce of it, an update of all of it, a
    checkpoint and an audit, next to one copy of the same bytes in memory. The run directory is temporary.

    \b
    Examples:
      replicast bench
      replicast bench --workers 4 --size 1GB
      replicast bench --size 10MB --rounds 20 --json > figures.json

    Exit code: 0 when everything was measured; 1 when the job failed; 2 when nothing was started.
    """
    check_installed("The workers need")
    from rich.progress import TimeElapsedColumn

    from replicast.cli.texts import counted, make_console, make_table, progress_bar

    plan, machine = Plan(workers, size, rounds), machine_facts()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Stops the workers, as Ctrl-C does.
    with progress_bar("starting the workers", TimeElapsedColumn()) as progress:
        figures = measure(plan, progress or line_per_round())
    if as_json:
        facts = {"replicast": __version__, "machine": machine}
        click.echo(json.dumps(figures_json(plan, figures, facts), indent=2))
        return
    started, measured = counted(workers, "worker"), counted(rounds, "round")
    click.echo(f"{started}, a state of {size_text(size)} each, {measured}, journal on disk")
    click.echo(", ".join(f"{name}: {value}" for name, value in machine.items()))
    table = make_table("=", ">ms", ">lowest", ">highest", ">GB/s", ">× copy")
    for figure in figures:
        times = (1000 * secs for secs in (figure.median(), min(figure.secs), max(figure.secs)))
        rate = f"{plan.nbytes / figure.median() / 1e9:.2g}"
        by_copy = "" if figure.name == FLOOR else f"{ratio_to_floor(figure, figures):.1f}"
        table.add_row(
            MEASURES[figure.name],
            *(f"{ms:.1f}" if ms < 1000 else f"{ms:,.0f}" for ms in times),
            rate,
            by_copy,
        )
    make_console().print(table)


def line_per_round() -> Callable[[int, int, str], None]:
    """The progress without a terminal."""
    said = [""]

    def progress(done: int, total: int, doing: str) -> None:
        if (now := doing.partition(":")[0]) != said[-1]:
            said.append(now)
            click.echo(now, err=True)

    return progress


@dataclass(frozen=True, slots=True)
class Plan:
    """One run of the benchmark."""

    workers: int
    nbytes: int
    rounds: int


@dataclass(frozen=True, slots=True)
class Figure:
    """One measure: the slowest worker's time of each round."""

    name: str
    secs: tuple[float, ...]

    def median(self) -> float:
        return median(self.secs)


def size_text(nbytes: int) -> str:
    """A number of bytes as `parse_size` reads it."""
    unit = next((name for name in ("GB", "MB") if nbytes >= _UNITS[name]), "KB")
    return f"{nbytes / _UNITS[unit]:g} {unit}"


def check_room(plan: Plan, directory: Path) -> None:
    """Refuses what this machine has no memory or no disk space for."""
    wanted, free = plan.nbytes * plan.workers * _COPIES_PER_WORKER, available_memory()
    if wanted > free:
        raise LaunchRefused(
            f"{plan.workers} workers with {size_text(plan.nbytes)} each need about {size_text(wanted)} of "
            f"memory; {size_text(free)} are available",
            remedy="Choose a smaller --size, or fewer --workers",
        )
    wanted, free = plan.nbytes * _FILES, shutil.disk_usage(directory).free
    if wanted > free:
        raise LaunchRefused(
            f"Checkpoints of {size_text(plan.nbytes)} need about {size_text(wanted)} in {directory}; "
            f"{size_text(free)} are free",
            remedy="Choose a smaller --size, or set TMPDIR to a directory on a larger disk",
        )


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


def measure(plan: Plan, progress: Callable[[int, int, str], None]) -> list[Figure]:
    """Starts the workers, and returns what they have measured. All files are removed, whatever happens."""
    check_room(plan, Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix="replicast-bench-") as temporary:
        directory = Path(temporary)
        run_dir = directory / "run"
        launch = ["run", "-n", str(plan.workers), "--run-dir", str(run_dir), "--tee", "none"]
        work = ["-m", "replicast.demo.measure", str(plan.nbytes), str(plan.rounds)]
        try:
            with OwnJob([*launch, *work], directory / "output", Path.cwd()) as job:
                problem = _follow(job, plan, run_dir, progress)
            if problem is not None:
                raise Failed(f"{problem}. Output of the launcher:\n{job.said().strip()}")
            times = [parse(figures_file(run_dir, rank).read_text()) for rank in range(plan.workers)]
            return combine(times, plan.rounds)
        finally:
            remove_leftovers(shared_memory_directory(os.environ))  # of workers that were killed


def _follow(job: OwnJob, plan: Plan, run_dir: Path, progress: Callable[[int, int, str], None]) -> str | None:
    """Waits for the end of the job; returns what went wrong, or None."""
    files = [figures_file(run_dir, rank) for rank in range(plan.workers)]
    total = len(MEASURES) * (plan.rounds - WARM_UP)
    done, heard = 0, time.monotonic()
    while job.process.poll() is None:
        counts = [path.read_bytes().count(b"\n") if path.exists() else 0 for path in files]
        if min(counts) > done:
            done, heard = min(counts), time.monotonic()
        progress(done, total, "starting the workers" if done == 0 else _doing(done, plan.rounds))
        if time.monotonic() - heard > _SILENCE_SECS:
            slow = counts.index(min(counts))
            return f"Worker {slow} has measured nothing for {_SILENCE_SECS:.0f} s"
        time.sleep(_LOOK_SECS)
    return None if job.process.returncode == 0 else f"The job ended with exit code {job.process.returncode}"


def _doing(done: int, rounds: int) -> str:
    finished, measures = divmod(done, len(MEASURES))
    number = min(finished + WARM_UP, rounds - 1)
    name = list(MEASURES.values())[measures].split(":")[0]
    return f"warming up: {name}" if number < 0 else f"round {number + 1} of {rounds}: {name}"


def parse(text: str) -> dict[tuple[str, int], float]:
    """The times of one worker, by measure and round; an unfinished last line does not count."""
    whole = text[: text.rfind("\n") + 1].splitlines()
    return {(one["name"], one["round"]): one["secs"] for one in map(json.loads, whole)}


def combine(workers: Iterable[dict[tuple[str, int], float]], rounds: int) -> list[Figure]:
    """The slowest worker's times."""
    each = list(workers)
    try:
        return [
            Figure(name, tuple(max(times[name, number] for times in each) for number in range(rounds)))
            for name in MEASURES
        ]
    except KeyError as missing:
        raise ValueError(f"A worker has not measured {missing}") from None


def ratio_to_floor(figure: Figure, figures: Iterable[Figure]) -> float:
    """How many copies in memory it takes: the median over the rounds, each with its own copy."""
    floor = next(one for one in figures if one.name == FLOOR)
    return median(time / copy for time, copy in zip(figure.secs, floor.secs, strict=True))


def figures_json(plan: Plan, figures: list[Figure], facts: dict[str, Any]) -> dict[str, Any]:
    return {
        **facts,
        "workers": plan.workers,
        "bytes": plan.nbytes,
        "rounds": plan.rounds,
        "figures": [
            {
                "name": figure.name,
                "what": MEASURES[figure.name],
                "secs": list(figure.secs),
                "median_secs": figure.median(),
                "bytes_per_sec": plan.nbytes / figure.median(),
                "ratio_to_copy": ratio_to_floor(figure, figures),
            }
            for figure in figures
        ],
    }
