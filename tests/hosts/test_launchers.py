"""Two launchers on two machines act as one: real processes and sockets, workers without TensorFlow."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from replicast.storage.run_files import JobState, changes
from tests.hosts.launchers import SECRET, Machines, eventually, lines_with, machines, noted_pid
from tests.hosts.network import missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "namespaces")

HOSTS = "10.77.0.1,10.77.0.2"
WAITS = """
import os, signal, sys, time
from pathlib import Path
rank, attempt = int(os.environ["RANK"]), int(os.environ["REPLICAST_ATTEMPT"])

def saves(*_):
    Path(f"saved-{rank}").touch()
    sys.exit(143)

signal.signal(signal.SIGTERM, saves)
print("secret:", os.environ.get("REPLICAST_JOB_SECRET"))
new = Path(f"new-{rank}")
new.write_text(str(os.getpid()))
new.rename(f"pid-{attempt}-{rank}")
while not Path(f"finish-{attempt}").exists():
    time.sleep(0.01)
"""


@pytest.fixture(name="two")
def two_machines(tmp_path: Path) -> Iterator[Machines]:
    (tmp_path / "train.py").write_text(WAITS)
    with machines(tmp_path) as made:
        yield made


def test_a_death_on_either_host_restarts_both_with_one_cause_and_one_count(two: Machines) -> None:
    first, second = two.launch_all("-n", "2", "--max-restarts", "2", "--run-dir", "run", "train.py")
    for attempt, victim in ((0, 3), (1, 0)):
        os.kill(two.pids(attempt, workers=4)[victim], signal.SIGKILL)
    two.pids(2, workers=4)
    (two.directory / "finish-2").touch()
    assert (first.finish(), second.finish()) == (0, 0)
    for restart, worker, where, left in (1, 3, "10.77.0.2", 1), (2, 0, "10.77.0.1", 0):
        here = f"worker {worker} failed (killed by SIGKILL); {left} left after it"
        there = here.replace(" failed", f" on {where} failed")
        both = [there, here] if worker == 3 else [here, there]
        begins = f"replicast: restart {restart} of 2 because "
        assert lines_with([first, second], begins) == [[begins + words] for words in both]
    (told,) = lines_with([first], "worker 3 on 10.77.0.2 failed first: killed by SIGKILL after")[0]
    assert ". Log on 10.77.0.2: " in told
    assert "worker 0 failed after" not in first.text + second.text
    logs = [(two.directory / f"run/logs/attempt-{k}/worker-1.log").read_text() for k in range(3)]
    assert logs == ["secret: None\n"] * 3, "workers do not need it"


def test_the_worker_that_was_stopped_is_blamed_and_not_the_one_that_noticed(two: Machines) -> None:
    notices = """
if rank == 0:
    while not Path("stopped").exists():
        time.sleep(0.01)
    print("replicast: worker 1 was lost: it does not answer heartbeats", flush=True)
    sys.exit(75)
