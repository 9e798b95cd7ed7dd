import contextlib
import errno
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from replicast.codec import json_bytes
from replicast.errors import FileDamaged
from replicast.files import make_durably, read_json, remove_leftovers, write_durably, write_quickly
from replicast.update.tensorfiles import parse_tensors, read_bytes, tensor_chunks


def fail_at(monkeypatch: pytest.MonkeyPatch, name: str, call: int, fired: list[str]) -> None:
    """Makes the given call, counted from 0, of a function in `os` fail with a full disk."""
    real: Callable[..., Any] = getattr(os, name)
    count = iter(range(1000))

    def faulty(*args: Any, **kwargs: Any) -> Any:
        if next(count) == call:
            fired.append(name)
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args, **kwargs)

    monkeypatch.setattr(os, name, faulty)


def parse(content: bytes) -> Any:
    return parse_tensors(memoryview(content), "the file", max_tensors=100)


def file_of(header: Any, data: bytes = b"") -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data


@pytest.mark.parametrize(
    ("name", "call", "arrives"),
    [("write", 0, False), ("write", 1, False), ("fsync", 0, False), ("rename", 0, False), ("fsync", 1, True)],
)
@pytest.mark.parametrize("before", [None, b"old"])
def test_a_disk_that_fails_leaves_no_half_file(
    tmp_path: Path, name: str, call: int, arrives: bool, before: bytes | None
) -> None:
    path, fired = tmp_path / "file", []
    if before is not None:
        path.write_bytes(before)
    with pytest.MonkeyPatch.context() as monkeypatch:
        fail_at(monkeypatch, name, call, fired)
        with pytest.raises(OSError, match="No space"):
            write_durably(path, [b"one", b"two"])
    assert fired == [name]
    found = path.read_bytes() if path.exists() else None
    assert found == (b"onetwo" if arrives else before)
    assert [entry for entry in tmp_path.iterdir() if entry != path] == []


@pytest.mark.parametrize("name", ["write", "rename"])
def test_a_quick_write_that_fails_leaves_the_old_file(tmp_path: Path, name: str) -> None:
    path, fired = tmp_path / "file", []
    write_quickly(path, "old")
    with pytest.MonkeyPatch.context() as monkeypatch:
        fail_at(monkeypatch, name, 0, fired)
        with pytest.raises(OSError, match="No space"):
            write_quickly(path, "new")
    assert fired == [name]
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:3]))
    write_durably(tmp_path / "file", [b"0123456789", memoryview(np.arange(3, dtype=np.int32))])
    assert (tmp_path / "file").read_bytes() == b"0123456789" + np.arange(3, dtype=np.int32).tobytes()


def test_chunks_that_fail_leave_nothing(tmp_path: Path) -> None:
    def chunks() -> Any:
        yield b"one"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_durably(tmp_path / "file", chunks())
    assert list(tmp_path.iterdir()) == []


