"""Requests from outside to a running job: whatever lies in the inbox, everybody gets an answer."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replicast.core.events import Ended
from replicast.core.operation import Outcome
from replicast.core.records import Refusal, Stage
from replicast.errors import FileDamaged, UpdateRefused
from replicast.replicas.requests import RETRY_SECS, Requests
from replicast.storage import inbox, requests
from replicast.storage.requests import Answer, Kind
from replicast.testing.job import DEADLINE_SECS, Job, eventually

BIAS, TABLE = "dense/bias", "table/embeddings"


class Asked:
    """A job with the requests of its worker 0, and authors outside it."""

    def __init__(self, job: Job, run_dir: Path) -> None:
        self.job, self.run_dir = job, run_dir
        self.ended: list[Ended] = []
        self.of_job = Requests(job.workers[0].session, job.attempt)
        job.workers[0].on_ended = self._ended

    def _ended(self, ended: Ended) -> None:
        self.ended.append(ended)
        self.of_job.ended(self.run_dir, ended)

    def ask(self, kind: Kind, secs: float = 60.0, **arguments: Any) -> str:
        return requests.submit(self.run_dir, kind, author="me", timeout_secs=secs, **arguments).id

    def look(self, *, training: bool = True) -> None:
        self.of_job.look(self.run_dir, training=training)

    def answer(self, id_: str) -> Answer:
        """The job trains until it has answered."""
        self.look()
        self.job.train(3)
        eventually(lambda: requests.read_answer(self.run_dir, id_))
        found = requests.read_answer(self.run_dir, id_)
        assert found is not None
        return found

    def values(self, id_: str, shape: tuple[int, ...]) -> Any:
        return requests.read_values(self.run_dir, id_, shape, "float32")

    def refusal(self, id_: str) -> str:
        self.look()
        eventually(lambda: requests.read_answer(self.run_dir, id_))
        found = requests.read_answer(self.run_dir, id_)
        assert found is not None
        assert not found.done
        return found.problem


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    monkeypatch.setattr("replicast.replicas.requests.LOOK_SECS", DEADLINE_SECS)  # one look sees all
    with Job(2) as job:
        yield Asked(job, tmp_path)


def test_an_answer_names_who_asked_the_step_and_the_attempt(asked: Asked) -> None:
    found = asked.answer(asked.ask("save"))
    assert (found.kind, found.author, found.done, found.attempt) == ("save", "me", True, 0)
    assert found.step == asked.job.checkpoints[-1].step
    eventually(lambda: not list(requests.waiting(asked.run_dir)))


def test_a_pull_gives_the_values_of_one_boundary_and_their_digest_on_every_worker(asked: Asked) -> None:
    asked.job.on_all(lambda worker: worker.state.values[BIAS].__iadd__(3))
    id_ = asked.ask("pull", name="bias")
    found = asked.answer(id_)
    assert found.details["name"] == BIAS
    assert found.details["equal"]
    assert len(found.details["digests"]) == 2
    np.testing.assert_array_equal(asked.values(id_, (3,)), np.full(3, 3, np.float32))
    assert inbox.waiting(asked.run_dir) == [], "the values are no update"


def test_a_pull_of_rows_gives_these_rows_in_their_order(asked: Asked) -> None:
    for worker in asked.job.workers:
        worker.state.values[TABLE] = np.arange(16, dtype=np.float32).reshape(8, 2)
    id_ = asked.ask("pull", name=TABLE, rows=((6, 8), (0, 1)))
    asked.answer(id_)
    assert asked.values(id_, (3, 2)).tolist() == [[12, 13], [14, 15], [0, 1]]


def test_a_pull_says_when_the_workers_have_different_values(asked: Asked) -> None:
    asked.job.workers[1].state.values[BIAS][:] = 9
    id_ = asked.ask("pull", name=BIAS)
    found = asked.answer(id_)
    assert found.done
    assert not found.details["equal"]
    assert asked.values(id_, (3,)).tolist() == [0, 0, 0]


def test_an_unknown_variable_is_refused_with_suggestions(asked: Asked) -> None:
    assert "perhaps dense/bias" in asked.refusal(asked.ask("pull", name="dense/bais"))
    assert "There is no such row" in asked.refusal(asked.ask("pull", name=TABLE, rows=((7, 9),)))


def test_two_pulls_are_answered_one_after_the_other(asked: Asked) -> None:
    first, second = asked.ask("pull", name=BIAS), asked.ask("pull", name=TABLE)
    asked.answer(min(first, second))
    asked.answer(max(first, second))
    assert asked.values(second, (8, 2)).shape == (8, 2)
    with pytest.raises(FileDamaged, match="other values"):
        asked.values(second, (8, 3))


def test_a_request_that_is_answered_while_another_one_is_taken_disturbs_nothing(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = asked.ask("save")
    read = requests.read

    class AnsweredMeanwhile(str):
        """The kind of a request that has its answer, in another thread, just when somebody looks at it."""

        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            if other == "pull":
                outcome = Outcome(Stage.REFUSED, Refusal("no"))
                asked.of_job.ended(asked.run_dir, Ended("save", "save-1", outcome, 1, (save,)))
            return str.__eq__(self, other)

    def reading(path: Path) -> Any:
        found = read(path)
        return replace(found, kind=AnsweredMeanwhile("save")) if requests.id_of(path) == save else found

    with monkeypatch.context() as patched:
        patched.setattr(requests, "read", reading)
        asked.look()
    pull = asked.ask("pull", name=BIAS)
    assert asked.answer(pull).done


def test_a_request_waits_while_no_training_runs_until_its_deadline_has_passed(asked: Asked) -> None:
    patient, late = asked.ask("audit"), asked.ask("audit", secs=-1.0)
    asked.look(training=False)
    assert "deadline" in asked.refusal(late)
    assert requests.read_answer(asked.run_dir, patient) is None


@pytest.mark.parametrize("hours", [-3, 3])
def test_a_request_is_not_late_because_the_author_s_clock_is_another_one(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    asked.look()
    with monkeypatch.context() as there:
        moment = time.time() + hours * 3600
        there.setattr("time.time", lambda: moment)
        id_, late = asked.ask("save"), asked.ask("audit", secs=-1.0)
    assert "deadline" in asked.refusal(late)
    assert asked.answer(id_).done


def test_a_request_that_was_there_before_the_job_is_not_done_late(asked: Asked) -> None:
    assert "deadline" in asked.refusal(asked.ask("leave", secs=-1.0))


def test_a_request_that_waits_when_the_job_restarts_is_answered_by_the_next_attempt(
    asked: Asked, tmp_path: Path
) -> None:
    id_ = asked.ask("save")
    asked.look()  # taken by the job, which dies before its next boundary
    with asked.job.next_attempt() as again:
        found = Asked(again, tmp_path).answer(id_)
    assert (found.done, found.attempt) == (True, 1)


def test_whoever_still_waits_when_the_job_ends_is_told_so(asked: Asked) -> None:
    asked.look()
    id_ = asked.ask("audit")
    asked.of_job.finish(asked.run_dir)
    assert "The job has ended at step 0" in asked.refusal(id_)


def test_whoever_stops_the_job_is_answered_before_it_exits(asked: Asked) -> None:
    id_ = asked.ask("leave")
    asked.look()
    asked.of_job.left(asked.run_dir, "")
    found = requests.stopped_by(asked.run_dir, 0)
    assert found == requests.read_answer(asked.run_dir, id_)
    assert found is not None
    assert (found.author, found.details) == ("me", {"saved": True})
    assert requests.stopped_by(asked.run_dir, 1) is None


HOSTILE: dict[str, Any] = {
    "empty": b"",
    "no-json": b"{",
    "a-list": b"[]",
    "too-deep": b'{"kind":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    "huge": b'{"kind": "' + b"a" * 2**21 + b'"}',
    "other-kind": {"kind": "format the disk"},
    "no-deadline": {"deadline": "tomorrow"},
    "infinite": b'{"kind": "save", "author": "", "requested_at": 0, "deadline": 1e999}',
    "long-author": {"author": "a" * 300},
    "surrogate": {"author": "\ud800"},
    "surrogate-kind": {"kind": "\ud800"},
    "surrogate-name": {"kind": "pull", "name": "\ud800"},
    "pull-of-nothing": {"kind": "pull"},
    "name-of-nothing": {"name": "dense/bias"},
    "rows-backwards": {"kind": "pull", "name": BIAS, "rows": [[3, 1]]},
    "many-rows": {"kind": "pull", "name": BIAS, "rows": [[0, 1]] * 10_001},
    "negative-row": {"kind": "pull", "name": BIAS, "rows": [[-1, 2]]},
    "late": {"deadline": 0.0},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_request_is_refused_with_a_reason_and_delays_no_other(asked: Asked, name: str) -> None:
    content = HOSTILE[name]
    if isinstance(content, dict):
        usual = {"kind": "save", "author": "you", "requested_at": 0.0, "deadline": time.time() + 60}
        content = json.dumps(usual | content).encode()
    good = asked.ask("audit")
    (asked.run_dir / "inbox" / "0-bad.request.json").write_bytes(content)
    assert asked.refusal("0-bad")
    eventually(lambda: not (asked.run_dir / "inbox" / "0-bad.request.json").exists())
    asked.look()
    asked.job.train(3)
    eventually(lambda: any(good in ended.asked_by for ended in asked.ended))


def test_what_cannot_be_read_or_removed_is_answered_once(asked: Asked) -> None:
    inbox = asked.run_dir / "inbox"
    good = asked.ask("save")
    (inbox / "a-directory.request.json").mkdir()
    os.mkfifo(inbox / "a-pipe.request.json")
    (inbox / "a-link.request.json").symlink_to("/dev/zero")
    assert asked.answer(good).done
    for name in ("a-directory", "a-pipe", "a-link"):
        assert "no request" in asked.refusal(name)
    answer = inbox / "a-directory.answer.json"
    before = answer.stat().st_mtime_ns
    asked.look()
    asked.job.train(1)
    assert answer.stat().st_mtime_ns == before


def test_answers_that_nobody_fetches_are_removed_after_an_hour(asked: Asked) -> None:
    id_ = asked.ask("pull", name=BIAS)
    asked.answer(id_)
    eventually(lambda: not list(requests.waiting(asked.run_dir)))
    for path in (asked.run_dir / "inbox").glob(f"{id_}.*"):
        os.utime(path, (0, 0))
    requests.clean(asked.run_dir)
    left = (path.name for path in (asked.run_dir / "inbox").iterdir())
    assert {name for name in left if not name.endswith(".request.json")} == set()  # removed behind its answer


def test_an_author_who_gives_up_leaves_nothing_behind(asked: Asked) -> None:
    id_ = asked.ask("audit")
    requests.forget(asked.run_dir, id_)
    asked.look()
    assert not list((asked.run_dir / "inbox").iterdir())


def test_an_answer_that_the_disk_does_not_take_is_written_later(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failures = requests.write_durably, [OSError(28, "No space left on device")]

    def write(path: Path, chunks: Any) -> None:
        if failures:
            raise failures.pop()
        real(path, chunks)

    monkeypatch.setattr(requests, "write_durably", write)
    id_ = asked.ask("pull", name="nothing")
    asked.look()
    eventually(lambda: not failures)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + RETRY_SECS + 1)
    assert "There is no variable" in asked.refusal(id_)


def test_a_request_that_is_not_valid_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(UpdateRefused, match="names a variable"):
        requests.submit(tmp_path, "pull", author="me", timeout_secs=1.0)
    assert not list(tmp_path.iterdir())
