"""Runs jobs with random faults for some minutes and prints which faults fired, and what was lost.

    python -m tests.soak --minutes 5 [--kills 20] [--seed N] [--jobs K]

Exit code: 0 when nothing was lost, 1 otherwise; 130 after Ctrl-C when nothing was lost until then.
"""

from __future__ import annotations

import argparse
import json
import secrets
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random

from replicast.errors import ReplicastError
from replicast.faults import Action, Fault
from tests.soak.jobs import Outcome, losses, run_job
from tests.soak.plans import plan_text, random_plan, stopped_secs

HANGS_SECS = 600.0
"""A job that takes longer counts as hung."""
MOST_FAULTS = 4
SPARE_RESTARTS = 2
SIZES = (2, 3)


class Soak:
    """What has happened so far."""

    def __init__(self, directory: Path, seed: int) -> None:
        self._directory = directory
        self._seed = seed
        self._undisturbed: dict[int, Outcome] = {}
        self.jobs = 0
        self.restarts = 0
        self.unexplained = 0
        self.planned = 0
        self.fired: Counter[str] = Counter()
        self.actions: Counter[str] = Counter()
        self.lost: list[str] = []

    def run_one(self) -> None:
        """Runs one job and compares it with an undisturbed one of its size."""
        seed = f"{self._seed}-{self.jobs + 1}"
        random = Random(seed)
        workers = random.choice(SIZES)
        plan = random_plan(random, workers, random.randint(1, MOST_FAULTS))
        undisturbed = self._undisturbed_of(workers)
        print(f"job {self.jobs + 1}: {workers} workers; {plan_text(plan)}", flush=True)
        began = time.monotonic()
        directory = self._directory / f"job-{self.jobs + 1}"
        try:
            outcome = run_job(
                directory,
                plan,
                workers=workers,
                max_restarts=len(plan) + SPARE_RESTARTS,
                give_up_secs=HANGS_SECS,
                continue_after=lambda fired: stopped_secs(seed, fired["attempt"]),
            )
        except ReplicastError as error:  # the journal cannot be read
            self.jobs += 1
            self._note_lost([f"{type(error).__name__}: {error}"], plan, directory)
            return
        self.jobs += 1
        self._count(outcome, plan)
        found = losses(outcome, undisturbed)
        fired = ", ".join(fault["point"] for fault in outcome.fired) if outcome.fired else "nothing"
        took = f"{time.monotonic() - began:.0f} s"
        verdict = "nothing lost" if not found else "LOST"
        print(f"    fired: {fired}; {outcome.attempts - 1} restarts, {took}: {verdict}", flush=True)
        if found:
            self._note_lost(found, plan, directory)
        else:
            shutil.rmtree(directory)

    def summary(self) -> str:
        """The figures, for the end."""
        by_point = ", ".join(f"{name} {count}" for name, count in sorted(self.fired.items()))
        by_action = ", ".join(f"{name} {count}" for name, count in sorted(self.actions.items()))
        lines = [
            f"{self.jobs} jobs, {sum(self.fired.values())} of {self.planned} planned faults fired",
            f"  by point:  {by_point if by_point else 'none'}",
            f"  by action: {by_action if by_action else 'none'}",
            f"  restarts:  {self.restarts}, of which {self.unexplained} without a fault to explain them",
            f"  lost:      {'nothing' if not self.lost else ''}",
            *(f"    {line}" for line in self.lost),
        ]
        return "\n".join(lines)

    def _undisturbed_of(self, workers: int) -> Outcome:
        if workers not in self._undisturbed:
            print(f"{workers} workers, undisturbed, to compare with", flush=True)
            directory = self._directory / f"undisturbed-{workers}"
            outcome = run_job(directory, workers=workers, give_up_secs=HANGS_SECS)
            if outcome.code != 0:
                raise SystemExit(f"a job without faults failed:\n{outcome.said}")
            self._undisturbed[workers] = outcome
        return self._undisturbed[workers]

    def _count(self, outcome: Outcome, plan: list[Fault]) -> None:
        self.planned += len(plan)
        self.restarts += outcome.attempts - 1
        self.fired.update(fault["point"] for fault in outcome.fired)
        self.actions.update(fault["action"] for fault in outcome.fired)
        # A worker that was stopped for a short time continues, possibly unnoticed.
        self.unexplained += max(0, outcome.attempts - 1 - len(outcome.fired))

    def _note_lost(self, found: list[str], plan: list[Fault], directory: Path) -> None:
        described = json.dumps([fault.to_json() for fault in plan])
        self.lost += [
            f"job {self.jobs}: {'; '.join(found)}",
            f"  its run directory: {directory}",
            f"  REPLICAST_FAULTS='{described}'",
        ]


def main() -> int:
    """Runs jobs until the time is up and enough was killed; the last one may end after it."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0, help="how long to start new jobs [5]")
    parser.add_argument("--kills", type=int, help="continue after that until this many kill -9 have fired")
    parser.add_argument("--jobs", type=int, default=500, help="the maximum number of jobs [500]")
    parser.add_argument("--seed", type=int, help="for the plans of an earlier run [random]")
    given = parser.parse_args()
    seed = secrets.randbelow(10**6) if given.seed is None else given.seed
    actions = ", ".join(Action)
    until = "" if given.kills is None else f" and {given.kills} kills"
    limits = f"{given.minutes:g} minutes{until}, at most {given.jobs} jobs"
    print(f"seed {seed}, {limits}; faults: {actions}", flush=True)
    directory = Path(tempfile.mkdtemp(prefix="replicast-soak-"))
    soak = Soak(directory, seed)
    ends = time.monotonic() + given.minutes * 60
    interrupted = False
    try:
        while soak.jobs < given.jobs and (
            time.monotonic() < ends or soak.actions[Action.KILL] < (given.kills or 0)
        ):
            soak.run_one()
    except KeyboardInterrupt:
        interrupted = True
        print("interrupted: the current job is stopped and does not count", flush=True)
    finally:
        print(soak.summary(), flush=True)
        if not soak.lost:
            shutil.rmtree(directory, ignore_errors=True)
    if soak.lost:
        return 1
    return 130 if interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
