"""The safetensors format: tensors by name, written without copying the data, and read defensively.

Everything a header claims is checked against the size of the file before memory is allocated for it.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import ml_dtypes
import msgspec
import numpy as np
import numpy.typing as npt

from replicast.errors import FileDamaged
from replicast.strictjson import parse_json

Array: TypeAlias = npt.NDArray[Any]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
MAX_HEADER_BYTES = 32 * 2**20
_MAX_DIMENSIONS = 32
_METADATA = "__metadata__"
# How files begin that somebody may give instead.
_OTHER_FORMATS = {
    b"PK\x03\x04": "a ZIP archive, as .npz and .keras files are",
    b"\x93NUMPY": "a NumPy file",
    b"\x89HDF\r\n": "an HDF5 file",
}
_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": BFLOAT16,
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorFile:
    """The content of a safetensors file."""

    metadata: Mapping[str, str]
    tensors: Mapping[str, Array]


def tensor_chunks(tensors: Mapping[str, Array], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """Yields the bytes of a safetensors file piece by piece, without copying the arrays.

    Wide dtypes come first, so that every tensor is aligned to its element size.
    """
    order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    header: dict[str, Any] = {_METADATA: dict(metadata)}
    offset = 0
    for name in order:
        array = tensors[name]
        end = offset + array.nbytes
        dtype = _DTYPE_NAMES[array.dtype]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    yield len(encoded).to_bytes(8, "little") + encoded
    for name in order:
        if tensors[name].nbytes:
            yield np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8).data


def parse_tensors(content: memoryview, source: str, *, max_tensors: int) -> TensorFile:
    """Parses the bytes of a safetensors file; the tensors are views of these bytes."""
    header, first = _header_of(content, len(content), source, max_tensors)
    metadata, entries = _layout_of(header, len(content) - first, source)
    data = content[first:]
    return TensorFile(metadata, {name: _tensor(data, entry, source, name) for name, entry in entries.items()})


def header_bytes(first: bytes) -> int:
    """The length of the header of a safetensors file according to its first eight bytes, limited."""
    return 8 + min(int.from_bytes(first[:8], "little"), MAX_HEADER_BYTES)


def check_header(begin: bytes, nbytes: int, source: str, *, max_tensors: int) -> TensorFile:
    """Checks the header of a safetensors file before the rest is read."""
    header, first = _header_of(memoryview(begin), nbytes, source, max_tensors)
    metadata, entries = _layout_of(header, nbytes - first, source)
    return TensorFile(metadata, {name: _outline(entry, source, name) for name, entry in entries.items()})


def loads_strictly(text: str | bytes, source: str, what: str) -> Any:
    """Parses JSON of a file with `parse_json`."""
    try:
        return parse_json(text)
    except ValueError as error:
        raise FileDamaged(source, f"its {what} is not valid JSON ({str(error)[:200]})") from error


def _header_of(content: memoryview, nbytes: int, source: str, max_tensors: int) -> tuple[dict[str, Any], int]:
    """The header of a file of `nbytes` bytes, and the offset of the data."""
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
    return header, 8 + length


class _Entry(msgspec.Struct):
    dtype: Literal[tuple(_DTYPES)]  # type: ignore[valid-type]
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=_MAX_DIMENSIONS)]
    data_offsets: tuple[_Size, _Size]


def _layout_of(header: dict[str, Any], nbytes: int, source: str) -> tuple[dict[str, str], dict[str, _Entry]]:
    """The metadata, and the entries of all tensors in the order of their bytes."""
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
    if end != nbytes:
        raise FileDamaged(
            source,
            "it does not have the size given in its header",
            expected=f"{end} bytes of data",
            received=f"{nbytes}",
            remedy="The file may be truncated: write it again",
        )
    return metadata, entries


def _outline(entry: _Entry, source: str, name: str) -> Array:
    try:
        return np.broadcast_to(np.zeros((), _DTYPES[entry.dtype]), entry.shape)
    except ValueError as error:
        raise FileDamaged(source, f"the tensor {name!r} has an impossible shape ({error})") from error


def _tensor(data: memoryview, entry: _Entry, source: str, name: str) -> Array:
    dtype = _DTYPES[entry.dtype]
    flat = np.frombuffer(data[slice(*entry.data_offsets)], np.uint8)
    if dtype == np.bool_ and flat.size and flat.max() > 1:
        problem = f"the tensor {name!r} has invalid bools"
        raise FileDamaged(source, problem, expected="0 or 1", received=str(flat.max()))
    if flat.size and flat.ctypes.data % dtype.itemsize:
        flat = flat.copy()  # Other writers may not align tensors.
    try:
        array: Array = flat.view(dtype).reshape(entry.shape)
    except ValueError as error:
        raise FileDamaged(source, f"the tensor {name!r} has an impossible shape ({error})") from error
    array.flags.writeable = False
    return array


# Files and memory mapped without a file descriptor each and without holding the interpreter's lock.
#
# Python's own `mmap` keeps a descriptor open for as long as the mapping lives. Here a mapping may live as
# long as a variable that was assigned from it, and a model may have more variables than a process
# descriptors.

Bytes = npt.NDArray[np.uint8]

ALIGNMENT = 64  # What TensorFlow asks of memory that it reads in place, or takes over without a copy.
# Copies of this size or larger go into huge pages: three times as fast as page by page.
LARGE_BYTES = 1 << 20

REUSED_BYTES = 1 << 31  # The most memory that is kept for later arrays of the same size.

_READ_AND_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_HUGE_PAGE = 1 << 21
_ADVISE_FREE = 8  # MADV_FREE of Linux
_ADVISE_HUGE_PAGES = 14  # MADV_HUGEPAGE of Linux; has no effect where there are none
_AROUND_BYTES = 1 << 16  # Linux maps this much around a page that is touched, if it is in memory

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value


class _Mapped:
    """The owner of one mapping, which ends with the last array that looks into it."""

    def __init__(self, descriptor: int, nbytes: int, flags: int, access: int = _READ_AND_WRITE) -> None:
        self._unmap = _libc.munmap  # still there when the interpreter ends and has cleared this module
        self._nbytes = nbytes
        self._address = _libc.mmap(None, nbytes, access, flags, descriptor, 0)
        if self._address == _FAILED:
            self._address = None
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))

    def __del__(self) -> None:
        if self._address is not None:
            self._unmap(self._address, self._nbytes)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"data": (self._address, False), "shape": (self._nbytes,), "typestr": "|u1", "version": 3}


class _Reused(_Mapped):
    """Memory of this process in huge pages, which the next array of the same size takes over.

    The system has to find and clear new pages, which takes longer than to fill them. Until the memory is
    taken over, the system may take the pages back if it needs them (MADV_FREE).
    """

    _free: ClassVar[dict[int, deque[int]]] = {}
    _unmap, _madvise = _libc.munmap, _libc.madvise  # as above
    _advice, _most, _queue = _ADVISE_FREE, REUSED_BYTES, deque

    def __init__(self, nbytes: int) -> None:
        try:
            self._address: int | None = self._free[nbytes].pop()
            self._nbytes = nbytes
        except LookupError:  # there is none, or another thread was faster
            super().__init__(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            _libc.madvise(self._address, nbytes, _ADVISE_HUGE_PAGES)

    def __del__(self) -> None:
        if self._address is None:
            return
        kept = sum(size * len(addresses) for size, addresses in list(self._free.items()))
        is_kept = kept + self._nbytes <= self._most
        if is_kept and self._madvise(self._address, self._nbytes, self._advice) == 0:
            self._free.setdefault(self._nbytes, self._queue()).append(self._address)
        else:
            self._unmap(self._address, self._nbytes)


def aligned(nbytes: int) -> int:
    """The number of bytes, rounded up to where the next array may begin."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def map_private(descriptor: int, nbytes: int) -> Bytes:
    """Maps a complete file for this process alone: writes to the array reach neither the file nor others.

    The descriptor may be closed and the file unlinked; the array stays valid. The pages are brought in.
    """
    data = np.asarray(_Mapped(descriptor, nbytes, mmap.MAP_PRIVATE))
    data[::_AROUND_BYTES].sum()
    return data


def map_to_read(descriptor: int, nbytes: int) -> Bytes:
    """Maps a file whose later changes are to be seen. The pages are brought in.

    TensorFlow reads the array in place only if numpy takes it for writable. Do not write to it: the process
    would end.
    """
    data = np.asarray(_Mapped(descriptor, nbytes, mmap.MAP_SHARED, mmap.PROT_READ))
    data[::_AROUND_BYTES].sum()
    return data


def map_shared(descriptor: int, nbytes: int) -> Bytes:
    """Maps a file for writing: writes to the array are in the file. The pages are brought in."""
    return np.asarray(_Mapped(descriptor, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE))


def memory_to_fill(nbytes: int) -> Bytes:
    """Memory of this process with any content, in huge pages where the system has them: faster to fill."""
    rounded = -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE
    return np.asarray(_Reused(rounded))[:nbytes]


def copied(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A row-major copy of the caller's own. A large one is in `memory_to_fill`."""
    if array.nbytes < LARGE_BYTES:
        return np.array(array, order="C")
    copy = memory_to_fill(array.nbytes).view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
