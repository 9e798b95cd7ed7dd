"""Requests from outside to a running job, and the job's answers.

inbox/<id>.request.json      what somebody asks for: audit, save, leave or pull; until when; who
inbox/<id>.answer.tensors    the values that were pulled, as safetensors; written before the answer
inbox/<id>.answer.json       what came of it; kept for an hour, unless the author removes it

A request stays until it is answered, so that a job that dies before that answers it in its next attempt. A
request whose deadline has passed is refused. Anybody may write here: what is no request is refused as well.
The values are not called `.safetensors`, because every such file in the inbox is an update.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from replicast.errors import FileDamaged, UpdateRefused
from replicast.files import (
    RunDir,
    RunPath,
    TensorFile,
    below,
    json_bytes,
    make_durably,
    parse_tensors,
    read_json,
    read_small,
    read_tensor_bytes,
    tensor_chunks,
    write_durably,
    write_quickly,
)
from replicast.strictjson import described, parse_object
from replicast.update.update import checked_text

Kind: TypeAlias = Literal["audit", "save", "leave", "pull"]
Rows: TypeAlias = tuple[tuple[int, int], ...]
"""Ranges of rows: each from its first row to the one behind its last."""

MOST_RANGES = 10_000
_REQUEST, _ANSWER, _VALUES = ".request.json", ".answer.json", ".answer.tensors"
_KEEP_SECS = 3600.0
_MAX_REQUEST_BYTES = 2**20
_MAX_ANSWER_BYTES = 64 * 2**20
_MAX_AUTHOR = 200
_TENSOR = "values"


@dataclass(frozen=True, slots=True)
class Request:
    """What somebody outside asks a running job for."""

    kind: Kind
    author: str
    requested_at: float
    deadline: float
    name: str = ""
    rows: Rows = ()
    id: str = ""


@dataclass(frozen=True, slots=True)
class NoRequest:
    """A file in the place of a request that is none."""

    id: str
    problem: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a request."""

    kind: str
    author: str
    done: bool
    step: int
    attempt: int
    answered_at: float
    problem: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)


def submit(
    run_dir: RunDir,
    kind: Kind,
    *,
    author: str,
    timeout_secs: float,
    now: float | None = None,
    name: str = "",
    rows: Rows = (),
) -> Request:
    """Asks the running job for something."""
    now = time.time() if now is None else now
    request = Request(kind, author[:_MAX_AUTHOR], now, now + timeout_secs, name, rows, uuid.uuid4().hex)
    try:
        _check(request)
    except ValueError as error:
        raise UpdateRefused(str(error)) from error
    make_durably(_inbox(run_dir))
    fields = {key: value for key, value in asdict(request).items() if key != "id"}
    write_quickly(_inbox(run_dir) / f"{request.id}{_REQUEST}", json.dumps(fields))
    return request


def waiting(run_dir: RunDir) -> Iterator[RunPath]:
    """The files of requests that wait for an answer."""
    paths = _inbox(run_dir).glob(f"*{_REQUEST}")
    yield from sorted(path for path in paths if not path.name.startswith("."))


def id_of(path: RunPath) -> str:
    """The id of a request, according to its file's name."""
    return path.name.removesuffix(_REQUEST)


def read(path: RunPath) -> Request | NoRequest | None:
    """Reads the file of a request. Only worker 0."""
    try:
        fields = parse_object(read_small(path, max_bytes=_MAX_REQUEST_BYTES))
        request = replace(described(Request, "request", fields), id=id_of(path))
        _check(request)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return NoRequest(id_of(path), f"It is no request: {error}")
    return request


def answer(run_dir: RunDir, id_: str, given: Answer, values: npt.NDArray[Any] | None = None) -> bool:
    """Answers a request, then removes it. Only worker 0. No-op if its author has withdrawn it."""
    inbox = _inbox(run_dir)
    path = inbox / f"{id_}{_REQUEST}"
    if not path.exists():
        return True
    if values is not None:
        write_durably(inbox / f"{id_}{_VALUES}", tensor_chunks({_TENSOR: values}, {}))
    problem = given.problem.encode(errors="backslashreplace").decode()  # it may quote what was received
    write_durably(inbox / f"{id_}{_ANSWER}", [json_bytes(asdict(replace(given, problem=problem)))])
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
        return True
    return False


