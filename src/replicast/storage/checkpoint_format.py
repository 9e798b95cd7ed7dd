"""The manifest of a checkpoint: where in the training it was made, and the digests of its variables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
from xxhash import xxh3_128

from replicast.core.entries import Saved
from replicast.core.records import Pending
from replicast.errors import CheckpointError
from replicast.files import json_bytes, tensor_chunks
from replicast.strictjson import described, reading
from replicast.update.digest import begun_digest
from replicast.update.edits import BFLOAT16, Array
from replicast.update.schema import Schema, Variable
from replicast.update.update import factor_to_json

FORMAT = 2
MAX_SEQUENCE = 2**24  # The largest to accept: a restart counts up to it, and a file may contain anything.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draft:
    """What the caller knows about a checkpoint before it is written."""

    step: int
    sequence: int = 0
    missing: tuple[int, ...] = ()
    epoch: int
    batch: int
    created_at: float
    workers: int
    attempt: int
    schema: Schema
    pending: tuple[Pending, ...] = ()  # Without their content: the journal has it.
    script: Mapping[str, Any] | None = None
    measured: str = "[]"
    run: str = ""
    line: int = 0
    parent: Mapping[str, Any] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    def known(self) -> dict[str, Any]:
        """What a draft says, by name."""
        return {each.name: getattr(self, each.name) for each in fields(Draft)}

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        metrics = {name: factor_to_json(float(value)) for name, value in self.metrics.items()}
        encoded = msgspec.json.encode(replace(self, metrics={}), enc_hook=_json_of_schema)
        made: dict[str, Any] = msgspec.json.decode(encoded)
        return made | {"metrics": metrics}

    def with_updates(self, saved: Saved) -> Draft:
        """The draft with the updates that the state contains according to the core, and the pending ones."""
        latest = max(saved.holds, default=0)
        missing = tuple(sequence for sequence in range(1, latest) if sequence not in saved.holds)
        pending = tuple(_pending(one, content=None, source=None, proposed_at=0.0) for one in saved.pending)
        return replace(self, sequence=latest, missing=missing, pending=pending)

    def position(self) -> bytes:
        """Everything but the state that determines how training resumes from here, as comparable JSON."""
        names = ("step", "sequence", "missing", "epoch", "batch", "pending", "script", "measured", "line")
        known = self.to_json()
        return json_bytes([known[name] for name in names])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Manifest(Draft):
    """A written checkpoint."""

    digests: Mapping[str, str]
    state_digest: str
    nbytes: int
    format: int = FORMAT

    def __post_init__(self) -> None:
        if not 0 <= self.sequence <= MAX_SEQUENCE:
            raise ValueError(f"sequence must be from 0 to {MAX_SEQUENCE}. Received: {self.sequence}")
        if set(self.digests) != {variable.name for variable in self.schema}:
            raise ValueError("its digests do not match its variables")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Manifest) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash((self.step, self.state_digest))

    def seen_by(self, run: str) -> Manifest:
        """The manifest as valid in a run: update numbers in a copy from another run have no meaning here."""
        if self.run in ("", run):
            return self
        return replace(self, sequence=0, missing=(), pending=())

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Manifest:
        """What `to_json` described."""
        if given.get("format") != FORMAT:
            raise ValueError(
                f"This version of replicast reads format {FORMAT} of a checkpoint. Use the version that "
                f"wrote it. Received: {given.get('format')!r}"
            )
        with reading("manifest", given):
            metrics = {name: float(value) for name, value in given["metrics"].items()}
        return described(cls, "manifest", {**given, "metrics": metrics})


def _json_of_schema(value: object) -> dict[str, Any]:
    if isinstance(value, Schema):
        return value.to_json()
    raise TypeError(f"A checkpoint cannot contain this type. Received: {type(value).__name__}")


def saved_of(manifest: Draft) -> Saved:
    """A checkpoint as the core knows it. Its state is its step."""
    holds = frozenset(range(1, manifest.sequence + 1)) - set(manifest.missing)
    # The content of a payload in the journal is the tuple of its id and digest.
    pending = tuple(_pending(one, content=(one.proposal.id, one.proposal.digest)) for one in manifest.pending)
    return Saved(manifest.step, manifest.attempt, holds, pending, manifest.step)


def _pending(one: Pending, **changes: Any) -> Pending:
    return Pending(msgspec.structs.replace(one.proposal, **changes), one.tickets)


# The layout of `state.safetensors`: a function of the schema, known before a byte is written.
#
# A reader compares the file's header with the expected one and never interprets it: either it is equal to
# the last byte, or the file is damaged.

METADATA = {"replicast": "checkpoint 1"}
_RESERVED = "__metadata__"


@dataclass(frozen=True, slots=True)
class Span:
    """The place of one variable."""

    variable: Variable
    start: int
    nbytes: int

    def hasher(self) -> xxh3_128:
        """For the variable's bytes in row-major order, in pieces: the digest is that of `digest_array`."""
        return begun_digest(dtype_of(self.variable), self.variable.shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """The file of a state."""

    header: bytes
    spans: Mapping[str, Span]
    nbytes: int


def dtype_of(variable: Variable) -> np.dtype[np.generic]:
    """The variable's dtype in numpy."""
    return BFLOAT16 if variable.dtype == "bfloat16" else np.dtype(variable.dtype)


def layout_of(schema: Schema) -> Layout:
    """The layout of the file for a state of this schema."""
    if _RESERVED in schema:
        raise CheckpointError(
            "A variable has a name that safetensors reserves", variable=_RESERVED, remedy="Rename it"
        )
    shapes: dict[str, Array] = {
        variable.name: np.broadcast_to(np.zeros((), dtype_of(variable)), variable.shape)
        for variable in schema
    }
    header = bytes(next(tensor_chunks(shapes, METADATA)))  # Only the header: there are no arrays yet.
    entries = json.loads(header[8:])
    variables = {variable.name: variable for variable in schema}
    spans = {
        name: Span(
            variables[name],
            len(header) + entry["data_offsets"][0],
            entry["data_offsets"][1] - entry["data_offsets"][0],
        )
        for name, entry in entries.items()
        if name != _RESERVED
    }
    size = len(header) + sum(span.nbytes for span in spans.values())
    return Layout(header, MappingProxyType(spans), size)


def file_order(schema: Schema) -> tuple[str, ...]:
    """The names in the fastest order for writing a checkpoint: that of their bytes in the file."""
    return tuple(layout_of(schema).spans)
