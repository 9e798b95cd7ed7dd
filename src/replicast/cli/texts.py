"""Words and numbers as people read them. Loads nothing."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from replicast.errors import UpdateRefused

if TYPE_CHECKING:
    from replicast.trial import TrialOutcome

_IN_PYTHON, _AS_OPTION = "allow_nonfinite=True", "--allow-nonfinite"
_RANDOM_ID = re.compile(r"[0-9a-f]{32}")
_SHORT = 8


def printable(text: str) -> str:
    """Text from a file, without what would move the cursor or change colours of a terminal."""
    return "".join(character if character.isprintable() else "�" for character in text)


def printable_lines(text: str) -> str:
    """Text of several lines, each without what a terminal would obey."""
    return "\n".join(printable(line) for line in text.split("\n"))


def one_line(text: str) -> str:
    """Text from a file in one line."""
    return printable(" ".join(text.split()))


def refusal_text(error: UpdateRefused) -> str:
    """A refusal, one fact in a line, with an option of the command line where it names that of Python."""
    labelled = {
        "variable": error.variable,
        "worker": error.worker,
        "expected": error.expected,
        "received": error.received,
        "what to do": error.remedy,
    }
    lines = [f"{label}: {one_line(str(value))}" for label, value in labelled.items() if value is not None]
    return "\n  ".join([one_line(error.problem), *lines]).replace(_IN_PYTHON, _AS_OPTION)


def short_id(update_id: str) -> str:
    """An id for a table: a random one by its beginning, which `show` and `withdraw` take too."""
    return update_id[:_SHORT] if _RANDOM_ID.fullmatch(update_id) else printable(update_id)


def short_digest(digest: str) -> str:
    """The beginning of a digest, enough to compare by eye."""
    return printable(digest)[: 2 * _SHORT]


def size_text(nbytes: int) -> str:
    """A size in bytes, kB, MB or GB."""
    if nbytes < 1000:
        return f"{nbytes} B"
    size = float(nbytes)
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 999.5 or unit == "GB":
            break
    return f"{size:.1f} {unit}" if size < 99.95 else f"{size:.0f} {unit}"


def seconds_text(secs: float) -> str:
    """A duration with the digits that matter."""
    if abs(secs) < 0.0995:
        return f"{secs * 1000:.1f} ms"
    return f"{secs:.2f} s" if abs(secs) < 9.995 else f"{secs:.0f} s"


def age_text(secs: float) -> str:
    """How long ago, roughly."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if secs >= 2 * length:
            return f"{secs / length:.0f} {unit}"
    return f"{max(0.0, secs):.0f} s"


def when_text(moment: float, now: float) -> str:
    """A local time: the hour when it was today, else the day."""
    then, today = time.localtime(moment), time.localtime(now)
    return time.strftime("%H:%M:%S" if then[:3] == today[:3] else "%Y-%m-%d", then)


def full_time_text(moment: float) -> str:
    """Local day and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def number_text(value: float) -> str:
    """A number with four significant digits."""
    return f"{value:.4g}"


def shape_text(shape: tuple[int, ...]) -> str:
    """A shape: 3×4; "one number" for none."""
    return "×".join(map(str, shape)) if shape else "one number"


def digest_text(digests: dict[int, str]) -> str:
    """What the workers reported: one digest when it is the same on all."""
    if len(set(digests.values())) == 1:
        same = f"the same on {len(digests)} workers" if len(digests) > 1 else "on the only worker"
        return f"{printable(next(iter(digests.values())))}, {same}"
    return "; ".join(f"worker {rank}: {printable(digest)}" for rank, digest in sorted(digests.items()))


def no_updates_text(*, journaled: bool) -> str:
    """Why a journal is empty."""
    if journaled:
        return "no update has been committed yet"
    return 'the job keeps no journal (durability="memory")'


def counted(number: int, thing: str) -> str:
    """A number of things: "1 worker", "2 workers"."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def trial_text(trial: Mapping[str, Any]) -> str:
    """What an update has to prove: "50 steps, loss, at most 5 % worse"."""
    part = float(trial.get("max_increase", 0.0))
    words = "no worse" if part == 0 else f"at most {100 * part:g} % worse"
    if part < 0:
        words = f"at least {-100 * part:g} % better"
    return one_line(f"{trial.get('steps')} steps, {trial.get('metric')}, {words}")


def outcome_text(outcome: TrialOutcome) -> str:
    """How a trial ended."""
    reason = one_line(outcome.reason)
    if outcome.outcome == "kept":
        return f"kept at step {outcome.step}: {reason}"
    return (
        f"reverted at step {outcome.step}: all replicas are back at their state before the update ({reason})"
    )
