"""Since when replicas differ: what the audits of one job have found, one after the other."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping

from replicast.audit import AuditReport, Declared
from replicast.protocol.audit_messages import Examined
from replicast.schema import Schema


class Findings:
    """Shared by the two threads of worker 0 that compare: the auditor, and the coordinator in rounds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._found_at: int | None = None
        self._suspected = False
        self._settled = 0
        self.last_equal: int | None = None
        """The step of the last audit that found all replicas equal."""

    def report(
        self, schema: Schema, step: int, seen: Mapping[int, Examined], declared: tuple[Declared, ...]
    ) -> AuditReport:
        """The report of an audit that found no difference."""
        return AuditReport(
            number=next(self._numbers),
            step=step,
            time=time.time(),
            workers=len(seen),
            variables=len(schema),
            nbytes=sum(variable.nbytes for variable in schema),
            found_at=step,
            last_equal=self.last_equal,
            differences=(),
            declared=declared,
            outcome="equal",
            healed=(),
            digest_secs=max(one.secs for one in seen.values()),
            requests=(),
        )

    def suspect(self, step: int, look: int) -> bool:
        """A look found a difference at this step; says whether that is news.

        It is none when a round has found the replicas equal since then, or has made them so.

        Args:
            step: Where.
            look: The number of the look.
        """
        with self._lock:
            if look <= self._settled:
                return False
            self._found_at = step if self._found_at is None else self._found_at
            self._suspected = True
            return True

    def take_suspicion(self) -> bool:
        """Whether a round has to find out what differs. Asked a second time, it has not."""
        with self._lock:
            suspected, self._suspected = self._suspected, False
            return suspected

    def found(self, step: int) -> int:
        """A round found a difference at this step; gives the step at which it was first seen."""
        with self._lock:
            self._suspected = False
            self._found_at = step if self._found_at is None else self._found_at
            return self._found_at

    def looked_equal(self, step: int) -> None:
        """A look found all replicas equal; what an earlier one found is still to be looked into."""
        with self._lock:
            if not self._suspected:
                self._found_at, self.last_equal = None, step

    def equal_at(self, step: int, looks: int) -> None:
        """A round found all replicas equal at this step, or has made them so.

        Args:
            step: Where.
            looks: The number of the last look before that.
        """
        with self._lock:
            self._settled = looks
            self._found_at, self._suspected = None, False
            self.last_equal = step
