"""Standby processes without TensorFlow: what a script sees in one, and that nothing fails because of one."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from replicast import import_environment
from replicast.files import below
from replicast.import_environment import PASSED_ON, as_told, make_memory, relevant
from replicast.launcher.failure import GroupEnd
from replicast.launcher.group import EndTimeouts, Group
from replicast.launcher.interruptions import Interruptions
from replicast.launcher.plan import WorkerPlan
from replicast.launcher.screen import Screen
from replicast.launcher.standby import StandbySet
from replicast.testing.job import eventually

MIRROR = '''"""A script that writes down all that it can see of its process."""
import json, os, resource, signal, sys, threading, warnings

def here():
    return here.__code__.co_filename

def shown(value):
    return repr(value).partition(" object at ")[0]

main = sys.modules["__main__"]
files = {n: os.readlink(f"/proc/self/fd/{n}") for n in sorted(os.listdir("/proc/self/fd")) if n != "3"}
umask = os.umask(0)
os.umask(umask)
print(json.dumps({
    "main": {name: shown(value) for name, value in vars(main).items() if name.startswith("__")},
    "here": here(), "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "flags": str(sys.flags),
    "environ": dict(os.environ), "cwd": os.getcwd(), "umask": umask, "nice": os.nice(0),
    "cores": sorted(os.sched_getaffinity(0)), "files": {n: f.partition(":")[0] for n, f in files.items()},
    "signals": {str(s): str(signal.getsignal(s)) for s in signal.valid_signals()},
    "blocked": sorted(map(str, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
    "threads": [thread.name for thread in threading.enumerate()], "hook": str(sys.excepthook),
    "leads": [os.getpid() == os.getpgid(0), os.getpid() == os.getsid(0)], "parent": os.getppid(),
    "terminal": [os.isatty(n) for n in range(3)], "limit": resource.getrlimit(resource.RLIMIT_NOFILE),
    "streams": [(s.encoding, s.line_buffering, s.write_through) for s in (sys.stdin, sys.stdout, sys.stderr)],
    "warnings": [str(f) for f in warnings.filters],
}))
'''


class Place:
    """One worker in a directory of its own, with a standby set; `run` is an attempt of it."""

    def __init__(self, directory: Path, *program: str, imports: tuple[str, ...] = ("json",)) -> None:
        self.directory = directory
        self.told = io.StringIO()
        self.screen = Screen(io.StringIO(), self.told, live_rank=None, colour=False)
        self.argv = (sys.executable, *program)
        self.trains = True
        self.standbys = StandbySet(program, self.screen, lambda attempt: self.trains, imports)

    def run(self, attempt: int, **env: str) -> GroupEnd:
        self.told.truncate(0)
        log = below(self.directory) / f"{attempt}.log"
        plan = WorkerPlan(0, self.argv, {"PYTHONUNBUFFERED": "1", **env}, log)
        with Interruptions() as interruptions:
            group = Group(
                [plan],
                screen=self.screen,
                tee=frozenset(),
                timeouts=EndTimeouts(),
                interruptions=interruptions,
                standbys=self.standbys,
            )
            return group.run(os.environ, lambda: self.standbys.begin(attempt))

    def restart(self, **env: str) -> int:
        """A first attempt, and the second one in the standby process, whose process id is returned."""
        self.run(0, **env)
        standby = self.prepare()
        self.end = self.run(1, **env)
        return standby

    def log(self, attempt: int) -> str:
        return (self.directory / f"{attempt}.log").read_text()

    def prepare(self) -> int:
        """Waits until the standby process is ready; returns its process id."""
        eventually(lambda: (self.standbys.poll(), "waits for a restart" in self.told.getvalue())[1])
        return self.pid()

    def pid(self) -> int:
        """The process id of the standby process; its command is empty for a moment while it execs."""
        eventually(lambda: any(b"prepared.py" in command(entry) for entry in children()))
        (pid,) = (int(entry) for entry in children() if b"prepared.py" in command(entry))
        return pid


def children() -> list[str]:
    listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return listed.split()


def command(pid: str | int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Place]]:
    monkeypatch.chdir(tmp_path)
    made: list[Place] = []

    def make(script: str, *program: str, imports: tuple[str, ...] = ("json",)) -> Place:
        (tmp_path / "train.py").write_text(script)
        made.append(Place(tmp_path, *(program or ("train.py", "--epochs", "3")), imports=imports))
        return made[-1]

    yield make
    for one in made:
        one.standbys.close()
    assert not [entry for entry in children() if b"prepared.py" in command(entry)]


Make = Callable[..., Place]


@pytest.mark.parametrize("program", [("train.py", "-x", "a b"), ("-m", "train", "-x", "a b")])
def test_a_script_sees_the_same_in_a_standby_as_in_a_cold_start(
    place: Make, program: tuple[str, ...]
) -> None:
    here = place(MIRROR, *program)
    standby = here.restart(REPLICAST_ATTEMPT="same")
    assert here.end.first_failure is None
    assert not Path(f"/proc/{standby}").exists(), "it was used, and has ended"
    assert json.loads(here.log(1)) == json.loads(here.log(0))


def test_a_standby_starts_only_once_the_job_trains_and_waits_without_a_file_of_the_run(place: Make) -> None:
    here = place("")
    here.trains = False
    here.run(0)
    here.standbys.poll()
    assert not [entry for entry in children() if b"prepared.py" in command(entry)]
    here.trains = True
    before = {path.name for path in here.directory.iterdir()}
    standby = here.prepare()
    opened = [file.readlink() for file in Path(f"/proc/{standby}/fd").iterdir()]
    assert not [path for path in opened if path.is_relative_to(here.directory)]
    assert {path.name for path in here.directory.iterdir()} == before


def test_the_last_attempt_has_no_standby(place: Make) -> None:
    here = place("")
    here.trains = False
    here.run(0)
    here.standbys.begin(1, is_last=True)
    here.trains = True
    here.standbys.poll()
    assert not [entry for entry in children() if b"prepared.py" in command(entry)]


def test_faults_of_another_worker_or_attempt_do_not_happen_in_a_standby(place: Make) -> None:
    script = "from replicast import faults; faults.point('apply'); print('trained')"
    here = place(script, imports=("replicast.faults",))
    plan = [{"worker": 0, "point": "apply"}, {"worker": 1, "point": "apply", "attempt": 1, "action": "raise"}]
    cluster = {"cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}, "task": {"type": "worker", "index": 1}}
    env = {"REPLICAST_FAULTS": json.dumps(plan), "TF_CONFIG": json.dumps(cluster)}
    env |= {"REPLICAST_RUN_DIR": str(here.directory), "REPLICAST_LAUNCHED": "1"}
    here.run(0, REPLICAST_ATTEMPT="0", **env)
    assert here.log(0) == "trained\n"
    here.prepare()
    end = here.run(1, REPLICAST_ATTEMPT="1", **env)
    assert [ended.code for ended in end.exits] == [1]
    assert "FaultInjected" in here.log(1)


def test_a_standby_that_cannot_take_the_call_has_not_trained(place: Make) -> None:
    here = place("print('trained')", imports=("narrow",))
    (here.directory / "narrow.py").write_text(
        "import os, resource\nlimits = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "free = os.dup(0)\nos.close(free)\nresource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))"
    )
    here.restart()
    assert [ended.code for ended in here.end.exits] == [1]


def test_exit_codes_and_tracebacks_are_those_of_python(place: Make) -> None:
    here = place("import os\ndef f():\n    raise ValueError('why')\nf()")
    here.restart()
    assert here.end.first_failure is not None
    assert here.end.first_failure.code == 1
    assert here.log(1) == here.log(0)
    here.prepare()
    (here.directory / "train.py").write_text("import sys; sys.exit(7)")
    assert [ended.code for ended in here.run(2).exits] == [7]


def test_what_the_imports_write_is_in_the_worker_s_log(place: Make) -> None:
    here = place("import noisy; print('trained')", imports=("noisy",))
    (here.directory / "noisy.py").write_text("import os; os.write(2, b'from C\\n'); print('imported')")
    here.restart()
    assert here.log(1) == here.log(0) == "from C\nimported\ntrained\n"


def test_imports_that_fail_become_a_cold_start(place: Make) -> None:
    here = place("import sys; print('json' in sys.modules, sys.argv)", imports=("json", "no_such_module"))
    here.restart()
    assert here.log(1) == here.log(0) == "False ['train.py', '--epochs', '3']\n"


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_standby_that_is_dead_or_stopped_is_not_used(place: Make, signum: signal.Signals) -> None:
    here = place("import os; print('pid', os.getpid())")
    here.run(0)
    standby = here.prepare()
    os.kill(standby, signum)
    eventually(lambda: Path(f"/proc/{standby}/stat").read_text().rpartition(")")[2].split()[0] in "ZT")
    assert here.run(1).first_failure is None
    assert here.log(1).startswith("pid ")
    assert str(standby) not in here.log(1)
    assert here.prepare() != standby, "the next set is made"


def test_a_standby_that_still_imports_when_it_is_called_runs_the_script(place: Make) -> None:
    here = place("import os; print(os.getpid())", imports=("slow",))
    (here.directory / "slow.py").write_text("import time; time.sleep(1)")
    here.run(0)
    here.standbys.poll()
    standby = here.pid()
    here.run(1)
    assert here.log(1) == f"{standby}\n"


def test_the_death_of_a_standby_is_said(place: Make) -> None:
    here = place("")
    here.run(0)
    os.kill(here.prepare(), signal.SIGKILL)
    eventually(lambda: (here.standbys.poll(), "the process for worker 0 has died" in here.told.getvalue())[1])


def test_a_standby_ends_with_its_launcher_also_after_kill_9(tmp_path: Path) -> None:
    program = """
