"""What tests do to the lines of a group's log."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from replicast import codec

Damage = Callable[[bytes], bytes]


def log_of(run: Path, group: int = 1) -> Path:
    return run / "groups" / f"{group:06d}" / "log.jsonl"


def lines_of(run: Path, group: int = 1) -> list[bytes]:
    """The lines of a log; the claim is the first."""
    return log_of(run, group).read_bytes().splitlines(keepends=True)


def kind_of(line: bytes) -> str:
    return str(json.loads(line)["entry"]["type"]).lower()


def number_of(run: Path, kind: str, group: int = 1) -> int:
    """The only line of this kind."""
    kinds = [kind_of(line) for line in lines_of(run, group)]
    assert kinds.count(kind) == 1, kinds
    return kinds.index(kind)


def damage(run: Path, which: str | int, how: Damage, group: int = 1) -> int:
    """Damages a line of the log; gives its number."""
    number = number_of(run, which, group) if isinstance(which, str) else which
    lines = lines_of(run, group)
    lines[number] = how(lines[number])
    log_of(run, group).write_bytes(b"".join(lines))
    return number


def flip(line: bytes) -> bytes:
    return line[: len(line) // 2] + bytes([line[len(line) // 2] ^ 1]) + line[len(line) // 2 + 1 :]


def cut(line: bytes) -> bytes:
    return line[:-9] + b"\n"


def remove(_line: bytes) -> bytes:
    return b""


def split(line: bytes) -> bytes:
    return line[:20] + b"\n" + line[20:]


def join(line: bytes) -> bytes:
    """Without its end: it takes the next line with it."""
    return line[:-1]


def sealed(body: bytes) -> bytes:
    """A line with the seal that fits it; the body is a JSON object."""
    return codec.sealed(body)[0]


def rewritten(**fields: Any) -> Damage:
    """Changes fields of the entry, and makes the seal fit."""

    def rewrite(line: bytes) -> bytes:
        read = json.loads(line)
        del read["seal"]
        read["entry"] |= fields
        return sealed(json.dumps(read, separators=(",", ":"), ensure_ascii=False).encode())

    return rewrite
