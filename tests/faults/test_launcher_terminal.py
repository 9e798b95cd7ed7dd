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

from replicast.cli.checks import Verdict
from replicast.cli.doctor import check_two_workers

DEADLINE_SECS = 60.0

SCRIPT = """
import os, sys
rank = os.environ["RANK"]
print("terminal:", sys.stdout.isatty(), os.get_terminal_size().columns if sys.stdout.isatty() else None)
for percent in (10, 50, 100):
    print("\\b" * 100 + f"\\r{percent:3}% of a bar that is far wider than the terminal " + "=" * 60, end="")
print()
"""


def on_a_terminal(command: list[str], directory: Path, columns: int) -> str:
    """Runs a command with its output on a pseudo-terminal and returns every character it wrote."""
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
        else:
            process.kill()
    os.close(ours)
    assert process.returncode == 0, written.decode()
    return written.decode()


def test_on_a_terminal_one_bar_moves_and_whole_lines_stand_above_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "replicast.cli", "run", "-n", "2", "--tee", "all", "train.py"]
    written = on_a_terminal(command, tmp_path, columns=60)
    name = "\x1b[36m[worker 0] \x1b[0m"
    assert f"{name}terminal: True 49\r\n" in written
    assert "[worker 1] \x1b[0mterminal: False None\r\n" in written
    assert written.count("100% of a bar that is far wider than the terminal " + "=" * 60 + "\r\n") == 2
    for drawn in written.replace("\r\n", "\r").split("\r"):
        if "10% of a bar" in drawn:
            assert len(drawn.replace("\x1b[K", "").replace(name, "[worker 0] ")) < 60


def test_two_real_workers_reduce_over_ports_that_the_launcher_holds() -> None:
    check = check_two_workers(deadline_secs=DEADLINE_SECS)
    assert check.verdict is Verdict.GOOD, check
