"""How a page is served: address, token, limits. Checked before anything listens."""

from __future__ import annotations

import ipaddress
import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from replicast.config import TOKEN
from replicast.errors import ServeRefused

MIN_TOKEN_LENGTH = 16
MAX_UPLOAD_BYTES = 4 * 2**30
MAX_BODY_BYTES = 64 * 1024
MAX_HEADER_BYTES = 16 * 1024
MAX_STREAMS = 256
MAX_JSON_BYTES = 256 * 1024
"""Of the values in one answer as JSON, which takes ten times as much, and holds up others meanwhile."""
MAX_VALUES_BYTES = 256 * 2**20
"""Of the values in one answer as a file, of which there are at most `MAX_FILES` at a time."""
MAX_FILES = 2
MAX_DETAILS_BYTES = 16 * 2**20
"""Of an update whose values are summarized for everybody who may read."""
MAX_EDITS = 20_000
"""In one list of updates."""
ACTIONS_PER_MINUTE = 60
FAILED_TOKENS_PER_MINUTE = 10
_MAX_TOKEN_FILE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a page is served."""

    host: str = "127.0.0.1"
    port: int = 8080
    token: str | None = None
    private: bool = False
    allowed_hosts: tuple[str, ...] = ()
    trusted_proxies: tuple[str, ...] = ()
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
        for proxy in self.trusted_proxies:
            try:
                ipaddress.ip_network(proxy)
            except ValueError as error:
                raise ServeRefused(
                    f"--trusted-proxy expects an address or a network ({error})",
                    remedy="For example: 127.0.0.1, or 10.0.0.0/24",
                ) from error
        if (self.certfile is None) != (self.keyfile is None):
            raise ServeRefused("TLS needs a certificate and its key", remedy="Give --certfile and --keyfile")
        for path in (self.certfile, self.keyfile):
            if path is not None and not os.access(path, os.R_OK):
                raise ServeRefused(f"{path} cannot be read", remedy="Check the path and its permissions")

    def is_proxy(self, peer: str) -> bool:
        """Whether requests of this peer come from a proxy that was named."""
        try:
            address = ipaddress.ip_address(peer)
        except ValueError:
            return False
        # A server that listens on :: sees IPv4 peers as ::ffff:1.2.3.4.
        address = getattr(address, "ipv4_mapped", None) or address
        return any(address in ipaddress.ip_network(proxy) for proxy in self.trusted_proxies)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address, or whether a peer is on this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def read_token(token_file: Path | None, environ: Mapping[str, str]) -> str | None:
    """The token: from a file, which is made when it does not exist, or from the environment."""
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
