"""The start of a worker, in this order: it meets the others, TensorFlow connects them, and it is watched."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import tensorflow as tf

from replicast import rendezvous
from replicast.config import HEARTBEAT_SECS, Cluster, heartbeat_timeout_secs, start_timeout_secs
from replicast.coordination import Coordination, MemoryCoordination, ServiceCoordination
from replicast.lifetime import Lifetime
from replicast.port_filter import port_limit
from replicast.script_digest import main_script
from replicast.strategy.collectives import ReplicatedExtended
from replicast.strategy.connecting import connecting


def meet(cluster: Cluster | None) -> float:
    """Blocks until all workers are here, at most `REPLICAST_START_TIMEOUT`; returns the heartbeat timeout."""
    if cluster is None or cluster.size == 1:
        return HEARTBEAT_SECS
    return rendezvous.meet(
        cluster,
        start_timeout_secs(os.environ),
        _tell,
        heartbeat_timeout_secs(os.environ),
        main_script(),
    )


def connect(
    strategy: tf.distribute.Strategy,
    cluster: Cluster | None,
    options: tf.distribute.experimental.CommunicationOptions | None,
) -> tuple[ReplicatedExtended, float]:
    """TensorFlow connects the workers, which have met; afterwards its port accepts only trusted networks.

    Returns:
        What the strategy is built on, and the heartbeat timeout of the job.
    """
    limit_port = port_limit(cluster, os.environ)
    heartbeat_secs = meet(cluster)
    with connecting(cluster):
        extended = ReplicatedExtended(
            strategy,
            tf.distribute.cluster_resolver.TFConfigClusterResolver(),
            options or tf.distribute.experimental.CommunicationOptions(),
            heartbeat_secs,
        )
    limit_port()
    return extended, heartbeat_secs


def watch(
    cluster: Cluster | None,
    transfers_started: Callable[[], int],
    trained_alone: Callable[[], bool],
    heartbeat_secs: float,
) -> tuple[Coordination, Lifetime]:
    """The keys that all workers share, and the watcher, which ends this worker if a call for one hangs.

    The watcher starts before any other code can make such a call.
    """
    if cluster is None or cluster.size == 1:
        alone = MemoryCoordination(MemoryCoordination.Store())
        return alone, Lifetime(alone, 0, 1, transfers_started)
    coordination = ServiceCoordination(chiefs=cluster.chiefs)
    lifetime = Lifetime(
        coordination,
        cluster.rank,
        cluster.size,
        transfers_started,
        heartbeat_secs=heartbeat_secs,
        trained_alone=trained_alone,
    )
    lifetime.begin()
    return coordination, lifetime


def _tell(line: str) -> None:
    sys.stderr.write(line)
    sys.stderr.flush()
