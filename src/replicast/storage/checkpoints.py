"""The checkpoints of a run: `RUN/checkpoints/00001200-3/`, of step 1200 and the third group of workers.

    .tmp-<random>/    state.safetensors, then manifest.json: each fsynced, then the directory
    00001200-3/       the same directory, renamed; then its parent is fsynced

So a checkpoint is complete and durable under its final name, or not there at all. The manifest ends with its
own checksum, and has the digest of every variable. Damaged data is an error, never a value.

One process writes; any process may read. No name is written twice: a second checkpoint of a step is written
next to the first, which is removed once the second is durable. Checkpoints of a group that was presumed dead
do not count (`claims.py`).
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self, TypeAlias

import msgspec
import numpy as np
from msgspec.structs import replace
from xxhash import xxh3_128

from replicast import faults, files
from replicast.codec import (
    View,
    check_format,
    described,
    json_bytes,
    parse_object,
    reading,
    sealed_json,
    unsealed,
)
from replicast.core.entries import Pending, Saved
from replicast.errors import CheckpointError, FileDamaged, logger
from replicast.files import TEMPORARY, RunDir, RunPath, below
from replicast.storage.claims import (
    CHECKPOINTS,
    Fence,
    checkpoint_name,
    checkpoint_parts,
    last_claim,
    named_checkpoints,
)
from replicast.update.digest import begun_digest, digest_of_digests, distance
from replicast.update.edits import Array, Edit, Variable, apply_to_slice, by_variable, grouped, slices_of
from replicast.update.schema import Schema, planned
from replicast.update.tensorfiles import header_of
from replicast.update.update import Update

# The manifest of a checkpoint: where in the training it was made, and the digests of its variables.

FORMAT = 3
MAX_SEQUENCE = 2**24  # The largest to accept: a restart counts up to it, and a file may contain anything.


class Manifest(View, frozen=True, kw_only=True):
    """What a checkpoint says of itself. Before it is written, without what its bytes tell: a draft."""

    step: int
    sequence: Annotated[int, msgspec.Meta(ge=0, le=MAX_SEQUENCE)] = 0
    missing: tuple[int, ...] = ()
    epoch: int
    batch: int
    created_at: float
    workers: int
    attempt: int
    schema: Schema
    pending: tuple[Pending, ...] = ()  # Without their content: the journal has it.
    script: dict[str, Any] | None = None
    measured: str = "[]"
    run: str = ""
    line: int = 0
    parent: dict[str, Any] | None = None
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    versions: dict[str, str] = msgspec.field(default_factory=dict)
    digests: dict[str, str] = msgspec.field(default_factory=dict)
    state_digest: str = ""
    nbytes: int = 0
    format: int = FORMAT

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Manifest) and self.to_json() == other.to_json()

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        check_format(FORMAT, "a checkpoint", fields)
        with reading("manifest", fields):  # A metric that is not finite is text.
            metrics = {name: float(value) for name, value in fields["metrics"].items()}
        made = described(cls, "manifest", {**fields, "metrics": metrics})
        if set(made.digests) != {variable.name for variable in made.schema}:
            raise ValueError(f"its digests do not match its variables. Received: {list(made.digests)[:5]}")
        return made

    def with_updates(self, saved: Saved) -> Manifest:
        """The draft with the updates that the state contains according to the core, and the pending ones."""
        latest = max(saved.holds, default=0)
        missing = tuple(sequence for sequence in range(1, latest) if sequence not in saved.holds)
        pending = tuple(_pending(one, content=None, source=None, proposed_at=0.0) for one in saved.pending)
        return replace(self, sequence=latest, missing=missing, pending=pending)


def saved_of(manifest: Manifest) -> Saved:
    """A checkpoint as the core knows it. Its state is its step."""
    holds = frozenset(range(1, manifest.sequence + 1)) - set(manifest.missing)
    # The content of a payload in the journal is the tuple of its id and digest.
    pending = tuple(_pending(one, content=(one.proposal.id, one.proposal.digest)) for one in manifest.pending)
    return Saved(manifest.step, manifest.attempt, holds, pending, manifest.step)


def _pending(one: Pending, **changes: Any) -> Pending:
    return Pending(replace(one.proposal, **changes), one.tickets)


# The layout of `state.safetensors`: a function of the schema, known before a byte is written.
#
# A reader compares the file's header with the expected one and never interprets it: either it is equal to
# the last byte, or the file is damaged.

METADATA = {"replicast": "checkpoint 1"}
_RESERVED = "__metadata__"


@dataclass(frozen=True, slots=True)
class Span:
    variable: Variable
    start: int
    nbytes: int

    def hasher(self) -> xxh3_128:
        """For the variable's bytes in row-major order, in pieces: the digest is that of `digest_array`."""
        return begun_digest(np.dtype(self.variable.dtype), self.variable.shape)


