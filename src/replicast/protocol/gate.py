"""Where the training thread and an update meet: the boundaries of one worker.

The training thread calls `arrive(step)` at each boundary. The follower thread, on behalf of the coordinator,
puts stops in its way:

    hold(round)        stop at the next boundary there is: this one if the thread stands at one, else the next
    aim(round, step)   the agreed boundary of all workers; still undecided
    go(round, …)       decided: apply and pass
    free(round)        decided: pass
    fail(round, …)     decided: raise

A thread that comes to an undecided stop waits; a stop that is decided costs nothing but the work. Because
every worker has stopped, or will stop, before the coordinator chooses the step, no worker can be past it,
whatever the training itself does or does not wait for.

The end of a trial is a stop too. Until it is decided, other updates give way: what is meant for a boundary in
the middle of a trial is applied at its end, after the decision, in every life of the job.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from replicast.errors import JobFailed, UpdateRefused
from replicast.protocol.audit_messages import Examine, Lend, Weigh
from replicast.protocol.messages import Compute, Go
from replicast.protocol.stop import Order, Stop, order_of

REMIND_SECS = 0.5


class Work(Protocol):
    """What is done at a boundary, in the training thread."""

    def apply(self, go: Go, step: int, since: float) -> None:
        """Applies committed updates; `since` is when the training thread began to wait for them."""

    def compute(self, order: Order) -> None:
        """Runs the function on this worker, if it is the source, or does its part in an audit.

        Must not raise for the function's errors.
        """


class Gate:
    """The boundaries of one worker. `arrive` and `park` are for the training thread, the rest for others.

    Args:
        work: What to do at a stop.
        check: Raises when waiting is in vain, because a thread or another worker has died.
        timeout_secs: How long an undecided stop may keep the training thread.
        on_parked: Called with the step when the training thread parks before something that is meant for a
            later boundary.
    """

    def __init__(
        self,
        work: Work,
        check: Callable[[], None],
        timeout_secs: float,
        on_parked: Callable[[int], None] = lambda step: None,
    ) -> None:
        self._work = work
        self._on_parked = on_parked
        self._check = check
        self._timeout_secs = timeout_secs
        self._changed = threading.Condition()
        self._stops: list[Stop] = []
        self._trial: Stop | None = None
        self._cut: set[int] = set()
        self._here = False
        self._in_function = False
        self.on_stopped: Callable[[], None] = lambda: None
        """Called when the training thread has come to a stop that is undecided."""
        self.step = 0
        """Boundaries are numbered by the steps trained before them; this is the last one reached."""

    def arrive(self, step: int) -> None:
        """The training thread has finished `step` steps. Returns when it may start the next one.

        Costs one uncontended lock when nothing is going on. Blocks while a stop is undecided, at most
        `timeout_secs`, then names the coordinator.
        """
        self._check_not_in_function()
        with self._changed:
            self.step = step
            if not self._stops:
                self._check()
                return
            self._here = True
        self._serve(lambda: True, None)

    def park(
        self,
        done: Callable[[], bool],
        timeout_secs: float | None,
        announce: Callable[[], None] = lambda: None,
    ) -> bool:
        """The training thread stays at its boundary, serving whatever is decided, until `done`.

        Args:
            done: Whether it may leave.
            timeout_secs: How long it stays at most.
            announce: Called once it stands: a `hold` from then on finds it here.

        Returns:
            False when the time was up.
        """
        self._check_not_in_function()
        with self._changed:
            self._here = True
            step = self.step
            too_early = any(stop.step > step and not stop.scheduled for stop in self._stops)
        announce()
        if too_early:
            self._on_parked(step)
        return self._serve(done, timeout_secs)

    @contextlib.contextmanager
    def in_function(self) -> Iterator[None]:
        """The training thread runs a function for which all workers wait: it must not wait for them."""
        self._in_function = True
        try:
            yield
        finally:
            self._in_function = False

    def _check_not_in_function(self) -> None:
        if self._in_function:
            raise UpdateRefused(
                "A proposed function cannot wait for other workers: they wait for it",
                expected="a function that returns what is to be changed",
                received="a call of boundary, sync, save, audit or result in it",
                remedy="Call it behind the step instead; propose() may be called in a function",
            )

    def start_from(self, step: int) -> None:
        """The state is that of another step: the training thread stands at its boundary."""
        with self._changed:
            self.step = step

    def wake(self) -> None:
        """Something changed that a parked thread may wait for."""
        with self._changed:
            self._changed.notify_all()

    def hold(self, round_: int) -> tuple[int, bool]:
        """Puts up a stop; gives its step and whether the training thread stands there."""
        with self._changed:
            held = next((stop for stop in self._stops if stop.round == round_), None)
            if held is not None:
                return held.step, self._here
            step = self.step if self._here else self.step + 1
            self._stops.append(Stop(round_, step))
            return step, self._here

    def hold_here(self, round_: int) -> int | None:
        """Puts up a stop if the training thread stands at a boundary; gives its step."""
        with self._changed:
            if not self._here:
                return None
            self._stops.append(Stop(round_, self.step))
            return self.step

    def schedule(self, round_: int, step: int, *, yields: bool = True) -> None:
        """Puts up a stop at a known step, before training begins."""
        with self._changed:
            self._stops.append(Stop(round_, step, scheduled=True, yields=yields))

    def begin_trial(self, round_: int, step: int, act: Callable[[], None]) -> None:
        """Puts up the end of a trial, at which the training thread first does `act`. For that thread."""
        with self._changed:
            ends = self.step if round_ in self._cut else step
            self._trial = Stop(round_, ends, scheduled=True, act=act)
            self._stops.append(self._trial)

    def cut_trial(self, round_: int) -> None:
        """All workers stand here, and training ends: so does this trial, should it begin just now too."""
        with self._changed:
            self._cut.add(round_)
            if self._trial is not None and self._trial.round == round_:
                self._trial.step = min(self._trial.step, self.step)
            self._changed.notify_all()

    def end_trial(self, round_: int, act: Callable[[], None]) -> None:
        """Decides the end of a trial: the training thread does `act` there, and goes on."""
        with self._changed:
            stop = self._stop(round_)
            stop.act, stop.decided = act, True
            self._changed.notify_all()

    def stands_at(self, round_: int) -> bool:
        """Whether the training thread waits at this stop."""
        with self._changed:
            stop = next((stop for stop in self._stops if stop.round == round_), None)
            return stop is not None and self._here and self._is_due(stop) and stop.act is None

    def needs_steps(self, step: int | None) -> bool:
        """Whether what is meant for this step, or for the end of a trial, needs more steps of this thread."""
        return (step is not None and step > self.step) or (self.trial_ends or 0) > self.step

    @property
    def trial_ends(self) -> int | None:
        """The step at which the trial ends that is under way here; None when there is none."""
        trial = self._trial
        return None if trial is None else trial.step

    def aim(self, round_: int, step: int) -> None:
        """Moves a stop to the boundary that was agreed."""
        with self._changed:
            self._stop(round_).step = step
            self._changed.notify_all()

    def compute(self, order: Compute) -> None:
        """An update is to be computed at this stop."""
        with self._changed:
            stop = self._stop(order.round)
            stop.step, stop.compute, stop.scheduled = order.step, order, order.scheduled
            stop.computes = stop.yields = True
            self._changed.notify_all()

    def order(self, order: Examine | Lend | Weigh) -> None:
        """The training thread has something to do at this stop, for an audit; the stop stays."""
        with self._changed:
            stop = self._stop(order.round)
            stop.compute, stop.computes = order, True
            self._changed.notify_all()

    def go(self, go: Go) -> None:
        """Decides a stop: apply."""
        with self._changed:
            stop = self._stop(go.round)
            stop.step, stop.go, stop.scheduled = go.step, go, go.scheduled
            # An audit's round heals, in a trial too; a replayed one was told when it was put up.
            stop.yields = stop.yields or (bool(go.updates) and not stop.computes and stop.round > 0)
            self._changed.notify_all()

    def free(self, round_: int) -> None:
        """Decides a stop: pass. One that was never put up here is none."""
        with self._changed:
            self._stops = [stop for stop in self._stops if stop.round != round_]
            self._changed.notify_all()

    def fail(self, round_: int, error: Exception) -> None:
        """Decides a stop: the training thread raises there."""
        with self._changed:
            self._stop(round_).error = error
            self._changed.notify_all()

    def bring_forward(self) -> None:
        """All workers stand here: what was meant for one of the next steps, by nobody's wish, is due now."""
        with self._changed:
            for stop in self._stops:
                if not stop.scheduled:
                    stop.step = min(stop.step, self.step)
            self._changed.notify_all()

    def pending(self) -> list[Stop]:
        """All stops that are up."""
        with self._changed:
            return sorted(self._stops, key=order_of)

    def _serve(self, done: Callable[[], bool], timeout_secs: float | None) -> bool:
        since = time.monotonic()
        ends = None if timeout_secs is None else since + timeout_secs
        try:
            while True:
                stop = self._next(done, ends, since)
                if stop is None:
                    return done()
                if stop.go is not None:
                    self._work.apply(stop.go, self.step, max(since, stop.since))
                elif stop.act is not None:
                    stop.act()
                elif stop.compute is not None:
                    self._work.compute(stop.compute)
                since = time.monotonic()
        finally:
            with self._changed:
                self._here = False

    def _next(self, done: Callable[[], bool], ends: float | None, since: float) -> Stop | None:
        """The next stop to act on; None when there is none and the thread may leave, or the time is up."""
        told = False
        with self._changed:
            while True:
                self._check()
                stop = min(filter(self._is_due, self._stops), key=order_of, default=None)
                if stop is None and done():
                    self._here = False  # under the same lock: a hold from now on means the next boundary
                    return None
                if stop is not None and stop.go is not None:
                    self._stops.remove(stop)
                    return stop
                if stop is not None and stop.error is not None:
                    self._stops.remove(stop)
                    raise stop.error
                if stop is not None and stop.act is not None:
                    return self._take_act(stop)
                if stop is not None and stop.compute is not None:
                    order, stop.compute = stop.compute, None
                    self.on_stopped()
                    return Stop(stop.round, stop.step, compute=order)
                if stop is not None and not told:
                    told = True
                    self.on_stopped()
                now = time.monotonic()
                if stop is None and ends is not None and now >= ends:
                    self._here = False
                    return None
                if stop is not None and now - since > self._timeout_secs:
                    raise JobFailed(
                        f"worker 0, the coordinator, did not decide within {self._timeout_secs:.0f} s what "
                        f"is applied at step {stop.step}",
                        worker=0,
                    )
                left = REMIND_SECS if ends is None or ends <= now else ends - now
                self._changed.wait(min(REMIND_SECS, left))

    def _is_due(self, stop: Stop) -> bool:
        return stop.step <= self.step and not (stop.yields and self._trial is not None)

    def _take_act(self, stop: Stop) -> Stop:
        """What to do at the end of a trial: say what was measured; once it is decided, act on that."""
        act, stop.act = stop.act, None
        if stop.decided:
            self._stops.remove(stop)
            self._trial = None
        return Stop(stop.round, stop.step, act=act)

    def _stop(self, round_: int) -> Stop:
        return next(stop for stop in self._stops if stop.round == round_)
