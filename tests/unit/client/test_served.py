"""A served run when something is wrong: tokens, limits, broken connections, other servers."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from replicast.client import connect
from replicast.errors import NotFound, RequestFailed, UpdateRefused
from replicast.storage import inbox
from replicast.update.update import Update
from tests.unit.client.serving import TOKEN, AnswerError, Served, served
from tests.unit.played_job import BIAS, heard_of_always, invoke, made_run, meanwhile, tensors

pytestmark = pytest.mark.usefixtures("wall_clock_stands_still")


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REPLICAST_TOKEN", raising=False)
    return made_run()


@pytest.fixture
def server(directory: Path, tmp_path: Path) -> Iterator[Served]:
    with served(connect(directory), tmp_path) as one:
        yield one


def slower() -> Update:
    return Update(id="slower").assign("learning_rate", 0.5)


def test_reading_needs_no_token_and_acting_does(server: Served, directory: Path) -> None:
    run = connect(f"{server.address}/first")
    assert run.status().running
    with pytest.raises(RequestFailed, match="REPLICAST_TOKEN") as caught:
        run.push(slower())
    assert caught.value.status == 401
    assert inbox.waiting(directory) == []


def test_the_token_comes_from_the_argument_a_file_or_the_environment(
    server: Served, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, file = f"{server.address}/first", Path("token")
    file.write_text(f"{TOKEN}\n")
    monkeypatch.setenv("REPLICAST_TOKEN", "wrong")
    for run in (connect(address, token=TOKEN), connect(address, token_file=file)):
        assert run.push(slower()).id == "slower"
    monkeypatch.setenv("REPLICAST_TOKEN", TOKEN)
    assert connect(address).push(slower()).id == "slower"
    monkeypatch.delenv("REPLICAST_TOKEN")
    monkeypatch.setenv("REPLICAST_TOKEN_FILE", str(file))
    assert connect(address).push(slower()).id == "slower"
    monkeypatch.setenv("REPLICAST_TOKEN_FILE", "nowhere")
    with pytest.raises(RequestFailed, match="token file nowhere cannot be read"):
        connect(address)
    with pytest.raises(RequestFailed, match="cannot carry"):
        connect(address, token="two\nlines")


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (403, "does not allow this. no"),
        (413, "does not take so much at once. no"),
        (429, "too many requests. no. Try again in 7 s"),
        (421, "not known under this name. no"),
        (500, "has answered 500. no"),
        (302, "has answered 302"),
    ],
)
def test_what_the_server_does_not_accept_is_told(server: Served, status: int, said: str) -> None:
    run = connect(f"{server.address}/first", token=TOKEN)
    real = server.run

    class Refusing:
        def push(self, **_arguments: object) -> None:
            raise AnswerError(status, "no", **({"Retry_After": "7"} if status == 429 else {}))

    server.run = Refusing()  # type: ignore[assignment]
    with pytest.raises(RequestFailed) as caught:
        run.push(slower())
    server.run = real
    assert said in str(caught.value)
    assert caught.value.status == status


def test_an_upload_that_breaks_is_sent_again_and_lands_once(
    server: Served, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meanwhile(monkeypatch, lambda _secs: None)
    run, broken = connect(f"{server.address}/first", token=TOKEN), []

    def breaks(method: str, _path: str) -> None:
        if method == "POST" and len(broken) < 2:
            broken.append(method)
            raise ConnectionAbortedError

    server.before = breaks
    run.push(slower())
    assert ([one.id for one in inbox.waiting(directory)], len(broken)) == (["slower"], 2)


def test_an_upload_whose_answer_is_lost_is_a_no_op_when_it_is_sent_again(
    server: Served, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meanwhile(monkeypatch, lambda _secs: None)
    connect(directory).push(slower())
    assert connect(f"{server.address}/first", token=TOKEN).push(slower()).number is None
    assert [one.id for one in inbox.waiting(directory)] == ["slower"]


def test_an_action_is_never_asked_for_twice(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    meanwhile(monkeypatch, lambda _secs: None)
    run = connect(f"{server.address}/first", token=TOKEN)

    def breaks(method: str, _path: str) -> None:
        if method == "POST":
            raise ConnectionAbortedError

    server.before = breaks
    with pytest.raises(RequestFailed, match="cannot be reached"):
        run.audit(timeout=1)
    assert [path for method, path, _ in server.requests if method == "POST"] == ["/api/runs/first/audit"]


def test_a_server_that_is_restarted_is_asked_again(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    meanwhile(monkeypatch, lambda _secs: None)
    run, down = connect(f"{server.address}/first"), [True, True]

    def breaks(_method: str, _path: str) -> None:
        if down and down.pop():
            raise ConnectionAbortedError

    server.before = breaks
    assert run.brief().running
    assert not down


def test_a_large_update_is_sent_in_pieces_without_a_copy(server: Served, directory: Path) -> None:
    sent: list[int] = []
    real = socket.socket.sendall

    def noting(one: socket.socket, data: bytes, *flags: int) -> None:
        sent.append(memoryview(data).nbytes)
        return real(one, data, *flags)

    run = connect(f"{server.address}/first", token=TOKEN)
    large = Update(id="large").add("dense/kernel", np.ones((1024, 1024), np.float32))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(socket.socket, "sendall", noting)
        with pytest.raises(UpdateRefused, match="Wrong shape"):
            run.push(large)
    assert max(sent) <= 2**20
    assert server.requests[-1][2] > 4 * 2**20


def test_a_server_that_is_not_there_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = meanwhile(monkeypatch, lambda _secs: None)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}/first"  # bound, and nobody listens
        with pytest.raises(RequestFailed, match=r"cannot be reached \(Connection refused\)"):
            connect(address)
    assert not waited


def test_a_server_that_stays_away_is_told_after_a_while(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited, run = meanwhile(monkeypatch, lambda _secs: None), connect(f"{server.address}/first")
    server.before = lambda _method, _path: (_ for _ in ()).throw(ConnectionAbortedError)
    with pytest.raises(RequestFailed, match="cannot be reached"):
        run.status()
    assert sum(waited) == pytest.approx(10.0)


@pytest.mark.parametrize(
    "address",
    [
        "http://",
        "https:///first",
        "http://host:port/x",
        "http://host/x?token=1",
        "http://me:secret@host/first",
    ],
)
def test_an_address_that_cannot_be_used_is_told(address: str) -> None:
    with pytest.raises(RequestFailed, match=r"no address of a run|does not belong into an address"):
        connect(address)


def test_the_only_run_of_a_server_needs_no_name(server: Served) -> None:
    assert connect(server.address).where == f"{server.address}/first"
    with pytest.raises(NotFound, match="no run with this name"):
        connect(f"{server.address}/second")


def test_another_server_is_not_taken_for_one_of_ours(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    run = connect(f"{server.address}/first")
    monkeypatch.setattr("tests.unit.client.serving.answered", lambda *_arguments: {"hello": "world"})
    for ask in (run.status, run.brief, run.schema, run.log, run.metrics, run.checkpoints):
        with pytest.raises(RequestFailed, match="cannot be used"):
            ask()


def test_commands_take_the_address_of_a_run(
    server: Served, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPLICAST_TOKEN", TOKEN)
    address, delta = f"{server.address}/first", tensors("delta", dense__bias=BIAS)
    pushed = invoke("push", address, "--add", delta, "--id", "x", "--wait", "--timeout", 0)
    assert (pushed.exit_code, "pushed x" in pushed.output) == (3, True), pushed.output
    assert f"replicast withdraw {address} x" in pushed.output
    for words in (["status", address], ["show", address, "x"], ["log", address], ["audit", address]):
        result = invoke(*words)
        assert result.exit_code == 0, result.output
    assert invoke("inspect", delta, "--as", "add", "--run", address).exit_code == 0
    assert "withdrawn x" in invoke("withdraw", address, "x").output
    monkeypatch.setenv("REPLICAST_TOKEN", "wrong")
    refused = invoke("push", address, "--add", delta)
    assert (refused.exit_code, "asks for a token" in refused.output) == (1, True)


def test_a_client_loads_neither_tensorflow_nor_what_the_command_line_needs(directory: Path) -> None:
    code = (
        "import sys, replicast\n"
        "run = replicast.connect('run')\n"
        "run.push(replicast.Update().assign('learning_rate', 1)); run.status(); run.metrics(); run.log()\n"
        "found = [name for name in ('tensorflow', 'keras', 'click', 'rich') if name in sys.modules]\n"
        "assert not found, found"
    )
    with heard_of_always(directory):
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
