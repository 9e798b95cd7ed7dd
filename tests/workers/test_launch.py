"""`replicast.launch`: workers that call a function, from a notebook or a script."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import replicast
from replicast.errors import JobFailed, LaunchRefused
from tests.threads import eventually


@pytest.fixture(autouse=True)
def _in_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)  # It is kept after the first use.


def place(*args: Any) -> tuple[str, int, tuple[Any, ...]]:
    print("called on worker", os.environ["RANK"], flush=True)
    return os.environ["WORLD_SIZE"], os.getpid(), args


def fails_on_one(rank: str) -> None:
    if os.environ["RANK"] == rank:
        raise KeyError("a thing that is missing")
    signal.pause()


def test_every_worker_calls_the_function_and_the_result_of_the_first_returns(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    size, pid, args = replicast.launch(place, ("a", 1), workers=2, run_dir="run", tee="all")
    assert (size, args) == ("2", ("a", 1))
    assert pid != os.getpid()
    said = capfd.readouterr().out
    assert "[worker 0] called on worker 0" in said
    assert "[worker 1] called on worker 1" in said
    assert (tmp_path / "run" / "logs" / "attempt-0" / "worker-1.log").exists()
    assert not list(tmp_path.glob("replicast-launch-*"))
    number = 20
    assert replicast.launch(lambda: number + 1, workers=1) == 21, "a function that no module holds"


def test_what_the_first_worker_that_failed_has_raised_is_raised() -> None:
    with pytest.raises(JobFailed, match=r"worker 1 failed: KeyError: 'a thing that is missing'") as caught:
        replicast.launch(fails_on_one, ("1",), workers=2)
    assert caught.value.worker == 1
    assert isinstance(caught.value.__cause__, KeyError)
    assert "in fails_on_one" in "".join(caught.value.__notes__)


@pytest.mark.parametrize(
    ("function", "options", "said"),
    [
        ("no function", {}, "needs a function"),
        (print, {"workers": 0}, "-n must be at least 1"),
        (lambda lock=sys.stdout: lock, {}, "cannot be sent to the workers"),
    ],
)
def test_what_cannot_be_launched_is_refused(function: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(LaunchRefused, match=said):
        replicast.launch(function, **options)


def test_a_function_of_the_main_script_needs_cloudpickle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    monkeypatch.setattr(fails_on_one, "__module__", "__main__")
    with pytest.raises(LaunchRefused, match="pip install cloudpickle"):
        replicast.launch(fails_on_one)
    assert replicast.launch(place, workers=1)[0] == "1", "one of a module does not"


def test_workers_launch_no_workers_and_read_nothing_that_others_may_write(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("REPLICAST_LAUNCHED", "1")
    with pytest.raises(LaunchRefused, match="already"):
        replicast.launch(place)
    (tmp_path / "call").write_bytes(b"")
    tmp_path.chmod(0o755)
    command = [sys.executable, "-m", "replicast.launcher.function", str(tmp_path)]
    done = subprocess.run(
        command, env={**os.environ, "RANK": "0"}, capture_output=True, text=True, check=False
    )
    assert "is not private to this user" in done.stderr


class Script(subprocess.Popen[str]):
    """A script whose workers note their process ids and sleep."""

    def __init__(self, directory: Path) -> None:
        (directory / "main.py").write_text(
            textwrap.dedent("""
                import os, signal, replicast
                from pathlib import Path

                def sleep():
                    Path(f"new-{os.environ['RANK']}").write_text(str(os.getpid()))
                    Path(f"new-{os.environ['RANK']}").rename(f"pid-{os.environ['RANK']}")
                    signal.pause()

                if __name__ == "__main__":
                    replicast.launch(sleep, workers=2)
            """)
        )
        super().__init__(
            [sys.executable, "main.py"], text=True, stderr=subprocess.PIPE, stdout=subprocess.PIPE
        )
        files = [directory / f"pid-{rank}" for rank in (0, 1)]
        eventually(lambda: all(file.exists() for file in files))
        self.workers = [int(file.read_text()) for file in files]


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Script]:
    with Script(tmp_path) as process:
        yield process
        process.kill()


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_an_interrupt_stops_the_workers(script: Script) -> None:
    script.send_signal(signal.SIGINT)
    _, said = script.communicate(timeout=60)
    assert "KeyboardInterrupt" in said
    assert all(map(gone, script.workers))


def test_no_worker_outlives_the_process_that_launched_it(script: Script) -> None:
    script.kill()
    eventually(lambda: all(map(gone, script.workers)))
