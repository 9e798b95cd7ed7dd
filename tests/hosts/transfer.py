"""One worker that takes part in one transfer, without TensorFlow. RANK, SIZE and DIRECTORY are its arguments.

Workers share a directory for their keys. It says what it has received, or why not, as one line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import uuid
from pathlib import Path

import numpy as np

from replicast.codec import decode, encode
from replicast.coordination import Coordination, DirectExchange, Loss
from replicast.errors import UpdateRefused
from replicast.transport import chain, open_transport
from replicast.transport.chain import Holdings

MEGABYTES = 4
ARRAYS = 6
TIMEOUT_SECS = 10.0


class FileCoordination(Coordination):
    """Keys are files of a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def put(self, key: str, value: str) -> bool:
        written = self._directory / uuid.uuid4().hex
        written.write_text(value)
        try:
            os.link(written, self._path(key))
        except FileExistsError:
            return False
        finally:
            written.unlink()
        return True

    def get(self, key: str, timeout_secs: float) -> str | None:
        until = time.monotonic() + timeout_secs
        while True:
            with contextlib.suppress(FileNotFoundError):
                return self._path(key).read_text()
            if time.monotonic() >= until:
                return None
            time.sleep(0.001)

    def delete(self, key: str) -> None:
        self._path(key).unlink(missing_ok=True)

    def find_lost(self, size: int) -> Loss | None:
        return None

    def abort(self, message: str) -> None:
        raise NotImplementedError

    def _path(self, key: str) -> Path:
        return self._directory / key.replace("/", "%")


def content() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(0, 256, MEGABYTES << 20, np.uint8) for _ in range(ARRAYS)]


def main(rank: int, size: int, directory: Path) -> None:
    chain.SILENT_SECS = 1.0
    coordination = FileCoordination(directory)
    transport = open_transport(DirectExchange(coordination, "transfer", rank, size), os.environ, 60.0)
    arrived = Holdings.arrived

    def noted(holdings: Holdings, parcel_id: str, here: int) -> None:
        arrived(holdings, parcel_id, here)
        coordination.put(f"arrived/{rank}", "")

    Holdings.arrived = noted  # type: ignore[method-assign]
    if rank == 0:
        coordination.put("parcel", encode(transport.publish("p", content())))
    parcel = decode(coordination.get("parcel", 60.0) or "")
    coordination.put(f"ready/{rank}", "")
    coordination.get("go", 60.0)
    said = {"kind": type(transport).__name__, "refused": "", "intact": False}
    try:
        received = transport.receive(parcel, TIMEOUT_SECS)
        said["intact"] = all(map(np.array_equal, received, content()))
    except UpdateRefused as refusal:
        said["refused"] = str(refusal)
    coordination.put(f"done/{rank}", json.dumps(said))
    coordination.get("end", 60.0)
    transport.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
