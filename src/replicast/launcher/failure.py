"""How workers exit, what follows for the job, and every sentence that the launcher says about it.

`WorkerExit` is the one record of an ending. The group of a host fills it in when a worker exits; it travels
between launchers, decides who is to blame (`first_cause`), and is what the screen and states.jsonl show.
`LaunchOrder` is the one record of a decision, made by `order_after`; for several hosts, by the `Leader`.

Who is to blame: a worker that exits because another one failed says so with its exit code (PEER_FAILED), and
a worker that the launcher had to stop did not fail. A frozen worker is the cause of whatever the others do.
"""

from __future__ import annotations

import builtins
import contextlib
import enum
import itertools
import os
import re
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from replicast.config import PEER_FAILED, TOLD_TO_END
from replicast.errors import LaunchRefused, exception_sentence, printable
from replicast.files import RunDir, RunPath, below
from replicast.launcher.screen import BAR, LineAssembler, Screen, cropped, is_chatter, without_colours

UNKILLABLE = 1  # The exit code when workers could not be killed.
MAX_LINES, MAX_COLUMNS = 25, 1000  # How much of the end of a worker's log an `Exit` carries.
_SENTENCE_COLUMNS = 300
_SHORT_SECS = 60.0
_READ_BYTES = 256 * 1024
_BEFORE_LINES, _FIRST_LINES, _LAST_LINES = 5, 1, 18
# On the line of a progress bar, or, with a margin, in an exception group.
_TRACEBACK = re.compile(r".*?((?: {0,99}[|+] )?)(?:Exception Group )?(Traceback \(most recent call last\):)")
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(: .*|$)")
_FRAME = re.compile(r' +File "(.+)", line (\d+), in ')
_LIBRARIES = (str(Path(os.__file__).parent), str(Path(__file__).parents[1]), "<")
_GENERATED = re.compile(r"-packages/|__autograph_generated_file")
_BLAMES = re.compile(r"replicast: (worker \d+ .+)")

# Checked when a message of another launcher is read.
Index = Annotated[int, Meta(ge=0, lt=1 << 31)]
StopSignal = Literal[1, 2, 15]  # SIGHUP, SIGINT, SIGTERM


# --- Records ---------------------------------------------------------------------------------------------


