"""`Run.metrics`: long files, restarts and damaged lines."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from replicast.client.metrics import MAX_POINTS, MAX_SERIES, Metrics, MetricsFile, Series
from replicast.storage.run_files import append_metrics


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def line(step: int, **values: float | str) -> str:
    return json.dumps({"step": step, "time": 1.5 * step, "values": values}) + "\n"


def points(found: Metrics, name: str = "loss") -> list[tuple[int, float]]:
    series = found.series[name]
    return list(zip(series.steps.tolist(), series.values.tolist(), strict=True))


def test_a_file_that_is_not_there_yet_has_no_metrics(path: Path) -> None:
    metrics = MetricsFile(path)
    assert (metrics.read(None, 100).series, metrics.read(None, 100).position) == ({}, 0)
    append_metrics(path.parent, (1, time.time(), {"loss": 0.5}))
    assert points(metrics.read(None, 100)) == [(1, 0.5)]


def test_a_spike_in_many_lines_stays_visible_and_the_number_of_points_is_bounded(path: Path) -> None:
    values = np.random.default_rng(1).normal(size=200_000)
    values[[54_321, 54_322, 123_456]] = 1000.0, -1000.0, np.nan
    texts = ("nan" if np.isnan(value) else value for value in values.tolist())
    with path.open("w") as file:
        file.writelines(line(step, loss=value) for step, value in enumerate(texts))
    metrics = MetricsFile(path)
    for most in (100, 2000, MAX_POINTS):
        found = dict(points(metrics.read(None, most)))
        assert len(found) <= most
        assert (found[54_321], found[54_322]) == (1000.0, -1000.0)
        assert np.isnan(found[123_456])
        assert {0, 199_999} <= set(found)
        assert all(values[step] == value for step, value in found.items() if step != 123_456)
    assert metrics.read(None, 10**9).series["loss"].steps.size <= MAX_POINTS


def test_what_was_read_once_is_not_read_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text("".join(line(step, loss=step) for step in range(1000)))
    metrics = MetricsFile(path)
    assert len(metrics.read(None, 2000).series["loss"]) == 1000
    size, begins = path.stat().st_size, path.read_bytes()[:300]
    path.write_bytes(begins.ljust(size - 1, b"x") + b"\n")
    with path.open("a") as file:
        file.write(line(1000, loss=7))
    assert points(metrics.read(None, 2000))[-2:] == [(999, 999.0), (1000, 7.0)]
    path.write_text(line(3, loss=1))
    assert points(metrics.read(None, 2000)) == [(3, 1.0)]


@pytest.mark.parametrize("is_seen_gone", [True, False])
def test_the_metrics_of_a_removed_run_are_not_mixed_with_those_of_a_new_one(
    path: Path, is_seen_gone: bool
) -> None:
    path.write_text("".join(line(step, loss=0.25) for step in range(1000)))
    metrics = MetricsFile(path)
    before = metrics.read(None, 2000)
    begun = "".join(line(step, loss=7.5) for step in range(3, 900))
    path.unlink()
    if is_seen_gone:
        assert not metrics.read(before.position, 2000).series
    path.write_text(begun + "".join(line(step, loss=7.5) for step in range(900, 2000)))
    expected = [(step, 7.5) for step in range(3, 2000)]
    # Who knows points of the former run gets everything, and learns from `since` that they do not count.
    news = metrics.read(before.position, 2000)
    assert (points(news), news.since) == (expected, None)
    assert points(metrics.read(None, 2000)) == expected
    with path.open("a") as file:
        file.write(line(2000, loss=8.5))
    later = metrics.read(news.position, 2000)
    assert (points(later), later.since) == ([(2000, 8.5)], news.position)
    assert metrics.read(before.position, 2000).since is None


def test_series_are_limited_in_number_and_all_together_in_points(path: Path) -> None:
    values = {f"name {number}": 1.0 for number in range(3 * MAX_SERIES)}
    path.write_text("".join(line(step, **values) for step in range(1200)))
    found = MetricsFile(path).read(None, MAX_POINTS)
    assert len(found.series) == MAX_SERIES
    assert sum(map(len, found.series.values())) <= 100_000


def test_of_steps_that_a_restart_repeats_the_later_attempt_counts(path: Path) -> None:
    first = "".join(line(step, loss=step, old=1) for step in range(1, 11))
    path.write_text(first)
    metrics = MetricsFile(path)
    before = metrics.read(None, 100)
    second = "".join(line(step, loss=100 + step) for step in range(6, 9))
    with path.open("a") as file:
        file.write(second)
    expected = [(step, float(step if step < 6 else 100 + step)) for step in range(1, 9)]
    for found in (metrics.read(None, 100), MetricsFile(path).read(None, 100)):
        assert points(found) == expected
        assert points(found, "old") == [(step, 1.0) for step in range(1, 6)]
    since = metrics.read(before.position, 100)
    assert points(since) == expected[5:]


def test_lines_of_one_step_are_joined_and_the_last_value_of_a_name_counts(path: Path) -> None:
    path.write_text(line(1, loss=1) + line(2, loss=2, accuracy=3) + line(2, loss=4, val_loss=5))
    found = MetricsFile(path).read(None, 100)
    assert points(found) == [(1, 1.0), (2, 4.0)]
    assert (points(found, "accuracy"), points(found, "val_loss")) == ([(2, 3.0)], [(2, 5.0)])
    metrics = MetricsFile(path)
    metrics.read(None, 100)
    with path.open("a") as file:
        file.write(line(2, late=6))
    found = metrics.read(None, 100)
    assert (points(found)[-1], points(found, "late")) == ((2, 4.0), [(2, 6.0)])


def test_damaged_lines_are_skipped_and_counted(path: Path) -> None:
    rubbish = ["", "null", "[]", "{}", '{"step": -1, "time": 0, "values": {}}', "\x00", "{" * 100_000]
    rubbish += [
        f'{{"step": {2**70}, "time": 0, "values": {{"loss": 1}}}}',
        '{"step": true}',
        "x" * (5 * 2**20),
    ]
    path.write_bytes(
        b"\xff\xfe\n" + "".join(f"{text}\n" for text in rubbish).encode() + line(9, loss=1).encode()
    )
    with path.open("a") as file:
        file.write(line(10, loss="inf", accuracy="rubbish") + line(11, loss=3)[:-5])
    found = MetricsFile(path).read(None, 100)
    assert points(found) == [(9, 1.0), (10, np.inf)]
    assert found.damaged >= len(rubbish) - 1
    assert found.position == path.stat().st_size - len(line(11, loss=3)[:-5])


def test_what_is_no_file_has_no_metrics(path: Path) -> None:
    os.mkfifo(path)
    assert not MetricsFile(path).read(None, 100).series
    assert not MetricsFile(path.parent).read(5, 100).series


STEPS = st.lists(st.tuples(st.integers(0, 12), st.sampled_from(["loss", "accuracy"])), max_size=40)


@example([(5, "accuracy"), (5, "loss"), (6, "loss"), (5, "loss")], [0])
@given(STEPS, st.lists(st.integers(0, 40), max_size=3))
def test_however_often_a_job_goes_back_only_the_last_attempt_counts(
    tmp_path_factory: pytest.TempPathFactory, written: list[tuple[int, str]], reads: list[int]
) -> None:
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    metrics, known, last = MetricsFile(path), {"loss": {}, "accuracy": {}}, -1
    for number, (step, name) in enumerate(written):
        with path.open("a") as file:
            file.write(line(step, **{name: number}))
        if number in reads:
            metrics.read(None, 100)
        for one, values in known.items():
            known[one] = {old: value for old, value in values.items() if old < step + (step == last)}
        known[name][step], last = float(number), step
    expected = {name: sorted(values.items()) for name, values in known.items() if values}
    for found in (metrics.read(None, 100), MetricsFile(path).read(None, 100)):
        assert {name: points(found, name) for name in found.series} == expected


@given(
    st.lists(st.tuples(st.integers(0, 30), st.floats(width=32)), min_size=1, max_size=60),
    st.integers(1, 12),
)
def test_whatever_is_written_steps_are_in_order_and_values_are_those_of_the_file(
    written: list[tuple[int, float]], most: int
) -> None:
    known: dict[int, float] = {}
    for step, value in written:
        known = {earlier: one for earlier, one in known.items() if earlier < step} | {step: value}
    series = Series(*(np.array(column) for column in (list(known), [0.0] * len(known), list(known.values()))))
    found = series.decimated(most)
    assert len(found) <= max(most, 5)
    assert found.steps.tolist() == sorted(set(found.steps.tolist()))
    for step, value in zip(found.steps.tolist(), found.values.tolist(), strict=True):
        assert np.array_equal(value, known[step], equal_nan=True)
    finite = [value for value in known.values() if np.isfinite(value)]
    if finite:
        kept = found.values[np.isfinite(found.values)]
        assert (kept.min(), kept.max()) == (min(finite), max(finite))


def test_what_is_thinned_keeps_the_means_of_all_values_also_of_parts_that_were_thinned_before() -> None:
    steps, times = np.arange(1000), np.zeros(1000)
    values = np.where(steps % 100 == 7, 1000.0, 1.0)  # The mean of what is kept is far above that of all.
    values[400] = math.nan
    series = Series(steps, times, values)
    for points in (500, 50):
        series = series.decimated(points)
        assert series.counts.sum() == 999
        assert np.nansum(series.means * series.counts) == np.nansum(values)
    told = series.to_json()
    assert [mean for mean in told["means"] if mean is not None] == pytest.approx([10.99] * 10, rel=0.01)
    assert "means" not in Series(steps, times, values).to_json()


def test_between_two_moments_every_step_is_read_however_long_the_file_is(path: Path) -> None:
    lines = (f'{{"step":{n},"time":{n}.5,"values":{{"loss":{n % 10}.0}}}}\n' for n in range(100_000))
    path.write_text("".join(lines))
    metrics = MetricsFile(path)
    found = metrics.between(50_000.0, 50_100.0, MAX_POINTS).series["loss"]
    assert set(range(50_001, 50_100)) <= set(found.steps.tolist())
    assert len(found) < 20_000, "little beside them"
    assert len(metrics.between(50_000.0, 50_100.0, 100).series["loss"]) <= 100
    assert metrics.between(0.0, 1.0, 100).series["loss"].steps[0] == 0
    assert metrics.between(99_999.0, math.inf, 100).series["loss"].steps[-1] == 99_999
    assert (
        not metrics.between(5.0, 1.0, 100).series or len(metrics.between(5.0, 1.0, 100).series["loss"]) <= 100
    )
    assert not MetricsFile(path.parent).between(0.0, 1.0, 100).series


def test_a_sample_of_a_long_file_reads_little_of_it_until_all_of_it_is_read(
    path: Path, preads: list[int]
) -> None:
    with path.open("w") as file:
        file.writelines(line(step, loss=float(step), accuracy="nan") for step in range(200_000))
        file.write('{"step": 200000, "ti')
    metrics = MetricsFile(path)
    found = metrics.sampled(100)
    assert sum(preads) <= 100 * 16 * 1024 < path.stat().st_size / 5
    assert found.position == 0, "the next look at what came since begins at the beginning"
    steps = found.series["loss"].steps
    assert found.series["loss"].values.tolist() == steps.tolist()
    assert len(steps) == 100
    assert steps[0] < 1000
    assert steps[-1] == 199_999
    assert np.diff(steps).max() < 2.1 * 200_000 / 100, "evenly"
    whole = metrics.read(None, 100)
    assert points(metrics.sampled(100)) == points(whole)
    assert metrics.sampled(100).position == whole.position > 0


def test_a_sample_of_a_short_file_is_all_of_it_and_of_a_damaged_one_what_can_be_read(path: Path) -> None:
    assert not MetricsFile(path).sampled(100).series
    path.write_text(line(1, loss=0.5) + line(2, loss=0.25))
    assert points(MetricsFile(path).sampled(100)) == [(1, 0.5), (2, 0.25)]
    path.write_text("no line\n" * 1_000_000 + line(3, loss=0.125))
    assert points(MetricsFile(path).sampled(100)) == [(3, 0.125)]
    path.write_bytes(b"\0" * 5_000_000)
    assert not MetricsFile(path).sampled(100).series
