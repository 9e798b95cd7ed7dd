"""Worker 0's side of the inbox: proposes what others put there, and settles what has its outcome.

The thread `run-files` calls it; at the end of the job, the training thread does.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from replicast.codec import fields_of
from replicast.core.entries import Receipt
from replicast.core.messages import Tell
from replicast.core.records import Stage
from replicast.errors import FileDamaged, ReplicastError, UpdateRefused
from replicast.files import RunDir, RunPath
from replicast.processes import this_process
from replicast.replicas.session import Session
from replicast.replicas.ticket import diverged, refused
from replicast.storage import inbox
from replicast.update.schema import check_outline
from replicast.update.update import Update

logger = logging.getLogger("replicast")

ASIDE_SECS = 10.0
"""How long an update is set aside after a disk error, so that others need not wait for it."""
_TAKE_SECS = 0.5
"""How long one look may take; the rest is for the next one, because the same thread also writes notes."""


class Inbox:
    """The updates that others have put into the inbox, from the first look to their outcome.

    Each method may raise OSError: the disk has a problem.
    """

    def __init__(self, session: Session, warn: Callable[[RunDir, str, Exception], None]) -> None:
        self._session = session
        self._warn = warn
        self._proposed: dict[str, RunPath] = {}
        self._noted: dict[RunPath, tuple[Any, ...]] = {}
        self._outcomes: queue.SimpleQueue[tuple[str, Tell]] = queue.SimpleQueue()
        self._unsettled: dict[str, Tell] = {}
        self._withdrawals = 0
        self._aside: dict[RunPath, float] = {}

    def on_outcome(self, ticket: str, tell: Tell) -> None:
        """A proposal has its outcome. Called by the event loop."""
        self._outcomes.put((ticket, tell))

    def propose(self, run_dir: RunDir) -> None:
        """Proposes what is new in the inbox. Only while a training runs: otherwise the script may be over."""
        ends = time.monotonic() + _TAKE_SECS
        known = set(self._proposed.values())
        inbox.put_back(run_dir)
        for waiting in inbox.waiting(run_dir):
            if waiting.path not in known:
                self._with_entry(waiting.path, self._propose, run_dir)
            if time.monotonic() > ends:
                return

    def withdraw(self, run_dir: RunDir) -> None:
        """Withdraws what others want to have withdrawn. Only while a training runs."""
        for update_id in inbox.take_withdrawals(run_dir):
            self._withdrawals += 1
            self._session.proposals.withdraw_from_outside(
                f"withdraw-{update_id}-{self._withdrawals}", update_id
            )

    def take_outcomes(self, run_dir: RunDir) -> None:
        """Takes the outcomes that have come, for `settle`: check in between whose run it is."""
        while not self._outcomes.empty():
            ticket, tell = self._outcomes.get()
            if ticket in self._proposed:
                self._unsettled[ticket] = tell

    def settle(self, run_dir: RunDir) -> None:
        """Notes the stage of each proposal, and removes settled ones from the inbox."""
        settled = False
        for ticket in list(self._unsettled):
            path = self._proposed[ticket]
            self._with_entry(path, partial(self._settle, ticket), run_dir)
            settled = True
        if settled:
            inbox.clean(run_dir)
        self._note_stages(run_dir)

    def settle_last(self, run_dir: RunDir) -> None:
        """The same at the end of the job: also tries again what was set aside, and says what is left."""
        self._aside.clear()
        self.settle(run_dir)
        known = set(self._proposed.values())
        left = [ascii(one.id[:8]) for one in inbox.waiting(run_dir) if one.path not in known]
        if left and self._session.rank == 0:
            logger.warning(
                "not applied, because no step was trained since: %s in the inbox, for the next start that "
                "trains: %s",
                "1 update waits" if len(left) == 1 else f"{len(left)} updates wait",
                ", ".join(left[:5]) + (", …" if len(left) > 5 else ""),
            )

    def _with_entry(self, path: RunPath, act: Callable[[RunDir, RunPath], None], run_dir: RunDir) -> None:
        """Processes one update of the inbox; sets it aside for a while after a disk error.

        A full disk may have space again, so the update is retried; not often, since a refusal is fsynced. Any
        other error is caused by the update itself: it is refused, and the job continues.
        """
        if time.monotonic() < self._aside.get(path, 0.0):
            return
        self._aside.pop(path, None)
        try:
            try:
                act(run_dir, path)
            except (OSError, ReplicastError):
                raise
            except Exception as error:
                logger.exception("%s refused: unexpected error while processing it", path)
                inbox.refuse(run_dir, path, error)
        except OSError as error:
            self._aside[path] = time.monotonic() + ASIDE_SECS
            self._warn(path, f"{path} stays in the inbox and will be retried after the others", error)

    def _propose(self, run_dir: RunDir, path: RunPath) -> None:
        try:
            # Identifies this file: the same update may be submitted again after a refusal.
            status = path.stat()
            ticket = f"{path.name}@{status.st_ino}-{status.st_mtime_ns}"
            taken = inbox.take(run_dir, path, self._session.limits.max_bytes, self._check)
            if taken is not None:
                self._propose_taken(ticket, taken)
                self._proposed[ticket] = path
        except FileNotFoundError:
            return  # withdrawn just now
        except (UpdateRefused, FileDamaged) as error:
            inbox.refuse(run_dir, path, error, durably=False)

    def _check(self, update: Update) -> None:
        """Refuses by its header alone what does not fit the state; a revert gets its edits later."""
        if update.edits:
            check_outline(update, self._session.replica.state.schema, self._session.limits)

    def _propose_taken(self, ticket: str, taken: inbox.Submitted) -> None:
        proposals = self._session.proposals
        if taken.reverts is None:
            proposals.propose_from_outside(ticket, taken.update, taken.at_step, taken.trial)
        else:
            proposals.revert_from_outside(ticket, taken.update, taken.reverts, forced=taken.forced)

    def _note_stages(self, run_dir: RunDir) -> None:
        under_way = {one["id"]: one for one in self._session.operations()} if self._proposed else {}
        for path in self._proposed.values():
            one = under_way.get(path.name.removesuffix(".safetensors"))
            names = ("stage", "step", "waits_for", "trial_until")
            standing = None if one is None else tuple(one[name] for name in names)
            if one is not None and standing is not None and self._noted.get(path) != standing:
                self._noted[path] = standing
                waits = {name: one[name] for name in ("waits_for", "trial_until")}
                self._note(run_dir, one["id"], Stage(one["stage"]), one["step"], **waits)

    def _note(self, run_dir: RunDir, id_: str, stage: Stage, step: int | None, **fields: Any) -> None:
        inbox.note_stage(run_dir, id_, stage, step=step, taken_by=this_process(), **fields)

    def _settle(self, ticket: str, run_dir: RunDir, path: RunPath) -> None:
        tell = self._unsettled[ticket]
        match tell.stage, tell.outcome:
            case ((Stage.VERIFIED | Stage.REVERTED), Receipt()):
                # The note includes the receipt: without a journal on disk, its author finds it nowhere else.
                receipt = fields_of(tell.outcome)
                self._note(run_dir, tell.id, tell.stage, tell.step, receipt=receipt)
                inbox.done(path)
            case Stage.FAILED, Receipt():
                error = diverged(tell.outcome)
                logger.error("%s", error)
                self._note(run_dir, tell.id, tell.stage, tell.step, reason=str(error))
                inbox.done(path)
            case Stage.WITHDRAWN, _:
                inbox.note_stage(run_dir, tell.id, Stage.WITHDRAWN)
                inbox.done(path)
            case _:
                known = tell.outcome is not None
                said = (
                    refused(tell.outcome) if known else UpdateRefused("It was refused in an earlier attempt")
                )
                inbox.refuse(run_dir, path, said)
        del self._unsettled[ticket], self._proposed[ticket]
        self._noted.pop(path, None)
