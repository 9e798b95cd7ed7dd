"""Decides, once and for all workers together, whether they sum through shared memory."""

from __future__ import annotations

import logging
import os

from replicast.allreduce import SEVERAL_HOSTS, open_exchange
from replicast.coordination import Coordination
from replicast.lifetime import Lifetime
from replicast.strategy.collectives import ReplicatedExtended

logger = logging.getLogger("replicast")

_ON_ACCELERATOR = "computes on an accelerator"


def sum_through_shared_memory(
    extended: ReplicatedExtended, coordination: Coordination, rank: int, lifetime: Lifetime, wanted: bool
) -> bool:
    """Makes the steps of all workers sum through shared memory, if all of them can and want to.

    Blocks until all workers have called it, at most two minutes. Worker 0 logs why they cannot.

    Returns:
        Whether they do; the same on all workers.
    """
    unwilling = None
    if not wanted:
        unwilling = f'worker {rank} has all_reduce="tensorflow"'
    elif extended._local_device_type != "CPU":
        unwilling = f"worker {rank} {_ON_ACCELERATOR}"
    exchange = open_exchange(
        coordination, rank, extended._num_workers, os.environ, unwilling=unwilling, check=lifetime.check
    )
    if isinstance(exchange, str):
        if rank == 0 and wanted:
            text = "TensorFlow's collectives sum the gradients, not shared memory: %s"
            logger.log(_level(exchange), text, exchange)
        return False
    extended.sum_through(exchange)
    lifetime.dead_worker = exchange.dead_worker
    return True


def _level(reason: str) -> int:
    """Between accelerators TensorFlow's collectives are the right way, and between hosts the only one."""
    if reason.endswith(_ON_ACCELERATOR):
        return logging.DEBUG
    return logging.INFO if reason == SEVERAL_HOSTS else logging.WARNING
