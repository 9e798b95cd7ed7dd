"""The transport between hosts: a chain of hosts over TCP, shared memory within each.

The lowest rank of each host is its leader. Leaders stand on a ring in the order of their ranks; for a parcel,
the ring is cut before its source's host. Each leader but the first fetches the parcel from the one before it,
segment by segment, and serves the next one with what it has: each link carries the bytes once, and the last
host has them a few segments after the second one, however many are between.

```
 source's host            next host                 last host
 publish, verify
 [0][1][2][3] ──[2]──►    [0][1] ──[1]──►           [0]            all at the same time
```
A segment is verified before it is served. What is missing after a connection broke is asked for again. A
host that has to refuse says why, and the hosts after it repeat that; the hosts before it have the parcel.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
from msgspec.structs import replace

from replicast.coordination import Coordination
from replicast.errors import JobFailed, UpdateRefused
from replicast.transport.base import Inspect, Parcel, Transport, not_arrived
from replicast.transport.chain_server import Server
from replicast.transport.fetch import Fetch
from replicast.transport.holdings import Holdings
from replicast.transport.keys import leaders_of, predecessor
from replicast.transport.link import ChainLink
from replicast.transport.mirrors import Mirrors
from replicast.transport.segments import segments_of
from replicast.transport.shared import SharedMemoryTransport
from replicast.transport.shared_file import SharedFile

# A leader gives up by this part of the time earlier, so that others of its host hear the reason in time.
MARGIN = 0.05
MARGIN_SECS = 0.5  # At least by so much, but not by more than half of the time.


@dataclass(frozen=True, slots=True)
class Ends:
    """A leader's two ends of the chain: what it serves, to the next host, and from where it fetches."""

    holdings: Holdings
    server: Server
    link: ChainLink

    def close(self) -> None:
        self.link.close()
        self.server.close()
        self.holdings.clear()


class ChainTransport(Transport):
    def __init__(
        self,
        shared: SharedMemoryTransport,
        coordination: Coordination,
        rank: int,
        hosts: tuple[str, ...],
        name: str,
        ends: Ends | None,
    ) -> None:
        self._shared = shared
        self._coordination = coordination
        self._rank = rank
        self._hosts = hosts
        self._name = name
        self._ends = ends
        self._mirrors = Mirrors(shared)
        self._leaders = leaders_of(hosts)
        self._leader = self._leaders[hosts[rank]]
        self._is_alone = hosts.count(hosts[rank]) == 1
        self._told: set[str] = set()

    def publish(self, parcel_id: str, arrays: Sequence[npt.NDArray[Any]], *, to_read: bool = False) -> Parcel:
        return self._shared.publish(parcel_id, arrays, to_read=to_read)

    def receive(
        self, parcel: Parcel, timeout_secs: float, inspect: Inspect = lambda *_: None
    ) -> list[npt.NDArray[Any]]:
        until = time.monotonic() + timeout_secs
        is_source_host = self._hosts[parcel.source] == self._hosts[self._rank]
        if self._ends is None:
            if not is_source_host:
                parcel = self._heard(parcel, timeout_secs)
        elif is_source_host:
            return self._receive_and_serve(self._ends, parcel, timeout_secs, inspect)
        else:
            parcel = self._receive_for_host(self._ends, parcel, timeout_secs)
        return self._shared.receive(parcel, max(0.0, until - time.monotonic()), inspect)

    def release(self, parcel_id: str, *, reuse: bool = False) -> None:
        if self._ends is not None:
            self._ends.holdings.remove(parcel_id)
        self._mirrors.release(parcel_id)
        self._shared.release(parcel_id, reuse=reuse)
        if parcel_id in self._told:
            self._told.discard(parcel_id)
            with contextlib.suppress(JobFailed):
                self._coordination.delete(self._key(parcel_id))

    def close(self) -> None:
        if self._ends is not None:
            self._ends.close()
        self._mirrors.close()
        self._shared.close()

    def _receive_and_serve(
        self, ends: Ends, parcel: Parcel, timeout_secs: float, inspect: Inspect
    ) -> list[npt.NDArray[Any]]:
        try:
            descriptor = self._shared.descriptor(parcel, timeout_secs)
            ends.holdings.add(parcel.id, descriptor, segments_of(parcel), arrives_from=None)
            return self._shared.receive(parcel, timeout_secs, inspect)
        except UpdateRefused as refusal:
            ends.holdings.remove(parcel.id, refusal)
            raise

    def _receive_for_host(self, ends: Ends, parcel: Parcel, timeout_secs: float) -> Parcel:
        """Fetches a parcel and tells the other workers of this host; returns it as it is named here."""
        try:
            memory = self._fetch(ends, parcel, _leaders_secs(timeout_secs))
        except UpdateRefused as refusal:
            ends.holdings.remove(parcel.id, refusal)
            self._tell(parcel.id, {"refused": refusal.to_json()})
            raise
        self._tell(parcel.id, {"memory": memory})
        return replace(parcel, memory=memory)

    def _fetch(self, ends: Ends, parcel: Parcel, timeout_secs: float) -> str:
        """Returns the name of the memory, if that is used again."""
        if not (parcel.to_read and parcel.memory):
            file = self._shared.reserve(parcel.nbytes)
            try:
                self._fetch_into(ends, parcel, file, timeout_secs)
                self._shared.complete(parcel.id, file)
            except BaseException:
                file.remove()
                raise
            return ""
        mirror = self._mirrors.reserve(parcel)
        try:
            self._fetch_into(ends, parcel, mirror.file, timeout_secs)
            self._mirrors.complete(mirror)
        except BaseException:
            self._mirrors.release(parcel.id, keep=False)
            raise
        return mirror.name

    def _fetch_into(self, ends: Ends, parcel: Parcel, file: SharedFile, timeout_secs: float) -> None:
        before = predecessor(tuple(self._leaders.values()), self._rank)
        ends.holdings.add(parcel.id, file.descriptor(), segments_of(parcel), arrives_from=before)
        Fetch(
            parcel,
            file.buffer,
            ends.link,
            rank=self._rank,
            predecessor=before,
            arrived=lambda segment: ends.holdings.arrived(parcel.id, segment),
            waits=lambda worker: ends.holdings.waits_for(parcel.id, worker),
        ).run(timeout_secs)

    def _tell(self, parcel_id: str, value: dict[str, Any]) -> None:
        if not self._is_alone:
            self._told.add(parcel_id)
            self._coordination.put(self._key(parcel_id), json.dumps(value))

    def _heard(self, parcel: Parcel, timeout_secs: float) -> Parcel:
        """Waits until the leader of this host has the parcel; returns it as it is named here."""
        text = self._coordination.get(self._key(parcel.id), timeout_secs)
        if text is None:
            raise not_arrived(parcel, timeout_secs, self._rank, self._leader)
        value = json.loads(text)
        if "refused" in value:
            raise UpdateRefused.from_json(value["refused"])
        return replace(parcel, memory=value["memory"])

    def _key(self, parcel_id: str) -> str:
        return f"replicast/transport/{self._name}/{parcel_id}/here/{self._leader}"


def _leaders_secs(timeout_secs: float) -> float:
    return timeout_secs - min(timeout_secs / 2, max(MARGIN_SECS, MARGIN * timeout_secs))
