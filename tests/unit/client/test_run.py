"""What every `Run` promises: one in a directory, and the same one served."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from msgspec import UNSET, structs

from replicast.client import Run, connect
from replicast.client.directory import DirectoryRun
from replicast.client.run import OPERATIONS, rows_of, rows_text
from replicast.core.entries import Stage
from replicast.errors import (
    NoAnswer,
    NotFound,
    ReplicasDiverged,
    RequestFailed,
    RequestRefused,
    UpdatePending,
    UpdateRefused,
)
from replicast.storage import inbox
from replicast.storage.inbox import InboxAnswer
from replicast.storage.journal import Updates
from replicast.storage.run_files import append_audit, append_metrics
from replicast.update.guard import examine
from replicast.update.schema import Schema
from replicast.update.trial import Histogram, Trial
from replicast.update.update import Update
from tests.page.live import TOKEN, served_run
from tests.unit.played_job import BIAS, LONG_AGO, SCHEMA, PlayedJob, heard_of, meanwhile
from tests.unit.test_audit import report

pytestmark = pytest.mark.usefixtures("wall_clock_stands_still")


@pytest.fixture(params=["directory", "served"])
def run(request: pytest.FixtureRequest, directory: Path) -> Iterator[Run]:
    if request.param == "directory":
        yield connect(directory)
        return
    with served_run(connect(directory)) as address:
        yield connect(address, token=TOKEN)


@pytest.fixture
def job(directory: Path, monkeypatch: pytest.MonkeyPatch) -> PlayedJob:
    """A job that acts whenever somebody waits for it."""
    played = PlayedJob(directory)
    meanwhile(monkeypatch, played.act)
    return played


def slower() -> Update:
    return Update(id="slower", note="too fast").assign("learning_rate", 0.5)


def test_a_push_ends_with_its_receipt_and_is_signed_by_whoever_pushes(run: Run, job: PlayedJob) -> None:
    pushed = run.push(slower())
    assert pushed.view().stage is Stage.PROPOSED
    receipt = pushed.result(timeout=120)
    assert (receipt.id, receipt.sequence, receipt.step) == ("slower", 1, 7)
    assert dict(receipt.digests) == {0: "a" * 32, 1: "a" * 32}
    (view,) = run.log()
    assert (view.stage, view.note, "@" in view.author) == (Stage.VERIFIED, "too fast", True)


def test_the_same_update_again_is_a_no_op_and_another_one_with_its_id_is_refused(
    run: Run, job: PlayedJob, directory: Path
) -> None:
    assert run.push(slower()).number is None
    assert run.push(slower()).number is None
    assert len(inbox.waiting(directory)) == 1
    other = Update(id="slower").assign("learning_rate", 0.25)
    with pytest.raises(UpdateRefused, match="Another update with this id"):
        run.push(other)
    run.push(slower()).result(timeout=120)
    again = run.push(slower())
    assert (again.number, again.result(timeout=0).sequence) == (1, 1)
    with pytest.raises(UpdateRefused, match="Another update with this id"):
        run.push(other)


def test_an_update_that_does_not_fit_is_refused_with_the_reason(run: Run, directory: Path) -> None:
    with pytest.raises(UpdateRefused) as caught:
        run.push(Update().add("dense/bias", np.ones(4, np.float32)))
    assert (caught.value.variable, caught.value.expected) == ("model/dense/bias", "(3,)")
    assert inbox.waiting(directory) == []


def test_what_is_not_an_update_is_refused_by_its_type(run: Run) -> None:
    for ask in (run.push, run.examine):
        with pytest.raises(TypeError, match=r"Expected an Update, such as .* Received: dict"):
            ask({"dense/bias": BIAS})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Expected a Trial"):
        run.push(slower(), trial=50)  # type: ignore[arg-type]


def test_step_and_trial_arrive(run: Run, directory: Path) -> None:
    trial = Trial(50, "accuracy", 0.05, "max")
    run.push(slower(), at_step=40, trial=trial)
    (waiting,) = inbox.waiting(directory)
    submitted = inbox.read(waiting.path)
    assert (submitted.at_step, submitted.trial) == (40, trial)
    with pytest.raises(UpdateRefused, match="Step 5 is past"):
        run.push(Update(id="late").assign("learning_rate", 1), at_step=5)


def test_a_push_to_a_job_that_is_not_running_is_refused_unless_it_is_for_the_next_start(
    run: Run, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meanwhile(monkeypatch, lambda _secs: None)
    heard_of(directory, secs_ago=35)
    with pytest.raises(UpdateRefused, match=r"(?s)Not running: .*next_start=True"):
        run.push(slower())
    assert inbox.waiting(directory) == []
    pushed = run.push(slower(), next_start=True)
    assert "It will take the update when it is started again" in pushed.warning
    with pytest.raises(UpdatePending, match=r"is proposed\. Not running: last heard from") as caught:
        pushed.result(timeout=1)
    assert (caught.value.stage, caught.value.update_id) == (Stage.PROPOSED, "slower")


@pytest.mark.parametrize(
    ("fate", "error", "said"),
    [
        (Stage.REFUSED, UpdateRefused, "Worker 1 has no room"),
        (Stage.FAILED, ReplicasDiverged, "worker 1 differs"),
    ],
)
def test_a_push_that_ends_badly_raises_as_a_ticket_does(
    run: Run, job: PlayedJob, fate: Stage, error: type[Exception], said: str
) -> None:
    job.fate = fate
    with pytest.raises(error, match=said):
        run.push(slower()).result(timeout=120)
    refusal = run.show("slower").refusal
    assert (refusal is None) == (fate is Stage.FAILED)
    assert refusal is None or (refusal.problem, refusal.worker) == (said, 1)
    assert [view.id for view in run.status().refused] == ["slower"] * (refusal is not None)


def test_what_waits_can_be_withdrawn_by_the_beginning_of_its_id(run: Run, directory: Path) -> None:
    pushed = run.push(slower())
    withdrawn = run.withdraw("slow", "wrong sign", "bob")
    assert (withdrawn.id, withdrawn.stage) == ("slower", Stage.WITHDRAWN)
    view = run.show("slower")
    assert (view.withdrawn_by, view.reason, view.texts) == (
        "bob",
        "wrong sign",
        ("assign learning_rate to 0.5",),
    )
    assert inbox.waiting(directory) == []
    with pytest.raises(NotFound, match="no update nothing"):
        run.withdraw("nothing")
    with pytest.raises(UpdateRefused, match="It was withdrawn by bob: wrong sign"):
        pushed.result(timeout=120)


def test_digits_alone_are_a_number_or_a_whole_id(run: Run, job: PlayedJob) -> None:
    """Otherwise `revert RUN 7` would revert an update whose random id begins with 7."""
    for id_ in ("7f3a91c4", "2024"):
        run.push(Update(id=id_).assign("learning_rate", 0.5))
    job.act_all()
    assert (run.show("7f").id, run.show("2024").id, run.show("2").id) == ("7f3a91c4", "2024", "2024")
    for ask in (run.show, run.revert, run.withdraw):
        with pytest.raises(NotFound, match="no update 7 in"):
            ask("7")


def test_log_and_show_tell_the_same_of_an_update(run: Run, job: PlayedJob) -> None:
    update = (
        Update(id="both", author="ann", reset_slots=True).add("dense/bias", BIAS).scale("dense/kernel", 0.5)
    )
    run.push(update)
    run.push(slower(), trial=Trial(5))
    job.act_all()
    first, second = run.log()
    assert (first.sequence, first.author, second.trial) == (1, "ann", Trial(5))
    assert run.log(last=1) == [second]
    shown = run.show("bo")
    assert (shown.id, shown.around, shown.sha256) == (first.id, first.around, first.sha256)
    assert shown.effects[1].histogram == Histogram(-1.0, 2.0, (1, 0, 2))
    assert first.effects == tuple(structs.replace(one, histogram=UNSET) for one in shown.effects), "shorter"
    assert shown.detailed
    assert [(one["variable"], one["operation"]) for one in shown.edits][:2] == [
        ("model/dense/bias", "add"),
        ("model/dense/kernel", "scale"),
    ]
    assert shown.edits[0]["values"]["norm"] == pytest.approx(5**0.5)
    assert run.show(2).id == "slower"
    with pytest.raises(NotFound, match="no update 9"):
        run.show(9)


def test_status_tells_workers_metrics_and_updates(run: Run, directory: Path, job: PlayedJob) -> None:
    run.push(slower()).result(timeout=120)
    run.push(Update(id="waits").assign("learning_rate", 1))
    append_metrics(directory, (5, time.time(), {"loss": 0.125, "accuracy": float("nan")}))
    seen = run.status()
    assert (seen.run, seen.running, seen.state, seen.size) == (run.where, True, "training", 2)
    assert [(note.rank, note.step) for note in seen.workers] == [(0, 5), (1, 5)]
    assert seen.metrics is not None
    assert (seen.metrics["step"], seen.metrics["values"]["loss"]) == (5, 0.125)
    assert np.isnan(seen.metrics["values"]["accuracy"])
    assert [view.stage for view in seen.updates] == [Stage.VERIFIED]
    assert [view.id for view in seen.waiting] == ["waits"]
    again = type(seen).from_json(seen.to_json())
    assert (again.workers, again.updates) == (seen.workers, seen.updates)
    assert again.to_json() == seen.to_json()
    brief = run.brief()
    assert (brief.run, brief.running, brief.step, brief.workers) == (run.where, True, 5, 2)
    assert run.checkpoints() == []


def test_a_run_and_its_updates_take_notes_and_tags_also_when_nothing_runs(
    run: Run, directory: Path, job: PlayedJob
) -> None:
    run.push(slower()).result(timeout=120)
    run.push(Update(id="waits").assign("learning_rate", 0.1))
    heard_of(directory, LONG_AGO)
    run.annotate(note=" the baseline ", tags=["paper", "paper", "may"])
    run.annotate(1, note="too large")
    run.annotate("slow", tags=["bad"], author="ada")
    run.annotate("waits", tags=["next"])
    brief, seen = run.brief().annotation, run.status()
    assert brief == seen.annotation
    assert (brief.note, brief.tags, "@" in brief.author) == ("the baseline", ("paper", "may"), True)
    (view,) = run.log()
    noted = view.annotation
    assert (noted.note, noted.tags, noted.author, str(noted)) == (
        "too large",
        ("bad",),
        "ada",
        "#bad too large",
    )
    assert run.show("slower").annotation == noted == seen.updates[0].annotation
    assert seen.waiting[0].annotation.tags == ("next",)
    run.annotate(note="", tags=[])
    assert str(run.brief().annotation) == ""


def test_notes_and_tags_have_limits_and_need_an_update(run: Run, directory: Path) -> None:
    with pytest.raises(NotFound):
        run.annotate("unknown", note="x")
    for given in ({"note": "x" * 10_001}, {"tags": ["x" * 51]}, {"tags": [str(n) for n in range(21)]}):
        with pytest.raises((RequestRefused, RequestFailed), match="length"):
            run.annotate(**given)
    assert not (directory / "annotations").exists()


def test_an_annotation_that_others_have_damaged_hides_nothing(run: Run, directory: Path) -> None:
    run.annotate(note="mine")
    path = directory / "annotations" / "_run.json"
    for content in (b"{", b'{"note": 1}', b'{"tags": ["' + b"x" * 200_000 + b'"]}'):
        path.write_bytes(content)
        assert str(run.brief().annotation) == ""
    path.unlink()
    path.symlink_to("/etc/hostname")
    assert str(run.brief().annotation) == ""
    (directory / "annotations").rename(directory / "elsewhere")
    (directory / "annotations").symlink_to("elsewhere")
    assert str(run.brief().annotation) == ""
    if isinstance(run, DirectoryRun):
        with pytest.raises(OSError, match="link"):
            run.annotate(note="mine")


def test_an_examination_tells_every_problem_and_pushes_nothing(run: Run, directory: Path) -> None:
    found = run.examine(Update().add("dense/kernl", BIAS).assign("learning_rate", float("nan")))
    assert len(found.problems) == 2
    assert "perhaps model/dense/kernel" in str(found.problems[0].expected)
    good = run.examine(slower())
    assert (good.problems, good.warnings, good.edits[0].variable) == ((), (), "optimizer/learning_rate")
    assert inbox.waiting(directory) == []


def test_a_learning_rate_of_0_is_warned_of_and_one_below_0_explained(run: Run) -> None:
    for update in (Update().assign("learning_rate", 0), Update().scale("learning_rate", 0)):
        (warning,) = run.examine(update).warnings
        assert "A rate that trains is positive" in warning
    with_schedule = Schema(SCHEMA, {"optimizer/learning_rate": "a schedule computes it"})
    for value, means in ((-1, "back to the schedule"), (-0.5, "half of what"), (-3, "3 times what")):
        update = Update().assign("learning_rate", value)
        found, refused = examine(update, with_schedule), run.examine(update)
        assert (found.warnings, len(found.notes), means in found.notes[0]) == ((), 1, True)
        assert (len(refused.problems), refused.warnings, refused.notes) == (1, (), ())
    (problem,) = run.examine(Update().scale("learning_rate", -1)).problems
    assert "cannot be scaled by a negative factor" in str(problem)
    (warning,) = run.examine(Update().assign("optimizer/iteration", 0)).warnings
    assert "is the optimizer's own count of steps" in warning
    assert run.push(Update().assign("optimizer/iteration", 0)).warning == warning
    assert not run.examine(Update().scale("learning_rate", 0.5)).warnings


def test_audits_are_listed_and_one_can_be_asked_for(
    run: Run, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2, 3):
        append_audit(directory, report(number=number))
    assert [one.number for one in run.audits(last=2)] == [2, 3]

    def answers(_secs: float) -> None:
        for path in inbox.requests(directory):
            answer = InboxAnswer(Stage.VERIFIED, 1.0, 7, details=report(number=4).to_json())
            inbox.answer(directory, inbox.id_of(path), answer)

    meanwhile(monkeypatch, answers)
    assert run.audit(timeout=120).number == 4
    heard_of(directory, secs_ago=60)
    with pytest.raises(NoAnswer, match="Only a running job can be asked for an audit"):
        run.audit(timeout=120)


def test_metrics_come_with_the_place_to_go_on_from(run: Run, directory: Path) -> None:
    for step in range(5):
        append_metrics(directory, (step, time.time(), {"loss": 1.0 / (step + 1)}))
    first = run.metrics()
    assert first.series["loss"].steps.tolist() == [0, 1, 2, 3, 4]
    append_metrics(directory, (5, time.time(), {"loss": float("inf")}))
    later = run.metrics(since=first.position)
    assert (later.since, later.series["loss"].steps.tolist()) == (first.position, [5])
    assert later.series["loss"].values.tolist() == [float("inf")]
    assert not run.metrics(since=later.position).series


def test_an_unchanged_journal_is_not_read_again_and_what_was_written_since_is_seen(
    directory: Path, job: PlayedJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, run = list[object](), DirectoryRun(directory)
    monkeypatch.setattr(
        "replicast.client.directory.Updates", lambda run_dir: looks.append(run_dir) or Updates(run_dir)
    )
    assert not run.log()
    for number in (1, 2):
        run.push(Update(id=f"u{number}").assign("learning_rate", 0.5 / number))
        job.act_all()
        assert [view.sequence for view in run.log()] == [*range(1, number + 1)]
        reads = len(looks)
        assert run.status().updates[-1].sequence == number
        assert run.show(number).id == f"u{number}"
        assert len(looks) == reads
    PlayedJob(directory, attempt=1).replay(2)
    assert [len(view.receipts) for view in run.log()] == [1, 2]


def test_log_lines_are_those_of_the_last_attempt(run: Run, directory: Path) -> None:
    for attempt in (0, 2, 10):
        path = directory / "logs" / f"attempt-{attempt}" / "worker-1.log"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"".join(b"attempt %d line %d \xff\n" % (attempt, line) for line in range(5)))
    assert run.log_lines(1, lines=2) == ["attempt 10 line 3 �", "attempt 10 line 4 �"]
    assert run.log_lines(1, lines=1, attempt=0) == ["attempt 0 line 4 �"]
    with pytest.raises(NotFound, match=r"no log .*There are logs of worker 1"):
        run.log_lines(0)
    bars = b"".join(b"\x08" * 9 + b"\r\x1b[1m%d/3\x1b[0m loss: %d" % (step, step) for step in (1, 2, 3))
    path.write_bytes(bars + b"\n\x1b[31mred\x1b[0m \x1b]0;title\x07text\x07\r\n")
    assert run.log_lines(1) == ["3/3 loss: 3", "red text"]


def test_the_variables_of_a_run_are_known(run: Run) -> None:
    assert [one.name for one in run.schema()][:2] == ["model/dense/kernel", "model/dense/bias"]
    assert run.checkpoints() == []


def test_a_directory_does_all_that_the_table_lists_and_each_parameter_is_explained() -> None:
    for name, row in OPERATIONS.items():
        assert hasattr(DirectoryRun, f"do_{name}")
        assert row.summary
        assert all(one.help for one in row.parameters.values()), name


@pytest.mark.parametrize(
    ("text", "rows"), [("3", (3,)), ("3,5,7", (3, 5, 7)), ("9,10:13,0", (9, 10, 11, 12, 0))]
)
def test_rows_are_read_as_they_are_written(text: str, rows: tuple[int, ...]) -> None:
    assert rows_of(text) == rows_of(rows_text(rows)) == rows


@pytest.mark.parametrize("text", ["", "1-2", "-1", "5:5", "5:4", "1,,2", "x", "0:99999999999"])
def test_rows_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="Received"):
        rows_of(text)
