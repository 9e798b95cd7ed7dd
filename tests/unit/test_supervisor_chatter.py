"""TensorFlow's information messages are only in the log; all other output is also on the screen."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from replicast.launcher.chatter import is_chatter, wants_chatter
from replicast.launcher.output import Output
from replicast.launcher.screen import Screen
from replicast.paths import below

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
]
SHOWN = [
    "",
    "WARNING: All my own messages",
    "W0000 00:00:1794906713.890587    6554 local_rendezvous.cc:412] Local rendezvous is aborting",
    "E0000 00:00:1794907171.011037   30163 ring_alg.cc:291] Aborting RingReduce with UNAVAILABLE",
    "F0000 00:00:1794907171.011037   30163 anything.cc:291] Check failed",
    "2026-11-17 09:11:53.890587: E tensorflow/core/framework/op_kernel.cc:1] OOM when allocating",
    "I1117 09:11:53.890587 140123 train.py:12] absl in the script",
    "I think so",
    "train.py:3: UserWarning: of Python",
    "see /job:worker/replica:0/task:0",
    "Traceback (most recent call last):",
]


@pytest.mark.parametrize("line", CHATTER)
def test_info_lines_of_tensorflow_are_chatter(line: str) -> None:
    assert is_chatter(line)


@pytest.mark.parametrize("line", SHOWN)
def test_warnings_errors_and_the_output_of_the_script_are_not_chatter(line: str) -> None:
    assert not is_chatter(line)


def written(log: Path, *, chatter: bool) -> tuple[str, list[str]]:
    """What the screen and the tail have of a worker that writes everything."""
    out = io.StringIO()
    output = Output(
        0,
        below(log.parent) / log.name,
        screen=Screen(out, out, live_rank=None, colour=False),
        columns=None,
        chatter=chatter,
    )
    os.write(output.writing_end, "".join(f"{line}\n" for line in [*CHATTER, *SHOWN]).encode())
    output.close()
    return out.getvalue(), list(output.tail)


def test_the_log_has_every_line_and_the_screen_and_the_tail_omit_chatter(tmp_path: Path) -> None:
    shown, tail = written(tmp_path / "log", chatter=False)
    assert (tmp_path / "log").read_text().splitlines() == [*CHATTER, *SHOWN]
    assert shown == "".join(f"[worker 0] {line}\n" for line in SHOWN)
    assert tail == SHOWN


def test_chatter_is_shown_on_request(tmp_path: Path) -> None:
    shown, tail = written(tmp_path / "log", chatter=True)
    assert shown.splitlines() == [f"[worker 0] {line}" for line in [*CHATTER, *SHOWN]]
    assert tail == [*CHATTER, *SHOWN]


def test_chatter_is_not_drawn_while_it_is_being_written(tmp_path: Path) -> None:
    out = io.StringIO()
    output = Output(
        0,
        below(tmp_path) / "log",
        screen=Screen(out, out, live_rank=0, colour=False),
        columns=None,
        chatter=False,
    )
    os.write(output.writing_end, CHATTER[3].encode())
    output.pump()
    assert out.getvalue() == ""
    os.write(output.writing_end, b"\nhello")
    output.close()
    assert out.getvalue() == "[worker 0] hello\r\x1b[K[worker 0] hello\n"


@pytest.mark.parametrize(("environ", "wants"), [({}, False), ({"TF_CPP_MIN_LOG_LEVEL": "0"}, True)])
def test_setting_the_log_level_shows_everything(environ: dict[str, str], wants: bool) -> None:
    assert wants_chatter(environ) is wants


@pytest.mark.parametrize(
    "line",
    [
        "E0000 00:00:1.24 9 x.cc:2] BaseCollectiveExecutor::StartAbort ABORTED: worker 1 failed first: Bad",
        "E0000 00:00:1.2 9 x.c:1] Aborting RingReduce with ABORTED: Collective ops is aborted by: worker 1 x",
        "W0000 00:00:1.24 9 x.cc:412] Local rendezvous is aborting with status: ABORTED: worker 1 failed: x",
        "The error could be from a previous operation. Restart your program to reset.",
        "\t [[{{node CollectiveReduceV2}}]] [type.googleapis.com/tensorflow.DerivedStatus='']",
    ],
)
def test_the_echo_of_a_transfer_that_we_aborted_is_not_on_the_screen(line: str) -> None:
    assert is_chatter(line)


def test_a_transfer_that_failed_by_itself_is_on_the_screen() -> None:
    line = (
        "E0000 00:00:1794933477.244960    9439 base_collective_executor.cc:252] "
        "BaseCollectiveExecutor::StartAbort UNAVAILABLE: connection reset"
    )
    assert not is_chatter(line)
