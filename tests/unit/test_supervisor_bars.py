"""Keras' progress bar on a terminal of 80 columns, and with other lines written behind it."""

from __future__ import annotations

import io

import pytest

from replicast.launcher.bars import split_bar, with_its_loss, with_shorter_bar
from replicast.launcher.lines import LineAssembler, as_shown, without_colours
from replicast.launcher.screen import Screen

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


def test_the_loss_is_shown_first_where_not_all_metrics_have_room() -> None:
    shown = without_colours(with_its_loss(drawn(469, LONG), ROOM))
    assert shown == "469/938 ━━━━━ 12s 123ms/step - f1_score: 0.1000 - loss: 2.3025 - …"


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
    assert split_bar(bar + padding + text) == (bar, text)
    assert split_bar(bar + padding) is None


def test_a_bar_without_a_known_end_is_a_bar_too() -> None:
    bar = f"{37:7}/Unknown \x1b[1m1:02\x1b[0m 8ms/step{SHORT}"
    assert split_bar(bar + "text") == (bar, "text")


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
    lines = [
        line
        for start in range(0, len(written), size)
        for line in assembler.feed(written[start : start + size])
    ]
    assert lines == ["Epoch 1/2", BEHIND[0], "  more of it", BEHIND[1]]
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


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_finished_bar_is_shown_whole_with_a_shorter_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = Terminal()
    screen = Screen(out, out, live_rank=0, colour=False)
    screen.show(0, [drawn(938, LONG)])
    assert out.getvalue() == f"[worker 0] 938/938 ━━━━━ 12s 123ms/step{LONG}\n"


def test_without_a_terminal_a_finished_bar_is_as_keras_drew_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = io.StringIO()
    Screen(out, out, live_rank=None, colour=False).show(0, [drawn(938, LONG)])
    assert out.getvalue() == f"[worker 0] {without_colours(as_shown(drawn(938, LONG)))}\n"
