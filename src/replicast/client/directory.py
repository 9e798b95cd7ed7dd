"""A run in a directory: what its files tell, and how its job is asked for something through its inbox.

push, revert             checked first, and submitted only if a job will take it
withdraw                 removes an update that no job has taken, or asks the job that has
audit, pull,             a request; whoever asks polls for the answer until a deadline, and leaves nothing
checkpoint, stop         behind when it gives up
status, log, show, look  the journal, the inbox and the refusals seen as one list. A damaged entry of the
                         journal hides no other: what it said is missing, and `_damage_text` names its file
"""

from __future__ import annotations

import contextlib
import getpass
import math
import os
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from threading import Lock
from time import monotonic, sleep
from typing import Any, cast

import msgspec
from msgspec import structs

from replicast import errors
from replicast.client.metrics import Metrics, MetricsFile
from replicast.client.run import Brief, CheckpointView, Overview, Pulled, Pushed, Run, Start, ranges_of, ticks
from replicast.codec import parse_integer
from replicast.core.entries import Receipt, Stage
from replicast.errors import FileDamaged, NoAnswer, NotFound, RequestRefused, UpdateRefused
from replicast.files import RunDir, RunPath, below, read_json
from replicast.launcher.screen import as_shown, without_colours
from replicast.processes import is_alive, is_on_this_host
from replicast.storage import inbox, run_files
from replicast.storage.checkpoints import CheckpointStore
from replicast.storage.claims import GROUPS, group_numbers, log_path, read_claim
from replicast.storage.inbox import InboxAnswer, Kind, Rows
from replicast.storage.journal import Updates, UpdateView, load_update, undo
from replicast.storage.run_files import Annotation
from replicast.update.audit_report import AuditReport, workers_text
from replicast.update.digest import digest_array
from replicast.update.edits import Array, Variable
from replicast.update.guard import Examination, examine, view_of, warnings_of
from replicast.update.schema import Schema, meaning, planned
from replicast.update.trial import Trial
from replicast.update.update import Update

POLL_SECS = 0.1
MOST_RUNS = 500
LISTEN_SECS = run_files.ABSENT_SECS
"""A running worker writes a note every second, but worker 0 reads a large update in between."""
_READ_NOTES_SECS = 1.0
_TOO_OLD_SECS = 86_400.0
_LAST, _LAST_ENDED = 5, 20  # In an overview: of the last updates, and of those refused or withdrawn.
_LAST_CHANGES = 50
_LAST_EVALUATIONS = 200
_MAX_OPERATIONS_BYTES = 2**20
_MOST_STARTS = 50
_MOST_DAMAGED = 5
_MOST_AROUND = 200  # For so many updates of a list the metrics around them are read.
_MOST_DESCRIBED = 50  # So many waiting updates are described: a status reads their files each time.
_DESCRIBED = ("author", "note", "edits", "scheduled", "trial", "reverts")
_AS_IN_BRIEF = ("run", "state", "sentence", "running", "step", "metrics", "annotation")
_OPERATION = ("id", "kind", "stage", "step", "waits_for", "author", "note")
_WITHDRAWAL_SECS = 30.0  # The job may be far from its next boundary, for example in an evaluation.
_WITHDRAWABLE = (Stage.PROPOSED, Stage.PREPARED, Stage.SCHEDULED)