"""
    script = WAITS.replace("while not Path(f", notices + "while not Path(f")
    (two.directory / "train.py").write_text(script)
    first, second = two.launch_all("--run-dir", "run", "train.py")
    os.kill(noted_pid(two.directory / "pid-0-1"), signal.SIGSTOP)
    noted_pid(two.directory / "pid-0-0")
    (two.directory / "stopped").touch()
    assert (first.finish(), second.finish()) == (137, 137)
    assert "worker 1 on 10.77.0.2 was stopped (SIGSTOP) and did not continue" in first.text
    assert "worker 1 was stopped (SIGSTOP) and did not continue" in second.text
    last = changes(two.directory / "run")[-1]
    assert (last.state, last.worker, last.reason) == (JobState.FAILED, 1, "stopped by SIGSTOP on 10.77.0.2")


@pytest.mark.parametrize(("node", "signum", "code"), [(0, signal.SIGTERM, 143), (1, signal.SIGINT, 130)])
def test_a_signal_to_one_launcher_stops_both_and_the_workers_save(
    two: Machines, node: int, signum: signal.Signals, code: int
) -> None:
    launched = two.launch_all("--max-restarts", "2", "--run-dir", "run", "train.py")
    two.pids(0)
    launched[node].send(signum)
    assert [one.finish() for one in launched] == [code, code]
    assert (two.directory / "saved-0").exists()
    assert (two.directory / "saved-1").exists()
    name = "Ctrl-C" if signum is signal.SIGINT else signum.name
    assert f"stopped by {name} on {two.hosts[node].address}; the workers on th" in launched[1 - node].text


@pytest.mark.parametrize("node", [0, 1])
def test_a_launcher_that_is_killed_ends_the_workers_of_both_and_may_come_back(
    two: Machines, node: int
) -> None:
    options = ("--max-restarts", "2", "--run-dir", "run", "train.py")
    launched = two.launch_all(*options)
    pids = two.pids(0)
    launched[node].send(signal.SIGKILL)
    for pid in pids:
        eventually(lambda pid=pid: not Path(f"/proc/{pid}").exists(), "a worker is left")  # type: ignore[misc]
    launched[node] = two.launch(node, "--hosts", HOSTS, *options)
    two.pids(1)
    (two.directory / "finish-1").touch()
    assert [one.finish() for one in launched] == [0, 0]
    other = launched[1 - node]
    assert other.text.count(f"host {two.hosts[node].address} was lost: its connection was closed") == 1
    assert "failed first" not in other.text, "the job has finished"


def test_a_host_that_does_not_come_is_named_and_the_others_end(
    two: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPLICAST_START_TIMEOUT", "1")
    first = two.launch(0, "--hosts", HOSTS, "--run-dir", "run", "train.py")
    assert first.finish() == 75
    assert "host 10.77.0.2 was lost: it did not join within 1 s" in first.text
    for run_dir in ("--run-dir", "run"), ():
        other = two.launch(1, "--hosts", HOSTS, *run_dir, "train.py")
        assert other.finish() == 75
        assert other.text.endswith(
            "replicast: host 10.77.0.1 was lost: it did not join within 1 s "
            "(10.77.0.1:29499: Connection refused)\n"
        )


def test_torchrun_s_options_are_known_and_all_use_one_run_directory(two: Machines) -> None:
    (two.directory / "finish-0").touch()
    options = ("--nnodes", "2", "--rdzv-endpoint", "10.77.0.1:29400", "train.py")
    launched = [two.launch(node, "--node-rank", str(node), *options) for node in (1, 0)]
    assert [one.finish() for one in launched] == [0, 0], launched[0].text
    (run,) = (two.directory / "runs").iterdir()
    assert {log.name for log in run.glob("logs/attempt-0/*.log")} == {"worker-0.log", "worker-1.log"}


def test_launchers_that_do_not_belong_together_are_refused(two: Machines) -> None:
    hosts = ("--hosts", HOSTS)
    first = two.launch(0, *hosts, "--run-dir", "run", "train.py")
    other = two.launch(1, *hosts, "-n", "2", "--run-dir", "other", "train.py")
    assert other.finish() == 2
    assert "a different number of workers (-n): 1 on the first host, 2 on the other" in other.text
    first.wait_for("refused a launcher at 10.77.0.2: a different number of workers")
    same = two.launch(0, *hosts, "--run-dir", "same", "train.py")
    assert same.finish() == 2
    assert "cannot listen at 10.77.0.1:29499, the address of the first launcher: another pro" in same.text
    stranger = two.launch(1, *hosts, "--run-dir", "other", "train.py", secret="guessed")
    problem = "it has a different job secret, or none. Set REPLICAST_JOB_SECRET"
    stranger.wait_for(f"10.77.0.1:29499: {problem}")
    first.wait_for(f"refused a launcher at 10.77.0.2: {problem}")
    nobody = two.launch(1, *hosts, "--run-dir", "nobody", "train.py", secret=None)
    nobody.wait_for(f"10.77.0.1:29499: {problem}")
    nobody.wait_for("warning: REPLICAST_JOB_SECRET is not set")
    assert SECRET not in first.text


def test_the_first_launcher_listens_at_the_named_address_alone_and_survives_noise(two: Machines) -> None:
    first = two.launch(0, "--hosts", HOSTS, "--run-dir", "run", "train.py")
    noise = """
import socket, time
texts = [b"x" * 100000, b"GET / HTTP/1.0\\r\\n\\r\\n", b"{}\\n", b"[" * 1000 + b"\\n", b"\\xff\\n\\n", b""]
opened = []
while len(opened) < 100:
    try:
        opened.append(socket.create_connection(("10.77.0.1", 29499), timeout=20))
        opened[-1].sendall(texts[len(opened) % len(texts)])
    except ConnectionRefusedError: time.sleep(0.05)
    except ConnectionError: pass
time.sleep(0.2)
"""
    subprocess.run(two.hosts[1].namespaces.inside([sys.executable, "-c", noise]), check=True, timeout=60)
    with_loopback = two.hosts[0].namespaces.inside(
        [sys.executable, "-c", "import socket; socket.create_connection(('127.0.0.1', 29499), timeout=5)"]
    )
    assert subprocess.run(with_loopback, capture_output=True, timeout=30).returncode != 0
    assert first.process.poll() is None
    other = two.launch(1, "--hosts", HOSTS, "--run-dir", "run", "train.py")
    (two.directory / "finish-0").touch()
    assert (first.finish(), other.finish()) == (0, 0)
    assert socket.gethostname() not in ("host0", "host1")
