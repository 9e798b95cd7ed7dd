"""Files of tensors: safetensors, written without copying the data, and files of other tools, which are read.

A file is hostile until it is read. What its headers claim is checked against the bytes that there are before
memory is taken for it, the arrays of one file take at most `max_bytes` together, compressed or not, and
nothing is unpickled: an array of objects is refused by its dtype.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any, Literal, Protocol

import msgspec
import numpy as np
from msgspec import Meta, Struct

from replicast.codec import parse_json
from replicast.errors import FileDamaged, UpdateRefused
from replicast.files import RunPath, open_plain
from replicast.update.edits import BFLOAT16, DTYPES, MAX_DIMENSIONS, Array, Edit, EditKind, Variable, grouped

MAX_BYTES = 4 * 2**30
MAX_TENSORS = 200_000  # in one file
MAX_HEADER_BYTES = 32 * 2**20
_METADATA = "__metadata__"
# How much less than its size a file from outside may take on disk. Not 0: ZFS stores zeros as holes.
_MOST_HOLES_BYTES = 64 * 2**20
# How files of other formats begin.
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
_Size = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_OTHER_SIZE = "it does not have the size given in its header"
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


def parse_tensors(content: memoryview, source: str, *, max_tensors: int = MAX_TENSORS) -> TensorFile:
    """Parses the bytes of a safetensors file; the tensors are views of these bytes."""
    metadata, entries, first = _layout_of(content, len(content), source, max_tensors)
    data = content[first:]
    return TensorFile(metadata, {name: _tensor(data, entry, source, name) for name, entry in entries.items()})


def loads_strictly(text: str | bytes, source: str, what: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise FileDamaged(source, f"its {what} is not valid JSON ({str(error)[:200]})") from error


class _Entry(Struct):
    dtype: Literal[tuple(_DTYPES)]  # type: ignore[valid-type]
    shape: Annotated[tuple[_Size, ...], Meta(max_length=MAX_DIMENSIONS)]
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
        verdict = "is not a safetensors file, or is truncated"
        expected = f"a header of at most {MAX_HEADER_BYTES} bytes within the file"
        received = f"{nbytes} bytes" + (f" that announce a header of {length}" if nbytes >= 8 else "")
        raise FileDamaged(source, verdict=verdict, expected=expected, received=received)
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
            problem = f"the bytes of {name!r} overlap others, leave a gap, or do not fit its shape"
            expected, received = f"data_offsets [{end}, {end + size}]", str(list(entry.data_offsets))
            raise FileDamaged(source, problem, expected=expected, received=received)
        end = stop
    if end != nbytes - 8 - length:
        expected, received = f"{end} bytes of data", f"{nbytes - 8 - length}"
        problem, remedy = _OTHER_SIZE, "The file may be truncated: write it again"
        raise FileDamaged(source, problem, expected=expected, received=received, remedy=remedy)
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
    max_tensors: int = MAX_TENSORS,
    max_bytes: int | None = None,
    holes: bool = True,
    other_formats: bool = False,
    check: Callable[[TensorFile], object] = lambda _outline: None,
) -> memoryview:
    with _opened(path) as (descriptor, nbytes):
        _check_total(path, nbytes, MAX_BYTES if max_bytes is None else max_bytes)
        if not holes:
            _check_holes(path, descriptor, nbytes)
        if not (other_formats and os.pread(descriptor, 8, 0).startswith(tuple(_OTHER_FORMATS))):
            check(_outline(path.name, max_tensors, descriptor, nbytes))
        return _read(path, descriptor, nbytes)


def outline_of(path: RunPath, *, max_bytes: int | None = None) -> TensorFile:
    """The metadata and the tensors of a safetensors file in outline, from its header. Links are refused."""
    with _opened(path) as (descriptor, nbytes):
        _check_holes(path, descriptor, nbytes)
        return _outline(path.name, MAX_TENSORS, descriptor, nbytes, max_bytes)


def read_bytes(path: RunPath | Path, *, max_bytes: int) -> memoryview:
    with _opened(path) as (descriptor, nbytes):
        _check_total(path, nbytes, max_bytes)
        return _read(path, descriptor, nbytes)


def _read(path: RunPath | Path, descriptor: int, nbytes: int) -> memoryview:
    """Reads a file into memory that numpy can use in place."""
    content, read = np.empty(nbytes, np.uint8).data, 0
    while read < nbytes and (count := os.readv(descriptor, [content[read:]])):
        read += count
    if read != nbytes:
        verdict, expected, received = "became shorter while it was read", f"{nbytes} bytes", f"{read} bytes"
        remedy = "Write it under another name and rename it when it is complete"
        raise FileDamaged(path, verdict=verdict, expected=expected, received=received, remedy=remedy)
    return content


@contextlib.contextmanager
def _opened(path: RunPath | Path) -> Iterator[tuple[int, int]]:
    """Opens a file, of which links are followed only if a user named it: its descriptor and its size."""
    try:
        try:
            descriptor = open_plain(path, follow=True)
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
        expected, received = f"{nbytes} bytes on disk", f"{on_disk} bytes on disk"
        remedy = "Write all bytes (cp --sparse=never); instead of many zeros, send the rows that change"
        raise FileDamaged(path, verdict="has holes", expected=expected, received=received, remedy=remedy)


# Files of other tools: .npy, .npz, .weights.h5, and folders with a LoRA adapter.

_MAX_NPY_HEADER_BYTES = 10_000  # numpy's own limit
_DEFLATE, _SHUFFLE, _FLETCHER32 = 1, 2, 3  # filters of HDF5 that are part of the library; others are plugins
_DESCR = re.compile(rb"""['"]descr['"]\s*:\s*['"]([<>=|])([a-z])(\d{1,2})['"]""")
_ORDER = re.compile(rb"""['"]fortran_order['"]\s*:\s*(True|False)""")
_SHAPE = re.compile(rb"""['"]shape['"]\s*:\s*\(((?:\s*\d{1,15}\s*,?){0,32})\s*\)""")


class Variables(Protocol):
    """What of a `Schema` is used here: schema.py imports updates, which import this."""

    def __iter__(self) -> Iterator[Variable]: ...
    def find(self, name: str) -> Variable | None: ...
    def resolve(self, name: str) -> Variable: ...


def tensors_in(
    content: memoryview,
    source: str,
    *,
    max_tensors: int = MAX_TENSORS,
    name: str | None = None,
    schema: Variables | None = None,
    max_bytes: int | None = None,
) -> TensorFile:
    """The tensors in the bytes of a file of any known format.

    `name` is that of the one array of a .npy file (default: the file's), `schema` is needed for the weights
    of Keras, which have numbers instead of names.
    """
    limit = MAX_BYTES if max_bytes is None else max_bytes
    beginning = bytes(content[:8])
    if beginning.startswith(NUMPY):
        array = _npy(io.BytesIO(content), len(content), source)
        return TensorFile({}, {Path(source).stem if name is None else name: array})
    if name is not None:
        raise FileDamaged(source, verdict="has names of its own", expected="a .npy file after NAME=")
    if beginning.startswith(ZIP):
        return TensorFile({}, dict(_npz(content, source, max_tensors, limit)))
    if beginning.startswith(HDF5):
        return TensorFile({}, _h5(content, source, max_tensors, limit, schema))
    return parse_tensors(content, source, max_tensors=max_tensors)


def _npy(file: IO[bytes], nbytes: int, source: str) -> Array:
    """Reads one array of `nbytes` bytes, header included.

    The header is the text of a Python dict, which we do not evaluate: three expressions find what it says.
    """
    width = 2 if file.read(8)[6:7] == b"\1" else 4  # by the version
    length = int.from_bytes(file.read(width), "little")
    header = file.read(length) if length <= _MAX_NPY_HEADER_BYTES else b""
    descr, order, shape = (pattern.search(header) for pattern in (_DESCR, _ORDER, _SHAPE))
    if descr is None or order is None or shape is None:
        received = repr(header[:100]) if header else f"a header of {length} bytes"
        # Objects, records and what numpy has no name for, as bfloat16.
        problem = "its header does not describe an array of numbers"
        raise FileDamaged(source, problem, expected="floats, integers or bools", received=received)
    try:
        dtype = np.dtype(f"{descr[1].decode()}{descr[2].decode()}{descr[3].decode()}")
    except TypeError as error:
        raise FileDamaged(source, f"its dtype is unknown ({error})") from error
    sizes = tuple(int(size) for size in re.findall(rb"\d+", shape[1]))
    _check_array(source, sizes, dtype)
    size = math.prod(sizes) * dtype.itemsize
    if size != nbytes - 8 - width - length:
        expected, received = f"{size} bytes of data", f"{nbytes - 8 - width - length}"
        raise FileDamaged(source, _OTHER_SIZE, expected=expected, received=received)
    data = file.read(size)
    if len(data) != size:
        raise FileDamaged(source, verdict="is truncated", expected=f"{size} bytes of data")
    return _frozen(np.frombuffer(data, dtype).reshape(sizes, order="F" if order[1] == b"True" else "C"))


def _check_array(source: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    if dtype.name not in DTYPES or len(shape) > MAX_DIMENSIONS:
        problem, expected = "it has an array of another dtype", "floats, integers or bools"
        raise FileDamaged(source, problem, expected=expected, received=str(dtype)[:100])


def _frozen(array: Array) -> Array:
    array = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="), copy=False)).reshape(array.shape)
    array.flags.writeable = False  # So `Update` does not copy it again.
    return array


def _npz(content: memoryview, source: str, max_tensors: int, limit: int) -> Iterator[tuple[str, Array]]:
    packed = bytes(content)
    # Before zipfile reads the list, of which it believes the length: an entry takes ten times its bytes.
    if packed.count(b"PK\1\2") > max_tensors:
        raise FileDamaged(source, verdict="has too many arrays", expected=f"at most {max_tensors}")
    try:
        with zipfile.ZipFile(io.BytesIO(packed)) as archive:
            entries, found = archive.infolist(), set[str]()
            # A reader of zipfile gives no more than the size that the list has.
            _check_total(source, sum(one.file_size for one in entries), limit)
            for one in entries:
                name = one.filename.removesuffix(".npy")
                if name == one.filename or name in found:
                    expected = "arrays as numpy.savez writes them, each name once"
                    raise FileDamaged(source, expected=expected, received=one.filename[:200])
                if one.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise FileDamaged(source, "its compression is not that of numpy.savez_compressed")
                found.add(name)
                with archive.open(one) as file:
                    yield name, _npy(file, one.file_size, f"{source}: {name}")
    except FileDamaged:
        raise
    except Exception as error:  # zipfile raises whatever its parts do.
        raise FileDamaged(source, str(error)[:200], verdict="is not a valid .npz file") from error


def _h5(
    content: memoryview, source: str, max_tensors: int, limit: int, schema: Variables | None
) -> dict[str, Array]:
    """Every dataset of an HDF5 file, which the HDF5 library parses; nothing outside it is opened."""
    try:
        import h5py
    except ImportError as error:
        remedy = "pip install h5py, or write a .npz or .safetensors file"
        raise FileDamaged(source, "h5py is not installed", verdict="cannot be read", remedy=remedy) from error
    found, layers = dict[str, Array](), dict[str, str]()
    try:
        with h5py.File(io.BytesIO(content), "r") as file:
            groups, seen, total = [("", file)], 0, 0
            while groups:
                path, group = groups.pop()
                for key in group:
                    seen += 1
                    name = f"{path}/{key}" if path else key
                    # Hard links may make a circle, whose names grow until one of the limits.
                    if seen > 4 * max_tensors or name.count("/") > 100:
                        raise FileDamaged(source, verdict="has too many groups")
                    if not isinstance(group.get(key, getlink=True), h5py.HardLink):
                        problem = f"{name!r} is a link, perhaps into another file"
                        raise FileDamaged(source, problem, expected="values in the file itself")
                    one = group[key]
                    if isinstance(one, h5py.Group):
                        groups.append((name, one))
                        if key == "vars" and isinstance(one.attrs.get("name"), str):
                            layers[path] = one.attrs["name"]
                        continue
                    total += _checked_h5(f"{source}: {name}", one)
                    _check_total(source, total, limit)
                    if not name.startswith("optimizer/vars/"):  # Of a compiled model; its steps are not ours.
                        found[name] = _frozen(np.asarray(one[()]))
    except FileDamaged:
        raise
    except Exception as error:  # h5py raises OSError, RuntimeError, KeyError and others, as HDF5 finds it.
        raise FileDamaged(source, str(error)[:200], verdict="is not a valid HDF5 file") from error
    return _with_keras_names(found, layers, source, schema) if layers else found


def _checked_h5(source: str, dataset: Any) -> int:
    """The size of a dataset, whose values lie in the file, and are unpacked by the HDF5 library alone."""
    shape, created = dataset.shape, dataset.id.get_create_plist()
    if shape is None or dataset.is_virtual or dataset.external:
        problem = "it is empty, virtual, or its values lie in another file"
        raise FileDamaged(source, problem, expected="values in the file itself")
    _check_array(source, shape, dataset.dtype)
    size: int = math.prod(shape) * dataset.dtype.itemsize
    filters = {created.get_filter(number)[0] for number in range(created.get_nfilters())}
    if not filters <= {_DEFLATE, _SHUFFLE, _FLETCHER32}:
        raise FileDamaged(source, "it needs a filter that is not part of HDF5", expected="gzip or none")
    if math.prod(dataset.chunks or (0,)) * dataset.dtype.itemsize > 2 * max(size, 2**20):
        raise FileDamaged(source, "its chunks are larger than its values")
    if not filters and dataset.id.get_storage_size() < size:
        raise FileDamaged(source, "its values are not all in the file", expected=f"{size} bytes")
    return size


def _with_keras_names(
    found: Mapping[str, Array], layers: Mapping[str, str], source: str, schema: Variables | None
) -> dict[str, Array]:
    """Tensors by the variables of a run. Keras writes `…/vars/0` for the first variable of a layer.

    Each group has the name of its layer or model. With those above it, it is the path of a layer in the
    model; the outermost names are left out where the variables do not have them.
    """
    if schema is None:
        remedy = "Update.from_tensors(…, schema=run.schema()), or replicast push RUN --assign FILE"
        raise FileDamaged(source, verdict="has Keras weights, whose names depend on the model", remedy=remedy)
    kinds = ("trainable", "non_trainable")  # In this order, within each layer.
    ordered = sorted((one for one in schema if one.kind in kinds), key=lambda one: kinds.index(one.kind))
    of_layer = grouped((one.name.rpartition("/")[0], one.name) for one in ordered)
    named, missing = dict[str, Array](), list[str]()
    for path, array in found.items():
        group, _, number = path.partition("vars/") if path.startswith("vars/") else path.rpartition("/vars/")
        above = group.split("/") if group else []
        parts = [layers.get("/".join(above[:depth])) for depth in range(len(above) + 1)]
        names = [part for part in parts if part is not None]
        variables: list[str] = []
        for start in range(len(names)):
            layer = "/".join(names[start:])
            matches = [one for one in of_layer if f"/{one}".endswith(f"/{layer}")]
            if matches:
                variables = of_layer[matches[0]] if len(matches) == 1 else []
                break
        if number.isdecimal() and int(number) < len(variables) and variables[int(number)] not in named:
            named[variables[int(number)]] = array
        else:
            missing.append("/".join(names) + f", variable {number}")
    if missing:
        listed = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        problem = f"{len(missing)} of {len(found)} of its variables are not in the model"
        raise FileDamaged(source, problem, verdict="does not fit the run", received=listed)
    return named


def _check_total(source: object, nbytes: int, limit: int) -> None:
    if nbytes > limit:
        expected, received = f"at most {limit} bytes", f"{nbytes} bytes"
        raise FileDamaged(source, verdict="is too large", expected=expected, received=received)


# A LoRA adapter as PEFT saves it. For a module whose weight W is (out, in), as torch has it, the file has A
# (rank, in) and B (out, rank), and means W + B A · alpha / rank. Keras' kernel is the transpose of W: it gets
# Aᵀ (Bᵀ · alpha / rank). So do embeddings.

CONFIG, TENSORS, _PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(.+)\.lora_(embedding_)?(A|B)(?:\.weight)?")
_PART = re.compile(r"\{(\w+)\}")
_MAX_CONFIG_BYTES = 2**20
_LISTED = 10


class _Config(Struct):
    """What of the configuration decides what is added."""

    peft_type: str
    lora_alpha: Annotated[float, Meta(gt=0)]
    r: Annotated[int, Meta(ge=1)]
    use_rslora: bool = False
    use_dora: bool = False
    alpha_pattern: dict[str, float] | None = None

    def scale(self, module: str, rank: int) -> float:
        ends = (
            alpha for end, alpha in (self.alpha_pattern or {}).items() if f".{module}".endswith(f".{end}")
        )
        return next(ends, self.lora_alpha) / (rank**0.5 if self.use_rslora else rank)


def edits_of_adapter(folder: Path, schema: Variables, names: Mapping[str, str]) -> tuple[Edit, ...]:
    config = _config(folder)
    path = folder / TENSORS
    if not path.exists() and (folder / _PICKLE).exists():
        remedy = "save_pretrained(…, safe_serialization=True) writes a safetensors file"
        raise FileDamaged(folder / _PICKLE, verdict="is a pickle, which is not read", remedy=remedy)
    file = parse_tensors(read_tensor_bytes(path), str(path))
    factors: dict[tuple[str, bool], dict[str, Array]] = {}
    for name, array in file.tensors.items():
        found = _FACTOR.fullmatch(name)
        if found is None or array.ndim != 2:
            # Biases, modules_to_save, magnitudes of DoRA: without them the update would be another one.
            problem = "it has tensors that are not factors of LoRA"
            expected = "lora_A and lora_B of two dimensions"
            remedy = "Save them apart, and push them with --add or --assign"
            raise FileDamaged(path, problem, expected=expected, received=name[:200], remedy=remedy)
        module = found[1].removeprefix(_PREFIX)
        factors.setdefault((module, found[2] is not None), {})[found[3]] = array
    rules = [(_compiled(pattern), target) for pattern, target in names.items()]
    edits, missing, taken = list[Edit](), list[str](), dict[str, str]()
    for (module, is_embedding), pair in factors.items():
        if len(pair) != 2:
            raise FileDamaged(path, f"{module} has no lora_{'B' if 'A' in pair else 'A'}")
        variable = _variable_of(module, "embeddings" if is_embedding else "kernel", schema, rules)
        if variable is None:
            missing.append(module)
            continue
        if taken.setdefault(variable.name, module) != module:
            problem = f"Two modules of the adapter have this variable: {taken[variable.name]} and {module}"
            raise UpdateRefused(problem, variable=variable.name, remedy="Name the variable of each")
        edits.append(_edit(variable, pair["A"], pair["B"], config.scale(module, pair["A"].shape[0])))
    if missing:
        more = f" and {len(missing) - _LISTED} more" if len(missing) > _LISTED else ""
        raise UpdateRefused(
            f"{len(missing)} of {len(factors)} modules of the adapter are not variables of the run",
            received=", ".join(missing[:_LISTED]) + more,
            remedy="Name their variables, as in --names 'layers.{n}.q_proj=block_{n}/query/kernel'. For the "
            "variables of a run: replicast inspect RUN",
        )
    return tuple(edits)


def _config(folder: Path) -> _Config:
    path = folder / CONFIG
    text = bytes(read_bytes(path, max_bytes=_MAX_CONFIG_BYTES))
    try:
        config = msgspec.convert(loads_strictly(text, str(path), "content"), _Config)
    except msgspec.ValidationError as error:
        raise FileDamaged(path, f"it is not the configuration of a LoRA adapter ({error})") from error
    if config.peft_type != "LORA" or config.use_dora:
        received = "DoRA" if config.use_dora else config.peft_type[:100]
        verdict = "is for another kind of adapter"
        raise FileDamaged(path, verdict=verdict, expected="LORA", received=received)
    for end in config.alpha_pattern or {}:
        if not re.fullmatch(r"[\w.]+", end):  # PEFT would take it as an expression; this one is not ours.
            problem = "alpha_pattern has an expression"
            raise FileDamaged(path, problem, expected="the ends of names", received=end[:200])
    return config


def _compiled(pattern: str) -> re.Pattern[str]:
    """A pattern for modules: `{n}` matches one part of a name, or some of it; what comes before is free."""
    parts = _PART.split(pattern.removeprefix(_PREFIX))
    text = "".join(f"(?P<{part}>[^.]+)" if place % 2 else re.escape(part) for place, part in enumerate(parts))
    try:
        return re.compile(rf"(?:.*\.)?{text}")
    except re.error as error:
        raise UpdateRefused(f"A name has a pattern that is not valid ({error})", received=pattern) from error


def _variable_of(
    module: str, leaf: str, schema: Variables, rules: list[tuple[re.Pattern[str], str]]
) -> Variable | None:
    for pattern, target in rules:
        if (match := pattern.fullmatch(module)) is not None:
            # An author's name that does not exist is an error of its own.
            name = target
            for part, value in match.groupdict().items():
                name = name.replace(f"{{{part}}}", value)
            return schema.resolve(name)
    # The name that a variable may have: the path of the module, or the end of it.
    parts = module.split(".")
    names = ("/".join([*parts[start:], leaf]) for start in range(len(parts)))
    return next((one for name in names if (one := schema.find(name)) is not None), None)


def _edit(variable: Variable, a: Array, b: Array, scale: float) -> Edit:
    dtype = np.dtype(variable.dtype)
    wide = np.dtype("float64" if dtype == np.float64 else "float32")
    left, right = a.T.astype(wide), b.T.astype(wide) * wide.type(scale)
    shape, inputs, outputs = variable.shape, a.shape[1], b.shape[0]
    folds = inputs in [math.prod(shape[:split]) for split in range(1, len(shape))]
    if a.shape[0] == b.shape[1] and len(shape) > 2 and folds and inputs * outputs == math.prod(shape):
        # The kernel of an EinsumDense, as attention has it: inputs or outputs in several dimensions.
        value = (left @ right).reshape(variable.shape).astype(dtype)
        return Edit(EditKind.ADD, variable.name, {"value": _frozen(value)})
    factors = {"a": _frozen(left.astype(dtype)), "b": _frozen(right.astype(dtype))}
    return Edit(EditKind.ADD_LOW_RANK, variable.name, factors)
