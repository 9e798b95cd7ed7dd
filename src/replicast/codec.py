"""How values become bytes, and bytes values: records of our own, and JSON that anybody may have written.

A record is an immutable msgspec struct: one definition is the Python type, the message between processes, and
the line on disk. Encoded, it carries the name of its class as `type`, so that a field of any type, such as
the answer to an order, is decoded as what it was. Nothing but records, enums, numbers, text and containers of
them is encoded, and only records are created when decoding.

JSON has one way to be written, one strict way to be read, and a checksum (seal).
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, Self, TypeVar, dataclass_transform

import msgspec

_Described = TypeVar("_Described")

MAX_DEPTH = 64
MAX_INTEGER = 2**64

_TYPES: dict[str, type[Record]] = {}


@dataclass_transform(frozen_default=True)
class Record(msgspec.Struct, frozen=True, tag=True):
    """Base class of immutable records. `msgspec.structs.replace` makes a changed copy."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.__name__ in _TYPES:
            raise TypeError(f"Two records have the name {cls.__name__}: one could be decoded as the other")
        _TYPES[cls.__name__] = cls


def encode(value: Any) -> str:
    """Encodes a record, or a list of records, as one line of text.

    MessagePack and not JSON, which has no NaN: a loss that is not a number must arrive as such. A tuple in a
    field of type `Any` is decoded as a list.
    """
    try:
        packed = msgspec.msgpack.encode(value, enc_hook=_refused)
    except UnicodeEncodeError:
        packed = msgspec.msgpack.encode(_escaped(msgspec.to_builtins(value, enc_hook=_refused)))
    return base64.b64encode(packed).decode("ascii")


def json_line(value: Any) -> bytes:
    """Encodes a record as JSON, with the names of classes. A number that is not finite becomes null."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        plain = msgspec.to_builtins(value, enc_hook=msgspec.json.decode)  # the hook is for `msgspec.Raw`
        return msgspec.json.encode(_escaped(plain))


def _escaped(value: Any) -> Any:
    """Text that is not valid Unicode, as in the error of a file with such a name, is escaped."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_escaped(name): _escaped(one) for name, one in value.items()}
    return [_escaped(one) for one in value] if isinstance(value, list | tuple) else value


def decode(text: str) -> Any:
    try:
        return _revived(msgspec.msgpack.decode(base64.b64decode(text, validate=True)))
    except ValueError as error:  # a record with other fields, or no record at all
        raise ValueError(f"Not a message ({error}). Received: {text[:200]}") from error


def _refused(value: Any) -> Any:
    raise TypeError(f"A message cannot contain this type. Received: {type(value).__name__}")


def _revived(value: Any) -> Any:
    """From the inside out: what a record contains is already what it was."""
    if isinstance(value, list):
        return [_revived(one) for one in value]
    if not isinstance(value, dict):
        return value
    fields = {name: _revived(one) for name, one in value.items()}
    name = fields.get("type")
    kind = _TYPES.get(name) if isinstance(name, str) else None  # other values may have a `type` too
    return fields if kind is None else msgspec.convert(fields, kind)


# JSON of files and messages.


def json_bytes(value: object) -> bytes:
    """JSON as it is written to files: sorted keys, one per line, so that equal values have equal bytes."""
    text = json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
    # Text that is not valid Unicode, as in file names, is escaped.
    return text.encode(errors="backslashreplace")


def parse_json(text: str | bytes) -> Any:
    """Parses JSON strictly: no duplicate names, no NaN, no absurdly large numbers, no deep nesting."""
    try:
        value = json.loads(
            text,
            object_pairs_hook=_without_doubles,
            parse_constant=_finite,
            parse_int=parse_integer,
            parse_float=_finite,
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    _check_depth(value)
    return value


def parse_object(text: str | bytes) -> dict[str, Any]:
    value = parse_json(text)
    if not isinstance(value, dict):
        raise ValueError(f"it must hold a JSON object. Received: {type(value).__name__}")
    return value


def parse_integer(text: str) -> int:
    """The integer that a text gives in decimal: a number in JSON, an argument of a command, part of a URL.

    Stricter than `int`, which takes spaces, underscores and digits of other scripts, needs quadratic time,
    and raises or not at 4,300 digits, as the process is set up.
    """
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()):
        raise ValueError(f"{text[:30]!r} is not an integer")
    if len(digits) > len(str(MAX_INTEGER)) or int(digits) > MAX_INTEGER:
        raise ValueError(f"the integer {text[:30]} is too large")
    return int(text)