def read_answer(run_dir: RunDir, id_: str) -> Answer | None:
    """The answer to a request; None if there is none yet."""
    path = _inbox(run_dir) / f"{id_}{_ANSWER}"
    if not path.exists():
        return None
    try:
        return described(Answer, "answer", read_json(path, max_bytes=_MAX_ANSWER_BYTES))
    except ValueError as error:
        raise FileDamaged(path, str(error)) from error


def read_values(run_dir: RunDir, id_: str, shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
    """The values that were pulled."""
    path = _inbox(run_dir) / f"{id_}{_VALUES}"

    def check(outline: TensorFile) -> None:
        found = {name: (array.shape, array.dtype.name) for name, array in outline.tensors.items()}
        if found != {_TENSOR: (shape, dtype)}:
            expected = f"{_TENSOR} of shape {shape}, {dtype}"
            raise FileDamaged(path, "other values", expected=expected, received=str(found)[:200])

    content = read_tensor_bytes(path, max_tensors=1, follow=False, check=check)
    return parse_tensors(content, path.name, max_tensors=1).tensors[_TENSOR]


def forget(run_dir: RunDir, id_: str) -> None:
    """Withdraws a request that nobody waits for any more, or removes its answer. No-op if both are gone."""
    for suffix in (_REQUEST, _ANSWER, _VALUES):
        with contextlib.suppress(OSError):
            (_inbox(run_dir) / f"{id_}{suffix}").unlink()


def clean(run_dir: RunDir) -> None:
    """Removes answers that nobody has fetched for an hour."""
    inbox = _inbox(run_dir)
    for suffix in (_ANSWER, _VALUES):
        for path in list(inbox.glob(f"*{suffix}")):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime >= _KEEP_SECS:
                    path.unlink()


def stopped_by(run_dir: RunDir, attempt: int) -> Answer | None:
    """The answer to the request because of which an attempt of the job has stopped; None if there is none."""
    for path in _inbox(run_dir).glob(f"*{_ANSWER}"):
        with contextlib.suppress(FileDamaged):
            given = read_answer(run_dir, path.name.removesuffix(_ANSWER))
            if given is not None and (given.kind, given.attempt, given.done) == ("leave", attempt, True):
                return given
    return None


def indices_of(rows: Rows) -> npt.NDArray[np.int64]:
    """The rows of these ranges, one after the other."""
    return np.concatenate([np.arange(start, stop, dtype=np.int64) for start, stop in rows])


def check_rows(rows: Rows, name: str, shape: tuple[int, ...]) -> None:
    """Checks that a variable has these rows."""
    if rows and not shape:
        raise UpdateRefused("A scalar variable has no rows", variable=name)
    beyond = [stop - 1 for _, stop in rows if stop > shape[0]]
    if beyond:
        raise UpdateRefused(
            "There is no such row",
            variable=name,
            expected=f"0 to {shape[0] - 1}" if shape[0] else "none: the variable has no rows",
            received=str(beyond[0]),
        )


def _check(request: Request) -> None:
    if request.kind not in get_args(Kind):
        raise ValueError(f"There is no such kind of request. Received: {str(request.kind)[:100]!r}")
    if (request.kind == "pull") != bool(request.name):
        raise ValueError("A pull names a variable, and no other request does")
    if len(request.rows) > MOST_RANGES or any(not 0 <= start < stop for start, stop in request.rows):
        raise ValueError(f"Rows are at most {MOST_RANGES} ranges, each from a row to a later one")
    try:
        checked_text("author", request.author, _MAX_AUTHOR)
        checked_text("name of a variable", request.name, 1000)
    except UpdateRefused as error:
        raise ValueError(str(error)) from error


def _inbox(run_dir: RunDir) -> RunPath:
    return below(run_dir) / "inbox"
