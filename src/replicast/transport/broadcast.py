"""The transport between hosts: TensorFlow's broadcast between them, shared memory within each.

A failed collective aborts all collectives of the job, training included. So nothing is sent before every
leader has reserved space, and there is one decision whether to send, which all leaders follow:

```
 leader of the source's host       other leaders                    all other workers
 check the digest                  reserve space                      │
   │      ◄── "room", or a refusal ── answer                          │
   ├── decision: send, or refused ──►│ ─────────────────────────────► │
 send chunk by chunk ══════════════► write chunk by chunk             │
   │                                 "here" ────────────────────────► │
 its own arrays                    map, check the digest            map, check the digest
```
A leader that times out writes the decision "refused" itself. The key of the decision can be written only
once, so all leaders follow the same decision.

A leader deletes its keys of a parcel when it releases the parcel. The sending leader deletes the decision: it
must find the decision for as long as it may still start to send.
"""

from __future__ import annotations

import itertools
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from msgspec.structs import replace

from replicast.errors import JobFailed, UpdateRefused
from replicast.mapped_memory import ALIGNMENT, Bytes
from replicast.tensorfiles import Array
from replicast.transport.base import Inspect, Parcel, no_inspection
from replicast.transport.shared import HostsTransport, SharedFile

IN_FLIGHT = 4  # The number of chunks in flight: while one is copied, others are sent.
TRANSFER_SECS = 600.0  # The timeout of a transfer that has started. Long, because a timeout ends the job.
# Above all keys of other transfers: those start at 100, 100 million and 500 million, and count up.
FIRST_KEY = 1_000_000_000
_LAST_KEY = 2**31 - 1
_BLOCK = 1024  # The number of keys, and so the maximum number of chunks, of one parcel.
_FIRST_GROUP = 1_000_000_000  # TensorFlow numbers its own groups from 1.
_sent = itertools.count()  # Per process, as the keys are: a script may have several transports.


class BroadcastTransport(HostsTransport):
    chunk_bytes = 16 << 20

    def publish(self, parcel_id: str, arrays: Sequence[Array], *, to_read: bool = False) -> Parcel:
        if self._rank == self._leader:
            self._own_keys[parcel_id] = ("decision",)
        return super().publish(parcel_id, arrays, to_read=to_read)

    def receive(self, parcel: Parcel, timeout_secs: float, inspect: Inspect = no_inspection) -> list[Array]:
        until = time.monotonic() + timeout_secs
        sender = self._leaders[self._hosts[parcel.source]]
        if sender != self._leader:
            parcel = replace(parcel, memory="")  # only the source's host uses it again
        if self._rank == sender:
            self._own_keys[parcel.id] = ("decision",)
            return self._receive_and_send(parcel, timeout_secs, until, inspect)
        if self._rank == self._leader:
            self._own_keys[parcel.id] = (f"room/{self._rank}", f"here/{self._rank}")
            self._receive_for_host(parcel, timeout_secs, until, sender)
        else:
            self._heard(parcel, "decision", sender, timeout_secs, until)
            if self._leader != sender:
                self._heard(parcel, f"here/{self._leader}", self._leader, timeout_secs, until)
        return self._shared.receive(parcel, max(0.0, until - time.monotonic()), inspect)

    def _receive_and_send(
        self, parcel: Parcel, timeout_secs: float, until: float, inspect: Inspect
    ) -> list[Array]:
        try:
            arrays = self._shared.receive(parcel, timeout_secs, inspect)
            for leader in self._leaders.values():
                if leader != self._rank:
                    self._heard(parcel, f"room/{leader}", leader, timeout_secs, until)
        except UpdateRefused as refusal:
            self._decide(parcel, {"refused": refusal.to_json()})
            raise
        leaders = tuple(self._leaders.values())
        block = self._decide(parcel, {"block": next_block(self._rank, leaders)})
        # TensorFlow may still read the bytes after the send has returned, when the arrays may already be
        # changed. So the send has its own mapping, which is never written to.
        self._transfer(parcel, block, partial(_send, self._shared.mapped(parcel, 0.0)))
        return arrays

    def _receive_for_host(self, parcel: Parcel, timeout_secs: float, until: float, sender: int) -> None:
        try:
            file = self._shared.reserve(parcel.nbytes)
        except UpdateRefused as refusal:
            self._tell(parcel, f"room/{self._rank}", {"refused": refusal.to_json()})
            raise
        try:
            self._tell(parcel, f"room/{self._rank}", {})
            try:
                block = int(self._heard(parcel, "decision", sender, timeout_secs, until)["block"])
            except UpdateRefused as refusal:
                block = self._decide(parcel, {"refused": refusal.to_json()})
            self._transfer(parcel, block, partial(_receive, file))
            self._shared.complete(parcel.id, file)
        except BaseException:
            file.remove()
            raise
        self._tell(parcel, f"here/{self._rank}", {})

    def _decide(self, parcel: Parcel, decision: dict[str, Any]) -> int:
        """Writes the decision unless one exists, and follows the one that holds: the keys, or a refusal."""
        if self._tell(parcel, "decision", decision) and "block" in decision:
            return int(decision["block"])
        return int(self._heard(parcel, "decision", 0, 10.0, time.monotonic() + 10.0)["block"])  # it exists

    def _transfer(self, parcel: Parcel, block: int, move: Callable[[int, int, dict[str, Any]], None]) -> None:
        import tensorflow as tf

        leaders = tuple(self._leaders.values())
        group = {
            "group_size": len(leaders),
            "group_key": group_key(leaders),
            "timeout_seconds": TRANSFER_SECS,
        }
        ranges = chunk_ranges(parcel.nbytes, self.chunk_bytes)
        with ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="replicast-broadcast") as threads:
            moves = [
                threads.submit(move, start, stop, {**group, "instance_key": key})
                for (start, stop), key in zip(ranges, instance_keys(block, len(ranges)), strict=True)
            ]
            try:
                for moved in moves:
                    moved.result()
            except tf.errors.OpError as error:
                raise JobFailed(
                    f"The transfer of an update between hosts failed: {error.message}. "
                    "See the workers' logs for the first error."
                ) from error


