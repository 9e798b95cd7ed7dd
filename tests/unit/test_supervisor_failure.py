"""A failure is told by the user's exception, whatever was printed after it."""

from __future__ import annotations

from pathlib import Path

from replicast.supervisor.failure import exception_in, traceback_in

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


def test_the_exception_is_found_before_noise(tmp_path: Path) -> None:
    log = tmp_path / "worker-0.log"
    log.write_text(RAISED)
    found = traceback_in(log)
    assert found[0].startswith("Traceback")
    assert found[-1] == exception_in(found) == "ValueError: bad loss"


def test_a_long_traceback_is_cut_in_its_middle(tmp_path: Path) -> None:
    log = tmp_path / "worker-0.log"
    frames = "".join(f'  File "deep.py", line {n}, in f\n    f()\n' for n in range(100))
    log.write_text(f"Traceback (most recent call last):\n{frames}RuntimeError: deep\n")
    found = traceback_in(log)
    assert len(found) == 20
    assert "183 lines: see the log" in found[1]
    assert found[-1] == "RuntimeError: deep"


def test_no_exception_no_traceback(tmp_path: Path) -> None:
    log = tmp_path / "worker-0.log"
    log.write_text("Epoch 1/3\nall is well\n")
    assert traceback_in(log) == []
    assert exception_in([]) == ""
    assert traceback_in(tmp_path / "missing.log") == []
