"""What users see while workers run: whole lines, one bar, no chatter, whoever reads or does not."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from replicast.files import RunPath, below
from replicast.launcher.screen import (
    LineAssembler,
    Outlet,
    Output,
    Screen,
    as_shown,
    cropped,
    make_screen,
    split_bar,
    with_its_loss,
    with_shorter_bar,
    without_colours,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


BAR = "\x1b[1m 1/10\x1b[0m \x1b[32m━━\x1b[0m"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("plain", "plain"),
        ("ends as on Windows\r", "ends as on Windows"),
        ("10%\r50%\r100%", "100%"),
        ("10%\r50%\r", "50%"),
        ("old bar\b\b\b\b\b\b\b\rnew bar", "new bar"),
        ("old bar\b\b\b\b\b\b\b", "old bar"),
        ("|\b/\b-\b\\", "\\"),
        ("\b\bstart", "start"),
        ("\x1b[31mred\x1b[0m", "\x1b[31mred\x1b[0m"),
        ("\x1b[2K\x1b[1Aup\x1b[?25l", "up"),
        ("\x1b]0;title\x07text", "text"),
        ("cut \x1b[3", "cut "),
        ("bell\x07 tab\tend\x00", "bell tab\tend"),
    ],
)
def test_a_line_is_its_final_state_on_a_terminal(line: str, expected: str) -> None:
    assert as_shown(line) == expected


def fed(assembler: LineAssembler, data: bytes, size: int) -> list[str]:
    """The lines of some bytes that come in pieces."""
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    return [line for piece in pieces for line in assembler.feed(piece)]


def test_lines_are_assembled_from_any_pieces() -> None:
    whole = f"first\nö {BAR}\r{BAR}\b\b\n\nlast".encode()
    expected = ["first", BAR, ""]
    for size in (1, 2, 3, 7, len(whole)):
        assembler = LineAssembler()
        assert fed(assembler, whole, size) == expected
        assert assembler.partial == "last"
        assert assembler.finish() == ["last"]


def test_bytes_that_are_not_utf8_are_replaced() -> None:
    assembler = LineAssembler()
    assert assembler.feed(b"bad \xff\xfe\nhalf \xc3") == ["bad ��"]
    assert assembler.finish() == ["half �"]


def test_a_line_without_an_end_does_not_fill_memory() -> None:
    assembler = LineAssembler()
    for _ in range(20):
        assembler.feed(b"x" * 10_000)
    assert len(assembler.partial) <= 65536


@pytest.mark.parametrize(
    ("line", "columns", "expected"),
    [
        ("abcdef", 3, "abc"),
        ("abc", 3, "abc"),
        ("\x1b[31mabc\x1b[0md", 3, "\x1b[31mabc\x1b[0m\x1b[0m"),
        ("a\tb", 4, "a   "),
    ],
)
def test_a_live_line_is_cropped_without_counting_colours(line: str, columns: int, expected: str) -> None:
    assert cropped(line, columns) == expected
    assert len(without_colours(cropped(line, columns))) <= columns


def plain_screen() -> tuple[Screen, io.StringIO]:
    out = io.StringIO()
    return Screen(out, out, live_rank=None, colour=False), out


def test_without_a_terminal_only_complete_plain_lines_appear() -> None:
    screen, out = plain_screen()
    screen.show(0, [], "half")
    screen.show(1, ["\x1b[31mred\x1b[0m", "two"], "")
    screen.show(0, ["half and half"], "")
    assert out.getvalue() == "[worker 1] red\n[worker 1] two\n[worker 0] half and half\n"


def test_a_bar_is_redrawn_below_the_lines_of_other_workers() -> None:
    out = Terminal()
    screen = Screen(out, out, live_rank=0, colour=False)
    screen.show(0, [], "10%")
    screen.show(0, [], "10%")  # It has not changed, and is not drawn again.
    screen.show(1, ["hello"])
    screen.show(0, [], "20%")
    screen.tell("replicast: message")
    screen.show(0, ["100%"])
    assert out.getvalue() == (
        "[worker 0] 10%"
        "\r\x1b[K[worker 1] hello\n[worker 0] 10%"
        "\r\x1b[K[worker 0] 20%"
        "\r\x1b[Kreplicast: message\n[worker 0] 20%"
        "\r\x1b[K[worker 0] 100%\n"
    )


@pytest.mark.parametrize(
    ("environ", "coloured"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False),
        ({"TERM": "xterm", "NO_COLOR": ""}, True),
        ({"TERM": "dumb"}, False),
        ({}, False),
    ],
)
def test_colours_only_where_they_are_wanted(environ: dict[str, str], coloured: bool) -> None:
    out = Terminal()
    make_screen(out, out, tee=frozenset({0}), environ=environ).show(0, ["\x1b[31mred\x1b[0m"])
    assert ("\x1b[36m[worker 0] \x1b[0m\x1b[31mred" in out.getvalue()) == coloured
    assert ("[worker 0] red\n" in out.getvalue()) != coloured


def test_a_reader_that_leaves_does_not_stop_the_job(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as out:
        screen = Screen(out, out, live_rank=None, colour=False)
        screen.show(0, ["nobody reads this"])
        screen.show(0, ["nor this"])
        screen.close()


def test_text_that_the_stream_cannot_encode_is_replaced() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii", newline="")
    Screen(out, out, live_rank=None, colour=False).show(0, ["ö"])
    assert raw.getvalue() == b"[worker 0] ?\n"


def test_the_log_holds_every_byte_and_the_tail_what_was_shown(tmp_path: Path) -> None:
    screen, out = plain_screen()
    output = Output(3, below(tmp_path) / "log", screen=screen, columns=None)
    os.write(output.writing_end, b"1%\r2%\r3%\n\xff\nend")
    output.close()
    assert (tmp_path / "log").read_bytes() == b"1%\r2%\r3%\n\xff\nend"
    assert list(output.tail) == ["3%", "�", "end"]
    assert out.getvalue() == "[worker 3] 3%\n[worker 3] �\n[worker 3] end\n"


def test_a_worker_on_a_terminal_knows_its_width_and_newlines_are_unchanged(tmp_path: Path) -> None:
    output = Output(0, below(tmp_path) / "log", screen=None, columns=57)
    assert os.isatty(output.writing_end)
    assert os.get_terminal_size(output.writing_end).columns == 57
    output.resize(91)
    assert os.get_terminal_size(output.writing_end).columns == 91
    os.write(output.writing_end, b"a\nb\n")
    output.close()
    assert (tmp_path / "log").read_bytes() == b"a\nb\n"


def test_a_full_disk_does_not_stop_the_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    with monkeypatch.context() as patching:
        patching.setattr(RunPath, "open", lambda _path, _flags: full)
        output = Output(0, below(tmp_path) / "log", screen=None, columns=None)
    os.write(output.writing_end, b"still here\n")
    output.close()
    assert list(output.tail) == ["still here"]


def test_a_child_that_outlives_a_worker_and_writes_forever_does_not_block_the_launcher(
    tmp_path: Path,
) -> None:
    output = Output(0, below(tmp_path) / "log", screen=None, columns=None)
    os.close(output.reading_end)
    output.reading_end = os.open("/dev/zero", os.O_RDONLY)
    output.close()
    assert (tmp_path / "log").stat().st_size >= 1024 * 1024, "a worker's own output is smaller than that"


@pytest.mark.parametrize("columns", [None, 80])
def test_everything_that_a_worker_wrote_before_it_exited_is_read(tmp_path: Path, columns: int | None) -> None:
    output = Output(0, below(tmp_path) / "log", screen=None, columns=columns)
    os.set_blocking(output.writing_end, False)
    written = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            written += os.write(output.writing_end, b"x" * 999 + b"\n")
    output.close()
    assert (tmp_path / "log").stat().st_size == written


def test_a_log_is_closed_when_there_is_no_descriptor_left_for_a_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_pipe() -> tuple[int, int]:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pipe", no_pipe)
    with pytest.raises(OSError, match="Too many open files"):  # And no warning of a file that nobody closed.
        Output(0, below(tmp_path) / "log", screen=None, columns=None)


# --- The progress bar

ROOM = 80 - len("[worker 0] ") - 1


def drawn(count: int, metrics: str, *, of: int = 938, cells: int = 20, time: str = "12s") -> str:
    """What Keras writes for a bar."""
    done = cells * count // of
    parts = [f"\x1b[32m{'━' * done}\x1b[0m"] if done else []
    bar = "".join([*parts, f"\x1b[37m{'━' * (cells - done)}\x1b[0m"])
    return f"\x1b[1m{count:3}/{of}\x1b[0m {bar} \x1b[1m{time}\x1b[0m 123ms/step{metrics}"


SHORT = " - accuracy: 0.1958 - loss: 2.3025"
LONG = " - f1_score: 0.1000 - loss: 2.3025 - sparse_categorical_accuracy: 0.1958 - top_5: 0.9000"
BEHIND = [
    "WARNING:replicast:audit 2 at step 201",
    "W0000 00:00:1794906723.829959    6554 local_rendezvous.cc:412] Local rendezvous",
    "2026-11-17 09:11:53.890587: I tensorflow/core/util/port.cc:153] oneDNN",
    "Traceback (most recent call last):",
    "12 is a number of mine",
]


def test_a_bar_of_80_columns_shows_the_loss_and_all_metrics_if_there_is_room() -> None:
    shown = without_colours(with_its_loss(drawn(469, SHORT), ROOM))
    assert shown == "469/938 ━━━━━━━━━━━ 12s 123ms/step - accuracy: 0.1958 - loss: 2.3025"
    assert len(shown) == ROOM
    shown = without_colours(with_its_loss(drawn(469, LONG), ROOM))
    assert shown == "469/938 ━━━━━ 12s 123ms/step - loss: 2.3025 - …"


def test_a_shorter_bar_keeps_the_part_that_is_done() -> None:
    for count in (0, 200, 469, 900, 938):
        short = with_shorter_bar(drawn(count, SHORT, cells=20), 20)
        assert without_colours(short).count("━") == 5
        assert short.partition("\x1b[37m")[0].count("━") == (20 * count // 938) // 4


def test_a_line_with_room_and_a_line_without_a_bar_stay_as_they_are() -> None:
    for line in (drawn(1, SHORT), "=" * 100, "a - b: 1 - loss: 2 " * 9):
        assert with_shorter_bar(line, 200) == line
    assert with_its_loss("a - b: 1 - loss: 2 " * 9, 80) == ("a - b: 1 - loss: 2 " * 9).rstrip()
    assert with_shorter_bar("=" * 100, 80) == "=" * 100


@pytest.mark.parametrize("text", BEHIND)
@pytest.mark.parametrize("metrics", ["", SHORT, " - loss: 9.1234e-05", " - loss: nan", " - a b: -inf"])
@pytest.mark.parametrize("padding", ["", "   "])
def test_text_written_after_a_bar_is_split_from_the_bar(text: str, metrics: str, padding: str) -> None:
    bar = drawn(37, metrics)
    endless = f"{37:7}/Unknown \x1b[1m1:02\x1b[0m 8ms/step{metrics}"
    for drawing in (bar, endless):
        assert split_bar(drawing + padding + text) == (drawing, text)
        assert split_bar(drawing + padding) is None


def test_text_that_only_looks_like_a_bar_is_not_split() -> None:
    for line in ("3/4 of it done", "━━━━ heading ━━━━", "1/2 ━━ of something"):
        assert split_bar(line) is None


def keras_draws(bar: str, before: str = "") -> bytes:
    return ("\b" * len(without_colours(before)) + "\r" + bar).encode()


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_log_lines_appear_above_the_bar_and_the_bar_continues(size: int) -> None:
    first, second, last = drawn(37, SHORT), drawn(38, SHORT), drawn(938, SHORT)
    written = (
        b"Epoch 1/2\n"
        + keras_draws(first)
        + f"{BEHIND[0]}\n  more of it\n".encode()
        + keras_draws(second, first)
        + f"{BEHIND[1]}\n".encode()
    )
    assembler = LineAssembler()
    assert fed(assembler, written, size) == ["Epoch 1/2", BEHIND[0], "  more of it", BEHIND[1]]
    assert assembler.partial == second
    assert assembler.feed(keras_draws(last, second) + b"\n") == [last]
    assert assembler.partial == ""


def test_while_a_log_line_is_written_the_bar_stays_whole() -> None:
    assembler = LineAssembler()
    bar = drawn(37, SHORT)
    assembler.feed(keras_draws(bar))
    assembler.feed(b"WARNI")
    assert assembler.partial == bar
    assert assembler.feed(b"NG\nhalf of the next") == ["WARNING"]
    assert assembler.partial == bar


def test_a_worker_that_exits_at_a_bar_leaves_the_bar_and_its_last_text_as_lines() -> None:
    assembler = LineAssembler()
    bar = drawn(37, SHORT)
    assembler.feed(keras_draws(bar) + b"killed")
    assert assembler.finish() == [bar, "killed"]


def test_a_finished_bar_is_shown_whole_with_a_shorter_bar_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for live_rank, bar in (
        (0, f"938/938 ━━━━━ 12s 123ms/step{LONG}"),
        (None, without_colours(drawn(938, LONG))),
    ):
        out = Terminal()
        Screen(out, out, live_rank=live_rank, colour=False).show(0, [drawn(938, LONG)])
        assert out.getvalue() == f"[worker 0] {bar}\n"


# --- Chatter

CHATTER = [
    "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
    "I0000 00:00:1794906713.890587    6554 cpu_feature_guard.cc:227] This TensorFlow binary is optimized to",
    "To enable the following instructions: AVX2, rebuild TensorFlow with the appropriate compiler flags.",
    "I0000 00:00:1794906723.829959    6554 coordination_service.cc:221] Initializing CoordinationService",
    "I0000 00:00:1794906724.022046    6587 coordination_service.h:529] /job:worker/replica:0/task:1 has",
    "/job:worker/replica:0/task:0",
    "2026-11-17 09:11:53.890587: I tensorflow/core/util/port.cc:153] oneDNN custom operations are on.",
    "E0000 00:00:1794906713.890587    6554 cuda_dnn.cc:8579] Unable to register cuDNN factory: Attempting to",
    "W0000 00:00:1794906713.890587    6554 computation_placer.cc:177] computation placer already registered.",
    # The echo of a transfer that we aborted.
    "E0000 00:00:1.24 9 x.cc:2] BaseCollectiveExecutor::StartAbort ABORTED: worker 1 failed first: Bad",
    "E0000 00:00:1.2 9 x.c:1] Aborting RingReduce with ABORTED: Collective ops is aborted by: worker 1 x",
    "W0000 00:00:1.24 9 x.cc:412] Local rendezvous is aborting with status: ABORTED: worker 1 failed: x",
    "The error could be from a previous operation. Restart your program to reset.",
    "\t [[{{node CollectiveReduceV2}}]] [type.googleapis.com/tensorflow.DerivedStatus='']",
]
SHOWN = [
    "",
    "WARNING: All my own messages",
    "W0000 00:00:1794906713.890587    6554 local_rendezvous.cc:412] Local rendezvous is aborting",
    "E0000 00:00:1794907171.011037   30163 ring_alg.cc:291] Aborting RingReduce with UNAVAILABLE",
    "E0000 00:00:1.2 9 x.cc:2] BaseCollectiveExecutor::StartAbort UNAVAILABLE: connection reset",
    "F0000 00:00:1794907171.011037   30163 anything.cc:291] Check failed",
    "2026-11-17 09:11:53.890587: E tensorflow/core/framework/op_kernel.cc:1] OOM when allocating",
    "I1117 09:11:53.890587 140123 train.py:12] absl in the script",
    "I think so",
    "train.py:3: UserWarning: of Python",
    "see /job:worker/replica:0/task:0",
    "Traceback (most recent call last):",
]


@pytest.mark.parametrize(("chatter", "expected"), [(False, SHOWN), (True, [*CHATTER, *SHOWN])])
def test_the_log_has_every_line_and_the_screen_and_the_tail_omit_chatter_unless_it_is_wanted(
    tmp_path: Path, chatter: bool, expected: list[str]
) -> None:
    screen, out = plain_screen()
    output = Output(0, below(tmp_path) / "log", screen=screen, columns=None, chatter=chatter)
    os.write(output.writing_end, "".join(f"{line}\n" for line in [*CHATTER, *SHOWN]).encode())
    output.close()
    assert (tmp_path / "log").read_text().splitlines() == [*CHATTER, *SHOWN]
    assert out.getvalue() == "".join(f"[worker 0] {line}\n" for line in expected)
    assert list(output.tail) == expected[-20:]


def test_chatter_is_not_drawn_while_it_is_being_written(tmp_path: Path) -> None:
    out = io.StringIO()
    screen = Screen(out, out, live_rank=0, colour=False)
    output = Output(0, below(tmp_path) / "log", screen=screen, columns=None, chatter=False)
    os.write(output.writing_end, CHATTER[3].encode())
    output.pump()
    assert out.getvalue() == ""
    os.write(output.writing_end, b"\nhello")
    output.close()
    assert out.getvalue() == "[worker 0] hello\r\x1b[K[worker 0] hello\n"


# --- Readers that do not read

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

    def read(self, writer: Outlet | Screen, *streams: TextIO) -> str:
        """All that was ever written: somebody reads now, and the last writer leaves."""
        self._reader.start()
        writer.close()
        for stream in (self.stream, *streams):
            stream.close()
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
    assert pipe.read(outlet).splitlines() == [f"line {number}" for number in range(1000)]


def test_lines_beyond_the_capacity_are_omitted_and_counted(pipe: StalledPipe) -> None:
    outlet = Outlet(pipe.stream, capacity=100)
    for number in range(1000):
        outlet.put([f"line {number}"])
    outlet.put(["the launcher's own word"], must_appear=True)
    outlet.put(["the end"], must_appear=True)
    *shown, own, end = pipe.read(outlet).splitlines()
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
    drawn = re.split(r"\r\x1b\[K", pipe.read(outlet))
    assert drawn[-1] == "100%"
    assert len(drawn) <= 2, "one may have been on its way already"


def test_closing_gives_up_on_a_reader_that_takes_nothing(pipe: StalledPipe) -> None:
    outlet = Outlet(pipe.stream)
    outlet.put(["nobody reads this"])
    outlet.close(stalled_secs=0.01)
    outlet.put(["nor this"])
    assert pipe.read(outlet) == "nobody reads this\n"


def test_a_non_blocking_file_gets_everything(pipe: StalledPipe) -> None:
    os.set_blocking(pipe.stream.fileno(), False)
    outlet = Outlet(pipe.stream)
    outlet.put(["first", "second"])
    assert pipe.read(outlet) == "first\nsecond\n"


def test_messages_appear_even_if_the_workers_lines_are_not_read(pipe: StalledPipe) -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading) as read, os.fdopen(writing, "w") as messages:
        screen = Screen(pipe.stream, messages, live_rank=None, colour=False)
        screen.show(0, ["waits"])
        screen.tell("replicast: stopped by SIGTERM")
        assert read.readline() == "replicast: stopped by SIGTERM\n"
        assert pipe.read(screen) == "[worker 0] waits\n"


def test_messages_and_lines_for_the_same_file_stay_in_order(pipe: StalledPipe) -> None:
    with os.fdopen(os.dup(pipe.stream.fileno()), "w") as messages:
        screen = Screen(pipe.stream, messages, live_rank=None, colour=False)
        screen.show(0, ["before"])
        screen.tell("replicast: a message")
        screen.show(0, ["after"])
        assert pipe.read(screen, messages) == "[worker 0] before\nreplicast: a message\n[worker 0] after\n"
