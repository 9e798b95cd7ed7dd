"""Messages, entries, orders and answers as short text, for transcripts."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from replicast.core import entries as n
from replicast.core import messages as m
from replicast.core.entries import Proposal
from replicast.core.messages import Applied, Published, Refusal, ReportId, SeenDigests, Snapshot
from replicast.core.operation import Outcome
from replicast.core.operations.apply import (
    Apply,
    BeginTrial,
    Compute,
    Discard,
    EndTrial,
    Invert,
    Load,
    Measure,
    Prepare,
    WriteBefore,
)
from replicast.core.operations.attempt import Exit, TakeSnapshot
from replicast.core.operations.audit import (
    Compare,
    DeliverReport,
    Digest,
    Examine,
    Expected,
    Publish,
    TakeRows,
)
from replicast.update.audit_report import AuditReport
from tests.simulator.replica import InMemory


def described(thing: Any) -> str:
    """A short text for a message, an entry, an order or an answer."""
    for words in (_message, _entry, _order):
        said = words(thing)
        if said:
            return said
    return _value(thing)


def _message(thing: Any) -> str:
    match thing:
        case m.Propose(_, proposal):
            return f"Propose   {_value(proposal)}"
        case m.Withdraw(_, id_):
            return f"Withdraw  {id_}"
        case m.Request(kind, _, arguments):
            return f"Request   {' '.join(map(str, (kind, *arguments)))}"
        case m.At(meeting, step, standing):
            return f"At        {'stands at' if standing else 'has not passed'} step {step}  [{meeting}]"
        case m.Answer(number, value):
            return f"Answer    {_value(value)}  [{_number(number)}]"
        case m.Rest(_, step, intent):
            return f"Rest      at step {step}: {' '.join(map(str, intent))}"
        case m.Stop(meeting, at_step):
            where = "the next boundary" if at_step is None else f"step {at_step}"
            return f"Stop      at {where}  [{meeting}]"
        case m.Meet(meeting, step):
            return f"Meet      at step {step}  [{meeting}]"
        case m.Do(number, order, of):
            whom = "" if of is None else f" (worker {', '.join(map(str, of))})"
            return f"Do        {described(order)}{whom}  [{number}]"
        case m.Release(meeting):
            return f"Release   [{meeting}]"
        case m.Resume(_, outcome):
            return f"Resume    {_value(outcome)}"
        case m.Tell(id_, _, stage, step, outcome, waits_for):
            why = f": {outcome.problem}" if isinstance(outcome, Refusal) else ""
            why = f", waits for {waits_for}" if waits_for else why
            return f"Tell      {id_} is {stage}{'' if step is None else f' at step {step}'}{why}"
    return ""


def _entry(thing: Any) -> str:
    match thing:
        case n.Started(attempt, from_step):
            return f"attempt {attempt} starts from step {from_step}: later checkpoints are given up"
        case n.Payload(id_):
            return f"payload of {id_}"
        case n.Scheduled(id_, _, at_step):
            return f"{id_} is scheduled for step {at_step}"
        case n.Committed(sequence, id_, _, step, heals=heals, reverts=reverts):
            why = f", reverts update {reverts}" if reverts is not None else ", heals" if heals else ""
            return f"record {sequence}: {id_} at step {step}{why}  ◄── the commit"
        case n.Before(sequence, _, tuple() as content):
            return f"values before update {sequence}: {_value((content, ''))}"
        case n.Decided(sequence, kept, step):
            return (
                f"the trial of update {sequence} is decided at step {step}: {'kept' if kept else 'reverted'}"
            )
        case n.Receipt(sequence, id_, digests=digests, stage=stage, attempt=attempt):
            said = " ".join(digests.values())
            return f"receipt of update {sequence} in attempt {attempt}: {id_} is {stage}, {said}"
        case n.Withdrawn(id_):
            return f"{id_} is withdrawn"
        case n.Refused(id_, _, problem):
            return f"{id_} is refused: {problem}"
        case n.Saved(step, _, holds, pending):
            held = f", holds updates {sorted(holds)}" if holds else ""
            with_ = f", with the proposals {[one.proposal.id for one in pending]}" if pending else ""
            return f"checkpoint of step {step}{held}{with_}  ◄── its commit"
    return ""


def _order(thing: Any) -> str:
    match thing:
        case Load(id_):
            return f"Load {id_} from the journal"
        case Prepare(id_):
            return f"Prepare {id_}"
        case Apply(id_, _, sequence):
            return f"Apply {id_} as update {sequence}"
        case BeginTrial(id_, _, sequence):
            return f"Begin: copy the state, apply {id_} as update {sequence}"
        case TakeRows(_, name):
            return f"TakeRows of {name}"
        case WriteBefore(sequence):
            return f"WriteBefore update {sequence}"
        case Invert(_, sequence):
            return f"Invert update {sequence}"
        case EndTrial(kept):
            return f"End: {'keep the update' if kept else 'go back to the copy'}"
        case Measure(trial):
            return f"Measure {trial.metric}"
        case Compute(id_):
            return f"Compute {id_}"
        case Publish(_, names):
            return f"Publish {', '.join(names)}"
        case Compare(_, _, names) | Expected(names):
            return f"{type(thing).__name__} {', '.join(names)}"
        case Discard(ids):
            return f"Discard {', '.join(ids)}"
        case Digest() | Examine() | Exit():
            return type(thing).__name__
        case TakeSnapshot():
            return "Snapshot"
        case DeliverReport(report, raises):
            return f"Report{' to raise' if raises else ''}: {_value(report)}"
    return ""


def _value(thing: Any) -> str:
    match thing:
        case None:
            return "done"
        case Refusal(problem):
            return f"refused: {problem}"
        case Outcome(stage, Refusal(problem)):
            return f"{stage}: {problem}"
        case Outcome(stage, AuditReport() as report):
            return f"{stage}, {_value(report)}"
        case Outcome(stage):
            return str(stage)
        case AuditReport(outcome=outcome, differences=differences, healed=healed):
            differ = ", ".join(one.variable for one in differences)
            by = f" by update {', '.join(map(str, healed))}" if healed else ""
            return f"{f'{differ} differed, ' if differ else ''}{outcome}{by}"
        case Proposal(id_, reverts=int() as reverts):
            return f"{id_}, which reverts update {reverts}"
        case Proposal(id_, _, content, at_step, trial, source):
            when = "" if at_step is None else f", at step {at_step}"
            tried = "" if trial is None else f", on trial for {trial.steps} steps"
            what = f"function {id_} on worker {source}" if content is None else id_
            return f"{what}{when}{tried}"
        case (tuple() as before, ""):
            return _value(dict(before))
        case dict():
            return " ".join(f"{name}={value}" for name, value in thing.items()) or "nothing"
        case Applied(digest):
            return digest
        case SeenDigests(digests=digests):
            return _value(digests)
        case Snapshot(step, digest, holds):
            return f"snapshot {digest} of step {step}, holds {sorted(holds)}"
        case Published(content=InMemory(_, edits)):
            return f"made {_edits(edits)}"
        case InMemory(_, edits):
            return f"available: {_edits(edits)}"
    if isinstance(thing, Struct):
        said = ", ".join(f"{name}={_value(getattr(thing, name))}" for name in thing.__struct_fields__)
        return f"{type(thing).__name__}({said})"
    return str(thing)


def _number(number: int | ReportId) -> str:
    return str(number) if isinstance(number, int) else f"{number.kind} of step {number.step}"


def _edits(edits: tuple[Any, ...]) -> str:
    return "; ".join(" ".join(map(str, edit)) for edit in edits)
