"""Digests of what passes by in pieces: the same as `replicast.update.digest` gives for whole arrays."""

from __future__ import annotations

from collections.abc import Mapping

import xxhash

from replicast.update.schema import Variable


class PassingDigest:
    """The digest of one variable whose bytes come piece by piece, in row-major order."""

    def __init__(self, variable: Variable) -> None:
        self._hasher = xxhash.xxh3_128(f"{variable.dtype}{list(variable.shape)}".encode())

    def update(self, piece: bytes | memoryview) -> None:
        """Takes the next bytes."""
        self._hasher.update(piece)

    def hexdigest(self) -> str:
        """What `digest_array` would give for all bytes so far."""
        return self._hasher.hexdigest()


def digest_of_digests(digests: Mapping[str, str]) -> str:
    """What `digest_state` would give for the variables that have these digests."""
    hasher = xxhash.xxh3_128()
    for name in sorted(digests):
        encoded = name.encode()
        hasher.update(len(encoded).to_bytes(8, "little") + encoded)
        hasher.update(bytes.fromhex(digests[name]))
    return hasher.hexdigest()
