"""What somebody outside can ask of a run: one table, and every face is made from it.

A row of the table is a method of `Run` with `@operation`. It says once what there is to say: the name, the
parameters with their types, limits, defaults and help (the docstring's `Args`), the result, and the HTTP
method and path. `OPERATIONS` holds the rows by name. From a row follow

    DirectoryRun    does it, in the method `do_<name>`: the one place that implements it (directory.py)
    ServedRun       sends it over HTTP; written once for all rows (connection.py)
    the page        one route with its checks (page/app.py), and its entry in /openapi.json (page/openapi.py)
    the commands    names, limits and help of their options (cli/)

so that a new operation is a method here, one of `DirectoryRun` and a command. What the job itself must
answer needs more: docs/architecture.md lists it.

Always true:

- GET only reads: an answer may be shared between callers, and is asked for again when the server is away.
  POST acts, needs the token, and is asked for once: the caller must know whether it was done. Two exceptions:
  a push is sent again, since its id makes that a no-op; reading values stops all workers (`stops_workers`),
  and needs the token.
- A parameter that limits an answer or a wait (`clipped`) may be larger in Python than over HTTP, where it is
  lowered to what the server allows. Any other value outside its type is refused with 400.
- Rows are text over HTTP, the same text as on the command line: `3,5,10:20`, where 20 is not included.
- A result is JSON by its `to_json`, inside `{key: …}` where it is a list or a number. Numbers that are not
  finite are text.
- An error arrives as the type that was raised (`errors.py`); its HTTP status follows from that type.
"""

# mypy: disable-error-code="empty-body"
# The rows of `Run` have no body: `operation` gives them one.

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Annotated, Any, Literal, NotRequired, TypedDict, TypeVar, cast, get_args, get_type_hints
from urllib.parse import quote

import msgspec
import numpy as np
from msgspec import Meta, Struct

from replicast.client.metrics import MAX_POINTS, Metrics
from replicast.codec import View, described, json_value, parse_integer
from replicast.core.entries import Receipt, Stage
from replicast.errors import NotFound, ReplicasDiverged, UpdateFailed, UpdatePending, UpdateRefused
from replicast.files import RunPath
from replicast.storage.journal import UpdateView
from replicast.storage.run_files import Annotation, Tags, Text, WorkerNote, absent_secs
from replicast.update.audit_report import AuditReport
from replicast.update.edits import Array
from replicast.update.guard import Examination, check_types, examine
from replicast.update.schema import Schema
from replicast.update.tensorfiles import tensor_chunks
from replicast.update.trial import MAX_INCREASE, MAX_METRIC_NAME, MAX_STEPS, Trial
from replicast.update.update import MAX_STEP, Update

FOREVER_SECS = 10 * 365 * 86_400.0  # The timeout of `Pushed.result` without one.
MAX_LOG = 1000  # Updates in one answer of a server.
MAX_ROWS = 10_000_000
_SLOW, _MATTERS = 1.5, 0.1  # So many times as long as the others; by so much of a whole step.
PULLED = "pulled"  # The entry of a file of pulled values that says what they are.


def clipped(least: float, most: float) -> Meta:
    """The limits of a parameter that a server lowers to the largest value it allows."""
    return Meta(ge=least, le=most, extra={"clipped": True})


Secs = Annotated[float, clipped(0, 300)]
Step = Annotated[int, Meta(ge=0, le=MAX_STEP - 1)]
Moment = Annotated[float, Meta(ge=0, le=1e12)]
UpdateId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
Rank = Annotated[int, Meta(ge=0, le=10**6)]
# `rows_of` checks it, with a better message than that it does not match a pattern.
_ROWS = {"pattern": r"^\d{1,15}(:\d{1,15})?(,\d{1,15}(:\d{1,15})?)*$"}
RowsText = Annotated[str, Meta(max_length=4000, extra_json_schema=_ROWS)]