def this_user() -> str:
    """Who runs this, as user@host: the author of what does not say by whom it is."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # A container's user without a name.
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


class DirectoryRun(Run):
    path: RunPath
    poll_secs = POLL_SECS

    def __init__(self, path: RunDir) -> None:
        self.path = below(path)
        self.where = str(path)
        files = {"training": run_files.METRICS, "workers": run_files.WORKERS}
        self._metrics = {of: MetricsFile(self.path / name) for of, name in files.items()}
        self._known: tuple[list[tuple[int, ...]], Updates] | None = None

    def _journal(self) -> Updates:
        """What the journal says: as read before, as long as no log of it has changed.

        The status of each second would parse 2,000 updates each time: 0.15 s. The caller changes nothing.
        """
        seen = list[tuple[int, ...]]()
        for group in group_numbers(self.path):
            seen.append((group,))
            with contextlib.suppress(OSError):
                now = log_path(self.path, group).stat()
                seen.append((now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns))
        known = self._known
        if known is None or known[0] != seen:
            # What is written meanwhile is seen at the next look.
            self._known = known = seen, Updates(self.path)
        return known[1]

    # The run as a whole.

    def do_brief(self) -> Brief:
        seen = see(self.path)
        return self._brief(described_run(self.path), seen, seen.state)

    def _brief(self, info: run_files.RunInfo | None, seen: SeenJob, now: run_files.RunState) -> Brief:
        notes = seen.notes
        waits = any(note.waiting_for == run_files.WITHOUT_CALLBACK for note in notes)
        return Brief(
            run=self.where,
            state=now.state,
            sentence=now.sentence,
            running=now.state.is_running,
            step=max((note.step for note in notes), default=None),
            workers=_size(info, now),
            heard_at=max((note.time for note in notes), default=None),
            waits_for=run_files.WITHOUT_CALLBACK if waits else "",
            began_at=next((start.at for start in self._starts(1)), None),
            metrics=cast("Any", run_files.last_metrics(self.path)),
            annotation=run_files.read_annotations(self.path, [None])[0],
        )

    def do_status(self) -> Overview:
        seen, info = see(self.path), described_run(self.path)
        now = seen.state
        # A former, larger job may have left notes of workers that this one does not have.
        seen = replace(seen, notes=[note for note in seen.notes if note.rank < _size(info, now)])
        brief, told = self._brief(info, seen, now), run_files.changes(self.path)
        evaluations = run_files.measured_in(self.path, run_files.EVALUATIONS)
        return Overview(
            **{name: getattr(brief, name) for name in _AS_IN_BRIEF},
            time=seen.now,
            size=brief.workers,
            attempt=now.attempt if info is None else max(info.attempt, now.attempt),
            journaled=info is None or info.journaled,
            workers=tuple(seen.notes),
            evaluations=cast("Any", tuple(islice(evaluations, _LAST_EVALUATIONS))[::-1]),
            audit=next(iter(run_files.last_audits(self.path, 1)), None),
            operations=tuple(self._operations()) if brief.running else (),
            changes=tuple(one.to_json() for one in told[-_LAST_CHANGES:]),
            starts=tuple(self._starts()),
            restarted=sum(one.state is run_files.JobState.RESTARTING for one in told),
            **self._updates(),
        )

    def _updates(self) -> dict[str, Any]:
        """The updates of an overview; those in the inbox can be seen also when the journal is damaged."""
        try:
            journal = self._journal()
            updates = self._committed(journal, _order(journal)[-_LAST:])
            known = journal.history.by_id.keys() | journal.history.scheduled.keys()
            waiting = self._waiting(known)
            ended = self._ended(journal, known | {view.id for view in waiting})
            return {
                "updates": self._listed(self._annotated(updates)),
                "scheduled": self._annotated(journal.scheduled()),
                "waiting": self._annotated(waiting),
                "refused": self._annotated(ended[-_LAST_ENDED:]),
                "problem": _damage_text(journal),
            }
        except FileDamaged as error:
            return {"waiting": tuple(self._waiting(())), "problem": str(error)}

    def _operations(self) -> Iterator[dict[str, Any]]:
        """The operations that the job has in progress, as worker 0 last wrote them down."""
        try:
            told = read_json(self.path / "operations.json", max_bytes=_MAX_OPERATIONS_BYTES).get("operations")
        except FileDamaged:  # Missing when nothing ever was; replaced without waiting for the disk.
            return
        for one in told if isinstance(told, list) else ():
            if isinstance(one, dict):
                yield {name: one.get(name) for name in _OPERATION}

    def _starts(self, first: int | None = None) -> Iterator[Start]:
        """The first start and the last ones, or only the first ones; without those that cannot be read."""
        groups = sorted(group_numbers(self.path))
        for group in groups[:first] if first else [*groups[:1], *groups[1:][-_MOST_STARTS:]]:
            with contextlib.suppress(FileDamaged):
                claim = read_claim(self.path, group)
                told = claim.command, claim.versions, claim.commit
                yield Start(claim.attempt, claim.claimed_at, str(claim.process.get("host", "")), *told)

    def do_schema(self) -> Schema:
        return schema_of(self.path)

    def do_audits(self, last: int) -> list[AuditReport]:
        return run_files.last_audits(self.path, last)

    def do_metrics(
        self, since: int | None, points: int, of: str, start: float | None, end: float | None, sample: bool
    ) -> Metrics:
        file = self._metrics[of]
        if start is None and end is None:
            return file.sampled(points) if sample else file.read(since, points)
        return file.between(start or 0.0, math.inf if end is None else end, points)

    def do_checkpoints(self) -> list[CheckpointView]:
        found = []
        for one in CheckpointStore(self.path).manifests():
            patched_by = "" if one.parent is None else str(one.parent.get("update_id", "an update"))
            view = msgspec.convert(one, CheckpointView, from_attributes=True)
            found.append(structs.replace(view, patched_by=patched_by))
        return found

    def do_log_lines(self, worker: int, lines: int, attempt: int | None) -> list[str]:
        logs, name = self.path / "logs", f"worker-{worker:d}.log"
        if attempt is None:
            numbers = (path.name[8:] for path in logs.glob("attempt-*") if (path / name).exists())
            attempt = max((int(one) for one in numbers if one.isascii() and one.isdigit()), default=0)
        path = logs / f"attempt-{attempt:d}" / name
        if not path.is_file():
            files = (file for one in logs.glob("attempt-*") for file in one.glob("worker-[0-9]*.log"))
            ranks = sorted({int(file.name[7:-4]) for file in files if file.name[7:-4].isdecimal()})
            known = f"There are logs of {workers_text(ranks)}." if ranks else "Perhaps it had a --log-dir."
            raise NotFound(f"There is no log at {path}; only `replicast run` writes logs. {known}")
        last = islice(run_files.lines_from_the_end(path), max(lines, 0))
        return [without_colours(as_shown(line.decode(errors="replace"))) for line in last][::-1]

    # Where each update is.

    def do_log(self, last: int | None) -> list[UpdateView]:
        return list(self._listed(self.with_histograms(last)))

    def with_histograms(self, last: int | None = None) -> list[UpdateView]:
        """As `log`, with everything that their receipts say."""
        journal = self._journal()
        order = _order(journal)
        chosen = order if last is None else order[max(0, len(order) - last) :]
        return list(self._annotated(self._committed(journal, chosen)))

    def do_show(self, which: str | int, max_bytes: int | None) -> UpdateView:
        (view,), update = self._annotated([self._find(which)]), None
        if max_bytes is not None and (view.nbytes or 0) > max_bytes:
            return view
        try:
            if view.sequence is not None:
                update = load_update(self.path, view.sequence)
            elif view.path is not None:
                update = Update.load(view.path, max_bytes=max_bytes)
        except errors.PayloadRemoved:  # Every checkpoint contains it.
            return view
        except (FileDamaged, UpdateRefused) as error:
            # That may be why it was refused; or the job has just taken it away.
            return view if view.sequence is None else structs.replace(view, damage=str(error))
        if update is None:
            return view
        info = described_run(self.path)
        schema = None if info is None else info.schema
        edits = tuple(view_of(edit, schema).to_json() for edit in update.edits)
        return structs.replace(view, edits=edits, detailed=True)

    def do_look(self, update_id: str, thoroughly: bool) -> UpdateView:
        """By its note; by the journal when the note is missing or says too little."""
        noted = self._noted(update_id)
        if noted is not None and noted.receipt is not None:
            return noted
        if thoroughly or noted is None or noted.stage.is_final:
            found = self._matching(self._journal(), lambda id_: id_ == update_id)
            if found:
                return found[0]
        if noted is None:
            raise NotFound(f"There is no update {update_id} in {self.path}; it may have been withdrawn.")
        return noted

    def do_annotate(
        self, which: str | int | None, note: str | None, tags: Sequence[str] | None, author: str
    ) -> Annotation:
        """Of two at the same time, the one that writes last counts."""
        update_id = None if which is None else self._find(which).id
        known = run_files.read_annotations(self.path, [update_id])[0]
        fields = {
            "note": known.note if note is None else note.strip(),
            "tags": known.tags if tags is None else list(dict.fromkeys(filter(None, map(str.strip, tags)))),
            "author": author or this_user(),
            "time": time.time(),
        }
        try:
            made = Annotation.from_json(fields)
            str(made).encode()
        except ValueError as error:
            raise RequestRefused(str(error)) from error
        run_files.write_annotation(self.path, update_id, made)
        return made

    def _annotated(self, views: Sequence[UpdateView]) -> tuple[UpdateView, ...]:
        noted = run_files.read_annotations(self.path, [view.id for view in views])
        return tuple(
            structs.replace(view, annotation=one) if one.time else view
            for view, one in zip(views, noted, strict=True)
        )

    def _listed(self, views: Sequence[UpdateView]) -> tuple[UpdateView, ...]:
        """As they are told in a list: only `show` has the histograms, which are most of a long answer."""

        def plain(receipt: Receipt) -> Receipt:
            effects = tuple(structs.replace(one, histogram=msgspec.UNSET) for one in receipt.effects or ())
            return structs.replace(receipt, effects=effects) if effects else receipt

        return tuple(structs.replace(view, receipts=tuple(map(plain, view.receipts))) for view in views)

    def _find(self, which: str | int) -> UpdateView:
        """The update that a person means: by its number, by its id, or by the beginning of its id.

        Digits alone are never the beginning of an id: `revert RUN 7`, where there is no update 7, must not
        revert the one whose random id begins with 7.
        """
        given, journal, number = str(which), self._journal(), None
        with contextlib.suppress(ValueError):
            if (number := parse_integer(given)) in journal.history.committed:
                return self._committed(journal, [number])[0]
        noted = self._noted(given)
        found = self._matching(journal, lambda id_: id_ == given) or ([] if noted is None else [noted])
        if not found and given and number is None:
            found = self._matching(journal, lambda id_: id_.startswith(given))
        ids = sorted({view.id for view in found})
        if not ids:
            said = f"There is no update {given[:200]} in {self.path}. `replicast status` and `log` list them."
            raise NotFound(f"{said}\n{_damage_text(journal)}".rstrip())
        if len(ids) > 1:
            raise NotFound(f"{given} may be {len(ids)} updates: {', '.join(ids[:5])}. Give more of the id.")
        return found[0]

    def _matching(self, journal: Updates, matches: Callable[[str], bool]) -> list[UpdateView]:
        """The updates with such an id; of those with the same one, what counts comes first."""
        numbers = [record.sequence for record in journal.history.committed.values() if matches(record.id)]
        views = [*self._committed(journal, numbers), *journal.scheduled()]
        known = {view.id for view in views}
        views += self._waiting(known)
        views += self._ended(journal, known)
        return [view for view in views if matches(view.id)]

    def _committed(self, journal: Updates, sequences: Iterable[int]) -> list[UpdateView]:
        """Some of the committed updates, with what the job that runs now has to do about them."""
        seen = see(self.path)
        attempt = max((note.attempt for note in seen.notes), default=0) if seen.running else 0
        reached = max((note.step for note in seen.notes if note.attempt == attempt), default=0)
        views = []
        for view in map(journal.committed, sequences):
            receipt, step = view.receipt, view.step or 0
            if receipt is not None and receipt.attempt < attempt and step > reached:
                # The job was restarted before its step, and will apply it again there.
                view = structs.replace(view, stage=Stage.COMMITTED)
            elif receipt is None or view.stage is Stage.FAILED:
                note = inbox.answer_of(self.path, view.id)
                if note is not None:
                    applied = receipt is None and note.stage is Stage.APPLIED
                    stage = Stage.APPLIED if applied else view.stage
                    view = structs.replace(view, stage=stage, reason=note.problem)
            views.append(view)
        for place in range(max(0, len(views) - _MOST_AROUND), len(views)):
            receipt, step = views[place].receipt, views[place].step or 0
            if receipt is not None:
                around, *others = run_files.metrics_around(self.path, step, receipt.verified_at) or [None]
                views[place] = structs.replace(views[place], around=around, others=tuple(others))
        return views

    def _waiting(self, known: Collection[str]) -> list[UpdateView]:
        """What waits in the inbox, the oldest first, without the ids that are known from elsewhere."""
        found = list[UpdateView]()
        for entry in inbox.waiting(self.path):
            if entry.id not in known:
                view = self._noted(entry.id) or UpdateView(id=entry.id, stage=Stage.PROPOSED)
                told = inbox.describe(entry.path) if len(found) < _MOST_DESCRIBED else None
                if told is not None:
                    given = {name: getattr(told, name) for name in _DESCRIBED}
                    view = structs.replace(view, step=told.step if view.step is None else view.step, **given)
                at, nbytes = entry.submitted_at, entry.nbytes
                found.append(structs.replace(view, at=at, path=entry.path, nbytes=nbytes))
        return found

    def _ended(self, journal: Updates, known: Collection[str]) -> list[UpdateView]:
        """What was refused or withdrawn, the oldest first, without what was accepted or submitted again.

        The journal knows what was stored of an update, a file of the inbox who has withdrawn it and why.
        """
        found = dict(journal.ended)
        for id_, view in inbox.ended(self.path).items():
            stored = found.get(id_)
            if stored is not None and stored.edits:
                told = {name: getattr(stored, name) for name in ("author", "note", "edits", "nbytes")}
                view = structs.replace(view, **told)
            found[id_] = view
        views = (view for id_, view in found.items() if id_ not in known)
        return sorted(views, key=lambda view: (view.at, view.id))

    def _noted(self, update_id: str) -> UpdateView | None:
        """An update as its note says, which is cheap to read; None without a note.

        The note is all that is left of an update in a job whose journal is in memory.
        """
        note = inbox.answer_of(self.path, update_id)
        if note is None:
            return None
        receipt = note.receipt
        return UpdateView(
            id=update_id,
            stage=note.stage,
            at=note.time,
            step=note.step if receipt is None else receipt.step,
            receipts=() if receipt is None else (receipt,),
            outcome=None if receipt is None else receipt.trial,
            reason=note.problem,
            waits_for=note.waits_for,
            trial_until=note.trial_until,
        )

    @contextlib.contextmanager
    def _answer_to(self, id_: str) -> Iterator[Callable[[float], object] | None]:
        with contextlib.closing(inbox.Arrivals(self.path, id_)) as arrivals:
            yield arrivals.wait

    # Push, revert, withdraw.

    def examine(self, update: Update) -> Examination:
        info = described_run(self.path)
        if info is not None:
            return examine(update, info.schema)
        said = see(self.path).state.sentence
        told = f"{said}. The job checks this when its workers have met and its variables are known"
        return structs.replace(examine(update, None), warnings=(told,))

    def do_push(self, update: Update, at_step: int | None, trial: Trial | None, next_start: bool) -> Pushed:
        info = described_run(self.path)  # While the first workers start, the job checks it when it takes it.
        plan = update if info is None else planned(update, info.schema)
        # Before the update is submitted: who is told that the journal cannot be read will push again.
        journal = self._journal()
        history = journal.history
        if update.id in history.withdrawn:
            raise UpdateRefused(
                "An update with this id was withdrawn", expected="a new id", received=update.id
            )
        record = history.by_id.get(update.id)
        if record is not None and record.digest in (update.content_digest(), plan.content_digest()):
            return Pushed(self, update.id, record.sequence)
        if record is not None:
            raise errors.UpdateIdInUse(
                f"Another update with this id is in the journal, as number {record.sequence}",
                expected="a new id, or the same content",
                received=update.id,
            )
        seen = see(self.path)
        step = max((note.step for note in seen.notes), default=0)
        if at_step is not None and at_step <= step and seen.running:
            expected = f"a step after {step}, where the job is"
            raise UpdateRefused(f"Step {at_step} is past", expected=expected, received=f"step {at_step}")
        warning = self._submit(update.signed(this_user()), seen, next_start, at_step=at_step, trial=trial)
        # Where an entry of the journal is damaged, the job knows what it has: it decides.
        warnings = [_damage_text(journal), warning, *warnings_of(plan.edits)]
        return Pushed(self, update.id, warning="\n".join(filter(None, warnings)))

    def do_revert(
        self, which: str | int, note: str, dry_run: bool, force: bool, next_start: bool, author: str
    ) -> Pushed | Examination:
        view = self._find(which)
        if view.sequence is None:
            raise UpdateRefused(
                f"Update {view.id} is {view.stage}: it was not applied, so there is nothing to revert",
                remedy="replicast withdraw takes back what is not committed",
            )
        plan = undo(self.path, view.sequence, forced=force)
        if dry_run:
            meanings = dict.fromkeys(f"{edit.variable}: {meaning(edit)}" for edit in plan.update.edits)
            unless = "" if force else ": it is refused unless it is forced (--force, force=True)"
            notes = (*meanings, *(f"{one}{unless}" for one in plan.since))
            return structs.replace(examine(plan.update, schema_of(self.path)), notes=notes)
        if not force:
            plan.check()
        revert = Update(note=note or plan.update.note, author=author or this_user())
        warning = self._submit(revert, see(self.path), next_start, reverts=view.sequence, forced=force)
        return Pushed(self, revert.id, warning=warning)

    def _submit(self, update: Update, seen: SeenJob, next_start: bool, **more: Any) -> str:
        """Refuses what nobody would take, unless that is wanted or it waits there already; warns."""
        now, warning = seen.state, ""
        if not now.state.is_running:
            if not next_start and all(one.id != update.id for one in inbox.waiting(self.path)):
                again = "Try again when the job runs, or leave it for the next start: next_start=True"
                problem = f"The job is not running: {now.sentence}"
                raise UpdateRefused(problem, expected="a running job", remedy=again)
            warning = f"{now.sentence}. It will take the update when it is started again."
        try:
            inbox.submit(self.path, update, **more)
        except OSError as error:
            raise UpdateRefused(
                f"The update cannot be written to {self.path / 'inbox'} ({error.strerror})",
                received=f"{update.nbytes} bytes",
                remedy="Free some space there, or let this user write there, and try again",
            ) from error
        return warning

    def do_withdraw(self, update_id: str, note: str, author: str) -> UpdateView:
        """Blocks until the job has answered, if one has taken it."""
        view = self._find(update_id)
        if view.stage in (Stage.REFUSED, Stage.WITHDRAWN):
            raise UpdateRefused(f"Update {view.id} was {view.stage}: there is nothing to withdraw")
        if view.stage not in _WITHDRAWABLE:
            step = "" if view.step is None else f", step {view.step}"
            raise UpdateRefused(f"Too late: update {view.id} is {view.stage}{step}")
        by = author or this_user()
        try:
            if not inbox.withdraw(self.path, view.id, lambda: see(self.path).running, by=by, why=note):
                self._ask("withdraw", _WITHDRAWAL_SECS, by, name=view.id, note=note)
        except OSError as error:
            problem = f"It cannot be removed from {self.path / 'inbox'} ({error.strerror})"
            raise UpdateRefused(problem) from error
        except RequestRefused as error:
            raise UpdateRefused(str(error)) from error
        return UpdateView(id=view.id, stage=Stage.WITHDRAWN, withdrawn_by=by, reason=note)

    # Requests.

    def do_audit(self, timeout: float, author: str) -> AuditReport:
        answer, _ = self._ask("audit", timeout, author)
        with _answer_is_read():
            return AuditReport.from_json(answer.details)

    def do_checkpoint(self, timeout: float, author: str) -> int:
        return self._ask("save", timeout, author)[0].done_at

    def do_stop(self, timeout: float, author: str) -> int:
        answer, _ = self._ask("leave", timeout, author)
        if answer.problem:
            raise RequestRefused(
                f"The job has stopped at step {answer.done_at}, without a checkpoint: {answer.problem}"
            )
        return answer.done_at

    def do_pull(self, name: str, rows: Sequence[int] | None, timeout: float, max_bytes: int | None) -> Pulled:
        wanted = None if rows is None else tuple(rows)
        ranges = () if wanted is None else ranges_of(wanted)
        try:
            variable = schema_of(self.path).resolve(name)
            _check_size(variable, ranges, max_bytes)
        except UpdateRefused as error:
            raise NotFound(str(error)) from error
        if wanted == ():
            raise NotFound("No rows were named.")
        if (seen := see(self.path)).running:
            answer, values = self._ask("pull", timeout, variable=variable, rows=ranges, name=variable.name)
            if values is None:
                raise NoAnswer("The job has answered without values.")
            with _answer_is_read():
                digests = {int(rank): str(digest) for rank, digest in answer.details["digests"].items()}
                return Pulled(variable.name, answer.done_at, digests[0], "job", values, wanted, digests)
        store, name = CheckpointStore(self.path), variable.name
        last = store.last()
        if last is None:
            raise NotFound(f"{seen.state.sentence}. There is no checkpoint either.")
        with store.open(last.step) as reader:
            try:  # The variable may have another shape there.
                _check_size(reader.manifest.schema.resolve(name), ranges, max_bytes)
                array = reader.read(name) if wanted is None else reader.read_rows(name, ranges)
            except (errors.CheckpointError, UpdateRefused) as error:
                raise NotFound(str(error)) from error
        return Pulled(name, last.step, digest_array(array), f"checkpoint {last.step}", array, wanted)

    def _ask(
        self,
        kind: Kind,
        timeout_secs: float,
        author: str = "",
        *,
        variable: Variable | None = None,
        rows: Rows = (),
        **named: str,
    ) -> tuple[InboxAnswer, Array | None]:
        """Asks the job for something and waits for its answer, at most `timeout_secs`; a pull has values."""
        seen, read_at, what = see(self.path), monotonic(), inbox.WHAT[kind]
        if not seen.running:
            raise NoAnswer(
                f"The job is not running: {seen.state.sentence}. Only a running job can be asked for {what}."
            )
        named["author"] = author or this_user()
        try:
            id_ = inbox.ask(self.path, kind, timeout_secs=timeout_secs, now=seen.now, rows=rows, **named).id
        except OSError as error:
            raise errors.RequestFailed(
                f"The request cannot be written to {self.path / 'inbox'} ({error.strerror})."
            ) from error
        answer = None
        try:
            for _ in ticks(timeout_secs, POLL_SECS):
                if monotonic() - read_at >= _READ_NOTES_SECS:
                    seen, read_at = see(self.path), monotonic()
                # After the notes: a job may write it as it ends.
                answer = inbox.answer_of(self.path, id_, strict=True)
                if answer is not None and answer.stage is Stage.REFUSED:
                    raise RequestRefused(f"The job refused it, at step {answer.step}: {answer.problem}")
                if answer is not None and variable is not None:
                    count = sum(stop - start for start, stop in rows)
                    shape = (count, *variable.shape[1:]) if rows else variable.shape
                    return answer, inbox.values_of(self.path, id_, shape, variable.dtype)
                if answer is not None:
                    return answer, None
                if not seen.running:
                    raise NoAnswer(f"The job has ended without {what}: {seen.state.sentence}.")
            waited_for = _waited_for(see(self.path), run_files.read_run_info(self.path).workers)
            raise NoAnswer(f"{timeout_secs:g} s have passed without {what}. {waited_for}")
        finally:
            if kind != "leave" or answer is None:  # otherwise the launcher reads who has stopped the job
                inbox.forget(self.path, id_)


@contextlib.contextmanager
def _answer_is_read() -> Iterator[None]:
    """Anybody may write an answer into the inbox."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise errors.RequestFailed(f"The answer to the request is not valid ({error!r}).") from error


