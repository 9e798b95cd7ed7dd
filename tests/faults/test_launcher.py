"""`replicast run` with real processes: its output, and what is left when workers or the launcher exit."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from replicast.config import SHM_DIR
from replicast.errors import ClusterError
from replicast.files import below
from replicast.launcher.launcher import supervise
from replicast.launcher.plan import EndTimeouts, JobPlan, hold_ports
from replicast.storage.run_files import JobState, changes
from tests.jobs import environ, is_alive
from tests.threads import eventually

DEADLINE_SECS = 120.0

PREAMBLE = """
import os, signal, subprocess, sys, time
from pathlib import Path
rank, attempt = int(os.environ["RANK"]), int(os.environ["REPLICAST_ATTEMPT"])

def note(name, text=""):
    path = Path(f"{name}-{rank}")
    path.with_suffix(".new").write_text(str(text))
    path.with_suffix(".new").rename(path)

def wait_for(*names):
    while not all(Path(name).exists() for name in names):
        time.sleep(0.01)

def wait_for_end_of(other):
    wait_for(f"pid-{other}")
    stat = Path(f"/proc/{Path(f'pid-{other}').read_text()}/stat")  # Not reaped before the group has ended.
    while stat.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)

def for_ever():
    note("pid", os.getpid())
    while True:
        time.sleep(60)
"""


@dataclass
class Launch:
    """A running launcher in a directory of its own."""

    process: subprocess.Popen[str]
    directory: Path

    def pid(self, name: str) -> int:
        eventually((self.directory / name).exists)
        return int((self.directory / name).read_text())

    def finish(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=DEADLINE_SECS)
        return self.process.returncode, out, err


Launcher = Callable[..., Launch]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launcher]:
    """Starts `replicast run` on a script; whatever is left of it is killed after the test."""
    started: list[Launch] = []

    def start(
        script: str, *options: str, workers: int = 2, arguments: tuple[str, ...] = (), **more: str
    ) -> Launch:
        (tmp_path / "train.py").write_text(PREAMBLE + script)
        command = [sys.executable, "-m", "replicast", "run", "-n", str(workers), *options]
        process = subprocess.Popen(
            [*command, "train.py", *arguments],
            cwd=tmp_path,
            env=environ(**more),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(Launch(process, tmp_path))
        return started[-1]

    yield start
    for launched in started:
        with launched.process:
            launched.process.kill()
    for noted in tmp_path.glob("*pid-*"):
        with contextlib.suppress(ProcessLookupError, ValueError):
            os.kill(int(noted.read_text()), signal.SIGKILL)


def supervised(directory: Path, script: str, timeouts: EndTimeouts) -> int:
    """The exit code of two workers that are supervised from this process."""
    (directory / "train.py").write_text(PREAMBLE + script)
    logs = below(directory) / "logs"
    job = JobPlan(
        argv=(sys.executable, "train.py"), workers=2, run_dir=directory, log_dir=logs, timeouts=timeouts
    )
    with contextlib.chdir(directory):
        return supervise(job, os.environ)


def gone(*pids: int) -> None:
    for pid in pids:
        eventually(lambda pid=pid: not is_alive(pid))  # type: ignore[misc]


def test_all_workers_end_well(launch: Launcher) -> None:
    script = "print('I am', rank, sys.argv[1:])\nprint('on stderr', file=sys.stderr)"
    given = ("--run-dir", "mine", "--node_rank", "--", "-n", "7")
    launched = launch(script, "--run-dir", "run", arguments=given)
    code, out, err = launched.finish()
    assert code == 0
    assert out == f"[worker 0] I am 0 {list(given)}\n[worker 0] on stderr\n"
    begins, ends = err.splitlines()
    assert begins.startswith("replicast: 2 workers, attempt 0, logs in run/logs/attempt-0; starting")
    assert re.fullmatch(r"replicast: finished: 2 workers, \d+\.\d s, logs in run/logs/attempt-0", ends)
    log = launched.directory / "run" / "logs" / "attempt-0" / "worker-1.log"
    assert log.read_text() == f"I am 1 {list(given)}\non stderr\n"


def test_a_second_launcher_on_a_run_directory_is_refused_and_the_first_job_runs_on(launch: Launcher) -> None:
    first = launch("for_ever()", "--run-dir", "run")
    worker = first.pid("pid-0")
    code, out, err = launch("for_ever()", "--run-dir", "run").finish()
    assert (code, out) == (2, "")
    assert err.startswith(f"Error: Another `replicast run` (process {first.process.pid} on ")
    assert first.process.poll() is None
    assert is_alive(worker)


def test_a_module_runs_as_with_python_m(launch: Launcher) -> None:
    launched = launch("print(__name__, __spec__.name)", "-m", "train", "ignored", workers=1)
    code, out, _ = launched.finish()
    assert (code, out) == (0, "[worker 0] __main__ train\n")
    (run,) = (launched.directory / "runs").iterdir()
    assert re.fullmatch(r"\d{8}-\d{6}-train", run.name), "the default name: time and program"


def test_a_worker_that_ends_well_early_is_no_failure(launch: Launcher) -> None:
    script = """
