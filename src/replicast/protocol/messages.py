"""What workers say to each other about updates: one small frozen class per sentence, JSON on the way.

- To the coordinator, by any worker: Proposal, Paused, Parked, Request.
- To all workers, by the coordinator: Stage, Drop, Hold, Aim, Compute, Go, Free, Advance, Replay,
  Resume, Again, Verified, Failed.
- Back to the coordinator: Answer, to one sentence; Computed, to one order; Applied, to one update.
- In a trial and in an audit: those of `trial_messages` and `audit_messages`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from typing import Any

from replicast.protocol.audit_messages import Audited, Condemned, Examine, Examined, Lend, Weigh, Weighed
from replicast.protocol.trial_messages import Cut, Settle, Settled, Tried


@dataclass(frozen=True, slots=True)
class Proposal:
    """A worker proposes an update, whose bytes are there, or a function that will compute one.

    Attributes:
        ticket: Which proposal of which worker this is: an update may be proposed more than once.
        parcel: Where the bytes are; None for a function.
        source: The worker that runs the function.
        at_step: The step at which it must be applied; None for the next possible one.
        proposed_at: Seconds since the epoch, on the proposing worker.
        trial: What it has to prove, as JSON.
        author: Who is named in the journal. Not among the bytes: whoever proposes the same is another author.
        note: Why, for the journal.
    """

    id: str
    content_digest: str
    rank: int
    ticket: str
    proposed_at: float
    parcel: dict[str, Any] | None = None
    source: int | None = None
    at_step: int | None = None
    trial: dict[str, Any] | None = None
    author: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Paused:
    """A worker waits at a boundary for all others to come there, and for everything proposed before.

    Attributes:
        token: How many pauses it has made.
        intent: What for; must be the same on all workers.
    """

    token: int
    rank: int
    step: int
    intent: str


@dataclass(frozen=True, slots=True)
class Parked:
    """A worker waits at a boundary, for whatever reason, and something is meant for a later one.

    It was asked where it would stop while it was on its way here, and could not know that it would wait.
    """

    rank: int
    step: int


@dataclass(frozen=True, slots=True)
class Request:
    """Somebody wants all workers to do something at one boundary, which every worker knows by its name."""

    action: str
    rank: int


WITHDRAW = "withdraw\n"
"""How the action of a request begins that takes an update back; its id follows."""
WITHDRAWN = "It was withdrawn before it was applied"
"""Why such an update is refused."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Fetch these bytes, check them, answer whether you could apply them.

    Attributes:
        trial: Say also what its metric is now.
        round: If your training thread is in a pause, and you could: hold it there for this round.
    """

    id: str
    content_digest: str
    parcel: dict[str, Any]
    trial: dict[str, Any] | None = None
    round: int = 0


@dataclass(frozen=True, slots=True)
class Drop:
    """These proposals of one update are refused: forget their bytes, tell their authors."""

    id: str
    content_digest: str
    tickets: list[str]
    error: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Hold:
    """Stop at your next boundary, and answer which step that is."""

    round: int


@dataclass(frozen=True, slots=True)
class Aim:
    """The round's boundary is this one: run on to it, and wait there for the decision."""

    round: int
    step: int


@dataclass(frozen=True, slots=True)
class Compute:
    """At the round's boundary `source` computes an update from the live values, and all wait for it.

    Attributes:
        variables: For `sync`: whose values are to be assigned; None when the source's own function decides.
        scheduled: The author named the step.
    """

    round: int
    step: int
    id: str
    source: int
    variables: list[str] | None = None
    scheduled: bool = False


@dataclass(frozen=True, slots=True)
class Go:
    """Committed: apply these at the first boundary at or after the step.

    Attributes:
        updates: Pairs of sequence number and id, in order.
        scheduled: The author named the step, so a pause before it does not bring it forward.
        action: What to do there instead, after all updates of that boundary.
        trial: What the update, which is the only one here, has to prove; `ends`, the step at which that was
            decided in an earlier life of the job, if it was.
    """

    round: int
    step: int
    updates: list[list[Any]]
    scheduled: bool = False
    action: str = ""
    trial: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Free:
    """The round is called off."""

    round: int


@dataclass(frozen=True, slots=True)
class Advance:
    """All workers are held at the same boundary: what was meant for one of the next is due at this one."""


REPLAY_ROUND = -(10**9)
"""Updates of an earlier life of the job have rounds of their own: this plus the sequence number."""
TRIAL_ROUND = -2 * 10**9
"""So has the end of a trial."""


@dataclass(frozen=True, slots=True)
class Replay:
    """What the journal holds from an earlier life of the job: each entry is [round, step].

    Attributes:
        unyielding: The rounds of those that were applied in the middle of a trial.
    """

    stops: list[list[int]]
    unyielding: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Resume:
    """All workers have paused and everything proposed before is settled: go on, or raise.

    Attributes:
        tokens: The token of each worker's pause, by rank.
    """

    tokens: list[int]
    error: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Again:
    """What somebody proposed is meant for this step already, or waits for what ends there.

    Attributes:
        trial: The sequence number of the update on trial that it waits for, if that is the reason.
    """

    id: str
    step: int
    trial: int | None = None


@dataclass(frozen=True, slots=True)
class Verified:
    """Applied by all workers, with equal digests."""

    content_digest: str
    receipt: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Failed:
    """Applied, and the digests differ, or the workers had not trained equally far.

    Attributes:
        trained: How far each had, if they differ.
        after_trial: They were equal there, and the whole states are not at the end of the trial.
    """

    id: str
    content_digest: str
    step: int
    digests: dict[str, str]
    receipt: dict[str, Any]
    trained: dict[str, int] = field(default_factory=dict)
    after_trial: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """A worker's answer to a sentence of the coordinator.

    Attributes:
        error: An `UpdateRefused` as JSON, or None when all is well.
        step: To `Hold`: where it stops. To `Stage` too, if it stands.
        parked: To both: whether it stands at that boundary already.
        measured: To `Stage`, of a trial: what its metric is now.
    """

    error: dict[str, Any] | None = None
    step: int = 0
    parked: bool = False
    measured: float | None = None


@dataclass(frozen=True, slots=True)
class Computed:
    """What came of a function: the bytes, or why there are none."""

    parcel: dict[str, Any] | None = None
    error: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Applied:
    """One worker has applied one update.

    Attributes:
        trained: How much it had trained by then, by a measure that does not depend on its boundaries.
    """

    digest: str
    step: int
    at: float
    stall_secs: float
    trained: int = 0


_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        *(Proposal, Paused, Parked, Request),
        *(Stage, Drop, Hold, Aim, Compute, Go, Free, Advance),
        *(Replay, Resume, Again, Verified, Failed),
        *(Examine, Lend, Weigh, Audited, Cut, Settle),
        *(Answer, Computed, Applied, Examined, Weighed, Condemned, Tried, Settled),
    )
}


def encode(message: Any) -> str:
    """The JSON text of a message."""
    # Not `asdict`: that would copy all of a parcel's description first.
    content = {one.name: getattr(message, one.name) for one in fields(message)}
    return json.dumps({"kind": type(message).__name__, **content}, separators=(",", ":"))


def decode(text: str) -> Any:
    """The message in a JSON text."""
    content = json.loads(text)
    return _KINDS[content.pop("kind")](**content)
