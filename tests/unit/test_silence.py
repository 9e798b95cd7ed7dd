"""Whether a process itself stood still: with a clock that is set by hand, and in this process."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import threading
import time

import pytest

from replicast.lifetime import Causes, Interruptions, on_silence


class Clocks:
    """The time, and how often the thread that looks has run."""

    def __init__(self) -> None:
        self.now = 100.0
        self.turns: int | None = 3

    def interruptions(self) -> Interruptions:
        clock = lambda: self.now  # noqa: E731
        interruptions = Interruptions(5.0, 30.0, clock, clock, lambda thread: self.turns)
        interruptions.look()
        return interruptions


def test_a_process_that_did_not_run_knows_for_how_long_and_forgets_it_later() -> None:
    clocks = Clocks()
    interruptions = clocks.interruptions()
    assert interruptions.pause_secs() is None
    clocks.now += 15.0
    assert interruptions.pause_secs() == 15.0
    clocks.now += 4.0
    assert interruptions.pause_secs() == 15.0, "a short delay is none"
    for _ in range(7):
        clocks.now += 4.0
        interruptions.look()
    assert interruptions.pause_secs() is None


def test_a_process_whose_thread_ran_but_had_no_turn_in_python_was_running() -> None:
    clocks = Clocks()
    interruptions = clocks.interruptions()
    clocks.now, clocks.turns = clocks.now + 15.0, 3 + 300
    assert interruptions.pause_secs() is None


def test_where_the_system_does_not_tell_nobody_is_said_to_have_stood_still() -> None:
    clocks = Clocks()
    clocks.turns = None
    interruptions = clocks.interruptions()
    clocks.now += 15.0
    assert interruptions.pause_secs() is None


def test_a_call_that_holds_python_s_lock_and_waits_is_no_pause() -> None:
    interruptions, stop, looked = Interruptions(0.5, 60.0), threading.Event(), threading.Event()

    def look() -> None:
        interruptions.look()
        looked.set()

    on_silence(time.monotonic_ns, 100.0, lambda: None, until=stop, look=look)
    looked.wait(120)
    ctypes.PyDLL(None).usleep(900_000)  # as a slow disk does to a library that keeps the lock
    looked.clear()
    looked.wait(120)
    assert interruptions.pause_secs() is None
    stop.set()


STOPPED = """
import threading, time
from replicast.lifetime import Interruptions, on_silence
interruptions, looked = Interruptions(0.5, 60.0), threading.Event()
def look():
    interruptions.look()
    looked.set()
on_silence(time.monotonic_ns, 100.0, lambda: None, until=threading.Event(), look=look)
looked.wait()
print("ready", flush=True)
input()
print(interruptions.pause_secs())
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


class SetClock:
    """A wall clock that a test sets, and one that nobody sets; `held_up` is a delay between both."""

    def __init__(self, recent_secs: float = 22.0) -> None:
        self.now, self.ahead, self.held_up = 100.0, 1.8e9, 0.0
        self.interruptions = Interruptions(
            5.0, 22.0, self.clock, lambda: self.now + self.ahead, lambda _: None
        )
        self.causes = Causes(0, 0, self.interruptions)
        self.interruptions.look()

    def clock(self) -> float:
        self.now += self.held_up
        return self.now


NO_HEARTBEATS = "worker 1 was lost: it sent no heartbeats. It has crashed"
TOLD = "These tasks are unhealthy (stopped sending heartbeats):\n/job:worker/replica:0/task:{}"


@pytest.mark.parametrize(
    ("secs", "said"),
    [(10_800.0, "set forward by 10800 s"), (6.0, "forward by 6 s"), (-1.0, "set back by 1 s")],
)
def test_a_clock_that_was_set_is_named_as_the_cause_of_missed_heartbeats(secs: float, said: str) -> None:
    here = SetClock()
    assert said not in str(here.causes.noticed(NO_HEARTBEATS, 1)), "before the clock is set"
    here.now, here.ahead = here.now + 0.2, here.ahead + secs
    noticed = here.causes.noticed(NO_HEARTBEATS, 1)
    assert noticed.worker == 1
    assert str(noticed).startswith("worker 1 was taken for lost because the clock of worker 0's host was set")
    assert said in str(noticed)
    raised = type("UnavailableError", (Exception,), {"__module__": "tensorflow.python.framework"})
    for worker in (0, 1):  # TensorFlow may take this worker for lost, too.
        assert said in str(here.causes.of(raised(TOLD.format(worker))))
    assert said not in str(here.causes.noticed("worker 1 was lost: its connection broke", 1))
    for _ in range(8):
        here.now += 3.0
        here.interruptions.look()
    assert said not in str(here.causes.noticed(NO_HEARTBEATS, 1)), "it explains nothing that comes later"


def test_a_clock_that_is_adjusted_or_read_late_was_not_set() -> None:
    here = SetClock(recent_secs=1000.0)
    for _ in range(1000):
        here.now, here.ahead = here.now + 0.2, here.ahead - 0.0002
        here.interruptions.look()
    here.held_up = 30.0
    here.interruptions.look()
    here.held_up = 0.0
    here.ahead += 3.0
    assert here.interruptions.jump_secs() is None, "a short way forward loses nobody"
