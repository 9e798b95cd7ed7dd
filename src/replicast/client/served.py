"""A run at the address at which it is served: the same methods as for a directory, over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar
from urllib.parse import quote

from replicast.client.author import this_user
from replicast.client.examination import Examination, examine
from replicast.client.http import Address, Server
from replicast.client.metrics import Metrics
from replicast.client.run import Pushed, Run
from replicast.client.updates import UpdateView
from replicast.client.views import PULLED, Brief, CheckpointView, Overview, Pulled
from replicast.errors import FileDamaged, NotFound, RequestFailed, RequestRefused, UpdateRefused
from replicast.strictjson import parse_object
from replicast.tensorfiles import parse_tensors
from replicast.update.audit_report import AuditReport
from replicast.update.schema import Schema
from replicast.update.trial import Trial
from replicast.update.update import Update

MAX_LOG = 1000
"""So many of the last updates can be listed at once."""
_MAX_WAIT_SECS = 300.0
_ANSWER_SECS = 30.0
_Made = TypeVar("_Made")


class ServedRun(Run):
    """A run at an address."""

    poll_secs = 0.5

    def __init__(self, address: Address, token: str | None = None) -> None:
        self._server = Server(address, token)
        name = address.name if address.name else self._only_run(address)
        self.where = str(replace(address, name=name))
        self._path = f"/api/runs/{quote(name, safe='')}"
        _made(Brief.from_json, self._server.first(self._path))

    def _only_run(self, address: Address) -> str:
        names = [str(one.get("name")) for one in self._server.first("/api/runs") if isinstance(one, dict)]
        if len(names) == 1:
            return names[0]
        if not names:
            raise NotFound(f"{address} serves no run.")
        raise NotFound(f"{address} serves {len(names)} runs. Name one: {address}/{names[0]}, for example.")

    def _got(self, read: Callable[[Any], _Made], path: str = "", **query: object) -> _Made:
        return _made(read, self._server.get(self._path + path, **query))

    def _posted(
        self, read: Callable[[Any], _Made], path: str, wait_secs: float = 0.0, **content: object
    ) -> _Made:
        answer = self._server.post(self._path + path, content, wait_secs + _ANSWER_SECS)
        return _made(read, answer)

    def brief(self) -> Brief:
        return replace(self._got(Brief.from_json), run=self.where)

    def status(self) -> Overview:
        return replace(self._got(Overview.from_json, "/status"), run=self.where)

    def schema(self) -> Schema:
        return self._got(lambda answer: Schema.from_json(answer["variables"]), "/schema")

    def log(self, last: int | None = None) -> list[UpdateView]:
        """As `Run.log`; at most the last `MAX_LOG`."""
        count = MAX_LOG if last is None else min(last, MAX_LOG)
        return self._got(_list_of(UpdateView.from_json, "updates"), "/updates", last=count)

    def show(self, which: str | int, max_bytes: int | None = None) -> UpdateView:
        """As `Run.show`; the server has a limit of its own."""
        return self._got(UpdateView.from_json, f"/updates/{_part(which)}")

    def look(self, update_id: str, thoroughly: bool = False) -> UpdateView:
        path = f"/updates/{_part(update_id)}"
        return self._got(UpdateView.from_json, path, exact=True, thoroughly=thoroughly)

    def audits(self, last: int = 10) -> list[AuditReport]:
        return self._got(_list_of(AuditReport.from_json, "audits"), "/audits", last=last)

    def audit(self, timeout: float = 300.0, author: str = "") -> AuditReport:
        secs = min(timeout, _MAX_WAIT_SECS)
        return self._posted(
            AuditReport.from_json, "/audit", secs, timeout_secs=secs, author=author or this_user()
        )

    def examine(self, update: Update) -> Examination:
        """As `Run.examine`: here, with the variables that the server tells."""
        return examine(update, self.schema())

    def push(
        self,
        update: Update,
        at_step: int | None = None,
        trial: Trial | None = None,
        next_start: bool = False,
    ) -> Pushed:
        """As `Run.push`. The arrays are sent as they are in memory, without a copy of the whole."""
        query: dict[str, object] = {"at_step": at_step, "next_start": next_start}
        if trial is not None:
            query |= {
                "trial_steps": trial.steps,
                "trial_metric": trial.metric,
                "trial_max_increase": trial.max_increase,
                "trial_mode": trial.mode,
            }
        signed = update.signed(this_user())
        answer = self._server.upload(f"{self._path}/updates", signed.file_chunks(), **query)
        return _made(self._pushed, answer)

    def withdraw(self, update_id: str) -> UpdateView:
        return self._posted(UpdateView.from_json, f"/updates/{_part(update_id)}/withdraw", 60.0)

    def revert(
        self,
        which: str | int,
        note: str = "",
        dry_run: bool = False,
        force: bool = False,
        next_start: bool = False,
        author: str = "",
    ) -> Pushed | Examination:
        path = f"/updates/{_part(which)}/revert"
        if dry_run:
            return self._posted(Examination.from_json, path, note=note, dry_run=True, force=force)
        author = author or this_user()
        return self._posted(self._pushed, path, note=note, force=force, next_start=next_start, author=author)

    def pull(
        self,
        name: str,
        rows: Sequence[int] | None = None,
        timeout: float = 300.0,
        max_bytes: int | None = None,
    ) -> Pulled:
        """As `Run.pull`; the server has a limit of its own."""
        secs = min(timeout, _MAX_WAIT_SECS)
        named = None if rows is None else ",".join(map(str, rows))
        path = f"{self._path}/variables/{quote(name)}"
        query = {"rows": named, "timeout": secs, "format": "safetensors"}
        try:
            pulled = _made(_pulled, self._server.download(path, secs + _ANSWER_SECS, **query))
        except UpdateRefused as error:  # What the server refuses, in general.
            raise RequestRefused(str(error)) from error
        if max_bytes is not None and pulled.array.nbytes > max_bytes:
            raise RequestRefused(f"Expected: at most {max_bytes} bytes. Received: {pulled.array.nbytes}")
        return pulled

    def checkpoint(self, timeout: float = 300.0, author: str = "") -> int:
        secs = min(timeout, _MAX_WAIT_SECS)
        return self._posted(_step, "/checkpoint", secs, timeout_secs=secs, author=author or this_user())

    def stop(self, timeout: float = 300.0, author: str = "") -> int:
        secs = min(timeout, _MAX_WAIT_SECS)
        return self._posted(_step, "/stop", secs, timeout_secs=secs, author=author or this_user())

    def metrics(self, since: int | None = None, points: int = 2000) -> Metrics:
        return self._got(Metrics.from_json, "/metrics", since=since, points=points)

    def checkpoints(self) -> list[CheckpointView]:
        return self._got(_list_of(CheckpointView.from_json, "checkpoints"), "/checkpoints")

    def log_lines(self, worker: int, lines: int = 200, attempt: int | None = None) -> list[str]:
        return self._got(_list_of(str, "lines"), f"/logs/{worker:d}", lines=lines, attempt=attempt)

    def _pushed(self, told: Mapping[str, Any]) -> Pushed:
        number = told.get("number")
        warning = str(told.get("warning", ""))
        return Pushed(self, str(told["id"]), None if number is None else int(number), warning)


def _made(read: Callable[[Any], _Made], answer: Any) -> _Made:
    """What an answer describes."""
    try:
        return read(answer)
    except (AttributeError, FileDamaged, KeyError, TypeError, ValueError) as error:
        raise RequestFailed(
            f"The server's answer cannot be used: has it another version? ({error})"
        ) from error


def _list_of(read: Callable[[Any], _Made], name: str) -> Callable[[Any], list[_Made]]:
    return lambda answer: [read(one) for one in answer[name]]


def _part(which: str | int) -> str:
    """An update's id or number as a part of an address."""
    if str(which) in ("", ".", ".."):
        raise NotFound(f"There is no update {str(which)!r}.")
    return quote(str(which), safe="")


def _step(answer: Mapping[str, Any]) -> int:
    return int(answer["step"])


def _pulled(content: bytes) -> Pulled:
    file = parse_tensors(memoryview(content), "the answer", max_tensors=1)
    told = parse_object(file.metadata[PULLED])
    rows = told.get("rows")
    return Pulled(
        name=str(told["name"]),
        step=int(told["step"]),
        digest=str(told["digest"]),
        source=str(told["source"]),
        array=file.tensors[told["name"]],
        rows=None if rows is None else tuple(map(int, rows)),
        digests={int(rank): str(digest) for rank, digest in told.get("digests", {}).items()},
    )
