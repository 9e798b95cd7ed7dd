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

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from replicast.coordination import Coordination
from replicast.errors import JobFailed, UpdateRefused
from replicast.mapped_memory import Bytes
from replicast.transport.base import Inspect, Parcel, Transport, not_arrived
from replicast.transport.keys import chunk_ranges, group_key, instance_keys, leaders_of, next_block
from replicast.transport.shared import SharedMemoryTransport
from replicast.transport.shared_file import SharedFile

IN_FLIGHT = 4  # The number of chunks in flight: while one is copied, others are sent.
TRANSFER_SECS = 600.0  # The timeout of a transfer that has started. Long, because a timeout ends the job.


class BroadcastTransport(Transport):
    """One worker's end. The lowest rank on each host is its leader."""

    def __init__(
        self,
        shared: SharedMemoryTransport,
        coordination: Coordination,
        rank: int,
        hosts: tuple[str, ...],
        job: str,
        chunk_bytes: int = 16 << 20,
    ) -> None:
        self._shared = shared
        self._coordination = coordination
        self._rank = rank
        self._hosts = hosts
        self._job = job
        self._chunk_bytes = chunk_bytes
        self._leaders = leaders_of(hosts)
        self._leader = self._leaders[hosts[rank]]
        self._own_keys: dict[str, tuple[str, ...]] = {}

    def publish(self, parcel_id: str, arrays: Sequence[npt.NDArray[Any]], *, to_read: bool = False) -> Parcel:
        if self._rank == self._leader:
            self._own_keys[parcel_id] = ("decision",)
        return self._shared.publish(parcel_id, arrays, to_read=to_read)

    def receive(
        self, parcel: Parcel, timeout_secs: float, inspect: Inspect = lambda *_: None
    ) -> list[npt.NDArray[Any]]:
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
            self._follow(self._await_key(parcel, "decision", until, sender, timeout_secs))
            if self._leader != sender:
                self._follow(
                    self._await_key(parcel, f"here/{self._leader}", until, self._leader, timeout_secs)
                )
        return self._shared.receive(parcel, max(0.0, until - time.monotonic()), inspect)

    def release(self, parcel_id: str, *, reuse: bool = False) -> None:
        self._shared.release(parcel_id, reuse=reuse)
        for what in self._own_keys.pop(parcel_id, ()):
            with contextlib.suppress(JobFailed):
                self._coordination.delete(self._key(parcel_id, what))

    def close(self) -> None:
        self._shared.close()

    def _receive_and_send(
        self, parcel: Parcel, timeout_secs: float, until: float, inspect: Inspect
    ) -> list[npt.NDArray[Any]]:
        try:
            arrays = self._shared.receive(parcel, timeout_secs, inspect)
            for leader in self._leaders.values():
                if leader != self._rank:
                    self._follow(self._await_key(parcel, f"room/{leader}", until, leader, timeout_secs))
        except UpdateRefused as refusal:
            self._follow(self._decide(parcel, {"refused": refusal.to_json()}))
            raise
        decision = self._decide(parcel, {"block": next_block(self._rank, tuple(self._leaders.values()))})
        self._follow(decision)
        # TensorFlow may still read the bytes after the send has returned, when the arrays may already be
        # changed. So the send has its own mapping, which is never written to.
        self._transfer(parcel, decision["block"], _sending(self._shared.mapped(parcel, 0.0)))
        return arrays

    def _receive_for_host(self, parcel: Parcel, timeout_secs: float, until: float, sender: int) -> None:
        try:
            file = self._shared.reserve(parcel.nbytes)
        except UpdateRefused as refusal:
            self._publish_key(parcel, f"room/{self._rank}", {"refused": refusal.to_json()})
            raise
        try:
            self._publish_key(parcel, f"room/{self._rank}", {})
            decision = self._decision_of_others(parcel, timeout_secs, until, sender)
            self._follow(decision)
            self._transfer(parcel, decision["block"], _receiving(file))
            self._shared.complete(parcel.id, file)
        except BaseException:
            file.remove()
            raise
        self._publish_key(parcel, f"here/{self._rank}", {})

    def _decision_of_others(
        self, parcel: Parcel, timeout_secs: float, until: float, sender: int
    ) -> dict[str, Any]:
        try:
            return self._await_key(parcel, "decision", until, sender, timeout_secs)
        except UpdateRefused as refusal:
            return self._decide(parcel, {"refused": refusal.to_json()})

    def _decide(self, parcel: Parcel, decision: dict[str, Any]) -> dict[str, Any]:
        """Writes the decision unless one exists; returns the decision that holds."""
        if self._publish_key(parcel, "decision", decision):
            return decision
        return self._await_key(parcel, "decision", time.monotonic() + 10.0, 0, 10.0)  # it exists

    def _transfer(self, parcel: Parcel, block: int, move: Callable[[int, int, int, int, int], None]) -> None:
        ranges = chunk_ranges(parcel.nbytes, self._chunk_bytes)
        group, size = group_key(tuple(self._leaders.values())), len(self._leaders)
        with ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="replicast-broadcast") as threads:
            moves = [
                threads.submit(move, start, stop, size, group, key)
                for (start, stop), key in zip(ranges, instance_keys(block, len(ranges)), strict=True)
            ]
            for moved in moves:
                moved.result()

    def _publish_key(self, parcel: Parcel, what: str, value: dict[str, Any]) -> bool:
        return self._coordination.put(self._key(parcel.id, what), json.dumps(value))

    def _await_key(
        self, parcel: Parcel, what: str, until: float, waited_for: int, timeout_secs: float
    ) -> dict[str, Any]:
        text = self._coordination.get(self._key(parcel.id, what), max(0.0, until - time.monotonic()))
        if text is None:
            raise not_arrived(parcel, timeout_secs, self._rank, waited_for)
        value: dict[str, Any] = json.loads(text)
        return value

    def _key(self, parcel_id: str, what: str) -> str:
        return f"replicast/transport/{self._job}/{parcel_id}/{what}"

    @staticmethod
    def _follow(value: dict[str, Any]) -> None:
        if "refused" in value:
            raise UpdateRefused.from_json(value["refused"])


