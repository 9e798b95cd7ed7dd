"""Incremental digests, equal to those of `replicast.update.digest` for whole arrays."""

from __future__ import annotations

from collections.abc import Mapping

import xxhash

from replicast.update.schema import Variable


class PassingDigest:
    """The digest of one variable, given its bytes piece by piece in row-major order."""

    def __init__(self, variable: Variable) -> None:
        self._hasher = xxhash.xxh3_128(f"{variable.dtype}{list(variable.shape)}".encode())

    def update(self, piece: bytes | memoryview) -> None:
        """Adds the next bytes."""
        self._hasher.update(piece)

    def hexdigest(self) -> str:
        """The result of `digest_array` for all bytes so far."""
        return self._hasher.hexdigest()


def digest_of_digests(digests: Mapping[str, str]) -> str:
    """The result of `digest_state` for variables with these digests."""
    hasher = xxhash.xxh3_128()
    for name in sorted(digests):
        encoded = name.encode()
        hasher.update(len(encoded).to_bytes(8, "little") + encoded)
        hasher.update(bytes.fromhex(digests[name]))
    return hasher.hexdigest()
