"""Which operation has its turn at a boundary: one at a time, while all training threads are stopped there.

Operations that need a boundary wait in the order of the list. Once all workers are stopped where an operation
can run (`Meeting`, or all of them rest at one boundary), it has its turn until it yields `Go`, ends, or asks
for another boundary. Operations that are ready by then share the meeting; then the workers are released.

Replayed updates of the journal come before all others at their boundary, in the order of (step, sequence), so
every attempt applies all updates in the same order.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator
from typing import Any

from replicast.core.gather import Gather
from replicast.core.meeting import Meeting
from replicast.core.messages import Meet, Release, Rest, Stop, ToWorkers
from replicast.core.operation import Operation, Timeouts
from replicast.core.refusal import Refusal

MOST_SHARED = 16
"""The maximum number of operations at one boundary; after that, training continues before the next one."""


class Boundaries:
    """The stops of all workers. A part of the coordinator.

    Args:
        size: The number of workers.
        timeouts: The timeouts of the job.
        numbers: Yields numbers that are unique in the job.
        say: Broadcasts a message to all workers.
        set_timer: Calls a function after a time.
        resume: Resumes a script with a value or a `Refusal`.
        deferred: Why an operation must not run now at any boundary, and until which step; None if it may.
        note_deferred: Called when the reason why an operation waits becomes known.
        end_job: Ends the job, with the reason.

    Attributes:
        speaker: The operation that has its turn.
        rests: The workers whose training threads wait for all others.
    """

    def __init__(
        self,
        size: int,
        timeouts: Timeouts,
        numbers: Iterator[int],
        *,
        say: Callable[[ToWorkers], None],
        set_timer: Callable[[float, Callable[[], None]], None],
        resume: Callable[[Operation, Any], None],
        deferred: Callable[[Operation], tuple[str, int] | None],
        note_deferred: Callable[[Operation], None],
        end_job: Callable[[str], None],
    ) -> None:
        self.size = size
        self.speaker: Operation | None = None
        self.rests: dict[int, Rest] = {}
        self._timeouts = timeouts
        self._numbers = numbers
        self._say = say
        self._set_timer = set_timer
        self._resume = resume
        self._deferred = deferred
        self._note_deferred = note_deferred
        self._end_job = end_job
        self._meetings: dict[int, Meeting] = {}
        self._reserving: dict[int, Operation] = {}
        self._next: Meeting | None = None  # for all who want the next possible boundary
        self._waiting: list[Operation] = []
        self._replays: list[tuple[tuple[float, float], int]] = []
        self._here: tuple[Meeting | None, int] | None = None
        self._turn: list[Operation] = []
        self._shared = 0

    # What operations want.

    def want(self, operation: Operation, at_step: int | None) -> None:
        """Adds an operation that waits until all workers are stopped at a boundary."""
        self.leave(operation)
        if at_step is not None and operation.meeting is None:
            operation.meeting = self._open(at_step)
        self._wait(operation)

    def reserve(self, operation: Operation, at_step: int) -> None:
        """Makes all workers agree to stop at a step; then resumes the script."""
        operation.meeting = meeting = self._open(at_step)
        self._reserving[meeting.number] = operation
        self._time_answers(meeting)

    def promise(self, operation: Operation, at_step: int) -> None:
        """The same while all workers are stopped before that step: there is nothing to wait for."""
        operation.meeting = self._open(at_step)
        operation.promised = True

    def replay(self, operation: Operation) -> None:
        """Schedules a replay: before all other operations, in the order of replays."""
        if operation.replays is not None:
            insort(self._replays, (operation.replays, operation.number))

    def last_replay(self) -> int:
        """The step of the last replay that is opened; 0 for none."""
        return int(self._replays[-1][0][0]) if self._replays else 0

    def count_replays(self) -> int:
        """How many replays are opened and not applied yet."""
        return len(self._replays)

    def leave(self, operation: Operation) -> None:
        """Ends the turn of an operation."""
        if self.speaker is operation:
            self.speaker = None
            if operation.replays is not None:
                self._replays.remove((operation.replays, operation.number))
                operation.replays = None

    def forget(self, operation: Operation) -> None:
        """Removes an operation that has ended."""
        self.leave(operation)
        if operation in self._waiting:
            self._waiting.remove(operation)
        if operation in self._turn:
            self._turn.remove(operation)
        if operation.meeting is not None:
            self._reserving.pop(operation.meeting.number, None)
            self._release(operation.meeting)
            operation.meeting = None

    def rests_end(self) -> None:
        """Called when resting workers continue: operations that needed them at rest wait again."""
        self.rests = {}
        for operation in self._turn:
            self._wait(operation)
        self._turn = []
        self._end_here()

    def is_waiting(self, operation: Operation) -> bool:
        """Whether an operation waits for its turn."""
        return operation in self._waiting

    def resting_step(self) -> int | None:
        """The boundary at which all workers rest; None if they do not."""
        if len(self.rests) < self.size:
            return None
        steps = {rest.step for rest in self.rests.values()}
        return steps.pop() if len(steps) == 1 else None

    # What workers say.

    def at(self, rank: int, number: int, step: int, standing: bool) -> None:
        """Handles a worker's message about its position."""
        meeting = self._meetings.get(number)
        if meeting is None:
            return
        had_answered = meeting.answered
        meeting.note(rank, step, standing)
        if standing:
            self._time_standing(meeting)
        if number in self._reserving and meeting.answered:
            self._agreed(meeting)
        elif meeting.at_step is not None:
            return
        elif not had_answered and meeting.answered:
            self._aim(meeting)
        elif had_answered and standing and step < meeting.target:
            self._next = None
            self._open_next()  # it rests, and will never reach the target: ask again
            self._release(meeting)

    def _aim(self, meeting: Meeting) -> None:
        """Chooses the step: the latest boundary that a worker has not passed."""
        meeting.target = latest = meeting.latest
        if len(set(meeting.steps.values())) > 1:
            meeting.aim(latest)
            self._say(Meet(meeting.number, latest))
            self._time_standing(meeting)  # with the workers that are already there

    def _agreed(self, meeting: Meeting) -> None:
        operation = self._reserving.pop(meeting.number)
        refusal = None
        if meeting.latest > meeting.target:
            refusal = Refusal(
                f"Step {meeting.at_step} is past: the next boundary is that of step {meeting.latest}"
            )
        self._resume(operation, refusal)

    # Whose turn it is.

    def schedule(self) -> bool:
        """Gives the turn to the next operation; returns whether there was one."""
        if self.speaker is not None:
            return False
        if self._here is not None:
            if self._next_turn(self._here[1]) or self._share(self._here[1]):
                return True
            self._end_here()
        return (bool(self._waiting) or self._next is not None) and self._find_turn()

    def _next_turn(self, step: int) -> bool:
        while self._turn:
            operation = self._turn.pop(0)
            if self._deferred(operation) is not None:  # a trial has begun just now
                self._wait(operation)
                continue
            self.speaker, operation.meeting = operation, None
            operation.waits_for, operation.waits_until = "", 0
            self._resume(operation, step)
            return True
        return False

    def _end_here(self) -> None:
        """Called when no operation needs the workers to be stopped here any more."""
        used = None if self._here is None else self._here[0]
        self._here = None
        if used is not None:
            self._release(used)

    def _share(self, step: int) -> bool:
        """Also runs operations here that have become ready meanwhile, up to a limit."""
        ready = [one for one in self._waiting if one.meeting is None and self._can_run(one, step)]
        if not ready or self._shared >= MOST_SHARED:
            return False
        self._shared += len(ready)
        self._turn = ready
        for one in ready:
            self._waiting.remove(one)
        return True

    def _can_run(self, operation: Operation, step: int) -> bool:
        return self._deferred(operation) is None and self._is_next(operation, step)

    def _find_turn(self) -> bool:
        resting, wanted = self.resting_step(), False
        for operation in self._waiting:
            deferred = self._deferred(operation)
            if deferred is not None:
                self._put_off(operation, *deferred)
                continue
            wanted = wanted or operation.meeting is None
            step = self._where(operation, resting)
            if step is not None and self._is_next(operation, step):
                self._give_turns(operation, step, resting)
                return True
        if wanted and self._next is None and resting is None:
            self._open_next()
        elif not wanted and self._next is not None:
            self._release(self._next)
        return False

    def _where(self, operation: Operation, resting: int | None) -> int | None:
        """The boundary at which all workers are stopped, if the operation can run there."""
        meeting = operation.meeting or self._next
        step = None if meeting is None else meeting.step()
        if step is None and resting is not None:
            earliest = 0 if operation.meeting is None else operation.meeting.at_step or 0
            step = resting if resting >= earliest else None
        return step

    def _is_next(self, operation: Operation, step: int) -> bool:
        if not self._replays:
            return True
        first = self._replays[0][0]
        return operation.replays == first if operation.replays is not None else first[0] > step

    def _give_turns(self, operation: Operation, step: int, resting: int | None) -> None:
        meeting = operation.meeting
        self._turn = [operation]
        if meeting is None:
            meeting = self._next if resting is None else None
            self._turn = [one for one in self._waiting if one.meeting is None and self._deferred(one) is None]
        for one in self._turn:
            self._waiting.remove(one)
        self._here = meeting, step
        self._shared = len(self._turn)

    def _put_off(self, operation: Operation, reason: str, until: int) -> None:
        meeting = operation.meeting
        if operation.waits_for != reason:
            own = 0 if meeting is None else meeting.at_step or 0
            operation.waits_for, operation.waits_until = reason, max(until, own)
            self._note_deferred(operation)
        if meeting is not None and meeting.standing and until > meeting.target:
            meeting.aim(until)
            self._say(Meet(meeting.number, until))

    # Meetings.

    def _wait(self, operation: Operation) -> None:
        insort(self._waiting, operation, key=lambda one: one.number)

    def _open(self, at_step: int | None) -> Meeting:
        meeting = Meeting(next(self._numbers), self.size, at_step)
        self._meetings[meeting.number] = meeting
        self._say(Stop(meeting.number, at_step))
        return meeting

    def _open_next(self) -> None:
        self._next = self._open(None)
        self._time_answers(self._next)

    def _release(self, meeting: Meeting) -> None:
        if self._meetings.pop(meeting.number, None) is not None:
            self._say(Release(meeting.number))
        if meeting is self._next:
            self._next = None

    def _time_answers(self, meeting: Meeting) -> None:
        """Sets the timeout for answers to `Stop`: event loops answer it whatever the training threads do."""
        secs = self._timeouts.answer_secs

        def late() -> None:
            if meeting.number in self._meetings and not meeting.answered:
                silent = (rank for rank in range(self.size) if rank not in meeting.steps)
                self._call_off(meeting, Gather("answer", silent).timed_out(secs))

        self._set_timer(secs, late)

    def _time_standing(self, meeting: Meeting) -> None:
        """Sets the timeout for all training threads to arrive, once the first one has."""
        if not meeting.standing or meeting.timed_round == meeting.round:
            return
        meeting.timed_round = meeting.round
        secs, round_ = self._timeouts.meet_secs, meeting.round

        def late() -> None:
            open_ = meeting.number in self._meetings and meeting.round == round_
            if open_ and meeting.missing() and self.resting_step() is None:
                self._call_off(meeting, Gather("reach the boundary", meeting.missing()).timed_out(secs))

        self._set_timer(secs, late)

    def _call_off(self, meeting: Meeting, refusal: Refusal) -> None:
        """Refuses the operations of a meeting that not all workers reach."""
        waiting = [one for one in self._waiting if (one.meeting or self._next) is meeting]
        if meeting.number in self._reserving:
            waiting.append(self._reserving.pop(meeting.number))
        self._release(meeting)
        for operation in waiting:
            if operation.must_run:
                self._end_job(f"{operation.kind} {operation.id} cannot be carried out: {refusal.problem}")
                return
            if operation in self._waiting:
                self._waiting.remove(operation)
            operation.meeting = None
            self._resume(operation, refusal)
