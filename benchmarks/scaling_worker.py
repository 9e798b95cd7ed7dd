"""One host of `benchmarks.scaling`, without TensorFlow: takes part in transfers, which worker 0 times."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.runner import Array
from replicast import Update
from replicast.codec import decode, encode
from replicast.coordination import DirectExchange
from replicast.transport import ChainTransport, Parcel, open_transport
from tests.hosts.transfer import FileCoordination

WAIT_SECS = 120.0
ARRAY_BYTES = 2_000_000
"""As in the other questions: 100 MB in 50 variables. An array of this size is one block."""
ROWS, COLUMNS = 200_000, 64
"""The embedding whose updates are compared."""


def content(what: str) -> list[Array]:
    """What is sent: so many bytes, or one of the ways to change an embedding of 51 MB."""
    if what.isdigit():
        return [np.ones(ARRAY_BYTES // 4, np.float32) for _ in range(int(what) // ARRAY_BYTES)]
    random = np.random.default_rng(0)
    rows = np.sort(random.choice(ROWS, 1000, replace=False))
    values = random.standard_normal((ROWS, COLUMNS), np.float32)
    update = Update()
    if what == "add":
        update = update.add("embedding/embeddings", values)
    elif what == "add_low_rank":
        update = update.add_low_rank("embedding/embeddings", values[:, :8], values[:8])
    elif what == "add_rows":
        update = update.add_rows("embedding/embeddings", rows, values[rows])
    else:  # changed only: the bias and the learning rate of the model, and nothing else
        update = update.add("dense/bias", values[0]).assign("optimizer/learning_rate", np.float32(0.001))
    return update.content()


class Host:
    """One worker."""

    def __init__(self, rank: int, size: int, directory: Path) -> None:
        self._rank = rank
        self._size = size
        self._keys = FileCoordination(directory)
        self._transport = open_transport(DirectExchange(self._keys, "scaling", rank, size), os.environ, 60.0)
        assert isinstance(self._transport, ChainTransport)

    def transfer(self, name: str, what: str) -> tuple[int, float]:
        """One transfer: its bytes, and the seconds until the last host had them."""
        if self._rank == 0:
            self._keys.put(
                f"{name}/parcel", encode(self._transport.publish(name, content(what), to_read=True))
            )
        parcel: Parcel = decode(self._keys.get(f"{name}/parcel", WAIT_SECS) or "")
        self._meet(f"{name}/begin", 0.0)
        began = time.monotonic()
        self._transport.receive(parcel, WAIT_SECS)
        times = self._meet(f"{name}/end", time.monotonic() - began)
        self._transport.release(parcel.id, reuse=True)
        return parcel.nbytes, max(times)

    def close(self) -> None:
        self._meet("close", 0.0)
        self._transport.close()

    def _meet(self, name: str, mine: float) -> list[float]:
        self._keys.put(f"{name}/{self._rank}", str(mine))
        found = [self._keys.get(f"{name}/{rank}", WAIT_SECS) for rank in range(self._size)]
        return [float(text or "nan") for text in found]


def main(rank: int, size: int, directory: Path, kinds: list[str], rounds: int) -> None:
    host = Host(rank, size, directory)
    figures: dict[str, Any] = {}
    for what in kinds:
        turns = [host.transfer(f"{what}-{number}", what) for number in range(rounds + 1)]
        figures[what] = {"nbytes": turns[0][0], "secs": [secs for _, secs in turns[1:]]}  # the first warms up
    host.close()
    if rank == 0:
        sys.stdout.write(json.dumps(figures))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4].split(","), int(sys.argv[5]))
