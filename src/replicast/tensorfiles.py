"""The safetensors format: tensors by name, written without copying the data, and read defensively.

Everything a header claims is checked against the size of the file before memory is allocated for it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import ml_dtypes
import msgspec
import numpy as np
import numpy.typing as npt

from replicast.errors import FileDamaged
from replicast.files import RunPath, open_plain
from replicast.strictjson import parse_json

Array: TypeAlias = npt.NDArray[Any]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
MAX_BYTES = 4 * 2**30
MAX_HEADER_BYTES = 32 * 2**20
_MAX_DIMENSIONS = 32
_METADATA = "__metadata__"
# How much less than its size a file from outside may take on disk. Not 0: ZFS stores zeros as holes.
_MOST_HOLES_BYTES = 64 * 2**20
# How files begin that somebody may give instead; `update/other_formats.py` reads them.
ZIP, NUMPY, HDF5 = b"PK\x03\x04", b"\x93NUMPY", b"\x89HDF\r\n"
_OTHER_FORMATS = {
    ZIP: "a ZIP archive, as .npz and .keras files are",
    NUMPY: "a NumPy file",
    HDF5: "an HDF5 file",
}
_DTYPES: dict[str, np.dtype[Any]] = {
    **{f"F{8 * size}": np.dtype(f"f{size}") for size in (8, 4, 2)},
    **{f"I{8 * size}": np.dtype(f"i{size}") for size in (8, 4, 2, 1)},
    **{f"U{8 * size}": np.dtype(f"u{size}") for size in (8, 4, 2, 1)},
    "BF16": BFLOAT16,
    "BOOL": np.dtype(np.bool_),
}
_Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorFile:
    metadata: Mapping[str, str]
    tensors: Mapping[str, Array]


def header_of(
    tensors: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, list[str]]:
    """The header of a safetensors file, and the names in the order of their bytes.

    Wide dtypes come first, so that every tensor is aligned to its element size.
    """
    order = sorted(tensors, key=lambda name: -tensors[name][0].itemsize)
    header: dict[str, Any] = {_METADATA: dict(metadata)}
    offset = 0
    for name in order:
        dtype, shape = tensors[name]
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded, order


def tensor_chunks(tensors: Mapping[str, Array], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """Yields the bytes of a safetensors file piece by piece, without copying the arrays."""
    header, order = header_of({name: (one.dtype, one.shape) for name, one in tensors.items()}, metadata)
    yield header
    for name in order:
        if tensors[name].nbytes:
            yield np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8).data


def parse_tensors(content: memoryview, source: str, *, max_tensors: int) -> TensorFile:
    """Parses the bytes of a safetensors file; the tensors are views of these bytes."""
    metadata, entries, first = _layout_of(content, len(content), source, max_tensors)
    data = content[first:]
    return TensorFile(metadata, {name: _tensor(data, entry, source, name) for name, entry in entries.items()})


def loads_strictly(text: str | bytes, source: str, what: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise FileDamaged(source, f"its {what} is not valid JSON ({str(error)[:200]})") from error


class _Entry(msgspec.Struct):
    dtype: Literal[tuple(_DTYPES)]  # type: ignore[valid-type]
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=_MAX_DIMENSIONS)]
    data_offsets: tuple[_Size, _Size]


def _layout_of(
    content: memoryview, nbytes: int, source: str, max_tensors: int
) -> tuple[dict[str, str], dict[str, _Entry], int]:
    """What the header of a file of `nbytes` bytes says: metadata, tensors in order, and where data begins."""
    for beginning, what in _OTHER_FORMATS.items():
        if bytes(content[: len(beginning)]) == beginning:
            raise FileDamaged(source, verdict=f"is {what}, and not a safetensors file")
    length = int.from_bytes(content[:8], "little")
    if nbytes < 8 or length > min(nbytes - 8, MAX_HEADER_BYTES):
        raise FileDamaged(
            source,
            verdict="is not a safetensors file, or is truncated",
            expected=f"a header of at most {MAX_HEADER_BYTES} bytes within the file",
            received=f"{nbytes} bytes that announce a header of {length}"
            if nbytes >= 8
            else f"{nbytes} bytes",
        )
    text = bytes(content[8 : 8 + length])
    # Count before parsing: a parsed empty list takes twenty times the memory of its text. A tensor has three
    # brackets, and so has its edit in the metadata; names and notes may have some too.
    if text.count(b"[") + text.count(b"{") > 6 * max_tensors + 20_000:
        raise FileDamaged(source, verdict="has too many tensors", expected=f"at most {max_tensors}")
    header = loads_strictly(text, source, "header")
    if not isinstance(header, dict):
        raise FileDamaged(source, "its header is not a JSON object", verdict="is not a safetensors file")
    try:
        metadata = msgspec.convert(header.pop(_METADATA, {}), dict[str, str])
        entries = msgspec.convert(header, dict[str, _Entry])
    except msgspec.ValidationError as error:
        raise FileDamaged(source, f"its header is not valid ({error})", received=str(header)[:200]) from error
    entries = dict(sorted(entries.items(), key=lambda one: (one[1].data_offsets, one[0])))
    end = 0
    for name, entry in entries.items():
        start, stop = entry.data_offsets
        size = math.prod(entry.shape) * _DTYPES[entry.dtype].itemsize
        if start != end or stop - start != size:
            raise FileDamaged(
                source,
                f"the bytes of {name!r} overlap others, leave a gap, or do not fit its shape",
                expected=f"data_offsets [{end}, {end + size}]",
                received=str(list(entry.data_offsets)),
            )
        end = stop
    if end != nbytes - 8 - length:
        raise FileDamaged(
            source,
            "it does not have the size given in its header",
            expected=f"{end} bytes of data",
            received=f"{nbytes - 8 - length}",
            remedy="The file may be truncated: write it again",
        )
    return metadata, entries, 8 + length


def _tensor(data: memoryview, entry: _Entry, source: str, name: str) -> Array:
    dtype = _DTYPES[entry.dtype]
    flat = np.frombuffer(data[slice(*entry.data_offsets)], np.uint8)
    if dtype == np.bool_ and flat.size and flat.max() > 1:
        problem = f"the tensor {name!r} has invalid bools"
        raise FileDamaged(source, problem, expected="0 or 1", received=str(flat.max()))
    if flat.size and flat.ctypes.data % dtype.itemsize:
        flat = flat.copy()  # Other writers may not align tensors.
    with _possible_shape(source, name):
        array: Array = flat.view(dtype).reshape(entry.shape)
    array.flags.writeable = False
    return array


@contextlib.contextmanager
def _possible_shape(source: str, name: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise FileDamaged(source, f"the tensor {name!r} has an impossible shape ({error})") from error


def read_tensor_bytes(
    path: RunPath | Path,
    *,
    max_tensors: int,
    max_bytes: int | None = None,
    follow: bool = True,
    holes: bool = True,
    other_formats: bool = False,
    check: Callable[[TensorFile], object] = lambda _outline: None,
) -> memoryview:
    def check_first(descriptor: int, nbytes: int) -> None:
        if not holes:
            _check_holes(path, descriptor, nbytes)
        if other_formats and os.pread(descriptor, 8, 0).startswith(tuple(_OTHER_FORMATS)):
            return
        check(_outline(path.name, max_tensors, descriptor, nbytes))

    return read_bytes(path, max_bytes=max_bytes, follow=follow, check=check_first)


def outline_of(path: RunPath, *, max_tensors: int, max_bytes: int | None = None) -> TensorFile:
    """The metadata and the tensors of a safetensors file in outline, from its header. Links are refused."""
    with _opened(path, follow=False) as (descriptor, nbytes):
        _check_holes(path, descriptor, nbytes)
        return _outline(path.name, max_tensors, descriptor, nbytes, max_bytes)


def read_bytes(
    path: RunPath | Path,
    *,
    max_bytes: int | None = None,
    follow: bool = True,
    check: Callable[[int, int], None] = lambda _descriptor, _nbytes: None,
) -> memoryview:
    """Reads a file into memory that numpy can use in place."""
    limit = MAX_BYTES if max_bytes is None else max_bytes
    with _opened(path, follow=follow) as (descriptor, nbytes):
        if nbytes > limit:
            expected, received = f"at most {limit} bytes", f"{nbytes} bytes"
            raise FileDamaged(path, verdict="is too large", expected=expected, received=received)
        check(descriptor, nbytes)
        content, read = np.empty(nbytes, np.uint8).data, 0
        while read < nbytes and (count := os.readv(descriptor, [content[read:]])):
            read += count
    if read != nbytes:
        raise FileDamaged(
            path,
            verdict="became shorter while it was read",
            expected=f"{nbytes} bytes",
            received=f"{read} bytes",
            remedy="Write it under another name and rename it when it is complete",
        )
    return content


@contextlib.contextmanager
def _opened(path: RunPath | Path, *, follow: bool) -> Iterator[tuple[int, int]]:
    """Opens a user's file: its descriptor and its size. Errors become `FileDamaged`."""
    try:
        try:
            descriptor = open_plain(path, follow=follow)
        except ValueError as error:  # No file can have such a name.
            raise OSError(None, str(error)) from error
        try:
            yield descriptor, os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
    except OSError as error:
        raise FileDamaged(path, error.strerror or str(error), verdict="cannot be read") from error


