"""The exceptions of replicast.

ReplicastError
├── ClusterError        the cluster description is invalid: TF_CONFIG, ports, number of workers
├── LaunchRefused       `replicast run` cannot start: no such script, the run directory is in use
│   └── ServeRefused    `replicast serve` cannot start: no token, the address is in use
├── NotSupported        this cannot work on several workers; the message says what can
├── JobFailed           another worker failed, exited early or did not arrive in time
├── UpdateRefused       an update was not accepted; nothing was changed anywhere
│   └── UpdateIdInUse   another update has the same id
├── UpdateFailed        an update was committed, or may have been, and then failed
│   └── ReplicasDiverged    the workers' digests differ
├── UpdatePending       an update is not applied yet, and waiting longer here cannot help
├── CheckpointError     a checkpoint is missing, incomplete, or of another model
├── PayloadRemoved      the values of an update are not kept any more
├── NotFound            there is no such run, update, variable or log
├── NoAnswer            the job is not running, or has not answered in time
├── RequestRefused      the job, or its server, answered why it does not do what it was asked for
├── RequestFailed       a request did not arrive: no server, no right to it, an inbox that cannot be written
└── FileDamaged         a file is damaged, cannot be read, or is not what it should be

Each has its details as fields, so that code does not have to parse the message. `to_json` and `from_json`
carry an error to another process, where it is raised as the same type: a constructor takes fields by name.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

logger = logging.getLogger("replicast")  # of all modules: what is told and not raised

_LABELS = {"path": "Checkpoint", "step": "Step", "variable": "Variable", "worker": "Worker"}
_LABELS |= {"expected": "Expected", "received": "Received"}


@dataclass(eq=False, repr=False)
class ReplicastError(Exception):
    """The base class of all errors of this package.

    Attributes:
        problem: What is wrong, in one sentence.
    """

    problem: str
    # Or TensorFlow would replace it with one of its own in a `tf.function` of the user.
    ag_pass_through = True
    # The fields that the message names; None: it is the problem as it is, unless there is a remedy.
    _named: ClassVar[tuple[str, ...] | None] = None

    def __post_init__(self) -> None:
        super().__init__(self.problem)
        remedy = getattr(self, "remedy", None)
        if self._named is not None or remedy is not None:
            self._say(self.problem, remedy)

    def _say(self, problem: str, remedy: str | None) -> None:
        """Sets the message: the problem, what is known of it, and what to do; one sentence each."""
        known = [(name, getattr(self, name)) for name in self._named or ()]
        labelled = [f"{_LABELS[name]}: {value}" for name, value in known if value is not None]
        self.args = (" ".join(_sentence(part) for part in (problem, *labelled, remedy) if part),)

    def to_json(self) -> dict[str, Any]:
        """The type and the fields as JSON values, for a caller in another process."""
        fields = {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}
        told: dict[str, Any] = {"type": type(self).__name__}
        for name, value in fields.items():
            told[name] = value if value is None or isinstance(value, int | dict) else str(value)
        return told

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Reads what `to_json` of this class or of a subclass wrote; ignores what later versions add."""
        kind: Any = _kinds(cls).get(str(fields.get("type")), cls)
        given = {"problem": "No reason is given", **fields}
        names = [name for name in inspect.signature(kind).parameters if name in given]
        made: Self = kind(**{name: _plain(name, given[name]) for name in names})
        return made


def _kinds(cls: type[ReplicastError]) -> dict[str, type[ReplicastError]]:
    found = {cls.__name__: cls}
    for kind in cls.__subclasses__():
        found |= _kinds(kind)
    return found


def _plain(name: str, value: object) -> object:
    """A field that another process sent, as the type that it must have."""
    if name == "digests":
        given = value if isinstance(value, Mapping) else {}
        return {int(rank): str(digest) for rank, digest in given.items() if str(rank).isdecimal()}
    if value is None or name in ("worker", "step", "status"):
        return value if isinstance(value, int) else None
    return str(value)


@dataclass(eq=False, repr=False, kw_only=True)
class ClusterError(ReplicastError):
    """The description of the cluster is invalid.

    Attributes:
        received: What was found.
        remedy: What to do about it.
    """

    received: object = None
    remedy: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.received is not None:  # At the end, without a full stop: it may be a whole TF_CONFIG.
            self.args = (f"{self.args[0]} Received: {self.received}",)


