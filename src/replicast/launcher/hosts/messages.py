"""What the launchers of a job tell each other: each message holds the whole state of its side."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from replicast.config import PEER_FAILED, TOLD_TO_END
from replicast.launcher.interruptions import STOP_SIGNALS
from replicast.strictjson import described

MAX_LINES, MAX_COLUMNS = 24, 400
"""How much of the end of a worker's log a failure carries to the other hosts."""
_MAX_COUNT, _MAX_SIGNAL = 1 << 31, 64


class Phase(enum.Enum):
    """What the first launcher wants all launchers to do."""

    WAIT = "wait"  # Start nothing: hosts are missing, or still end their workers.
    RUN = "run"  # Run the attempt.
    END = "end"  # End the attempt: a worker failed, a host was lost, or somebody stopped the job.
    OVER = "over"  # The job is over: exit with the code.


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why an attempt failed: a worker, or a whole host if `worker` is None."""

    host: int
    worker: int | None = None
    code: int = PEER_FAILED
    frozen: bool = False
    ran_secs: float = 0.0
    log: str = ""
    why: str = ""
    lines: tuple[str, ...] = ()
    reported_by: int = 0

    @property
    def shell_code(self) -> int:
        """The exit code as in a shell: 128 plus the number of the signal."""
        return self.code if self.code >= 0 else 128 - self.code

    @property
    def is_failure(self) -> bool:
        """Whether something went wrong: not if the worker saved and exited because it was told to."""
        return self.code != TOLD_TO_END


def first_cause(failures: list[Failure]) -> Failure | None:
    """The failure to report: a frozen worker, one that failed by itself, a lost host, else the first."""
    frozen = [failure for failure in failures if failure.frozen]
    by_itself = [
        failure for failure in failures if failure.worker is not None and failure.code != PEER_FAILED
    ]
    lost = [failure for failure in failures if failure.worker is None]
    return next(iter(frozen or by_itself or lost or failures), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What must be the same on all hosts of a job."""

    version: str
    program: tuple[str, ...]
    workers: int
    nodes: int
    hosts: tuple[str, ...]
    port: int
    max_restarts: int


DIFFERENCES = {
    "version": "another version of replicast",
    "program": "another program or other arguments",
    "workers": "another number of workers (-n)",
    "nodes": "another number of hosts",
    "hosts": "other hosts (--hosts)",
    "port": "another --port",
    "max_restarts": "another --max-restarts",
}


def difference(ours: Identity, theirs: Identity) -> str:
    """In words, the first thing in which two launchers differ; empty if they belong together."""
    for name, what in DIFFERENCES.items():
        mine, other = getattr(ours, name), getattr(theirs, name)
        if mine != other:
            return f"{what}: {_shown(mine)} on the first host, {_shown(other)} on the other"
    return ""


def two_firsts(ours: FirstOf, theirs: FirstOf) -> str:
    """In words: two launchers of one job take themselves for the first one; empty if they do not.

    Theirs may be a job of its own, on other ports or hosts; or this launcher's own question, which a stranger
    has passed on.
    """
    if not ours.hosts or not theirs.hosts or ours.hosts == theirs.hosts or ours.port != theirs.port:
        return ""
    if ours.hosts[0] not in theirs.hosts or theirs.hosts[0] not in ours.hosts:
        return ""
    lists = f"one with --hosts {_shown(ours.hosts, ',')}, the other with --hosts {_shown(theirs.hosts, ',')}"
    return f"both take themselves for the launcher of the first host, {lists}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first message of a launcher to the first one."""

    node: int
    session: str
    address: str
    identity: Identity


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The state of one launcher."""

    next_attempt: int
    attempt: int | None = None
    restarts: int = 0
    running: bool = False
    failure: Failure | None = None
    signal: int | None = None
    left_behind: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What all launchers shall do now."""

    session: str
    phase: Phase
    attempt: int
    restarts: int
    max_restarts: int
    hosts: tuple[str, ...]
    missing: tuple[int, ...] = ()
    failure: Failure | None = None
    signal: int | None = None
    stopped_on: int = 0
    unreached: tuple[int, ...] = ()
    code: int = 0