def _check_size(variable: Variable, ranges: Rows, max_bytes: int | None) -> None:
    nbytes = inbox.checked_rows(variable, ranges)
    if max_bytes is not None and nbytes > max_bytes:
        raise RequestRefused(
            f"These are too many values of {variable.name}. Expected: at most {max_bytes} bytes. "
            f"Received: {nbytes}. Ask for some rows at a time"
        )


def _waited_for(seen: SeenJob, workers: int) -> str:
    """What keeps a job from answering, as far as the workers' notes tell."""
    now, limit = seen.now, run_files.absent_secs(workers)
    heard = {note.rank: note for note in seen.notes if now - note.time <= limit}
    silent = [rank for rank in range(workers) if rank not in heard]
    if silent:
        return f"Waited for {workers_text(silent)}, not heard from for {run_files.age(limit)} or more."
    if not any(note.training for note in heard.values()):
        return "Waited for the training to begin: no worker is inside a training loop."
    step = min(note.step for note in heard.values())
    behind = workers_text(sorted(note.rank for note in heard.values() if note.step == step))
    return f"Waited for the next step. Furthest behind: {behind}, at step {step}. See the logs of all."


def _order(journal: Updates) -> list[int]:
    """The committed updates in the order in which they are applied: after a restart, not that of numbers."""
    return [record.sequence for record in journal.history.after(frozenset())]


