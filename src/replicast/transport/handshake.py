"""Two hosts show each other that they know the secret of the job, without sending it.

```
 host that connects                               host that listens
                    ◄── version, nonce of 32 bytes ──
   rank, nonce, proof of both nonces and the rank ──►   closes the connection if the proof is wrong
                    ◄──────── proof, the other way ──
```
A proof is HMAC-SHA256. Each side has chosen a nonce, so no proof can be used again, and the two directions
differ, so none can be sent back. What follows is neither encrypted nor signed.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time

HANDSHAKE_SECS = 5.0  # All of it, however slowly the other side sends.
_VERSION = b"replicast-chain-1"
_NONCE = 32
_PROOF = 32
_RANK = struct.Struct("!I")


def introduce(
    connection: socket.socket, secret: bytes, rank: int, timeout_secs: float = HANDSHAKE_SECS
) -> None:
    """On the side that connects."""
    ends = time.monotonic() + timeout_secs
    greeting = _receive(connection, len(_VERSION) + _NONCE, ends)
    if not greeting.startswith(_VERSION):
        raise ConnectionError("there is another program, or another version of replicast")
    theirs, mine, name = greeting[len(_VERSION) :], secrets.token_bytes(_NONCE), _RANK.pack(rank)
    connection.sendall(name + mine + _proof(secret, b"connects", theirs, mine, name))
    if not hmac.compare_digest(
        _receive(connection, _PROOF, ends), _proof(secret, b"listens", theirs, mine, name)
    ):
        raise ConnectionError("it does not know the secret of this job")


def admit(connection: socket.socket, secret: bytes) -> int:
    """On the side that listens; returns the rank of the other one."""
    ends = time.monotonic() + HANDSHAKE_SECS
    mine = secrets.token_bytes(_NONCE)
    connection.settimeout(HANDSHAKE_SECS)
    connection.sendall(_VERSION + mine)
    said = _receive(connection, _RANK.size + _NONCE + _PROOF, ends)
    name, theirs, proof = said[: _RANK.size], said[_RANK.size : -_PROOF], said[-_PROOF:]
    if not hmac.compare_digest(proof, _proof(secret, b"connects", mine, theirs, name)):
        raise ConnectionError("wrong secret")
    connection.sendall(_proof(secret, b"listens", mine, theirs, name))
    rank: int = _RANK.unpack(name)[0]
    return rank


def _proof(secret: bytes, role: bytes, listener: bytes, caller: bytes, name: bytes) -> bytes:
    return hmac.digest(secret, role + listener + caller + name, "sha256")


def _receive(connection: socket.socket, count: int, ends: float) -> bytes:
    found = b""
    while len(found) < count:
        connection.settimeout(max(0.001, ends - time.monotonic()))
        data = connection.recv(count - len(found))
        if not data:
            raise ConnectionError("closed by the other side")
        if time.monotonic() >= ends:
            raise TimeoutError("the handshake took too long")
        found += data
    return found
