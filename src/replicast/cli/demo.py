"""`replicast demo` and `replicast bench`: jobs of this package's own on this machine."""

from __future__ import annotations

import importlib.util
import json
import signal
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from replicast import __version__
from replicast.bench.plan import MEASURES, Plan, parse_size, size_text
from replicast.cli import Failed
from replicast.errors import LaunchRefused
from replicast.launcher import make_run_dir

_NEEDED = {"tensorflow": "TensorFlow", "keras": "Keras"}
_NEEDED_FOR_DEMO = _NEEDED | {"sklearn": "scikit-learn"}


@click.command()
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where the demo makes a directory for its runs. [default: among the temporary files]",
)
def demo(run_dir: Path | None) -> None:
    """See it work, in under a minute.

    Two real workers on this machine train one model. One of them changes a weight, the usual way and through
    replicast; a process outside of the job changes another; a worker is killed. The screen shows what becomes
    of the replicas.

    \b
    Examples:
      replicast demo
      replicast demo --run-dir runs/demo

    Exit code: 0 when everything that was shown really happened; 1 when not; 130 after Ctrl-C; 2 when nothing
    was started.
    """
    _check_installed("The demo needs", _NEEDED_FOR_DEMO, demo=True)
    from replicast.demo.job import DemoFailed
    from replicast.demo.story import make_console, play

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Stops the workers, as Ctrl-C does.
    parent = None if run_dir is None else make_run_dir(run_dir, program="demo", now=datetime.now())
    try:  # In a new directory: the runs of an earlier demo must not be continued.
        play(Path(tempfile.mkdtemp(prefix="replicast-demo-", dir=parent)), make_console())
    except DemoFailed as failure:
        raise Failed(str(failure)) from failure


class SizeType(click.ParamType):  # type: ignore[type-arg]
    """A number of bytes with its unit."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return value if isinstance(value, int) else parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command(context_settings={"show_default": True})
@click.option(
    "-n", "--workers", type=click.IntRange(1, 64), default=2, metavar="N", help="Workers on this machine."
)
@click.option(
    "--size", type=SizeType(), default="100MB", metavar="SIZE", help="Of the state: 500KB, 100MB, 1GB."
)
@click.option("--rounds", type=click.IntRange(1, 1000), default=5, metavar="K", help="How often to measure.")
@click.option("--json", "as_json", is_flag=True, help="Print every figure as JSON.")
def bench(workers: int, size: int, rounds: int, as_json: bool) -> None:
    """Measure what each operation costs on this machine.

    Starts real workers with a state of SIZE each, and measures an all-reduce of it, an update of all of it, a
    checkpoint and an audit, next to one copy of the same bytes in memory. The run directory is temporary.

    \b
    Examples:
      replicast bench
      replicast bench --workers 4 --size 1GB
      replicast bench --size 10MB --rounds 20 --json > figures.json

    Exit code: 0 when everything was measured; 1 when the job failed; 130 after Ctrl-C; 2 when nothing was
    started.
    """
    _check_installed("The workers need", _NEEDED)
    from rich.progress import TimeElapsedColumn

    from replicast.bench import figures as data
    from replicast.bench.machine import machine_facts
    from replicast.bench.session import BenchFailed, measure
    from replicast.cli.texts import counted, make_console, make_table, progress_bar

    plan, machine = Plan(workers, size, rounds), machine_facts()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Stops the workers, as Ctrl-C does.
    try:
        with progress_bar("starting the workers", TimeElapsedColumn()) as progress:
            figures = measure(plan, progress or _LinePerRound())
    except BenchFailed as failure:
        raise Failed(str(failure)) from failure
    if as_json:
        facts = {"replicast": __version__, "machine": machine}
        click.echo(json.dumps(data.as_json(plan, figures, facts), indent=2))
        return
    started, measured = counted(workers, "worker"), counted(rounds, "round")
    click.echo(f"{started}, a state of {size_text(size)} each, {measured}, journal on disk")
    click.echo(", ".join(f"{name}: {value}" for name, value in machine.items()))
    table = make_table("=", ">ms", ">lowest", ">highest", ">GB/s", ">× copy")
    for figure in figures:
        times = figure.median(), min(figure.secs), max(figure.secs)
        rate = f"{plan.nbytes / figure.median() / 1e9:.2g}"
        by_copy = "" if figure.name == data.FLOOR else f"{data.ratio_to_floor(figure, figures):.1f}"
        table.add_row(MEASURES[figure.name], *map(_milliseconds, times), rate, by_copy)
    make_console().print(table)


class _LinePerRound:
    """The progress of `bench` without a terminal."""

    last = ""

    def __call__(self, done: int, total: int, doing: str) -> None:
        now = doing.partition(":")[0]
        if now != self.last:
            self.last = now
            click.echo(now, err=True)


def _milliseconds(secs: float) -> str:
    return f"{secs * 1000:.1f}" if secs < 1 else f"{secs * 1000:,.0f}"


def _check_installed(who: str, needed: dict[str, str], *, demo: bool = False) -> None:
    missing = [name for module, name in needed.items() if importlib.util.find_spec(module) is None]
    if not missing:
        return
    more = ",demo" if demo else ""
    install = f"pip install 'replicast[cpu{more}]' (no GPU) or 'replicast[tensorflow{more}]'"
    raise LaunchRefused(
        f"{who} {' and '.join(missing)}, not installed for {sys.executable}",
        remedy="pip install 'replicast[demo]'" if missing == ["scikit-learn"] else install,
    )
