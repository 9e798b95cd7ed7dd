"""Records: one definition is the Python type, the message between processes, and the line on disk.

A record is an immutable msgspec struct. Encoded, it carries the name of its class as `type`, so that a
field of any type, such as the answer to an order, is decoded as what it was. Nothing but records, enums,
numbers, text and containers of them is encoded, and only records are created when decoding.
"""

from __future__ import annotations

import base64
from typing import Any, dataclass_transform

import msgspec

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
