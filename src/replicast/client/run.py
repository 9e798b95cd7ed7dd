"""The interface of a run: the same methods for a run directory and for a served run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence

from replicast.client.examination import Examination
from replicast.client.metrics import Metrics
from replicast.client.notes import ticks
from replicast.client.updates import UpdateView
from replicast.client.views import Brief, CheckpointView, Overview, Pulled
from replicast.core.entries import Receipt
from replicast.core.records import Stage
from replicast.errors import ReplicasDiverged, UpdateFailed, UpdatePending, UpdateRefused
from replicast.files import RunPath
from replicast.update.audit_report import AuditReport
from replicast.update.schema import Schema
from replicast.update.trial import Trial
from replicast.update.update import Update

FOREVER_SECS = 10 * 365 * 86_400.0
"""The timeout of `Pushed.result` without one."""


class Run(ABC):
    """A run. Every method may be called from any thread; none needs TensorFlow.

    Attributes:
        where: Its directory or address, as it is given to a command.

    Every method may raise `FileDamaged` when a file of the run is not what was written, and, for a served
    run, `RequestFailed` when the server cannot be reached or does not accept the request.
    """

    where: str
    path: RunPath | None = None
    """Its directory, if this process reads it there."""
    poll_secs: float
    """The interval between two reads of an update that somebody waits for."""

    @abstractmethod
    def brief(self) -> Brief:
        """The state of the run in short. Cheap: does not read the journal."""

    @abstractmethod
    def status(self) -> Overview:
        """Workers, metrics, what is under way, updates and what waits."""

    @abstractmethod
    def schema(self) -> Schema:
        """The variables that an update may change."""

    @abstractmethod
    def log(self, last: int | None = None) -> list[UpdateView]:
        """The committed updates in the order in which they are applied; only the `last` ones if given."""

    @abstractmethod
    def show(self, which: str | int, max_bytes: int | None = None) -> UpdateView:
        """Everything known about one update, with a summary of the values of its edits.

        Args:
            which: Its number in the journal, its id, or the beginning of its id.
            max_bytes: Do not read the values of a larger one: `details` is None then. Default: no limit.

        Raises:
            NotFound: There is none, or several may be meant.
        """

    @abstractmethod
    def look(self, update_id: str, thoroughly: bool = False) -> UpdateView:
        """The current stage of one update, by its full id. Cheap, for polling.

        Args:
            update_id: Its id.
            thoroughly: Read the journal in any case: a job that died may not have written its last note.

        Raises:
            NotFound: Nothing is known of it: it was withdrawn before a job took it, or has another id.
        """

    @abstractmethod
    def audits(self, last: int = 10) -> list[AuditReport]:
        """The last audits, oldest first."""

    @abstractmethod
    def audit(self, timeout: float = 300.0, author: str = "") -> AuditReport:
        """Asks the job for an audit at its next step; blocks at most `timeout` seconds.

        Args:
            timeout: How many seconds to wait at most.
            author: Who asks. Default: the user of this process.

        Raises:
            NoAnswer: The job is not running, has ended, or has not made one in time.
        """

    @abstractmethod
    def examine(self, update: Update) -> Examination:
        """What an update would do, and all that is wrong with it. Nothing is sent to the job."""

    @abstractmethod
    def push(
        self,
        update: Update,
        at_step: int | None = None,
        trial: Trial | None = None,
        next_start: bool = False,
    ) -> Pushed:
        """Hands an update to the job, which applies it on every worker at the same step, or on none.

        The same update again, by its id, is a no-op.

        Args:
            update: The update.
            at_step: When. Default: as soon as possible.
            trial: The condition of its trial, if any.
            next_start: Also when the job is not running: it takes the update when it is started again.

        Raises:
            UpdateRefused: It does not fit, another update has its id, the step is past, or the job is not
                running and `next_start` is not given.
        """

    @abstractmethod
    def withdraw(self, update_id: str) -> UpdateView:
        """Takes back an update that is not committed yet; a running job is asked, for at most 30 s.

        Args:
            update_id: Its id, or the beginning of it.

        Raises:
            NotFound: There is no such update.
            UpdateRefused: It is too late, or it was refused or withdrawn before.
            NoAnswer: The job has taken it and does not answer.
        """

    @abstractmethod
    def revert(
        self,
        which: str | int,
        note: str = "",
        dry_run: bool = False,
        force: bool = False,
        next_start: bool = False,
        author: str = "",
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

    @abstractmethod
    def pull(
        self,
        name: str,
        rows: Sequence[int] | None = None,
        timeout: float = 300.0,
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

    @abstractmethod
    def checkpoint(self, timeout: float = 300.0, author: str = "") -> int:
        """Asks the job to save a checkpoint now; returns its step.

        Args:
            timeout: How many seconds to wait at most.
            author: Who asks. Default: the user of this process.

        Raises:
            NoAnswer: The job is not running, or has not saved one in time.
            RequestRefused: The job cannot save one: a trial is under way, or the disk is full.
        """

    @abstractmethod
    def stop(self, timeout: float = 300.0, author: str = "") -> int:
        """Asks the job to save a checkpoint and to end, as SIGTERM does; returns the step at which it did.

        Its launcher does not start it again.

        Args:
            timeout: How many seconds to wait at most.
            author: Who asks. Default: the user of this process.

        Raises:
            NoAnswer: The job is not running, or has not ended in time.
            RequestRefused: The job has stopped, and could not save a checkpoint.
        """

    @abstractmethod
    def metrics(self, since: int | None = None, points: int = 2000) -> Metrics:
        """The metrics of the training, decimated so that spikes stay visible.

        Args:
            since: Only what was written after this `Metrics.position`.
            points: The largest number of points of each series.
        """

    @abstractmethod
    def checkpoints(self) -> list[CheckpointView]:
        """The checkpoints that are complete, in the order of their steps."""

    @abstractmethod
    def log_lines(self, worker: int, lines: int = 200, attempt: int | None = None) -> list[str]:
        """The last lines that a worker has printed, oldest first.

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
        for number, is_last in enumerate(ticks(timeout, self.poll_secs)):
            is_fresh = number % looks == 0
            if is_fresh:
                brief = self.brief()
            view = self.look(update_id, thoroughly=is_last or (is_fresh and not brief.running))
            yield view, brief
            if view.stage.is_final:
                return


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

    def view(self) -> UpdateView:
        """Where it is now."""
        return self.run.look(self.id)

    def result(self, timeout: float | None = None) -> Receipt:
        """Blocks until every worker has applied the update and the digests agree, at most `timeout` seconds.

        Raises:
            UpdateRefused: The update was refused or withdrawn; no replica has changed.
            ReplicasDiverged: The update was applied, and the replicas are not equal.
            UpdatePending: The timeout has expired.
            NotFound: It was withdrawn before a job took it.
        """
        limit = FOREVER_SECS if timeout is None else timeout
        ((view, brief),) = deque(self.run.follow(self.id, limit), maxlen=1)
        if view.stage.is_final:
            return receipt_of(view)
        waits_for = brief.waits_for if brief.waits_for else view.waits_for
        waits = f" and waits for {waits_for}" if waits_for else ""
        silent = "" if brief.running else f" {brief.sentence}."
        raise UpdatePending(
            f"Update {self.id}: {limit:g} s have passed, and it is {view.stage}{waits}.{silent} Ask again",
            stage=view.stage,
            update_id=self.id,
        )


def receipt_of(view: UpdateView) -> Receipt:
    """The receipt of an update that has ended."""
    receipt = view.receipt
    if view.stage is Stage.WITHDRAWN:
        raise UpdateRefused("It was withdrawn")
    if view.stage is Stage.REFUSED:
        raise UpdateRefused("It was refused; no reason is known") if view.refusal is None else view.refusal
    if view.stage is Stage.FAILED:
        digests = {} if receipt is None else dict(receipt.digests)
        why = view.reason if view.reason else "the variables it touched are not equal on all workers"
        raise ReplicasDiverged(
            f"Update {view.id} was applied at step {view.step}, but {why}. "
            "replicas.sync(source=0) makes them equal",
            digests=digests,
            update_id=view.id,
            step=view.step,
        )
    if receipt is None:
        raise UpdateFailed(f"Update {view.id} is {view.stage}, and its receipt is lost", update_id=view.id)
    return receipt
