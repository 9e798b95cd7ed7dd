"""What a checkpoint says of itself: where in the training it was made, and the digests of what it holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from replicast.files import json_bytes
from replicast.parts import factor_to_json
from replicast.schema import Schema
from replicast.strictjson import reading

FORMAT = 1
LINE = "line"
"""The entry of `extra` that counts how often training went back; not there while it never has."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draft:
    """What the caller knows of a checkpoint before it is written.

    Attributes:
        step: The boundary whose state it is.
        sequence: The last update of the journal whose effect is in it; 0 for none.
        epoch: The epoch that training is in.
        batch: How many batches of that epoch are done.
        created_at: Seconds since 1970.
        workers: How many workers the job has.
        attempt: Which start of the job made it.
        schema: The state's variables.
        parent: For a patched checkpoint, `step`, `path` and `update_id` of what it was made from.
        metrics: The metrics at that step.
        versions: The versions of what made it, by name.
        extra: Whatever else is needed to go on, such as positions and seeds, as JSON values.
    """

    step: int
    sequence: int
    epoch: int
    batch: int
    created_at: float
    workers: int
    attempt: int
    schema: Schema
    parent: Mapping[str, Any] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {
            "step": self.step,
            "sequence": self.sequence,
            "epoch": self.epoch,
            "batch": self.batch,
            "created_at": self.created_at,
            "workers": self.workers,
            "attempt": self.attempt,
            "schema": self.schema.to_json(),
            "parent": None if self.parent is None else dict(self.parent),
            "metrics": {name: factor_to_json(float(value)) for name, value in self.metrics.items()},
            "versions": dict(self.versions),
            "extra": dict(self.extra),
        }

    @property
    def line(self) -> int:
        """How often training had gone back behind a checkpoint of its run before it came here."""
        return int(self.extra.get(LINE, 0))

    def position(self) -> bytes:
        """Where training goes on from here, apart from the state: equal when it is the same, as JSON."""
        return json_bytes([self.step, self.sequence, self.epoch, self.batch, dict(self.extra)])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Manifest(Draft):
    """A written checkpoint.

    Attributes:
        digests: The digest of each variable, by name.
        state_digest: The digest of all variables, as `digest_state` gives it.
        nbytes: The size of `state.safetensors`: a header that follows from the schema, and what the digests
            are of.
        format: The version of the checkpoint's format.
    """

    digests: Mapping[str, str]
    state_digest: str
    nbytes: int
    format: int = FORMAT

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Manifest) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash((self.step, self.state_digest))

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return Draft.to_json(self) | {
            "format": self.format,
            "digests": dict(self.digests),
            "state_digest": self.state_digest,
            "nbytes": self.nbytes,
        }

    @classmethod
    def completed(
        cls, draft: Draft, *, digests: Mapping[str, str], state_digest: str, nbytes: int
    ) -> Manifest:
        """The draft with what is known once the state is written."""
        known = {each.name: getattr(draft, each.name) for each in fields(Draft)}
        return cls(**known, digests=dict(digests), state_digest=state_digest, nbytes=nbytes)

    @classmethod
    def from_json(cls, described: Mapping[str, Any]) -> Manifest:
        """What `to_json` described.

        Raises:
            ValueError: It is no manifest, or of a later format.
        """
        if described.get("format") != FORMAT:
            raise ValueError(
                f"This version of replicast knows format {FORMAT} of a checkpoint. Use the one that wrote "
                f"it. Received: {described.get('format')!r}"
            )
        with reading("manifest", described):
            parent = described["parent"]
            made = cls(
                step=int(described["step"]),
                sequence=int(described["sequence"]),
                epoch=int(described["epoch"]),
                batch=int(described["batch"]),
                created_at=float(described["created_at"]),
                workers=int(described["workers"]),
                attempt=int(described["attempt"]),
                schema=Schema.from_json(described["schema"]),
                parent=None if parent is None else dict(parent),
                metrics={str(name): float(value) for name, value in described["metrics"].items()},
                versions={str(name): str(value) for name, value in described["versions"].items()},
                extra=dict(described["extra"]),
                digests={str(name): str(value) for name, value in described["digests"].items()},
                state_digest=str(described["state_digest"]),
                nbytes=int(described["nbytes"]),
            )
            if set(made.digests) != {variable.name for variable in made.schema}:
                raise ValueError("its digests are not those of its variables")
        return made