def _outline(
    source: str, max_tensors: int, descriptor: int, nbytes: int, most: int | None = None
) -> TensorFile:
    """What the header says of the tensors; each is an array of its shape and dtype that takes no memory."""
    announced = 8 + min(int.from_bytes(os.pread(descriptor, 8, 0), "little"), MAX_HEADER_BYTES)
    if most is not None and announced > most:
        raise FileDamaged(source, verdict="is too large", expected=f"a header of at most {most} bytes")
    begin = memoryview(os.pread(descriptor, announced, 0))
    metadata, entries, _ = _layout_of(begin, nbytes, source, max_tensors)
    tensors = dict[str, Array]()
    for name, entry in entries.items():
        with _possible_shape(source, name):
            tensors[name] = np.broadcast_to(np.zeros((), _DTYPES[entry.dtype]), entry.shape)
    return TensorFile(metadata, tensors)


def _check_holes(path: RunPath | Path, descriptor: int, nbytes: int) -> None:
    """Refuses a file that costs its reader far more than its author: 4 GiB may take 4 KiB on disk."""
    on_disk = 512 * os.fstat(descriptor).st_blocks
    # The size on disk alone would also refuse files that are compressed, not yet written back, or on a file
    # system that does not tell it. Where holes are not told either, the first one is at the end.
    if nbytes - on_disk <= _MOST_HOLES_BYTES:
        return
    has_holes = os.lseek(descriptor, 0, os.SEEK_HOLE) < nbytes
    os.lseek(descriptor, 0, os.SEEK_SET)
    if has_holes:
        raise FileDamaged(
            path,
            verdict="has holes",
            expected=f"{nbytes} bytes on disk",
            received=f"{on_disk} bytes on disk",
            remedy="Write all bytes (cp --sparse=never); instead of many zeros, send the rows that change",
        )
