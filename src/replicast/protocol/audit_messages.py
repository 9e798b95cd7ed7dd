"""What is said in an audit: Examine, Lend, Weigh, Audited, to all; Examined, Weighed, Condemned, back.

What was lent is told by `replicast.protocol.messages.Computed`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Examine:
    """At the round's boundary every worker digests its whole state, says so, and waits there.

    Attributes:
        verdict: The report that every training thread has to raise, given before it may: each says that it
            has it, and waits for `Audited`. Empty: digest.
    """

    round: int
    step: int
    verdict: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Lend:
    """One worker makes its values of these variables available, as an update that may never be committed."""

    round: int
    source: int
    id: str
    variables: list[str]
    note: str


@dataclass(frozen=True, slots=True)
class Weigh:
    """Compare your values with those that were lent.

    Attributes:
        ids: What was lent, staged by all.
        differing: Of each variable: the workers that have other bits.
    """

    round: int
    ids: list[str]
    differing: dict[str, list[int]]


@dataclass(frozen=True, slots=True)
class Audited:
    """The audit of this round is over: go on.

    Attributes:
        report: What it found and did.
        raises: Whether the training thread has to raise it, at the boundary.
    """

    round: int
    report: dict[str, Any]
    raises: bool = False


@dataclass(frozen=True, slots=True)
class Examined:
    """What one worker's state was at a boundary, as digests.

    Attributes:
        digests: One for each variable, in the order of the schema.
        secs: How long that took.
        trained: As in `Applied`.
        to_be_equal: Whether its training thread stands there because it asks to be made equal.
    """

    step: int
    digests: list[str]
    secs: float
    trained: int = 0
    to_be_equal: bool = False


@dataclass(frozen=True, slots=True)
class Condemned:
    """One worker's training thread has the verdict that it will raise.

    Attributes:
        pause: The token of the pause out of which it will; None when it is in none.
    """

    pause: int | None


@dataclass(frozen=True, slots=True)
class Weighed:
    """How far one worker's values are from those that were lent, by variable."""

    found: dict[str, dict[str, Any]]
