"""The recommender of examples/: rows are corrected in training, and a killed worker changes no bit."""

from __future__ import annotations

import json
import re
from pathlib import Path

import replicast
from replicast.config import FAULTS
from replicast.faults import FIRED, Fault, Point
from tests.workers.test_examples import EXAMPLES, digests_in_logs, run


def test_rows_are_corrected_and_a_killed_worker_leaves_the_bits_of_an_undisturbed_run(tmp_path: Path) -> None:
    start = ["-m", "replicast", "run", "-n", "2", "--max-restarts", "1", "--run-dir"]
    script = str(EXAMPLES / "recommender.py")
    run([*start, "undisturbed", script], tmp_path)
    # Checkpoints are due every 20 steps, the correction is applied after step 70.
    killed = Fault(worker=1, point=Point.SNAPSHOT, occurrence=6)
    run([*start, "killed", script], tmp_path, **{FAULTS: json.dumps([killed.to_json()])})
    fired = (tmp_path / "killed" / FIRED).read_text().splitlines()
    assert [json.loads(line)["point"] for line in fired] == ["snapshot"]
    undisturbed = digests_in_logs(tmp_path / "undisturbed" / "logs" / "attempt-0", 2)
    recovered = digests_in_logs(tmp_path / "killed" / "logs" / "attempt-1", 2)
    assert len({*undisturbed, *recovered}) == 1
    log = (tmp_path / "killed" / "logs" / "attempt-1" / "worker-1.log").read_text()
    assert re.search(r"^resumes after step \d+$", log, re.MULTILINE)
    # Once, although the restarted script proposed it again.
    assert [(one.id, one.step) for one in replicast.connect(tmp_path / "killed").log()] == [("no-spam", 70)]
