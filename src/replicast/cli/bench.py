"""`replicast bench`: reads the options, and shows what the workers have measured."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import click

from replicast import __version__
from replicast.bench.plan import Plan, parse_size, size_text
from replicast.errors import LaunchRefused

_NEEDED = {"tensorflow": "TensorFlow", "keras": "Keras"}


class SizeType(click.ParamType):  # type: ignore[type-arg]
    """A number of bytes with its unit."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number of bytes; a usage error says how sizes are written."""
        if isinstance(value, int):
            return value
        try:
            return parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command(context_settings={"show_default": True})
@click.option(
    "-n", "--workers", type=click.IntRange(1, 64), default=2, metavar="N", help="Workers on this machine."
)
@click.option(
    "--size", type=SizeType(), default="100MB", metavar="SIZE", help="Of the state: 500KB, 100MB, 1GB."
)
@click.option(
    "--rounds",
    type=click.IntRange(1, 1000),
    default=5,
    metavar="K",
    help="How often everything is measured.",
)
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
    _check_installed()
    from replicast.bench.machine import machine_facts
    from replicast.bench.session import BenchFailed, measure
    from replicast.cli import texts
    from replicast.cli.bench_table import print_figures

    plan = Plan(workers, size, rounds)
    machine = machine_facts()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Stops the workers, as Ctrl-C does.
    try:
        with _progress() as progress:
            figures = measure(plan, progress)
    except BenchFailed as failure:
        click.echo(f"Failed: {failure}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        click.echo("Stopped.", err=True)
        sys.exit(128 + signal.SIGINT)
    if as_json:
        from replicast.bench import figures as data

        facts = {"replicast": __version__, "machine": machine}
        click.echo(json.dumps(data.as_json(plan, figures, facts), indent=2))
        return
    started, measured = texts.counted(workers, "worker"), texts.counted(rounds, "round")
    click.echo(f"{started}, a state of {size_text(size)} each, {measured}, journal on disk")
    click.echo(", ".join(f"{name}: {value}" for name, value in machine.items()))
    print_figures(plan, figures)


def _check_installed() -> None:
    missing = [name for module, name in _NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise LaunchRefused(
            f"The workers need {' and '.join(missing)}, not installed for {sys.executable}",
            remedy="pip install 'replicast[cpu]' (no GPU) or 'replicast[tensorflow]'",
        )


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None]]:
    """A bar on a terminal, removed afterwards; elsewhere one line per round."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from replicast.cli.tables import is_live, make_console

    console = make_console(stderr=True)
    if not is_live(console):
        yield _line_per_round()
        return
    columns = BarColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    # Drawn by this thread alone: nothing is left behind after Ctrl-C.
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task("starting the workers", total=None)

        def progress(done: int, total: int, doing: str) -> None:
            bar.update(task, completed=done, total=total, description=doing)
            bar.refresh()

        yield progress


def _line_per_round() -> Callable[[int, int, str], None]:
    said = ""

    def progress(done: int, total: int, doing: str) -> None:
        nonlocal said
        now = doing.partition(":")[0]
        if now != said:
            said = now
            click.echo(now, err=True)

    return progress
