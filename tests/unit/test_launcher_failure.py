"""Who is to blame, what follows, and what is said about it, whatever was printed after the failure."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from replicast.config import PEER_FAILED
from replicast.errors import exception_sentence
from replicast.files import below
from replicast.launcher.failure import (
    ONE_HOST,
    GroupEnd,
    Hosts,
    LaunchOrder,
    Phase,
    WorkerExit,
    duration,
    failure_box,
    first_cause,
    order_after,
    raised_in,
    reason,
    report_lines,
    restart_line,
    with_details,
)
from replicast.launcher.screen import Output

RAISED = """Epoch 1/3
Traceback (most recent call last):
  File "train.py", line 9, in <module>
    model.fit(x, y)
  File "train.py", line 4, in loss
    raise ValueError("bad loss")
ValueError: bad loss
2026-11-17 10:00:00.1 I external/local_xla/xla/tsl/x.cc:42] Shutting down
W0000 00:00:1 coordination: task was lost
"""


FRAMES = "".join(f'  File "deep.py", line {n}, in f\n    f()\n' for n in range(100))


@pytest.mark.parametrize(
    ("text", "first", "last", "count"),
    [
        pytest.param(RAISED, "Epoch 1/3\nTraceback", "ValueError: bad loss", 7, id="noise follows"),
        pytest.param(
            f"Traceback (most recent call last):\n{FRAMES}RuntimeError: deep\n",
            "Traceback (most recent call last):\n  … 183 lines: see the log",
            "RuntimeError: deep",
            20,
            id="a long one is cut in its middle",
        ),
        pytest.param("Epoch 1/3\nall is well\n", "", "", 0, id="no exception"),
        pytest.param(None, "", "", 0, id="no log"),
    ],
)
def test_the_traceback_in_a_log(tmp_path: Path, text: str | None, first: str, last: str, count: int) -> None:
    if text is not None:
        (tmp_path / "log").write_text(text)
    _, _, found = raised_in(below(tmp_path) / "log")
    assert len(found) == count
    assert "\n".join(found).startswith(first)
    assert "\n".join(found).endswith(last)


GRAPH = """Traceback (most recent call last):
  File "{here}/train.py", line 15, in <module>
    train(model)
  File "{here}/train.py", line 10, in train
    model.fit(x, y)
  File "/venv/lib/python3.11/site-packages/keras/src/utils/traceback_utils.py", line 122, in error_handler
    raise e.with_traceback(filtered_tb) from None
tensorflow.python.framework.errors_impl.InvalidArgumentError: Graph execution error:

Detected at node loss/SparseSoftmaxCrossEntropyWithLogits defined at (most recent call last):
  File "{here}/train.py", line 15, in <module>

  File "/venv/lib/python3.11/site-packages/keras/src/losses/losses.py", line 2359, in sparse
"""
REASON = "Received a label value of 255 which is outside the valid range of [0, 10)."
NODE = "\t [[{{node loss/SparseSoftmaxCrossEntropyWithLogits}}]] [Op:__inference_one_step_424]\n"
SEVERAL = f"2 root error(s) found.\n  (0) INVALID_ARGUMENT:  {REASON}\n{NODE}  (1) CANCELLED:  x\n"


@pytest.mark.parametrize("reason", [f"\n{REASON}\n{NODE}", f"\n{SEVERAL}"])
def test_an_error_of_a_graph_is_its_reason_and_the_users_own_line(tmp_path: Path, reason: str) -> None:
    (tmp_path / "log").write_text(GRAPH.replace("{here}", str(tmp_path)) + reason)
    failed = with_details(ended(0, 1), below(tmp_path) / "log", [])
    assert failed.why == f"InvalidArgumentError: {REASON}"
    assert failed.where == f"{tmp_path}/train.py:10: model.fit(x, y)"
    assert failed.lines[-1] == failed.why, "after the exception, which does not say it"
    assert f"{failed.why}\nat {failed.where}" in said(failed)
    assert globals()["reason"](failed) == f"{failed.why} ({failed.where})", "in status and on the page"


TRACED = """Traceback (most recent call last):
  File "/x/train.py", line 11, in <module>
    step(x)
  File "/tmp/__autograph_generated_filefkffdhq1.py", line 12, in tf__step
    retval_ = ag__.converted_call(ag__.ld(inner), (ag__.ld(x),), None, fscope)
