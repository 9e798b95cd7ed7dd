"""`python -m benchmarks`: measures, prints tables and ratios, and writes results, pictures and their page."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path

import msgspec
from rich.console import Console

from benchmarks import checkpoint, checkpoint_restart, document, growth, hosts, report, step, update
from benchmarks.audit import AUDIT, TABLE_AUDITS
from benchmarks.idle import IDLE
from benchmarks.machine import machine_facts
from benchmarks.page import PAGE, PICTURE
from benchmarks.question import Say
from benchmarks.race import ask
from benchmarks.results import DIRECTORY, Result, Run, versions
from benchmarks.rows import PUSH_ROWS, ROWS
from benchmarks.stall import STALL
from replicast.config import shared_memory_directory
from replicast.transport.shared import remove_leftovers

Measure = Callable[[int, Say], Result]
ROUNDS = 5
QUESTIONS = {
    question.name: question
    for question in (
        *step.QUESTIONS,
        *update.QUESTIONS,
        STALL,
        ROWS,
        PUSH_ROWS,
        *hosts.QUESTIONS,
        checkpoint.CHECKPOINT,
        AUDIT,
        TABLE_AUDITS,
        IDLE,
        PAGE,
        PICTURE,
        *growth.QUESTIONS,
    )
}
RESTART = "restart"
NAMES = (*QUESTIONS, RESTART)
QUICK = {
    question.name: question for question in (*step.QUICK, *update.QUICK, *checkpoint.QUICK, *growth.QUICK)
}
"""The questions of a quick run: fewer, with smaller sizes."""


def main() -> int:
    """Returns the exit code: 1 if a question could not be answered, or if the order of two runs differs."""
    options = parse(sys.argv[1:])
    if options.compare:
        first, second = (Run.read(path) for path in options.compare)
        return 0 if report.compare(first, second, sys.stdout) else 1
    if options.document:
        document.write(options.document)
        return 0
    started = datetime.now().astimezone().isoformat(timespec="seconds")
    run = Run(started, command(options), machine_facts(), versions())
    broken = measure(run, options)
    remove_leftovers(shared_memory_directory(os.environ))  # of the workers, which were killed
    report.show(run, sys.stdout)
    path = options.json or DIRECTORY / f"{run.date[:10]}{'-quick' if options.quick else ''}.json"
    run.write(path)
    sys.stdout.write(f"\nEvery figure: {path}\n")
    publish(run, path, options.publish)
    sys.stderr.write("\n".join(broken))
    return 1 if broken else 0


def publish(run: Run, path: Path, into_the_docs: bool) -> None:
    """Draws the pictures: for docs/performance.md with its figures, or beside the results."""
    if into_the_docs:
        document.write(path)
        sys.stdout.write(f"Figures and pictures: {document.PAGE}\n")
        return
    try:
        document.draw_all(run, path.with_suffix(""))
        sys.stdout.write(f"Pictures: {path.with_suffix('')}\n")
    except ImportError as error:
        sys.stdout.write(f"No pictures: {error}\n")


def measure(run: Run, options: argparse.Namespace) -> list[str]:
    """Answers the questions, one after the other; returns what went wrong."""
    names = options.only or (QUICK if options.quick else NAMES)
    broken = []
    with progress() as say:
        for number, name in enumerate(names, 1):
            begun = time.monotonic()
            heard = partial(_tell, say, f"{number} of {len(names)}, ")
            try:
                run.results.append(measure_of(name, options.quick)(options.rounds, heard))
            except Exception:  # measure the others anyway
                broken.append(f"{name} could not be measured:\n{traceback.format_exc()}")
            heard(f"{name}: took {time.monotonic() - begun:.0f} s")
    return broken


def measure_of(name: str, quick: bool) -> Measure:
    if name == RESTART:
        return checkpoint_restart.measure
    return partial(ask, QUICK.get(name, QUESTIONS[name]) if quick else QUESTIONS[name])


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--only", action="append", choices=NAMES, help="this question alone; may be given again"
    )
    parser.add_argument("--quick", action="store_true", help="fewer questions, smaller sizes: two minutes")
    parser.add_argument("--rounds", type=positive, help=f"turns of each contestant (default: {ROUNDS})")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="where to write every figure (default: by date)"
    )
    parser.add_argument(
        "--publish", action="store_true", help="draw the pictures, and write docs/performance.md"
    )
    parser.add_argument(
        "--document", type=results_file, metavar="FILE", help="measure nothing: publish the figures of a file"
    )
    parser.add_argument(
        "--compare",
        type=results_file,
        nargs=2,
        metavar="FILE",
        help="measure nothing: say whether two runs have the same order of contestants",
    )
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (2 if options.quick else ROUNDS)
    return options


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1. Received: {text}")
    return number


def results_file(text: str) -> Path:
    path = Path(text)
    try:
        Run.read(path)
    except (OSError, msgspec.MsgspecError) as error:
        raise argparse.ArgumentTypeError(f"{text} is not a file of results: {error}") from error
    return path


@contextmanager
def progress() -> Iterator[Say]:
    """Shows progress on stderr: one changing line on a terminal, otherwise a line per message."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda message: print(message, file=sys.stderr, flush=True)
        return
    with console.status("starting") as status:
        yield status.update


def _tell(say: Say, before: str, message: str) -> None:
    say(f"{before}{message}")


def command(options: argparse.Namespace) -> str:
    """What others run to measure the same."""
    chosen = [word for name in options.only or () for word in ("--only", name)]
    rounds = ["--rounds", str(options.rounds)] if options.rounds != ROUNDS else []
    if chosen or (rounds and not options.quick):
        return " ".join(["python -m benchmarks", *chosen, *rounds])
    return "make bench-quick" if options.quick else "make bench"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the workers, as Ctrl-C does
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
