import contextlib
import errno
import io
import os
from pathlib import Path

import pytest

from replicast.launcher.lines import LineAssembler, as_shown, cropped, without_colours
from replicast.launcher.output import Output
from replicast.launcher.screen import Screen, make_screen
from replicast.paths import RunPath, below

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


def test_lines_are_assembled_from_any_pieces() -> None:
    whole = f"first\nö {BAR}\r{BAR}\b\b\n\nlast".encode()
    expected = ["first", BAR, ""]
    for size in (1, 2, 3, 7, len(whole)):
        assembler = LineAssembler()
        lines = [
            line
            for start in range(0, len(whole), size)
            for line in assembler.feed(whole[start : start + size])
        ]
        assert lines == expected
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


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


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


def test_an_unchanged_bar_is_not_drawn_again() -> None:
    out = Terminal()
    screen = Screen(out, out, live_rank=0, colour=False)
    screen.show(0, [], "10%")
    screen.show(0, [], "10%")
    assert out.getvalue() == "[worker 0] 10%"


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