import io, os, sys, time
from pathlib import Path
from replicast.launcher.screen import Screen
from replicast.launcher.standby import Standby
standby = Standby(["train.py"], dict(os.environ), ["json"], os.memfd_create("changes"))
while standby.look() and not standby.is_ready:
    time.sleep(0.01)
print(standby.process.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        standby = int(launcher.stdout.readline())
        assert b"prepared.py" in command(standby)
        launcher.kill()
    eventually(lambda: b"prepared.py" not in command(standby))


SEEN = """
import os
level, path = os.environ.get("TF_CPP_MIN_LOG_LEVEL"), os.environ.get("TF_PLUGGABLE_DEVICE_LIBRARY_PATH")
"""
CHANGING = """
import os, seen
from replicast import import_environment
print(seen.level, seen.path, os.environ.get("TF_CPP_MIN_LOG_LEVEL"))
os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_PLUGGABLE_DEVICE_LIBRARY_PATH": "/foreign", "PASSWORD": "p"}
import_environment.tell_launcher()
"""


def test_a_standby_imports_with_what_the_script_changed_and_starts_without_it(place: Make) -> None:
    here = place(CHANGING, imports=("seen",))
    (here.directory / "seen.py").write_text(SEEN)
    here.trains = False  # as long as a worker has not told what it changed
    here.run(0)
    here.trains = True
    standby = here.prepare()
    taken = Path(f"/proc/{standby}/environ").read_bytes()
    assert b"TF_CPP_MIN_LOG_LEVEL=3" in taken
    assert b"PASSWORD" not in taken
    assert b"TF_PLUGGABLE" not in taken, "only what is on the list passes"
    here.run(1)
    assert here.log(1) == "3 None None\n"


def test_a_file_in_the_run_directory_changes_nothing_of_a_standby(place: Make) -> None:
    here = place("import seen; print(seen.level, seen.path)", imports=("seen",))
    (here.directory / "seen.py").write_text(SEEN)
    planted = {"TF_PLUGGABLE_DEVICE_LIBRARY_PATH": "/foreign", "TF_CPP_MIN_LOG_LEVEL": "3"}
    (here.directory / "workers").mkdir()
    content = json.dumps({"attempt": 0, "changes": planted})
    (here.directory / "workers" / "0.environment").write_text(content)
    here.restart(REPLICAST_RUN_DIR=str(here.directory))
    assert here.log(1) == "None None\n"


def test_changes_go_only_into_the_memory_that_a_worker_has_inherited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    memory = make_memory()
    with (tmp_path / "other").open("w+") as other:
        for descriptor in ("", "x", "../1", str(other.fileno()), "9999", str(memory)):
            import_environment.tell_launcher({"REPLICAST_CHANGES_FD": descriptor})
        assert other.read() == "", "the descriptor of something else in a child of the script"
    assert as_told({}, memory)["KERAS_BACKEND"] == "tensorflow"
    os.close(memory)


def test_other_settings_for_the_imports_than_those_of_the_standby_mean_a_cold_start(place: Make) -> None:
    here = place("import os; print(os.getpid(), os.environ['OMP_NUM_THREADS'])")
    here.run(0, OMP_NUM_THREADS="1")
    standby = here.prepare()
    here.run(1, OMP_NUM_THREADS="2")
    assert not here.log(1).startswith(str(standby))
    assert here.log(1).endswith(" 2\n")


def test_a_variable_that_the_script_removed_is_removed_and_others_stay() -> None:
    memory = make_memory()
    os.pwrite(memory, b'{"TF_ENABLE_ONEDNN_OPTS": "0"}', 0)
    before = {"TF_ENABLE_ONEDNN_OPTS": "1", "PASSWORD": "a", "KERAS_HOME": "/k"}
    assert as_told(before, memory) == {"TF_ENABLE_ONEDNN_OPTS": "0", "PASSWORD": "a"}
    os.close(memory)


def test_no_variable_that_names_code_is_passed_on() -> None:
    assert not [name for name in PASSED_ON if name.endswith(("PATH", "LIBRARY", "PRELOAD", "FLAGS", "DIR"))]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "3", '{"TF_X": "x"}', '{"KERAS_BACKEND": 3, "LD_PRELOAD": "x", "TF_CONFIG": ""}']
)
def test_changes_that_are_not_on_the_list_or_damaged_are_ignored(text: str) -> None:
    memory = make_memory()
    os.pwrite(memory, text.encode(), 0)
    assert as_told({}, memory) == {}
    os.close(memory)


def test_only_what_the_script_sets_after_the_imports_comes_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_environment, "imported_with", {"TF2_BEHAVIOR": "1", "KMP_INIT_AT_FORK": "F"})
    monkeypatch.delenv("KMP_INIT_AT_FORK", raising=False)  # a library sets it during its import
    monkeypatch.setenv("TF2_BEHAVIOR", "1")
    for name in [*relevant(os.environ)]:
        if name != "TF2_BEHAVIOR":
            monkeypatch.delenv(name)
    assert import_environment.without_effect() == []
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
    assert import_environment.without_effect() == ["TF_ENABLE_ONEDNN_OPTS"]
