"""Decides, once and for all workers together, whether they sum through shared memory."""

from __future__ import annotations

import logging
import os

from replicast.allreduce import SEVERAL_HOSTS, open_exchange
from replicast.coordination import Coordination
from replicast.lifetime import Lifetime
from replicast.strategy.collectives import ReplicatedExtended

logger = logging.getLogger("replicast")


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
        unwilling = f"worker {rank} computes on an accelerator"
    exchange = open_exchange(
        coordination, rank, extended._num_workers, os.environ, unwilling=unwilling, check=lifetime.check
    )
    if isinstance(exchange, str):
        if rank == 0 and wanted:
            level = logging.INFO if exchange == SEVERAL_HOSTS else logging.WARNING
            logger.log(level, "TensorFlow's collectives sum the gradients, not shared memory: %s", exchange)
        return False
    extended.sum_through(exchange)
    lifetime.dead_worker = exchange.dead_worker
    return True