if rank == 0:
    note("done"); sys.exit(0)
wait_for("done-0")
print("worker 1 went on")
"""
    code, out, _ = launch(script, "--tee", "1").finish()
    assert (code, out) == (0, "[worker 1] worker 1 went on\n")


def test_the_first_to_fail_is_named_with_the_end_of_its_log(launch: Launcher) -> None:
    script = """
if rank == 1:
    for line in range(30): print("line", line)
    note("pid", os.getpid()); raise RuntimeError("the reason")
wait_for_end_of(1)
sys.exit(9)
"""
    code, _, err = launch(script, "--run-dir", "run").finish()
    assert code == 1
    assert "worker 1 failed first: exit code 1 after " in err
    assert "Log: run/logs/attempt-0/worker-1.log" in err
    assert "RuntimeError: the reason" in err
    assert "line 29" in err
    assert "line 1 " not in err, "only the end of the log is shown"
    assert "worker 0 failed afterwards (exit code 9)" in err


def test_the_last_lines_of_a_killed_worker_are_kept_without_colours(launch: Launcher) -> None:
    script = r"""
print("\x1b[1m100/100\x1b[0m loss: 0.5\n    indented", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    launched = launch(script, "--run-dir", "run", workers=1)
    assert launched.finish()[0] == 128 + signal.SIGKILL
    assert changes(launched.directory / "run")[-1].last_lines == ("100/100 loss: 0.5", "    indented")
    status = [sys.executable, "-m", "replicast", "status", "run"]
    shown = subprocess.run(status, cwd=launched.directory, capture_output=True, text=True).stdout
    assert "\n  100/100 loss: 0.5\n      indented\n" in shown


def test_the_launcher_removes_the_shared_memory_of_a_worker_that_was_killed(
    launch: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setenv(SHM_DIR, str(memory))
    script = """
from replicast.transport.shared import SharedFile, name_prefix
file = SharedFile(Path("memory"), 4096)
file.complete(Path("memory") / f"{name_prefix()}left-{rank}")
note("left")
wait_for("left-0", "left-1")
os.kill(os.getpid(), signal.SIGKILL)
"""
    code, _, _ = launch(script).finish()
    assert code == 128 + signal.SIGKILL
    assert (tmp_path / "left-0").exists()
    assert list(memory.iterdir()) == []


def test_the_one_because_of_whom_another_ended_may_take_its_time(tmp_path: Path) -> None:
    script = """
if rank == 1:
    note("pid", os.getpid()); sys.exit(75)
wait_for_end_of(1)
time.sleep(0.5)  # As worker 0 does, which waits for the others before it ends.
sys.exit(4)
"""
    assert supervised(tmp_path, script, EndTimeouts(settle_secs=0.0, settle_killed_secs=0.0)) == 4


def test_after_one_left_because_it_was_told_to_the_others_have_all_of_the_grace_period(
    tmp_path: Path,
) -> None:
    script = """
if rank == 1:
    note("pid", os.getpid()); sys.exit(143)
wait_for_end_of(1)
time.sleep(0.5)  # As worker 0 does, which writes the checkpoint.
note("written")
sys.exit(143)
"""
    hasty = EndTimeouts(settle_secs=0.0, stop_failed_secs=0.0, stop_secs=DEADLINE_SECS)
    assert supervised(tmp_path, script, hasty) == 143
    assert (tmp_path / "written-0").exists()


STUBBORN = """
for signum in (signal.SIGINT, signal.SIGTERM):
    signal.signal(signum, lambda signum, frame: note("told", signum))
child = subprocess.Popen([sys.executable, "-c",
    "import signal, time; [signal.signal(s, signal.SIG_IGN) for s in (signal.SIGINT, signal.SIGTERM)];"
    "print('ready', flush=True); time.sleep(600)"], stdout=subprocess.PIPE)
child.stdout.readline()
note("childpid", child.pid)
for_ever()
"""


@pytest.mark.parametrize(("signum", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_no_process_is_left_when_the_launcher_is_stopped(
    launch: Launcher, signum: signal.Signals, expected: int
) -> None:
    launched = launch(STUBBORN, "--grace", "0.5")
    pids = [launched.pid(f"{name}-{rank}") for name in ("pid", "childpid") for rank in (0, 1)]
    assert all(is_alive(pid) for pid in pids)
    launched.process.send_signal(signum)
    code, _, err = launched.finish()
    assert code == expected
    assert "killed before it had exited: worker 0, 1" in err
    told = launched.pid("told-0"), launched.pid("told-1")
    assert told == (signal.SIGTERM, signal.SIGTERM), "also after Ctrl-C: the workers save"
    gone(*pids)


def test_a_second_ctrl_c_kills_at_once(launch: Launcher) -> None:
    launched = launch(STUBBORN, "--grace", "3600")
    pids = [launched.pid(f"{name}-{rank}") for name in ("pid", "childpid") for rank in (0, 1)]
    launched.process.send_signal(signal.SIGINT)
    assert launched.pid("told-0") == signal.SIGTERM
    launched.process.send_signal(signal.SIGINT)
    assert launched.finish()[0] == 130
    gone(*pids)


def test_a_child_that_outlives_its_worker_is_not_left_behind(launch: Launcher) -> None:
    script = "note('childpid', subprocess.Popen(['sleep', '600']).pid)"
    launched = launch(script)
    assert launched.finish()[0] == 0
    gone(launched.pid("childpid-0"), launched.pid("childpid-1"))


def test_no_worker_is_left_when_the_launcher_itself_is_killed(launch: Launcher) -> None:
    launched = launch("for_ever()")
    pids = [launched.pid("pid-0"), launched.pid("pid-1")]
    launched.process.kill()
    gone(*pids)


def test_a_terminal_that_is_not_read_stops_neither_the_workers_nor_a_signal(launch: Launcher) -> None:
    script = "for number in range(400):\n    print('x' * 1000, number)\nfor_ever()"
    launched = launch(script, "--run-dir", "run", "--tee", "all")
    pids = [launched.pid("pid-0"), launched.pid("pid-1")]
    launched.process.send_signal(signal.SIGTERM)
    gone(*pids)
    logs = (launched.directory / "run").glob("logs/attempt-0/*.log")
    assert [log.read_text().count("\n") for log in logs] == [400, 400]
    assert launched.finish()[0] == 143


def test_a_restart_is_a_new_attempt_with_new_ports_and_logs(launch: Launcher) -> None:
    script = """
print("attempt", attempt)
note(f"config{attempt}", os.environ["TF_CONFIG"])
sys.exit(5 if rank == 1 and attempt < 2 else 0)
"""
    launched = launch(script, "--run-dir", "run", "--max-restarts", "3")
    code, _, err = launched.finish()
    assert code == 0
    assert "restart 1 of 3 because worker 1 failed (exit code 5); 2 left after it" in err
    assert "restart 2 of 3" in err
    assert "restart 3 of 3" not in err
    assert "replicast: finished after 2 restarts: 2 workers, " in err
    assert err.endswith(", logs in run/logs/attempt-2\n")
    logs = launched.directory / "run" / "logs"
    assert [(logs / f"attempt-{k}" / "worker-1.log").read_text() for k in range(3)] == [
        f"attempt {k}\n" for k in range(3)
    ]
    assert len({(launched.directory / f"config{k}-1").read_text() for k in range(3)}) == 3


@contextlib.contextmanager
def two_ports() -> Iterator[tuple[int, ...]]:
    """Two ports in a row that nobody else gets meanwhile."""
    for first in range(20_000, 30_000):
        with contextlib.suppress(ClusterError), hold_ports([first, first + 1]) as held:
            yield held.numbers
            return


def test_a_task_of_tf_config_is_started_as_several_workers(launch: Launcher) -> None:
    with two_ports() as (port, _):
        given = {"cluster": {"chief": ["localhost:1"], "worker": [f"localhost:{port}"]}}
        given["task"] = {"type": "worker", "index": 0}  # type: ignore[assignment]
        script = "note('config', os.environ['TF_CONFIG'])"
        launched = launch(script, "--from-tf-config", TF_CONFIG=json.dumps(given))
        assert launched.finish()[0] == 0
    described = [json.loads((launched.directory / f"config-{rank}").read_text()) for rank in (2, 3)]
    assert [one["task"]["index"] for one in described] == [2, 3]
    assert described[1]["cluster"]["worker"] == [
        "localhost:1", "localhost:2", f"localhost:{port}", f"localhost:{port + 1}",
    ]  # fmt: skip


def test_the_same_error_twice_in_a_row_ends_the_job_in_one_clear_message(launch: Launcher) -> None:
    script = """
if rank == 1:
    note(f"began{attempt}"); raise ValueError(f"label {attempt + 254} of {os.getpid()}")
wait_for(f"began{attempt}-1")
for_ever()
"""
    launched = launch(script, "--run-dir", "run", "--max-restarts", "3")
    code, _, err = launched.finish()
    assert code == 1
    assert "worker 0 was stopped" in err, "it does not end by itself"
    gone(launched.pid("pid-0"))
    assert [(launched.directory / f"began{k}-1").exists() for k in range(3)] == [True, True, False]
    assert err.count("Traceback") == 1, "the second one is folded"
    *_, raised, where, last, _ = err.splitlines()
    assert re.fullmatch(r"replicast: ValueError: label 255 of \d+", raised)
    assert re.fullmatch(r"replicast: at train.py:\d+: note\(f\"began.*", where)
    assert last == (
        "replicast: not restarted: the attempt before raised the same error, and neither ran for 60 s; "
        "2 of 3 restarts are left"
    )
    reason = changes(launched.directory / "run")[-1].reason
    assert re.fullmatch(r"ValueError: label 255 of \d+ \(train\.py:\d+: note.*\)", reason)


@pytest.mark.parametrize("has_run", [False, True])
def test_a_start_that_is_refused_is_not_restarted_and_leaves_no_failed_run(
    has_run: bool, launch: Launcher
) -> None:
    """Unless there is a job in the run directory, whose states must stay."""
    script = "import replicast.config as c; c.read_launch(os.environ).check_run_dir(Path('other'))"
    script = "Path('run/groups/000001').mkdir(parents=True, exist_ok=True); " * has_run + script
    code, _, err = (launched := launch(script, "--run-dir", "run", "--max-restarts", "3")).finish()
    assert (code, err.count("attempt ")) == (1, 1)
    assert re.search("LaunchRefused: Two run directories: .*/run, and the script .*/other", err)
    states = [one.state for one in changes(launched.directory / "run")]
    assert states[-1:] == [JobState.FAILED] * has_run


def test_the_last_step_of_a_job_is_in_its_closing_line(launch: Launcher) -> None:
    script = """
from replicast.storage.run_files import WorkerNote, write_worker_note
for step, of_attempt in ((900, attempt - 1), (1200, attempt)):
    note = WorkerNote(rank + attempt - of_attempt, os.getpid(), "host", step, of_attempt, 0.0, False, "")
    write_worker_note(Path(os.environ["REPLICAST_RUN_DIR"]), note)
"""
    code, _, err = launch(script, "--run-dir", "run", workers=1).finish()
    assert code == 0
    assert "replicast: finished: 1 worker, step 1200, " in err


def test_a_job_that_is_not_shown_ends_without_a_closing_line(launch: Launcher) -> None:
    code, out, err = launch("print('hello')", "--tee", "none", "--run-dir", "run").finish()
    assert (code, out) == (0, "")
    assert err.startswith("replicast: 2 workers, attempt 0, logs in run/logs/attempt-0; starting")
    assert err.count("\n") == 1


def test_the_heartbeat_timeout_reaches_the_workers_and_is_the_time_that_one_may_be_frozen(
    launch: Launcher,
) -> None:
    script = """
note("heartbeat", os.environ["REPLICAST_HEARTBEAT_TIMEOUT"])
os.kill(os.getpid(), signal.SIGSTOP) if rank == 1 else for_ever()
"""
    launched = launch(script, REPLICAST_HEARTBEAT_TIMEOUT="2")
    code, _, err = launched.finish()
    assert code == 128 + signal.SIGKILL
    assert "worker 1 was stopped (SIGSTOP) and did not continue: killed" in err
    assert [(launched.directory / f"heartbeat-{rank}").read_text() for rank in (0, 1)] == ["2", "2"]
