"""One end of a connection between launchers: lines in, lines out, each authenticated. Has no socket.

    both → both     {"replicast": "launchers 1", "nonce": "…", "secret": true}
    afterwards      HMAC-SHA256 of direction, number and text, in hexadecimal, and the text: a JSON object

The key of a connection follows from the secret of the job and both nonces, so that nothing that was sent over
one connection is accepted on another, twice, or in the other direction. Without a secret the key follows from
the nonces alone: then any process that can reach the port can pretend to be a launcher.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import Any

from replicast.config import JOB_SECRET
from replicast.strictjson import parse_object

PROTOCOL = "launchers 1"
MAX_OPENING, MAX_LINE = 1024, 256 * 1024
SAME_SECRET = f"Set {JOB_SECRET}, or the content of --secret-file, to the same text on all hosts"
_ELSE = "Another program, or another version of replicast, uses the port of the launchers"
_SEALED_FROM_SERVER, _SEALED_FROM_CLIENT = b"first", b"other"


class NotAuthentic(ValueError):  # noqa: N818 - reads as a sentence
    """The other side does not know the secret of the job, or is not a launcher of this version."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.remedy = remedy


class Wire:
    """Packs and unpacks the lines of one connection."""

    def __init__(self, secret: bytes, nonce: str, *, is_first: bool) -> None:
        self._secret = secret
        self._nonce = nonce
        self._is_first = is_first
        self._key = b""
        self._buffer = b""
        self._sent = self._received = 0

    @property
    def is_open(self) -> bool:
        """Whether messages can be packed."""
        return bool(self._key)

    def opening(self) -> bytes:
        """The first line to send."""
        fields = {"replicast": PROTOCOL, "nonce": self._nonce, "secret": bool(self._secret)}
        return json.dumps(fields).encode() + b"\n"

    def pack(self, message: dict[str, Any]) -> bytes:
        """The line of a message."""
        text = json.dumps(message, allow_nan=False).encode()
        mine = _SEALED_FROM_SERVER if self._is_first else _SEALED_FROM_CLIENT
        seal = self._seal(mine, self._sent, text)
        self._sent += 1
        return seal + b" " + text + b"\n"

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Takes what has arrived, and returns the complete messages in it."""
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if len(self._buffer) > (MAX_LINE if self._key else MAX_OPENING):
            raise ValueError("a line without an end")
        messages = []
        for line in lines:
            if len(line) > MAX_LINE:
                raise ValueError("a line that is too long")
            if self._key:
                messages.append(self._unpack(line))
            else:
                self._open(line)
        return messages

    def _open(self, line: bytes) -> None:
        try:
            fields = parse_object(line) if len(line) <= MAX_OPENING else {}
        except ValueError:
            fields = {}
        theirs = fields.get("nonce")
        if fields.get("replicast") != PROTOCOL or not isinstance(theirs, str) or len(theirs) < 32:
            raise NotAuthentic("the other side is not a launcher of this version of replicast", _ELSE)
        if theirs == self._nonce:
            raise NotAuthentic("the other side repeats what it was sent", _ELSE)
        if fields.get("secret") is not bool(self._secret):
            has, lacks = ("this host", "the other") if self._secret else ("the other host", "this one")
            raise NotAuthentic(f"{has} has a secret of the job, {lacks} has none", SAME_SECRET)
        first, other = (self._nonce, theirs) if self._is_first else (theirs, self._nonce)
        both = f"{PROTOCOL}\n{first}\n{other}".encode()
        self._key = hmac.digest(self._secret or b"no secret", both, "sha256")

    def _unpack(self, line: bytes) -> dict[str, Any]:
        seal, _, text = line.partition(b" ")
        theirs = _SEALED_FROM_CLIENT if self._is_first else _SEALED_FROM_SERVER
        if not hmac.compare_digest(seal, self._seal(theirs, self._received, text)):
            raise NotAuthentic("the other host has another secret of the job", SAME_SECRET)
        self._received += 1
        return parse_object(text)

    def _seal(self, who: bytes, number: int, text: bytes) -> bytes:
        return hmac.new(self._key, b"%s %d " % (who, number) + text, hashlib.sha256).hexdigest().encode()