class WorkerExit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one worker exited; with `worker` None, why a whole host counts as lost."""

    host: Index = 0
    worker: Index | None = None
    code: Annotated[int, Meta(ge=-64, lt=256)] = PEER_FAILED  # minus the signal that killed it
    ran_secs: Annotated[float, Meta(ge=0)] = 0.0
    log: str = ""
    stopped: bool = False  # The launcher had sent it a signal.
    frozen: bool = False  # It was stopped by SIGSTOP, and the others waited for it in vain.
    why: str = ""  # The exception in its log, in a sentence; of a lost host, what happened.
    where: str = ""  # The line of the user's code at which it was raised.
    says: str = ""  # What a worker that exited because of another one says of it.
    lines: tuple[str, ...] = ()  # What to show of its log: the traceback, else the last lines.
    reported_by: Index = 0  # the host

    @property
    def was_told_to(self) -> bool:
        """Whether it saved and exited because of SIGTERM or a request to stop: that is no failure."""
        return self.code == TOLD_TO_END

    @property
    def is_refusal(self) -> bool:
        return self.why.startswith(f"{LaunchRefused.__name__}: ")

    @property
    def how(self) -> str:
        if self.frozen:
            return "stopped by SIGSTOP"
        if self.code >= 0:
            means = {PEER_FAILED: ": because of another worker", TOLD_TO_END: ": told to stop"}
            return f"exit code {self.code}{means.get(self.code, '')}"
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-self.code).name}"
        return f"killed by signal {-self.code}"


@dataclass(frozen=True, slots=True)
class GroupEnd:
    exits: tuple[WorkerExit, ...] = ()
    interrupted_by: signal.Signals | None = None
    left_behind: tuple[int, ...] = ()  # They could not be killed.


class Phase(enum.Enum):
    WAIT = "wait"  # Start nothing: hosts are missing, or still end their workers.
    RUN = "run"  # Run the attempt.
    END = "end"  # End the attempt: a worker failed, a host was lost, or somebody stopped the job.
    OVER = "over"  # The job is over: exit with the code.


class LaunchOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="order"):
    """What all launchers of a job shall do now, and why."""

    phase: Phase
    attempt: Index = 0
    restarts: Index = 0
    max_restarts: Index = 0
    code: Annotated[int, Meta(ge=0, lt=256)] = 0
    failure: WorkerExit | None = None
    signal: StopSignal | None = None
    stopped_on: Index = 0  # the host on which the signal came
    hosts: tuple[str, ...] = ()
    missing: tuple[Index, ...] = ()
    session: str = ""  # of the first launcher
    run_name: str = ""  # the name of its run directory
    repeats: bool = False  # Two attempts have failed in the same way, soon after their start.


def first_cause(exits: Iterable[WorkerExit]) -> WorkerExit | None:
    """Who is to blame: a frozen worker, one that failed by itself, a lost host, else the first one."""
    failed = [one for one in exits if one.frozen or (one.code != 0 and not one.stopped)]
    frozen = [one for one in failed if one.frozen]
    by_itself = [one for one in failed if one.worker is not None and one.code != PEER_FAILED]
    lost = [one for one in failed if one.worker is None]
    return next(iter(frozen or by_itself or lost or failed), None)


def order_after(
    before: LaunchOrder, failure: WorkerExit | None, signum: int | None, *, left_behind: bool
) -> LaunchOrder:
    """What follows an attempt: the next one, or the end of the job.

    `before.failure` is that of the attempt before this one, `failure` that of this one.

    No restart after SIGTERM, not even one to a worker: they have saved their state, the machine is needed.
    Nor if the attempt before raised the same exception at the same line, and both ended soon: a third would
    raise it too. Nor if the start was refused. An attempt that ran for longer may have made progress.
    """
    code = UNKILLABLE if left_behind else 0
    if signum is not None:
        code = 128 + signum
    elif failure is not None:
        code = failure.code if failure.code >= 0 else 128 - failure.code  # as in a shell
    over = replace(before, phase=Phase.OVER, code=code, failure=failure, signal=signum)
    if failure is None or signum is not None or left_behind or failure.was_told_to:
        return over
    if failure.is_refusal or before.restarts >= before.max_restarts:
        return over
    if before.failure is not None and _repeats(before.failure, failure):
        return replace(over, repeats=True)
    return replace(over, phase=Phase.WAIT, attempt=before.attempt + 1, restarts=before.restarts + 1)


# Exceptions whose cause may be gone in the next attempt: of the machine, the network or another worker.
_OF_MACHINE = (OSError, EOFError, MemoryError)
_PASSING = {
    *("ResourceExhaustedError", "UnavailableError", "AbortedError", "CancelledError", "InternalError"),
    *("DeadlineExceededError", "UnknownError", "DataLossError", "ClusterError", "JobFailed", "FaultInjected"),
    *(name for name, one in vars(builtins).items() if isinstance(one, type) and issubclass(one, _OF_MACHINE)),
}


def _repeats(one: WorkerExit, other: WorkerExit) -> bool:
    """Whether both raised the same exception at the same line, soon; numbers in its text may differ."""

    def known(failure: WorkerExit) -> tuple[str, str, str]:
        kind, _, text = failure.why.partition(":")
        return kind, failure.where, re.sub(r"\d+", "", text)[:60]

    is_raised = all(
        failure.worker is not None
        and failure.why
        and failure.code > 0
        and failure.code != PEER_FAILED
        and failure.ran_secs < _SHORT_SECS
        for failure in (one, other)
    )
    return is_raised and known(one) == known(other) and known(one)[0] not in _PASSING


# --- What a log says -------------------------------------------------------------------------------------


def with_details(ended: WorkerExit, log: RunPath, tail: Sequence[str]) -> WorkerExit:
    """An exit with what the worker's log says about it; `tail` are the last lines that were shown."""
    why, where, traceback = raised_in(log) if ended.code > 0 and not ended.frozen else ("", "", [])
    tail = [line for line in map(without_colours, tail) if not BAR.fullmatch(line)]
    blamed = map(_BLAMES.match, tail)
    says = next((cropped(found[1], _SENTENCE_COLUMNS) for found in blamed if found is not None), "")
    return replace(
        ended,
        why=why[:_SENTENCE_COLUMNS],
        where=where[:_SENTENCE_COLUMNS],
        says=says if ended.code == PEER_FAILED else "",
        # A line without an end is as long as the log.
        lines=tuple(cropped(line, MAX_COLUMNS) for line in (traceback or tail)[-MAX_LINES:]),
    )


