"""SIGTERM in a worker, sent once, repeated, and sent to the whole cgroup: the last checkpoint is written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from replicast.processes import on_sigterm
from tests.threads import DEADLINE_SECS, eventually


@pytest.fixture(autouse=True)
def nobody_has_a_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def ended_script(script: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs a script that knows `on_sigterm` and has no launcher."""
    preamble = "import os, signal\nfrom replicast.processes import on_sigterm\n"
    without = {name: value for name, value in os.environ.items() if name != "REPLICAST_LAUNCHED"}
    return subprocess.run(
        [sys.executable, "-c", preamble + script],
        env={**without, **environ},
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECS,
        check=False,
    )


def test_the_handler_is_made_without_tensorflow() -> None:
    ended = ended_script("import sys\nprint('tensorflow' in sys.modules)")
    assert ended.stdout == "False\n", "each test here would take seconds"


def test_a_launched_worker_acts_on_the_first_signal_and_on_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPLICAST_LAUNCHED", "1")
    times = iter([0.0, 1.0, 3600.0])
    told: list[None] = []
    on_sigterm(lambda: told.append(None), now=lambda: next(times))
    for _ in range(3):
        signal.raise_signal(signal.SIGTERM)
    assert len(told) == 1


def test_without_a_launcher_a_repetition_within_seconds_is_the_same_signal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("REPLICAST_LAUNCHED", raising=False)
    times = iter([100.0, 100.1, 104.9])
    told: list[None] = []
    on_sigterm(lambda: told.append(None), now=lambda: next(times))
    for _ in range(3):
        signal.raise_signal(signal.SIGTERM)
    assert len(told) == 1


def test_without_a_launcher_a_later_repetition_ends_the_process() -> None:
    script = """
times = iter([100.0, 105.0])
on_sigterm(lambda: print("told", flush=True), now=lambda: next(times))
signal.raise_signal(signal.SIGTERM)
signal.raise_signal(signal.SIGTERM)
print("still here")
"""
    ended = ended_script(script)
    assert (ended.returncode, ended.stdout) == (-signal.SIGTERM, "told\n")


def test_a_forked_child_exits_when_told_to_without_asking_the_job_to_leave() -> None:
    script = """
on_sigterm(lambda: print("told", flush=True))
child = os.fork()
if child == 0:
    signal.raise_signal(signal.SIGTERM)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    ended = ended_script(script, REPLICAST_LAUNCHED="1")
    assert (ended.returncode, ended.stdout) == (0, f"{-signal.SIGTERM}\n")


WORKER = """
import os, sys, time
from pathlib import Path
from replicast.processes import on_sigterm
told = []
on_sigterm(lambda: told.append(1))
Path("new").write_text(str(os.getpid()))
Path("new").rename("pid")
while not told:
    time.sleep(0.002)
Path("told").touch()
while not Path("signalled").exists():
    time.sleep(0.002)
Path("written").touch()
sys.exit(143)
"""


def test_a_worker_whose_whole_cgroup_is_told_to_end_writes_its_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WORKER)
    command = [sys.executable, "-m", "replicast", "run", "-n", "1", "train.py"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as launcher:
        try:
            eventually((tmp_path / "pid").exists)
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGTERM)
            eventually((tmp_path / "told").exists)
            launcher.send_signal(signal.SIGTERM)  # It passes it on: the second one for the worker.
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGTERM)
            (tmp_path / "signalled").touch()
            _, err = launcher.communicate(timeout=DEADLINE_SECS)
        finally:
            launcher.kill()
    assert launcher.returncode == 143, err
    assert (tmp_path / "written").exists()


def test_a_thread_sets_the_handler_as_soon_as_the_main_thread_runs_python_code() -> None:
    ended = ended_script("""
import threading, time
ready, told = threading.Event(), threading.Event()
def train():
    print(on_sigterm(told.set), flush=True)
    ready.set()
threading.Thread(target=train, daemon=True).start()
while not ready.is_set():
    time.sleep(0.05)
os.kill(os.getpid(), signal.SIGTERM)
print(told.wait(10), flush=True)
""")
    assert (ended.returncode, ended.stdout) == (0, "True\nTrue\n"), ended.stderr


def test_a_handler_that_the_script_sets_before_the_main_thread_is_free_stays() -> None:
    ended = ended_script("""
import threading, time
def own(number, frame):
    print("the script's")
def train():
    print(on_sigterm(lambda: print("ours")), flush=True)
trains = threading.Thread(target=train)
really = signal.getsignal
def slowly(number):  # The main thread sets its handler after we have looked.
    found = really(number)
    if threading.current_thread() is trains:
        signal.getsignal = really
        looked.set()
        was_set.wait(10)
    return found
looked, was_set = threading.Event(), threading.Event()
signal.getsignal = slowly
trains.start()
looked.wait(10)
signal.signal(signal.SIGTERM, own)
was_set.set()
while trains.is_alive():
    time.sleep(0.01)
signal.raise_signal(signal.SIGTERM)
""")
    assert ended.stdout == "True\nthe script's\n", ended.stderr


def test_a_handler_of_ray_which_only_ends_the_process_is_replaced_and_one_of_the_script_is_not() -> None:
    ended = ended_script("""
def handler(number, frame):
    print("the script's")
for module in ("ray._private.worker", "__main__"):
    handler.__module__ = module
    signal.signal(signal.SIGTERM, handler)
    on_sigterm(lambda: print("ours"))
    signal.raise_signal(signal.SIGTERM)
""")
    assert ended.stdout == "ours\nthe script's\n", ended.stderr
