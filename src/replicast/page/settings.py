"""How a page is served: address, token, limits. Checked before anything listens."""

from __future__ import annotations

import ipaddress
import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from replicast.errors import ServeRefused

TOKEN = "REPLICAST_TOKEN"
MIN_TOKEN_LENGTH = 16
MAX_UPLOAD_BYTES = 4 * 2**30
MAX_BODY_BYTES = 64 * 1024
MAX_HEADER_BYTES = 16 * 1024
MAX_STREAMS = 256
ACTIONS_PER_MINUTE = 60
FAILED_TOKENS_PER_MINUTE = 10
_MAX_TOKEN_FILE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a page is served.

    Attributes:
        host: The address to listen on.
        port: The port; 0 for any free one.
        token: Needed to act, and to read from another machine; None: neither is possible.
        private: Whether reading from this machine needs the token as well.
        allowed_hosts: Further names by which browsers may call this server, such as that of a proxy.
        certfile: The certificate for TLS.
        keyfile: The key of the certificate.
        max_upload_bytes: The largest file that may be uploaded.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    token: str | None = None
    private: bool = False
    allowed_hosts: tuple[str, ...] = ()
    certfile: Path | None = None
    keyfile: Path | None = None
    max_upload_bytes: int = MAX_UPLOAD_BYTES

    def __post_init__(self) -> None:
        if self.token is not None and len(self.token) < MIN_TOKEN_LENGTH:
            raise ServeRefused(
                f"The token has {len(self.token)} characters",
                remedy=f"Use at least {MIN_TOKEN_LENGTH} random ones; --token-file makes a file of them",
            )
        if self.token is not None and not (self.token.isascii() and self.token.isprintable()):
            raise ServeRefused(
                "The token has characters that a header cannot carry",
                remedy="Use letters and digits; --token-file makes a new file by itself",
            )
        if not is_loopback(self.host) and self.token is None:
            raise ServeRefused(
                f"{self.host} can be reached from other machines",
                remedy=f"Give a token, by --token-file or {TOKEN}, or listen on 127.0.0.1",
            )
        if self.private and self.token is None:
            raise ServeRefused("--private needs a token", remedy=f"Give one by --token-file or {TOKEN}")
        if (self.certfile is None) != (self.keyfile is None):
            raise ServeRefused("TLS needs a certificate and its key", remedy="Give --certfile and --keyfile")
        for path in (self.certfile, self.keyfile):
            if path is not None and not os.access(path, os.R_OK):
                raise ServeRefused(f"{path} cannot be read", remedy="Check the path and its permissions")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address, or whether a peer is on this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def read_token(token_file: Path | None, environ: Mapping[str, str]) -> str | None:
    """The token: from a file, which is made when it does not exist, or from the environment.

    Raises:
        ServeRefused: The file cannot be read or made, or others can read it.
    """
    if token_file is None:
        return environ.get(TOKEN, "").strip() or None
    try:
        if not token_file.exists():
            _make_token_file(token_file)
        status = token_file.stat()
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise ServeRefused(f"Other users may read {token_file}", remedy=f"Run: chmod 600 {token_file}")
        with token_file.open("rb") as file:
            text = file.read(_MAX_TOKEN_FILE_BYTES).decode("ascii", "replace").strip()
    except OSError as error:
        raise ServeRefused(
            f"{token_file} cannot be used as a token file ({error.strerror})",
            remedy="Check the path and its permissions",
        ) from error
    if not text:
        raise ServeRefused(f"{token_file} is empty", remedy="Remove it, and a new one is made")
    return text


def _make_token_file(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_urlsafe(32) + "\n")
