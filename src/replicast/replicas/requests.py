"""Worker 0: requests from outside the job become operations, and their outcomes become answers.

    inbox/<id>.request.json ──► look: refused, left for later, or a request to the coordinator
    the operation ends      ──► ended: an answer, written in the background
    the job exits           ──► left, finish: requests that still wait are answered

Whatever a file contains, at worst its own request is refused.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy.typing as npt

from replicast.core.events import Ended
from replicast.core.operations.pull import Pulled
from replicast.core.records import Refusal, Stage
from replicast.errors import UpdateRefused
from replicast.files import RunDir, RunPath
from replicast.replicas.session import Session
from replicast.storage import requests
from replicast.storage.requests import Answer, NoRequest, Request

logger = logging.getLogger("replicast")

LOOK_SECS = 0.3
"""How long one look at the inbox takes at most: the thread has other things to do."""
RETRY_SECS = 10.0
CLEAN_SECS = 60.0
MAX_PULL_BYTES = 1 << 30


class Requests:
    """The open requests of one job. `look` and `finish` are for the thread of the run's files."""

    def __init__(self, session: Session, attempt: int) -> None:
        self._session = session
        self._attempt = attempt
        self._taken: dict[str, Request] = {}
        self._answered: set[str] = set()
        self._older: set[str] | None = None
        """The requests that were there at the first look: only the wall clock tells how old they are."""
        self._until: dict[str, float] = {}
        """For those that came later: when their time has passed by the monotonic clock of this process."""
        self._failed: queue.SimpleQueue[tuple[float, Callable[[], None]]] = queue.SimpleQueue()
        self._cleaned_at = -CLEAN_SECS
        self.may_save: Callable[[], bool] = lambda: True

    def look(self, run_dir: RunDir, *, training: bool) -> None:
        """Takes requests, and writes answers that could not be written before."""
        ends = time.monotonic() + LOOK_SECS
        if time.monotonic() - self._cleaned_at >= CLEAN_SECS:
            self._cleaned_at = time.monotonic()
            requests.clean(run_dir)
        self._retry(at_once=False)
        if self._older is None:
            self._older = {requests.id_of(path) for path in requests.waiting(run_dir)}
        for path in requests.waiting(run_dir):
            id_ = requests.id_of(path)
            if id_ in self._taken or id_ in self._answered:
                continue
            self._consider(run_dir, path, id_, training=training)
            if time.monotonic() > ends:
                return

    def ended(self, run_dir: RunDir, ended: Ended) -> None:
        """An operation has ended: its requests are answered. Any thread but the training thread."""
        values = self._session.replica.pulled.pop(ended.id, None)
        result, stage = ended.outcome.result, ended.outcome.stage
        if ended.kind == "leave" and stage is Stage.VERIFIED:
            return  # the process exits: `left` has answered
        step = self._session.step if ended.step is None else ended.step
        for id_ in ended.asked_by:
            if isinstance(result, Refusal):
                self._refuse(run_dir, id_, result.problem)
            elif isinstance(result, Pulled):
                self._done(run_dir, id_, step, _described(result), values=values)
            elif ended.kind == "save" and result is not None:
                self._done(run_dir, id_, int(result), {})
            elif ended.kind == "save":
                self._refuse(run_dir, id_, "The checkpoint was skipped: another one was being written")

    def audited(self, run_dir: RunDir, ids: tuple[str, ...], step: int, report: Mapping[str, Any]) -> None:
        """An audit has its report. Called before a training thread raises it, which may end the process."""
        for id_ in ids:
            self._done(run_dir, id_, step, report, at_once=True)

    def left(self, run_dir: RunDir, problem: str) -> None:
        """All workers exit on request. Called in the training thread."""
        for id_, request in list(self._taken.items()):
            if request.kind == "leave":
                details = {"saved": not problem}
                self._done(run_dir, id_, self._session.step, details, problem=problem, at_once=True)

    def finish(self, run_dir: RunDir) -> None:
        """The job has ended: requests that still wait are refused."""
        self._retry(at_once=True)
        for path in requests.waiting(run_dir):
            id_ = requests.id_of(path)
            if id_ not in self._answered:
                self._refuse(run_dir, id_, f"The job has ended at step {self._session.step}", at_once=True)

    # One request.

    def _consider(self, run_dir: RunDir, path: RunPath, id_: str, *, training: bool) -> None:
        try:
            request = requests.read(path)
            if isinstance(request, NoRequest):
                self._refuse(run_dir, id_, request.problem)
            elif request is not None and self._is_late(id_, request):
                self._taken[id_] = request
                self._refuse(run_dir, id_, "The deadline passed before the job could do it")
            elif request is not None and training:
                self._take(id_, request)
        except UpdateRefused as error:
            self._refuse(run_dir, id_, str(error))
        except OSError:
            raise
        except Exception as error:
            logger.exception("the request %s is refused: unexpected error while reading it", path)
            self._refuse(run_dir, id_, f"Unexpected {type(error).__name__} while reading it: {error}")

    def _is_late(self, id_: str, request: Request) -> bool:
        """Whether its time has passed. The author's clock may be another one: see `_older` and `_until`."""
        if self._older is not None and id_ in self._older:
            return time.time() > request.deadline
        now, secs = time.monotonic(), request.deadline - request.requested_at
        return now >= self._until.setdefault(id_, now + secs)

    def _take(self, id_: str, request: Request) -> None:
        """Hands a request to the coordinator; or leaves it for later."""
        if request.kind == "save" and not self.may_save():
            return
        arguments: tuple[Any, ...] = ()
        if request.kind == "pull":
            self._taken[id_] = request  # a refusal names its author
            arguments = self._resolved(request)
            if any(one.kind == "pull" and other != id_ for other, one in list(self._taken.items())):
                del self._taken[id_]  # one copy in memory at a time
                return
        self._taken[id_] = request
        self._session.request(request.kind, (id_,), arguments)

    def _resolved(self, request: Request) -> tuple[Any, ...]:
        """The variable's full name, and rows that it has."""
        variable = self._session.replica.state.schema.resolve(request.name)
        requests.check_rows(request.rows, variable.name, variable.shape)
        count = sum(stop - start for start, stop in request.rows)
        nbytes = variable.nbytes
        if request.rows:
            nbytes = nbytes // max(1, variable.shape[0]) * count
        if nbytes > MAX_PULL_BYTES:
            raise UpdateRefused(
                "These are too many values for one pull",
                variable=variable.name,
                expected=f"at most {MAX_PULL_BYTES} bytes",
                received=f"{nbytes} bytes",
                remedy="Pull some rows at a time",
            )
        return variable.name, request.rows

    # Answers.

    def _refuse(self, run_dir: RunDir, id_: str, problem: str, *, at_once: bool = False) -> None:
        self._put(run_dir, id_, Answer("", "", False, self._session.step, 0, 0.0, problem), None, at_once)

    def _done(
        self,
        run_dir: RunDir,
        id_: str,
        step: int,
        details: Mapping[str, Any],
        *,
        problem: str = "",
        values: npt.NDArray[Any] | None = None,
        at_once: bool = False,
    ) -> None:
        self._put(run_dir, id_, Answer("", "", True, step, 0, 0.0, problem, details), values, at_once)

    def _put(
        self, run_dir: RunDir, id_: str, found: Answer, values: npt.NDArray[Any] | None, at_once: bool
    ) -> None:
        request = self._taken.pop(id_, None)
        self._answered.add(id_)
        answer = Answer(
            "" if request is None else request.kind,
            "" if request is None else request.author,
            found.done,
            found.step,
            self._attempt,
            time.time(),
            found.problem,
            found.details,
        )
        write = partial(self._write, run_dir, id_, answer, values)
        if at_once:
            write()
        else:
            self._session.files.do(write)

    def _write(self, run_dir: RunDir, id_: str, answer: Answer, values: npt.NDArray[Any] | None) -> None:
        """Writes an answer. What a full disk does not take is tried again later."""
        try:
            if requests.answer(run_dir, id_, answer, values):
                self._answered.discard(id_)  # the file is gone: another one may have its name
        except OSError as error:
            logger.warning("an answer cannot be written, and will be retried: %s", error)
            self._failed.put((time.monotonic(), partial(self._write, run_dir, id_, answer, values)))
        except Exception:  # one answer must not end the thread that writes all others
            logger.exception("the answer to the request %s cannot be written", ascii(id_))

    def _retry(self, *, at_once: bool) -> None:
        """Writes answers once more that could not be written."""
        for _ in range(self._failed.qsize()):
            failed_at, write = self._failed.get()
            if at_once:
                write()
            elif time.monotonic() - failed_at >= RETRY_SECS:
                self._session.files.do(write)
            else:
                self._failed.put((failed_at, write))


def _described(pulled: Pulled) -> dict[str, Any]:
    return {
        "name": pulled.name,
        "rows": [list(one) for one in pulled.rows],
        "digests": {str(rank): digest for rank, digest in pulled.digests.items()},
        "equal": pulled.equal,
    }
