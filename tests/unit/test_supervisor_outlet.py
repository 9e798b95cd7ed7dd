"""Writing to a terminal that is not read for a while: no caller blocks, and dropped lines are counted."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator

import pytest

from replicast.launcher.outlet import Outlet
from replicast.launcher.screen import Screen

FILLER = b"."


class StalledPipe:
    """A pipe that is full from the start; a thread reads all of it once somebody asks for that."""

    def __init__(self) -> None:
        self.reading, writing = os.pipe()
        self.stream = os.fdopen(writing, "w")
        os.set_blocking(writing, False)
        try:
            while True:
                os.write(writing, FILLER * 4096)
        except BlockingIOError:
            os.set_blocking(writing, True)
        self._read = b""
        self._reader = threading.Thread(target=self._read_all)

    def wake_up(self) -> None:
        self._reader.start()

    def read(self) -> str:
        """All that was ever written, once the last writer has left."""
        self.stream.close()
        self._reader.join()
        return self._read.lstrip(FILLER).decode()

    def _read_all(self) -> None:
        while data := os.read(self.reading, 65536):
            self._read += data


@pytest.fixture
def pipe() -> Iterator[StalledPipe]:
    pipe = StalledPipe()
    yield pipe
    if not pipe.stream.closed:
        pipe.stream.close()
    os.close(pipe.reading)


def test_a_stalled_reader_gets_everything_later_in_order(pipe: StalledPipe) -> None:
    outlet = Outlet(pipe.stream)
    for number in range(1000):
        outlet.put([f"line {number}"])
    assert os.get_blocking(pipe.stream.fileno()), "others may share the pipe"
    pipe.wake_up()
    outlet.close()
    assert pipe.read().splitlines() == [f"line {number}" for number in range(1000)]


def test_lines_beyond_the_capacity_are_omitted_and_counted(pipe: StalledPipe) -> None:
    outlet = Outlet(pipe.stream, capacity=100)
    for number in range(1000):
        outlet.put([f"line {number}"])
    outlet.put(["the launcher's own word"], must_appear=True)
    outlet.put(["the end"], must_appear=True)
    pipe.wake_up()
    outlet.close()
    *shown, own, end = pipe.read().splitlines()
    assert (own, end) == ("the launcher's own word", "the end")
    left_out = [line for line in shown if line.startswith("…")]
    assert 1 <= len(left_out) <= 2, "one more when the writing began only after there was no room any more"
    following = 0
    for line in shown:
        if line in left_out:
            following += int(re.findall(r"… (\d+) lines? (?:is|are) only in the log", line)[0])
        else:
            assert line == f"line {following}"
            following += 1
    assert following == 1000


def test_only_the_newest_state_of_a_bar_is_drawn(pipe: StalledPipe) -> None:
    outlet = Outlet(pipe.stream)
    for percent in range(1, 101):
        outlet.put([], f"{percent}%")
    pipe.wake_up()
    outlet.close()
    drawn = re.split(r"\r\x1b\[K", pipe.read())
    assert drawn[-1] == "100%"
    assert len(drawn) <= 2, "one may have been on its way already"


def test_closing_gives_up_on_a_reader_that_takes_nothing(pipe: StalledPipe) -> None:
    outlet = Outlet(pipe.stream)
    outlet.put(["nobody reads this"])
    outlet.close(stalled_secs=0.01)
    outlet.put(["nor this"])
    pipe.wake_up()
    outlet.close()
    assert pipe.read() == "nobody reads this\n"


def test_a_non_blocking_file_gets_everything(pipe: StalledPipe) -> None:
    os.set_blocking(pipe.stream.fileno(), False)
    outlet = Outlet(pipe.stream)
    outlet.put(["first", "second"])
    pipe.wake_up()
    outlet.close()
    assert pipe.read() == "first\nsecond\n"


def test_messages_appear_even_if_the_workers_lines_are_not_read(pipe: StalledPipe) -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading) as read, os.fdopen(writing, "w") as messages:
        screen = Screen(pipe.stream, messages, live_rank=None, colour=False)
        screen.show(0, ["waits"])
        screen.tell("replicast: stopped by SIGTERM")
        assert read.readline() == "replicast: stopped by SIGTERM\n"
        pipe.wake_up()
        screen.close()
    assert pipe.read() == "[worker 0] waits\n"


def test_messages_and_lines_for_the_same_file_stay_in_order(pipe: StalledPipe) -> None:
    with os.fdopen(os.dup(pipe.stream.fileno()), "w") as messages:
        screen = Screen(pipe.stream, messages, live_rank=None, colour=False)
        screen.show(0, ["before"])
        screen.tell("replicast: a message")
        screen.show(0, ["after"])
        pipe.wake_up()
        screen.close()
    assert pipe.read() == "[worker 0] before\nreplicast: a message\n[worker 0] after\n"