ValueError: in user code:

    File "/x/train.py", line 8, in step  *
        return inner(x) + 1
    File "/x/train.py", line 4, in inner  *
        raise ValueError("my own reason")

    ValueError: my own reason

replicast: the job ends
"""


def test_an_error_in_a_function_of_tensorflow_is_that_of_the_users_code(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(TRACED)
    failed = with_details(ended(0, 1), below(tmp_path) / "log", [])
    assert failed.why == "ValueError: my own reason"
    assert failed.where == '/x/train.py:4: raise ValueError("my own reason")'


BAR = "\x1b[1m{}/79\x1b[0m \x1b[32m━━━\x1b[0m\x1b[37m━━\x1b[0m \x1b[1m1s\x1b[0m 27ms/step - loss: 0.6934"
BARS = "\b\b\r".join(["Epoch 1/3\n", *(BAR.format(step) for step in range(20, 28))])
RAISED_BY = 'Traceback (most recent call last):\n  File "/x/train.py", line 9, in {0}\n    {0}()\n{1}\n'


def grouped(*leaves: str) -> str:
    """What Python prints of an exception group; the last of the leaves has no traceback."""
    head = RAISED_BY.format("tasks", f"ExceptionGroup: failed ({len(leaves)} sub-exceptions)")
    lines = [f"  | {line}\n" for line in head.splitlines()]
    lines[0] = "  + Exception Group Traceback (most recent call last):\n"
    for number, leaf in enumerate(leaves, 1):
        edge = "+-+---" if number == 1 else "  +---"
        lines += [f"  {edge}------------- {number} ----------------\n"]
        lines += [f"    | {line}\n" for line in leaf.splitlines()]
    return "".join([*lines, "    +------------------------------------\n"])


ONE, OTHER = RAISED_BY.format("load", "OSError: no shard"), RAISED_BY.format("fit", "ValueError: ran dry")
DURING = "\nDuring handling of the above exception, another exception occurred:\n\n"


@pytest.mark.parametrize(
    ("log", "why", "function"),
    [
        pytest.param(BARS + OTHER, "ValueError: ran dry", "fit", id="Keras' bar"),
        pytest.param(
            f"\r 4%|▍  | 4/99\r 5%|▌  | 5/99{OTHER}", "ValueError: ran dry", "fit", id="another bar"
        ),
        pytest.param(BARS + ONE + DURING + OTHER, "ValueError: ran dry", "fit", id="chained"),
        pytest.param(BARS + grouped(ONE, OTHER), "ValueError: ran dry", "fit", id="the last of a group"),
        pytest.param(
            BARS + grouped("KeyError: 1"),
            "ExceptionGroup: failed (1 sub-exceptions)",
            "tasks",
            id="not raised",
        ),
        pytest.param(BARS + grouped(ONE) + DURING + OTHER, "ValueError: ran dry", "fit", id="after a group"),
    ],
)
def test_an_exception_is_found_behind_a_progress_bar(
    tmp_path: Path, log: str, why: str, function: str
) -> None:
    (tmp_path / "log").write_text(log, newline="")
    failed = with_details(ended(0, 1), below(tmp_path) / "log", [])
    assert (failed.why, failed.where) == (why, f"/x/train.py:9: {function}()")
    assert failed.lines[-1] == why
    assert not [line for line in failed.lines if "━" in line or "%|" in line or not line.isprintable()]
    order = order_after(replace(FIRST, max_restarts=3), failed, None, left_behind=False)
    assert order_after(order, failed, None, left_behind=False).repeats


def test_the_last_lines_have_no_progress_bar_and_no_escape_sequence(tmp_path: Path) -> None:
    warning = "W0000 00:00:1 a warning"
    output = Output(0, below(tmp_path) / "log", None, None)
    os.write(output.writing_end, f"{BARS}{warning}\n\r{BARS}".encode())
    output.hand_over()
    output.close()
    assert with_details(ended(0, -9), below("/none") / "log", output.tail).lines == (
        "Epoch 1/3",
        warning,
        "Epoch 1/3",
    )


@pytest.mark.parametrize(
    ("printed", "sentence"),
    [
        ("ValueError: bad loss", "ValueError: bad loss"),
        ("KeyboardInterrupt", "KeyboardInterrupt"),
        ('  File "x.py", line 1\n    x y\nSyntaxError: invalid syntax', "SyntaxError: invalid syntax"),
        (
            "ValueError: Exception encountered when calling Dense.call().\n\nInput 0 is wrong\n\nArguments …",
            "ValueError: Input 0 is wrong",
        ),
        ("x.y.InternalError: Graph execution error:", "InternalError: Graph execution error:"),
    ],
)
def test_the_sentence_of_an_exception(printed: str, sentence: str) -> None:
    assert exception_sentence(printed.splitlines()) == sentence


def ended(worker: int, code: int, *, stopped: bool = False, frozen: bool = False) -> WorkerExit:
    return WorkerExit(
        worker=worker, code=code, ran_secs=2.04, log="/logs/x.log", stopped=stopped, frozen=frozen
    )


def frozen(worker: int) -> WorkerExit:
    """Stopped by a signal for so long that the others failed because of it; killed by the launcher."""
    return ended(worker, -9, stopped=True, frozen=True)


TWO = Hosts(("gpu0", "gpu1"), 0)
LOST = WorkerExit(host=1, why="nothing was heard from it")
WITNESS = replace(
    ended(0, PEER_FAILED), says="worker 1 was lost: it sent no heartbeats (reported by worker 0)"
)


@pytest.mark.parametrize(
    ("failure", "hosts", "why"),
    [
        (WITNESS, TWO, "worker 1 was lost (reported by worker 0)"),
        (replace(WITNESS, host=1), TWO, "worker 1 was lost (reported by worker 0 on gpu1)"),
        (replace(WITNESS, says=""), TWO, "worker 0 failed (exit code 75: because of another worker)"),
        (ended(0, -9), TWO, "worker 0 failed (killed by SIGKILL)"),
        (LOST, TWO, "host gpu1 was lost"),
        (LOST, Hosts(("gpu0", "host 1")), "host 1 was lost"),
    ],
)
def test_a_restart_names_the_worker_that_was_lost_not_the_one_that_says_so(
    failure: WorkerExit, hosts: Hosts, why: str
) -> None:
    order = LaunchOrder(phase=Phase.WAIT, restarts=1, max_restarts=3, failure=failure)
    assert restart_line(order, hosts) == f"replicast: restart 1 of 3 because {why}; 2 left after it"


def said(
    failure: WorkerExit | None, hosts: Hosts = ONE_HOST, end: GroupEnd | None = None, **order: Any
) -> str:
    over = LaunchOrder(phase=Phase.OVER, failure=failure, **order)
    return "\n".join(report_lines(over, end, hosts))


def test_a_stopped_launcher_of_several_hosts_speaks_of_its_own_workers_alone() -> None:
    assert said(None, signal=signal.SIGINT) == "stopped by Ctrl-C; all workers have exited"
    three = Hosts(("gpu0", "gpu1", "gpu2"))
    assert said(None, three, signal=signal.SIGINT, stopped_on=1) == (
        "stopped by Ctrl-C on gpu1; the workers on this host have exited"
    )


def test_a_failure_on_another_host_names_the_host_and_who_reported_a_lost_one() -> None:
    assert said(LOST, TWO) == "host gpu1 was lost: nothing was heard from it"
    assert said(replace(LOST, reported_by=1), TWO) == (
        "host gpu1 was lost (reported by the launcher on gpu1): nothing was heard from it"
    )
    assert said(replace(ended(3, -9), host=1), TWO) == (
        "worker 3 on gpu1 failed first: killed by SIGKILL after 2.0 s. Log on gpu1: /logs/x.log"
    )
    assert reason(LOST, TWO) == "host gpu1 was lost: nothing was heard from it"
    assert reason(replace(ended(3, 1), host=1, why="ValueError: bad"), TWO) == "ValueError: bad on gpu1"
    assert reason(ended(3, -9)) == "killed by SIGKILL"


def test_an_exit_has_the_traceback_of_its_log_else_the_last_lines(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(RAISED)
    log = below(tmp_path) / "log"
    raised = with_details(ended(0, 1), log, ["W0000 00:00:1 coordination: task was lost"])
    assert (raised.lines[0], raised.lines[-1], raised.why) == (
        "Epoch 1/3",
        "ValueError: bad loss",
        raised.lines[-1],
    )
    killed = with_details(ended(0, -9), log, ["the last line"])
    assert (killed.lines, killed.why) == (("the last line",), "")


@pytest.mark.parametrize(
    ("exits", "blamed"),
    [
        ([ended(0, 0), ended(1, 0)], None),
        ([ended(0, 0), ended(1, 3)], 1),
        ([ended(1, 3), ended(0, 4)], 1),
        ([ended(1, PEER_FAILED), ended(0, 4)], 0),
        ([ended(1, PEER_FAILED), ended(0, -15, stopped=True)], 1),
        ([ended(1, -15, stopped=True), ended(0, 1)], 0),
        ([ended(1, PEER_FAILED), frozen(0)], 0),
        ([ended(1, 3), frozen(0)], 0),
        ([ended(1, 1), ended(2, PEER_FAILED), frozen(0)], 0),
        ([ended(1, 0), frozen(0)], 0),
        (
            [ended(1, PEER_FAILED), WorkerExit(host=1)],
            None,
        ),  # A lost host is the cause of what others notice,
        ([ended(1, PEER_FAILED), WorkerExit(host=1), ended(2, 1)], 2),  # unless one failed by itself.
    ],
)
def test_the_worker_to_blame_is_a_frozen_one_or_the_first_to_fail_by_itself(
    exits: list[WorkerExit], blamed: int | None
) -> None:
    failure = first_cause(exits)
    assert (None if failure is None else failure.worker) == blamed


FIRST = LaunchOrder(phase=Phase.RUN, attempt=4, max_restarts=1)


@pytest.mark.parametrize(
    ("end", "code", "restarts"),
    [
        (GroupEnd((ended(0, 0),)), 0, 0),
        (GroupEnd((ended(0, 3),)), 3, 1),
        (GroupEnd((ended(0, -9),)), 137, 1),
        (GroupEnd((ended(0, 143),)), 143, 0),  # It saved because it was told to: no failure.
        (GroupEnd((ended(0, 3),), signal.SIGINT), 130, 0),
        (GroupEnd(left_behind=(1,)), 1, 0),  # Workers that could not be killed are not a success.
        (GroupEnd((ended(0, 3),), left_behind=(1,)), 3, 0),
    ],
)
def test_what_follows_an_attempt(end: GroupEnd, code: int, restarts: int) -> None:
    def after(before: LaunchOrder) -> LaunchOrder:
        left = bool(end.left_behind)
        return order_after(before, first_cause(end.exits), end.interrupted_by, left_behind=left)

    order = after(FIRST)
    assert (order.code, order.phase is Phase.WAIT, order.attempt) == (code, bool(restarts), 4 + restarts)
    last = after(replace(FIRST, restarts=1))
    assert (last.code, last.phase, last.attempt) == (code, Phase.OVER, 4)


RAISES = replace(ended(0, 1), why="ValueError: label 255", where="train.py:10: model.fit(x, y)")


@pytest.mark.parametrize(
    ("failure", "repeats"),
    [
        pytest.param(replace(RAISES, worker=1, why="ValueError: label 7"), True, id="other numbers"),
        pytest.param(replace(RAISES, ran_secs=500.0), False, id="it may have come further"),
        pytest.param(replace(RAISES, where="train.py:12: save()"), False, id="another line"),
        pytest.param(replace(RAISES, why="TypeError: label 255"), False, id="another error"),
        pytest.param(replace(RAISES, why=""), False, id="an exit without an exception"),
        pytest.param(replace(RAISES, code=-9), False, id="killed"),
        pytest.param(replace(RAISES, code=PEER_FAILED), False, id="because of another worker"),
        pytest.param(replace(RAISES, worker=None), False, id="a lost host"),
    ],
)
def test_the_same_error_soon_after_the_start_is_not_tried_a_third_time(
    failure: WorkerExit, repeats: bool
) -> None:
    first = order_after(replace(FIRST, max_restarts=3), RAISES, None, left_behind=False)
    assert (first.phase, first.repeats) == (Phase.WAIT, False)
    then = order_after(first, failure, None, left_behind=False)
    assert (then.phase is Phase.OVER, then.repeats) == (repeats, repeats)


def test_a_start_that_is_refused_is_not_tried_again() -> None:
    refused = replace(
        RAISES, why="LaunchRefused: Two run directories: `replicast run` uses a, and the script b"
    )
    order = order_after(replace(FIRST, max_restarts=3), refused, None, left_behind=False)
    assert (order.phase, order.code, order.repeats) == (Phase.OVER, 1, False)


@pytest.mark.parametrize("why", ["ConnectionResetError: x", "ResourceExhaustedError: OOM", "JobFailed: x"])
def test_an_error_of_the_machine_is_tried_again(why: str) -> None:
    failure = replace(RAISES, why=why)
    order = replace(FIRST, max_restarts=3, failure=failure)
    assert order_after(order, failure, None, left_behind=False).phase is Phase.WAIT


AFTER = "after 2.0 s. Log: /logs/x.log"


def test_the_report_names_worker_cause_duration_and_log() -> None:
    failed = ended(1, -9)
    others = (ended(3, 1), ended(2, 0), failed, ended(10, 0), ended(0, -15, stopped=True))
    assert said(failed, end=GroupEnd(others)) == (
        f"worker 1 failed first: killed by SIGKILL {AFTER}\n"
        "worker 0 was stopped, worker 2 had finished, worker 3 failed afterwards (exit code 1), "
        "worker 10 had finished."
    )


def test_the_report_names_a_frozen_worker() -> None:
    assert said(frozen(0), end=GroupEnd((frozen(0), frozen(2), ended(1, PEER_FAILED)))) == (
        f"worker 0 was stopped (SIGSTOP) and did not continue: killed {AFTER}\n"
        "worker 1 failed afterwards (exit code 75: because of another worker), worker 2 was stopped by "
        "SIGSTOP."
    )


def test_the_report_repeats_what_a_worker_says_of_one_on_another_host() -> None:
    tail = (
        "Traceback (most recent call last):",
        "replicast: \x1b[31mworker 3 was lost: its connection broke (reported by worker 0)\x1b[0m",
        "replicast: worker 1 saved nothing",
    )
    assert said(with_details(ended(1, PEER_FAILED), below("/none") / "log", tail)) == (
        "worker 1 exited because of another worker (worker 3 was lost: its connection broke "
        f"(reported by worker 0)) {AFTER}"
    )
    assert "another worker (its log names it)" in said(ended(1, PEER_FAILED))


def test_a_group_that_was_told_to_stop_is_not_reported_as_a_failure() -> None:
    assert said(ended(1, 143), end=GroupEnd((ended(1, 143), ended(0, 143)))) == (
        f"the group was told to stop (SIGTERM); worker 1 exited first (exit code 143: told to stop) {AFTER}\n"
        "worker 0 exited too."
    )


@pytest.mark.parametrize(
    ("secs", "expected"), [(0.04, "0.0 s"), (59.0, "59.0 s"), (61.2, "1 min 1 s"), (7260.0, "2 h 1 min")]
)
def test_durations_are_readable(secs: float, expected: str) -> None:
    assert duration(secs) == expected


def test_a_line_without_an_end_does_not_fill_the_screen_when_its_worker_fails() -> None:
    failure = with_details(ended(0, 1), below("/none") / "log", ["x" * 65536, "the reason"])
    box = failure_box(failure, Hosts())
    assert "the reason" in box
    assert "x" * 20 in box
    assert len(box) < 5000


def test_the_box_counts_its_lines() -> None:
    for tail, box in (
        (("\x1b[31mwhy\x1b[0m",), "╭─ worker 0: the last line\n│ why\n╰─"),
        (("a", "b"), "╭─ worker 0: the last 2 lines\n│ a\n│ b\n╰─"),
        ((), "╭─ worker 0\n│ (no output)\n╰─"),
    ):
        assert failure_box(replace(ended(0, 1), lines=tail), Hosts()) == box
