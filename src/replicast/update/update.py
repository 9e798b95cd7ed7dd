"""An update: an ordered, immutable list of edits with an id, an author and a note."""

from __future__ import annotations

import contextlib
import json
import operator
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct

from replicast.codec import json_value
from replicast.errors import FileDamaged, UpdateRefused
from replicast.files import RunDir, RunPath, write_durably
from replicast.mapped_memory import copied
from replicast.update.digest import blocks_of, digest_block, digest_of_blocks, name_of
from replicast.update.edits import DTYPES, FLOAT_DTYPES, RESETS, Array, Edit, EditKind, refused
from replicast.update.tensorfiles import (
    MAX_TENSORS,
    TensorFile,
    Variables,
    edits_of_adapter,
    loads_strictly,
    parse_tensors,
    read_tensor_bytes,
    tensor_chunks,
    tensors_in,
)

# The parts of an update, built and checked from user input: values, JSON, plain tensors.

MAX_EDITS_IN_FILE = MAX_TENSORS // 2
MAX_STEP = 2**63  # a larger number could be written into the journal, and not be read again
MAX_TEXT = 10_000
_MAX_NAME = 1_000
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
FORMAT = 1
_METADATA = "replicast"
_LABELS = ("id", "author", "note")


def checked_id(value: Any) -> str:
    """Checks that an id can be used as a file's name."""
    if not isinstance(value, str) or _ID.fullmatch(value) is None:
        expected = "up to 100 of A-Z a-z 0-9 . _ -, beginning with a letter or digit"
        raise UpdateRefused("The id is not valid", expected=expected, received=repr(value)[:200])
    return str.__str__(value)


