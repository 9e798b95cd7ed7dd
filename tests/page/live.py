"""The page on a real port of this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from replicast.client import Run
from replicast.page.app import App
from replicast.page.live import RunWatch
from replicast.page.web_server import PageServer, PageSettings, configured, listen
from tests.threads import eventually

TOKEN = "0123456789abcdef-the-token"


@contextlib.contextmanager
def served(run: Run, **settings: Any) -> Iterator[str]:
    """Serves one run as `first` in a thread of this process; gives the address of the server."""
    chosen = PageSettings(port=0, **settings)
    app = App(lambda: {"first": run}, chosen)
    with listen(chosen) as listener:
        server = PageServer(configured(app, chosen), app.stop)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            eventually(lambda: server.started)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(120)


@contextlib.contextmanager
def served_run(run: Run) -> Iterator[str]:
    """Serves one run, and keeps nothing that was read; gives its address."""

    async def fresh(watch: RunWatch, _key: object, act: Callable[[], Any], _max_age: float = 0.0) -> Any:
        return await watch._threads.call(act)

    with pytest.MonkeyPatch.context() as patched, served(run, token=TOKEN) as address:
        patched.setattr(RunWatch, "read", fresh)
        yield f"{address}/first"


class Serving:
    """`replicast serve` as a process, which can be killed and started again at the same port."""

    def __init__(self, path: Path, *options: str) -> None:
        self.path = path
        self._options = options
        self._port = "0"
        self._process: subprocess.Popen[str] | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        command = [sys.executable, "-m", "replicast", "serve", str(self.path), "--port", self._port]
        self._process = subprocess.Popen([*command, *self._options], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line.startswith("Serving "), line
        self._port = line.rpartition(":")[2].strip().rstrip("/")

    def kill(self, signum: signal.Signals = signal.SIGKILL) -> int:
        """Ends it; gives its exit code."""
        assert self._process is not None
        os.kill(self._process.pid, signum)
        code = self._process.wait(120)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._process = None
        return code

    def __enter__(self) -> Serving:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self.kill()
