"""The manifest of a checkpoint: where in the training it was made, and the digests of its variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from dataclasses import fields as fields_of
from typing import Any

from replicast.core.entries import Saved
from replicast.core.proposal import Pending, Proposal
from replicast.files import json_bytes
from replicast.strictjson import described, reading
from replicast.update.parts import factor_to_json
from replicast.update.schema import Schema
from replicast.update.trial import Trial

FORMAT = 2
MAX_SEQUENCE = 2**24
"""The largest sequence number to accept: a restart counts up to it, and a file may contain anything."""


@dataclass(frozen=True, slots=True)
class PendingUpdate:
    """An update that was proposed before a checkpoint and is not committed. The journal has its payload.

    Attributes:
        tickets: The tickets of its proposals.
        reverts: The number of the update that it undoes, if any.
        forced: Whether it undoes it even if that is reverted already.
    """

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
    """What the caller knows about a checkpoint before it is written.

    Attributes:
        step: The boundary whose state it is.
        sequence: The last update of the journal that it contains; 0 for none.
        missing: The updates before that one that it does not contain.
        epoch: The current epoch.
        batch: The number of finished batches of that epoch.
        created_at: Seconds since 1970.
        workers: The number of workers of the job.
        attempt: The attempt of the job that made it.
        schema: The state's variables.
        pending: The updates that were proposed before and are not committed.
        script: The position in the script, as JSON values; None if it is not known.
        measured: The loss and metrics of recent steps, as JSON text: trials after a restart need it.
        run: The id of the run that the updates belong to; empty if it is not known.
        line: How often training had gone back behind a checkpoint of its run (`ordering.py`).
        parent: For a patched checkpoint, `step`, `path` and `update_id` of its origin.
        metrics: The metrics at that step.
        versions: The versions of the software that made it, by name.
    """

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
            "pending": [asdict(one) | {"tickets": list(one.tickets)} for one in self.pending],
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
    """A written checkpoint.

    Attributes:
        digests: The digest of each variable, by name.
        state_digest: The digest of all variables, as `digest_state` gives it.
        nbytes: The size of `state.safetensors`: a header that follows from the schema, and the variables.
        format: The version of the checkpoint's format.
    """

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
        """What `to_json` described.

        Raises:
            ValueError: It is not a manifest, or has another format.
        """
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
