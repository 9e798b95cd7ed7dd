"""Commands about runs: status, list, log, show, logs, note, audit, stop, report."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

import click
from rich.console import RenderableType, group
from rich.live import Live
from rich.text import Text

from replicast.cli import Failed, one_line, printable_lines, texts
from replicast.cli.options import PATH, asks, json_option
from replicast.client import Run
from replicast.client.directory import DirectoryRun, runs_below
from replicast.client.run import Overview, ticks
from replicast.core.entries import Stage
from replicast.errors import RequestFailed, printable
from replicast.files import below
from replicast.page.assets import report as make_report
from replicast.storage.claims import read_chain
from replicast.storage.journal import UpdateView
from replicast.storage.run_files import ENDED, JobState, WorkerNote, absent_secs, age
from replicast.update.guard import EditView

WATCH_SECS = 1.0
EXIT_SECS = 60.0
_MOST_NEW = 1000  # Lines in that time.
_LAST_ENDED = 5  # So many of the updates that were refused or withdrawn are in `status`.
_MOST_LINES = 10  # Of each audit in the list: two for a variable that differs on one worker.
_YELLOW = (JobState.NEVER_STARTED, JobState.STARTING, JobState.RESTARTING, JobState.STOPPED, JobState.ENDING)
_LOOK_FIRST = (JobState.FAILED, JobState.LOST)
_STATE_STYLES = dict.fromkeys(_YELLOW, "yellow") | {JobState.FAILED: "red", JobState.LOST: "red"}
_AUDIT_STYLES = {"equal": "green", "healed": "yellow"}


@asks("status")
@json_option("As one JSON object; with --watch one per line.")
@click.option("--watch", is_flag=True, help="Look again every second, until Ctrl-C.")
def status(run: Run, as_json: bool, watch: bool) -> int:
    """Show the workers, the metrics and the updates of a run.

    \b
    Examples:
      replicast status runs/first
      replicast status runs/first --watch
      replicast status runs/first --json | jq .workers[].step

    Exit code: 0 while the job starts, trains, restarts or ends, and when it has finished or was stopped; 1
    when it has failed or was lost, or a file of the run is damaged, which is named after everything else.
    """
    if watch:
        with contextlib.suppress(KeyboardInterrupt):
            _watch(run, as_json)
        return 0
    seen = run.status()
    if as_json:
        texts.print_json(seen)
    else:
        texts.make_console().print(_overview(seen))
    if seen.problem:
        raise Failed(printable_lines(seen.problem))
    return 1 if seen.state in (JobState.FAILED, JobState.LOST) else 0


def _watch(run: Run, as_json: bool) -> None:
    console = texts.make_console()
    # Drawn by this thread alone: nothing is left behind after Ctrl-C.
    live = Live(console=console, auto_refresh=False) if texts.is_live(console) and not as_json else None
    with contextlib.nullcontext() if live is None else live:
        while True:
            seen = run.status()
            if as_json:
                texts.print_json(seen)
            elif live is None:
                console.print(_overview(seen))
            else:
                live.update(_overview(seen), refresh=True)
            time.sleep(WATCH_SECS)


@click.command("list")
@click.argument("path", type=click.Path(exists=True, path_type=Path), metavar="[DIR]", default="runs")
@json_option("One object per line: a run in short.")
def list_runs(path: Path, as_json: bool) -> None:
    """List the runs in DIR, by default in runs: first those that failed, then those that run.

    \b
    Examples:
      replicast list
      replicast list /shared/runs --json | jq 'select(.state == "failed") | .run'

    Exit code: 0.
    """
    briefs = [(place.name, DirectoryRun(place).brief()) for place in runs_below(below(path))]
    briefs.sort(key=lambda named: (named[1].state not in _LOOK_FIRST, not named[1].running))
    if as_json:
        texts.print_json(*(brief for _, brief in briefs))
    elif not briefs:
        click.echo(f"There is no run in {printable(path)}.")
    else:
        table = texts.make_table("run", ">loss", ">ran", ">workers", "state", "notes")
        for name, one in briefs:  # As on the page: the loss, or else the first metric; how long it has run.
            values = {} if one.metrics is None else one.metrics["values"]
            loss = texts.number(values.get("loss", next(iter(values.values()), None)))
            ran = age(one.heard_at - one.began_at) if one.began_at and one.heard_at else ""
            state = one.state if one.state in _LOOK_FIRST else one_line(one.sentence)
            table.add_row(printable(name), loss, ran, str(one.workers), state, one_line(one.annotation))
        texts.make_console().print(table)
        for name, brief in briefs:
            if brief.state in _LOOK_FIRST:  # With the reason, for which a column is too narrow.
                texts.make_console().print(f"\n{printable(name)}: {one_line(brief.sentence)}", soft_wrap=True)


@asks("log_lines")
@click.option(
    "-f", "--follow", is_flag=True, help="Keep printing new lines, also after a restart, until Ctrl-C."
)
def logs(run: Run, worker: int, lines: int, attempt: int | None, follow: bool) -> None:
    """Print the last lines that worker WORKER has printed, by default worker 0, as a terminal shows them.

    \b
    Examples:
      replicast logs runs/first
      replicast logs runs/first 1 --lines 1000 --attempt 0
      replicast logs https://host:8080/first 0 -f

    Exit code: 0, also after Ctrl-C with -f; 1 when there is no such log.
    """
    known: list[str] | None = None
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            found = run.log_lines(worker, max(lines, _MOST_NEW) if follow else lines, attempt)
            start = max(0, len(found) - lines)
            if known is not None:  # What is known comes first; all is new if nothing is, as after a restart.
                sizes = range(min(len(known), len(found)), 0, -1)
                start = next((size for size in sizes if found[:size] == known[-size:]), 0)
            for line in found[start:]:
                click.echo(printable(line))
            if not follow:
                return
            known = found
            time.sleep(WATCH_SECS)


@asks("log")
@json_option("One object per line: record and receipts of an update.")
def log(run: Run, as_json: bool, last: int | None) -> None:
    """List the updates that a run has committed, in the order in which they are applied.

    Below are the last ones that were refused or withdrawn, with the reason.

    \b
    Examples:
      replicast log runs/first
      replicast log runs/first -n 5
      replicast log runs/first --json | jq .step

    Exit code: 0; 1 when a file of the journal is damaged, which is named after all others are listed.
    """
    views, seen = run.log(last), run.status()
    if as_json:
        texts.print_json(*views)
    elif views:
        texts.make_console().print(texts.updates_table(views))
    else:
        click.echo(f"The journal is empty: {texts.no_updates(journaled=seen.journaled)}.")
    if seen.refused and not as_json:
        texts.make_console().print(_title("refused or withdrawn"), texts.updates_table(seen.refused))
    if seen.problem:
        raise Failed(printable_lines(seen.problem))


@asks("show")
@json_option("As one JSON object.")
def show(run: Run, which: str, as_json: bool) -> None:
    """Show everything about one update.

    By its number in the journal, or by its id or the beginning of it; also one that waits or was refused.
    Damaged files of the journal are named; they hide nothing else.

    \b
    Examples:
      replicast show runs/first 12
      replicast show runs/first 3f2a91c4 --json

    Exit code: 0; 1 when there is no such update or its file is damaged.
    """
    view, problem = run.show(which), run.status().problem
    if problem:
        click.echo(printable_lines(problem), err=True)
    if as_json:
        texts.print_json(view)
    else:
        console = texts.make_console()
        console.print(texts.facts_table(_facts(view)))
        if view.detailed and view.edits:
            console.print()
            console.print(texts.edits_table(map(EditView.from_json, view.edits)))
    if view.damage:
        raise Failed(printable(view.damage))


@asks()
@click.argument("which", metavar="[NUMBER|ID]", required=False)
@click.option("--note", metavar="TEXT", help="In place of the note before; '' removes it.")
@click.option(
    "--tag", "tags", metavar="TAG", multiple=True, help="In place of the tags before; '' removes them."
)
def note(run: Run, which: str | None, note: str | None, tags: tuple[str, ...]) -> None:
    """Keep a note and tags with a run, or with one of its updates; also when the job has ended.

    Everybody who sees the run sees them: in `list`, `status`, `log` and `show`, and on the page.

    \b
    Examples:
      replicast note runs/first --note "baseline of May" --tag baseline --tag paper
      replicast note runs/first 12 --note "too large: reverted by 13"

    Exit code: 0; 1 when there is no such update, or the note is too long.
    """
    if note is None and not tags:
        raise click.UsageError("Give --note or --tag.")
    click.echo(one_line(run.annotate(which, note, tags or None)))


@asks("audits", "audit")
@json_option("One object per line: everything about an audit.")
@click.option("--now", is_flag=True, help="Ask the running job for an audit, and show what it finds.")
def audit(run: Run, last: int, as_json: bool, now: bool, timeout: float) -> int:
    """Show whether the replicas of a run were equal, and which were not, where and since when.

    An audit compares every bit of the state between all workers, at one step. A job makes one at regular
    intervals, and with --now at its next step. What follows from a difference is up to the job's
    on_divergence: with "raise", its workers raise. TensorFlow is not needed here.

    \b
    Examples:
      replicast audit runs/first
      replicast audit runs/first --now
      replicast audit runs/first --last 1 --json | jq .differences[].variable

    Exit code: 0 when the last audit found all replicas equal, or has made them so, or there is none yet; 1
    when they differ; 3 when --now finds no running job, or --timeout has passed.
    """
    reports = [run.audit(timeout)] if now else run.audits(last)
    if as_json:
        texts.print_json(*reports)
    elif not reports:
        brief = run.brief()
        ask = "No audit has been made yet. To ask the running job for one, give --now."
        click.echo(ask if brief.running else f"No audit was made. {printable(brief.sentence)}.")
    for report in () if as_json else reports:
        head, *details = report.lines()
        most = len(details) if now else _MOST_LINES
        click.echo(printable(f"{texts.when(report.time)}  {head}"))
        for line in details[:most]:
            click.echo(printable(f"  {line}"))
        if len(details) > most:
            click.echo(f"    and {texts.counted(len(details) - most, 'more line')}; --json has all")
    return int(reports[-1].diverged) if reports else 0


@asks("stop")
def stop(run: Run, timeout: float) -> None:
    """Stop a running job with a checkpoint, as SIGTERM does.

    All workers save at one of the next steps and exit; the launcher does not start them again. The command
    waits until they have exited, at most a minute longer than --timeout. The next start continues from there.
    A job that is not inside a training loop stops when it is.

    \b
    Examples:
      replicast stop runs/first
      replicast stop runs/first --timeout 60

    Exit code: 0 when the state is saved and the job stops; 1 when it stops and the state could not be saved,
    or the request cannot be written; 3 when no job is running, or --timeout has passed.
    """
    click.echo(f"stopped at step {run.stop(timeout)}: the state is saved")
    for is_last in ticks(EXIT_SECS, WATCH_SECS):
        try:
            state = JobState(run.brief().state)
        except RequestFailed:  # The server of `run --serve` ends with the job.
            return
        if state.is_over or state is JobState.LOST:
            return
        if is_last:
            click.echo("Its workers have not exited yet. A new start is refused until they have.", err=True)


@asks()
@click.option("-o", "--output", type=PATH, default=Path("report.html"), show_default=True)
def report(run: Run, output: Path) -> int:
    """Write a report on a run into one HTML file.

    Updates with authors, notes, steps and the digests of every worker and attempt; checkpoints, restarts,
    audits and the loss curve. Each record of the journal contains the hash of the one before it: a change to
    an old record shows, and the report says so. The file is the page of the run with its data inside: it
    loads nothing, and looks as `replicast serve` does.

    \b
    Examples:
      replicast report runs/first -o report.html

    Exit code: 0; 1 when a record of the journal is not what was written.
    """
    if not isinstance(run, DirectoryRun):
        raise Failed(
            "A report needs the files of the run. Give its directory, on the machine that has it.", 2
        )
    chain = read_chain(run.path)
    output.write_text(make_report(run, chain), encoding="utf-8")
    click.echo(f"{printable(output)}: written, with {texts.counted(chain.length, 'record')} of the journal")
    for problem in chain.problems:
        click.echo(printable(problem), err=True)
    return 1 if chain.problems else 0


@group()
def _overview(seen: Overview) -> Iterator[RenderableType]:
    """The overview, part by part, for a screen of 80 columns."""
    head = Text(printable(seen.sentence), style=f"bold {_STATE_STYLES.get(JobState(seen.state), 'green')}")
    head.append(f"\n{printable(seen.run)}: {texts.counted(seen.size, 'worker')}", style="bold")
    if noted := one_line(seen.annotation):
        head.append(f"\n{noted}", style="dim")
    if seen.starts and seen.starts[-1].command:
        start = seen.starts[-1]
        commit = f", commit {start.commit}" if start.commit else ""
        head.append(f"\n{one_line(shlex.join(start.command) + commit)}", style="dim")
    if seen.state == JobState.FAILED and seen.changes:
        for line in seen.changes[-1]["last_lines"]:
            head.append(f"\n  {printable(line.rstrip())}", style="dim")
    yield head
    notes = {note.rank: note for note in seen.workers}
    rows = (_worker_cells(rank, notes.get(rank), seen) for rank in range(seen.size))
    yield texts.make_table(">worker", "process", "host", ">step", "attempt", "last seen", rows=rows)
    now = seen.time
    if seen.metrics is not None:
        ago = f"  (step {seen.metrics['step']}, {age(now - seen.metrics['time'])} ago)"
        yield Text(f"\n{texts.metrics(seen.metrics['values'])}").append(ago, style="dim")
    if seen.evaluations:
        last = seen.evaluations[-1]
        ago = f"  (the evaluator, step {last['step']}, saved {age(now - last['time'])} ago)"
        yield Text(texts.metrics(last["values"])).append(ago, style="dim")
    if seen.audit is not None:
        line = Text(one_line(seen.audit), style=_AUDIT_STYLES.get(seen.audit.outcome, "red"))
        attempt = seen.audit.attempt
        earlier = "" if attempt in (None, seen.attempt) else f", in attempt {attempt}: none since the restart"
        yield line.append(f"  ({age(now - seen.audit.time)} ago{earlier})", style="dim")
    under_way = [one for one in seen.operations if one["stage"] != Stage.SCHEDULED]
    if under_way:
        yield _title("under way")
        table = texts.make_table("what", "=stage", ">step", "waits for", "who")
        for said in under_way:
            one = {name: one_line("" if value is None else value) for name, value in said.items()}
            who = ": ".join(one[name] for name in ("author", "note") if one[name])
            what = f"{one['kind']} {texts.short_id(one['id'])}".strip()
            table.add_row(what, one["stage"], one["step"], one["waits_for"], Text(who, style="dim"))
        yield table
    if seen.updates:
        yield _title(f"last {texts.counted(len(seen.updates), 'update')}")
        yield texts.updates_table(seen.updates)
    else:
        yield _title(texts.no_updates(journaled=seen.journaled))
    for title, views in (("scheduled", seen.scheduled), ("in the inbox", seen.waiting)):
        if views:
            yield _title(f"{len(views)} {title}{'' if seen.running else ', for the next start that trains'}")
            yield texts.updates_table(views)
    if seen.refused:
        yield _title("refused or withdrawn")
        yield texts.updates_table(seen.refused[-_LAST_ENDED:])


def _title(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _worker_cells(rank: int, note: WorkerNote | None, seen: Overview) -> tuple[str | Text, ...]:
    if note is None:
        return str(rank), "", "", "", "", Text("never seen", style="red")
    silent = seen.time - note.time
    if note.attempt < seen.attempt:
        last = Text("not seen in this attempt yet", style="dim")
    elif note.waiting_for == ENDED:
        last = Text(f"exited {age(silent)} ago", style="dim")
    else:
        is_absent = silent > absent_secs(seen.size)
        last = Text(f"not seen for {age(silent)}", style="red") if is_absent else Text(f"{age(silent)} ago")
        if note.waiting_for:
            last.append(f", waits for {one_line(note.waiting_for)}", style="yellow")
        if (slow := seen.slow.get(rank)) is not None:
            own, others = texts.seconds(slow.own_secs), texts.seconds(slow.others_secs)
            since = age(seen.time - slow.since)
            last.append(f"\nslow for {since}: needs {own} per step, the others {others}", style="yellow")
    return str(rank), str(note.pid), one_line(note.host), str(note.step), str(note.attempt), last


def _facts(view: UpdateView) -> Iterator[tuple[str, str | Text]]:
    """Who, what, when and how it went; those that are not known are empty."""
    step = "" if view.step is None else str(view.step)
    is_committed = view.sequence is not None
    yield "update", printable(view.id)
    yield "stage", texts.stage_cell(view.stage)
    yield "number", str(view.sequence) if is_committed else ""
    yield "step", f"{step}, chosen by its author" if view.scheduled else step
    yield "author", one_line(view.author)
    yield "note", one_line(view.note)
    yield "noted", one_line(view.annotation)
    yield "reverts", "" if view.reverts is None else f"update {view.reverts}"
    yield "reverted", "" if view.reverted_by is None else f"by update {view.reverted_by}"
    yield "edits", one_line(view.words(most=20))
    yield "trial", "" if view.trial is None else texts.trial(view.trial)
    if is_committed:
        yield "committed", f"{texts.date(view.committed_at or 0)}, attempt {view.attempt}"
        yield "payload", f"{texts.size(view.nbytes or 0)}, sha256 {printable(view.sha256)}"
    else:
        yield "since", texts.date(view.at)
    yield "waits for", one_line(view.waits_for)
    yield "file", printable(view.path or "")
    for receipt in view.receipts:
        yield "applied", f"at step {receipt.step}, attempt {receipt.attempt}: {receipt.stage}"
        for rank, digest in sorted(receipt.digests.items()):
            yield f"worker {rank}", printable(digest)
        yield "digests", "equal" if len(set(receipt.digests.values())) == 1 else "NOT EQUAL"
        if took := receipt.propose_to_applied_secs:
            yield "took", f"{texts.seconds(took)} from the proposal until all applied it"
        yield "stall", f"training paused for {texts.seconds(receipt.stall_secs)}"
    for effect in view.effects:
        if effect.histogram:
            yield "change", one_line(f"{effect.variable} {effect.histogram}")
    yield "metric", "" if view.around is None else one_line(view.around)
    yield "outcome", "" if view.outcome is None else texts.outcome(view.outcome)
    if view.refusal is not None:
        for name, value in view.refusal.to_json().items():
            yield name, "" if value is None else one_line(value)
    yield "withdrawn", f"by {one_line(view.withdrawn_by)}" if view.withdrawn_by else ""
    yield "reason", one_line(view.reason)
