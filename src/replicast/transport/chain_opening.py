"""Opens the chain of hosts: all leaders listen, each tries the one before it, and worker 0 decides for all.

```
 worker 0        every leader                     every worker
 secret ───────► listen, publish the port
                 connect to the leader before it
        ◄─────── "" or what does not work
 decision ─────────────────────────────────────► chain, or TensorFlow's broadcast
```
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping

from replicast.agreement import Wait
from replicast.config import Cluster, read_cluster
from replicast.coordination import Coordination
from replicast.errors import JobFailed
from replicast.transport.chain import Ends
from replicast.transport.chain_server import Server
from replicast.transport.holdings import Holdings
from replicast.transport.keys import predecessor
from replicast.transport.link import ChainLink

logger = logging.getLogger("replicast")

_CHAIN = "chain"


class ChainOpening:
    def __init__(
        self,
        coordination: Coordination,
        rank: int,
        leaders: tuple[int, ...],
        prefix: str,
        environ: Mapping[str, str],
        timeout_secs: float,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._coordination = coordination
        self._rank = rank
        self._leaders = leaders
        self._prefix = prefix
        self._cluster = read_cluster(environ)
        self._timeout_secs = timeout_secs
        self._wait = Wait(coordination, timeout_secs, self._late, lambda key, worker: check())

    def open(self) -> tuple[bool, Ends | None]:
        """Whether the hosts are a chain: the same on all workers. And this leader's ends of it."""
        if self._rank == 0:
            self._put("secret", secrets.token_hex(32))
        ends = None
        is_chain = False
        try:
            if self._rank in self._leaders:
                ends, problem = self._try()
                self._put(f"reached/{self._rank}", problem)
            if self._rank == 0:
                self._decide()
            is_chain = self._get("decision", 0) == _CHAIN
        finally:
            if not is_chain and ends is not None:
                ends.close()
        return is_chain, ends if is_chain else None

    def _try(self) -> tuple[Ends | None, str]:
        """Listens, and connects to the leader before this one; or what does not work."""
        secret = bytes.fromhex(self._get("secret", 0))
        holdings = Holdings(self._rank)
        server, problem = _listening(self._cluster, self._rank, secret, holdings)
        self._put(f"port/{self._rank}", "" if server is None else str(server.port))
        if server is None or self._cluster is None:
            return None, problem
        before = predecessor(self._leaders, self._rank)
        try:
            port = self._get(f"port/{before}", before)
        except BaseException:
            server.close()
            raise
        host = _host_of(self._cluster, before)
        ends = Ends(holdings, server, ChainLink(host, int(port or 0), secret, self._rank))
        try:
            if port:
                ends.link.give_back(ends.link.take())
        except OSError as error:
            return ends, f"worker {self._rank} cannot reach worker {before} at {host}:{port}: {error}"
        return ends, ""

    def _decide(self) -> None:
        """On worker 0: the chain needs every link of the ring."""
        problems = [
            problem for leader in self._leaders if (problem := self._get(f"reached/{leader}", leader))
        ]
        self._coordination.delete(f"{self._prefix}/secret")  # all leaders have read it
        if problems:
            logger.warning(
                "updates go between the %d hosts by TensorFlow's broadcast, which is slower than direct "
                "connections: %s. Allow TCP connections between the addresses in TF_CONFIG, any port",
                len(self._leaders),
                "; ".join(problems[:3]),
            )
        else:
            logger.info("updates go along a chain of %d hosts, over TCP", len(self._leaders))
        self._put("decision", "; ".join(problems) or _CHAIN)

    def _put(self, what: str, value: str) -> None:
        self._coordination.put(f"{self._prefix}/{what}", value)

    def _get(self, what: str, worker: int) -> str:
        return self._wait.value(f"{self._prefix}/{what}", worker)

    def _late(self, worker: int) -> JobFailed:
        return JobFailed(
            f"Worker {worker} did not connect to the other hosts within {self._timeout_secs:g} s. "
            "See its log.",
            worker=worker,
        )


def _listening(
    cluster: Cluster | None, rank: int, secret: bytes, holdings: Holdings
) -> tuple[Server | None, str]:
    if cluster is None:
        return None, f"worker {rank} has no TF_CONFIG, which would name its address"
    host = _host_of(cluster, rank)
    try:
        return Server(host, secret, holdings), ""
    except OSError as error:
        return None, f"worker {rank} cannot listen at {host}, its address in TF_CONFIG: {error}"


def _host_of(cluster: Cluster, rank: int) -> str:
    return cluster.addresses[rank].rpartition(":")[0].strip("[]")