@dataclass(eq=False, repr=False, kw_only=True)
class LaunchRefused(ReplicastError):  # noqa: N818 - reads as a sentence: raise LaunchRefused
    """The launcher started nothing, because the job could not succeed.

    Attributes:
        remedy: What to do about it.
    """

    remedy: str


class ServeRefused(LaunchRefused):
    """The page cannot be served as asked."""


class NotSupported(ReplicastError):  # noqa: N818 - reads as a sentence: raise NotSupported
    """This cannot work on several workers; it would fail or hang later.

    Attributes:
        what: What was requested.
        remedy: What to do instead.
    """

    def __init__(self, what: str, *, reason: str, remedy: str) -> None:
        super().__init__(f"{what} is not supported here: {reason}")
        self._say(self.problem, remedy)
        self.what = what
        self.reason = reason
        self.remedy = remedy


@dataclass(eq=False, repr=False, kw_only=True)
class JobFailed(ReplicastError):  # noqa: N818 - the job failed, not this process
    """The job failed on another worker.

    Attributes:
        worker: The rank of the worker that failed first, if known.
    """

    worker: int | None = None


@dataclass(eq=False, repr=False, kw_only=True)
class UpdateRefused(ReplicastError):  # noqa: N818 - reads as a sentence: raise UpdateRefused
    """An update was not accepted. Nothing was changed on any worker.

    Attributes:
        variable: The variable concerned, if any.
        expected: What would have been accepted.
        received: What was found instead.
        worker: The rank of the worker that refused, if it was a worker.
        remedy: What to do about it.
    """

    variable: str | None = None
    expected: str | None = None
    received: str | None = None
    worker: int | None = None
    remedy: str | None = None
    _named = ("variable", "worker", "expected", "received")


class UpdateIdInUse(UpdateRefused):
    """Another update, with other content, has the same id. Nothing was changed on any worker."""


@dataclass(eq=False, repr=False, kw_only=True)
class UpdateFailed(ReplicastError):  # noqa: N818 - the update failed
    """An update was committed, or may have been, and then failed.

    Attributes:
        update_id: The id of the update.
        worker: The rank of the worker that it failed on, if known.
        step: The step at which it was to be applied, if known.
    """

    update_id: str | None = None
    worker: int | None = None
    step: int | None = None


