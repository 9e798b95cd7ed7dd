"""An update: an ordered, immutable list of edits with an id, an author and a note."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from replicast.errors import FileDamaged, UpdateRefused
from replicast.files import (
    RunDir,
    RunPath,
    TensorFile,
    loads_strictly,
    parse_tensors,
    read_tensor_bytes,
    tensor_chunks,
    write_durably,
)
from replicast.update.blocks import blocks_of, digest_block, digest_of_blocks
from replicast.update.edits import Array, Edit, EditKind
from replicast.update.parts import (
    MAX_TENSORS,
    array_to_json,
    checked_id,
    checked_text,
    edit_from_values,
    edit_to_json,
    edits_from_json,
    edits_of_tensors,
    head_from_json,
    ordered_arrays,
)

FORMAT = 1
_METADATA = "replicast"
_LABELS = ("id", "author", "note")


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

    Raises:
        UpdateRefused: A value that cannot be part of an update.
    """

    __slots__ = (
        "_allow_nonfinite",
        "_author",
        "_edits",
        "_id",
        "_id_was_given",
        "_note",
        "_reset_slots",
    )

    def __init__(
        self,
        *,
        note: str = "",
        author: str = "",
        id: str | None = None,  # noqa: A002 - the name of the thing
        reset_slots: bool = False,
        allow_nonfinite: bool = False,
    ) -> None:
        self._id = checked_id(uuid.uuid4().hex if id is None else id)
        self._id_was_given = id is not None
        self._note = checked_text("note", note)
        self._author = checked_text("author", author)
        self._reset_slots = bool(reset_slots)
        self._allow_nonfinite = bool(allow_nonfinite)
        self._edits: tuple[Edit, ...] = ()

    @property
    def id(self) -> str:
        """The unique id of this update; kept when edits are added."""
        return self._id

    @property
    def id_was_given(self) -> bool:
        """Whether its author has chosen the id."""
        return self._id_was_given

    @property
    def note(self) -> str:
        """Why it was made."""
        return self._note

    @property
    def author(self) -> str:
        """Who made it."""
        return self._author

    @property
    def reset_slots(self) -> bool:
        """Whether the optimizer's slots of the changed variables are reset too."""
        return self._reset_slots

    @property
    def allow_nonfinite(self) -> bool:
        """Whether NaN and infinity are accepted."""
        return self._allow_nonfinite

    @property
    def edits(self) -> tuple[Edit, ...]:
        """The edits, in the order in which they are applied."""
        return self._edits

    @property
    def nbytes(self) -> int:
        """The size of all arrays."""
        return sum(edit.nbytes for edit in self._edits)

    def __deepcopy__(self, memo: dict[int, Any]) -> Update:
        return self  # immutable

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (b"".join(self.file_chunks()), self._id_was_given)

    def __repr__(self) -> str:
        return f"<Update {self._id}: {len(self._edits)} edits, {self.nbytes} bytes>"

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
        copy = self._copy(self._edits)
        copy._id, copy._id_was_given = checked_id(id), True
        return copy

    def signed(self, author: str) -> Update:
        """The same update with this author, if it has none."""
        return self if self._author else self.labelled(author, self._note)

    def labelled(self, author: str, note: str) -> Update:
        """The same update by this author and with this note."""
        copy = self._copy(self._edits)
        copy._author, copy._note = checked_text("author", author), checked_text("note", note)
        return copy

    def replaced(self, edits: Sequence[Edit]) -> Update:
        """The same update with other edits, which are already fully expanded."""
        return self._copy(tuple(edits), reset_slots=False)

    def arrays(self) -> list[Array]:
        """Every array, edit after edit, in the order that `describe` lists them."""
        return [array for edit in self._edits for _, array in ordered_arrays(edit)]

    def content(self) -> list[Array]:
        """The arrays, and after them as JSON what is done with them: what workers receive and digest.

        Without id, author and note: two updates that do the same have the same content.
        """
        described = {name: value for name, value in self.describe().items() if name not in _LABELS}
        text = json.dumps(described, sort_keys=True, separators=(",", ":"))
        return [*self.arrays(), np.frombuffer(text.encode(), np.uint8)]

    def content_digest(self) -> str:
        """The digest of `content`: equal for two updates that do the same."""
        return digest_of_blocks("".join(digest_block(block.content) for block in blocks_of(self.content())))

    @classmethod
    def from_content(cls, id_: str, content: Sequence[Array]) -> Update:
        """The update that `content` came from, under an id.

        Args:
            id_: The id.
            content: What `content` returned, or views of the same bytes. Kept as they are, without a copy.

        Raises:
            UpdateRefused: It is not the content of an update.
        """
        *arrays, described = content
        return cls.from_parts({**json.loads(described.tobytes()), "id": id_}, arrays)

    def describe(self) -> dict[str, Any]:
        """Everything but the bytes, as JSON values: with `arrays()`, what `from_parts` needs."""
        return self._described(lambda _number, _name, array: array_to_json(array))

    @classmethod
    def from_parts(cls, description: Mapping[str, Any], arrays: Sequence[Array]) -> Update:
        """Rebuilds an update from the output of `describe` and `arrays`.

        Args:
            description: What `describe` returned.
            arrays: What `arrays` returned, or views of the same bytes. Not copied.

        Raises:
            UpdateRefused: They do not belong together, or the description is not valid.
        """
        rest = iter(arrays)

        def next_array(what: str, spec: Any) -> Array:
            array = next(rest, None)
            if array is None or spec != array_to_json(array):
                received = "nothing" if array is None else str(array_to_json(array))
                raise UpdateRefused(f"{what} is not there", expected=str(spec)[:200], received=received)
            return array

        update = _from_description(description, next_array)
        if next(rest, None) is not None:
            raise UpdateRefused("There are more arrays than described", received=f"{len(arrays)} arrays")
        return update

    def save(self, path: Path | str) -> None:
        """Writes the update as a safetensors file: complete and durable, or not at all.

        Raises:
            OSError: It cannot be written there.
        """
        write_durably(Path(path), self.file_chunks())

    def file_chunks(self, extra: Mapping[str, Any] | None = None) -> Iterator[bytes | memoryview]:
        """The bytes of the update's file, piece by piece; `extra` goes into the description."""
        described = self._described(lambda number, name, _: f"{number}.{name}") | dict(
            extra if extra is not None else {}
        )
        tensors = {
            f"{number}.{name}": array
            for number, edit in enumerate(self._edits)
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
        content = read_tensor_bytes(file, max_tensors=MAX_TENSORS, max_bytes=max_bytes)
        return cls.parse(content, str(path))[0]

    @classmethod
    def parse(cls, content: memoryview, source: str, remedy: str = "") -> tuple[Update, dict[str, Any]]:
        """Parses the bytes of an update's file; also returns its description, with any extra entries.

        The arrays are views of `content`. `remedy` is the advice for a file that contains only tensors.

        Raises:
            FileDamaged: The bytes are damaged, or not an update.
        """
        return cls.of_file(parse_tensors(content, source, max_tensors=MAX_TENSORS), source, remedy)

    @classmethod
    def of_file(cls, file: TensorFile, source: str, remedy: str = "") -> tuple[Update, dict[str, Any]]:
        """What `parse` returns; of a file in outline (`outline_of`), an update in outline: without values."""
        if _METADATA not in file.metadata:
            raise FileDamaged(
                source,
                verdict="holds tensors and not what to do with them",
                expected="a file that Update.save wrote",
                received=f"{len(file.tensors)} tensors without metadata of replicast",
                remedy=remedy
                if remedy
                else "Say the operation: Update.from_tensors, `replicast push RUN --add FILE`",
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
            raise FileDamaged(
                source, "it has tensors that no edit uses", received=", ".join(list(unused)[:5])
            )
        return update, description

    @classmethod
    def from_tensors(
        cls,
        path: Path | str,
        operation: EditKind,
        *,
        weight: float | None = None,
        note: str = "",
        author: str = "",
        id: str | None = None,  # noqa: A002 - the name of the thing
        max_bytes: int | None = None,
    ) -> Update:
        """An update from a plain safetensors file of any tool: one edit for each variable it names.

        Tensors are named like their variables. For rows, `name.indices` accompanies `name`; for low rank
        there are `name.a` and `name.b`; for scale, each tensor is a scalar.

        Args:
            path: The file.
            operation: What to do with each.
            weight: The weight of a blend.
            note: Why.
            author: Who.
            id: Random unless given.
            max_bytes: The largest file to read. Default: 4 GiB.

        Raises:
            FileDamaged: The file cannot be read, is damaged, or too large.
            UpdateRefused: Its tensors do not fit the operation.
        """
        content = read_tensor_bytes(Path(path), max_tensors=MAX_TENSORS, max_bytes=max_bytes)
        file = parse_tensors(content, str(path), max_tensors=MAX_TENSORS)
        edits = edits_of_tensors(file.tensors, EditKind(operation), weight)
        return cls(note=note, author=author, id=id)._copy(edits)

    def _with(self, operation: EditKind, variable: str, factor: Any = None, **values: Any) -> Update:
        return self._copy((*self._edits, edit_from_values(operation, variable, factor, values)))

    def _copy(self, edits: tuple[Edit, ...], *, reset_slots: bool | None = None) -> Update:
        copy = Update(
            note=self._note,
            author=self._author,
            id=self._id,
            reset_slots=self._reset_slots if reset_slots is None else reset_slots,
            allow_nonfinite=self._allow_nonfinite,
        )
        copy._edits = edits
        copy._id_was_given = self._id_was_given
        return copy

    def _described(self, describe_array: Callable[[int, str, Array], Any]) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "id": self._id,
            "author": self._author,
            "note": self._note,
            "reset_slots": self._reset_slots,
            "allow_nonfinite": self._allow_nonfinite,
            "edits": [
                edit_to_json(edit, partial(describe_array, number)) for number, edit in enumerate(self._edits)
            ],
        }


def _from_description(description: Any, array_of: Callable[[str, Any], Array]) -> Update:
    head = head_from_json(description, FORMAT)
    return Update(**head)._copy(edits_from_json(description.get("edits"), array_of))


def _unpickled(content: bytes, id_was_given: bool) -> Update:
    update, _ = Update.parse(memoryview(content), "The pickled update")
    update._id_was_given = id_was_given
    return update
