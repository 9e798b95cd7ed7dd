"""A served run when something is wrong: tokens, limits, broken connections, other servers."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replicast.client import connect
from replicast.client.directory import DirectoryRun
from replicast.errors import NotFound, RequestFailed, RequestRefused, UpdateRefused
from replicast.page.web_server import HttpError
from replicast.storage import inbox
from replicast.update.update import Update
from tests.page.live import TOKEN, served_run
from tests.page.prompt_run import PromptRun
from tests.unit.played_job import BIAS, heard_of_always, invoke, meanwhile, tensors

pytestmark = pytest.mark.usefixtures("wall_clock_stands_still")


@pytest.fixture
def address(directory: Path) -> Iterator[str]:
    with served_run(connect(directory)) as served:
        yield served


class Broken:
    """Connections that break after the request was sent, so many times; counts the requests by method."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
        self.sent: list[str] = []
        self.left = times
        ask, answer = HTTPConnection.request, HTTPConnection.getresponse

        def request(connection: HTTPConnection, method: str, *arguments: Any) -> None:
            self.sent.append(method)
            ask(connection, method, *arguments)

        def getresponse(connection: HTTPConnection) -> HTTPResponse:
            found = answer(connection)
            self.left -= 1
            if self.left >= 0:
                raise ConnectionAbortedError
            return found

        monkeypatch.setattr(HTTPConnection, "request", request)
        monkeypatch.setattr(HTTPConnection, "getresponse", getresponse)


def slower() -> Update:
    return Update(id="slower").assign("learning_rate", 0.5)


def test_reading_needs_no_token_and_acting_does(address: str, directory: Path) -> None:
    run = connect(address)
    assert run.status().running
    with pytest.raises(RequestFailed, match="REPLICAST_TOKEN") as caught:
        run.push(slower())
    assert caught.value.status == 401
    assert inbox.waiting(directory) == []


def test_the_token_comes_from_the_argument_a_file_or_the_environment(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = Path("token")
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
        (403, "Not allowed. no"),
        (413, "The request is too large. no"),
        (429, "Too many requests. no. Try again in 7 s"),
        (421, "does not accept this host name. no"),
        (500, "answered 500. no"),
        (302, "answered 302"),
    ],
)
def test_what_the_server_does_not_accept_is_told(
    address: str, monkeypatch: pytest.MonkeyPatch, status: int, said: str
) -> None:
    def refuse(*_arguments: object) -> None:
        raise HttpError(status, "no", headers={"Retry-After": "7"} if status == 429 else None)

    monkeypatch.setattr(DirectoryRun, "push", refuse)
    with pytest.raises(RequestFailed) as caught:
        connect(address, token=TOKEN).push(slower())
    assert said in str(caught.value)
    assert caught.value.status == status


def test_an_upload_that_breaks_is_sent_again_and_lands_once(
    address: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meanwhile(monkeypatch, lambda _secs: None)
    run, broken = connect(address, token=TOKEN), Broken(monkeypatch, 2)
    assert run.push(slower()).number is None
    assert ([one.id for one in inbox.waiting(directory)], broken.sent) == (["slower"], ["POST"] * 3)


def test_an_action_is_never_asked_for_twice(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    meanwhile(monkeypatch, lambda _secs: None)
    run, broken = connect(address, token=TOKEN), Broken(monkeypatch, 1)
    with pytest.raises(RequestFailed, match="cannot be reached"):
        run.audit(timeout=1)
    assert broken.sent == ["POST"]


def test_a_server_that_is_restarted_is_asked_again(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    meanwhile(monkeypatch, lambda _secs: None)
    run, broken = connect(address), Broken(monkeypatch, 2)
    assert run.brief().running
    assert broken.sent == ["GET"] * 3


def test_a_large_update_is_sent_in_pieces_without_a_copy(address: str) -> None:
    sent: list[int] = []
    real = socket.socket.sendall

    def noting(one: socket.socket, data: bytes, *flags: int) -> None:
        sent.append(memoryview(data).nbytes)
        return real(one, data, *flags)

    run = connect(address, token=TOKEN)
    large = Update(id="large").add("dense/kernel", np.ones((1024, 1024), np.float32))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(socket.socket, "sendall", noting)
        with pytest.raises(UpdateRefused, match="Wrong shape"):
            run.push(large)
    assert max(sent) <= 2**20
    assert sum(sent) > 4 * 2**20


def test_values_come_as_they_are_and_too_many_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served_run(PromptRun(tmp_path / "first")) as address:
        run = connect(address, token=TOKEN)
        pulled = run.pull("dense/kernel")
        assert (pulled.array.dtype, pulled.array.shape, pulled.source) == (np.float32, (4, 3), "job")
        with pytest.raises(RequestRefused, match="at most 47 bytes"):
            run.pull("dense/kernel", max_bytes=47)
        monkeypatch.setattr("replicast.page.app.MAX_VALUES_BYTES", 47)
        with pytest.raises(RequestRefused, match="too many values of model/dense/kernel"):
            run.pull("dense/kernel")
        assert run.pull("dense/kernel", [0]).array.shape == (1, 3)


def test_a_checkpoint_and_a_stop_come_with_their_step(tmp_path: Path) -> None:
    with served_run(PromptRun(tmp_path / "first")) as address:
        run = connect(address, token=TOKEN)
        assert (run.checkpoint(5), run.stop(5)) == (100, 100)


def test_a_server_that_is_not_there_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = meanwhile(monkeypatch, lambda _secs: None)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}/first"  # bound, and nobody listens
        with pytest.raises(RequestFailed, match=r"cannot be reached \(Connection refused\)"):
            connect(address)
    assert not waited


def test_a_server_that_stays_away_is_told_after_a_while(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited, run = meanwhile(monkeypatch, lambda _secs: None), connect(address)
    Broken(monkeypatch, 1000)
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
    with pytest.raises(RequestFailed, match=r"Expected the address of a run|Do not put a token"):
        connect(address)


def test_the_only_run_of_a_server_needs_no_name(address: str) -> None:
    assert connect(address.removesuffix("/first")).where == address
    with pytest.raises(NotFound, match="no run with this name"):
        connect(f"{address}-second")


def test_another_server_is_not_taken_for_one_of_ours(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = connect(address)
    monkeypatch.setattr(HTTPResponse, "read", lambda *_arguments: b'{"hello": "world"}')
    for ask in (run.status, run.brief, run.schema, run.log, run.metrics, run.checkpoints):
        with pytest.raises(RequestFailed, match="cannot be used"):
            ask()


def test_commands_take_the_address_of_a_run(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPLICAST_TOKEN", TOKEN)
    delta = tensors("delta", dense__bias=BIAS)
    pushed = invoke("push", address, "--add", delta, "--id", "x", "--wait", "--timeout", 0)
    assert (pushed.exit_code, "pushed x" in pushed.output) == (3, True), pushed.output
    assert f"replicast withdraw {address} x" in pushed.output
    for words in (
        ["status", address],
        ["show", address, "x"],
        ["log", address],
        ["audit", address],
        ["inspect", address],
    ):
        result = invoke(*words)
        assert result.exit_code == 0, result.output
    assert "withdrawn x" in invoke("withdraw", address, "x").output
    monkeypatch.setenv("REPLICAST_TOKEN", "wrong")
    refused = invoke("push", address, "--add", delta)
    told = f"Error: {address} does not accept this token: set REPLICAST_TOKEN, or name a file with it in "
    assert (refused.exit_code, refused.output) == (1, f"{told}REPLICAST_TOKEN_FILE\n")


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