@dataclass(eq=False, repr=False, kw_only=True)
class ReplicasDiverged(UpdateFailed):
    """The replicas differ where they must be equal bit for bit.

    Attributes:
        digests: The digest that each worker reported, by rank.
    """

    digests: Mapping[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.digests = dict(self.digests)


@dataclass(eq=False, repr=False, kw_only=True)
class UpdatePending(ReplicastError):  # noqa: N818 - the update is pending, which is not a failure
    """An update is neither applied nor refused yet, and waiting longer here cannot change that.

    Attributes:
        update_id: The id of the update.
        stage: Its current stage.
    """

    stage: str | None = None
    update_id: str | None = None


@dataclass(eq=False, repr=False, kw_only=True)
class CheckpointError(ReplicastError):
    """A checkpoint is missing, incomplete, or does not match the model.

    Attributes:
        path: The checkpoint's directory, if it concerns one.
        step: The requested step, if a step was requested.
        variable: The variable concerned, if any.
        expected: What would have been accepted.
        received: What was found instead.
        remedy: What to do about it.
    """

    path: Any = None
    step: int | None = None
    variable: str | None = None
    expected: str | None = None
    received: str | None = None
    remedy: str | None = None
    _named = ("path", "step", "variable", "expected", "received")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.path = None if self.path is None else Path(str(self.path))


class FileDamaged(ReplicastError):  # noqa: N818 - reads as a sentence: raise FileDamaged
    """A file is damaged, cannot be read, or is not what it should be: of a run directory, or an update's.

    Attributes:
        path: The file.
        problem: What is wrong with it.
        verdict: The same in two words: "is damaged", "cannot be read", "is too large".
        expected: What would have been accepted.
        received: What was found instead.
        remedy: What to do about it.
    """

    _named = ("expected", "received")

    def __init__(
        self,
        path: object,
        problem: str = "",
        *,
        verdict: str = "is damaged",
        expected: str | None = None,
        received: str | None = None,
        remedy: str | None = None,
    ) -> None:
        self.path = Path(str(path))
        self.verdict = verdict
        self.expected = expected
        self.received = received
        self.remedy = remedy
        super().__init__(problem)
        self._say(self.headline, remedy)

    @property
    def headline(self) -> str:
        """Which file, and what is wrong with it."""
        return f"{self.path} {self.verdict}" + (f": {self.problem}" if self.problem else "")


class PayloadRemoved(ReplicastError):  # noqa: N818 - reads as a sentence: raise PayloadRemoved
    """The values of an update are not kept any more.

    They are removed when every checkpoint that is kept contains the update.

    Attributes:
        update_id: The update's id.
        remedy: What to do about it.
    """

    def __init__(
        self,
        update_id: str,
        problem: str = "every checkpoint that is kept contains it",
        *,
        remedy: str = "Call replicas.restore() before training, or use another run directory",
    ) -> None:
        super().__init__(problem)
        self._say(f"The values of update {update_id} are not kept any more: {problem}", remedy)
        self.update_id = update_id
        self.remedy = remedy


class NotFound(ReplicastError):  # noqa: N818 - reads as a sentence: raise NotFound
    """There is no such run, update, variable, checkpoint or log."""


class NoAnswer(ReplicastError):  # noqa: N818 - reads as a sentence: raise NoAnswer
    """The job was asked for something, and is not running or has not answered in time."""


@dataclass(eq=False, repr=False, kw_only=True)
class RequestRefused(ReplicastError):  # noqa: N818 - reads as a sentence: raise RequestRefused
    """The job was asked for something, and it or its server has answered why it does not do it.

    Attributes:
        remedy: What to do about it.
    """

    remedy: str | None = None


@dataclass(eq=False, repr=False, kw_only=True)
class RequestFailed(ReplicastError):  # noqa: N818 - reads as a sentence: raise RequestFailed
    """A request to a run did not arrive: its server cannot be reached or did not accept it; the disk is full.

    Attributes:
        status: The status code of the server's answer; None when there was no answer.
    """

    status: int | None = None


for _kind in _kinds(ReplicastError).values():  # msgspec would read a dataclass by itself, not by `from_json`
    if "__dataclass_fields__" in vars(_kind):
        del _kind.__dataclass_fields__
del _kind


def printable(text: object) -> str:
    """Text that others chose, in one line and without control characters, to be logged or shown."""
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in str(text)
    )


# What TensorFlow and Keras say before the reason of an error: of the graph, of the layer.
_BEFORE_REASON = re.compile(
    r"Graph execution error:|Exception encountered when calling .*|Detected at node .*|Node: .*|"
    r"\d+ root error\(s\) found\."
)


def exception_sentence(lines: Iterable[str]) -> str:
    """The class of an exception and the one sentence of its reason, from the lines that Python prints."""
    lines = itertools.dropwhile(lambda line: line[:1].isspace(), lines)  # the place of a SyntaxError
    kind, colon, text = next(lines, "").partition(": ")
    if text == "in user code:":  # The traceback of a `tf.function` follows, indented, with its exception.
        within = [line[4:] for line in itertools.takewhile(lambda line: not line[:1].strip(), lines)]
        raised = [line for line in within if line[:1].strip() and not line.startswith("File ")]
        return exception_sentence(raised[-1:]) if raised else f"{kind}: {text}"
    if _BEFORE_REASON.fullmatch(text):
        first_of_several = re.compile(r"\s+\(0\) [A-Z_]+: +")
        for line in lines:
            is_reason = line[:1].strip() and not _BEFORE_REASON.fullmatch(line)
            if is_reason or first_of_several.match(line):
                text = first_of_several.sub("", line)
                break
    return f"{kind.rpartition('.')[2]}{colon}{text.strip()}"


def refusal_of(error: Exception) -> UpdateRefused:
    """Turns any error that an update caused into a refusal of that update."""
    if isinstance(error, UpdateRefused):
        return error
    if isinstance(error, FileDamaged):
        expected, received = error.expected, error.received
        return UpdateRefused(error.headline, expected=expected, received=received, remedy=error.remedy)
    message = str(error)[:500]
    refusal = UpdateRefused(
        f"Handling the update caused an unexpected error ({type(error).__name__}: {message})",
        remedy="See the log of worker 0 for details",
    )
    refusal.__cause__ = error
    return refusal


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?", "…")) else f"{text}."