def raised_in(log: RunPath) -> tuple[str, str, list[str]]:
    """The last exception in a log: its sentence, the user's line, its traceback with some lines before."""
    lines = [line for line in end_of(log) if not is_chatter(line) and not BAR.fullmatch(line)]
    starts = [
        (number, begun) for number, line in enumerate(lines) if (begun := _TRACEBACK.fullmatch(line.rstrip()))
    ]
    for start, begun in reversed(starts):
        margin = "  | " if "+" in begun[1] else begun[1]
        after = [line.removeprefix(margin) for line in lines[start + 1 :] if line.startswith(margin)]
        outside = (number for number, line in enumerate(after) if line[:1].strip())
        end = next(outside, None)  # the first line that is not indented: that of the exception
        if end is None or not _EXCEPTION.match(after[end]):
            continue
        found, most = [begun[2], *after[: end + 1]], _FIRST_LINES + _LAST_LINES
        why, of_function = exception_sentence(after[end:]), list[str]()
        if found[-1].endswith(": in user code:"):  # The lines of a `tf.function`.
            of_function = [*itertools.takewhile(lambda line: not line[:1].strip(), after[end + 1 :])]
        where = _own_line(found + of_function)
        if len(found) > most + 1:
            left_out = f"  … {len(found) - most} lines: see the log"
            found = [*found[:_FIRST_LINES], left_out, *found[-_LAST_LINES:]]
        if not found[-1].endswith(why):
            found.append(why)
        return why, where, lines[max(0, start - _BEFORE_LINES) : start] + found
    return "", "", []


def _own_line(traceback: Sequence[str]) -> str:
    """The deepest line of a traceback that is in no library: its file, its number and its text."""
    for line, source in reversed([*itertools.pairwise(traceback)]):
        frame = _FRAME.match(line)
        if frame and not frame[1].startswith(_LIBRARIES) and not _GENERATED.search(frame[1]):
            text = "" if _FRAME.match(source) else f": {source.strip()}"
            return f"{short_path(frame[1])}:{frame[2]}{text}"
    return ""