def _sending(data: Bytes) -> Callable[[int, int, int, int, int], None]:
    import tensorflow as tf

    # TensorFlow's broadcast does not support uint8; it does not change 64-bit integers.
    integers = data.view(np.int64)

    def send(start: int, stop: int, size: int, group: int, key: int) -> None:
        chunk = tf.experimental.dlpack.from_dlpack(integers[start // 8 : stop // 8].__dlpack__())
        with _failing_the_job(), tf.device("CPU:0"):
            tf.raw_ops.CollectiveBcastSendV2(
                input=chunk,
                group_size=size,
                group_key=group,
                instance_key=key,
                timeout_seconds=TRANSFER_SECS,
            )

    return send


def _receiving(file: SharedFile) -> Callable[[int, int, int, int, int], None]:
    import tensorflow as tf

    def receive(start: int, stop: int, size: int, group: int, key: int) -> None:
        with _failing_the_job(), tf.device("CPU:0"):
            chunk = tf.raw_ops.CollectiveBcastRecvV2(
                group_size=size,
                group_key=group,
                instance_key=key,
                shape=[(stop - start) // 8],
                T=tf.int64,
                timeout_seconds=TRANSFER_SECS,
            )
        file.buffer[start:stop] = np.asarray(memoryview(chunk)).view(np.uint8)

    return receive


@contextlib.contextmanager
def _failing_the_job() -> Iterator[None]:
    """Raises errors of TensorFlow as `JobFailed`."""
    import tensorflow as tf

    try:
        yield
    except tf.errors.OpError as error:
        raise JobFailed(
            f"The transfer of an update between hosts failed: {error.message}. "
            "Inspect for the first error in the workers' logs."
        ) from error
