"""The launcher's report on how a group ended: who failed first, how, and the end of that worker's log."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from typing import TextIO

from replicast.config import FAULTS, PEER_FAILED, TOLD_TO_END
from replicast.errors import printable
from replicast.faults import Fault
from replicast.launcher.failure import traceback_in
from replicast.launcher.group import GroupEnd
from replicast.launcher.lines import cropped, without_colours
from replicast.launcher.worker import WorkerExit
from replicast.paths import RunDir, RunPath, below

_SAID_COLUMNS = 300
_BEFORE_LINES = 5
_BOX_COLUMNS = 1000
"""The maximum length of a line in the box; a line without an end is as long as the log."""


def failure_line(failure: WorkerExit) -> str:
    """One line: which worker failed, how, after how long, and where its log is; its host, if another."""
    if failure.lost:
        who = f", says the launcher of {failure.said_by}" if failure.said_by else ""
        return f"replicast: {_host(failure)} was lost{who}: {failure.lost}"
    how = f"failed first: {failure.how}"
    if failure.frozen:
        how = "was stopped (SIGSTOP) and did not continue: killed"
    elif failure.code == PEER_FAILED:  # the other exited with 0, is on another host, or hangs
        said = what_it_says(failure.tail)
        reason = "which its log names" if said is None else f'and says: "{said}"'
        how = f"exited because of another worker, {reason},"
    after = f"after {duration(failure.ran_secs)}"
    if failure.host:
        return (
            f"replicast: worker {failure.rank} on {failure.host} {how} {after}, says the launcher of "
            f"{failure.said_by}. Log on {failure.host}: {failure.log}"
        )
    return f"replicast: worker {failure.rank} {how} {after}. Log: {short_path(failure.log)}"


def what_it_says(tail: Sequence[str]) -> str | None:
    """What a worker says of another one, because of which it exited: the first such line of its last ones."""
    found = (re.match(r"replicast: (worker \d+ .+)", without_colours(line)) for line in tail)
    return next((cropped(match[1], _SAID_COLUMNS) for match in found if match is not None), None)


def sigterm_line(first: WorkerExit, by: str = "") -> str:
    """One line: the group exited because of SIGTERM or a request, without a failure."""
    by = printable(by)
    told = by or "the group was told to stop (SIGTERM)"
    return (
        f"replicast: {told}; worker {first.rank}{_on(first)} exited first, with "
        f"{first.code}, after {duration(first.ran_secs)}. Log: {short_path(first.log)}"
    )


def faults_line(faults: Sequence[Fault]) -> str:
    """One line: workers will fail on purpose."""
    shown = [f"{fault.action} worker {fault.worker} at {fault.point}" for fault in faults[:5]]
    shown += [f"{len(faults) - 5} more"] if len(faults) > 5 else []
    return f"replicast: warning: {FAULTS} is set: workers will fail on purpose: {', '.join(shown)}"


def absent_line(absent: Sequence[int], world_size: int) -> str:
    """One line: faults are planned for workers that do not exist, and will not fire."""
    whom = f"worker {absent[0]}" if len(absent) == 1 else f"workers {', '.join(map(str, absent))}"
    those = "only worker 0" if world_size == 1 else f"workers 0 to {world_size - 1}"
    return f"replicast: warning: {FAULTS} plans a fault for {whom}, but the job has {those}: it will not fire"


def others_line(end: GroupEnd) -> str:
    """One line on how the other workers exited; empty if there are none."""
    others = sorted(
        (ended for ended in end.exits if end.first_failure is None or ended.rank != end.first_failure.rank),
        key=lambda ended: ended.rank,
    )
    parts = [f"worker {ended.rank} {_how_ended(ended)}" for ended in others]
    parts += [f"worker {rank} could not be killed" for rank in end.left_behind]
    return f"replicast: {', '.join(parts)}." if parts else ""


def restart_line(end: GroupEnd, restart: int, max_restarts: int) -> str:
    """One line: which restart this is, why, how many are left."""
    failure = end.first_failure
    why = "" if failure is None else f" because {_restart_reason(failure)}"
    return f"replicast: restart {restart} of {max_restarts}{why}; {max_restarts - restart} left after it"


def _restart_reason(failure: WorkerExit) -> str:
    if failure.lost:
        return f"{_host(failure)} was lost"
    who = f"worker {failure.rank}{_on(failure)}"
    said = what_it_says(failure.tail) if failure.code == PEER_FAILED else None
    # A worker that exited because of another one did not fail by itself: the other one is the reason.
    return f"{who} failed ({failure.how})" if said is None else f"{said.partition(':')[0]}, as {who} says"


def _on(failure: WorkerExit) -> str:
    return f" on {failure.host}" if failure.host else ""


def _host(failure: WorkerExit) -> str:
    return failure.host if failure.host.startswith("host ") else f"host {failure.host}"


def standby_words(workers: int) -> str:
    """What standby processes will take."""
    more = "1 more process" if workers == 1 else f"{workers} more processes"
    return f"; --standby: {more} once it trains, about 0.3 GB each, no core while they wait"


def finished_line(who: str, *, step: int | None, secs: float, restarts: int, logs: RunPath) -> str:
    """One line: the job succeeded."""
    after = f" after {restarts} restart{'s' if restarts > 1 else ''}" if restarts else ""
    facts = [who, *([] if step is None else [f"step {step}"]), duration(secs)]
    return f"replicast: finished{after}: {', '.join(facts)}, logs in {short_path(logs)}"


def interruption_line(
    signum: signal.Signals, end: GroupEnd, host: str = "", unreached: Sequence[str] = ()
) -> str:
    """One line: what stopped the group, on which other host, and whether all workers exited in time."""
    name = "Ctrl-C" if signum is signal.SIGINT else signum.name
    left = ", ".join(str(rank) for rank in end.left_behind)
    killed = ", ".join(
        str(rank) for rank in sorted(one.rank for one in end.exits if one.code == -signal.SIGKILL)
    )
    rest = f"could not be killed: worker {left}" if left else "all workers have exited"
    if unreached and not left:
        rest = "the workers on this host have exited"
    if killed and not left:
        rest = (
            f"killed before it had exited: worker {killed}; the last checkpoint may be missing "
            "(--grace gives more time)"
        )
    where = f" on {host}" if host else ""
    unknown = f"; nothing is known of those on {', '.join(unreached)}" if unreached else ""
    return f"replicast: stopped by {name}{where}; {rest}{unknown}"


def tail_box(failure: WorkerExit, stream: TextIO) -> str:
    """The exception of the failed worker, or its last lines, in a box for a stream; does not write to it."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    console = Console(file=stream)
    is_here = failure.code > 0 and not failure.host
    traceback = traceback_in(failure.log, _BEFORE_LINES) if is_here else []
    lines = [cropped(line, _BOX_COLUMNS) for line in traceback or failure.tail]
    text = Text.from_ansi("\n".join(lines)) if lines else Text("(no output)", style="dim")
    title = f"worker {failure.rank}{_on(failure)}" + _what_is_shown(len(lines), is_traceback=bool(traceback))
    with console.capture() as captured:
        console.print(Panel(text, title=title, title_align="left", border_style="red"))
    return captured.get().rstrip("\n")


def _what_is_shown(count: int, *, is_traceback: bool) -> str:
    if is_traceback or not count:
        return ""
    return ": the last line" if count == 1 else f": the last {count} lines"


def duration(secs: float) -> str:
    """A duration for people."""
    if secs < 60:
        return f"{secs:.1f} s"
    minutes, seconds = divmod(round(secs), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


def short_path(path: RunDir) -> str:
    """The path, relative to the working directory if it is below it."""
    relative = os.path.relpath(str(below(path)))
    return str(path) if relative.startswith("..") else relative


def _how_ended(ended: WorkerExit) -> str:
    if ended.frozen:
        return "was stopped by SIGSTOP"
    if ended.stopped:
        return "was stopped"
    if ended.code == TOLD_TO_END:
        return "exited too"
    return "had finished" if ended.code == 0 else f"failed after it ({ended.how})"
