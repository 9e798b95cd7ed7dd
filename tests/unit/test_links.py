"""No link below a run directory is followed, whoever puts it there, and whatever is done through it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import replicast
from replicast.core.entries import Stage
from replicast.errors import ReplicastError
from replicast.files import (
    RunPath,
    below,
    make_durably,
    read_small,
    remove_leftovers,
    write_durably,
    write_quickly,
)
from replicast.launcher.failure import raised_in
from replicast.launcher.launcher import locked, make_attempt_dir, next_attempt, page_beside
from replicast.launcher.screen import Output
from replicast.storage import inbox
from replicast.storage.checkpoints import CheckpointStore
from replicast.storage.claims import Fence
from replicast.storage.journal import FileJournal, Updates
from replicast.storage.run_files import (
    Change,
    JobState,
    append_audit,
    append_metrics,
    changes,
    read_run_info,
    read_worker_notes,
    write_change,
    write_worker_note,
)
from replicast.update.update import Update
from tests.unit.checkpoint.samples import written
from tests.unit.played_job import PlayedJob, invoke, made_run
from tests.unit.test_audit import report
from tests.unit.test_runfiles import note

PACKAGE = Path(replicast.__file__).parent
ONES = np.ones(3, np.float32)


def contents(root: Path) -> dict[str, bytes | str]:
    """Everything in a directory: bytes of files, targets of links."""
    return {
        str(path.relative_to(root)): (
            f"-> {path.readlink()}" if path.is_symlink() else "dir" if path.is_dir() else path.read_bytes()
        )
        for path in sorted(root.rglob("*"))
    }


APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND
OPERATIONS: dict[str, Callable[[RunPath], Any]] = {
    "read": lambda path: read_small(path, max_bytes=100),
    "append": lambda path: path.open(APPEND),
    "create": lambda path: path.open(os.O_WRONLY | os.O_CREAT | os.O_EXCL),
    "make": lambda path: path.mkdir(),
    "make durably": make_durably,
    "list": lambda path: path.iterdir(),
    "enter": lambda path: path.entered().__enter__(),
}
"""What must raise if the name itself is a link."""
THROUGH: dict[str, Callable[[RunPath], Any]] = {
    **OPERATIONS,
    "write durably": lambda path: write_durably(path, [b"new"]),
    "write quickly": lambda path: write_quickly(path, "new"),
    "status": lambda path: path.stat(),
    "look": lambda path: path.exists(),
    "remove": lambda path: path.unlink(),
    "remove directory": lambda path: path.rmdir(),
    "rename": lambda path: path.rename(path.with_name("other")),
    "move out": lambda path: path.rename(below(path.root) / "taken"),
    "move in": lambda path: (below(path.root) / "own").rename(path),
}
"""What must raise if a directory on the way is a link."""


@pytest.fixture
def linked(tmp_path: Path) -> tuple[RunPath, Path]:
    """A run in which `link` leads to a directory of somebody else, and `file` to a file of his."""
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run.mkdir()
    (elsewhere / "inner").mkdir(parents=True)
    (elsewhere / "precious").write_text("precious")
    (run / "own").write_text("own")
    (run / "link").symlink_to(elsewhere)
    (run / "file").symlink_to(elsewhere / "precious")
    (run / "dangling").symlink_to(elsewhere / "new")
    return below(run), elsewhere


@pytest.mark.parametrize("name", ["link", "file", "dangling"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_nothing_is_done_to_what_a_link_leads_to(
    linked: tuple[RunPath, Path], operation: str, name: str
) -> None:
    run, elsewhere = linked
    before = contents(elsewhere)
    with pytest.raises(OSError, match=f"/run/{name}'") as raised:
        OPERATIONS[operation](run / name)
    assert "symbolic link" in str(raised.value) or isinstance(raised.value, FileExistsError)
    assert contents(elsewhere) == before


@pytest.mark.parametrize("names", [("link", "precious"), ("link", "inner", "new"), ("link", "new")])
@pytest.mark.parametrize("operation", THROUGH)
def test_nothing_is_done_through_a_link_in_the_middle(
    linked: tuple[RunPath, Path], operation: str, names: tuple[str, ...]
) -> None:
    run, elsewhere = linked
    before = contents(elsewhere)
    with pytest.raises(OSError, match=r"links in a run directory are not followed: '.*/run/link'"):
        THROUGH[operation](RunPath(run.root, names))
    assert contents(elsewhere) == before


def test_a_new_file_is_none_to_which_its_temporary_name_was_made_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    link = os.link

    def swapped_first(name: str, *arguments: Any, **options: Any) -> None:
        (tmp_path / "inbox" / name).unlink()
        (tmp_path / "inbox" / name).symlink_to(secret)
        link(name, *arguments, **options)

    make_durably(below(tmp_path) / "inbox")
    monkeypatch.setattr(os, "link", swapped_first)
    write_durably(below(tmp_path) / "inbox" / "new", [b"new"], replace=False)
    assert secret.stat().st_nlink == 1


def test_a_link_itself_is_removed_renamed_and_replaced(linked: tuple[RunPath, Path]) -> None:
    run, elsewhere = linked
    before = contents(elsewhere)
    (run / "file").rename(run / "renamed")
    write_durably(run / "renamed", [b"new"])
    assert read_small(run / "renamed", max_bytes=9) == b"new"
    (run / "dangling").unlink()
    (run / "link").rmtree()
    (run / ".tmp-1").as_path().symlink_to(elsewhere)
    remove_leftovers(run, older_than_secs=0)
    assert not (run / ".tmp-1").exists()
    assert contents(elsewhere) == before


def test_a_tree_is_removed_without_what_links_in_it_lead_to(linked: tuple[RunPath, Path]) -> None:
    run, elsewhere = linked
    before = contents(elsewhere)
    (run / "tree").mkdir()
    (run / "tree" / "inner").as_path().symlink_to(elsewhere)
    (run / "tree").rmtree()
    assert not (run / "tree").exists()
    assert contents(elsewhere) == before


def test_a_run_directory_that_a_user_names_may_be_a_link(linked: tuple[RunPath, Path]) -> None:
    run, elsewhere = linked
    write_durably(below(run.as_path() / "link") / "new", [b"new"])
    assert (elsewhere / "new").read_bytes() == b"new"


def test_a_path_in_a_run_cannot_be_opened_around_its_checks(linked: tuple[RunPath, Path]) -> None:
    for act in (open, os.stat, os.listdir, os.unlink, Path):
        with pytest.raises(TypeError):
            act(linked[0] / "own")  # type: ignore[operator]


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc/passwd", "a\0b", "\ud800"])
def test_what_is_no_name_of_a_file_names_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_text("b")
    for path in (below(tmp_path) / name, below(tmp_path) / name / "x"):
        assert not path.exists()
        with pytest.raises(FileNotFoundError):
            write_quickly(path, "x")


@pytest.mark.parametrize("kind", ["pipe", "directory", "device"])
def test_only_regular_files_are_opened_and_nothing_blocks(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "log"
    {"pipe": os.mkfifo, "directory": os.mkdir, "device": lambda one: one.symlink_to("/dev/zero")}[kind](path)
    for flags in (os.O_RDONLY, os.O_RDWR | os.O_CREAT | os.O_APPEND):
        with pytest.raises(OSError, match="/log'"):
            (below(tmp_path) / "log").open(flags)


def test_names_are_shown_without_control_characters(tmp_path: Path) -> None:
    (tmp_path / "inbox").mkdir()
    path = below(tmp_path) / "inbox" / "a\nroot ALL=(ALL) NOPASSWD: ALL\x1b[2J\udcff"
    assert str(path) == f"{tmp_path}/inbox/a\\nroot ALL=(ALL) NOPASSWD: ALL\\x1b[2J\\udcff"
    with pytest.raises(FileNotFoundError) as raised:
        path.stat()
    assert raised.value.filename == str(path)


# What a job, its launcher and its users do in a run directory, each with a link in one place of it.


def linked_place(run: Path, place: str, elsewhere: Path) -> dict[str, bytes | str]:
    """Moves a file or directory of a run out of it, and leaves a link; gives what is there now."""
    path, elsewhere = run / place, elsewhere / Path(place).name
    path.parent.mkdir(parents=True, exist_ok=True)
    elsewhere.parent.mkdir(exist_ok=True)
    if path.exists():
        path.rename(elsewhere)
    elif not path.suffix:
        elsewhere.mkdir()
    path.symlink_to(elsewhere)
    return contents(elsewhere.parent)


def write_log(run: Path) -> None:
    log = below(run) / "logs" / "attempt-1" / "worker-0.log"
    output = Output(0, log, screen=None, columns=None)
    os.write(output.writing_end, b"a chosen line\n")
    output.close()


def serve(run: Path) -> None:
    with page_beside(("127.0.0.1", 0), run, below(run) / "logs", {}) as said:
        raise OSError(said)


def take_lock(run: Path) -> None:
    with locked(run, 0):
        pass


def refuse(run: Path) -> None:
    inbox.refuse(run, below(run) / "inbox" / "u1.safetensors", ValueError())


WRITES: dict[tuple[str, str], Callable[[Path], Any]] = {
    ("logs/attempt-1/worker-0.log", "log"): write_log,
    ("logs/attempt-1", "log"): write_log,
    ("logs", "log"): write_log,
    ("logs", "attempt"): lambda run: make_attempt_dir(below(run) / "logs", 3),
    ("logs", "next attempt"): lambda run: next_attempt(below(run) / "logs", [0]),
    ("logs/serve.log", "serve"): serve,
    ("logs", "serve"): serve,
    ("launcher-0.lock", "lock"): take_lock,
    ("inbox", "push"): lambda run: inbox.submit(run, Update(id="new").add("dense/bias", ONES)),
    ("inbox", "note"): lambda run: inbox.note_stage(run, "u1", Stage.PROPOSED),
    ("inbox", "withdraw"): lambda run: inbox.withdraw(run, "u1", job_is_running=lambda: False),
    ("inbox", "refuse"): refuse,
    ("refused", "refuse"): refuse,
    ("inbox", "clean"): inbox.clean,
    ("inbox", "ask"): lambda run: inbox.ask(run, "save", author="ana", timeout_secs=1.0),
    ("groups", "claim"): lambda run: Fence(run, attempt=1),
    ("groups", "journal"): lambda run: FileJournal(run, Fence(run, attempt=1)),
    ("groups", "updates"): Updates,
    ("groups", "describe"): read_run_info,
    ("checkpoints", "save"): lambda run: written(CheckpointStore(run), 7),
    ("checkpoints", "list"): lambda run: CheckpointStore(run).manifests(),
    ("workers", "note"): lambda run: write_worker_note(run, note(0)),
    ("workers", "notes"): read_worker_notes,
    ("metrics.jsonl", "metrics"): lambda run: append_metrics(run, (1, time.time(), {"loss": 1.0})),
    ("audits.jsonl", "audit"): lambda run: append_audit(run, report()),
    ("states.jsonl", "state"): lambda run: write_change(run, Change(JobState.STARTING, 0)),
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with all that a job leaves: two updates, one that waits, a checkpoint, metrics, notes."""
    path = made_run(tmp_path / "run")
    job = PlayedJob(path, 1)
    inbox.submit(path, Update(id="done").add("dense/bias", ONES))
    job.act_all()
    inbox.submit(path, Update(id="u1").add("dense/bias", ONES))
    job.fence.release()
    written(CheckpointStore(path), 5)
    append_metrics(path, (1, time.time(), {"loss": 1.0}))
    write_change(path, Change(JobState.STARTING, 0))
    make_attempt_dir(below(path) / "logs", 1)
    write_log(path)
    return path


