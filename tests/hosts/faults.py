"""Faults of the network and of processes, and what becomes of the job: a table with seconds.

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
from dataclasses import dataclass, field
from pathlib import Path

from replicast.config import HEARTBEAT_SECS, HEARTBEAT_TIMEOUT
from tests.hosts.job import HostJob
from tests.hosts.network import Network

CARGO = 25_000_000
"""100 MB."""
RATE = "200mbit"
"""100 MB take four seconds."""
ENDS_SECS = 30.0
"""How long after a fault every worker has ended, if it does not train on."""
HANGS_SECS = 200.0
"""When a case is given up; training to the end takes 10 s, and longer with a lossy network."""

NOTHING = "nothing"
LINK_DOWN = "link of the last host down"
FROM_0 = "nothing arrives from worker 0"
TO_0 = "nothing arrives at worker 0"
LOSS_1, LOSS_5 = "1 % of the packets lost", "5 % of the packets lost"
STOP_0, STOP_1 = "SIGSTOP of worker 0", "SIGSTOP of worker 1"
KILL_LAST = "kill -9 of the last worker"
VICTIMS = {STOP_0: 0, STOP_1: 1}


@dataclass(frozen=True)
class Case:
    """One fault, for some seconds or, with 0, until the job ends; with `update`, 100 MB are under way."""

    fault: str
    secs: float
    update: bool = False
    hosts: int = 2
    heartbeat_secs: float = HEARTBEAT_SECS

    @property
    def name(self) -> str:
        lasting = f" for {self.secs:g} s" if self.secs else ""
        option = (
            f", heartbeat timeout {self.heartbeat_secs:g} s" if self.heartbeat_secs != HEARTBEAT_SECS else ""
        )
        hosts = f", {self.hosts} hosts" if self.hosts != 2 else ""
        return f"{self.fault}{lasting}{option}{hosts}, {'100 MB under way' if self.update else 'training'}"


@dataclass
class Result:
    """When each worker ended, in seconds since the fault, with which code, and what it said of the cause."""

    case: Case
    ends: list[tuple[float, int] | None]
    said: list[str]
    attempts: int = 1
    finals: list[str] = field(default_factory=list)
    logs: str = ""

    @property
    def trained_on(self) -> bool:
        return all(end is not None and end[1] == 0 for end in self.ends)


def cases() -> Iterator[Case]:
    for update in (False, True):
        for secs in (3, 8, 30, 240):
            yield Case(LINK_DOWN, secs, update)
        yield Case(LINK_DOWN, 8, update, heartbeat_secs=30)
        for fault in (FROM_0, TO_0, LOSS_1, LOSS_5):
            yield Case(fault, 0, update)
        for fault in (STOP_0, STOP_1):
            for secs in (5, 15, 60):
                yield Case(fault, secs, update)
    yield Case(STOP_1, 15, heartbeat_secs=60)
    for fault, secs in ((LINK_DOWN, 30), (STOP_1, 15), (KILL_LAST, 0)):
        yield Case(fault, secs, hosts=3)


def begin(case: Case, network: Network, job: HostJob) -> None:
    first, second, *_ = network.hosts
    if case.fault == LINK_DOWN:
        network.cut(network.hosts[-1])
    elif case.fault == FROM_0:
        network.drop(sender=first, receiver=second)
    elif case.fault == TO_0:
        network.drop(sender=second, receiver=first)
    elif case.fault in (LOSS_1, LOSS_5):
        network.lose(1 if case.fault == LOSS_1 else 5)
    elif case.fault == KILL_LAST:
        job.workers[-1].kill()
    elif case.fault in VICTIMS:
        job.workers[VICTIMS[case.fault]].send_signal(signal.SIGSTOP)


def mend(case: Case, network: Network, job: HostJob) -> None:
    if case.fault == LINK_DOWN:
        network.join(network.hosts[-1])
    elif case.fault in VICTIMS:
        job.workers[VICTIMS[case.fault]].send_signal(signal.SIGCONT)
    else:
        network.mend()


def run(case: Case, directory: Path) -> Result:
    """Runs a job with its fault, and once more from its checkpoint if it ended."""
    environ = {HEARTBEAT_TIMEOUT: f"{case.heartbeat_secs:g}"}
    if case.update:
        environ["CARGO"] = str(CARGO)
    with Network(case.hosts) as network, HostJob(network, directory, environ=environ) as job:
        job.start()
        if case.update:
            # Only now: the first values of the variables are as large as the update.
            job.until((job.run_dir / "metrics.jsonl").exists)
            network.shape(RATE)
        job.until_all_train()
        if case.update:
            time.sleep(1.0)
        begin(case, network, job)
        since = time.monotonic()
        job.ends(case.secs or HANGS_SECS, since)
        mend(case, network, job)
        ends = job.ends(case.secs + HANGS_SECS, since)
        result = Result(case, ends, [said(job.log(rank)) for rank in range(case.hosts)])
        result.logs = job.logs()
        if not result.trained_on:
            job.kill()
            if case.update:
                network.unshape()
            result.attempts = 2
            job.start()
            job.ends(2 * HANGS_SECS)
            result.logs += job.logs()
        result.finals = job.finals()
    return result


def said(log: Path) -> str:
    """The last line of ours in which a worker names the cause."""
    lines = [line for line in log.read_text().splitlines() if line.startswith("replicast: worker ")]
    return lines[-1].removeprefix("replicast: ") if lines else ""


def named(result: Result) -> list[int | None]:
    """The worker that each worker names as the cause."""
    return [int(text.split()[1].rstrip(",")) if text else None for text in result.said]


def right_names(case: Case) -> list[list[int | None]]:
    """Whom the workers may name. A killed one says nothing.

    Where a link fails, each side has lost the other. If it comes back in time, both say what was said first.
    """
    last = case.hosts - 1
    if case.fault in VICTIMS:
        return [[VICTIMS[case.fault]] * case.hosts]
    if case.fault == KILL_LAST:
        return [[last] * last + [None]]
    return [[last] * last + [0], [last] * case.hosts, [0] * case.hosts]


def problems(result: Result, undisturbed: str) -> list[str]:
    """What is wrong with a result; ``undisturbed``: the final state of a job without a fault."""
    case, found = result.case, []
    for rank, end in enumerate(result.ends):
        stopped_secs = case.secs if VICTIMS.get(case.fault) == rank else 0.0
        limit_secs = stopped_secs + case.heartbeat_secs - HEARTBEAT_SECS + ENDS_SECS
        if end is None or (end[1] != 0 and end[0] > limit_secs):
            found.append(f"worker {rank} had not ended {limit_secs:.0f} s after the fault")
    if not result.trained_on and named(result) not in right_names(case):
        found.append(f"the workers name {named(result)}, not {right_names(case)[0]}")
    if result.finals != [undisturbed] * case.hosts:
        found.append(f"the final states are {result.finals}, that of an undisturbed job is {undisturbed}")
    if len(set(result.finals)) != 1 or not result.finals[0].endswith("cargo 1 to 1"):
        found.append(f"the replicas differ, or an update was lost or applied twice: {result.finals}")
    return found


HEAD = """\
| fault | the job | ends after, by worker | who is named, by worker | state at the end |
| --- | --- | --- | --- | --- |
"""


def row(result: Result, wrong: list[str]) -> str:
    if result.trained_on:
        outcome, ends, names = "trains on", "", ""
    else:
        outcome = "ends, restarts"
        ends = ", ".join("never" if end is None else f"{end[0]:.0f} s" for end in result.ends)
        names = ", ".join("none" if name is None else str(name) for name in named(result))
    state = "; ".join(wrong) if wrong else "as undisturbed, update once"
    return f"| {result.case.name} | {outcome} | {ends} | {names} | {state} |\n"


def run_in_new_directory(case: Case) -> Result:
    with tempfile.TemporaryDirectory() as directory:
        return run(case, Path(directory))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="parts of the names of cases")
    parser.add_argument("--at-once", type=int, default=3, help="how many cases run at the same time")
    parser.add_argument("--logs", type=Path, help="where to write the logs of each case")
    given = parser.parse_args()
    chosen = [case for case in cases() if not given.names or any(part in case.name for part in given.names)]
    counts = sorted({case.hosts for case in chosen})
    undisturbed = {count: run_in_new_directory(Case(NOTHING, 0, hosts=count)).finals[0] for count in counts}
    sys.stdout.write(HEAD)
    with concurrent.futures.ThreadPoolExecutor(given.at_once) as pool:
        for result in pool.map(run_in_new_directory, chosen):
            if given.logs is not None:
                name = f"{result.case.name.replace(' ', '-')}.log"
                (given.logs / name).write_text("\n".join([*result.said, result.logs]))
            sys.stdout.write(row(result, problems(result, undisturbed[result.case.hosts])))
            sys.stdout.flush()


if __name__ == "__main__":
    main()
