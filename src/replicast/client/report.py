"""A report on a run in one HTML file, for auditors: no script, no request to anything outside.

Everything that came from a job is text: the tree is built by the standard library, which escapes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from xml.etree.ElementTree import Element, SubElement, tostring

from replicast.client.directory import DirectoryRun
from replicast.client.metrics import Metrics, Series
from replicast.client.run import CheckpointView
from replicast.client.updates import UpdateView
from replicast.core.entries import Receipt
from replicast.storage.claims import Chain, read_chain
from replicast.storage.run_files import Change, changes

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { text-align: left; vertical-align: top; padding: .3rem .6rem .3rem 0; }
tr { border-bottom: 1px solid #8884; }
th, td.short { white-space: nowrap; }
td { white-space: pre-line; min-width: 12rem; overflow-wrap: anywhere; }
td.short { min-width: 0; overflow-wrap: normal; }
code { font-size: 12px; overflow-wrap: anywhere; }
h1, li, p { overflow-wrap: anywhere; }
.good { color: #1a7f37; } .bad { color: #c62828; font-weight: bold; }
svg { width: 100%; height: auto; } path { fill: none; stroke: #3b6ea5; stroke-width: 1.5; }
line { stroke: #b26a00; stroke-dasharray: 3 3; } text { font-size: 12px; fill: currentColor; }
"""
_SHORT = frozenset((
    "#", "step", "stage", "who", "committed", "attempt", "outcome", "stall", "verified", "epoch", "made",
    "bytes", "time", "state", "worker",
))  # fmt: skip
"""Columns whose cells are not broken into lines."""
_DIGESTS = frozenset(("content", "digests by worker", "digest of the state"))
_CHAINED = "Part of the chain: from the records of the journal."
_NOT_CHAINED = "As the job wrote them; not part of the chain: a change to them does not show here."
_UNPRINTABLE = "\N{REPLACEMENT CHARACTER}"
_WIDTH, _HEIGHT, _LEFT, _POINTS = 1000, 260, 70, 1000


def report(run: DirectoryRun) -> str:
    """The report as a whole HTML document."""
    status, updates = run.status(), run.log()
    html = Element("html", lang="en")
    head = SubElement(html, "head")
    SubElement(head, "meta", charset="utf-8")
    SubElement(head, "meta", name="viewport", content="width=device-width")
    SubElement(head, "title").text = f"replicast: {run.path.name}"
    SubElement(head, "style").text = _STYLE
    body = SubElement(html, "body")
    _add(body, "h1", run.path.name)
    _add(body, "p", f"{status.sentence}. Written on {_when(status.time)}.")
    _chain(body, read_chain(run.path))
    _curves(body, run.metrics(points=_POINTS), updates)
    _updates(body, updates)
    _receipts(body, updates)
    _checkpoints(body, run.checkpoints())
    _section(body, "Starts, restarts and ends", _NOT_CHAINED)
    _table(body, ("time", "state", "attempt", "worker", "step", "reason"), map(_change, changes(run.path)))
    _section(body, "Audits", _NOT_CHAINED)
    audits = [(_when(one.time), "\n".join(one.lines())) for one in run.audits(last=1000)]
    _table(body, ("time", "what was found"), audits)
    return "<!doctype html>\n" + tostring(html, encoding="unicode", method="html") + "\n"


def _section(body: Element, title: str, about: str) -> None:
    _add(body, "h2", title)
    _add(body, "p", about)


def _updates(body: Element, updates: Sequence[UpdateView]) -> None:
    about = f"{_CHAINED} Only the stage of an update without a receipt is as the job last noted it."
    _section(body, f"Updates ({len(updates)})", about)
    _table(
        body,
        ("#", "step", "stage", "what", "who", "why", "committed", "content"),
        [
            (
                one.sequence,
                one.step,
                one.stage,
                _what(one),
                one.author,
                one.note,
                _when(one.committed_at),
                f"{one.content_digest}\nsha256 {one.sha256}",
            )
            for one in updates
        ],
    )


def _receipts(body: Element, updates: Sequence[UpdateView]) -> None:
    _section(body, "Receipts: what each worker reported, in each attempt that applied the update", _CHAINED)
    _table(
        body,
        ("#", "attempt", "step", "outcome", "digests by worker", "stall", "verified"),
        [
            (
                receipt.sequence,
                receipt.attempt,
                receipt.step,
                receipt.stage,
                _digests(receipt),
                "" if receipt.checkpoint else f"{receipt.stall_secs * 1000:.1f} ms",
                _when(receipt.verified_at),
            )
            for one in updates
            for receipt in one.receipts
        ],
    )


def _checkpoints(body: Element, checkpoints: Sequence[CheckpointView]) -> None:
    _section(body, "Checkpoints", _NOT_CHAINED)
    _table(
        body,
        ("step", "epoch", "attempt", "made", "bytes", "digest of the state", "patched by"),
        [
            (
                one.step,
                one.epoch,
                one.attempt,
                _when(one.created_at),
                one.nbytes,
                one.state_digest,
                one.patched_by,
            )
            for one in checkpoints
        ],
    )