class TrialOptions(Struct, forbid_unknown_fields=True, kw_only=True):
    """What can be said over HTTP about an update that is proposed, and in Python by `Update` and `Trial`."""

    dry_run: bool = False
    id: UpdateId | None = None
    note: Text | None = None
    author: Text | None = None
    trial_steps: Annotated[int, Meta(ge=1, le=MAX_STEPS)] | None = None
    trial_metric: Annotated[str, Meta(min_length=1, max_length=MAX_METRIC_NAME)] = "loss"
    trial_max_increase: Annotated[float, Meta(ge=-MAX_INCREASE, le=MAX_INCREASE)] = 0.0
    trial_mode: Literal["min", "max"] = "min"

    def trial(self) -> Trial | None:
        """The condition of its trial, if any."""
        if self.trial_steps is None:
            return None
        return Trial(self.trial_steps, self.trial_metric, self.trial_max_increase, self.trial_mode)

    @staticmethod
    def of(trial: Trial | None) -> dict[str, Any]:
        """The options for a trial."""
        return {} if trial is None else {f"trial_{name}": value for name, value in trial.to_json().items()}


class PushOptions(TrialOptions, forbid_unknown_fields=True, kw_only=True):
    """What to do with the tensors of a plain file; without an operation the file is a saved update."""

    operation: (
        Literal["add", "assign", "scale", "blend", "add_rows", "assign_rows", "add_low_rank"] | None
    ) = None
    weight: Annotated[float, Meta(ge=0, le=1)] | None = None
    reset_slots: bool = False
    allow_nonfinite: bool = False


class RateOptions(TrialOptions, forbid_unknown_fields=True, kw_only=True):
    """A new learning rate. Where there are several, name the variable."""

    value: Annotated[float, Meta(gt=0)]  # One below 0 trains backwards where no schedule computes the rate.
    variable: Annotated[str, Meta(min_length=1, max_length=1000)] = "learning_rate"
    at_step: Step | None = None
    next_start: bool = False


class PullOptions(Struct, forbid_unknown_fields=True, kw_only=True):
    """The form of the values: numbers, or a file, which may be larger."""

    format: Literal["json", "safetensors"] = "json"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of an operation; `default` is `inspect.Parameter.empty` where there is none."""

    name: str
    kind: Any
    default: Any
    help: str


_Method = TypeVar("_Method", bound=Callable[..., Any])


@dataclass(frozen=True)
class RunOperation:
    """One row of the table."""

    name: str
    method: Literal["GET", "POST"]
    path: str  # Below the run's own address.
    declared: Callable[..., Any]
    key: str = ""  # Of a result that is no object.
    local: tuple[str, ...] = ()  # Parameters that are not sent as such.
    options: type[Struct] | None = None  # Further ones, over HTTP only.
    takes_file: bool = False
    stops_workers: bool = False
    takes_secs: float = 0.0  # How long the job may take to answer, where no `timeout` says it.

    @functools.cached_property
    def parameters(self) -> dict[str, Parameter]:
        """Those of the method, in order."""
        kinds = get_type_hints(self.declared, include_extras=True)
        # The section `Args` of the docstring (Google style): each entry begins with its name.
        section = (inspect.getdoc(self.declared) or "").partition("\nArgs:\n")[2].partition("\n\n")[0]
        entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
        helps = {name: " ".join(text.split()) for name, text in entries}
        given = list(inspect.signature(self.declared).parameters.values())[1:]
        return {
            one.name: Parameter(one.name, kinds[one.name], one.default, helps.get(one.name, ""))
            for one in given
        }

    @functools.cached_property
    def returns(self) -> Any:
        """The type of the result."""
        return get_type_hints(self.declared).get("return")

    @property
    def summary(self) -> str:
        """What it does, in a sentence."""
        return (self.declared.__doc__ or "").strip().partition("\n")[0]

    @property
    def proposes(self) -> bool:
        """Whether it hands an update to the job."""
        return self.returns is Pushed or Pushed in get_args(self.returns)

    @functools.cached_property
    def in_path(self) -> tuple[str, ...]:
        """The parameters that are part of the path."""
        return tuple(re.findall(r"\{(\w+)\}", self.path))

    @functools.cached_property
    def fields(self) -> type[Struct]:
        """The parameters beside the path, as a query or a JSON object has them."""
        made: list[Any] = []
        for one in self.parameters.values():
            if one.name not in (*self.in_path, *self.local):
                kind = RowsText | None if one.name == "rows" else one.kind
                made.append((one.name, kind) if one.default is _REQUIRED else (one.name, kind, one.default))
        bases = () if self.options is None else (self.options,)
        return msgspec.defstruct(self.name, made, bases=bases, forbid_unknown_fields=True, kw_only=True)

    def target(self, arguments: Mapping[str, Any]) -> str:
        """The path for some arguments; raises `NotFound` for names that no address can have."""
        parts = {name: str(arguments[name]) for name in self.in_path}
        for text in parts.values():
            if text in ("", ".", ".."):
                raise NotFound(f"There is no update or variable {text!r}.")
        # The name of a variable has slashes.
        return self.path.format(**{name: quote(parts[name], safe="/" * (name == "name")) for name in parts})

    def content(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments beside the path as they are sent, within the server's limits."""
        sent = {}
        for name, value in arguments.items():
            if value is None or name in (*self.in_path, *self.local):
                continue
            limit = most_of(self.parameters[name].kind)
            if name == "rows":
                value = rows_text(value)
            sent[name] = value if limit is None else min(value, limit)
        return sent

    def encoded(self, result: Any) -> Any:
        """A result as JSON values."""
        value = json_value(result)
        return {self.key: value} if self.key else value

    def decoded(self, answer: Any) -> Any:
        """The result that JSON values describe."""
        return described(self.returns, self.name, answer[self.key] if self.key else answer, strict=False)


