"""Whatever is in the place of a journal file, readers report or skip it, and never hang."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from replicast.core.entries import Committed, Payload
from replicast.errors import FileDamaged
from replicast.storage.claims import Fence
from replicast.storage.journal import FileJournal
from replicast.storage.updates import committed_updates, has_promised, load_update
from replicast.strictjson import _seal_of, sealed, unsealed
from replicast.update.update import Update

UPDATE = Update(id="u1").scale("x", 2.0)


def made_run(run: Path) -> Path:
    """A run with one update; gives the file of its record."""
    fence = Fence(run, attempt=0)
    journal, digest = FileJournal(run, fence), UPDATE.content_digest()
    journal.write(Payload("u1", digest, None), UPDATE)
    journal.write(Committed(1, "u1", digest, 10, 0))
    return fence.directory.as_path() / "000002.committed.json"


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def link(path: Path) -> None:
    path.symlink_to(path.with_name("000001.payload.json"))


def folder(path: Path) -> None:
    path.mkdir()


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


@pytest.mark.parametrize("put", [pipe, device, link, folder, huge], ids=lambda put: put.__name__)
def test_what_is_no_plain_file_of_bounded_size_is_damage(tmp_path: Path, put: Callable[[Path], None]) -> None:
    path = made_run(tmp_path)
    path.unlink()
    put(path)
    with pytest.raises(FileDamaged, match=r"000002\.committed\.json"):
        committed_updates(tmp_path)
    with pytest.raises(FileDamaged, match=r"000002\.committed\.json"):
        has_promised(tmp_path, "u1")


def resealed(body: bytes) -> bytes:
    """The bytes of a JSON object with the seal that fits them."""
    return body.removesuffix(b"\n}\n") + _seal_of(body)


@pytest.mark.parametrize(
    "line",
    [
        b'"step": NaN',
        b'"step": 1e999',
        b'"step": 1' + b"0" * 40,
        b'"step": 10.0',
        b'"step": true',
        b'"step": null',
        b'"step": "10"',
        b'"step": ' + b"[" * 100 + b"]" * 100,
        b'"step": 10,\n "step": 10',
    ],
    ids=lambda line: line[:30].decode(),
)
def test_an_entry_with_another_value_is_damage_although_its_seal_is_right(
    tmp_path: Path, line: bytes
) -> None:
    path = made_run(tmp_path)
    body = sealed(unsealed(path.read_bytes()))
    body = body[: body.index(b',\n "seal"')] + b"\n}\n"
    assert body.count(b'"step": 10') == 1
    path.write_bytes(resealed(body))
    assert len(committed_updates(tmp_path)) == 1
    path.write_bytes(resealed(body.replace(b'"step": 10', line)))
    with pytest.raises(FileDamaged, match=r"000002\.committed\.json"):
        committed_updates(tmp_path)


@pytest.mark.parametrize("put", [pipe, device, folder, huge], ids=lambda put: put.__name__)
def test_what_lies_in_the_place_of_an_index_is_done_without(
    tmp_path: Path, put: Callable[[Path], None]
) -> None:
    path = made_run(tmp_path)
    put(path.with_name("000002.index.jsonl"))
    assert load_update(tmp_path, 1).id == "u1"


@pytest.mark.parametrize("put", [pipe, device, folder, huge], ids=lambda put: put.__name__)
def test_what_lies_in_the_place_of_a_payload_is_damage(tmp_path: Path, put: Callable[[Path], None]) -> None:
    path = made_run(tmp_path).with_name("000001.safetensors")
    path.unlink()
    put(path)
    with pytest.raises(FileDamaged, match=r"000001\.safetensors"):
        load_update(tmp_path, 1)
    assert len(committed_updates(tmp_path)) == 1
