"""Which attempt of the job this is, where no launcher counts: under Kubernetes, Ray or a plain TF_CONFIG."""

from __future__ import annotations

import os
from collections.abc import Mapping

from replicast.config import ATTEMPT, read_launch
from replicast.errors import FileDamaged
from replicast.files import RunDir
from replicast.runtime.exchange import Exchange
from replicast.storage.groups import last_claim


def attempt_of(
    run_dir: RunDir | None, exchange: Exchange, timeout_secs: float, environ: Mapping[str, str] = os.environ
) -> int:
    """The number of this attempt, from 0: the launcher's, else one more than the last in the run directory.

    All workers call it. Worker 0 looks into the run directory and tells the others, who may not see it.

    Args:
        run_dir: The run directory, if this worker has one.
        exchange: Reaches the other workers.
        timeout_secs: How long to wait for them.
        environ: The environment.
    """
    if ATTEMPT in environ:
        return read_launch(environ).attempt
    counted = str(_next(run_dir)) if exchange.rank == 0 else ""  # the others may have no run directory
    return int(exchange.agree("attempt", counted, timeout_secs)[0])


def _next(run_dir: RunDir | None) -> int:
    if run_dir is None:
        return 0
    try:
        last = last_claim(run_dir)
    except (FileDamaged, OSError):  # Reported when the run directory is claimed.
        return 0
    return 0 if last is None else last.attempt + 1