def test_leftovers_are_removed_when_they_are_old(tmp_path: Path) -> None:
    old, young, other = tmp_path / ".tmp-old", tmp_path / ".tmp-young", tmp_path / "kept"
    for path in (old, young, other):
        path.write_text("x")
    os.utime(old, (1, 1))
    remove_leftovers(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([young, other])
    remove_leftovers(tmp_path, older_than_secs=0.0)
    assert list(tmp_path.iterdir()) == [other]
    remove_leftovers(tmp_path / "nowhere")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff", b"[" * 100_000])
def test_json_that_is_no_object_is_damaged(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(FileDamaged, match=r"a\.json") as raised:
        read_json(path)
    assert raised.value.path == path
    with pytest.raises(FileDamaged, match="No such file"):
        read_json(tmp_path / "missing.json")


def test_json_keeps_names_of_files_that_are_no_unicode(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_durably(path, [json_bytes({"name": "é\udc80"})])
    assert read_json(path) == {"name": "é\udc80"}


def test_safetensors_reads_what_we_write_and_we_read_what_it_writes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    dtypes = [
        np.float64,
        np.float32,
        np.float16,
        *(f"{sign}{size}" for sign in "iu" for size in (1, 2, 4, 8)),
        bool,
    ]
    tensors = {f"t/{n}": rng.integers(0, 2, (n, 3)).astype(dtype) for n, dtype in enumerate(dtypes)}
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    write_durably(ours, tensor_chunks(tensors, {"key": "value"}))
    safetensors.numpy.save_file(tensors, theirs, {"key": "value"})
    read = safetensors.numpy.load_file(ours)
    parsed = parse_tensors(read_bytes(theirs, max_bytes=10**6), "theirs", max_tensors=100)
    assert parsed.metadata == {"key": "value"}
    for name, array in tensors.items():
        for other in (read[name], parsed.tensors[name]):
            assert (other.dtype, other.shape) == (array.dtype, array.shape)
            assert other.tobytes() == array.tobytes()
        assert not parsed.tensors[name].flags.writeable


def test_bfloat16_goes_through_both_ways(tmp_path: Path) -> None:
    array = np.array([1.5, -2.0, np.nan]).astype(ml_dtypes.bfloat16)
    content = b"".join(tensor_chunks({"x": array}, {}))
    ((name, entry),) = safetensors.deserialize(content)
    assert (name, entry["dtype"], bytes(entry["data"])) == ("x", "BF16", array.tobytes())
    assert parse(content).tensors["x"].view(np.uint16).tolist() == array.view(np.uint16).tolist()


def test_tensors_start_where_their_elements_may_or_are_copied(tmp_path: Path) -> None:
    tensors = {"a": np.ones(3, np.int8), "b": np.ones(5, np.float64), "c": np.ones(1, np.float16)}
    for array in parse(b"".join(tensor_chunks(tensors, {}))).tensors.values():
        assert array.flags.aligned
    header = {
        "a": {"dtype": "I8", "shape": [1], "data_offsets": [0, 1]},
        "b": {"dtype": "F64", "shape": [1], "data_offsets": [1, 9]},
    }
    assert parse(file_of(header, b"\1" + struct.pack("<d", 2.5))).tensors["b"].tolist() == [2.5]
    assert parse(file_of(header, b"\1" + struct.pack("<d", 2.5))).tensors["b"].flags.aligned


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\1\2\3",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 100) + b"{}",
        file_of(b"[]"),
        file_of(b"null"),
        file_of(b"{"),
        file_of(b"\xff\xfe"),
        file_of(b"[" * 10_000),
        file_of(b"[" * 30_000),
        file_of(b'{"a":[' + b"[]," * 50_000 + b"[]]}"),
        file_of(b'{"a":NaN}'),
        file_of(b'{"a":' + b"9" * 5000 + b"}"),
        file_of(b'{"a":{},"a":{}}'),
        file_of({"x": F32}),
        file_of({"x": F32}, b"\0" * 7),
        file_of({"x": F32}, b"\0" * 9),
        file_of({"x": F32, "y": F32}, b"\0" * 8),
        file_of({"x": F32 | {"data_offsets": [4, 12]}}, b"\0" * 12),
        file_of({"x": F32 | {"data_offsets": [8, 0]}}, b"\0" * 8),
        file_of({"x": F32 | {"data_offsets": [-8, 0]}}, b"\0" * 8),
        file_of({"x": F32 | {"data_offsets": [0, 8, 8]}}, b"\0" * 8),
        file_of({"x": F32 | {"data_offsets": None}}, b"\0" * 8),
        file_of({"x": F32 | {"shape": [3]}}, b"\0" * 8),
        file_of({"x": F32 | {"shape": [-1, -2]}}, b"\0" * 8),
        file_of({"x": F32 | {"shape": [True, 2]}}, b"\0" * 8),
        file_of({"x": F32 | {"shape": [2.0]}}, b"\0" * 8),
        file_of({"x": F32 | {"shape": "2"}}, b"\0" * 8),
        file_of({"x": F32 | {"shape": [2, *[1] * 40]}}, b"\0" * 8),
        file_of({"x": F32 | {"shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}}),
        file_of({"x": F32 | {"dtype": "F8_E4M3"}}, b"\0" * 8),
        file_of({"x": F32 | {"dtype": ["F32"]}}, b"\0" * 8),
        file_of({"x": 3}),
        file_of({"x": {"dtype": "BOOL", "shape": [2], "data_offsets": [0, 2]}}, b"\1\2"),
        file_of({"__metadata__": []}),
        file_of({"__metadata__": {"a": 1}}),
    ],
)
def test_a_file_that_lies_is_refused(content: bytes) -> None:
    with pytest.raises(FileDamaged):
        parse(content)


def test_empty_tensors_and_no_tensors_are_files_too() -> None:
    assert parse(file_of({})).tensors == {}
    empty = parse(b"".join(tensor_chunks({"x": np.zeros((0, 3), np.float32)}, {}))).tensors["x"]
    assert (empty.shape, empty.dtype) == ((0, 3), np.float32)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_read(content: bytes) -> None:
    for attempt in (content, file_of(content)):
        with contextlib.suppress(FileDamaged):  # Any other error would fail the test.
            parse(attempt)


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"0" * 11)
    for path, problem in [
        (tmp_path / "missing", "No such file"),
        (tmp_path, "[Nn]ot a regular file"),
        (tmp_path / "pipe", "[Nn]ot a regular file"),
        (tmp_path / "large", "Expected: at most 10 bytes. Received: 11 bytes"),
        (tmp_path / "nul\0", "cannot be read"),
    ]:
        with pytest.raises(FileDamaged, match=problem):
            read_bytes(path, max_bytes=10)
    assert bytes(read_bytes(tmp_path / "large", max_bytes=11)) == b"0" * 11


def test_a_file_that_shrinks_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"0123")
    real = os.fstat

    def before_it_shrank(descriptor: int) -> Any:
        status = list(real(descriptor))
        status[6] += 4
        return os.stat_result(status)

    monkeypatch.setattr(os, "fstat", before_it_shrank)
    with pytest.raises(FileDamaged, match="became shorter"):
        read_bytes(tmp_path / "file", max_bytes=8)


def test_of_every_directory_that_is_made_the_name_is_synced(tmp_path: Path, synced: list[Path]) -> None:
    make_durably(tmp_path / "runs" / "first")
    assert synced == [tmp_path, tmp_path / "runs"]
    make_durably(tmp_path / "runs" / "first")
    assert len(synced) == 2


def test_a_directory_whose_name_cannot_be_synced_is_not_left_for_the_next_to_trust(tmp_path: Path) -> None:
    fired: list[str] = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        fail_at(monkeypatch, "fsync", 0, fired)
        with pytest.raises(OSError, match="No space"):
            make_durably(tmp_path / "updates")
    assert fired == ["fsync"]
    assert list(tmp_path.iterdir()) == []
