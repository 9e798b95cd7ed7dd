"""The HTTP interface: everything that the page does, for any program."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from replicast.client import connect
from replicast.page import app as api
from replicast.page.app import ROWS, RUN
from replicast.page.live import runs_in
from replicast.page.openapi import description
from replicast.page.web_server import MAX_FILES
from replicast.storage.run_files import Around, JobState, Sample, append_metrics
from replicast.update.update import Update
from tests.page.conftest import BEARER, Client, Serve
from tests.page.played_run import PlayedRun
from tests.page.prompt_run import PromptRun
from tests.unit.played_job import made_run

FIRST = "/api/runs/first"
DELTA = np.array([0.1, 0.2, 0.3], np.float32)


def plain_file(**tensors: np.ndarray) -> bytes:
    return safetensors.numpy.save({name.replace("__", "/"): value for name, value in tensors.items()})


def saved(update: Update) -> bytes:
    return b"".join(bytes(chunk) for chunk in update.file_chunks())


def test_everything_can_be_read_without_a_token_on_this_machine(client: Client, run: PromptRun) -> None:
    for path in ("", "/metrics", "/updates", "/audits", "/checkpoints", "/logs/1"):
        assert client.get(FIRST + path).status_code == 200
    (listed,) = client.get("/api/runs").json()
    assert (listed["name"], listed["state"], listed["step"], listed["actions"]) == (
        "first",
        "training",
        100,
        True,
    )
    status = client.get(f"{FIRST}/status").json()
    assert status.keys() == run.status().to_json().keys()
    assert status["metrics"]["values"] == {"loss": "nan"}
    schema = client.get(f"{FIRST}/schema").json()
    assert schema == run.schema().to_json()
    assert schema["variables"][0]["name"] == "model/dense/kernel"
    assert client.get("/healthz").text == "ok\n"


def test_a_new_run_under_the_name_of_a_removed_one_shows_nothing_of_it(serve: Serve, tmp_path: Path) -> None:
    client = serve(find=runs_in(tmp_path))
    for attempts, points, loss in ((3, 50, 0.25), (2, 90, 7.5)):
        for attempt in range(attempts):
            played = PlayedRun(tmp_path / "first")
            played.attempt = attempt
            played.prepare()
        for step in range(points):
            append_metrics(tmp_path / "first", (step, time.time(), {"loss": loss}))
        found = client.get(f"{FIRST}/metrics", params={"points": 1000 + points}).json()
        assert found["series"]["loss"]["values"] == [loss] * points
        starts = connect(tmp_path / "first").status().starts
        if attempts == 3:
            assert len(client.get(f"{FIRST}/status").json()["starts"]) == len(starts) == 3
            shutil.rmtree(tmp_path / "first")
            client.post(f"{FIRST}/audit", headers=BEARER)  # An action: what was read before is forgotten.
    assert client.get(f"{FIRST}/status").json()["starts"] == [one.to_json() for one in starts]


def push(client: Client, body: bytes, **query: object) -> httpx.Response:
    return client.post(f"{FIRST}/updates", params=query, content=body, headers=BEARER)


def test_a_plain_file_is_pushed_and_ends_with_its_receipt(client: Client, run: PromptRun) -> None:
    body = plain_file(dense__bias=DELTA)
    answer = push(client, body, operation="add", note="fix", author="ana", trial_steps=5)
    assert answer.status_code == 201
    view = client.get(f"{FIRST}/updates/{answer.json()['id']}").json()
    told = view["stage"], view["author"], view["note"], view["trial"]["steps"]
    assert told == ("verified", "ana", "fix", 5)
    assert view["digests"] == {"0": "a" * 32, "1": "a" * 32}
    assert run.done == ["push"]


def test_a_saved_update_keeps_its_id_and_another_with_its_id_is_a_conflict(
    client: Client, run: PromptRun
) -> None:
    update = Update(id="mine", author="li", note="why").add("dense/bias", DELTA)
    for _ in range(2):
        answer = push(client, saved(update))
        assert (answer.status_code, answer.json()["id"]) == (201, "mine")
    view = client.get(f"{FIRST}/updates/mine").json()
    assert (view["author"], view["note"], run.done) == ("li", "why", ["push"])
    answer = push(client, saved(Update(id="mine").add("dense/bias", 2 * DELTA)))
    assert (answer.status_code, answer.json()["error"]["type"]) == (409, "UpdateIdInUse")


def test_a_dry_run_says_what_an_update_would_do_and_changes_nothing(client: Client, run: PromptRun) -> None:
    answer = push(client, plain_file(dense__bias=DELTA), operation="add", dry_run="1")
    assert answer.status_code == 200
    (edit,) = answer.json()["edits"]
    assert (edit["variable"], edit["shape"]) == ("model/dense/bias", [3])
    assert edit["values"]["norm"] == pytest.approx(np.linalg.norm(DELTA))
    wrong = plain_file(dense__bias=np.full(4, np.nan, np.float32))
    answer = push(client, wrong, operation="add", dry_run="1")
    assert answer.json()["problems"][0]["variable"] == "model/dense/bias"
    assert run.done == []


@pytest.mark.parametrize("body", [b"", b"x", b"\xff" * 64, plain_file(nothing=DELTA)])
def test_a_wrong_file_is_refused_with_its_reason_and_leaves_nothing_behind(
    client: Client, run: PromptRun, body: bytes
) -> None:
    answer = push(client, body, operation="add")
    assert (answer.status_code, bool(answer.json()["error"]["problem"])) == (422, True)
    assert run.done == []
    assert push(client, plain_file(dense__bias=DELTA), operation="add").status_code == 201
    assert list((run.path / "inbox").glob("*upload*")) == []


def test_the_learning_rate_is_assigned_if_it_makes_sense(client: Client) -> None:
    answer = client.post(f"{FIRST}/learning-rate", json={"value": 0.0005, "id": "slower"}, headers=BEARER)
    assert (answer.status_code, answer.json()["id"]) == (201, "slower")
    (edit,) = client.get(f"{FIRST}/updates/slower").json()["edits"]
    assert (edit["operation"], edit["variable"]) == ("assign", "optimizer/learning_rate")
    for value in (0, -0.01, -1, "1", None):  # The page's form refuses them too.
        answer = client.post(f"{FIRST}/learning-rate", json={"value": value}, headers=BEARER)
        assert answer.status_code == 400


def test_a_scheduled_update_can_be_withdrawn_and_an_applied_one_reverted(
    client: Client, run: PromptRun
) -> None:
    push(client, saved(Update(id="later").add("dense/bias", DELTA)), at_step=5000)
    assert client.post(f"{FIRST}/updates/later/withdraw", headers=BEARER).json()["stage"] == "withdrawn"
    push(client, saved(Update(id="now").add("dense/bias", DELTA)))
    assert client.post(f"{FIRST}/updates/now/withdraw", headers=BEARER).status_code == 422
    examined = client.post(f"{FIRST}/updates/now/revert", json={"dry_run": True}, headers=BEARER)
    assert (examined.status_code, len(examined.json()["edits"])) == (200, 1)
    assert client.post(f"{FIRST}/updates/now/revert", headers=BEARER).status_code == 201
    assert run.done == ["push", "withdraw", "push", "push"]


@pytest.mark.parametrize("action", ["updates/{}/revert", "audit", "checkpoint", "stop"])
def test_an_action_answers_what_the_job_did_and_is_recorded_as_done_by_its_caller(
    client: Client, run: PromptRun, action: str
) -> None:
    push(client, saved(Update(id="a").add("dense/bias", DELTA)))
    push(client, saved(Update(id="b").scale("dense/kernel", 2)))
    client.post(f"{FIRST}/{action.format('a')}", json={"author": "ann"}, headers=BEARER)
    answer = client.post(f"{FIRST}/{action.format('b')}", headers=BEARER).json()
    assert action not in ("checkpoint", "stop") or answer == {"step": 100}
    assert action != "audit" or answer["equal"] is True
    _, _, named, unnamed = run.authors
    assert (named, unnamed.partition("@")[0]) == ("ann", "page")
    run.running = False
    answer = client.post(f"{FIRST}/audit", headers=BEARER)
    assert (answer.status_code, answer.json()["error"]["problem"]) == (504, "The job is not running")


def test_values_can_be_read_by_row(client: Client) -> None:
    path = f"{FIRST}/variables/dense/kernel"
    answer = client.get(path, params={"rows": "0,2:4"}, headers=BEARER).json()
    assert (answer["name"], answer["rows"], answer["values"]) == (
        "model/dense/kernel",
        [0, 2, 3],
        [[0.0] * 3] * 3,
    )
    assert client.get(path, params={"rows": "0:100000000"}, headers=BEARER).status_code == 400
    error = client.get(path, params={"rows": "3-5"}, headers=BEARER).json()["error"]
    assert "Rows are given as 3,5,10:20" in error["problem"]
    error = client.get(path, params={"format": "csv"}, headers=BEARER).json()["error"]
    assert (error["received"], error["remedy"]) == ("format=csv", "See /openapi.json")


def test_values_that_are_too_many_for_json_come_as_a_file_and_larger_ones_by_row(
    client: Client, run: PromptRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"{FIRST}/variables/dense/kernel"
    monkeypatch.setattr(api, "MAX_JSON_BYTES", 47)  # One less than it has.
    refused = client.get(path, headers=BEARER)
    assert (refused.status_code, run.done) == (422, [])
    assert refused.json()["error"]["remedy"] == "Name rows, as in rows=0:100, or add format=safetensors"
    file = client.get(path, params={"format": "safetensors"}, headers=BEARER)
    assert file.headers["content-type"] == "application/octet-stream"
    (values,) = safetensors.numpy.load(file.content).values()
    assert (values.shape, values.dtype) == ((4, 3), np.float32)
    monkeypatch.setattr(api, "MAX_VALUES_BYTES", 47)
    for _ in range(2 * MAX_FILES):  # Those that are refused, and those that have ended, hold up no others.
        refused = client.get(path, params={"format": "safetensors"}, headers=BEARER)
        assert (refused.status_code, refused.json()["error"]["remedy"]) == (
            422,
            "Name rows, as in rows=0:100",
        )
        query = {"format": "safetensors", "rows": "1:3"}
        assert client.get(path, params=query, headers=BEARER).status_code == 200


def test_only_so_many_files_of_values_are_in_memory_at_a_time(
    serve: Serve, run: PromptRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, pull, goes_on = serve(), run.pull, threading.Event()
    begun = threading.Semaphore(0)

    def slow(**arguments: Any) -> Any:
        begun.release()
        assert goes_on.wait(60)
        return pull(**arguments)

    monkeypatch.setattr(run, "pull", slow)
    path = f"{FIRST}/variables/dense/kernel?format=safetensors"
    with ThreadPoolExecutor(MAX_FILES) as threads:
        slots = [threads.submit(client.get, path, headers=BEARER) for _ in range(MAX_FILES)]
        for _ in slots:
            assert begun.acquire(timeout=60)
        assert client.get(path, headers=BEARER).status_code == 503
        goes_on.set()
        assert [one.result(60).status_code for one in slots] == [200] * MAX_FILES
    assert client.get(path, headers=BEARER).status_code == 200


def test_of_a_large_update_only_the_header_is_read(serve: Serve, tmp_path: Path) -> None:
    made_run(tmp_path / "first")
    client, nbytes = serve(find=runs_in(tmp_path / "first")), 64 * 2**20
    for id_, size in (("large", nbytes), ("small", 4)):
        update = Update(id=id_).add("dense/kernel", np.zeros(size // 4, np.float32))
        header = next(iter(update.file_chunks()))
        (tmp_path / "first" / "inbox").mkdir(exist_ok=True)
        with (tmp_path / "first" / "inbox" / f"{id_}.safetensors").open("wb") as file:
            file.write(header)
            file.truncate(len(header) + size)
    tracemalloc.start()
    try:
        large = client.get(f"{FIRST}/updates/large").json()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (large["stage"], large["detailed"], peak < nbytes / 4) == ("proposed", False, True)
    assert large["edits"] == [{"operation": "add", "variable": "dense/kernel", "shape": [nbytes // 4]}]
    assert client.get(f"{FIRST}/updates/small").json()["detailed"] is True


def test_a_list_of_updates_with_very_many_edits_tells_those_of_the_latest(
    client: Client, run: PromptRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "MAX_EDITS", 5)
    for number in range(3):
        run.push(Update(id=f"u{number}").add("dense/bias", DELTA).scale("dense/kernel", 2))
    found = client.get(f"{FIRST}/updates").json()["updates"]
    told = [(one["id"], len(one["edits"]), one["edits_left_out"]) for one in found]
    assert told == [("u0", 0, 2), ("u1", 2, 0), ("u2", 2, 0)]


def test_no_answer_is_made_on_the_event_loop(
    client: Client, run: PromptRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.push(Update(id="x").add("dense/bias", DELTA))
    threads, real = [], json.dumps

    def noting(*arguments: Any, **options: Any) -> str:
        threads.append(threading.current_thread().name)
        return real(*arguments, **options)

    monkeypatch.setattr(json, "dumps", noting)
    for one in ROWS:
        if one.method == "GET":
            path = one.target({"which": "x", "update_id": "x", "worker": 0, "name": "dense/bias"})
            assert client.get(FIRST + path, headers=BEARER).status_code == 200
    assert set(threads) == {"page-call"}
    assert len(threads) >= 11


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/runs/other/status", 404),
        ("/api/runs/..%2Ffirst/status", 404),
        (f"{FIRST}/updates/nothing", 404),
        (f"{FIRST}/logs/7", 404),
        (f"{FIRST}/logs/0?lines=0", 400),
        (f"{FIRST}/metrics?points=-1", 400),
        (f"{FIRST}/metrics?what=1", 400),
        ("/nothing/at/all", 404),
        ("/static/..%2Fapp.py", 404),
        ("/static/app.py", 404),
    ],
)
def test_what_is_not_there_is_told_so(client: Client, path: str, status: int) -> None:
    answer = client.get(path)
    assert (answer.status_code, bool(answer.json()["error"]["problem"])) == (status, True)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("updates/{}", 404),
        ("logs/{}", 404),
        ("logs/0?lines={}", 400),
        ("metrics?since={}", 400),
        ("updates?last={}", 400),
        ("variables/dense/bias?rows={}", 400),
        ("variables/dense/bias?timeout={}", 400),
    ],
)
def test_numbers_of_thousands_of_digits_are_refused(
    serve: Serve, tmp_path: Path, path: str, status: int
) -> None:
    (made_run(tmp_path / "first") / "inbox").mkdir()
    client = serve(find=runs_in(tmp_path / "first"))
    for digits in ("9" * 4300, "9" * 4301, "-" + "9" * 5000):
        assert client.get(f"{FIRST}/{path.format(digits)}", headers=BEARER).status_code == status


def test_lengths_and_bodies_with_numbers_of_thousands_of_digits_are_refused(client: Client) -> None:
    digits = "9" * 5000
    answer = client.post(f"{FIRST}/audit", content=b"", headers={**BEARER, "Content-Length": digits})
    assert answer.status_code == 400
    body = f'{{"value": 1, "at_step": {digits}}}'.encode()
    assert client.post(f"{FIRST}/learning-rate", content=body, headers=BEARER).status_code == 400
    assert client.post(f"{FIRST}/updates/{digits}/revert", headers=BEARER).status_code == 404


def test_openapi_describes_every_endpoint(client: Client) -> None:
    described = client.get("/openapi.json").json()
    assert described == description(ROWS)
    for one in ROWS:
        entry = described["paths"][RUN + one.path][one.method.lower()]
        assert entry["summary"]
        assert all(
            parameter["description"]
            for parameter in entry["parameters"]
            if parameter["name"] in one.parameters
        )


def test_prometheus_can_read_it(client: Client, run: PromptRun, monkeypatch: pytest.MonkeyPatch) -> None:
    client.post(f"{FIRST}/learning-rate", json={"value": 0.5}, headers=BEARER)
    client.post(f"{FIRST}/audit", headers=BEARER)
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert {
        'replicast_step{run="first",worker="1"} 100.0',
        'replicast_updates{run="first",stage="verified"} 1.0',
        'replicast_metric{run="first",name="loss"} NaN',
        'replicast_last_audit_equal{run="first"} 1.0',
        'replicast_state{run="first",state="training"} 1.0',
    } <= set(answer.text.splitlines())
    status = replace(run.status(), state=JobState.FAILED, restarted=1)
    monkeypatch.setattr(run, "status", lambda: status)
    client.post(f"{FIRST}/audit", headers=BEARER)  # An action: what was read before is forgotten.
    assert {
        'replicast_state{run="first",state="failed"} 1.0',
        'replicast_state{run="first",state="training"} 0.0',
        'replicast_restarts_total{run="first"} 1.0',
        "# TYPE replicast_restarts_total counter",
    } <= set(client.get("/metrics").text.splitlines())


def test_prometheus_reads_how_long_the_parts_of_updates_took(client: Client, run: PromptRun) -> None:
    for value in (0.5, 0.25):
        client.post(f"{FIRST}/learning-rate", json={"value": value}, headers=BEARER)
    run.job.replay()  # A restart applies an update again: that is no other one.
    families = {one.name: one for one in text_string_to_metric_families(client.get("/metrics").text)}
    log = run.log()
    for part in ("prepare", "stall", "apply", "verify"):
        family = families[f"replicast_update_{part}_seconds"]
        assert family.type == "histogram"
        assert family.documentation
        samples = {(one.name[len(family.name) :], one.labels.get("le")): one.value for one in family.samples}
        took = [ended - begun for begun, ended in (one.timings[part] for one in log)]
        assert samples["_count", None] == len(took) == 2
        assert samples["_sum", None] == pytest.approx(sum(took))
        bounds = [le for name, le in samples if name == "_bucket"]
        assert bounds[-1] == "+Inf"
        for le in bounds:
            assert samples["_bucket", le] == sum(one <= float(le) for one in took), le
    assert samples["_bucket", "+Inf"] == 2
    assert log[0].timings["stall"][1] == log[0].receipts[0].verified_at
    assert families["replicast_update_stall_seconds"].samples[0].labels["run"] == "first"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("updates?operation=sum", None),
        ("updates?trial_mode=best", None),
        ("learning-rate", {"trial_mode": "best"}),
    ],
)
def test_a_wrong_value_is_told_with_the_right_ones(client: Client, path: str, body: object) -> None:
    given = {"content": b""} if body is None else {"json": {"value": 1.0} | body}
    error = client.post(f"{FIRST}/{path}", headers=BEARER, **given).json()["error"]
    right = "add, assign, scale, blend, add_rows, assign_rows, add_low_rank" if "sum" in path else "min, max"
    assert error["expected"] == f"one of {right}"
    assert re.fullmatch(r".* is not valid: (operation|trial_mode): Unknown value '\w+'", error["problem"])


def test_a_value_of_the_wrong_type_is_told_in_plain_words(client: Client) -> None:
    for value, said in (("x", "a number, received text"), (-1, "a number > 0.0")):
        answer = client.post(f"{FIRST}/learning-rate", json={"value": value}, headers=BEARER)
        assert answer.json()["error"]["problem"] == f"The body is not valid: value: Expected {said}"
    error = push(client, b"", operation="blend", weight="half").json()["error"]
    assert error["problem"] == "A parameter is not valid: weight: Expected a number or null, received text"


def test_an_operation_may_be_spelled_as_on_the_command_line(client: Client) -> None:
    rows = {
        "table/embeddings": np.ones((1, 2), ml_dtypes.bfloat16),
        "table/embeddings.indices": np.array([3]),
    }
    for spelled in ("assign_rows", "assign-rows"):
        answer = push(client, plain_file(**rows), operation=spelled, dry_run="1")
        assert [one["operation"] for one in answer.json()["edits"]] == ["assign_rows"]


def test_what_the_page_reads_of_a_million_steps_and_2000_updates_is_bounded(
    client: Client, run: PromptRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.push(Update(id="fix", note="drift", author="ana").add("dense/bias", DELTA), None, None)
    view = replace(run.show("fix"), others=(Around("accuracy", Sample(1.0, 0.1, 20), Sample(1.1, 0.1, 20)),))
    views = [replace(view, id=f"{number:032}", sequence=number) for number in range(1, 2001)]
    monkeypatch.setattr(run, "do_log", lambda last: views[-(last or 2000) :])
    with Path(str(run.path / "metrics.jsonl")).open("w") as file:
        for step in range(1, 1_000_001):
            loss = 100.0 if step == 777_777 else 1 + step % 7 / 10
            file.write(f'{{"step":{step},"time":{1.7e9 + step / 300:.6f},"values":{{"loss":{loss}}}}}\n')
    sample = client.get(f"{FIRST}/metrics?points=1200&sample=true")
    assert sample.json()["position"] == 0, "all of it was not read for that"
    assert len(sample.json()["series"]["loss"]["steps"]) == 1200
    assert len(sample.content) < 100_000
    metrics = client.get(f"{FIRST}/metrics?points=1200")
    (series,) = metrics.json()["series"].values()
    assert max(series["values"]) == 100.0, "every spike is visible"
    means = [mean for mean in series["means"] if mean is not None]
    assert np.median(means) == pytest.approx(1.3, abs=0.01), "the mean of all values, not of the extremes"
    assert len(series["steps"]) <= 1200
    assert len(metrics.content) < 100_000
    assert len(client.get(f"{FIRST}/updates?last=50").content) < 125_000
    assert len(client.get(f"{FIRST}/updates?last=1000").content) < 2_500_000
    assert len(client.get(f"{FIRST}/status").content) < 50_000
