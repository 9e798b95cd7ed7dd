"""Compares checkouts of replicast in one interleaved run: the effect of a change on the time of an update.

    git worktree add --detach ../before COMMIT
    python -m benchmarks.versions ../before --workers 2 --rounds 30

All run this checkout's benchmark code, in turns. The figures are those of the `update` questions.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.groups import REPOSITORY, Group, Workers
from benchmarks.question import Contestant, Question, Ratio
from benchmarks.race import ask
from benchmarks.report import show_result
from benchmarks.update_task import Task

BUDGET_SECS = 900.0
FIGURES = {"MakeAndPropose": "making the update included", "Propose": "propose alone"}


def workers_of(checkout: str, workers: int) -> Group:
    """Workers that run the replicast of one checkout."""
    return Workers("replicast", workers, source=Path(checkout).resolve() / "src")


def main() -> None:
    parser = argparse.ArgumentParser(description="Compares this checkout of replicast with others.")
    parser.add_argument("others", nargs="+", help="directories of other checkouts")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--figure", choices=FIGURES, default="MakeAndPropose")
    given = parser.parse_args()
    factory = f"benchmarks.update_replicast:{given.figure}"
    this, *others = (Contestant(path, path, factory) for path in (str(REPOSITORY), *given.others))
    question = Question(
        name="versions",
        title=f"An update of {Task()} on {given.workers} workers, {FIGURES[given.figure]}",
        unit="ms until the last has applied",
        contestants=(this, *others),
        task=Task(),
        workers=given.workers,
        ratios=tuple(Ratio(f"{other.name} / this checkout", other, this) for other in others),
        budget_secs=BUDGET_SECS,
    )
    show_result(ask(question, given.rounds, lambda _: None, workers_of), sys.stdout)


if __name__ == "__main__":
    main()