@pytest.mark.parametrize(("place", "act"), WRITES, ids=lambda one: str(one))
def test_a_job_its_launcher_and_its_users_go_through_no_link(
    run: Path, tmp_path: Path, place: str, act: str
) -> None:
    before = linked_place(run, place, tmp_path / "elsewhere")
    with pytest.raises((OSError, ReplicastError)):
        WRITES[place, act](run)
    assert contents(tmp_path / "elsewhere") == before


@pytest.mark.parametrize("code", [0, 143])
def test_links_in_a_run_directory_do_not_change_how_a_job_ends(tmp_path: Path, code: int) -> None:
    for name in ("workers", "inbox"):
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / name).symlink_to(tmp_path)
    program = tmp_path / "program.py"
    program.write_text(f"raise SystemExit({code})")
    run = [sys.executable, "-m", "replicast", "run", "--run-dir", str(tmp_path / "run"), str(program)]
    ended = subprocess.run(run, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == code, ended.stderr
    states = [one.state for one in changes(tmp_path / "run")]
    assert states == [JobState.STARTING, JobState.STOPPED if code else JobState.FINISHED]


def test_a_log_is_not_read_through_a_link(run: Path, tmp_path: Path) -> None:
    log = run / "logs" / "attempt-1" / "worker-0.log"
    log.write_text("Traceback (most recent call last):\n  File\nValueError: secret\n")
    linked_place(run, "logs/attempt-1/worker-0.log", tmp_path / "elsewhere")
    assert raised_in(below(run) / "logs" / "attempt-1" / "worker-0.log") == ("", "", [])
    with pytest.raises(ReplicastError, match="There is no log"):
        replicast.connect(run).log_lines(0)


def test_a_waiting_update_is_not_shown_through_a_link(run: Path, tmp_path: Path) -> None:
    Update(id="secret").assign("dense/bias", ONES).save(tmp_path / "secret.safetensors")
    (run / "inbox" / "secret.safetensors").symlink_to(tmp_path / "secret.safetensors")
    view = replicast.connect(run).show("secret")
    assert (view.detailed, view.edits, view.author) == (False, (), "")


@pytest.mark.parametrize("place", ["groups", "checkpoints", "inbox", "workers"])
def test_a_linked_directory_is_named_and_never_taken_for_an_empty_one(
    run: Path, tmp_path: Path, place: str
) -> None:
    linked_place(run, place, tmp_path / "elsewhere")
    result = invoke("checkpoint", "list", run) if place == "checkpoints" else invoke("status", run)
    assert result.exit_code != 0
    assert f"run/{place}" in result.output
    assert "symbolic link" in result.output


# Every way around `RunPath` in the package, with the reason why it may be there.

_OWN = "files of the package, /proc, /dev or /sys, which no other user writes"
_USERS = "a file that a user names, outside of any run"
_ALLOWED = {
    "cli/launch.py": "shared memory and Keras' settings",
    "cli/push.py": _USERS,
    "cli/runs.py": _USERS,
    "client/connection.py": "the file of a token",
    "config.py": "shared memory, and " + _OWN,
    "cli/story.py": "a new directory of the demo, which only its owner can enter",
    "faults.py": "only in tests; one name below the run directory, with O_NOFOLLOW; files.py imports it",
    "files.py": "RunPath itself, what is relative to its descriptors, and `open_plain` for " + _USERS,
    "page/app.py": _OWN,
    "page/assets.py": _OWN,
    "page/web_server.py": "the files of a token and a certificate",
    "port_filter.py": _OWN,
    "processes.py": _OWN,
    "replicas/worker_notes.py": _OWN,
    "lifetime.py": _OWN,
    "launcher/function.py": "a directory that only its user can enter, with the owner checked",
    "launcher/hosts_link.py": "the user's script",
    "transport/shared.py": "shared memory, with O_NOFOLLOW and the owner checked (SECURITY.md)",
}
_LEAVES = {
    "replicas/joined_worker.py": "compared with the launcher's, not opened",
    "replicas/replicas.py": "for users: replicas.run_dir; the evaluator asks as somebody outside asks",
    "storage/checkpoints.py": "written down as where a patched checkpoint comes from",
    "storage/claims.py": "the parent of the run directory is synced",
    "client/connection.py": "a user who names a directory in a run means the run",
    "cli/checkpoint.py": "printed as JSON",
    "files.py": "it is defined there",
}
"""Where a `RunPath` becomes a `Path`."""
_OS = {
    *("access", "chmod", "chown", "link", "listdir", "lstat", "makedirs", "mkdir", "mkfifo", "open"),
    *("readlink", "remove", "removedirs", "rename", "renames", "replace", "rmdir", "scandir", "stat"),
    *("symlink", "truncate", "unlink", "utime", "walk"),
}
_SHUTIL = {"copy", "copy2", "copyfile", "copytree", "move", "rmtree"}
_NUMPY = {"fromfile", "load", "loadtxt", "open_memmap", "save", "savez"}
_PATHLIB = {
    *("chmod", "hardlink_to", "is_symlink", "lchmod", "lstat", "read_bytes", "read_text", "readlink"),
    *("rglob", "samefile", "symlink_to", "touch", "write_bytes", "write_text"),
}
"""Methods that a `RunPath` does not have."""
_MODULES = {"os": _OS, "shutil": _SHUTIL, "np": _NUMPY}


def goes_around(call: ast.Call) -> bool:
    """Whether a call opens, changes or looks at a file by its path: not relative to one of `RunPath`'s."""
    function = call.func
    if any(keyword.arg == "dir_fd" for keyword in call.keywords):
        return False
    if isinstance(function, ast.Name):
        return function.id == "open"
    if not isinstance(function, ast.Attribute):
        return False
    if isinstance(function.value, ast.Name) and function.value.id in _MODULES:
        return function.attr in _MODULES[function.value.id]
    if function.attr == "open":  # `Path.open` takes a word; `RunPath.open` takes flags.
        return any(isinstance(one, ast.Constant) and isinstance(one.value, str) for one in call.args)
    return function.attr in _PATHLIB


def calls_in(path: Path) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def test_every_file_is_opened_with_the_helper_or_has_a_reason() -> None:
    found = {name_of(path) for path in PACKAGE.rglob("*.py") if any(map(goes_around, calls_in(path)))}
    assert found - _ALLOWED.keys() == set(), "use RunPath: below(run_dir) / name"
    assert _ALLOWED.keys() - found == set(), "these reasons are not needed any more"


def test_a_path_in_a_run_becomes_a_plain_one_only_where_there_is_a_reason() -> None:
    def leaves(call: ast.Call) -> bool:
        return isinstance(call.func, ast.Attribute) and call.func.attr == "as_path"

    found = {name_of(path) for path in PACKAGE.rglob("*.py") if any(map(leaves, calls_in(path)))}
    assert found == _LEAVES.keys()


def test_run_directories_have_the_type_with_which_mypy_finds_what_goes_around_the_helper() -> None:
    """`run_dir / name` is an error of type RunPath | Path | str, and none of type Path."""
    ours = [path for path in PACKAGE.rglob("*.py") if not name_of(path).startswith("cli/")]
    named = ("run_dir", "run")
    for path in ours:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.arg) and node.arg in named and node.annotation is not None:
                kind = ast.unparse(node.annotation).removesuffix(" | None")
                if name_of(path) != "faults.py":
                    assert kind not in ("Path", "Path | str"), f"{path}:{node.lineno}"