def _damage_text(journal: Updates) -> str:
    """Which entries of the journal are damaged, and what they said; empty if none is."""
    lines = [" ".join(str(one.error).split()) for one in journal.damaged[:_MOST_DAMAGED]]
    if len(journal.damaged) > _MOST_DAMAGED:
        lines.append(f"{len(journal.damaged) - _MOST_DAMAGED} more entries of the journal are damaged.")
    return "\n".join(lines)


def _size(info: run_files.RunInfo | None, now: run_files.RunState) -> int:
    if info is not None:
        return info.workers
    return 0 if now.change is None else now.change.workers


# Whether the job runs, and what it has described.


@dataclass(frozen=True, slots=True)
class SeenJob:
    """What the workers of a job last said, and what time it was then by their clock."""

    run: RunPath
    notes: list[run_files.WorkerNote]
    now: float

    @property
    def state(self) -> run_files.RunState:
        return run_files.read_state(self.run, self.notes, self.now)

    @property
    def running(self) -> bool:
        """Whether a worker has written a note lately, and not that it has ended."""
        return any(
            abs(self.now - note.time) <= run_files.ABSENT_SECS
            for note in self.notes
            if note.waiting_for != run_files.ENDED
        )


def see(run: RunDir) -> SeenJob:
    """Looks at a job. Blocks for at most `LISTEN_SECS`, and only if its notes look old or from the future."""
    path = below(run)  # Absolute: a process may change its working directory.
    return _reader_of(RunPath(path.root.absolute(), path.parts)).look()