@dataclass(frozen=True, slots=True)
class Ask:
    """A launcher without `--run-dir` asks the first one for the name of the run directory."""

    node: int


@dataclass(frozen=True, slots=True)
class Told:
    """The first launcher's answer."""

    run_name: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The first launcher's answer to one that does not belong to the job."""

    why: str


@dataclass(frozen=True, slots=True)
class FirstOf:
    """A launcher that takes itself for the first one asks whether another one does too."""

    hosts: tuple[str, ...]
    port: int


_KINDS: dict[str, type[Hello] | type[Report] | type[Order] | type[Ask] | type[Told] | type[FirstOf]] = {
    "hello": Hello,
    "report": Report,
    "order": Order,
    "ask": Ask,
    "told": Told,
    "first_of": FirstOf,
}
Message = Hello | Report | Order | Ask | Told | FirstOf | Refused


def to_json(message: Message) -> dict[str, Any]:
    """The JSON object of a message."""
    if isinstance(message, Refused):
        return {"refused": message.why}
    kind = next(name for name, kind in _KINDS.items() if isinstance(message, kind))
    fields = asdict(message)
    if isinstance(message, Order):
        fields["phase"] = message.phase.value
    return {kind: fields}


def from_json(fields: Mapping[str, Any], nodes: int) -> Message:
    """Reads a message."""
    if len(fields) != 1:
        raise ValueError(f"not a message of a launcher: {str(fields)[:200]}")
    ((name, content),) = fields.items()
    if name == "refused" and isinstance(content, str):
        return Refused(content)
    if name not in _KINDS or not isinstance(content, dict):
        raise ValueError(f"not a message of a launcher: {str(fields)[:200]}")
    message = described(_KINDS[name], name, content)
    wrong = [] if isinstance(message, Hello | Ask | Told | FirstOf) else _wrong_values(message, nodes)
    if wrong:
        raise ValueError(f"no launcher sends a {name} with {', '.join(wrong)}")
    return message


def _wrong_values(message: Report | Order, nodes: int) -> list[str]:
    """What fits the type of its field, but cannot be: signals, exit codes, hosts and counts."""
    attempts = (message.attempt, message.next_attempt if isinstance(message, Report) else None)
    possible = {
        f"the signal {message.signal}": message.signal is None or message.signal in STOP_SIGNALS,
        f"the attempts {attempts}": all(one is None or 0 <= one < _MAX_COUNT for one in attempts),
        f"{message.restarts} restarts": 0 <= message.restarts < _MAX_COUNT,
    }
    if isinstance(message, Order):
        indices = {message.stopped_on, *message.missing, *message.unreached}
        possible |= {
            f"the exit code {message.code}": 0 <= message.code < 256,
            f"{len(message.hosts)} hosts": len(message.hosts) == nodes,
            f"the hosts {sorted(indices)} of {nodes}": indices <= set(range(nodes)),
        }
    failure = message.failure
    if failure is not None:
        indices = {failure.host, failure.reported_by}
        possible |= {
            f"a failure on the hosts {sorted(indices)} of {nodes}": indices <= set(range(nodes)),
            f"a failure of worker {failure.worker}": failure.worker is None or failure.worker >= 0,
            f"a failure with the code {failure.code}": -_MAX_SIGNAL <= failure.code < 256,
            f"a failure after {failure.ran_secs} s": failure.ran_secs >= 0,
        }
    return [value for value, is_possible in possible.items() if not is_possible]


def _shown(value: object, separator: str = " ") -> str:
    text = separator.join(map(str, value)) if isinstance(value, tuple) else str(value)
    return text[:200] or "none"
