"""What a job on several hosts must show: for the test of the default suite, and for those of tests/long."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import replicast
from tests.hosts.job import HostJob

DRIFT_AT = 140
WAITS_SECS = 120.0
"""Far more than anything here takes, also on a busy machine."""


def train_push_and_heal(job: HostJob) -> None:
    """The last worker proposes, somebody on the first host pushes, and an audit heals the last worker."""
    job.start(DRIFT_AT=str(DRIFT_AT))
    job.until_all_train()
    run = replicast.connect(job.run_dir)
    update = replicast.Update(note="pushed").add("cargo/values", np.ones(1000, "float32"))
    receipt = run.push(update).result(timeout=WAITS_SECS)
    assert len(receipt.digests) == len(job.hosts), "every worker has reported"
    assert len(set(receipt.digests.values())) == 1, "all replicas are equal"

    def healed() -> bool:
        return any(report.outcome == "healed" and report.step >= DRIFT_AT for report in run.audits())

    job.until(healed, WAITS_SECS)
    notes = [one.note for one in run.log()]
    assert [notes.count("cargo"), notes.count("pushed")] == [1, 1], "each is committed once"


def seen_by(job: HostJob, rank: int, path: Path) -> list[str]:
    """What the host of a worker has in a directory."""
    return job.hosts[rank].namespaces.run("ls", "-A", str(path)).split()


def hosts_in_status(job: HostJob) -> list[str]:
    """The host of each worker that `replicast status` shows on the first host."""
    return [note.host for note in replicast.connect(job.run_dir).status().workers]
