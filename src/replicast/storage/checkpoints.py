"""The checkpoints of a run: `RUN/checkpoints/00001200-3/`, of step 1200 and the third group of workers.

One process writes; any process may read. No name is written twice: a second checkpoint of a step is written
next to the first, which is removed once the second is durable. Checkpoints of a group that was presumed dead
do not count (`claims.py`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

from replicast.errors import CheckpointError, FileDamaged
from replicast.files import TEMPORARY, RunDir, RunPath, below, sync_directory
from replicast.storage.checkpoint_files import (
    CheckpointReader,
    Draft,
    Manifest,
    Pieces,
    advice,
    in_pieces,
    open_checkpoint,
    put_in_place,
    temporary_directory,
    write_contents,
)
from replicast.storage.claims import CHECKPOINTS, Fence, checkpoint_name, last_claim, named_checkpoints
from replicast.update.edits import Array

logger = logging.getLogger("replicast")


# Which checkpoint is the last one: training may have gone back to an earlier step and continued from there.
#
#     500   1000   1500   2000      one line of training
#      └─ 600   700                 restore(step=500): another line, which is now the current one
#
# A checkpoint of an earlier step than the last one starts a new line, with a number one higher. Neither
# clocks nor attempt numbers would work: clocks differ between hosts, and a run may be copied into another.

Best: TypeAlias = tuple[str, Literal["min", "max"]]  # A metric, and which of its values is the best.


def line_of_next(there: Iterable[Manifest], step: int) -> int:
    """The line of a new checkpoint of this step, given the existing ones."""
    last = max(there, key=_age, default=None)
    return 0 if last is None else last.line + (step < last.step)


def latest_first(there: Iterable[Manifest]) -> list[Manifest]:
    """The last checkpoint, those that it follows, and then those abandoned when training went back."""
    followed: list[Manifest] = []
    given_up: list[Manifest] = []
    for manifest in sorted(there, key=_age, reverse=True):
        came_before = not followed or manifest.step < followed[-1].step
        (followed if came_before else given_up).append(manifest)
    return followed + given_up


def with_unreadable(ordered: Sequence[int], unreadable: Iterable[int]) -> list[int]:
    """Inserts steps with unreadable checkpoints, whose line is not known, into an ordered list of steps.

    Each is placed before all lower steps: it may have been the last.
    """
    steps = list(ordered)
    for step in sorted(unreadable):
        lower = (place for place, other in enumerate(steps) if other < step)
        steps.insert(next(lower, len(steps)), step)
    return steps


def best_of(ordered: Iterable[Manifest], best: Best | None) -> set[int]:
    """The step of the best checkpoint, if any has the metric; of equal ones, the first in this order."""
    if best is None:
        return set()
    metric, direction = best
    sign = 1.0 if direction == "max" else -1.0
    ranked = [m for m in ordered if not math.isnan(m.metrics.get(metric, math.nan))]
    return {max(ranked, key=lambda m: sign * m.metrics[metric]).step} if ranked else set()


def _age(manifest: Manifest) -> tuple[int, int]:
    return manifest.line, manifest.step


# Inside the class, `list` is a method.
_Manifests: TypeAlias = list[Manifest]
_Problems: TypeAlias = list[FileDamaged]
_Steps: TypeAlias = list[int]
_Paths: TypeAlias = list[RunPath]


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
        steps = [manifest.step for manifest in self.list()]
        there = f"one of {', '.join(map(str, steps[-5:]))}" if steps else "a run with checkpoints"
        problem = "There is no checkpoint of this step"
        raise CheckpointError(problem, path=self._new(step), step=step, expected=there, received=str(step))

    def list(self) -> _Manifests:
        """The committed checkpoints by step, without damaged ones. The last of them need not be `last`."""
        return [found for found in self._look().values() if isinstance(found, Manifest)]

    def problems(self) -> _Problems:
        """What is wrong with the checkpoints that `list` omits. Damaged bytes are only found by `verify`."""
        return [found for found in self._look().values() if isinstance(found, FileDamaged)]

    def last(self) -> Manifest | None:
        """The committed checkpoint that training would go on from, if there is one.

        The one answer to that question, for starts, launchers, readers and commands: it is the one of the
        latest step; where training has gone back behind one, of those written since.
        """
        return self.last_and_skipped()[0]

    def last_and_skipped(self) -> tuple[Manifest | None, _Problems]:
        """What `last` returns, and what is wrong with checkpoints that may be later."""
        looked = self._look()
        skipped: _Problems = []
        for step in self._latest_first(looked):
            found = looked[step]
            if isinstance(found, Manifest):
                return found, skipped
            skipped.append(found)
        return None, skipped

    def steps(self) -> _Steps:
        """The steps that have a checkpoint, intact or not; the latest, in the sense of `last`, first."""
        return self._latest_first(self._look())

    def last_whole(self, without: int) -> int | None:
        """The latest step except `without` whose checkpoint is intact. Reads all bytes until it finds one."""
        for step in self.steps():
            with contextlib.suppress(CheckpointError, FileDamaged):
                if step != without:
                    self.open(step, verify=True).close()
                    return step
        return None

    def manifest(self, step: int) -> Manifest:
        with self.open(step) as reader:
            return reader.manifest

    def open(self, step: int, *, verify: bool = False) -> CheckpointReader:
        """Opens the checkpoint of a step. If copied from another run, its manifest lists no updates."""
        reader = open_checkpoint(self.find(step))
        reader.manifest = reader.manifest.seen_by(self._run())
        if reader.manifest.step != step:
            received = reader.manifest.step
            reader.close()
            raise FileDamaged(
                self.path(step),
                f"it is the checkpoint of another step. Received: {received}. {advice(self.path(step))}",
            )
        if verify:
            reader.verify()
        return reader

    def write(
        self, draft: Draft, arrays: Iterable[tuple[str, Array]], digests: Mapping[str, str] | None = None
    ) -> Manifest:
        """Writes a checkpoint. When this returns, it is committed and durable.

        An existing checkpoint of that step is kept if it is equivalent, and replaced otherwise. The written
        checkpoint is the last one from then on, even if there are checkpoints of later steps.
        """
        if draft.step < 0:
            raise ValueError(f"A step is counted from 0. Received: {draft.step}")
        variables = {variable.name: variable for variable in draft.schema}
        with temporary_directory(self.directory) as temporary:
            manifest = write_contents(temporary, self._placed(draft), in_pieces(arrays, variables))
            _check_digests(manifest, digests)
            existing = self._same(manifest)
            if existing is not None:
                return existing
            self._put_in_place(temporary, draft.step)
        return manifest

    def replace(
        self, draft: Draft, variables: Iterable[tuple[str, Pieces]], commit: Callable[[], None]
    ) -> Manifest:
        """Writes a checkpoint that replaces the one of its step once `commit` has returned."""
        with temporary_directory(self.directory) as temporary:
            manifest = write_contents(temporary, self._placed(draft), variables)
            commit()
            self._put_in_place(temporary, draft.step)
        return manifest

    def prune(self, keep: int, best: Best | None = None, named: int | None = None) -> _Steps:
        """Removes old checkpoints: all but the last `keep` and the best one. Damaged ones are left alone.

        A checkpoint that cannot be removed stays, with one warning.
        """
        if keep < 1:
            raise ValueError(
                f"At least the newest checkpoint is kept: keep must be 1 or more. Received: {keep}"
            )
        if best is not None and best[1] not in ("min", "max"):
            raise ValueError(f'The best is the "min" or the "max" of a metric. Received: {best[1]!r}')
        ordered = latest_first(self.list())
        kept = {manifest.step for manifest in ordered[:keep]} | best_of(ordered, best) | {named}
        superfluous = sorted(manifest.step for manifest in ordered if manifest.step not in kept)
        return [step for step in superfluous if self._removed(step)]

    def remove(self, step: int) -> None:
        """Removes a checkpoint, even a damaged one; atomically for readers, even if interrupted."""
        self.find(step)
        # Older ones of the same step first: a reader would find them once the newest is gone.
        self._remove(self._counting().get(step, []))
        sync_directory(self.directory)

    def _removed(self, step: int) -> bool:
        """Removes an old checkpoint if possible. A failure does not affect the one just written."""
        path = self.path(step)
        try:
            self.remove(step)
        except (CheckpointError, FileNotFoundError):
            return False  # It was removed by someone else meanwhile.
        except OSError as error:
            if path not in self._stuck:
                logger.warning("the old checkpoint %s cannot be removed and uses disk space: %s", path, error)
            self._stuck.add(path)
            return False
        return True

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
        sync_directory(self.directory)
        for (step, _, _), path in named_checkpoints(self._run_dir):
            if path not in counting.get(step, []):
                logger.warning(
                    "%s does not count: it was written by a group of workers that was presumed dead. If it "
                    "is a copy from another run, rename it to %08d",
                    path,
                    step,
                )

    def _counting(self) -> dict[int, _Paths]:
        """The directories of the checkpoints that count, by step; those of one step with the newest last."""
        claim = last_claim(self._run_dir)
        counting: dict[int, _Paths] = {}
        for (step, _, _), path in named_checkpoints(self._run_dir):
            if claim is None or claim.counts(path.name):
                counting.setdefault(step, []).append(path)
        return counting

    def _new(self, step: int) -> RunPath:
        """A name for a checkpoint of this step that this group has not used."""
        own = [parts[2] for parts, _ in named_checkpoints(self._run_dir) if parts[:2] == (step, self._group)]
        return self.directory / checkpoint_name(step, self._group, max(own, default=0) + 1)

    def _run(self) -> str:
        """The id of the run; empty if no group has claimed it."""
        claim = last_claim(self._run_dir)
        return "" if claim is None else claim.run

    def _remove(self, paths: Iterable[RunPath]) -> None:
        """Removes checkpoints in this order, each atomically for readers."""
        for path in paths:
            aside = self.directory / f"{TEMPORARY}{secrets.token_hex(8)}"
            with contextlib.suppress(FileNotFoundError):
                path.rename(aside)
            aside.rmtree()

    def _placed(self, draft: Draft) -> Draft:
        """The draft of a checkpoint that is the last one of this run once it is written."""
        return replace(draft, line=line_of_next(self.list(), draft.step), run=self._run())

    def _put_in_place(self, temporary: RunPath, step: int) -> None:
        """Gives a written checkpoint its name, and removes those of the same step."""
        replaced = self._counting().get(step, [])
        put_in_place(temporary, self._new(step))
        if self._fence is not None:
            self._fence.check()
        # Only now: the new name is durable, and counts for a group that takes over the run.
        with contextlib.suppress(OSError):  # A leftover only uses disk space: no one reads it any more.
            self._remove(replaced)

    def _same(self, manifest: Manifest) -> Manifest | None:
        """The existing checkpoint of that step, if it is equivalent and its bytes are intact."""
        with contextlib.suppress(CheckpointError, FileDamaged), self.open(manifest.step) as reader:
            existing = reader.manifest
            if (existing.state_digest, existing.schema.digest(), existing.position()) == (
                manifest.state_digest,
                manifest.schema.digest(),
                manifest.position(),
            ):
                reader.verify()
                return existing
        return None

    def _look(self) -> dict[int, Manifest | FileDamaged]:
        """The manifest of every checkpoint, or what is wrong with it, by step."""
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
        return looked

    @staticmethod
    def _latest_first(looked: Mapping[int, Manifest | FileDamaged]) -> _Steps:
        ordered = latest_first(found for found in looked.values() if isinstance(found, Manifest))
        readable = [manifest.step for manifest in ordered]
        return with_unreadable(readable, set(looked) - set(readable))


def _check_digests(manifest: Manifest, known: Mapping[str, str] | None) -> None:
    """Raises unless the written bytes have the expected digests: memory may change under a writer."""
    if known is None:
        return
    for name, digest in manifest.digests.items():
        if known.get(name) != digest:
            raise CheckpointError(
                "The state changed while it was being written. Nothing is saved",
                step=manifest.step,
                variable=name,
                expected=f"digest {known.get(name)}",
                received=digest,
            )


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
    whole = store.last_whole(without=newest) if step is not None else None
    begin = f"remove {store.directory} to start from scratch"
    raise CheckpointError(
        f"The checkpoint of step {newest} is damaged: {damaged[newest]}"
        if step is not None
        else f"No checkpoint is intact. Step {newest}: {damaged[newest]}",
        path=store.path(newest),
        step=newest,
        remedy=f"restore(step={whole}) is intact" if whole is not None else f"No other is intact; {begin}",
    )
