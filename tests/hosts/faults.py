"""Faults of the network and of processes on two hosts, and what becomes of the job: a table with seconds.

``python -m tests.hosts.faults`` prints the table of docs/faults.md; arguments choose cases by parts of their
names. ``tests/long/hosts/test_faults.py`` runs the same cases, and fails where the table would be bad.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.hosts.job import HostJob
from tests.hosts.network import Network

CARGO = 25_000_000
"""100 MB."""
RATE = "200mbit"
"""100 MB take four seconds."""
MARGIN_SECS = 40.0
"""How long a case waits after the fault for workers to end, or to train to the end, beyond its duration."""
LONGEST_SECS = 200.0


@dataclass(frozen=True)
class Case:
    """One fault: what, for how many seconds, and during what."""

    fault: str
    secs: float
    update: bool

    @property
    def name(self) -> str:
        lasting = f" {self.secs:g} s" if self.secs else ""
        return f"{self.fault}{lasting}, {'100 MB under way' if self.update else 'training'}"


@dataclass
class Result:
    """What became of a case."""

    case: Case
    ends: list[tuple[float, int] | None]
    said: list[str]
    finals: list[str]
    attempts: int
    logs: str
    problem: str = ""


LINK_DOWN = "link down"
FROM_0 = "nothing from worker 0"
TO_0 = "nothing to worker 0"
LOSS_1, LOSS_5 = "1 % of the packets lost", "5 % of the packets lost"
STOP_0, STOP_1 = "SIGSTOP of worker 0", "SIGSTOP of worker 1"
ENDLESS = 0.0


def cases() -> Iterator[Case]:
    for update in (False, True):
        for secs in (3, 8, 30, 240):
            yield Case(LINK_DOWN, secs, update)
        for fault in (FROM_0, TO_0, LOSS_1, LOSS_5):
            yield Case(fault, ENDLESS, update)
        for fault in (STOP_0, STOP_1):
            for secs in (5, 15, 60):
                yield Case(fault, secs, update)


def begin(case: Case, network: Network, job: HostJob) -> None:
    first, second = network.hosts
    if case.fault == LINK_DOWN:
        network.cut(second)
    elif case.fault == FROM_0:
        network.drop(sender=first, receiver=second)
    elif case.fault == TO_0:
        network.drop(sender=second, receiver=first)
    elif case.fault in (LOSS_1, LOSS_5):
        network.lose(1 if case.fault == LOSS_1 else 5)
    else:
        job.workers[0 if case.fault == STOP_0 else 1].send_signal(signal.SIGSTOP)


def end(case: Case, network: Network, job: HostJob) -> None:
    if case.fault == LINK_DOWN:
        network.join(network.hosts[1])
    elif case.fault in (STOP_0, STOP_1):
        job.workers[0 if case.fault == STOP_0 else 1].send_signal(signal.SIGCONT)
    else:
        network.mend()


def said(log: str) -> str:
    """The last line of ours that names somebody."""
    lines = [line for line in log.splitlines() if line.startswith("replicast: worker")]
    return lines[-1] if lines else ""


def run(case: Case, directory: Path) -> Result:
    environ = {"CARGO": str(CARGO)} if case.update else {}
    with Network(2) as network, HostJob(network, directory, environ=environ) as job:
        job.start()
        if case.update:
            job.until(lambda: any(job.reports.glob("trains-*")) or _late(network, job))
        job.until_all_train()
        if case.update:
            time.sleep(1.0)
        begin(case, network, job)
        since = time.monotonic()
        ends = job.ends(case.secs or LONGEST_SECS, since)
        end(case, network, job)
        later = job.ends(case.secs + (MARGIN_SECS if case.secs else 0) + LONGEST_SECS, since)
        ends = [early or late for early, late in zip(ends, later, strict=True)]
        result = Result(case, ends, [said(job.log(rank).read_text()) for rank in range(2)], [], 1, job.logs())
        job.kill()
        if any(ended is None or ended[1] != 0 for ended in ends):
            network.mend()
            if case.update:
                network.unshape()
            result.attempts = 2
            job.start()
            if any(ended is None or ended[1] != 0 for ended in job.ends(2 * LONGEST_SECS)):
                result.problem = "the second attempt failed"
            result.logs += job.logs()
        result.finals = job.finals()
    return result


def _late(network: Network, job: HostJob) -> bool:
    """Shapes the links once the job trains: the first values of the variables need no slow link."""
    if job.run_dir.joinpath("metrics.jsonl").exists() and not job.reports.joinpath("shaped").exists():
        network.shape(RATE)
        job.reports.joinpath("shaped").touch()
    return False


def row(result: Result) -> str:
    ended = []
    for one in result.ends:
        ended.append("not ended" if one is None else f"{one[0]:.0f} s ({one[1]})")
    equal = len(set(result.finals)) == 1 and result.finals[0].endswith("cargo 1 to 1")
    return (
        f"| {result.case.name} | {ended[0]} | {ended[1]} | {result.attempts} | "
        f"{'equal' if equal else result.finals} {result.problem} | {result.said} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--logs", type=Path)
    given = parser.parse_args()
    chosen = [case for case in cases() if not given.names or any(part in case.name for part in given.names)]
    logs = given.logs or Path(tempfile.mkdtemp())
    with concurrent.futures.ThreadPoolExecutor(given.at_once) as pool:

        def one(case: Case) -> Result:
            with tempfile.TemporaryDirectory() as directory:
                return run(case, Path(directory))

        futures = {pool.submit(one, case): case for case in chosen}
        for done in concurrent.futures.as_completed(futures):
            try:
                result = done.result()
            except Exception as error:
                sys.stdout.write(f"| {futures[done].name} | {type(error).__name__} {error}\n")
                continue
            logs.joinpath(result.case.name.replace(" ", "-") + ".log").write_text(result.logs)
            sys.stdout.write(row(result) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
