"""Fault points: no effect without a plan; with one, each fault fires exactly once."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import replicast
from replicast import faults
from replicast.config import Cluster
from replicast.errors import ClusterError, ReplicastError
from replicast.faults import Action, Fault, FaultInjected, FaultPlan, Point
from replicast.files import write_durably
from tests.jobs import read_fired

PACKAGE = Path(replicast.__file__).parent


@pytest.fixture(autouse=True)
def no_plan_outlives_its_test() -> Iterator[None]:
    yield
    faults.set_plan(())


def raising(point: str = "apply", **fields: int) -> Fault:
    return Fault(worker=fields.pop("worker", 0), point=Point(point), action=Action.RAISE, **fields)


def environ_of(plan: object, *, rank: int = 0, attempt: int = 0, **more: str) -> dict[str, str]:
    cluster = Cluster(addresses=("a:1", "b:2"), rank=rank)
    return {
        "REPLICAST_FAULTS": plan if isinstance(plan, str) else json.dumps(plan),
        "REPLICAST_LAUNCHED": "1",
        "REPLICAST_ATTEMPT": str(attempt),
        "TF_CONFIG": cluster.tf_config(),
        **more,
    }


def fires(plan: FaultPlan | None, point: str = "apply") -> bool:
    """Whether coming to a point once makes this process fail."""
    if plan is None:
        return False
    try:
        plan.reach(point)
    except FaultInjected:
        return True
    return False


# The points.


def test_every_point_has_its_stable_name_and_is_called_and_every_call_names_a_point() -> None:
    called = {
        name
        for path in PACKAGE.rglob("*.py")
        for name in re.findall(r'^\s*faults\.point\("(\w+)"\)$', path.read_text(), re.MULTILINE)
    }
    known = "propose journal stage ready commit ack apply verify decide settle snapshot write rename"
    assert called == set(Point) == set(known.split())


def test_without_a_plan_nothing_happens_and_with_one_an_unknown_point_raises() -> None:
    assert faults.set_plan(()) is None
    for name in Point:
        faults.point(name)
    faults.set_plan([raising()])
    with pytest.raises(ValueError, match="aply"):
        faults.point("aply")


# What a plan does.


def test_a_fault_fires_at_its_occurrence_of_its_point_and_never_again() -> None:
    plan = faults.set_plan([raising(occurrence=1), raising(occurrence=3)])
    assert plan is not None
    assert not fires(plan, "stage")
    assert [fires(plan) for _ in range(6)] == [True, False, True, False, False, False]
    assert plan.fired == [raising(occurrence=1), raising(occurrence=3)]


@pytest.mark.parametrize("meant", [raising(worker=1), raising(attempt=1)])
def test_a_fault_of_another_worker_or_another_attempt_does_not_fire(meant: Fault) -> None:
    assert not fires(faults.set_plan([meant], worker=0, attempt=0))
    assert fires(faults.set_plan([meant], worker=meant.worker, attempt=meant.attempt))


def test_occurrences_are_counted_over_all_threads() -> None:
    plan = faults.set_plan([raising(occurrence=400)])
    fired: list[bool] = []

    def come_often() -> None:
        fired.extend([fires(plan) for _ in range(100)])

    with ThreadPoolExecutor(4) as threads:
        for _ in range(4):
            threads.submit(come_often)
    assert fired.count(True) == 1


def test_an_injected_error_is_not_caught_by_handlers_of_replicast_errors(tmp_path: Path) -> None:
    faults.set_plan([raising("rename")])
    with pytest.raises(FaultInjected, match=r"asked for an error at the point rename.*Received: ") as caught:
        write_durably(tmp_path / "file", [b"content"])
    assert not isinstance(caught.value, OSError | ReplicastError)
    assert not list(tmp_path.iterdir()), "a file was left behind"


def test_a_fault_is_recorded_before_it_fires_and_nothing_else_is(tmp_path: Path) -> None:
    faults.set_plan([raising(), raising("stage")], run_dir=tmp_path)
    faults.point("ready")
    assert read_fired(tmp_path) == []
    for name in ("apply", "stage"):
        with pytest.raises(FaultInjected):
            faults.point(name)
    faults.point("apply")
    first, second = read_fired(tmp_path)
    assert (first["point"], first["action"], second["point"]) == ("apply", "raise", "stage")
    assert {"worker", "occurrence", "attempt", "pid", "time"} <= set(first)


DOOMED = """
import sys
from pathlib import Path
from replicast.files import write_durably
write_durably(Path(sys.argv[1]), [b"content"])
print("it went on")
"""


def doomed(directory: Path, action: str, **environ: str) -> subprocess.Popen[str]:
    plan = environ_of(
        [{"worker": 0, "point": "write", "action": action}], REPLICAST_RUN_DIR=str(directory), **environ
    )
    command = [sys.executable, "-c", DOOMED, str(directory / "file")]
    return subprocess.Popen(
        command, env={"PYTHONPATH": str(PACKAGE.parent), **plan}, stdout=subprocess.PIPE, text=True
    )


def test_a_process_that_is_killed_leaves_the_line_and_its_temporary_file(tmp_path: Path) -> None:
    with doomed(tmp_path, "kill") as process:
        said, _ = process.communicate(timeout=120)
    assert (process.returncode, said) == (-signal.SIGKILL, "")
    assert [(fired["point"], fired["pid"]) for fired in read_fired(tmp_path)] == [("write", process.pid)]
    assert not (tmp_path / "file").exists()
    assert len(list(tmp_path.glob(".tmp-*"))) == 1


def test_a_stopped_process_continues_after_sigcont(tmp_path: Path) -> None:
    with doomed(tmp_path, "stop") as process:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        assert read_fired(tmp_path)[0]["pid"] == process.pid
        process.send_signal(signal.SIGCONT)
        said, _ = process.communicate(timeout=120)
    assert (process.returncode, said) == (0, "it went on\n")


def test_the_launcher_and_other_commands_ignore_the_fault_plan(tmp_path: Path) -> None:
    with doomed(tmp_path, "kill", REPLICAST_LAUNCHED="") as process:
        said, _ = process.communicate(timeout=120)
    assert (process.returncode, said) == (0, "it went on\n")
    assert read_fired(tmp_path) == []


# What a plan says.


def test_a_plan_is_read_from_the_environment_of_a_worker_and_a_restarted_job_does_not_fail_again() -> None:
    described = [{"worker": 1, "point": "apply", "occurrence": 2, "action": "raise", "attempt": 3}]
    plan = faults.take_plan(environ_of(described, rank=1, attempt=3))
    assert [fires(plan) for _ in range(3)] == [False, True, False]
    again = faults.take_plan(environ_of(described, rank=1, attempt=4))
    assert [fires(again) for _ in range(3)] == [False] * 3


def test_a_fault_has_defaults_and_survives_a_round_trip() -> None:
    plan = faults.read_faults(environ_of([{"worker": 1, "point": "ack"}]))
    assert plan == (Fault(1, Point.ACK, 1, Action.KILL, 0),)
    fault = Fault(2, Point.RENAME, 7, Action.STOP, 4)
    assert faults.read_faults(environ_of([fault.to_json()])) == (fault,)


@pytest.mark.parametrize("plan", ["", "  ", "[]"])
def test_without_faults_there_is_no_plan(plan: str) -> None:
    assert faults.take_plan(environ_of(plan)) is None


def test_a_worker_with_a_fault_logs_it(caplog: pytest.LogCaptureFixture) -> None:
    faults.take_plan(environ_of([{"worker": 5, "point": "apply"}]))
    assert caplog.text == ""
    faults.take_plan(environ_of([{"worker": 0, "point": "apply"}]))
    assert "REPLICAST_FAULTS is set: this worker will fail on purpose" in caplog.text


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ("[{", "truncated"),
        ('{"worker": 0}', "Expected `array`"),
        ("[1]", "Expected `object`"),
        ([{"worker": 0, "point": "aply"}], "Invalid enum value 'aply'"),
        ([{"worker": 0}], "missing required field `point`"),
        ([{"worker": 0, "point": "apply", "action": "die"}], "Invalid enum value 'die'"),
        ([{"worker": True, "point": "apply"}], "Expected `int`, got `bool`"),
        ([{"worker": 0, "point": "apply", "occurrence": 0}], "`int` >= 1 - at `.*occurrence`"),
        ([{"worker": 0, "point": "apply", "attempt": -1}], "`int` >= 0 - at `.*attempt`"),
        ([{"worker": 0, "point": "apply", "step": 1}], "unknown field `step`"),
    ],
)
def test_an_invalid_plan_is_refused(plan: object, expected: str) -> None:
    with pytest.raises(ClusterError, match=expected) as caught:
        faults.take_plan(environ_of(plan))
    assert "Received: " in str(caught.value)
