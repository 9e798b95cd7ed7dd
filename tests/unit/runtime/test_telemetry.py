"""One OpenTelemetry span per update, with the real SDK; and none where it is not installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from replicast.storage.claims import Fence
from replicast.storage.journal import FileJournal
from replicast.update.trial import Trial
from replicast.update.update import Update
from tests.threads import DEADLINE_SECS, Job, eventually
from tests.unit.runtime.playing import bias, loss_of_bias, scheduled

PARTS = ["replicast.prepare", "replicast.apply", "replicast.verify", "replicast.stall"]


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    """What a script sets up, once in a process."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> Iterator[InMemorySpanExporter]:
    exporter.clear()
    yield exporter
    exporter.clear()


def by_name(finished: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    """The spans once the last of an update has ended; each name once."""
    eventually(lambda: "replicast.update" in {span.name for span in finished.get_finished_spans()})
    found = {span.name: span for span in finished.get_finished_spans()}
    assert len(found) == len(finished.get_finished_spans())
    return found


def times(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time, span.end_time


@pytest.mark.parametrize("durable", [True, False])
def test_an_update_is_one_span_with_its_parts_inside(
    spans: InMemorySpanExporter, tmp_path: Path, durable: bool
) -> None:
    journal = FileJournal(tmp_path, Fence(tmp_path, 0)) if durable else None
    with Job(2, journal) as job, trace.get_tracer("script").start_as_current_span("epoch"):
        update = Update(note="too high", author="ana").assign("optimizer/learning_rate", 0.25)
        receipt_of = job.workers[1].propose(update)
        job.train(3)
        receipt = receipt_of.result(DEADLINE_SECS)
    found = by_name(spans)
    del found["epoch"]
    whole = found.pop("replicast.update")
    assert whole.parent is None
    attributes: Any = whole.attributes
    assert attributes["replicast.sequence"] == 1
    assert attributes["replicast.changes"] == ("assign optimizer/learning_rate 0.1 → 0.25",)
    assert (attributes["replicast.author"], attributes["replicast.note"]) == ("ana", "too high")
    assert attributes["replicast.digest"] == receipt.digests[0]
    assert attributes["replicast.stage"] == "verified"
    assert sorted(found) == sorted(PARTS)
    begun, ended = times(whole)
    for name, span in found.items():
        assert span.parent is not None
        assert span.parent.span_id == whole.context.span_id, name
        assert begun <= times(span)[0] <= times(span)[1] <= ended, name
    in_order = [times(found[name]) for name in PARTS[:3]]
    assert all(first[1] <= second[0] for first, second in pairwise(in_order))
    assert times(found["replicast.stall"])[1] == times(found["replicast.apply"])[1]


def test_the_span_of_a_trial_ends_with_its_decision_and_a_replay_is_no_second_one(
    spans: InMemorySpanExporter, tmp_path: Path
) -> None:
    with Job(2, FileJournal(tmp_path, Fence(tmp_path, 0))) as job:
        ticket = scheduled(job.workers[0].propose(bias(5.0), at_step=4, trial=Trial(steps=3)))
        job.train(12, one_step=loss_of_bias)
        assert ticket.result(DEADLINE_SECS).stage == "reverted"
    attributes: Any = by_name(spans)["replicast.update"].attributes
    assert attributes["replicast.stage"] == "reverted"
    assert attributes["replicast.trial"].startswith("loss was 1 before the update and 6 in the trial")
    count = len(spans.get_finished_spans())
    with job.next_attempt(journal=FileJournal(tmp_path, Fence(tmp_path, 1))) as again:
        again.train(12, one_step=loss_of_bias)
        assert [receipt.attempt for receipt in again.workers[0].session.receipts] == [1]
    assert len(spans.get_finished_spans()) == count


def test_without_the_package_nothing_is_told(
    spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)  # as if it were not installed
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with Job(2) as job:
        ticket = job.workers[0].propose(bias(1.0))
        job.train(2)
        assert ticket.result(DEADLINE_SECS).stage == "verified"
    assert not spans.get_finished_spans()
    assert not caplog.records


def test_a_tracer_that_fails_is_reported_once_and_updates_are_verified(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise OSError("no collector")

    monkeypatch.setattr(trace, "get_tracer", broken)
    with Job(2) as job:
        tickets = [job.workers[0].propose(bias(1.0)) for _ in range(2)]
        job.train(4)
        assert [ticket.result(DEADLINE_SECS).stage for ticket in tickets] == ["verified"] * 2
        assert np.all(job.workers[1].state.values["dense/bias"] == 2.0)
    eventually(lambda: caplog.records)
    (record,) = caplog.records
    assert "cannot be told of updates" in record.message
