"""The checkpoints of a run: `RUN/checkpoints/00001200-3/`, of step 1200 and the third group of workers.

One process writes; any process may read. No name is written twice: a second checkpoint of a step is written
next to the first, which is removed once the second is durable. Checkpoints of a group that was presumed dead
do not count (`groups.py`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TypeAlias

from replicast.errors import CheckpointError, FileDamaged
from replicast.files import RunDir, RunPath, sync_directory
from replicast.storage.checkpoint.manifest import Draft, Manifest
from replicast.storage.checkpoint.ordering import Best, best_of, latest_first, line_of_next, with_unreadable
from replicast.storage.checkpoint.places import Places
from replicast.storage.checkpoint.reading import CheckpointReader, advice, open_checkpoint
from replicast.storage.checkpoint.writing import (
    Pieces,
    in_pieces,
    put_in_place,
    temporary_directory,
    write_contents,
)
from replicast.storage.fence import Fence
from replicast.update.edits import Array

logger = logging.getLogger("replicast")

# Inside the class, `list` is a method.
_Manifests: TypeAlias = list[Manifest]
_Problems: TypeAlias = list[FileDamaged]
_Steps: TypeAlias = list[int]


class CheckpointStore:
    """The checkpoints in a run directory.

    Args:
        run_dir: The run directory; the first write creates `checkpoints` in it.
        fence: The claim of the group of workers that writes, if one does.

    Attributes:
        directory: Where they are.
    """

    def __init__(self, run_dir: RunDir, fence: Fence | None = None) -> None:
        self._fence = fence
        self._places = Places(run_dir, 0 if fence is None else fence.number)
        self.directory = self._places.directory
        self._stuck: set[RunPath] = set()

    def path(self, step: int) -> RunPath:
        """The directory that the checkpoint of a step has, or would have."""
        there = self._places.counting().get(step)
        return there[-1] if there else self._places.new(step)

    def find(self, step: int) -> RunPath:
        """The directory of the checkpoint of a step.

        Raises:
            CheckpointError: There is none.
        """
        paths = self._places.counting().get(step)
        if paths:
            return paths[-1]
        path = self.path(step)
        steps = [manifest.step for manifest in self.list()]
        there = f"one of {', '.join(map(str, steps[-5:]))}" if steps else "a run with checkpoints"
        raise CheckpointError(
            "There is no checkpoint of this step", path=path, step=step, expected=there, received=str(step)
        )

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
        """The manifest of the checkpoint of a step.

        Raises:
            CheckpointError: There is none, or it is not committed.
            FileDamaged: One of its files is damaged.
        """
        with self.open(step) as reader:
            return reader.manifest

    def open(self, step: int, *, verify: bool = False) -> CheckpointReader:
        """Opens the checkpoint of a step. If it was copied from another run, its manifest lists no updates.

        Args:
            step: The step.
            verify: Also read all bytes and compare their digests.

        Raises:
            CheckpointError: There is none, or it is not committed.
            FileDamaged: One of its files is damaged.
        """
        reader = open_checkpoint(self.find(step))
        reader.manifest = reader.manifest.seen_by(self._places.run())
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

        Args:
            draft: What is known about the checkpoint before it is written.
            arrays: Each variable's name and value, consumed one by one. Any order works; that of `file_order`
                is the fastest.
            digests: The expected digest of each variable: other bytes are not committed.

        Returns:
            The manifest of the checkpoint that exists now.

        Raises:
            CheckpointError: The arrays do not match the draft's schema or the digests.
            TypeError, ValueError: The draft cannot be written as JSON.
            JobFailed: Another group has taken over the run. The checkpoint may or may not count.
            OSError: It cannot be written. Earlier checkpoints are unchanged, and nothing partial is left. If
                only the parent directory could not be synced, the new checkpoint exists and is intact.
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
        """Writes a checkpoint that replaces the one of its step once `commit` has returned.

        Args:
            draft: What is known about the checkpoint before it is written.
            variables: Each variable's name and bytes.
            commit: Called when all bytes are durable, before the checkpoint gets its name. If it raises,
                nothing has changed.

        Raises:
            JobFailed: Another group has taken over the run. The checkpoint may or may not count.
            OSError: It cannot be written, or cannot get its name; nothing partial is left.
        """
        with temporary_directory(self.directory) as temporary:
            manifest = write_contents(temporary, self._placed(draft), variables)
            commit()
            self._put_in_place(temporary, draft.step)
        return manifest

    def prune(self, keep: int, best: Best | None = None, named: int | None = None) -> _Steps:
        """Removes old checkpoints: all but the last `keep` and the best one. Damaged ones are left alone.

        A checkpoint that cannot be removed stays, with one warning.

        Args:
            keep: The number of latest checkpoints to keep, at least 1. Those that training abandoned by going
                back count as older than those that it follows.
            best: A metric, and whether its "min" or "max" is the best; of equal values, the latest is.
            named: The step of a checkpoint to keep in any case.

        Returns:
            The steps of the removed checkpoints.
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
        """Removes a checkpoint, even a damaged one; atomically for readers, even if interrupted.

        Raises:
            CheckpointError: There is none.
            OSError: It cannot be removed.
        """
        self.find(step)
        # Older ones of the same step first: a reader would find them once the newest is gone.
        self._places.remove(self._places.counting().get(step, []))
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
        """Removes leftovers of a writer that died. Only while no one is writing."""
        self._places.clean()

    def _placed(self, draft: Draft) -> Draft:
        """The draft of a checkpoint that is the last one of this run once it is written."""
        return replace(draft, line=line_of_next(self.list(), draft.step), run=self._places.run())

    def _put_in_place(self, temporary: RunPath, step: int) -> None:
        """Gives a written checkpoint its name, and removes those of the same step."""
        replaced = self._places.counting().get(step, [])
        put_in_place(temporary, self._places.new(step))
        if self._fence is not None:
            self._fence.check()
        # Only now: the new name is durable, and counts for a group that takes over the run.
        with contextlib.suppress(OSError):  # A leftover only uses disk space: no one reads it any more.
            self._places.remove(replaced)

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
        for step, paths in sorted(self._places.counting().items()):
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