OPERATIONS: dict[str, RunOperation] = {}
_REQUIRED = inspect.Parameter.empty


def operation(method: Literal["GET", "POST"], path: str, **more: Any) -> Callable[[_Method], _Method]:
    """Puts a method of `Run` into the table; by itself, the method asks `Run.perform`."""

    def add(declared: _Method) -> _Method:
        row = OPERATIONS[declared.__name__] = RunOperation(declared.__name__, method, path, declared, **more)
        signature = inspect.signature(declared)

        @functools.wraps(declared)
        def ask(self: Run, *args: Any, **named: Any) -> Any:
            bound = signature.bind(self, *args, **named)
            bound.apply_defaults()
            arguments = dict(bound.arguments)
            del arguments["self"]
            if row.takes_file:
                check_types(arguments["update"], arguments["trial"])
            return self.perform(row, arguments)

        return cast("_Method", ask)

    return add


def most_of(kind: Any) -> float | None:
    """The largest value of a clipped parameter."""
    for one in (kind, *get_args(kind)):
        for meta in getattr(one, "__metadata__", ()):
            if isinstance(meta, Meta) and (meta.extra or {}).get("clipped"):
                return meta.le
    return None


def rows_of(text: str, most: int = MAX_ROWS) -> tuple[int, ...]:
    """The rows that a text such as `3,5,10:20` names, in their order; a `ValueError` if there are none."""
    found: list[int] = []
    for part in text.split(","):
        first, colon, end = part.strip().partition(":")
        try:
            start = parse_integer(first)
            stop = parse_integer(end) if colon else start + 1
        except ValueError as error:
            said = "Rows are given as 3,5,10:20, where 20 is not included. Received: "
            raise ValueError(f"{said}{part[:80]}") from error
        if start < 0:
            raise ValueError(f"Rows are counted from 0. Received: {part[:80]}")
        if not start < stop or len(found) + stop - start > most:
            raise ValueError(
                f"A range must not be empty, and at most {most} rows can be read. Received: {part[:80]}"
            )
        found.extend(range(start, stop))
    return tuple(found)


def rows_text(rows: Sequence[int]) -> str:
    """Rows as `rows_of` reads them."""
    return ",".join(f"{start}:{stop}" if stop - start > 1 else str(start) for start, stop in ranges_of(rows))


