"""Whether a process itself was paused: with a clock that is set by hand, and in this process."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import threading
import time

from replicast.lifetime import Pauses


class Clocks:
    """The time, and how often the thread that looks has run."""

    def __init__(self) -> None:
        self.now = 100.0
        self.turns: int | None = 3

    def pauses(self) -> Pauses:
        clock = lambda: self.now  # noqa: E731
        pauses = Pauses(5.0, 30.0, clock, lambda thread: self.turns)
        pauses.look()
        return pauses


def test_a_process_that_did_not_run_knows_for_how_long_and_forgets_it_later() -> None:
    clocks = Clocks()
    pauses = clocks.pauses()
    assert pauses.pause_secs() is None
    clocks.now += 15.0
    assert pauses.pause_secs() == 15.0
    clocks.now += 4.0
    assert pauses.pause_secs() == 15.0, "a short delay is none"
    for _ in range(7):
        clocks.now += 4.0
        pauses.look()
    assert pauses.pause_secs() is None


def test_a_process_whose_thread_ran_but_had_no_turn_in_python_was_running() -> None:
    clocks = Clocks()
    pauses = clocks.pauses()
    clocks.now, clocks.turns = clocks.now + 15.0, 3 + 300
    assert pauses.pause_secs() is None


def test_where_the_system_does_not_tell_no_pause_is_reported() -> None:
    clocks = Clocks()
    clocks.turns = None
    pauses = clocks.pauses()
    clocks.now += 15.0
    assert pauses.pause_secs() is None


def test_a_call_that_holds_python_s_lock_and_waits_is_no_pause() -> None:
    pauses, stop, looked = Pauses(0.5, 60.0), threading.Event(), threading.Event()

    def look() -> None:
        while not stop.wait(0.2):
            pauses.look()
            looked.set()

    threading.Thread(target=look, daemon=True).start()
    looked.wait(120)
    ctypes.PyDLL(None).usleep(900_000)  # as a slow disk does to a library that keeps the lock
    looked.clear()
    looked.wait(120)
    assert pauses.pause_secs() is None
    stop.set()


STOPPED = """
import threading, time
from replicast.lifetime import Pauses
pauses, looked = Pauses(0.5, 60.0), threading.Event()
def look():
    while True:
        pauses.look()
        looked.set()
        time.sleep(0.2)
threading.Thread(target=look, daemon=True).start()
looked.wait()
print("ready", flush=True)
input()
print(pauses.pause_secs())
"""


def test_a_process_that_was_stopped_knows_it() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.0)
        process.send_signal(signal.SIGCONT)
        process.stdin.write("\n")
        process.stdin.flush()
        assert float(process.stdout.readline()) >= 0.8
