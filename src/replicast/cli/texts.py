"""Text for the terminal: what files say made harmless, numbers and times in short. Loads little."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Mapping

from replicast.errors import CheckpointError, FileDamaged, UpdateRefused
from replicast.errors import printable as printable
from replicast.update.trial import Trial, TrialOutcome

_OPTIONS = {
    "allow_nonfinite=True": "--allow-nonfinite",
    "next_start=True": "--next-start",
    "force=True": "--force",
}
_RANDOM_ID = re.compile(r"[0-9a-f]{32}")
_LABELS = {
    "path": "checkpoint",
    "step": "step",
    "variable": "variable",
    "worker": "worker",
    "expected": "expected",
    "received": "received",
    "remedy": "what to do",
}


def printable_lines(text: object) -> str:
    """Text of several lines, each made harmless."""
    return "\n".join(printable(line) for line in str(text).split("\n"))


def one_line(text: object) -> str:
    """Text from a file in one line."""
    return printable(" ".join(str(text).split()))


def error(raised: UpdateRefused | CheckpointError | FileDamaged) -> str:
    """An error, one fact per line; where it names an argument of Python, the option of the command line."""
    headline = raised.headline if isinstance(raised, FileDamaged) else raised.problem
    facts = [(label, getattr(raised, name, None)) for name, label in _LABELS.items()]
    if isinstance(raised, FileDamaged):
        facts.pop(0)  # The headline has the path.
    lines = [f"{label}: {one_line(value)}" for label, value in facts if value is not None]
    said = "\n  ".join([one_line(headline), *lines])
    for argument, option in _OPTIONS.items():
        said = said.replace(argument, option)
    return said


def short_id(update_id: str) -> str:
    """An id for a table: a random one by its first digits, which `show` and `withdraw` accept too."""
    return update_id[:8] if _RANDOM_ID.fullmatch(update_id) else printable(update_id)


def size(nbytes: int) -> str:
    """A size in bytes, kB, MB or GB."""
    if nbytes < 1000:
        return f"{nbytes} B"
    value, units = nbytes / 1000, ["kB", "MB", "GB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        del units[0]
    return f"{value:.1f} {units[0]}" if value < 99.95 else f"{value:.0f} {units[0]}"


def seconds(secs: float) -> str:
    """A duration with the digits that matter."""
    if abs(secs) < 0.0995:
        return f"{secs * 1000:.1f} ms"
    return f"{secs:.2f} s" if abs(secs) < 9.995 else f"{secs:.0f} s"


def when(moment: float) -> str:
    """A local time: the hour when it was today, else the day; empty when it is not known."""
    day, _, hour = date(moment).partition(" ")
    return hour if day == time.strftime("%Y-%m-%d") else day


def date(moment: float) -> str:
    """Local day and time; empty for 0, and for what no clock can show."""
    with contextlib.suppress(OverflowError, OSError, ValueError):
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment)) if moment else ""
    return ""


def number(value: float | None) -> str:
    """A number with four significant digits; nothing for none."""
    return "" if value is None else f"{value:.4g}"


def shape(dimensions: tuple[int, ...]) -> str:
    """A shape: 3×4; "scalar" for none."""
    return "×".join(map(str, dimensions)) if dimensions else "scalar"


def metrics(values: Mapping[str, float]) -> str:
    """Metrics in one line."""
    return "  ".join(f"{one_line(name)} {number(value)}" for name, value in values.items())


def digests(reported: Mapping[int, str]) -> str:
    """What the workers reported: one digest when it is the same on all."""
    if len(set(reported.values())) == 1:
        same = f"the same on {len(reported)} workers" if len(reported) > 1 else "on the only worker"
        return f"{printable(next(iter(reported.values())))}, {same}"
    return "; ".join(f"worker {rank}: {printable(digest)}" for rank, digest in sorted(reported.items()))


def counted(amount: int, thing: str) -> str:
    """A number of things: "1 worker", "2 workers"."""
    return f"{amount} {thing}" if amount == 1 else f"{amount} {thing}s"


def trial(asked: Trial) -> str:
    """What decides a trial: "50 steps, loss, at most 5 % worse"."""
    part = asked.max_increase
    words = f"at most {100 * part:g} % worse" if part > 0 else f"at least {-100 * part:g} % better"
    return one_line(f"{asked.steps} steps, {asked.metric}, {words if part else 'no worse'}")


def outcome(ended: TrialOutcome) -> str:
    """How a trial ended."""
    reason = one_line(ended.reason)
    if ended.outcome == "kept":
        return f"kept at step {ended.step}: {reason}"
    back = "all replicas are back at their state before the update"
    return f"reverted at step {ended.step}: {back} ({reason})"


def no_updates(*, journaled: bool) -> str:
    """Why a journal is empty."""
    return (
        "no update has been committed yet" if journaled else 'the job keeps no journal (durability="memory")'
    )