class _NotesReader:
    """Whether a job runs, and what time it is there: its notes have the time of another machine's clock.

        the last note looks recent                    it runs, at once: clocks rarely differ so much
        it looks old, or is from the future           it runs if a note changes within `LISTEN_SECS`, and
                                                      from then on the difference of the clocks is known
        its processes were on this host and are gone  it does not run, at once
        it is a day old, or the job has said how it ended

    The times of the files would not do instead: a reader would have to write a file beside them to know the
    file server's clock, and need not have the right to; and some file systems take the times from the
    writer's clock.
    """

    def __init__(self, run: RunPath) -> None:
        self._run = run
        self._behind_secs = 0.0
        self._dead: list[run_files.WorkerNote] | None = None
        self._last: SeenJob | None = None
        self._lock = Lock()

    def look(self) -> SeenJob:
        # The threads of a page: one of them listens, and the others go on with what is known.
        last = self._last
        if not self._lock.acquire(blocking=last is None):
            return last if last is not None else self._seen()
        try:
            self._last = self._look()
            return self._last
        finally:
            self._lock.release()

    def _look(self) -> SeenJob:
        seen = self._seen()
        if seen.running or seen.notes == self._dead or self._is_surely_dead(seen):
            return seen
        listened = run_files.Watch(LISTEN_SECS, clock=lambda: monotonic())
        listened.until_known(lambda: run_files.read_worker_notes(self._run), lambda secs: sleep(secs))
        if listened.moving:
            self._behind_secs = time.time() - max(note.time for note in listened.moving)
        seen = self._seen()
        self._dead = None if listened.moving else seen.notes
        return seen

    def _seen(self) -> SeenJob:
        return SeenJob(self._run, run_files.read_worker_notes(self._run), time.time() - self._behind_secs)

    def _is_surely_dead(self, seen: SeenJob) -> bool:
        for note in seen.notes:
            process = {"host": note.host, "pid": note.pid, "machine": note.machine}
            is_gone = is_on_this_host(process) and is_alive(process) is False
            if note.waiting_for != run_files.ENDED and not is_gone and seen.now - note.time <= _TOO_OLD_SECS:
                return run_files.has_ended(self._run, seen.notes)
        return True