def checked_text(what: str, value: Any, most: int = MAX_TEXT) -> str:
    """Checks that a text can be stored. What is more than a `str`, such as numpy's, becomes one."""
    if not isinstance(value, str) or len(value) > most:
        received = f"{len(value)} characters" if isinstance(value, str) else type(value).__name__
        raise UpdateRefused(
            f"The {what} cannot be used", expected=f"text of at most {most} characters", received=received
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UpdateRefused(f"The {what} is not valid Unicode", received=ascii(value)[:200]) from error
    return str.__str__(value)


def checked_integer(value: Any, below: int, problem: str, expected: str = "an integer of 0 or more") -> int:
    """Checks a number that an author chose. What is more than an `int`, such as numpy's, becomes one."""
    number = -1
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            number = operator.index(value)
    if not 0 <= number < below:
        raise UpdateRefused(problem, expected=expected, received=repr(value)[:200])
    return number


def checked_step(value: Any, problem: str = "at_step must be a number of steps") -> int | None:
    """Checks that a number can be a step. Whether it is past, only the coordinator knows."""
    return None if value is None else checked_integer(value, MAX_STEP, problem)


def edit_from_values(operation: EditKind, variable: Any, factor: Any, values: Mapping[str, Any]) -> Edit:
    name = _checked_name(variable)
    arrays: dict[str, Array] = {}
    loose: dict[str, bool] = {}
    for key, value in values.items():
        arrays[key], loose[key] = _array_of(name, value)
        if key == "indices" and loose.pop(key) and arrays[key].size == 0:
            arrays[key] = arrays[key].astype(np.int64)  # The dtype of an empty list cannot be inferred.
    if any(loose.values()) and not all(loose.values()):
        dtype = next(arrays[key].dtype for key, is_loose in loose.items() if not is_loose)
        arrays |= {key: cast_loose(name, arrays[key], dtype) for key, is_loose in loose.items() if is_loose}
        loose = {}
    for array in arrays.values():
        array.flags.writeable = False
    if operation.has_factor != (factor is not None):
        expected = "a number" if operation.has_factor else "none"
        raise refused(name, f"The factor does not fit {operation}", expected, repr(factor)[:200])
    if factor is not None:
        array, _ = _array_of(name, factor)
        if array.size != 1 or array.ndim > 1:
            raise refused(name, "The factor must be a scalar", received=f"an array of shape {array.shape}")
        factor = float(array.astype(np.float64).reshape(-1)[0])
    return Edit(operation, name, arrays, factor, any(loose.values()))


def cast_loose(variable: str, array: Array, dtype: np.dtype[Any]) -> Array:
    """Casts Python numbers to the dtype of a variable."""
    if array.dtype == dtype:
        return array
    if (array.dtype == np.bool_) != (dtype == np.bool_) and array.size:
        raise refused(variable, "The values have the wrong dtype", dtype.name, array.dtype.name)
    with np.errstate(all="ignore"):
        cast = np.asarray(array.astype(dtype))
        if name_of(dtype) in FLOAT_DTYPES:
            wrong = np.isinf(cast.astype(np.float64)) & np.isfinite(array.astype(np.float64))
        else:
            # Casting back is not enough: a number beyond the range may wrap twice and come out the same.
            info = np.iinfo(dtype)
            wrong = (cast.astype(array.dtype) != array) | (array < info.min) | (array > info.max)
    if wrong.any():
        position = tuple(int(index) for index in np.argwhere(wrong)[0])
        expected, received = f"numbers that fit {dtype.name}", f"{array[position]} at {list(position)}"
        raise refused(variable, "A value does not fit the variable", expected, received)
    cast.flags.writeable = False
    return cast


def ordered_arrays(edit: Edit) -> Iterator[tuple[str, Array]]:
    """The arrays of an edit with their names, in the order in which they are written, sent and digested."""
    return ((name, edit.arrays[name]) for name in edit.operation.arrays)


def _array_to_json(array: Array) -> dict[str, Any]:
    """The dtype and shape of an array, which are needed to find it in a buffer."""
    return {"dtype": name_of(array.dtype), "shape": list(array.shape)}


class _DescribedEdit(Struct):
    operation: EditKind
    variable: str
    factor: float | Literal["nan", "inf", "-inf"] | None = None
    loose: bool = False
    arrays: dict[str, Any] = {}


class _DescribedUpdate(Struct):
    """What `Update.describe` returns, and the metadata of its file."""

    id: str
    author: str = ""
    note: str = ""
    reset_slots: bool = False
    allow_nonfinite: bool = False
    edits: Annotated[tuple[_DescribedEdit, ...], Meta(max_length=MAX_EDITS_IN_FILE)] = ()


def _from_description(description: Any, array_of: Callable[[str, Any], Array]) -> Update:
    known_format = description.get("format") if isinstance(description, dict) else None
    if known_format != FORMAT:
        problem, remedy = "This version cannot read the format of the update", "Use the version that wrote it"
        received = repr(known_format)[:200]
        raise UpdateRefused(problem, expected=str(FORMAT), received=received, remedy=remedy)
    try:
        known = msgspec.convert(description, _DescribedUpdate)
    except msgspec.ValidationError as error:
        problem = f"The description of the update is not valid ({error})"
        raise UpdateRefused(problem, received=str(description)[:200]) from error
    edits = []
    for number, edit in enumerate(known.edits):
        operation, variable = edit.operation, _checked_name(edit.variable)
        if (edit.factor is not None) != operation.has_factor or set(edit.arrays) != set(operation.arrays):
            expected = f"arrays {list(operation.arrays)}" + (" and a factor" if operation.has_factor else "")
            received = f"arrays {list(edit.arrays)}, factor {edit.factor}"[:200]
            raise refused(variable, f"Edit {number} is not what {operation} needs", expected, received)
        what = f"The array {{!r}} of edit {number}"
        arrays = {name: array_of(what.format(name), edit.arrays[name]) for name in operation.arrays}
        factor = None if edit.factor is None else float(edit.factor)
        edits.append(Edit(operation, variable, arrays, factor, edit.loose))
    head = {name: getattr(known, name) for name in known.__struct_fields__ if name != "edits"}
    return Update(**head).with_edits(edits)


def update_in(
    content: memoryview, source: str, operation: EditKind | None, weight: float | None, **more: Any
) -> Update:
    """The update in the bytes of a file: a saved one; with an operation, an edit for each of its tensors.

    `more` is for files of other tools (`tensors_in`).
    """
    if operation is None:
        return Update.parse(content, source, remedy="Choose an operation (--add, --assign, …)")[0]
    file = tensors_in(content, source, **more)
    if _METADATA in file.metadata:
        raise UpdateRefused(
            f"{source} is a saved update, which has its own operations",
            expected="a plain file of tensors",
            received="a saved update",
            remedy="Leave the operation out; for replicast push, give it with --update",
        )
    if operation in RESETS:
        raise UpdateRefused("Values cannot be reset from a file", remedy="Use assign, or reset_slots=True")
    if (operation is EditKind.BLEND) != (weight is not None):
        problem = "A blend needs a weight, and no other operation takes one"
        raise UpdateRefused(problem, received=f"{operation}, {weight}")
    rest = dict(file.tensors)
    edits = list[Edit]()
    for name in file.tensors:
        if name not in rest:
            continue
        if operation is EditKind.SCALE:
            edits.append(edit_from_values(operation, name, rest.pop(name), {}))
            continue
        suffixes = {"value": "", "rows": "", "indices": ".indices", "a": ".a", "b": ".b"}
        keys = operation.arrays
        ends = (end for key in keys if (end := suffixes[key]) and name.endswith(end))
        variable = name.removesuffix(next(ends, ""))
        values = {key: rest.pop(variable + suffixes[key], None) for key in keys}
        missing = [variable + suffixes[key] for key, value in values.items() if value is None]
        if missing:
            expected = " and ".join(variable + suffixes[key] for key in keys)
            raise refused(variable, f"A tensor is missing to {operation}", expected, f"no {missing[0]}")
        edits.append(edit_from_values(operation, variable, weight, values))
    return Update().replaced(edits)


def joined(
    parts: Sequence[Update],
    by: str,
    *,
    id: str | None = None,  # noqa: A002 - the name of the thing
    author: str | None = None,
    note: str | None = None,
    reset_slots: bool = False,
    allow_nonfinite: bool = False,
) -> Update:
    """One update of several, in their order; where nothing else is said, with the author and note they have.

    One that is given alone keeps its id. `by` is the author if no part has one.
    """
    kept_id = parts[0].id if len(parts) == 1 and parts[0].id_was_given else None
    blank = Update(
        id=kept_id if id is None else id,
        author=next((part.author for part in parts if part.author), by) if author is None else author,
        note=next((part.note for part in parts if part.note), "") if note is None else note,
        reset_slots=reset_slots or any(part.reset_slots for part in parts),
        allow_nonfinite=allow_nonfinite or any(part.allow_nonfinite for part in parts),
    )
    return blank.with_edits(edit for part in parts for edit in part.edits)


def _checked_name(variable: Any) -> str:
    if variable == "":
        raise UpdateRefused("A variable needs a name", received="''")
    return checked_text("name of a variable", variable, _MAX_NAME)


def _array_of(variable: str, value: Any) -> tuple[Array, bool]:
    """The value as a private row-major array, and whether it was given as Python numbers."""
    loose = isinstance(value, bool | int | float | list | tuple)
    if not loose and not isinstance(value, np.ndarray | np.generic) and not hasattr(value, "__array__"):
        raise refused(variable, "A value is not an array", "numbers", type(value).__name__)
    try:
        array = np.asarray(value)
    except Exception as error:  # A foreign object's conversion may raise anything.
        problem, expected = "A value cannot be converted to an array", "numbers in rows of equal length"
        received = f"{type(value).__name__} ({str(error)[:200]})"
        raise refused(variable, problem, expected, received) from error
    if name_of(array.dtype) not in DTYPES:
        problem = "A value has an unsupported dtype"
        raise refused(variable, problem, "floats, integers or bools", str(array.dtype))
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    owner = array  # of the memory, which no array may write to
    while not owner.flags.writeable and isinstance(owner.base, np.ndarray):
        owner = owner.base
    if not isinstance(value, np.ndarray) or owner.flags.writeable:
        # Even if another object reports read-only memory: it may still write to it itself.
        return copied(array), loose
    return np.asarray(array, order="C").view(), loose


class Update:
    """An ordered list of edits that every replica applies at the same step, or none does.

    Immutable: each method returns a new update with one more edit and the same id. Values may be numpy
    arrays, what converts to one (tensors, Keras variables), or Python numbers and lists, whose dtype follows
    the variable. They are copied, unless they are numpy arrays that are read-only already.

        Update(note="fix drifted bias").add("dense/bias", delta).scale("optimizer/learning_rate", 0.5)

    Args:
        note: Why, for readers of the journal.
        author: Who.
        id: Makes proposing it twice a no-op. Default: each proposal in a training thread gets its own id;
            elsewhere the id is random.
        reset_slots: Also reset the optimizer's slots of the changed variables, such as its moments; if only
            rows are changed, the slots of those rows.
        allow_nonfinite: Accept NaN and infinity as values.

    Attributes:
        edits: The edits, in the order in which they are applied.
        id_was_given: Whether its author has chosen the id.

    Raises:
        UpdateRefused: A value that cannot be part of an update.
    """

    allow_nonfinite: bool
    author: str
    edits: tuple[Edit, ...]
    id: str
    id_was_given: bool
    note: str
    reset_slots: bool

    def __init__(
        self,
        *,
        note: str = "",
        author: str = "",
        id: str | None = None,  # noqa: A002 - the name of the thing
        reset_slots: bool = False,
        allow_nonfinite: bool = False,
    ) -> None:
        self.__dict__.update(
            allow_nonfinite=bool(allow_nonfinite),
            author=checked_text("author", author),
            edits=(),
            id=checked_id(uuid.uuid4().hex if id is None else id),
            id_was_given=id is not None,
            note=checked_text("note", note),
            reset_slots=bool(reset_slots),
        )

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"An update cannot be changed: its methods return a new one. Received: {name}")

    @property
    def nbytes(self) -> int:
        """The size of all arrays."""
        return sum(edit.nbytes for edit in self.edits)

    def __deepcopy__(self, memo: dict[int, Any]) -> Update:
        return self  # immutable

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (b"".join(self.file_chunks()), self.id_was_given)

    def __repr__(self) -> str:
        return f"<Update {self.id}: {len(self.edits)} edits, {self.nbytes} bytes>"

    def add(self, variable: str, value: Any) -> Update:
        """Adds the value to the variable."""
        return self._with(EditKind.ADD, variable, value=value)

    def assign(self, variable: str, value: Any) -> Update:
        """Replaces the variable by the value, bit for bit."""
        return self._with(EditKind.ASSIGN, variable, value=value)

    def scale(self, variable: str, factor: float) -> Update:
        """Multiplies the variable by a scalar."""
        return self._with(EditKind.SCALE, variable, factor)

    def blend(self, variable: str, value: Any, weight: float) -> Update:
        """Interpolates between the variable (weight 0) and the value (weight 1)."""
        return self._with(EditKind.BLEND, variable, weight, value=value)

    def add_rows(self, variable: str, indices: Any, rows: Any) -> Update:
        """Adds to some rows of the variable; each index at most once."""
        return self._with(EditKind.ADD_ROWS, variable, indices=indices, rows=rows)

    def assign_rows(self, variable: str, indices: Any, rows: Any) -> Update:
        """Replaces some rows of the variable, bit for bit; each index at most once."""
        return self._with(EditKind.ASSIGN_ROWS, variable, indices=indices, rows=rows)

    def add_low_rank(self, variable: str, a: Any, b: Any) -> Update:
        """Adds the product of `a`, a column per rank, and `b`, a row per rank, to a matrix."""
        return self._with(EditKind.ADD_LOW_RANK, variable, a=a, b=b)

    def with_id(self, id: str) -> Update:  # noqa: A002 - the name of the thing
        """The same update under another id."""
        return self._changed(id=checked_id(id), id_was_given=True)

    def signed(self, author: str) -> Update:
        """The same update with this author, if it has none."""
        return self if self.author else self.labelled(author, self.note)

    def labelled(self, author: str, note: str) -> Update:
        """The same update by this author and with this note."""
        return self._changed(author=checked_text("author", author), note=checked_text("note", note))

    def replaced(self, edits: Sequence[Edit]) -> Update:
        """The same update with other edits, which are already fully expanded."""
        return self._changed(edits=tuple(edits), reset_slots=False)

    def with_edits(self, edits: Iterable[Edit]) -> Update:
        """The same update with other edits."""
        return self._changed(edits=tuple(edits))

    def arrays(self) -> list[Array]:
        """Every array, edit after edit, in the order that `describe` lists them."""
        return [array for edit in self.edits for _, array in ordered_arrays(edit)]

    def content(self) -> list[Array]:
        """The arrays, and after them as JSON what is done with them: what workers receive and digest.

        Without id, author and note: two updates that do the same have the same content.
        """
        described = {name: value for name, value in self.describe().items() if name not in _LABELS}
        text = json.dumps(described, sort_keys=True, separators=(",", ":"))
        return [*self.arrays(), np.frombuffer(text.encode(), np.uint8)]

    def content_digest(self) -> str:
        """The digest of `content`: equal for two updates that do the same."""
        return digest_of_blocks("".join(digest_block(content) for _, _, content in blocks_of(self.content())))

    @classmethod
    def from_content(cls, id_: str, content: Sequence[Array]) -> Update:
        """The update that `content` came from, under an id. Its arrays are not copied."""
        *arrays, described = content
        rest = iter(arrays)

        def next_array(what: str, spec: Any) -> Array:
            array = next(rest, None)
            if array is None or spec != _array_to_json(array):
                received = "nothing" if array is None else str(_array_to_json(array))
                raise UpdateRefused(f"{what} is not there", expected=str(spec)[:200], received=received)
            return array

        update = _from_description({**json.loads(described.tobytes()), "id": id_}, next_array)
        if next(rest, None) is not None:
            raise UpdateRefused("There are more arrays than described", received=f"{len(arrays)} arrays")
        return update

    def describe(self) -> dict[str, Any]:
        """Everything but the bytes, as JSON values."""
        return self._described(lambda _number, _name, array: _array_to_json(array))

    def save(self, path: Path | str) -> None:
        """Writes the update as a safetensors file: complete and durable, or not at all.

        Raises:
            OSError: It cannot be written there.
        """
        write_durably(Path(path), self.file_chunks())

    def file_chunks(self, extra: Mapping[str, Any] | None = None) -> Iterator[bytes | memoryview]:
        """The bytes of the update's file, piece by piece; `extra` goes into the description."""
        described = self._described(lambda number, name, _: f"{number}.{name}") | dict(extra or {})
        tensors = {
            f"{number}.{name}": array
            for number, edit in enumerate(self.edits)
            for name, array in ordered_arrays(edit)
        }
        return tensor_chunks(tensors, {_METADATA: json.dumps(described, ensure_ascii=False)})

    @classmethod
    def load(cls, path: RunDir, *, max_bytes: int | None = None) -> Update:
        """Reads what `save` wrote, if it has no more than `max_bytes` (4 GiB unless given).

        Raises:
            FileDamaged: The file cannot be read, is damaged, too large, or not an update.
        """
        file = path if isinstance(path, RunPath) else Path(path)
        content = read_tensor_bytes(file, max_bytes=max_bytes)
        return cls.parse(content, str(path))[0]

    @classmethod
    def parse(cls, content: memoryview, source: str, remedy: str = "") -> tuple[Update, dict[str, Any]]:
        """Parses the bytes of an update's file; also returns its description, with any extra entries.

        The arrays are views of `content`. `remedy` is the advice for a file that contains only tensors.
        """
        return cls.of_file(parse_tensors(content, source), source, remedy)

    @classmethod
    def of_file(cls, file: TensorFile, source: str, remedy: str = "") -> tuple[Update, dict[str, Any]]:
        """What `parse` returns; of a file in outline (`outline_of`), an update in outline: without values."""
        if _METADATA not in file.metadata:
            raise FileDamaged(
                source,
                verdict="has only tensors, not the operations of an update",
                expected="a file that Update.save wrote",
                received=f"{len(file.tensors)} tensors without metadata of replicast",
                remedy=remedy or "Say the operation: Update.from_tensors, `replicast push RUN --add FILE`",
            )
        description = loads_strictly(file.metadata[_METADATA], source, "description")
        unused = dict(file.tensors)

        def named_array(what: str, name: Any) -> Array:
            if not isinstance(name, str) or name not in unused:
                raise FileDamaged(source, f"{what} is missing", received=str(name)[:200])
            return unused.pop(name)

        try:
            update = _from_description(description, named_array)
        except UpdateRefused as error:  # The description is not one that `save` wrote.
            expected, received = error.expected, error.received
            raise FileDamaged(
                source, error.problem, expected=expected, received=received, remedy=error.remedy
            ) from error
        if unused:
            received = ", ".join(list(unused)[:5])
            raise FileDamaged(source, "it has tensors that no edit uses", received=received)
        return update, description

    @classmethod
    def from_tensors(
        cls,
        path: Path | str,
        operation: EditKind | str,
        *,
        weight: float | None = None,
        note: str = "",
        author: str = "",
        id: str | None = None,  # noqa: A002 - the name of the thing
        max_bytes: int | None = None,
        schema: Variables | None = None,
    ) -> Update:
        """An update from a plain file of any tool: one edit for each variable it names.

        The file is safetensors, .npz, .npy (one array, named as the file), or .weights.h5 of Keras. Tensors
        are named like their variables. For rows, `name.indices` accompanies `name`; for low rank there are
        `name.a` and `name.b`; for scale, each tensor is a scalar.

        Args:
            path: The file.
            operation: What to do with each.
            weight: The weight of a blend.
            note: Why.
            author: Who.
            id: Random unless given.
            max_bytes: The largest file to read. Default: 4 GiB.
            schema: The variables of the run, for .weights.h5, which has no names of its own:
                `replicas.schema`, or `schema()` of a run.

        Raises:
            FileDamaged: The file cannot be read, is damaged, or too large.
            UpdateRefused: There is no such operation, or the tensors do not fit it.
        """
        try:
            kind = EditKind(operation)
        except ValueError as error:
            one_of = f"one of {', '.join(one for one in EditKind if one not in RESETS)}"
            problem = "There is no such operation"
            raise UpdateRefused(problem, expected=one_of, received=str(operation)) from error
        content = read_tensor_bytes(Path(path), other_formats=True, max_bytes=max_bytes)
        update = update_in(content, str(path), kind, weight, schema=schema, max_bytes=max_bytes)
        return cls(note=note, author=author, id=id).with_edits(update.edits)

    @classmethod
    def from_adapter(
        cls,
        path: Path | str,
        schema: Variables,
        *,
        names: Mapping[str, str] | None = None,
        note: str = "",
        author: str = "",
        id: str | None = None,  # noqa: A002 - the name of the thing
    ) -> Update:
        """An update from a LoRA adapter as PEFT saves it: the product of its factors is added, scaled.

        Args:
            path: The folder with `adapter_config.json` and `adapter_model.safetensors`.
            schema: The variables of the run: `replicas.schema`, or `schema()` of a run.
            names: The variable of each module. Both may have parts in braces, which match one part of a
                module's name: `{"layers.{n}.q_proj": "block_{n}/query/kernel"}`. Default: the name of the
                module with "/" for ".", and "/kernel" or "/embeddings".
            note: Why.
            author: Who.
            id: Random unless given.

        Raises:
            FileDamaged: A file is missing, damaged, too large, or not a LoRA adapter.
            UpdateRefused: Modules have no variable in the schema, or another shape.
        """
        edits = edits_of_adapter(Path(path), schema, names or {})
        return cls(note=note, author=author, id=id).with_edits(edits)

    def _with(self, operation: EditKind, variable: str, factor: Any = None, **values: Any) -> Update:
        return self.with_edits((*self.edits, edit_from_values(operation, variable, factor, values)))

    def _changed(self, **fields: Any) -> Update:
        copy = Update.__new__(Update)
        copy.__dict__.update(self.__dict__ | fields)
        return copy

    def _described(self, describe_array: Callable[[int, str, Array], Any]) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "id": self.id,
            "author": self.author,
            "note": self.note,
            "reset_slots": self.reset_slots,
            "allow_nonfinite": self.allow_nonfinite,
            "edits": [
                {
                    "operation": str(edit.operation),
                    "variable": edit.variable,
                    "factor": json_value(edit.factor),
                    "loose": edit.loose,
                    "arrays": {name: describe_array(at, name, array) for name, array in ordered_arrays(edit)},
                }
                for at, edit in enumerate(self.edits)
            ],
        }


def _unpickled(content: bytes, id_was_given: bool) -> Update:
    update, _ = Update.parse(memoryview(content), "The pickled update")
    return update._changed(id_was_given=id_was_given)