def ranges_of(rows: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Single rows as ranges, in the given order: each from its first row to the one behind its last."""
    ranges: list[tuple[int, int]] = []
    for row in rows:
        if ranges and ranges[-1][1] == row:
            ranges[-1] = ranges[-1][0], row + 1
        else:
            ranges.append((row, row + 1))
    return tuple(ranges)


# What a run tells.


class Brief(View, frozen=True):
    """The state of a run in short: cheap to read, also for many runs.

    Attributes:
        run: Its directory or address.
        state: training, waiting (running, not in a training loop), lost, finished, never started, …
        sentence: The same in plain words.
        running: Whether a worker was heard from lately.
        step: The last step that a worker has finished; None before the first note.
        workers: How many the job has.
        heard_at: When a worker was last heard from, in seconds since 1970.
        waits_for: Why no update is applied although the job trains, if that is so.
        began_at: When its first attempt began, in seconds since 1970.
        metrics: The last ones: `step`, `time`, `values`.
        annotation: What people have noted about the run.
    """

    run: str
    state: str
    sentence: str
    running: bool
    step: int | None
    workers: int
    heard_at: float | None
    waits_for: str = ""
    began_at: float | None = None
    metrics: LastMetrics | None = None
    annotation: Annotation = Annotation()


class Start(View, frozen=True):
    """One start of a job, by its launcher or by hand.

    Attributes:
        attempt: Its number.
        at: When worker 0 took over the run, in seconds since 1970.
        host: The host of worker 0.
        command: The script and its arguments; `…` is in place of what may be a secret.
        versions: Of Python and of the packages that matter.
        commit: Of the git repository of the script, with `-dirty` if files in it were changed; "" if unknown.
    """

    attempt: int
    at: float
    host: str = ""
    command: tuple[str, ...] = ()
    versions: Mapping[str, str] = {}
    commit: str = ""


class SlowWorker(View, frozen=True):
    """A worker that holds up the others: what it does itself in a step takes it much longer than them.

    Attributes:
        own_secs: How long that takes, without waiting for others.
        others_secs: How long it takes the others: their median.
        since: Since when, in seconds since 1970.
    """

    own_secs: float
    others_secs: float
    since: float


class LastMetrics(TypedDict):
    """The last values of the metrics."""

    step: int
    time: float
    values: dict[str, float]
    running: NotRequired[list[str]]  # Those that are of the epoch so far, such as an AUC: not for trials.


class Overview(View, frozen=True, kw_only=True):
    """A run at one moment: what its workers last said, its metrics, its last audit, and its updates.

    `run`, `state`, `sentence`, `running`, `step` and `annotation` are those of `Brief`.

    Attributes:
        time: The moment, in seconds since 1970, by the clock of the job.
        size: How many workers the job has.
        attempt: The current attempt of the job, or the last one.
        journaled: Whether the job keeps a journal.
        workers: What each worker last said.
        metrics: The last ones: `step`, `time`, `values`.
        audit: The last audit. It may be one of an earlier attempt.
        operations: What the job has in progress.
        updates: The last committed ones.
        scheduled: Those that wait for their step.
        waiting: Those that wait in the inbox.
        refused: The last ones that were refused.
        changes: What became of the job: the last lines of states.jsonl.
        evaluations: What the evaluator has found for the last checkpoints, oldest first, as `metrics`.
        starts: How the job was started: the first time, and the last ones, oldest first.
        restarted: How often the launcher has restarted the job.
        problem: What is wrong with the journal: what damaged entries said is missing above.
    """

    run: str
    time: float
    state: str
    sentence: str
    running: bool
    step: int | None
    size: int
    attempt: int
    journaled: bool
    workers: tuple[WorkerNote, ...]
    metrics: LastMetrics | None
    audit: AuditReport | None
    operations: tuple[Mapping[str, Any], ...]
    updates: tuple[UpdateView, ...] = ()
    scheduled: tuple[UpdateView, ...] = ()
    waiting: tuple[UpdateView, ...] = ()
    refused: tuple[UpdateView, ...] = ()
    changes: tuple[Mapping[str, Any], ...] = ()
    evaluations: tuple[LastMetrics, ...] = ()
    starts: tuple[Start, ...] = ()
    restarted: int = 0
    annotation: Annotation = Annotation()
    problem: str = ""

    @property
    def slow(self) -> dict[int, SlowWorker]:
        """The workers that hold up the others, by rank. Known where workers sum through shared memory.

        Steps are not compared: the notes of two workers are of different moments.
        """
        notes = [note for note in self.workers if note.training and note.own_secs and self.running]
        found = {}
        for note in notes:
            others = sorted(one.own_secs or 0.0 for one in notes if one.rank != note.rank)
            usual, own = others[(len(others) - 1) // 2] if others else math.inf, note.own_secs or 0.0
            if own > _SLOW * usual and own - usual > _MATTERS * (note.step_secs or 0.0):
                found[note.rank] = SlowWorker(own, usual, note.own_since or note.time)
        return found

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values; of each worker also the age of its last note, and whether it is slow."""
        made, slow = super().to_json(), self.slow
        for note in made["workers"]:
            silent = self.time - note["time"]
            note |= {"age_secs": silent, "absent": silent > absent_secs(self.size)}
            note["slow"] = json_value(slow.get(note["rank"]))
        return made


class CheckpointView(View, frozen=True, kw_only=True):
    """A checkpoint of a run.

    Attributes:
        step: The boundary whose state it is.
        epoch: The epoch in which it was made.
        batch: The number of finished batches of that epoch.
        sequence: The last update of the journal that it contains; 0 for none.
        created_at: Seconds since 1970.
        patched_by: The id of the update that made it from another checkpoint; empty if none did.
    """

    step: int
    epoch: int
    batch: int
    sequence: int
    attempt: int
    created_at: float
    nbytes: int
    state_digest: str
    metrics: Mapping[str, float]
    patched_by: str = ""


class Pulled(View, frozen=True, eq=False):
    """The values of one variable, or of some of its rows.

    Attributes:
        name: Its full name.
        step: The boundary whose values they are.
        digest: The digest of these values; of a running job, worker 0's.
        source: "job", or "checkpoint N" when none is running.
        array: The values.
        rows: The rows that were asked for; None for all.
        digests: Of these values on each worker of a running job, by rank: they differ if the replicas do.
    """

    name: str
    step: int
    digest: str
    source: str
    array: Array
    rows: tuple[int, ...] | None = None
    digests: Mapping[int, str] = {}

    @property
    def differing(self) -> tuple[int, ...]:
        """The workers whose values are not those of worker 0, which are the ones given here."""
        return tuple(sorted(rank for rank, digest in self.digests.items() if digest != self.digest))

    def to_json(self) -> dict[str, Any]:
        """Everything but the values."""
        made = super().to_json()
        del made["array"]
        return made | {"shape": list(self.array.shape), "dtype": self.array.dtype.name}

    def tensors(self) -> dict[str, Array]:
        """What `push --assign` reads; of rows, with their indices, what `push --assign-rows` reads."""
        indices = {} if self.rows is None else {f"{self.name}.indices": np.array(self.rows, np.int64)}
        return {self.name: self.array, **indices}

    def file_chunks(self) -> Iterator[bytes | memoryview]:
        """The same as a safetensors file, piece by piece; its metadata has everything else."""
        return tensor_chunks(self.tensors(), {PULLED: json.dumps(self.to_json())})


# The table.


class Run:
    """A run. Every method may be called from any thread; none needs TensorFlow.

    Attributes:
        where: Its directory or address, as it is given to a command.

    Every method may raise `FileDamaged` when a file of the run is not what was written, and, for a served
    run, `RequestFailed` when the server cannot be reached or does not accept the request.
    """

    where: str
    path: RunPath | None = None  # Its directory, if this process reads it there.
    poll_secs: float  # The interval between two reads of an update that somebody waits for.

    def perform(self, operation: RunOperation, arguments: dict[str, Any]) -> Any:
        """Does what a row of the table says, with all of its arguments."""
        return getattr(self, f"do_{operation.name}")(**arguments)

    @operation("GET", "")
    def brief(self) -> Brief:
        """The state of the run in short. Cheap: does not read the journal."""

    @operation("GET", "/status")
    def status(self) -> Overview:
        """Workers, metrics, what is under way, updates and what waits."""

    @operation("GET", "/schema")
    def schema(self) -> Schema:
        """The variables that an update may change."""

    @operation("GET", "/updates", key="updates")
    def log(self, last: Annotated[int, clipped(1, MAX_LOG)] | None = None) -> list[UpdateView]:
        """The committed updates, in the order in which they are applied.

        Args:
            last: The number of updates, counted from the last one. A served run lists at most the last 1,000.
        """

    @operation("GET", "/updates/{which}", local=("max_bytes",))
    def show(self, which: str | int, max_bytes: int | None = None) -> UpdateView:
        """Everything known about one update, with a summary of the values of its edits.

        Args:
            which: Its number in the journal, its id, or the beginning of its id.
            max_bytes: Do not read the values of a larger one: `details` is None then. Default: no limit.

        Raises:
            NotFound: There is none, or several may be meant.
        """

    @operation("GET", "/updates/{update_id}/stage")
    def look(self, update_id: str, thoroughly: bool = False) -> UpdateView:
        """The current stage of one update, by its full id. Cheap, for polling.

        Args:
            update_id: Its id.
            thoroughly: Read the journal in any case: a job that died may not have written its last note.

        Raises:
            NotFound: No update has this id.
        """

    @operation("GET", "/audits", key="audits")
    def audits(self, last: Annotated[int, clipped(1, 1000)] = 10) -> list[AuditReport]:
        """The last audits, oldest first.

        Args:
            last: The number of reports.
        """

    @operation("POST", "/audit")
    def audit(self, timeout: Secs = 300.0, author: Text = "") -> AuditReport:
        """Asks the job for an audit at its next step; blocks at most `timeout` seconds.

        Args:
            timeout: How many seconds to wait at most.
            author: Who asks. Default: the user of this process.

        Raises:
            NoAnswer: The job is not running, has ended, or has not made one in time.
        """

    def examine(self, update: Update) -> Examination:
        """What an update would do, and all that is wrong with it. Nothing is sent to the job."""
        return examine(update, self.schema())

    @operation("POST", "/updates", local=("update", "trial"), options=PushOptions, takes_file=True)
    def push(
        self,
        update: Update,
        at_step: Step | None = None,
        trial: Trial | None = None,
        next_start: bool = False,
    ) -> Pushed:
        """Hands an update to the job, which applies it on every worker at the same step, or on none.

        The same update again, by its id, is a no-op.

        Args:
            update: The update.
            at_step: When. Default: as soon as possible.
            trial: The condition of its trial, if any.
            next_start: Also when the job is not running: its next start applies it before it trains.

        Raises:
            UpdateRefused: It does not fit, another update has its id, the step is past, or the job is not
                running and `next_start` is not given.
        """

    @operation("POST", "/updates/{update_id}/withdraw", takes_secs=30.0)
    def withdraw(self, update_id: str, note: Text = "", author: Text = "") -> UpdateView:
        """Takes back an update that is not committed yet; a running job is asked, for at most 30 s.

        Args:
            update_id: Its id, or the beginning of it.
            note: Why.
            author: Who. Default: the user of this process.

        Raises:
            NotFound: There is no such update.
            UpdateRefused: It is too late, or it was refused or withdrawn before.
            NoAnswer: The job has taken it and does not answer.
        """

    @operation("POST", "/updates/{which}/revert")
    def revert(
        self,
        which: str | int,
        note: Text = "",
        dry_run: bool = False,
        force: bool = False,
        next_start: bool = False,
        author: Text = "",
    ) -> Pushed | Examination:
        """Asks the job for a new update that undoes one that was applied.

        Args:
            which: As in `show`.
            note: Why.
            dry_run: Only say what it would do.
            force: Also when it is reverted already, or when later updates have changed the same variables.
            next_start: Also when the job is not running: it takes the revert when it is started again.
            author: Who. Default: the user of this process.

        Raises:
            NotFound: There is no such update.
            UpdateRefused: It was not applied, or cannot be undone, later updates have changed the same
                variables, or the job is not running.
        """

    @operation("POST", "/annotation")
    def annotate(
        self,
        which: str | int | None = None,
        note: Text | None = None,
        tags: Tags | None = None,
        author: Text = "",
    ) -> Annotation:
        """Keeps a note and tags with the run, or with one of its updates; also when no job is running.

        Args:
            which: The update, as in `show`. Default: the run itself.
            note: The note, in place of the one before. Default: that one stays.
            tags: At most 20, in place of the ones before. Default: those stay.
            author: Who. Default: the user of this process.

        Raises:
            NotFound: There is no such update.
            RequestRefused: The note or a tag is too long, or there are too many tags.
        """

    @operation("GET", "/variables/{name}", local=("max_bytes",), options=PullOptions, stops_workers=True)
    def pull(
        self,
        name: str,
        rows: Sequence[int] | None = None,
        timeout: Secs = 300.0,
        max_bytes: int | None = None,
    ) -> Pulled:
        """The values of a variable at one step of the running job, or in the last checkpoint when none runs.

        Args:
            name: Its name, or a suffix that names exactly one.
            rows: Only these rows.
            timeout: How long to wait for the job.
            max_bytes: The largest size of the values. Default: no limit but the job's.

        Raises:
            NotFound: There is no such variable or row, or nothing runs and there is no checkpoint.
            NoAnswer: The job has not answered in time.
            RequestRefused: These are too many values, for the job or for `max_bytes`.
        """

    @operation("POST", "/checkpoint", key="step")
    def checkpoint(self, timeout: Secs = 300.0, author: Text = "") -> int:
        """Asks the job to save a checkpoint now; returns its step.

        Args:
            timeout: How many seconds to wait at most.
            author: Who asks. Default: the user of this process.

        Raises:
            NoAnswer: The job is not running, or has not saved one in time.
            RequestRefused: The job cannot save one: a trial is under way, or the disk is full.
        """

    @operation("POST", "/stop", key="step")
    def stop(self, timeout: Secs = 300.0, author: Text = "") -> int:
        """Asks the job to save a checkpoint and to end, as SIGTERM does; returns the step at which it did.

        Its launcher does not start it again.

        Args:
            timeout: How many seconds to wait at most.
            author: Who asks. Default: the user of this process.

        Raises:
            NoAnswer: The job is not running, or has not ended in time.
            RequestRefused: The job has stopped, and could not save a checkpoint.
        """

    @operation("GET", "/metrics")
    def metrics(
        self,
        since: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None,
        points: Annotated[int, clipped(1, MAX_POINTS)] = 2000,
        of: Literal["training", "workers"] = "training",
        start: Moment | None = None,
        end: Moment | None = None,
        sample: bool = False,
    ) -> Metrics:
        """The metrics of the training, decimated so that spikes stay visible.

        Args:
            since: Only what was written after this `Metrics.position`.
            points: The largest number of points of each series.
            of: "workers": step time and memory of the first workers instead, by their rank.
            start: Only values from this time on, in seconds since 1970. A shorter period has more points.
            end: Only values until this time.
            sample: At once: of a long file that nobody has read yet, evenly spaced steps, at position 0.
        """

    @operation("GET", "/checkpoints", key="checkpoints")
    def checkpoints(self) -> list[CheckpointView]:
        """The checkpoints that are complete, in the order of their steps."""

    @operation("GET", "/logs/{worker}", key="lines")
    def log_lines(
        self,
        worker: Rank = 0,
        lines: Annotated[int, clipped(1, 5000)] = 200,
        attempt: Annotated[int, Meta(ge=0, le=10**9)] | None = None,
    ) -> list[str]:
        """The last lines that a worker has printed, oldest first: as a terminal shows them, without colours.

        Args:
            worker: Its rank.
            lines: How many.
            attempt: Of which attempt of the job. Default: the last one.

        Raises:
            NotFound: There is no such log: it was not started by `replicast run`, or has another --log-dir.
        """

    def follow(self, update_id: str, timeout: float) -> Iterator[tuple[UpdateView, Brief]]:
        """Yields the update and the state of the job, until the update has ended or the time is up."""
        looks = max(1, round(1 / self.poll_secs))  # The job itself is read about once a second.
        with self._answer_to(update_id) as wait:
            for number, is_last in enumerate(ticks(timeout, self.poll_secs, wait)):
                is_fresh = number % looks == 0
                if is_fresh:
                    brief = self.brief()
                view = self.look(update_id, thoroughly=is_last or (is_fresh and not brief.running))
                yield view, brief
                if view.stage.is_final:
                    return

    def _answer_to(self, _id: str) -> contextlib.AbstractContextManager[Callable[[float], object] | None]:
        """How to wait for an answer, at most so many seconds, if there is a better way than to sleep."""
        return contextlib.nullcontext()


class Pushed:
    """An update that was handed to a run.

    Attributes:
        run: The run.
        id: The update's id.
        number: Its number in the journal when it was committed before this push, which then did nothing.
        warning: What its author should know, for example that the job is not running; empty if nothing.
    """

    def __init__(self, run: Run, id: str, number: int | None = None, warning: str = "") -> None:  # noqa: A002
        self.run = run
        self.id = id
        self.number = number
        self.warning = warning

    def __repr__(self) -> str:
        return f"<Pushed {self.id} to {self.run.where}>"

    def to_json(self) -> dict[str, Any]:
        """What is known of it at once."""
        return {"id": self.id, "number": self.number, "warning": self.warning}

    def view(self) -> UpdateView:
        """Where it is now."""
        return self.run.look(self.id)

    def result(
        self, timeout: float | None = None, show: Callable[[UpdateView, Brief], None] | None = None
    ) -> Receipt:
        """Blocks until every worker has applied the update and the digests agree, at most `timeout` seconds.

        Args:
            timeout: How many seconds to wait at most. Default: for ever.
            show: Called with the update and the state of the job, each time that they are read.

        Raises:
            UpdateRefused: The update was refused or withdrawn; no replica has changed.
            ReplicasDiverged: The update was applied, and the replicas are not equal.
            UpdatePending: The timeout has expired.
        """
        limit = FOREVER_SECS if timeout is None else timeout
        for view, brief in self.run.follow(self.id, limit):
            if show is not None:
                show(view, brief)
        if view.stage.is_final:
            return _receipt_of(view)
        raise UpdatePending(
            f"After {limit:g} s, update {self.id} is {progress_of(view, brief, moving=True)}.",
            stage=view.stage,
            update_id=self.id,
        )


def progress_of(view: UpdateView, brief: Brief, *, moving: bool) -> str:
    """Where an update is, in one line; if `moving`, also what changes all the time, as the step does."""
    text, before_commit = str(view.stage), view.stage in (Stage.PROPOSED, Stage.PREPARED, Stage.SCHEDULED)
    on_trial = view.trial_until is not None
    if view.step is not None and (on_trial or view.stage in (Stage.SCHEDULED, Stage.COMMITTED)):
        text += f" {'for' if view.stage is Stage.SCHEDULED else 'at'} step {view.step}"
    if on_trial:
        text += f", on trial until step {view.trial_until}"
    if moving and brief.step is not None and (on_trial or view.stage is Stage.SCHEDULED):
        text += f", the job is at step {brief.step}"
    if (waits_for := brief.waits_for or view.waits_for) and before_commit:
        text += f" and waits for {waits_for}"
    if not brief.running:
        text += f". {brief.sentence if moving else 'The job is not running'}. The next start that trains "
        text += "takes it from the inbox" if view.stage is Stage.PROPOSED else "continues with it"
    return text


def _receipt_of(view: UpdateView) -> Receipt:
    receipt = view.receipt
    if view.stage is Stage.WITHDRAWN:
        by = f" by {view.withdrawn_by}" if view.withdrawn_by else ""
        raise UpdateRefused(f"It was withdrawn{by}" + (f": {view.reason}" if view.reason else ""))
    if view.stage is Stage.REFUSED:
        raise UpdateRefused("It was refused; no reason is known") if view.refusal is None else view.refusal
    if view.stage is Stage.FAILED:
        why = view.reason if view.reason else "the variables it touched are not equal on all workers"
        digests = {} if receipt is None else receipt.digests
        told = "; ".join(f"worker {rank}: {digest}" for rank, digest in sorted(digests.items()))
        problem = f"Update {view.id} was applied at step {view.step}, but {why} ({told})"
        raise ReplicasDiverged(
            f"{problem}. replicas.sync(source=0) makes them equal",
            digests=digests,
            update_id=view.id,
            step=view.step,
        )
    if receipt is None:
        raise UpdateFailed(f"Update {view.id} is {view.stage}, and its receipt is lost", update_id=view.id)
    return receipt


def ticks(
    timeout_secs: float, every_secs: float, wait: Callable[[float], object] | None = None
) -> Iterator[bool]:
    """Waits between two looks at something; says whether the look is the last one, since the time is up.

    The first waits are short: a job that trains in short steps answers within milliseconds. `wait` may end
    earlier, when there is something to see.
    """
    ends, wait_secs = monotonic() + timeout_secs, every_secs / 64
    wait = sleep if wait is None else wait
    yield timeout_secs <= 0
    while (left := ends - monotonic()) > 0:
        wait(min(wait_secs, left))
        wait_secs = min(1.5 * wait_secs, every_secs)
        yield monotonic() >= ends
