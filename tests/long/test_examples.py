"""The examples as users start them: on one, two and three workers, and killed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

import replicast
from replicast.config import FAULTS
from replicast.faults import Fault, Point
from tests.jobs import read_fired
from tests.workers.test_examples import DIGEST, EXAMPLES, UPDATED, digests_in_logs, digests_of_workers, run

SPECIAL_LINE = "strategy = replicast.Strategy()"
STOCK_LINE = "import tensorflow as tf; strategy = tf.distribute.get_strategy()"


def accuracy(printed: str) -> float:
    found = re.search(r"accuracy on unseen digits: (\S+)", printed)
    assert found is not None, printed
    return float(found[1])


def test_changes_that_two_workers_start_reach_both_and_leave_equal_weights(tmp_path: Path) -> None:
    assert len(set(digests_of_workers(EXAMPLES / "update.py", 2, tmp_path))) == 1
    logs = tmp_path / "run" / "logs" / "attempt-0"
    first, second = ((logs / f"worker-{rank}.log").read_text() for rank in range(2))
    assert "the bias has drifted by" not in first
    assert "worker 1: the bias has drifted by" in second
    assert UPDATED.findall(first) == UPDATED.findall(second)
    bias, learning_rate = UPDATED.findall(first)
    assert (bias[0], learning_rate[0]) == ("1", "2")
    for _, step, digests in (bias, learning_rate):
        assert int(step) > 58
        digest_0, digest_1 = re.fullmatch(r"worker 0: (\w+), worker 1: (\w+)", digests).groups()
        assert digest_0 == digest_1
    for log in (first, second):
        assert "learning rate: 0.0005" in log
    assert first.count("has the receipt of") == 1
    assert second.count("has the receipt of") == 2


def test_the_training_script_runs_alone(tmp_path: Path) -> None:
    printed = run([str(EXAMPLES / "train.py")], tmp_path)
    assert len(DIGEST.findall(printed)) == 1
    assert accuracy(printed) > 0.75


def test_the_training_script_ends_with_equal_weights_on_two_workers(tmp_path: Path) -> None:
    assert len(set(digests_of_workers(EXAMPLES / "train.py", 2, tmp_path))) == 1


def test_a_loop_of_its_own_ends_with_equal_weights_on_two_workers(tmp_path: Path) -> None:
    assert len(set(digests_of_workers(EXAMPLES / "custom_loop.py", 2, tmp_path))) == 1


def test_the_training_script_ends_with_equal_weights_on_three_workers(tmp_path: Path) -> None:
    assert len(set(digests_of_workers(EXAMPLES / "train.py", 3, tmp_path))) == 1


def test_the_script_is_stock_keras_but_for_one_line(tmp_path: Path) -> None:
    script = (EXAMPLES / "train.py").read_text()
    assert script.count(SPECIAL_LINE) == 1
    stock = tmp_path / "stock.py"
    stock.write_text(script.replace(SPECIAL_LINE, STOCK_LINE).replace("import replicast\n", ""))
    printed = run([str(stock)], tmp_path)
    assert accuracy(printed) > 0.75


def test_the_script_with_changes_runs_alone(tmp_path: Path) -> None:
    printed = run([str(EXAMPLES / "update.py")], tmp_path)
    assert "worker 0: the bias has drifted by" in printed
    assert len(UPDATED.findall(printed)) == 2


@pytest.mark.parametrize(("name", "steps"), [("restart", "20|40|60|80"), ("recommender", r"\d+")])
def test_a_script_whose_worker_is_killed_ends_with_the_weights_of_an_undisturbed_run(
    tmp_path: Path, name: str, steps: str
) -> None:
    start = ["-m", "replicast", "run", "-n", "2", "--max-restarts", "1", "--run-dir"]
    script = str(EXAMPLES / f"{name}.py")
    run([*start, "undisturbed", script], tmp_path)
    # Checkpoints are due every 20 steps; the recommender has its rows corrected after step 70.
    killed = Fault(worker=1, point=Point.SNAPSHOT, occurrence=5 if name == "restart" else 6)
    run([*start, "killed", script], tmp_path, **{FAULTS: json.dumps([killed.to_json()])})
    assert [fired["point"] for fired in read_fired(tmp_path / "killed")] == ["snapshot"]
    undisturbed = digests_in_logs(tmp_path / "undisturbed" / "logs" / "attempt-0", 2)
    recovered = digests_in_logs(tmp_path / "killed" / "logs" / "attempt-1", 2)
    assert len({*undisturbed, *recovered}) == 1
    log = (tmp_path / "killed" / "logs" / "attempt-1" / "worker-1.log").read_text()
    assert re.search(rf"^resumes after step ({steps})$", log, re.MULTILINE)
    if name == "restart":
        assert "trained 290 steps" in log
    else:  # once, although the restarted script proposed it again
        updates = replicast.connect(tmp_path / "killed").log()
        assert [(one.id, one.step) for one in updates] == [("no-spam", 70)]


def test_the_notebook_of_the_examples_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "it is kept without outputs"
    failing = "def fails():\n    raise ValueError('not today')\n\nreplicast.launch(fails)"
    notebook.cells.append(nbformat.v4.new_code_cell(failing))
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    with pytest.raises(CellExecutionError, match="ValueError: not today"):
        client.execute()
    said = [
        output.get("text", "") + str(output.get("data", ""))
        for cell in notebook.cells[:-1]
        if cell.cell_type == "code"
        for output in cell.outputs
    ]
    assert any("replicast: finished: 2 workers, step 60" in text for text in said)
    assert any("verified" in text for text in said)
