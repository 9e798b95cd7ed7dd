"""Quiet audits: workers digest at agreed boundaries and go on; a thread of worker 0 compares.

Nobody stands still for it. When a look finds a difference, the coordinator is told, and holds a round at one
of the next boundaries, in which it is found out who differs, and where (`replicast.protocol.audits`).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from replicast.audit import Declared
from replicast.protocol.audit_messages import Examined
from replicast.protocol.channel import LOOK_SECS
from replicast.protocol.examining import look_key
from replicast.protocol.findings import Findings
from replicast.protocol.member import Member

logger = logging.getLogger("replicast")


@dataclass(frozen=True, slots=True)
class Look:
    """One look of all workers, and what worker 0 saw."""

    number: int
    seen: Examined


class Looks:
    """Compares what the workers saw. One thread of worker 0, the auditor.

    Args:
        member: Worker 0's own part.
        findings: What audits have found so far.
        on_difference: Called when a look finds a difference.
    """

    def __init__(self, member: Member, findings: Findings, on_difference: Callable[[], None]) -> None:
        self._member = member
        self._channel = member.channel
        self._findings = findings
        self._on_difference = on_difference
        self._waiting: queue.Queue[Look] = queue.Queue()
        self._done = threading.Condition()
        self._open = 0

    def start(self) -> None:
        """Starts the thread."""
        self._member.examiner.on_look = self._take
        self._member.threads.start("auditor", self._run)

    def settle(self, timeout_secs: float) -> bool:
        """Blocks until everything that was seen is compared, at most `timeout_secs`; says whether it is."""
        with self._done:
            return self._done.wait_for(
                lambda: self._open == 0 or self._member.threads.stopping.is_set(), timeout_secs
            )

    def _take(self, number: int, seen: Examined) -> None:
        with self._done:
            self._open += 1
        self._waiting.put(Look(number, seen))

    def _run(self) -> None:
        while not self._member.threads.stopping.is_set():
            look = self._member.threads.take(self._waiting)
            if look is None:
                continue
            seen = self._gather(look)
            if seen is not None:
                self._compare(look, seen)
            with self._done:
                self._open -= 1
                self._done.notify_all()

    def _gather(self, look: Look) -> dict[int, Examined] | None:
        """What each worker saw; None when one of them did not say, or the job is over."""
        seen = {0: look.seen}
        ends = time.monotonic() + self._member.patience.decide_secs
        for worker in range(1, self._channel.size):
            key = look_key(look.number, worker)
            said = None
            while said is None and not self._member.threads.stopping.is_set():
                said = self._channel.said(key, LOOK_SECS)
                if said is None and time.monotonic() > ends:
                    logger.warning(
                        "worker %d did not say within %.0f s what it saw in the audit of step %d",
                        worker,
                        self._member.patience.decide_secs,
                        look.seen.step,
                    )
                    return None
            if said is None:
                return None
            self._channel.forget_said(key)
            seen[worker] = said
        return seen

    def _compare(self, look: Look, seen: dict[int, Examined]) -> None:
        step = look.seen.step
        if len({one.step for one in seen.values()}) > 1:
            steps = ", ".join(f"worker {rank}: step {one.step}" for rank, one in seen.items())
            logger.warning("the workers are audited at different steps, and not compared (%s)", steps)
            return
        if len({one.digests[0] for one in seen.values()}) > 1:
            if self._findings.suspect(step, look.number):
                self._on_difference()
            return
        examiner, schema = self._member.examiner, self._member.state.schema
        names = [variable.name for variable in schema if variable.name in examiner.declared]
        declared = tuple(
            Declared(name, len({one.digests[place] for one in seen.values()}) > 1)
            for place, name in enumerate(names, start=1)
        )
        report = self._findings.report(schema, step, seen, declared)
        self._findings.looked_equal(step)
        examiner.reports.append(report)
        examiner.on_report(report)