def test_no_operation_on_a_run_names_a_file_by_its_whole_path(tmp_path: Path) -> None:
    """What the interpreter opens, lists, creates, renames and removes, as its audit events tell."""
    code = f"""
        import sys
        from pathlib import Path
        from tests.unit.test_links import every_operation
        run, seen = Path({str(tmp_path)!r}) / "run", []
        def note(event, arguments):
            if event in ("open", "os.listdir", "os.scandir", "os.mkdir", "os.rename", "os.remove", "os.rmdir",
                         "os.link", "os.truncate", "shutil.rmtree", "glob.glob"):
                seen.extend(f"{{event}} {{one}}" for one in arguments if str(run) + "/" in str(one))
        sys.addaudithook(note)
        every_operation(run)
        open(run / "around").close()
        print("\\n".join(sorted(set(seen))))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout.split() == ["open", str(tmp_path / "run" / "around")], "only the one of this test"


def every_operation(run: Path) -> None:
    """A job that takes updates, is asked, saves and ends; its client; the logs of its launcher."""
    made_run(run)
    job = PlayedJob(run, 1)
    client = replicast.connect(run)
    for number in range(3):
        client.push(Update(id=f"u{number}").add("dense/bias", ONES))
        job.act_all()
    client.push(Update(id="waiting").add("dense/bias", ONES))
    client.withdraw("waiting")
    store = CheckpointStore(run, job.fence)
    for step in (5, 6):
        written(store, step)
    store.open(6).verify()
    store.prune(1)
    append_metrics(run, (1, time.time(), {"loss": 1.0}))
    client.status(), client.log(), client.show(1), client.metrics(), client.checkpoints(), client.audits()
    inbox.ask(run, "save", author="ana", timeout_secs=1.0)
    for path in inbox.requests(run):
        inbox.read_request(path)
    inbox.clean(run)
    make_attempt_dir(below(run) / "logs", 1)
    write_log(run)
    client.log_lines(0)
    take_lock(run)
    write_durably(below(run) / "around", [])
    job.fence.release()
