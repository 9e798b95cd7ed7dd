"""`replicast run` as seen on a terminal, and with real TensorFlow workers."""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

from replicast.launcher.screen import without_colours

DEADLINE_SECS = 240.0

SCRIPT = """
import os, sys
rank = os.environ["RANK"]
print("terminal:", sys.stdout.isatty(), os.get_terminal_size().columns if sys.stdout.isatty() else None)
for percent in (10, 50, 100):
    print("\\b" * 100 + f"\\r{percent:3}% of a bar that is far wider than the terminal " + "=" * 60, end="")
print()
"""


def on_a_terminal(command: list[str], directory: Path, columns: int, awaited: str | None = None) -> str:
    """Runs a command with its output on a pseudo-terminal and returns every character it wrote.

    Once it has written what is awaited, there is a file `seen` in the directory.
    """
    ours, theirs = os.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environ = {name: value for name, value in os.environ.items() if name not in ("TF_CONFIG", "NO_COLOR")}
    written = b""
    with subprocess.Popen(
        command, cwd=directory, env={**environ, "TERM": "xterm"}, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        end = time.monotonic() + DEADLINE_SECS
        while select.select([ours], [], [], max(0.0, end - time.monotonic()))[0]:
            try:
                written += os.read(ours, 65536)
            except OSError:  # The last writer left.
                break
            if awaited is not None and awaited in written.decode(errors="replace"):
                (directory / "seen").touch()
        else:
            process.kill()
    os.close(ours)
    assert process.returncode == 0, written.decode()
    return written.decode()


def test_on_a_terminal_one_bar_moves_and_whole_lines_stand_above_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "replicast", "run", "-n", "2", "--tee", "all", "train.py"]
    written = on_a_terminal(command, tmp_path, columns=60)
    name = "\x1b[36m[worker 0] \x1b[0m"
    assert f"{name}terminal: True 49\r\n" in written
    assert "[worker 1] \x1b[0mterminal: False None\r\n" in written
    assert written.count("100% of a bar that is far wider than the terminal " + "=" * 60 + "\r\n") == 2
    for drawn in written.replace("\r\n", "\r").split("\r"):
        if "10% of a bar" in drawn:
            assert len(drawn.replace("\x1b[K", "").replace(name, "[worker 0] ")) < 60


BAR_AND_LOG = """
import pathlib, sys, time
bar = ""
for batch in range(1, 101):
    old = bar
    bar = f"{batch:3}/100 {'━' * 20} 0s 8ms/step - accuracy: 0.1958 - loss: {1 / batch:.4f}"
    print("\\b" * len(old) + "\\r" + bar, end="", flush=True)
    if batch % 10 == 0:
        print(f"log line at {batch}", file=sys.stderr, flush=True)
    while batch == 50 and not pathlib.Path("seen").exists():
        time.sleep(0.01)
print("I0000 00:00:1794906723.829959    6554 coordination_service.cc:221] Initializing", file=sys.stderr)
print("\\b" * len(bar) + "\\r" + bar + " - val_accuracy: 0.2000 - val_loss: 0.1000")
"""


def test_at_80_columns_the_bar_shows_the_loss_below_the_log_lines_that_come_meanwhile(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BAR_AND_LOG)
    command = [sys.executable, "-m", "replicast", "run", "-n", "1", "--run-dir", "run", "train.py"]
    below = "log line at 50\r\n\x1b[36m[worker 0] \x1b[0m 50/100 "
    bar = "━━━━━━━━━━━━━━ 0s 8ms/step - accuracy: 0.1958 - loss: 0.0200"
    written = on_a_terminal(command, tmp_path, columns=80, awaited=below + bar)
    lines = [without_colours(line).rpartition("\r")[2] for line in written.split("\r\n")]
    logged = [line for line in lines if "log line" in line]
    assert logged == [f"[worker 0] log line at {batch}" for batch in range(10, 101, 10)]
    finished, last, end = lines[-3:]
    assert finished == (
        "[worker 0] 100/100 ━━━━━ 0s 8ms/step - accuracy: 0.1958 - loss: 0.0100 - val_accuracy: 0.2000 - "
        "val_loss: 0.1000"
    )
    assert last.startswith("replicast: finished: 1 worker, ")
    assert end == ""