def _send(data: Bytes, start: int, stop: int, collective: dict[str, Any]) -> None:
    import tensorflow as tf

    # TensorFlow's broadcast does not support uint8; it does not change 64-bit integers.
    integers = data[start:stop].view(np.int64)
    with tf.device("CPU:0"):
        chunk = tf.experimental.dlpack.from_dlpack(integers.__dlpack__())
        tf.raw_ops.CollectiveBcastSendV2(input=chunk, **collective)


def _receive(file: SharedFile, start: int, stop: int, collective: dict[str, Any]) -> None:
    import tensorflow as tf

    with tf.device("CPU:0"):
        chunk = tf.raw_ops.CollectiveBcastRecvV2(shape=[(stop - start) // 8], T=tf.int64, **collective)
    file.buffer[start:stop] = np.asarray(memoryview(chunk)).view(np.uint8)


def group_key(leaders: tuple[int, ...]) -> int:
    """The key of the group of these workers. TensorFlow requires that equal groups have equal keys."""
    return _FIRST_GROUP + zlib.crc32(repr(leaders).encode()) % (_LAST_KEY - _FIRST_GROUP)


def chunk_ranges(nbytes: int, chunk_bytes: int) -> list[tuple[int, int]]:
    """The range of bytes of each chunk; at most as many chunks as a parcel has keys."""
    smallest = -(-nbytes // _BLOCK // ALIGNMENT) * ALIGNMENT
    size = max(chunk_bytes, smallest)
    return [(start, min(start + size, nbytes)) for start in range(0, nbytes, size)]


def next_block(rank: int, leaders: tuple[int, ...]) -> int:
    """A block of keys that no other transfer of these leaders uses: each leader has its own numbers."""
    return next(_sent) * len(leaders) + leaders.index(rank)


def instance_keys(block: int, count: int) -> list[int]:
    """One key for each chunk of the parcel to which this block of keys belongs."""
    blocks = (_LAST_KEY - FIRST_KEY) // _BLOCK
    first = FIRST_KEY + block % blocks * _BLOCK
    return [first + number for number in range(count)]
