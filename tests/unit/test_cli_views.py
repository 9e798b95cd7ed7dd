"""`replicast status`, `log`, `show`, `inspect` and `audit`: how they look, and how they end."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from replicast.cli import runs, texts
from replicast.core.entries import Stage
from replicast.storage import inbox
from replicast.storage.claims import Fence
from replicast.storage.run_files import (
    ENDED,
    Change,
    JobState,
    WorkerNote,
    age,
    append_audit,
    append_metrics,
    read_run_info,
    write_change,
    write_run_info,
    write_worker_note,
)
from replicast.update.audit_report import Deviation, Difference
from replicast.update.edits import BFLOAT16, Variable
from replicast.update.schema import Schema
from replicast.update.update import Update
from tests.unit.played_job import (
    BIAS,
    SCHEMA,
    START,
    PlayedJob,
    flat,
    has,
    heard_of,
    invoke,
    made_run,
    output_of,
    tensors,
)
from tests.unit.test_audit import report

pytestmark = pytest.mark.usefixtures("wall_clock_stands_still")

EQUAL: dict[str, Any] = dict.fromkeys(("differences", "healed", "requests", "declared"), ())
EQUAL |= {"outcome": "equal", "attempt": 0}


def filled(run: Path) -> None:
    """Two committed updates, one of which is verified; one that waits, one that was refused."""
    job = PlayedJob(run)
    update = Update(id="first", author="ann@box", note="fix the\nbias \x1b[31m[red]", reset_slots=True)
    update = (
        update.add("dense/bias", BIAS).scale("dense/kernel", 0.5).add("dense/kernel", np.ones((4, 3), "f4"))
    )
    inbox.submit(run, update)
    job.act_all()
    job.stops_at = Stage.COMMITTED
    inbox.submit(run, Update(id="second").assign_rows("embeddings", [1, 3], np.ones((2, 2), BFLOAT16)), 4000)
    job.act_all()
    job.fate = Stage.REFUSED
    (run / "inbox" / "second.safetensors").unlink(missing_ok=True)
    inbox.submit(run, Update(id="third").assign("learning_rate", 1))
    job.act_all()
    inbox.submit(run, Update(id="fourth" + "x" * 60).assign("learning_rate", 1))
    append_metrics(run, (5, time.time(), {"loss": 0.125, "accuracy": math.nan}))


def note(
    run: Path, rank: int, *, attempt: int = 0, step: int = 5, secs_ago: float = 0.0, waiting_for: str = ""
) -> None:
    at = time.time() - secs_ago
    write_worker_note(run, WorkerNote(rank, 1, "box", step, attempt, at, not waiting_for, waiting_for))


def fits(output: str) -> bool:
    return max(len(line.rstrip()) for line in output.splitlines()) <= 80 and "\x1b" not in output


def test_status_shows_workers_metrics_updates_and_what_waits(run: Path) -> None:
    filled(run)
    result = output_of(0, "status", run)
    assert fits(result)
    hostile = "ann@box: fix the bias \\x1b[31m[red]"
    head = ("Training at step 5\nrun: 2 workers", "0  100      box", "0 s ago", "loss 0.125  accuracy nan")
    waiting = ("1 in the inbox", "fourthxxx", "proposed", "refused", "Worker 1 has no room")
    assert has(result, *head, "verified", "committed", hostile, *waiting)
    seen = json.loads(
        invoke("status", run, "--json").output, parse_constant=lambda name: pytest.fail(f"{name} is not JSON")
    )
    assert seen["step"] == 5
    assert seen["metrics"]["values"] == {"loss": 0.125, "accuracy": "nan"}
    assert seen["refused"][0]["refusal"]["worker"] == 1


def test_notes_and_tags_are_kept_and_shown_by_every_view(run: Path) -> None:
    filled(run)
    assert (
        output_of(0, "note", run, "--note", "a baseline\x1b[2J", "--tag", "may")
        == "#may a baseline\\x1b[2J\n"
    )
    output_of(0, "note", run, "1", "--tag", "good", "--tag", "kept")
    assert has(output_of(0, "status", run), "2 workers\n#may a baseline", "#good #kept")
    assert has(output_of(0, "log", run), "#good #kept")
    assert has(output_of(0, "show", run, "first"), "noted", "#good #kept")
    assert has(output_of(0, "list", "."), "#may a baseline")
    assert output_of(0, "note", run, "--tag", "") == "a baseline\\x1b[2J\n"
    assert has(output_of(2, "note", run), "Give --note or --tag")
    assert has(output_of(1, "note", run, "nothing", "--tag", "x"), "There is no update nothing")


def test_runs_are_listed_with_loss_and_time_those_that_failed_first(run: Path) -> None:
    filled(run)
    note(run, 0)
    broken = made_run(run.with_name("broken"))
    append_metrics(broken, (5, time.time(), {"mae": 0.25}))
    write_change(broken, Change(JobState.FAILED, 0, reason="ValueError: no data"))
    output = output_of(0, "list", ".")
    assert output.split()[:5] == ["run", "loss", "ran", "workers", "state"]
    first, second = output.index("broken"), output.index("Training at")
    assert first < second
    assert has(output[first:second], "0.25", "failed")
    assert has(output[second - 40 :], "0.125", "Training at step")
    assert has(output, "broken: Failed at step 5: ValueError: no data, 0 s ago")
    listed = [json.loads(line) for line in invoke("list", ".", "--json").output.splitlines()]
    assert [one["metrics"]["values"].get("mae") for one in listed] == [0.25, None]
    assert all(abs(one["began_at"] - time.time()) < 600 for one in listed)


def test_status_says_how_the_job_was_started(run: Path) -> None:
    PlayedJob(run, attempt=1)
    first, last = json.loads(invoke("status", run, "--json").output)["starts"]
    assert (first["attempt"], first["command"], last["attempt"]) == (0, [], 1)
    assert {name: last[name] for name in START} == {**START, "command": list(START["command"])}
    assert has(output_of(0, "status", run), "train.py --lr 0.1, commit 01234567")


@pytest.mark.parametrize(
    ("attempt", "secs_ago", "waiting_for", "said"),
    [
        (1, 0.0, "", "0 s ago"),
        (0, 55.0, "", "not seen in this attempt yet"),
        (1, 55.0, "", "not seen for 55 s"),
        (1, 79.0, ENDED, "exited 79 s ago"),
        (1, 2.0, "worker 0", "2 s ago, waits for worker 0"),
    ],
)
def test_status_says_how_each_worker_is(
    run: Path, attempt: int, secs_ago: float, waiting_for: str, said: str
) -> None:
    note(run, 0, attempt=1)
    note(run, 1, attempt=attempt, secs_ago=secs_ago, waiting_for=waiting_for)
    line = next(line for line in invoke("status", run).output.splitlines() if line.lstrip().startswith("1  "))
    assert line.rstrip().endswith(said)


@pytest.mark.parametrize(
    ("own", "others", "said"),
    [
        (0.08, 0.03, "slow for 4 min: needs 80.0 ms per step, the others 30.0 ms"),
        (0.04, 0.03, ""),  # Alike.
        (0.008, 0.001, ""),  # Eight times as long, and no matter: a step takes 0.1 s.
        (0.08, None, ""),  # Not measured.
    ],
)
def test_status_says_who_holds_up_the_others_and_since_when(
    run: Path, own: float, others: float | None, said: str
) -> None:
    for rank, secs in ((0, others), (1, own)):
        now = time.time()
        known = WorkerNote(rank, 1, "box", 5 + 90 * rank, 0, now, training=True, waiting_for="")
        write_worker_note(run, structs.replace(known, step_secs=0.1, own_secs=secs, own_since=now - 240))
    output = flat(invoke("status", run).output)
    assert flat(said) in output
    assert output.count("slow") == bool(said), "however far apart the steps of their notes are"


def test_status_says_who_is_missing(run: Path) -> None:
    heard_of(run, secs_ago=12.2)
    output = invoke("status", run).output
    assert output.count("not seen for 12 s") == 2
    assert "Not running: last heard from 12 s ago at step 5" in output
    (run / "workers" / "1.json").unlink()
    assert "never seen" in invoke("status", run).output


def operation(**fields: object) -> dict[str, object]:
    known = {"id": "x", "kind": "update", "stage": "prepared", "step": None, "waits_for": "", "author": ""}
    return {**known, "note": "", **fields}


def test_status_shows_what_is_under_way_while_the_job_runs(run: Path) -> None:
    hostile = operation(kind="audit", author="\x1b[2Jann", waits_for="worker [red]1[/red]\x07", step=12)
    written = {"step": 5, "operations": [operation(note="why"), hostile, "rubbish", None]}
    (run / "operations.json").write_text(json.dumps(written))
    output = invoke("status", run).output
    told = ("under way", "update x", "prepared", "why", "audit x", "12", "\\x1b[2Jann", "[red]1[/red]\\x07")
    assert has(output, *told)
    assert "\x1b" not in output
    heard_of(run, secs_ago=60)
    assert "under way" not in invoke("status", run).output


@pytest.mark.parametrize("content", ["", "[]", "{", '{"operations": 5}', '{"operations": [[]]}', "x" * 2**21])
def test_operations_that_cannot_be_read_hide_nothing(run: Path, content: str) -> None:
    filled(run)
    (run / "operations.json").write_text(content)
    result = invoke("status", run)
    assert (result.exit_code, "verified" in result.output, "under way" in result.output) == (0, True, False)
    (run / "operations.json").unlink()
    os.mkfifo(run / "operations.json")
    assert invoke("status", run).exit_code == 0


def test_a_scheduled_update_is_listed_until_it_is_committed(run: Path) -> None:
    job = PlayedJob(run)
    job.stops_at = Stage.SCHEDULED
    inbox.submit(run, Update(id="later", author="ann").assign("learning_rate", 1), 40)
    job.act_all()
    output = invoke("status", run).output
    assert has(output, "1 scheduled", "later", "40", "assign optimizer/learning_rate", "ann")
    assert "in the inbox" not in output
    assert "40, chosen by its author" in invoke("show", run, "later").output
    assert "The journal is empty" in invoke("log", run).output


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_watching_refreshes_until_ctrl_c(
    run: Path, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = []

    def pause(secs: float) -> None:
        pauses.append(secs)
        if len(pauses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(runs.time, "sleep", pause)
    result = invoke("status", run, "--watch", *options)
    assert (result.exit_code, pauses) == (0, [1.0] * 3)
    assert result.output.count("run: 2 workers" if not options else '"run": "run"') == 3


def test_the_log_is_a_table_that_fits_or_one_object_per_line(run: Path) -> None:
    assert "The journal is empty" in invoke("log", run).output
    filled(run)
    result = output_of(0, "log", run)
    assert fits(result)
    assert has(result, "model/dense/bias", "(+1)", "reset 1 slots", "0.25 s", "4000 committed")
    first, second = map(json.loads, invoke("log", run, "--json").output.splitlines())
    assert first["digests"] == {"0": "a" * 32, "1": "a" * 32}
    assert (second["stage"], second["digests"], second["verified_at"]) == ("committed", None, None)
    assert json.loads(invoke("log", run, "-n", 1, "--json").output) == second


def test_show_tells_everything_of_a_committed_update_and_the_receipt_of_every_attempt(run: Path) -> None:
    filled(run)
    PlayedJob(run, attempt=1).replay()
    by_number, by_id, by_beginning = (output_of(0, "show", run, which) for which in ("1", "first", "fir"))
    assert by_number == by_id == by_beginning
    assert fits(by_number)
    receipts = [f"at step 7, attempt {attempt}: verified" for attempt in (0, 1)]
    digests = ("worker 0", "worker 1", "a" * 32, "equal")
    assert has(by_number, "verified", "ann@box", "sha256", *receipts, *digests, "3.0 ms", "2.236")
    assert has(by_number, "change", "dense/bias -1 ▄ █ 2")
    scheduled = invoke("show", run, 2).output
    assert "4000, chosen by its author" in scheduled
    assert "assign rows (2)" in scheduled
    assert json.loads(invoke("show", run, 1, "--json").output)["edits"][0]["values"]["maximum"] == 2


def test_log_status_and_show_tell_from_what_to_what_a_value_was_set(run: Path) -> None:
    job = PlayedJob(run, stops_at=Stage.COMMITTED)
    inbox.submit(run, Update(id="rate").scale("learning_rate", 0.5))
    assert "scale learning_rate by 0.5" in flat(output_of(0, "status", run)), "as it waits"
    job.act_all()
    assert "scale optimizer/learning_rate by 0.5" in flat(output_of(0, "log", run)), "before it is applied"
    job.replay()
    steps = ((step, time.time() + step - 7, {"loss": 2.0 if step <= 7 else 1.0}) for step in range(1, 40))
    append_metrics(run, *steps)
    for command in (["log", run], ["status", run], ["show", run, 1]):
        assert has(output_of(0, *command), "scale optimizer/learning_rate 0.001", "→ 0.0005")
        assert has(output_of(0, *command), "loss 2 ± 0 (7 steps) → 1 ± 0 (20 steps)")
    told = json.loads(invoke("log", run, "--json").output)
    assert told["texts"] == ["scale optimizer/learning_rate 0.001 → 0.0005"]
    assert told["receipts"][-1]["effects"][0]["after"] == 0.0005


def test_show_tells_of_updates_that_wait_were_refused_or_are_in_no_journal(run: Path) -> None:
    filled(run)
    inbox.note_stage(run, "x", Stage.VERIFIED, receipt=PlayedJob(run).receipt("x", 1, 7))
    assert has(output_of(0, "show", run, "fourth"), "proposed", "learning_rate")
    assert "Worker 1 has no room" in output_of(0, "show", run, "third")
    assert "a" * 32 in output_of(0, "show", run, "x")


def test_show_says_when_nothing_or_too_much_is_meant(run: Path) -> None:
    for update_id in ("same-1", "same-2"):
        inbox.submit(run, Update(id=update_id).assign("learning_rate", 1))
    assert "no update" in output_of(1, "show", run, "")
    assert "may be 2 updates: same-1, same-2" in output_of(1, "show", run, "same")


def test_a_damaged_payload_is_told_after_what_is_known(run: Path) -> None:
    filled(run)
    payload = next(run.glob("groups/*/000001.safetensors"))
    content = payload.read_bytes()
    payload.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert has(output_of(1, "show", run, 1), "ann@box", "sha256 is not that of its entry")
    entry = payload.with_name("log.jsonl")
    entry.write_bytes(entry.read_bytes().replace(b"ann@box", b"bob@box"))
    for command in (["log", run], ["status", run], ["show", run, 1]):
        assert "is damaged" in output_of(1, *command)


def test_hostile_names_in_the_inbox_are_shown_without_control_characters(run: Path) -> None:
    (run / "inbox").mkdir()
    name = b"\x1b[31m\xff.safetensors"
    (run / "inbox" / os.fsdecode(name)).write_bytes(b"rubbish")
    output = invoke("status", run).output
    assert "\\x1b[31m\\udcff" in output
    inbox.refuse(run, inbox.waiting(run)[0].path, inbox.UpdateRefused("\x1b[31mno\x07"))
    for command in (["status", run], ["show", run, os.fsdecode(name).removesuffix(".safetensors")]):
        result = invoke(*command)
        assert (result.exit_code, "\x1b" in result.output, "\x07" in result.output) == (0, False, False)
    assert json.loads(invoke("status", run, "--json").output)["refused"]


def test_runs_are_listed_with_how_they_are_and_what_is_no_run_is_not(run: Path) -> None:
    (run.parent / "other").mkdir()
    assert has(output_of(0, "list", run.parent), "run", "2  Training at step 5")
    assert json.loads(invoke("list", run.parent, "--json").output)["step"] == 5
    assert "There is no run in other" in output_of(0, "list", "other")


def test_logs_prints_the_last_lines_and_follows_what_comes_and_a_restart(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(attempt: int, *lines: str) -> None:
        path = run / "logs" / f"attempt-{attempt}" / "worker-1.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.writelines(f"{line}\n" for line in lines)

    def stop() -> None:
        raise KeyboardInterrupt

    write(0, "one", "two", "three \x1b[31mred\x1b[2J")
    assert output_of(0, "logs", run, 1, "--lines", 2) == "two\nthree red\n"
    assert "There is no log" in output_of(1, "logs", run), "without a worker it is worker 0"
    later = iter([lambda: None, lambda: write(0, "four"), lambda: write(1, "again"), stop])
    monkeypatch.setattr(runs.time, "sleep", lambda _secs: next(later)())
    assert output_of(0, "logs", run, 1, "--lines", 3, "-f") == "one\ntwo\nthree red\nfour\nagain\n"


def test_inspect_lists_the_variables_of_a_run_by_the_names_that_an_update_may_use(run: Path) -> None:
    result = output_of(0, "inspect", run)
    assert fits(result)
    for variable in SCHEMA:
        line = next(line for line in result.splitlines() if line.startswith(f"{variable.name} "))
        assert variable.dtype in line
    assert result.splitlines()[-1].startswith("6 variables, ")
    assert "is not a run directory. Perhaps: " in output_of(2, "inspect", run.parent)


def test_inspect_lists_the_tensors_of_a_plain_file(run: Path) -> None:
    path = tensors("delta", dense__bias=BIAS, embeddings=np.zeros((10, 2), "f4").astype(BFLOAT16))
    result = output_of(0, "inspect", path)
    assert fits(result)
    assert has(result, "dense/bias", "10×2", "40 B", "2.236", "bfloat16")
    assert "There is no file or run nowhere" in output_of(2, "inspect", "nowhere")


def test_inspect_takes_saved_updates_and_payloads_of_the_journal(run: Path) -> None:
    filled(run)
    payload = next(run.glob("groups/*/000001.safetensors"))
    assert "reset to 0" in output_of(0, "inspect", payload)
    Update().save("empty.safetensors")
    Path("rubbish.safetensors").write_bytes(b"rubbish")
    output_of(1, "inspect", "rubbish.safetensors")
    assert "no edits" in invoke("inspect", "empty.safetensors").output


def test_sizes_and_times_are_short() -> None:
    assert [texts.size(n) for n in (0, 999, 1000, 99_960, 999_600, 5_000_000_000_000)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "100 kB",
        "1.0 MB",
        "5000 GB",
    ]
    assert [texts.seconds(s) for s in (0.0031, 0.25, 300.4)] == ["3.1 ms", "0.25 s", "300 s"]
    assert [age(s) for s in (-1, 12.2, 600, 90_000, 400_000)] == ["0 s", "12 s", "10 min", "25 h", "5 d"]
    assert texts.number(1234567.0) == "1.235e+06"
    now = time.time()
    assert texts.when(now) == time.strftime("%H:%M:%S", time.localtime(now))
    assert texts.when(now - 3 * 86_400) == time.strftime("%Y-%m-%d", time.localtime(now - 3 * 86_400))


def test_what_a_new_start_has_yet_to_come_to_is_committed_and_not_verified(run: Path) -> None:
    filled(run)
    for attempt, step, stage in ((0, 5, "verified"), (1, 6, "committed"), (1, 7, "verified")):
        note(run, 0, attempt=attempt, step=step)
        assert json.loads(invoke("log", run, "--json").output.splitlines()[0])["stage"] == stage


def test_a_job_without_a_journal_is_not_said_to_have_committed_nothing(run: Path) -> None:
    for journaled, said in ((True, "no update has been committed yet"), (False, "keeps no journal")):
        write_run_info(Fence(run, attempt=0), structs.replace(read_run_info(run), journaled=journaled))
        for command in ("log", "status"):
            assert said in invoke(command, run).output, command


def test_the_log_is_in_the_order_in_which_updates_are_applied(run: Path) -> None:
    job = PlayedJob(run)
    for update_id, step in (("first", 40), ("second", 20), ("third", 30)):
        inbox.submit(run, Update(id=update_id).assign("learning_rate", 1), step)
        job.act_all()
    listed = [json.loads(line)["id"] for line in invoke("log", run, "--json").output.splitlines()]
    assert listed == ["second", "third", "first"]
    assert [one["id"] for one in json.loads(invoke("status", run, "--json").output)["updates"]] == listed


def test_status_shows_the_last_audit_and_that_it_is_of_an_earlier_attempt(run: Path) -> None:
    assert "audit" not in invoke("status", run).output
    append_audit(run, report(time=time.time(), **EQUAL))
    said = output_of(0, "status", run)
    assert has(said, "audit 3 at step 300: 8 variables are equal on 3 workers (0 s ago)")
    note(run, 0, attempt=1)
    assert has(output_of(0, "status", run), "in attempt 0: none since the restart")


def test_in_a_pipe_no_name_is_broken(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS")
    name = f"model/{'block_' * 30}kernel"
    schema = Schema([*SCHEMA, Variable(name, (), "float32", "trainable")])
    write_run_info(Fence(run, attempt=0), structs.replace(read_run_info(run), schema=schema))
    inbox.submit(run, Update(id="x" * 90, note="why " * 60).assign(name, 1.0))
    listed = invoke("inspect", run).output
    assert any(line.startswith(f"{name} ") for line in listed.splitlines())
    assert "scalar" in listed
    assert "x" * 90 in invoke("status", run).output
    assert name in invoke("push", run, "--set", f"{name}=1", "--dry-run").output


def test_in_a_pipe_the_log_is_not_as_wide_as_its_longest_reason(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS")
    inbox.submit(run, Update(id="why", note="because " * 60).assign("learning_rate", 1.0))
    lines = invoke("status", run).output.splitlines()
    assert "because because" in lines[-1]
    assert max(map(len, lines)) < 130
    assert not [line for line in lines if line != line.rstrip()]


def test_without_an_audit_it_says_so_and_suggests_one_while_the_job_runs(run: Path) -> None:
    assert "give --now" in output_of(0, "audit", run)
    assert output_of(0, "audit", run, "--json") == ""
    heard_of(run, secs_ago=60)
    result = output_of(0, "audit", run)
    assert ("--now" in result, "No audit was made. Not running: last heard from" in result) == (False, True)


def test_the_list_of_audits_says_when_what_who_since_when_and_what_was_done(run: Path) -> None:
    append_audit(run, report(number=1, step=200, **EQUAL))
    append_audit(run, report(requests=(), time=time.time()))
    result = output_of(0, "audit", run)
    first, second, *details = result.splitlines()
    assert first == "1970-01-01  audit 1 at step 200: 8 variables are equal on 3 workers"
    assert second.startswith(time.strftime("%H:%M:"))
    for said in ("audit 3 at step 300", "some step from 201 to 290", "healed by update 17"):
        assert said in second
    assert details[0].startswith("    model/dense/kernel: worker 1 differs from workers 0 and 2 (majority)")
    assert "worker 1: 1 of 12 elements" in details[1]
    (line,) = invoke("audit", run, "--json", "--last", 1).output.splitlines()
    assert json.loads(line)["number"] == 3


def test_a_long_audit_is_cut_and_hostile_text_and_times_are_harmless(run: Path) -> None:
    append_audit(run, report(number=1, time=1e300, **EQUAL))
    by = {1: Deviation(1, 2, 0, 0, (0,))}
    found = tuple(Difference(f"model/\x1b[31m{n}", ((0,), (1,)), 0, "coordinator", by) for n in range(9))
    append_audit(run, report(differences=found, outcome="warned", healed=(), last_equal=None, requests=()))
    result = output_of(1, "audit", run)
    assert has(result, "audit 1", "since step 290 or before", "and 9 more lines")
    assert "\x1b" not in result


@pytest.mark.parametrize(
    ("fields", "code"), [(EQUAL, 0), ({}, 0), ({"outcome": "warned"}, 1), ({"outcome": "raised"}, 1)]
)
def test_the_exit_code_of_an_audit_says_whether_replicas_differ_still(
    run: Path, fields: dict[str, Any], code: int
) -> None:
    append_audit(run, report(**fields | {"requests": ()}))
    assert invoke("audit", run).exit_code == code


def failed_run(name: str, reason: str) -> None:
    path = made_run(Path("runs") / name)
    write_change(path, Change(JobState.FAILED, 1, workers=2, step=48, worker=0, reason=reason))


def test_the_list_has_the_reason_of_a_failed_run_in_a_line_below_the_table(run: Path) -> None:
    made_run(Path("runs") / "good")
    failed_run("bad", "ValueError: no row 7: ask (train.py:58: model.fit({1: 2}, y, callbacks=[f(g())]))")
    failed_run("killed", "killed by SIGKILL")
    output = output_of(0, "list", "runs")
    table, *reasons = output.rstrip("\n").split("\n\n")
    where = "Failed at step 48, attempt 1 (worker 0)"
    assert [one.rpartition(",")[0] for one in sorted(reasons)] == [
        f"bad: {where}: ValueError: no row 7: ask (train.py:58: model.fit({{1: 2}}, y, callbacks=[f(g())]))",
        f"killed: {where}: killed by SIGKILL",
    ]
    assert max(map(len, table.splitlines())) <= 80
    assert table.count("failed") == 2
    assert "ValueError" not in table
