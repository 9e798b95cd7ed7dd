"""`replicast run` as seen on a terminal, with what TensorFlow itself writes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.faults.test_launcher_terminal import on_a_terminal


def test_what_tensorflow_says_for_information_is_in_the_log_only_unless_the_user_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("import tensorflow as tf; tf.constant(1); print('done')")
    command = [sys.executable, "-m", "replicast", "run", "--run-dir", "run", "train.py"]
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    quiet = on_a_terminal(command, tmp_path, columns=80)
    log = (tmp_path / "run" / "logs" / "attempt-0" / "worker-0.log").read_text()
    assert "done" in quiet
    assert "cpu_feature_guard" in log
    assert "cpu_feature_guard" not in quiet
    assert "InitializeLog" not in quiet
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    assert "cpu_feature_guard" in on_a_terminal(command, tmp_path, columns=80)