def _chain(body: Element, chain: Chain) -> None:
    _add(body, "h2", "The journal")
    _add(body, "p", "The chain has the updates and their receipts. Everything else here is not part of it.")
    if chain.problems:
        _add(body, "p", f"{len(chain.problems)} of {chain.length} records are not what was written:", "bad")
        listed = SubElement(body, "ul")
        for problem in chain.problems:
            _add(listed, "li", problem)
        return
    _add(
        body,
        "p",
        f"All {chain.length} records are as they were written. Each contains the hash of the one before it; "
        "the hash of the last one is:",
        "good",
    )
    _add(_add(body, "p", ""), "code", chain.last or "(there is none yet)")
    _add(body, "p", "Keep a copy of this hash elsewhere: it shows later whether an old record was changed.")


def _curves(body: Element, metrics: Metrics, updates: Sequence[UpdateView]) -> None:
    _add(body, "h2", "Loss and metrics")
    _add(body, "p", _NOT_CHAINED)
    if not metrics.series:
        _add(body, "p", "No metrics were recorded.")
    for name, series in sorted(metrics.series.items(), key=lambda one: (one[0] != "loss", one[0])):
        steps = [one.step for one in updates if one.step is not None]
        _add(body, "h3", name)
        body.append(_curve(name, series, steps))


def _curve(name: str, series: Series, marks: Iterable[int]) -> Element:
    svg = Element("svg", viewBox=f"0 0 {_WIDTH} {_HEIGHT}", role="img")
    points: list[tuple[int, float]] = [
        (step, value)
        for step, value in zip(series.steps.tolist(), series.values.tolist(), strict=True)
        if math.isfinite(value)
    ]
    if not points:
        _add(svg, "title", f"{name}: no finite value")
        return svg
    first, last = points[0][0], max(points[-1][0], points[0][0] + 1)
    low, high = min(value for _, value in points), max(value for _, value in points)
    high = high if high > low else low + 1.0
    _add(svg, "title", f"{name} from step {first} to {last}: between {low:.6g} and {high:.6g}")

    def across(step: float) -> float:
        return _LEFT + (step - first) / (last - first) * (_WIDTH - _LEFT - 10)

    def down(value: float) -> float:
        return 10 + (high - value) / (high - low) * (_HEIGHT - 40)

    for step in marks:
        if first <= step <= last:
            place = f"{across(step):.1f}"
            SubElement(svg, "line", x1=place, x2=place, y1="10", y2=str(_HEIGHT - 30))
    path = " L ".join(f"{across(step):.1f} {down(value):.1f}" for step, value in points)
    SubElement(svg, "path", d=f"M {path}")
    for value, at in ((high, 18), (low, _HEIGHT - 30)):
        _add(svg, "text", f"{value:.4g}").set("y", str(at))
    for step, anchor in ((first, "start"), (last, "end")):
        label = _add(svg, "text", f"step {step}")
        label.set("x", f"{across(step):.1f}")
        label.set("y", str(_HEIGHT - 8))
        label.set("text-anchor", anchor)
    return svg


def _table(body: Element, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    listed = list(rows)
    if not listed:
        _add(body, "p", "None.")
        return
    table = SubElement(SubElement(body, "div", {"class": "scroll"}), "table")
    row = SubElement(SubElement(table, "thead"), "tr")
    for head in heads:
        _add(row, "th", head).set("scope", "col")
    lines = SubElement(table, "tbody")
    for cells in listed:
        row = SubElement(lines, "tr")
        for head, cell in zip(heads, cells, strict=True):
            text = "" if cell is None else str(cell)
            if head in _DIGESTS:
                _add(_add(row, "td", ""), "code", text)
            else:
                _add(row, "td", text, "short" if head in _SHORT else "")


def _add(parent: Element, tag: str, text: str, kind: str = "") -> Element:
    element = SubElement(parent, tag, {"class": kind} if kind else {})
    element.text = "".join(one if one.isprintable() or one == "\n" else _UNPRINTABLE for one in text)
    return element


def _what(view: UpdateView) -> str:
    lines = [", ".join(map(_edit, view.edits))]
    if view.reverts is not None:
        lines.append(f"reverts update {view.reverts}")
    if view.reverted_by is not None:
        lines.append(f"reverted by update {view.reverted_by}")
    return "\n".join(lines)


def _edit(edit: Mapping[str, Any]) -> str:
    words = f"{str(edit.get('operation')).replace('_', ' ')} {edit.get('variable')}"
    shape = edit.get("shape")
    return words if shape is None else f"{words} ({'×'.join(map(str, shape)) or 'scalar'})"


def _digests(receipt: Receipt) -> str:
    if receipt.checkpoint:
        digest = ", ".join(receipt.digests.values())
        return f"applied to the checkpoint {receipt.checkpoint}, by no worker: {digest}"
    return "\n".join(f"{rank}: {digest}" for rank, digest in sorted(receipt.digests.items()))


def _change(change: Change) -> tuple[object, ...]:
    return _when(change.time), change.state, change.attempt, change.worker, change.step, change.reason


def _when(moment: float | None) -> str:
    return "" if not moment else f"{datetime.fromtimestamp(moment, UTC):%Y-%m-%d %H:%M:%S} UTC"
