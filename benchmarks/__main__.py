"""`python -m benchmarks`: measures, prints tables and ratios."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from benchmarks import audit, checkpoint, checkpoint_restart, fit, hosts, idle, page, rows, stall, update
from benchmarks.report import Result, machine_facts, show, write_json
from replicast.config import shared_memory_directory
from replicast.transport.files import remove_leftovers

TABLES = ("fit", "update", "stall", "idle", "rows", "hosts", "checkpoint", "audit", "page")


def main() -> int:
    """Measures and prints; returns the exit code: 1 if the benchmark of a table has an error."""
    options = parse(sys.argv[1:])
    facts = machine_facts()
    results: list[Result] = []
    broken: list[str] = []
    with progress() as say:
        for name in options.only or TABLES:
            try:
                results.extend(tables(name, options, say))
            except Exception:  # measure the other tables anyway
                broken.append(f"The {name} table could not be measured:\n{traceback.format_exc()}")
    remove_leftovers(shared_memory_directory(os.environ))  # of the worker pools, which were killed
    show(facts, results, sys.stdout)
    if options.json is not None:
        write_json(facts, results, options.json)
    sys.stderr.write("\n".join(broken))
    return 1 if broken else 0


def tables(name: str, options: argparse.Namespace, say: Callable[[str], None]) -> Iterator[Result]:
    if name == "update":
        for workers in options.workers or update.WORKERS:
            yield update.measure(workers, options.rounds, say)
        return
    if name == "checkpoint":
        yield checkpoint.measure(options.rounds, say)
        yield checkpoint_restart.measure(options.rounds, say)
        return
    measures = {
        "fit": fit,
        "stall": stall,
        "idle": idle,
        "rows": rows,
        "hosts": hosts,
        "audit": audit,
        "page": page,
    }
    yield measures[name].measure(options.rounds, say)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--only", action="append", choices=TABLES, help="this table alone; may be given again"
    )
    parser.add_argument(
        "--workers",
        type=several,
        action="append",
        help=f"of the update table; may be given again (default: {' and '.join(map(str, update.WORKERS))})",
    )
    parser.add_argument("--rounds", type=positive, default=5, help="turns of each contestant (default: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure to FILE")
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1. Received: {text}")
    return number


def several(text: str) -> int:
    number = int(text)
    if number < 2:
        raise argparse.ArgumentTypeError(f"must be at least 2, as one of them writes. Received: {text}")
    return number


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Shows progress on stderr: one changing line on a terminal, otherwise a line per message."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda message: print(message, file=sys.stderr, flush=True)
        return
    with console.status("starting") as status:
        yield status.update


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
