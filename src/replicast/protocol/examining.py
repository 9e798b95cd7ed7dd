"""A worker's part in audits: digests its state, lends its values, weighs them against another's.

All of it happens in the training thread, at a boundary. `look` is the quiet way: it digests and goes on, and
a thread of worker 0 compares (`replicast.protocol.looks`). The rest follows orders of an audit's round, in
which all workers stand still (`replicast.protocol.audits`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import xxhash

from replicast.audit import AuditReport, Policy, deviation
from replicast.edits import Edit
from replicast.errors import ReplicasDiverged, UpdateRefused
from replicast.protocol.audit_messages import (
    Audited,
    Condemned,
    Examine,
    Examined,
    Lend,
    Weigh,
    Weighed,
)
from replicast.protocol.channel import LOOK_SECS
from replicast.protocol.messages import Computed
from replicast.update import Update

if TYPE_CHECKING:
    from replicast.protocol.member import Member

AuditOrder: TypeAlias = Examine | Lend | Weigh
MOST_REPORTS = 1000
_MOST_NAMED = 5


class Examiner:
    """One worker's part in audits. `look` and `obey` are for its training thread, `heed` for its follower.

    Attributes:
        reports: What was found so far, the latest last. Audits for which all workers stand still are told to
            all; those of `look` that found nothing are known on worker 0 only.
        policy: What becomes of a difference that `look` finds. Worker 0's counts.
        declared: The variables that may differ between workers; the same on all of them.
        expected: On worker 0: the digest that a variable should have by checkpoint and journal, if they say.
        requests: On worker 0: the ids of those outside of the job who wait for an audit.
        on_report: On worker 0: called with every report, by a background thread.
        looks: How often it has looked. Written by the training thread.
        on_look: On worker 0: called with the number of a look and what was seen.
    """

    def __init__(self, member: Member) -> None:
        self._member = member
        self._channel = member.channel
        self._names = [variable.name for variable in member.state.schema]
        self.looks = 0
        self._condemned: int | None = None
        self._all_know = threading.Event()
        self.reports: deque[AuditReport] = deque(maxlen=MOST_REPORTS)
        self.policy: Policy = "raise"
        self.declared: frozenset[str] = frozenset()
        self.expected: Callable[[str], str | None] = lambda name: None
        self.requests: Callable[[], tuple[str, ...]] = lambda: ()
        self.on_report: Callable[[AuditReport], None] = lambda report: None
        self.on_look: Callable[[int, Examined], None] = lambda number, seen: None

    def look(self) -> None:
        """Digests the state at this boundary; whether all have the same is found out in the background.

        All workers look at the same boundaries. What crosses is one digest of all that must be equal, and one
        of each variable that may differ.
        """
        self.looks += 1
        seen = self._digest()
        of = dict(zip(self._names, seen.digests, strict=True))
        strict = "".join(of[name] for name in self._names if name not in self.declared)
        whole = xxhash.xxh3_128_hexdigest(strict.encode())
        brief = Examined(
            seen.step, [whole, *(of[n] for n in self._names if n in self.declared)], seen.secs, seen.trained
        )
        if self._channel.rank == 0:
            self.on_look(self.looks, brief)
        else:
            self._member.send(partial(self._channel.say, look_key(self.looks, self._channel.rank), brief))

    def to_be_equal(self, edits: Sequence[Edit]) -> list[Edit]:
        """Those of them that touch what must be the same on all workers."""
        return [edit for edit in edits if edit.variable not in self.declared]

    def obey(self, order: AuditOrder) -> None:
        """Does what an audit's round asks of this worker."""
        match order:
            case Examine(round_, verdict=verdict) if verdict:
                self._raise_with_all(round_, AuditReport.from_json(verdict))
            case Examine(round_):
                self._say(round_, "examined", self._digest())
            case Lend(round_):
                self._say(round_, "lent", self._lend(order))
            case Weigh(round_):
                self._say(round_, "weighed", self._weigh(order))

    def heed(self, message: AuditOrder | Audited) -> None:
        """Hands the training thread what the coordinator has said of an audit."""
        gate = self._member.gate
        match message:
            case Examine(round_, step, verdict):
                if verdict:
                    self._all_know.clear()
                gate.aim(round_, step)
                gate.order(message)
            case Lend(source=source):
                if source == self._channel.rank:
                    gate.order(message)
            case Weigh():
                gate.order(message)
            case Audited(round_, described, raises):
                report = AuditReport.from_json(described)
                self.reports.append(report)
                if raises and self._condemned != round_:
                    gate.fail(round_, diverged(report, gate.trial_ends))
                else:
                    gate.free(round_)
                self._all_know.set()

    def _raise_with_all(self, round_: int, report: AuditReport) -> None:
        """Raises the verdict, once every training thread has it.

        Whoever raises may end the job, and who hears of that first would raise another's failure instead.
        From here on this thread asks nobody how the job is; it waits for the others at most `answer_secs`.
        """
        self._condemned = round_
        self._say(round_, "condemned", Condemned(self._member.pausing))
        ends = time.monotonic() + self._member.patience.answer_secs
        while not self._all_know.wait(LOOK_SECS / 10) and time.monotonic() < ends:
            if self._member.threads.stopping.is_set():
                break
        raise diverged(report, self._member.gate.trial_ends)

    def _digest(self) -> Examined:
        started = time.monotonic()
        digests = self._member.state.fingerprints(self._names)
        secs = time.monotonic() - started
        trained = self._member.trained()
        asks = self._member.intent.split("\n")[0] in ("compare", "sync")
        return Examined(self._member.gate.step, [digests[name] for name in self._names], secs, trained, asks)

    def _lend(self, order: Lend) -> Computed:
        try:
            update = Update(id=order.id, author="audit", note=order.note, allow_nonfinite=True)
            for name, value in self._member.state.read(order.variables).items():
                value.flags.writeable = False  # ours alone: no second copy
                update = update.assign(name, value)
            return Computed(self._member.shelf.publish(update, order.id).to_json())
        except UpdateRefused as error:
            return Computed(error={**error.to_json(), "worker": self._channel.rank})

    def _weigh(self, order: Weigh) -> Weighed:
        found = {}
        for id_ in order.ids:
            for edit in self._member.shelf.staged(id_).edits:
                name = edit.variable
                if self._channel.rank in order.differing[name]:
                    mine = self._member.state.read([name])[name]
                    found[name] = deviation(mine, edit.arrays["value"]).to_json()
        return Weighed(found)

    def _say(self, round_: int, what: str, message: Examined | Computed | Weighed | Condemned) -> None:
        self._channel.say(round_key(round_, what, self._channel.rank), message)


def round_key(round_: int, what: str, rank: int) -> str:
    """Where a worker's answer in an audit's round is."""
    return f"audit/{round_}/{what}/{rank}"


def look_key(number: int, rank: int) -> str:
    """Where a worker's quiet look is."""
    return f"look/{number}/{rank}"


def diverged(report: AuditReport, trial_ends: int | None = None) -> ReplicasDiverged:
    """The error of an audit that found a difference.

    Args:
        report: What it found.
        trial_ends: The step at which the trial ends in which it was found, if there is one.
    """
    named = "; ".join(str(difference) for difference in report.differences[:_MOST_NAMED])
    more = len(report.differences) - _MOST_NAMED
    rest = f"; and {more} more" if more > 0 else ""
    also = f"; replicas.sync(source={report.differences[0].reference}) makes them equal"
    if trial_ends is not None:
        also += f" when the trial that ends at step {trial_ends} is over, before which it is refused"
    return ReplicasDiverged(
        f"At step {report.step} the replicas are not equal in {len(report.differences)} of "
        f"{report.variables} variables, since {report.since}: {named}{rest}. "
        f'on_divergence="heal" repairs this by itself, unless the log of worker 0 says why not{also}.',
        worker=report.differences[0].minority[0],
        step=report.step,
    )
