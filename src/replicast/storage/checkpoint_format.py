"""The manifest of a checkpoint: where in the training it was made, and the digests of its variables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from dataclasses import fields as fields_of
from types import MappingProxyType
from typing import Any

import numpy as np
import xxhash

from replicast.codec import fields_of as plain
from replicast.core.entries import Saved
from replicast.core.records import Pending, Proposal
from replicast.errors import CheckpointError
from replicast.files import json_bytes, tensor_chunks
from replicast.strictjson import described, reading
from replicast.update.edits import BFLOAT16, Array
from replicast.update.schema import Schema, Variable
from replicast.update.trial import Trial
from replicast.update.update import factor_to_json

FORMAT = 2
# The largest sequence number to accept: a restart counts up to it, and a file may contain anything.
MAX_SEQUENCE = 2**24


@dataclass(frozen=True, slots=True)
class PendingUpdate:
    """An update that was proposed before a checkpoint and is not committed. The journal has its payload."""

    id: str
    digest: str
    at_step: int | None
    trial: Trial | None
    author: str
    note: str
    tickets: tuple[str, ...]
    reverts: int | None = None
    forced: bool = False

    @classmethod
    def of(cls, pending: Pending) -> PendingUpdate:
        """The part of a pending proposal that a checkpoint stores."""
        one = pending.proposal
        return cls(
            one.id,
            one.digest,
            one.at_step,
            one.trial,
            one.author,
            one.note,
            pending.tickets,
            one.reverts,
            one.forced,
        )

    def pending(self) -> Pending:
        """The proposal as the core knows it. Its content is the tuple of id and digest, as in the journal."""
        proposal = Proposal(
            self.id,
            self.digest,
            (self.id, self.digest),
            self.at_step,
            self.trial,
            author=self.author,
            note=self.note,
            reverts=self.reverts,
            forced=self.forced,
        )
        return Pending(proposal, self.tickets)


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
    pending: tuple[PendingUpdate, ...] = ()
    script: Mapping[str, Any] | None = None
    measured: str = "[]"
    run: str = ""
    line: int = 0
    parent: Mapping[str, Any] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        as_they_are = {each.name: getattr(self, each.name) for each in fields_of(self)}
        return as_they_are | {
            "schema": self.schema.to_json(),
            "missing": list(self.missing),
            "pending": [plain(one) for one in self.pending],
            "metrics": {name: factor_to_json(float(value)) for name, value in self.metrics.items()},
        }

    def with_updates(self, saved: Saved) -> Draft:
        """The draft with the updates that the state contains according to the core, and the pending ones."""
        latest = max(saved.holds, default=0)
        missing = tuple(sequence for sequence in range(1, latest) if sequence not in saved.holds)
        pending = tuple(PendingUpdate.of(one) for one in saved.pending)
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

    @classmethod
    def completed(
        cls, draft: Draft, *, digests: Mapping[str, str], state_digest: str, nbytes: int
    ) -> Manifest:
        """Completes a draft with what is known once the state is written."""
        known = {each.name: getattr(draft, each.name) for each in fields_of(Draft)}
        return cls(**known, digests=dict(digests), state_digest=state_digest, nbytes=nbytes)

    def seen_by(self, run: str) -> Manifest:
        """The manifest as valid in a run: update numbers in a copy from another run have no meaning here."""
        if self.run in ("", run):
            return self
        return replace(self, sequence=0, missing=(), pending=())

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Manifest:
        """What `to_json` described."""
        if fields.get("format") != FORMAT:
            raise ValueError(
                f"This version of replicast reads format {FORMAT} of a checkpoint. Use the version that "
                f"wrote it. Received: {fields.get('format')!r}"
            )
        with reading("manifest", fields):
            metrics = {name: float(value) for name, value in fields["metrics"].items()}
        return described(cls, "manifest", {**fields, "metrics": metrics})


def saved_of(manifest: Draft) -> Saved:
    """A checkpoint as the core knows it. Its state is its step."""
    holds = frozenset(range(1, manifest.sequence + 1)) - set(manifest.missing)
    pending = tuple(one.pending() for one in manifest.pending)
    return Saved(manifest.step, manifest.attempt, holds, pending, manifest.step)


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


# Incremental digests, equal to those of `replicast.update.digest` for whole arrays.


class PassingDigest:
    """The digest of one variable, given its bytes piece by piece in row-major order."""

    def __init__(self, variable: Variable) -> None:
        self._hasher = xxhash.xxh3_128(f"{variable.dtype}{list(variable.shape)}".encode())

    def update(self, piece: bytes | memoryview) -> None:
        """Adds the next bytes."""
        self._hasher.update(piece)

    def hexdigest(self) -> str:
        """The result of `digest_array` for all bytes so far."""
        return self._hasher.hexdigest()


def digest_of_digests(digests: Mapping[str, str]) -> str:
    """The result of `digest_state` for variables with these digests."""
    hasher = xxhash.xxh3_128()
    for name in sorted(digests):
        encoded = name.encode()
        hasher.update(len(encoded).to_bytes(8, "little") + encoded)
        hasher.update(bytes.fromhex(digests[name]))
    return hasher.hexdigest()