_reader_of = lru_cache(maxsize=1000)(_NotesReader)


def described_run(run: RunDir) -> run_files.RunInfo | None:
    """The description of a run; None while its first workers start, or if they have failed to."""
    try:
        return run_files.read_run_info(run)
    except FileDamaged:
        if is_described(run) or not (below(run) / run_files.FILE).is_file():
            raise
        return None


def schema_of(run: RunDir) -> Schema:
    info = described_run(run)
    if info is None:
        raise NotFound(
            f"{see(run).state.sentence}. Its variables are known when its workers have met: ask again then."
        )
    return info.schema


def is_run(run: RunDir) -> bool:
    return (below(run) / run_files.FILE).is_file() or is_described(run)


def runs_below(root: RunPath) -> list[RunPath]:
    """The run at a path, or else the runs in the directory that it names: the newest ones first.

    Each is a path below this directory, so that no later access follows a link in its place either.
    """
    if is_run(root):
        return [root]
    found = []
    with contextlib.suppress(OSError):
        for path in root.iterdir():
            with contextlib.suppress(OSError):  # One that cannot be read hides no other.
                if not path.name.startswith(".") and path.is_dir() and is_run(path):
                    found.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(found, reverse=True)[:MOST_RUNS]]


def is_described(run: RunDir) -> bool:
    """Whether a job has described its variables in this directory: it does when its workers have met."""
    return any((group / run_files.RUN_FILE).exists() for group in (below(run) / GROUPS).glob("*"))