@dataclass(frozen=True, slots=True)
class Layout:
    header: bytes
    spans: Mapping[str, Span]
    nbytes: int


def layout_of(schema: Schema) -> Layout:
    if _RESERVED in schema:
        raise CheckpointError(
            "A variable has a name that safetensors reserves", variable=_RESERVED, remedy="Rename it"
        )
    variables = {variable.name: variable for variable in schema}
    header, names = header_of({one.name: (np.dtype(one.dtype), one.shape) for one in schema}, METADATA)
    spans, size = dict[str, Span](), len(header)
    for name in names:  # Their bytes follow each other in this order.
        spans[name] = Span(variables[name], size, variables[name].nbytes)
        size += variables[name].nbytes
    return Layout(header, MappingProxyType(spans), size)


STATE, MANIFEST = "state.safetensors", "manifest.json"
PIECE_BYTES = 4 * 2**20  # Written and digested while it is in the processor's cache.

Pieces = Iterable[memoryview]


@contextlib.contextmanager
def temporary_directory(parent: RunPath) -> Iterator[RunPath]:
    """A new directory in `parent`, removed afterwards unless it was renamed."""
    files.make_durably(parent)
    path = parent / f"{TEMPORARY}{secrets.token_hex(8)}"
    path.mkdir()
    try:
        yield path
    finally:
        path.rmtree()


def write_contents(directory: RunPath, draft: Manifest, pieces_of: Callable[[Variable], Pieces]) -> Manifest:
    json_bytes(draft.to_json())  # A draft that is not valid JSON should fail before much is written.
    layout, digests = layout_of(draft.schema), dict[str, str]()
    with _new_file(directory / STATE) as descriptor:
        files.write_all(descriptor, layout.header)
        for name, span in layout.spans.items():  # A digest is computed while its variable is written.
            hasher, place = span.hasher(), span.start
            for piece in pieces_of(span.variable):
                files.write_all(descriptor, piece)
                files.start_writing(descriptor, place, len(piece))
                hasher.update(piece)
                place += len(piece)
            if place != span.start + span.nbytes:
                problem, received = "A variable has the wrong size", str(place - span.start)
                expected = f"{span.nbytes} bytes"
                raise CheckpointError(problem, variable=name, expected=expected, received=received)
            digests[name] = hasher.hexdigest()
    digest = digest_of_digests(digests)
    manifest = replace(draft, digests=digests, state_digest=digest, nbytes=layout.nbytes)
    with _new_file(directory / MANIFEST) as descriptor:
        files.write_all(descriptor, sealed_json(manifest.to_json()))
    files.sync_directory(directory)
    return manifest


