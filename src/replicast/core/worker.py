"""A worker: stops its training thread at boundaries, carries out orders there, and reports its position.

    Arrived ──► no stop at or before this step? ──yes──► Pass                    an idle boundary
                       │ no
                       ▼
              At(standing) to the coordinator; carry out what `Do` brings
                       │ Release, or Meet with a later step
                       ▼
                     Pass

A training thread also counts as standing while it rests (in `sync`, `close`, …) or waits for a ticket, at the
last boundary that it reached. Once it has reported that it stands, it stays there until `Release`, or `Meet`
with a later step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from replicast.core import messages as m
from replicast.core.entries import Stage
from replicast.core.operation import Timeouts

_RESTING, _WAITING = "resting", "waiting"


class WorkerMachine:
    def __init__(self, rank: int, step: int = 0, *, timeouts: Timeouts | None = None) -> None:
        self.rank = rank
        self.step = step
        self.standing = False
        self.tickets: dict[str, Stage] = {}
        self._not_before: dict[str, int] = {}  # the step before which a ticket has no outcome
        self._timeouts = timeouts or Timeouts()
        self._stops: dict[int, int] = {}
        self._scheduled: set[int] = set()
        self._in_background: set[int] = set()
        self._orders: deque[tuple[int, m.Order]] = deque()
        self._performing = False
        self._why = ""  # it stands: resting, waiting, or at a boundary
        self._token = 0
        self._ticket = ""
        self._patient = True
        self._result: tuple[Any, ...] = ()
        self._stands = 0
        self._is_timed = False
        self._commands: list[m.WorkerCommand] = []
        self._on_event: dict[type[m.WorkerEvent], Callable[[Any], None]] = {
            m.Arrived: self._arrive,
            m.Performed: self._performed,
            m.Rested: self._rest,
            m.Awaited: self._wait_for,
            m.TimerFired: self._timed_out,
            m.Propose: self._propose,
            m.Answer: self._send,
            m.Do: self._do,
            m.Stop: self._stop,
            m.Meet: self._meet,
            m.Release: self._release,
            m.Resume: self._resume,
            m.Tell: self._tell,
        }

    def handle(self, event: m.WorkerEvent) -> list[m.WorkerCommand]:
        """Handles an event; returns the commands to carry out, in order."""
        self._commands = []
        self._on_event[type(event)](event)
        return self._commands

    @property
    def is_wanted(self) -> bool:
        """Whether the coordinator waits for this training thread to reach a boundary."""
        return any(meeting not in self._scheduled for meeting in self._stops)

    def passes(self, step: int) -> bool:
        """Whether there is nothing to do at this boundary; the training thread has then passed it.

        The training thread may call this first, and create an `Arrived` only if it returns false.
        """
        if self._stops_at(step):
            return False
        self.step = step
        return True

    def _stops_at(self, step: int) -> bool:
        return bool(self._stops) and min(self._stops.values()) <= step

    # The training thread.

    def _arrive(self, event: m.Arrived) -> None:
        step = event.step
        if self.passes(step):
            self._commands.append(m.PassBoundary(step))
            return
        self.step, self._is_timed = step, False
        self._stand("")
        self._go_on()

    def _stand(self, why: str) -> None:
        self.standing, self._why, self._result = True, why, ()
        self._say_standing()

    def _rest(self, event: m.Rested) -> None:
        self._token += 1
        self._stand(_RESTING)
        self._send(m.Rest(self._token, self.step, event.intent))

    def _wait_for(self, event: m.Awaited) -> None:
        ticket, secs = event.ticket, event.secs
        self._stand(_WAITING)
        self._ticket = ticket
        self._patient = secs is not None
        self._stands += 1
        self._commands.append(m.SetTimer(self._stands, self._timeouts.decide_secs if secs is None else secs))
        stage = self.tickets.get(ticket)
        if stage is None or stage.is_final or stage is Stage.SCHEDULED:
            self._result = (stage,)
        elif self._not_before.get(ticket, 0) > self.step:
            self._give_up()
        self._go_on()

    def _give_up(self) -> None:
        """Ends a wait of the training thread for an outcome that needs more training first."""
        if self.standing and self._why == _WAITING and not self._patient and not self._result:
            self._result = (self.tickets.get(self._ticket),)

    def _say_standing(self) -> None:
        """Answers every stop for this boundary; the training thread stays until it is released."""
        for meeting, target in self._stops.items():
            if target <= self.step:
                self._send(m.At(meeting, self.step, True))
            elif self._why and meeting not in self._scheduled:
                # It rests before the agreed step; the others may do so as well.
                self._stops[meeting] = self.step
                self._send(m.At(meeting, self.step, True))

    def _go_on(self) -> None:
        """Carries out the next order, or lets the training thread continue."""
        if not self.standing or self._performing:
            return
        if self._orders:
            number, order = self._orders.popleft()
            self._performing = True
            self._commands.append(m.Perform(number, order))
            return
        if self._stops_at(self.step):
            if not self._why and not self._is_timed:  # at a boundary: the coordinator must decide in time
                self._is_timed = True
                self._stands += 1
                self._commands.append(m.SetTimer(self._stands, self._timeouts.decide_secs))
            return
        if not self._why:
            self.standing = False
            self._commands.append(m.PassBoundary(self.step))
        elif self._result:
            self.standing = False
            self._commands.append(m.Continue(self._result[0]))

    def _propose(self, propose: m.Propose) -> None:
        self.tickets[propose.ticket] = Stage.PROPOSED
        self._send(propose)

    def _performed(self, event: m.Performed) -> None:
        if event.answers:
            self._send(m.Answer(event.number, event.value))
        if event.number in self._in_background:
            self._in_background.discard(event.number)
            return
        self._performing = False
        self._go_on()

    def _timed_out(self, event: m.TimerFired) -> None:
        if event.number != self._stands or not self.standing or self._result:
            return
        if self._why == _WAITING:
            self._result = (self.tickets.get(self._ticket),)
            self._go_on()
        elif not self._why:
            secs = self._timeouts.decide_secs
            self._commands.append(
                m.EndJob(f"Worker 0, the coordinator, decided nothing for step {self.step} within {secs:g} s")
            )

    # The log.

    def _stop(self, stop: m.Stop) -> None:
        meeting, at_step = stop.meeting, stop.at_step
        step = self.step if self.standing else self.step + 1
        standing = self.standing and (at_step is None or step >= at_step)
        self._stops[meeting] = step if at_step is None else max(step, at_step)
        if at_step is not None:
            self._scheduled.add(meeting)
        self._send(m.At(meeting, step, standing))

    def _meet(self, meet: m.Meet) -> None:
        if meet.meeting in self._stops:
            self._stops[meet.meeting] = meet.step
            if meet.step > self.step and self._why == _WAITING and not self._patient:
                # The others continue to a later step, unless they also wait here.
                self._commands.append(m.SetTimer(self._stands, self._timeouts.wait_secs))
            self._go_on()

    def _release(self, release: m.Release) -> None:
        self._stops.pop(release.meeting, None)
        self._scheduled.discard(release.meeting)
        self._go_on()

    def _resume(self, resume: m.Resume) -> None:
        if resume.tokens[self.rank] == self._token:
            self._result = (resume.outcome,)
            self._go_on()

    def _do(self, do: m.Do) -> None:
        if do.of is not None and self.rank not in do.of:
            return
        if do.order.in_background:
            self._in_background.add(do.number)
            self._commands.append(m.Perform(do.number, do.order))
        else:
            self._orders.append((do.number, do.order))
            self._go_on()

    def _tell(self, tell: m.Tell) -> None:
        for ticket in tell.tickets:
            if ticket in self.tickets:
                self.tickets[ticket] = tell.stage
                self._commands.append(m.Settle(ticket, tell))
                if ticket == self._ticket and self._why == _WAITING and not self._result:
                    if tell.stage.is_final:
                        self._result = (tell.stage,)
                    elif tell.waits_until > self.step:
                        self._give_up()
                    self._go_on()
                self._not_before[ticket] = tell.waits_until
                if tell.stage.is_final:
                    del self.tickets[ticket], self._not_before[ticket]
        if tell.ended and tell.stage in (Stage.REFUSED, Stage.WITHDRAWN):
            self._commands.append(m.DropPrepared(tell.id))

    def _send(self, message: m.ToCoordinator) -> None:
        self._commands.append(m.Send(message))