def end_of(log: RunPath) -> list[str]:
    """The last lines of a log, as a terminal shows them; none if it cannot be read."""
    try:
        with os.fdopen(log.open(os.O_RDONLY), "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _READ_BYTES))
            lines = LineAssembler()
            return [without_colours(line) for line in lines.feed(file.read(_READ_BYTES)) + lines.finish()]
    except OSError:
        return []


# --- Sentences -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hosts:
    """The names of the hosts of a job, as this one shows them."""

    names: tuple[str, ...] = ("",)
    here: int = 0

    def on(self, host: int) -> str:
        return "" if host == self.here else f" on {self.names[host]}"

    def lost(self, exited: WorkerExit) -> str:
        name = self.names[exited.host]
        return f"{name if name.startswith('host ') else f'host {name}'} was lost"


ONE_HOST = Hosts()


def signal_name(signum: int) -> str:
    return "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name


def reason(failure: WorkerExit, hosts: Hosts = ONE_HOST) -> str:
    """Why the job failed, for states.jsonl: the exception, else how the worker ended."""
    if failure.worker is None:
        return f"{hosts.lost(failure)}: {failure.why}"
    where = f" ({failure.where})" if failure.where else ""
    return (failure.why or failure.how) + where + hosts.on(failure.host)


def restart_line(order: LaunchOrder, hosts: Hosts = ONE_HOST) -> str:
    failure, why = order.failure, ""
    if failure is not None and failure.worker is None:
        why = f" because {hosts.lost(failure)}"
    elif failure is not None:
        who = f"worker {failure.worker}{hosts.on(failure.host)}"
        # A worker that exited because of another one did not fail by itself: the other one is the reason.
        blamed = f"{failure.says.partition(':')[0]} (reported by {who})"
        why = f" because {blamed if failure.says else f'{who} failed ({failure.how})'}"
    left = order.max_restarts - order.restarts
    return f"replicast: restart {order.restarts} of {order.max_restarts}{why}; {left} left after it"


def report(order: LaunchOrder, end: GroupEnd | None, hosts: Hosts, screen: Screen, told_by: str = "") -> None:
    """Says who failed first, how the others ended, and who stopped the job; `end` is None if nothing ran."""
    failure = order.failure
    is_told = failure is not None and failure.was_told_to and end is not None
    if failure is not None and failure.worker is not None and not is_told and not order.repeats:
        screen.tell(failure_box(failure, hosts))
    for line in report_lines(order, end, hosts, told_by):
        screen.tell(f"replicast: {line}")


def report_lines(
    order: LaunchOrder, end: GroupEnd | None, hosts: Hosts = ONE_HOST, told_by: str = ""
) -> Iterator[str]:
    failure = order.failure
    if failure is not None and failure.worker is None:
        told_on = failure.reported_by
        by = "" if told_on == hosts.here else f" (reported by the launcher on {hosts.names[told_on]})"
        yield f"{hosts.lost(failure)}{by}: {failure.why}"
    elif failure is not None:
        where = hosts.on(failure.host)
        who, log = f"worker {failure.worker}{where}", failure.log if where else short_path(failure.log)
        after = f"after {duration(failure.ran_secs)}. Log{where}: {log}"
        if failure.was_told_to and end is not None:  # SIGTERM or a request: nothing has failed.
            told = printable(told_by) or "the group was told to stop (SIGTERM)"
            yield f"{told}; {who} exited first ({failure.how}) {after}"
        elif failure.frozen:
            yield f"{who} was stopped (SIGSTOP) and did not continue: killed {after}"
        elif failure.code == PEER_FAILED:  # The other one exited with 0, is on another host, or hangs.
            yield f"{who} exited because of another worker ({failure.says or 'its log names it'}) {after}"
        else:
            yield f"{who} failed first: {failure.how} {after}"
            yield from filter(None, (failure.why, failure.where and f"at {failure.where}"))
        if order.repeats:
            left = order.max_restarts - order.restarts
            yield (
                "not restarted: the attempt before raised the same error, and neither ran for "
                f"{_SHORT_SECS:g} s; {left} of {order.max_restarts} restarts are left"
            )
    if failure is not None and end is not None:
        parts = []
        for one in sorted(end.exits, key=lambda one: one.worker or 0):
            if one.frozen:
                how = "was stopped by SIGSTOP"
            elif one.stopped:
                how = "was stopped"
            elif one.was_told_to:
                how = "exited too"
            else:
                how = "had finished" if one.code == 0 else f"failed afterwards ({one.how})"
            if one.worker != failure.worker:
                parts.append(f"worker {one.worker} {how}")
        parts += [f"worker {worker} could not be killed" for worker in end.left_behind]
        if parts:
            yield f"{', '.join(parts)}."
    if order.signal is not None:
        here = end or GroupEnd()
        killed = sorted(str(one.worker) for one in here.exits if one.code == -signal.SIGKILL)
        if here.left_behind:
            rest = f"could not be killed: worker {', '.join(map(str, here.left_behind))}"
        elif killed:
            rest = f"killed before it had exited: worker {', '.join(killed)}; the last checkpoint may be "
            rest += "missing (--grace gives more time)"
        else:
            rest = f"{'all workers' if hosts == ONE_HOST else 'the workers on this host'} have exited"
        yield f"stopped by {signal_name(order.signal)}{hosts.on(order.stopped_on)}; {rest}"


def failure_box(failure: WorkerExit, hosts: Hosts) -> str:
    """The exception of the failed worker, or its last lines. Long ones are not wrapped: paths stay whole."""
    title, count = f"worker {failure.worker}{hosts.on(failure.host)}", len(failure.lines)
    if count and not failure.why:
        title += ": the last line" if count == 1 else f": the last {count} lines"
    lines = [f"│ {without_colours(line)}" for line in failure.lines or ("(no output)",)]
    return "\n".join([f"╭─ {title}", *lines, "╰─"])


def duration(secs: float) -> str:
    if secs < 60:
        return f"{secs:.1f} s"
    minutes, seconds = divmod(round(secs), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


def short_path(path: RunDir) -> str:
    relative = os.path.relpath(str(below(path)))
    return str(path) if relative.startswith("..") else relative