def is_integer(text: str, least: int, most: int) -> bool:
    with contextlib.suppress(ValueError):
        return least <= parse_integer(text) <= most
    return False


def sealed(body: bytes) -> tuple[bytes, str]:
    """A JSON object as a line that ends with its checksum, the seal; and the seal."""
    seal = hashlib.sha256(body).hexdigest()
    return body[:-1] + _sealing(seal), seal


def sealed_json(value: object) -> bytes:
    """The content of a file that is read by people too, with its seal."""
    return sealed(json_bytes(value).rstrip())[0]


def unsealed(line: bytes) -> tuple[bytes, str]:
    body = line[:-_SEAL_BYTES] + b"}"
    seal = hashlib.sha256(body).hexdigest()
    if line[-_SEAL_BYTES:] != _sealing(seal):
        raise ValueError("its checksum does not match its content: it was changed after it was written")
    return body, seal


def _sealing(seal: str) -> bytes:
    return f',"seal":"{seal}"}}\n'.encode()


_SEAL_BYTES = len(_sealing("0" * 64))


def described(
    kind: type[_Described], what: str, fields: Mapping[str, Any], *, strict: bool = True
) -> _Described:
    """Creates a record from the fields of a JSON object; types are checked, and converted only if not strict.

    A field whose type is neither a dataclass nor a struct is read by the `from_json` method of its type.
    """
    with reading(what, fields):
        return msgspec.convert(
            fields, kind, strict=strict, str_keys=True, dec_hook=lambda type_, value: type_.from_json(value)
        )


def check_format(expected: int, what: str, fields: Mapping[str, Any]) -> None:
    if (found := fields.get("format")) != expected:
        must = f"This version of replicast reads format {expected} of {what}. Use the version that wrote it"
        raise ValueError(f"{must}. Received: {found!r}")


class View(msgspec.Struct, frozen=True):
    """What a run tells: the same fields in Python, as JSON, and over HTTP."""

    def to_json(self) -> dict[str, Any]:
        return fields_of(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Reads what `to_json` wrote; raises ValueError if the fields do not describe it."""
        return described(cls, cls.__name__, fields, strict=False)  # A number that is not finite is text.


def fields_of(record: msgspec.Struct) -> dict[str, Any]:
    """The fields as JSON values, without those that are unset."""
    fields = ((name, getattr(record, name)) for name in record.__struct_fields__)
    return {name: json_value(value) for name, value in fields if value is not msgspec.UNSET}


def json_value(value: Any) -> Any:
    """Any part of a result as a JSON value; numbers that are not finite become text."""
    match value:
        case float():
            return value if math.isfinite(value) else str(value)
        case dict():
            return {str(name): json_value(one) for name, one in value.items()}
        case list() | tuple():
            return [json_value(one) for one in value]
        case _ if hasattr(value, "to_json"):
            return value.to_json()
        case msgspec.Struct():
            return fields_of(value)
        case _:
            return value


@contextlib.contextmanager
def reading(what: str, fields: Mapping[str, Any]) -> Iterator[None]:
    """Turns any error about the fields of a JSON object into one ValueError that shows them."""
    try:
        yield
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError, msgspec.ValidationError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ValueError(f"Not a valid {what}: {why}. Received: {str(fields)[:200]}") from error


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name appears twice in one object")
    return made


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:30]} is too large, or not a number")
    return value


def _check_depth(value: Any) -> None:
    """Checks the nesting level by level: a recursion would fail on exactly the input it must detect."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for parent in level
            if isinstance(parent, dict | list)
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
