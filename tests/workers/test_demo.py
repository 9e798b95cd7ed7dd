"""`replicast demo` as people start it: real workers, real numbers, and a clean end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from replicast.auditfiles import last_audits
from replicast.core.stage import Stage
from replicast.storage.updates import committed_updates

DEADLINE_SECS = 180.0
COMMAND = [sys.executable, "-m", "replicast.cli", "demo", "--run-dir"]
ROW = re.compile(
    r"^(\S.+?) +(\S+) +([0-9a-f]{8}) +(\S+) +([0-9a-f]{8}) +(yes|NO) *$",
    re.MULTILINE,
)


def environment() -> dict[str, str]:
    unwanted = ("TF_CONFIG", "FORCE_COLOR", "COLUMNS", "NO_COLOR")
    return {name: value for name, value in os.environ.items() if name not in unwanted}


def test_the_demo_shows_replicas_that_differ_that_follow_a_push_and_that_survive_a_kill(
    tmp_path: Path,
) -> None:
    demo = subprocess.run(
        [*COMMAND, str(tmp_path)], env=environment(), capture_output=True, text=True, timeout=DEADLINE_SECS
    )
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert demo.stderr == ""
    assert all(character.isprintable() or character == "\n" for character in demo.stdout)
    assert max(len(line) for line in demo.stdout.splitlines()) <= 80

    rows = [row.groups() for row in ROW.finditer(demo.stdout)]
    assert [(row[0], row[-1]) for row in rows] == [
        ("after training", "yes"),
        ("after worker 1 assigned", "NO"),
        ("after 50 more steps", "NO"),
        ("act 1, at its end", "NO"),
        ("after replicas.sync", "yes"),
        ("after the push", "yes"),
        ("50 more steps later", "yes"),
        ("undisturbed, step 200", "yes"),
        ("before the kill, 150", "yes"),
        ("restored, step 100", "yes"),
        ("recovered, step 200", "yes"),
    ]
    for _, _, digest_0, _, digest_1, equal in rows:
        assert (digest_0 == digest_1) == (equal == "yes")
    sums = [[float(row[1]), float(row[3])] for row in rows]
    trained, assigned, continued, repeated, synced, pushed = sums[:6]
    assert trained[0] == trained[1] == assigned[0]
    assert abs((assigned[0] - assigned[1]) - (continued[0] - continued[1])) < 0.01
    assert continued[0] != trained[0]
    assert repeated == continued
    assert synced == [continued[0]] * 2
    assert pushed[0] - synced[0] > 51.2

    (run_dir,) = tmp_path.glob("demo-*/run")
    _check_journal(run_dir, demo.stdout)
    _check_audits(run_dir, demo.stdout)
    assert str(tmp_path) in demo.stdout.replace("\n", "")
    _check_recovery(tmp_path, demo.stdout)
    (notes,) = tmp_path.glob("demo-*/worker-0.jsonl")
    losses = [note["loss"] for note in map(json.loads, notes.read_text().splitlines()) if "loss" in note]
    assert len(losses) > 250
    assert losses[199] < losses[0] / 5


def _check_journal(run_dir: Path, shown: str) -> None:
    """What the screen says of the push is what the journal holds."""
    synced, pushed = committed_updates(run_dir)
    assert [edit["variable"].endswith("hidden/kernel") for edit in (*synced.edits, *pushed.edits)] == [
        True,
        True,
    ]
    assert [edit["operation"] for edit in pushed.edits] == ["add"]
    receipt = Journal(run_dir).receipts()[pushed.sequence]
    assert receipt.stage is Stage.VERIFIED
    assert len(receipt.digests) == 2
    assert len(set(receipt.digests.values())) == 1
    assert "$ replicast push run --add delta.safetensors --wait" in shown
    assert re.search(rf"\bstep {receipt.step}\b", shown)
    assert receipt.digests[0][:8] in shown


def _check_audits(run_dir: Path, shown: str) -> None:
    """The screen shows the report of the one audit that found a difference; training had many more."""
    first, *others = last_audits(run_dir, 10_000)
    assert [difference.variable for difference in first.differences] == ["classifier/hidden/kernel"]
    assert (first.step, first.since, first.outcome) == (250, "step 250 or before", "warned")
    assert " ".join(" ".join(first.lines()).split()) in " ".join(shown.split())
    assert len(others) > 10
    assert all(report.equal for report in others)
    assert f"finds all {others[-1].variables} variables equal" in " ".join(shown.split())


def _check_recovery(directory: Path, shown: str) -> None:
    """A worker was killed and both were started again, and what the screen compares are different digests."""
    assert all(
        (directory / "logs" / f"attempt-{attempt}" / f"worker-{rank}.log").exists()
        for attempt in range(2)
        for rank in range(2)
    )
    (notes_dir,) = directory.glob("demo-*")
    for rank in range(2):
        lines = (notes_dir / f"worker-{rank}.jsonl").read_text().splitlines()
        moments = [note for note in map(json.loads, lines) if note["kind"] == "moment"][-4:]
        undisturbed, halfway, restored, recovered = moments
        assert undisturbed["process"] == halfway["process"] != restored["process"] == recovered["process"]
        assert undisturbed["digest"] == recovered["digest"]
        assert len({note["digest"] for note in moments}) == 3
        if rank == 1:
            assert f"$ kill -9 {halfway['process']}\n" in shown
    (committed,) = committed_updates(notes_dir / "killed")
    assert committed.step == 140
    compared = re.search(r"Undisturbed: (\w+)\. Killed and recovered: (\w+)\.", " ".join(shown.split()))
    assert compared is not None
    assert compared[1] == compared[2] == undisturbed["digest"][:8]
