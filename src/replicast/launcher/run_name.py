"""How a launcher without `--run-dir` learns the name of the run directory from the first launcher."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path

from replicast.launcher.attempts import Verdict
from replicast.launcher.hosts.attempts import HostsAttempts
from replicast.launcher.hosts.link import asking_link
from replicast.launcher.hosts.timeouts import HostTimeouts
from replicast.launcher.interruptions import Interruptions
from replicast.launcher.plan import Job
from replicast.launcher.rundir import RUNS
from replicast.launcher.screen import make_screen
from replicast.launcher.verdicts import report_verdict


def ask_run_name(job: Job, secret: bytes, timeouts: HostTimeouts, environ: Mapping[str, str]) -> str | int:
    """Waits for the first launcher as a job with a run directory does. Only in the main thread."""
    if job.endpoint is None:
        raise ValueError("A job on several hosts has an endpoint")
    link = asking_link(
        node=job.node_rank, nodes=job.nodes, secret=secret, timeouts=timeouts, endpoint=job.endpoint
    )
    with (
        Interruptions() as interruptions,
        contextlib.closing(make_screen(sys.stdout, sys.stderr, tee=frozenset(), environ=environ)) as screen,
        link,
    ):
        found = HostsAttempts(link, job, screen, interruptions).ask_run_name()
        if isinstance(found, Verdict):
            report_verdict(found, screen, RUNS, None)
            return found.code or 0
    return Path(found).name