@contextlib.contextmanager
def _new_file(path: RunPath) -> Iterator[int]:
    descriptor = path.open(os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        yield descriptor
        faults.point("write")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_in_place(temporary: RunPath, path: RunPath) -> None:
    """Gives a written checkpoint its final name, which must not be taken."""
    faults.point("rename")
    temporary.rename(path)
    files.sync_directory(path.parent)


def _pieces(array: Array | None, variable: Variable) -> Pieces:
    array = None if array is None else np.asarray(array)
    if array is None or (array.dtype.name, array.shape) != (variable.dtype, variable.shape):
        problem, expected = "A variable does not match the schema", _described(variable)
        received = "none" if array is None else f"{array.dtype.name} of shape {array.shape}"
        raise CheckpointError(problem, variable=variable.name, expected=expected, received=received)
    if not array.nbytes:
        return ()
    native = np.ascontiguousarray(array, np.dtype(variable.dtype)).reshape(-1).view(np.uint8).data
    return (native[start : start + PIECE_BYTES] for start in range(0, len(native), PIECE_BYTES))


Progress = Callable[[int, int], None]  # Called with the number of bytes done, and the total.


class CheckpointReader(contextlib.AbstractContextManager["CheckpointReader"]):
    """A committed checkpoint, open for reading until `close`, or until the reader is garbage-collected.

    Its files stay readable until then, even if the checkpoint is removed or replaced meanwhile.
    """

    def __init__(self, path: RunPath, manifest: Manifest, layout: Layout, descriptor: int) -> None:
        self.path = path
        self.manifest = manifest
        self.layout = layout
        self._descriptor = descriptor
        self._close = weakref.finalize(self, os.close, descriptor)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file. Arrays that were read stay valid."""
        self._close()

    def names(self) -> tuple[str, ...]:
        return tuple(variable.name for variable in self.manifest.schema)

    def read(self, name: str) -> Array:
        """Reads a variable's value into new memory: a truncated file, if mapped, would crash the process."""
        variable = self._span(name).variable
        value: Array = np.empty(variable.shape, np.dtype(variable.dtype))
        if not self.read_into(name, value):
            raise self._damaged(f"the bytes of {name} are not those that were written")
        value.flags.writeable = False
        return value

    def read_rows(self, name: str, ranges: Iterable[tuple[int, int]]) -> Array:
        """Reads some rows of a variable, and nothing else: their digest cannot be compared."""
        span = self._span(name)
        shape = span.variable.shape
        row_bytes = span.nbytes // max(1, shape[0])
        content = b"".join(
            self._read_at(span.start + start * row_bytes, (stop - start) * row_bytes)
            for start, stop in ranges
        )
        rows: Array = np.frombuffer(content, np.dtype(span.variable.dtype))
        return rows.reshape(-1, *shape[1:]) if row_bytes else np.empty((0, *shape[1:]), rows.dtype)

    def read_into(self, name: str, target: Array) -> bool:
        """Reads a variable's bytes into memory of its size. Returns False if their digest is wrong."""
        span, digest, size = self._span(name), self._span(name).hasher(), PIECE_BYTES // 8
        view = target.reshape(-1).view(np.uint8).data if span.nbytes else memoryview(b"")
        for done in range(0, span.nbytes, size):
            self._fill(view[done : done + size], span.start + done)
            digest.update(view[done : done + size])
        return digest.hexdigest() == self.manifest.digests[name]

    def pieces(
        self, name: str, sizes: Iterator[int] | None = None, problems: list[str] | None = None
    ) -> Iterator[memoryview]:
        """Reads a variable's bytes in pieces. At the end a wrong digest raises, or is added to `problems`."""
        span, digest, done = self._span(name), self._span(name).hasher(), 0
        while done < span.nbytes:
            wanted = PIECE_BYTES if sizes is None else next(sizes)
            piece = self._read_at(span.start + done, min(wanted, span.nbytes - done))
            digest.update(piece)
            done += len(piece)
            yield piece
        expected, received = self.manifest.digests[name], digest.hexdigest()
        if received != expected:
            written = f"{name} are not those that were written (digest {expected})"
            problem = f"the bytes of {written}. Received: {received}"
            if problems is None:
                raise self._damaged(problem)
            problems.append(problem)

    def verify(self, progress: Progress | None = None) -> None:
        problems, done = list[str](), 0
        for name in self.layout.spans:
            for piece in self.pieces(name, problems=problems):
                done += len(piece)
                if progress is not None:
                    progress(done, self.layout.nbytes - len(self.layout.header))
        if problems:
            raise self._damaged("; ".join(problems))

    def _span(self, name: str) -> Span:
        span = self.layout.spans.get(name)
        if span is None:
            problem = "The checkpoint does not have this variable"
            expected = f"one of its {len(self.layout.spans)}"
            raise CheckpointError(problem, path=self.path, variable=name, expected=expected, received=name)
        return span

    def _read_at(self, place: int, nbytes: int) -> memoryview:
        content = np.empty(nbytes, np.uint8).data
        self._fill(content, place)
        return content

    def _fill(self, view: memoryview, place: int) -> None:
        if not self._close.alive:  # The descriptor may belong to another file by now.
            raise ValueError(f"The checkpoint is closed: open it again. Received: {self.path}")
        while view:
            with _readable(self.path / STATE):
                read = os.preadv(self._descriptor, [view], place)
            if not read:
                raise self._damaged(f"it became shorter. Received: {place} bytes")
            view, place = view[read:], place + read

    def _damaged(self, problem: str) -> FileDamaged:
        return _damaged(self.path / STATE, problem)


def advice(path: RunPath) -> str:
    return f"Use another checkpoint, or replace this one with a backup copy; remove {path} to discard it"


def _damaged(file: RunPath, problem: str) -> FileDamaged:
    return FileDamaged(file, f"{problem.rstrip('.')}. {advice(file.parent)}")


@contextlib.contextmanager
def _readable(file: RunPath) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise _damaged(file, f"it cannot be read ({why})") from error


def open_checkpoint(path: RunDir) -> CheckpointReader:
    """Opens a committed checkpoint by its directory. Checks everything but the bytes of the variables."""
    path = below(path)
    with contextlib.ExitStack() as stack:
        try:
            # All files are opened relative to it: they belong to one checkpoint, even if it is replaced.
            directory = stack.enter_context(path.entered())
        except OSError as error:
            raise CheckpointError(
                f"There is no checkpoint here ({error.strerror})", path=path, received=str(path)
            ) from error
        with _readable(path / MANIFEST):
            try:
                content = files.read_small(MANIFEST, max_bytes=files.MAX_JSON_BYTES, directory=directory)
            except FileNotFoundError:
                problem = "The checkpoint is not complete, or it is not a checkpoint"
                expected = f"a file {MANIFEST}"
                raise CheckpointError(problem, path=path, expected=expected, received="none") from None
        try:
            manifest = Manifest.from_json(parse_object(unsealed(content)[0]))
        except ValueError as error:
            raise _damaged(path / MANIFEST, f"it is not a valid manifest: {error}") from error
        layout, file = layout_of(manifest.schema), path / STATE
        with _readable(file):
            descriptor = files.open_plain(STATE, directory=directory)
        reader = CheckpointReader(path, manifest, layout, descriptor)
        try:
            with _readable(file):
                size, header = os.fstat(descriptor).st_size, os.pread(descriptor, len(layout.header), 0)
            if not size == manifest.nbytes == layout.nbytes:
                raise _damaged(file, f"it must have {manifest.nbytes} bytes. Received: {size}")
            if header != layout.header:
                raise _damaged(file, "its header does not match the variables in the manifest")
        except BaseException:
            reader.close()
            raise
    return reader


# Which checkpoint is the last one: training may have gone back to an earlier step and continued from there.
#
#     500   1000   1500   2000      one line of training
#      └─ 600   700                 restore(step=500): another line, which is now the current one
#
# A checkpoint of an earlier step than the last one starts a new line, with a number one higher. Neither
# clocks nor attempt numbers would work: clocks differ between hosts, and a run may be copied into another.

Best: TypeAlias = tuple[str, Literal["min", "max"]]  # A metric, and which of its values is the best.


def latest_first(there: Iterable[Manifest]) -> list[Manifest]:
    """The last checkpoint, those that it follows, and then those abandoned when training went back."""
    followed: list[Manifest] = []
    given_up: list[Manifest] = []
    for manifest in sorted(there, key=_age, reverse=True):
        came_before = not followed or manifest.step < followed[-1].step
        (followed if came_before else given_up).append(manifest)
    return followed + given_up


def _age(manifest: Manifest) -> tuple[int, int]:
    return manifest.line, manifest.step


class CheckpointStore:
    def __init__(self, run_dir: RunDir, fence: Fence | None = None) -> None:
        self._run_dir, self._fence = run_dir, fence
        self._group = 0 if fence is None else fence.number
        self.directory = below(run_dir) / CHECKPOINTS
        self._stuck: set[RunPath] = set()

    def path(self, step: int) -> RunPath:
        """The directory that the checkpoint of a step has, or would have."""
        there = self._counting().get(step)
        return there[-1] if there else self._new(step)

    def find(self, step: int) -> RunPath:
        if paths := self._counting().get(step):
            return paths[-1]
        steps = [manifest.step for manifest in self.manifests()]
        there = f"one of {', '.join(map(str, steps[-5:]))}" if steps else "a run with checkpoints"
        problem = "There is no checkpoint of this step"
        raise CheckpointError(problem, path=self._new(step), step=step, expected=there, received=str(step))

    def manifests(self) -> list[Manifest]:
        """The committed checkpoints by step, without damaged ones.

        `last` may return another one than the last of them: a run that went back to an earlier step has left
        checkpoints of later steps behind, which training does not continue from.
        """
        return [found for _, found in sorted(self._look().items()) if isinstance(found, Manifest)]

    def problems(self) -> list[FileDamaged]:
        """What is wrong with those that `manifests` omits. Damaged bytes are only found by `verify`."""
        return [found for _, found in sorted(self._look().items()) if isinstance(found, FileDamaged)]

    def last(self) -> Manifest | None:
        """The committed checkpoint that training would go on from: of the latest step of the current line."""
        return self.last_and_skipped()[0]

    def last_and_skipped(self) -> tuple[Manifest | None, list[FileDamaged]]:
        """What `last` returns, and what is wrong with checkpoints that may be later."""
        skipped: list[FileDamaged] = []
        for found in self._look().values():
            if isinstance(found, Manifest):
                return found, skipped
            skipped.append(found)
        return None, skipped

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, intact or not; the one that `last` would return comes first."""
        return list(self._look())

    def manifest(self, step: int) -> Manifest:
        with self.open(step) as reader:
            return reader.manifest

    def open(self, step: int) -> CheckpointReader:
        """Opens the checkpoint of a step. If copied from another run, its manifest lists no updates."""
        reader = open_checkpoint(self.find(step))
        # Numbers of another run's updates mean nothing here.
        if reader.manifest.run not in ("", self._run()):
            reader.manifest = replace(reader.manifest, sequence=0, missing=(), pending=())
        if reader.manifest.step != step:
            reader.close()
            problem = f"it is the checkpoint of another step. Received: {reader.manifest.step}"
            raise FileDamaged(self.path(step), f"{problem}. {advice(self.path(step))}")
        return reader

    def write(
        self, draft: Manifest, arrays: Mapping[str, Array], digests: Mapping[str, str] | None = None
    ) -> Manifest:
        """Writes a checkpoint. When this returns, it is committed and durable.

        It replaces an existing checkpoint of that step, and is the last one from then on, even if there are
        checkpoints of later steps.
        """
        if draft.step < 0:
            raise ValueError(f"A step is counted from 0. Received: {draft.step}")
        last = max(self.manifests(), key=_age, default=None)
        line = 0 if last is None else last.line + (draft.step < last.step)
        draft = replace(draft, line=line, run=self._run())
        with temporary_directory(self.directory) as temporary:
            manifest = write_contents(temporary, draft, lambda one: _pieces(arrays.get(one.name), one))
            known = manifest.digests if digests is None else digests
            for name, digest in manifest.digests.items():
                if known.get(name) != digest:  # Memory may change under a writer.
                    raise CheckpointError(
                        "The state changed while it was being written. Nothing is saved",
                        step=draft.step,
                        variable=name,
                        expected=f"digest {known.get(name)}",
                        received=digest,
                    )
            replaced = self._counting().get(draft.step, [])
            put_in_place(temporary, self._new(draft.step))
            if self._fence is not None:
                self._fence.check()
            # Only now: the new name is durable, and counts for a group that takes over the run.
            with contextlib.suppress(OSError):  # A leftover only uses disk space: no one reads it any more.
                self._remove(replaced)
        return manifest

    def prune(self, keep: int, best: Best | None = None, named: int | None = None) -> list[int]:
        """Removes old checkpoints: all but the last `keep` and the best one. Damaged ones are left alone."""
        if keep < 1:
            raise ValueError(
                f"At least the newest checkpoint is kept: keep must be 1 or more. Received: {keep}"
            )
        ordered = latest_first(self.manifests())
        kept = {manifest.step for manifest in ordered[:keep]} | {named}
        if best is not None:  # Of equal ones, the latest.
            metric, sign = best[0], 1.0 if best[1] == "max" else -1.0
            ranked = [one for one in ordered if not math.isnan(one.metrics.get(metric, math.nan))]
            if ranked:
                kept.add(max(ranked, key=lambda one: sign * one.metrics[metric]).step)
        removed = []
        for step in sorted(manifest.step for manifest in ordered if manifest.step not in kept):
            path = self.path(step)
            try:
                self.remove(step)
                removed.append(step)
            except (CheckpointError, FileNotFoundError):
                pass  # It was removed by someone else meanwhile.
            except OSError as error:  # A failure does not affect the one just written.
                if path not in self._stuck:
                    logger.warning(
                        "the old checkpoint %s cannot be removed and uses disk space: %s", path, error
                    )
                self._stuck.add(path)
        return removed

    def remove(self, step: int) -> None:
        """Removes a checkpoint, even a damaged one; atomically for readers, even if interrupted."""
        self.find(step)
        # Older ones of the same step first: a reader would find them once the newest is gone.
        self._remove(self._counting().get(step, []))
        files.sync_directory(self.directory)

    def clean(self) -> None:
        """Removes leftovers of a writer that died. Only while no one is writing.

        Checkpoints that do not count stay, with a warning: one may be a copy that a user needs.
        """
        if not self.directory.is_dir():
            return
        for path in self.directory.iterdir():
            if path.name.startswith(TEMPORARY):
                path.rmtree()
        counting = self._counting()
        self._remove(path for paths in counting.values() for path in paths[:-1])
        files.sync_directory(self.directory)
        for (step, _, _), path in named_checkpoints(self._run_dir):
            if path not in counting.get(step, []):
                logger.warning(
                    "%s does not count: it was written by a group of workers that was presumed dead. If it "
                    "is a copy from another run, rename it to %08d",
                    path,
                    step,
                )

    def _counting(self) -> dict[int, list[RunPath]]:
        """The directories of the checkpoints that count, by step; those of one step with the newest last."""
        claim = last_claim(self._run_dir)
        named = named_checkpoints(self._run_dir)
        return grouped((parts[0], path) for parts, path in named if claim is None or claim.counts(path.name))

    def _new(self, step: int) -> RunPath:
        own = [parts[2] for parts, _ in named_checkpoints(self._run_dir) if parts[:2] == (step, self._group)]
        return self.directory / checkpoint_name(step, self._group, max(own, default=0) + 1)

    def _run(self) -> str:
        claim = last_claim(self._run_dir)
        return "" if claim is None else claim.run

    def _remove(self, paths: Iterable[RunPath]) -> None:
        """Removes checkpoints in this order, each atomically for readers."""
        for path in paths:
            aside = self.directory / f"{TEMPORARY}{secrets.token_hex(8)}"
            with contextlib.suppress(FileNotFoundError):
                path.rename(aside)
            aside.rmtree()

    def _look(self) -> dict[int, Manifest | FileDamaged]:
        """What is there by step, the latest in the sense of `last` first."""
        looked: dict[int, Manifest | FileDamaged] = {}
        for step, paths in sorted(self._counting().items()):
            try:
                looked[step] = self.manifest(step)
            except FileDamaged as error:
                looked[step] = error
            except CheckpointError as error:
                if paths[-1].exists():  # It was not removed meanwhile.
                    looked[step] = FileDamaged(paths[-1], f"{error.problem}. {advice(paths[-1])}")
            except Exception as error:  # An unexpected error in one must not hide the others.
                said = f"unexpected error while reading it ({type(error).__name__}: {str(error)[:200]})"
                looked[step] = FileDamaged(paths[-1], f"{said}. {advice(paths[-1])}")
        ordered = latest_first(found for found in looked.values() if isinstance(found, Manifest))
        steps = [manifest.step for manifest in ordered]
        # The line of an unreadable one is not known. It is placed before all lower steps: it may be the last.
        for step in sorted(set(looked) - set(steps)):
            lower = (place for place, other in enumerate(steps) if other < step)
            steps.insert(next(lower, len(steps)), step)
        return {step: looked[step] for step in steps}


# Chooses the checkpoint from which a job resumes, when some of them may be damaged.


def choose(store: CheckpointStore, step: int | None, damaged: dict[int, str]) -> CheckpointReader | None:
    """Opens the checkpoint to restore: that of a step, or the last one that is not known to be damaged."""
    for candidate in store.steps() if step is None else [step]:
        if candidate in damaged:
            continue
        try:
            return store.open(candidate)
        except FileDamaged as error:
            damaged[candidate] = str(error)
        except CheckpointError as error:
            if step is not None:
                raise
            logger.warning("the checkpoint of step %d is skipped. %s", candidate, error)
    if not damaged:
        return None
    newest = max(damaged)
    problem = "No checkpoint is intact. Step" if step is None else "The checkpoint cannot be restored. Step"
    raise CheckpointError(
        f"{problem} {newest}: {damaged[newest]}",
        path=store.path(newest),
        step=newest,
        remedy=f"Choose another (replicast checkpoint verify tells which are intact), or remove "
        f"{store.directory} to start from scratch",
    )


# An update applied to a checkpoint, in a stream, into a new checkpoint that names its parent.


def patch(
    source: RunDir, update: Update, destination: Path | str, *, progress: Progress | None = None
) -> Manifest:
    """Writes the checkpoint that would exist if the update had been applied at its step.

    Needs little memory beyond that of the update, however large the checkpoint is. Every byte that is read
    is checked against its digest, so that damage is never copied.
    """
    target = RunPath(Path(destination).absolute().parent) / Path(destination).name
    with open_checkpoint(source) as reader:
        _check_destination(target, reader.manifest)
        of_each = by_variable(planned(update, reader.manifest.schema).edits)
        done, total = 0, reader.layout.nbytes - len(reader.layout.header)

        def pieces_of(variable: Variable) -> Pieces:
            nonlocal done
            edits = of_each.get(variable.name)
            pieces = reader.pieces(variable.name) if edits is None else _edited(reader, variable, edits)
            for piece in pieces:
                yield piece
                done += len(piece)
                if progress is not None:
                    progress(done, total)

        with temporary_directory(target.parent) as temporary:
            before, path = reader.manifest, str(reader.path.as_path().resolve())
            parent = {"step": before.step, "path": path, "update_id": update.id}
            draft = replace(before, parent=parent, created_at=time.time(), metrics={})
            manifest = write_contents(temporary, draft, pieces_of)
            _check_destination(target, manifest)  # It may exist by now.
            put_in_place(temporary, target)
    return manifest


def _check_destination(destination: RunPath, manifest: Manifest) -> None:
    try:
        step = checkpoint_parts(destination.name)[0]
    except ValueError:
        step = None  # Not the name of a run's checkpoint.
    beside = [destination]
    if step is not None:  # A job may find it there, so nothing else may have this step.
        beside += destination.parent.glob(f"{step:08d}-*")
    there = [path for path in beside if path.exists()]
    if there:
        problem, remedy = "The destination exists already", "Use a directory that does not exist yet"
        raise CheckpointError(problem, path=destination, received=str(there[0]), remedy=remedy)
    if step is not None and step != manifest.step:
        problem = "The destination has the name of another step"
        expected = f"{manifest.step:08d}, or a name that is not a number"
        raise CheckpointError(problem, path=destination, expected=expected, received=destination.name)


def _edited(reader: CheckpointReader, variable: Variable, edits: Sequence[Edit]) -> Iterator[memoryview]:
    dtype, blocks = np.dtype(variable.dtype), list(slices_of(variable.shape))
    sizes = (block.shape[0] * block.shape[1] * dtype.itemsize for block in blocks)
    for block, piece in zip(blocks, reader.pieces(variable.name, sizes), strict=True):
        current = np.frombuffer(piece, np.uint8).view(dtype).reshape(block.shape)
        after = apply_to_slice(edits, variable.shape, block, current)
        yield np.ascontiguousarray(after).reshape(-1).view(np.uint8).data


# The differences between two checkpoints, or two models.

NOTHING = "nothing"


class Equality(StrEnum):
    EQUAL = "equal"  # every bit
    DIFFERENT = "different"  # other bits
    CHANGED = "changed"  # another shape or dtype, so that values cannot be compared
    ONLY_FIRST = "only in the first"
    ONLY_SECOND = "only in the second"


class Comparison(View, frozen=True):
    """One variable of two checkpoints or models. The numbers are None where values were not compared."""

    name: str
    verdict: Equality
    first: str
    second: str
    elements: int | None = None
    differing: int | None = None
    one_is_nan: int | None = None
    max_absolute: float | None = None
    max_relative: float | None = None


def differences(a: Schema, b: Schema) -> list[Comparison]:
    """The variables whose shape or dtype differ, or that only one has: those of `a` first, in its order."""
    first, second = ({variable.name: _described(variable) for variable in schema} for schema in (a, b))
    found = []
    for name in dict.fromkeys((*first, *second)):
        if first.get(name) != second.get(name):
            verdict = Equality.ONLY_SECOND if name not in first else Equality.ONLY_FIRST
            verdict = Equality.CHANGED if name in first and name in second else verdict
            found.append(Comparison(name, verdict, first.get(name, NOTHING), second.get(name, NOTHING)))
    return found


def diff(a: RunDir, b: RunDir, *, values: bool = True, progress: Progress | None = None) -> list[Comparison]:
    """Compares two checkpoints in a stream; every byte is checked, even if both have the same digests."""
    with open_checkpoint(a) as first, open_checkpoint(b) as second:
        changed = {each.name: each for each in differences(first.manifest.schema, second.manifest.schema)}
        names = tuple(dict.fromkeys((*first.names(), *second.names())))
        holders = {name: [one for one in (first, second) if name in one.layout.spans] for name in names}
        total = sum(one.layout.spans[name].nbytes for name in names for one in holders[name])
        done, made = 0, []
        for name in names:
            made.append(changed.get(name) or _compared(first, second, name, values=values))
            for reader in holders[name] if values else []:
                if made[-1].verdict is not Equality.DIFFERENT:  # Otherwise the comparison has read them.
                    for _ in reader.pieces(name):  # Equal digests in the manifests do not prove intact bytes.
                        pass
                done += reader.layout.spans[name].nbytes
                if progress is not None:
                    progress(done, total)
        return made


def _described(variable: Variable) -> str:
    return f"{variable.dtype} of shape {variable.shape}"


def _compared(first: CheckpointReader, second: CheckpointReader, name: str, *, values: bool) -> Comparison:
    variable = first.layout.spans[name].variable
    text, dtype = _described(variable), np.dtype(variable.dtype)
    if first.manifest.digests[name] == second.manifest.digests[name]:
        return Comparison(name, Equality.EQUAL, text, text, math.prod(variable.shape), 0, 0, 0.0, 0.0)
    if not values:
        return Comparison(name, Equality.DIFFERENT, text, text)
    sides = (reader.pieces(name) for reader in (first, second))
    values_of = ((np.frombuffer(piece, np.uint8).view(dtype) for piece in side) for side in sides)
    found = distance(zip(*values_of, strict=True))
    verdict = Equality.DIFFERENT if found.count else Equality.EQUAL
    numbers = found.of, found.count, found.one_is_nan, found.largest_absolute, found.largest_relative
    return Comparison(name, verdict, text, text, *numbers)
