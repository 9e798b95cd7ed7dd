"""Audit reports: their text, the groups of workers that agree, and the reference value."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from replicast.update.audit_report import (
    SLICE_BYTES,
    AuditReport,
    Declared,
    Deviation,
    Difference,
    agree,
    checked_policy,
    difference_of,
    groups_of,
    reference_of,
    rows_in_turn,
    what_follows,
)
from replicast.update.digest import deviation
from replicast.update.edits import DTYPES


def report(**fields: Any) -> AuditReport:
    far = {1: Deviation(1, 12, math.inf, 0.5, (1, 2), 1)}
    one = Difference("model/dense/kernel", ((0, 2), (1,)), 0, "majority", far)
    declared = (Declared("model/norm/moving_mean", True),)
    made = AuditReport(3, 300, 1.5, 290, 200, "healed", (one,), declared, (17,), 0.01, ("abc",), 3, 8, 4096)
    return replace(made, **fields)


def test_a_report_survives_json() -> None:
    for one in (report(), report(differences=(), outcome="equal", healed=(), last_equal=None)):
        assert AuditReport.from_json(json.loads(json.dumps(one.to_json(), allow_nan=False))) == one
    of_an_earlier_version = {name: one for name, one in report().to_json().items() if name != "attempt"}
    assert AuditReport.from_json(of_an_earlier_version) == report()


@pytest.mark.parametrize("damage", [{"outcome": "fine"}, {"differences": [1]}, {"step": None}])
def test_an_invalid_report_is_refused_with_what_was_received(damage: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Received:"):
        AuditReport.from_json(report().to_json() | damage)


def test_a_report_names_variable_workers_steps_and_what_was_done() -> None:
    text = str(report())
    for said in ("audit 3", "step 300", "model/dense/kernel", "worker 1", "workers 0 and 2", "majority"):
        assert said in text
    assert "some step from 201 to 290" in text
    assert "healed by update 17" in text
    assert "\n" not in text
    assert report(healed=(17, 18)).done == "healed by updates 17, 18"


def test_a_report_says_since_when_replicas_differ_as_far_as_it_is_known() -> None:
    assert report(last_equal=None).since == "step 290 or before"
    assert report(differences=()).since == ""
    one = report(found_at=20, last_equal=20)
    assert one.since == "step 20, after the previous audit"
    assert "since step 20, after the previous audit" in str(one)


def test_what_may_differ_and_does_is_not_counted_among_the_equal() -> None:
    declared = (Declared("a", True), Declared("b", True), Declared("c", False))
    equal = report(differences=(), outcome="equal", healed=(), variables=23, declared=declared)
    assert str(equal) == "audit 3 at step 300: 21 variables are equal on 3 workers; 2 may differ and do"
    assert equal.alike == 21
    assert report(declared=declared).alike == 5


def test_without_a_majority_no_worker_is_blamed() -> None:
    one = Difference("bias", ((0,), (1,)), 0, "coordinator", {1: Deviation(1, 2, 0.5, 0.25, (1,))})
    said = "bias: worker 1 differs from worker 0 (no majority: worker 0's value counts)"
    assert str(one) == said
    assert f"  {said}" in report(differences=(one,)).lines()


def test_with_the_heal_policy_no_manual_sync_is_suggested() -> None:
    assert "An audit follows" in what_follows("heal")
    assert "sync" not in what_follows("heal")
    assert "An audit follows" in what_follows("warn")
    assert what_follows("raise") == "replicas.sync(source=0) makes them equal"


def test_the_lines_say_where_and_by_how_much_and_list_what_may_differ() -> None:
    lines = "\n".join(report().lines())
    assert "worker 1: 1 of 12 elements, first at [1, 2], by at most inf" in lines
    assert "model/norm/moving_mean: may differ, and does" in lines
    equal = report(differences=(), outcome="equal", healed=(), declared=())
    assert equal.lines() == [str(equal)] == ["audit 3 at step 300: 8 variables are equal on 3 workers"]


def test_an_unknown_policy_is_refused() -> None:
    assert checked_policy("heal") == "heal"
    with pytest.raises(ValueError, match="Received: 'ignore'"):
        checked_policy("ignore")


@pytest.mark.parametrize(
    ("digests", "expected"),
    [
        ({0: "aa", 1: "aa"}, {}),
        ({0: "ab", 1: "aa"}, {"y": {"b": (0,), "a": (1,)}}),
        ({0: "ab", 1: "aa", 2: "aa"}, {"y": {"a": (1, 2), "b": (0,)}}),
        ({2: "ba", 1: "ac", 0: "aa"}, {"x": {"a": (0, 1), "b": (2,)}, "y": {"a": (0, 2), "c": (1,)}}),
        ({0: "aa"}, {}),
    ],
)
def test_workers_are_grouped_by_what_they_have(digests: dict[int, str], expected: Any) -> None:
    found = groups_of({rank: dict(zip("xy", said, strict=True)) for rank, said in digests.items()})
    assert found == {name: {one: seats(*ranks) for one, ranks in of.items()} for name, of in expected.items()}
    assert [list(groups) for groups in found.values()] == [list(groups) for groups in expected.values()]


def seats(*ranks: int) -> tuple[tuple[int, str], ...]:
    """Workers with one replica each."""
    return tuple((rank, "") for rank in ranks)


@pytest.mark.parametrize(
    ("groups", "expected_digest", "reference"),
    [
        ({"a": (1, 2), "b": (0,)}, "b", (1, "majority")),
        ({"a": (0,), "b": (1,)}, None, (0, "coordinator")),
        ({"a": (0,), "b": (1,)}, "b", (1, "checkpoint and journal")),
        ({"a": (0,), "b": (1,)}, "c", (0, "coordinator")),
        ({"a": (0, 3), "b": (1, 2)}, "b", (1, "checkpoint and journal")),
        ({"a": (1, 2), "b": (0,), "c": (3,)}, None, (0, "coordinator")),
    ],
)
def test_the_majority_counts_then_what_is_expected_then_worker_0(
    groups: dict[str, tuple[int, ...]], expected_digest: str | None, reference: tuple[int, str]
) -> None:
    of_workers = {digest: seats(*ranks) for digest, ranks in groups.items()}
    assert reference_of(of_workers, expected_digest) == ((reference[0], ""), reference[1])


TWO, THREE = ("GPU:0", "GPU:1"), ("GPU:0", "GPU:1", "GPU:2")


@pytest.mark.parametrize(
    ("digests", "devices", "text"),
    [
        (("a", "a,b"), TWO, "x: worker 1 (GPU:1) differs from worker 0 (majority)"),
        (("b,a", "a"), TWO, "x: worker 0 (GPU:0) differs from worker 1 (majority)"),
        (
            ("a", "b"),
            TWO,
            "x: worker 1 (GPU:0, GPU:1) differs from worker 0 (no majority: worker 0's value counts)",
        ),
        (
            ("a,b", "a,b"),
            TWO,
            "x: workers 0 (GPU:1) and 1 (GPU:1) differ from worker 0 (no majority: worker 0's value counts)",
        ),
        (("a,b,a", "a,a,c"), THREE, "x: workers 0 (GPU:1) and 1 (GPU:2) differ from worker 0 (majority)"),
        (("b,a,a",), THREE, "x: worker 0 (GPU:0) differs from worker 0 (majority)"),
    ],
)
def test_every_replica_of_a_worker_counts_and_the_one_that_differs_is_named(
    digests: tuple[str, ...], devices: tuple[str, ...], text: str
) -> None:
    seen = {rank: {"x": digest, "y": "e"} for rank, digest in enumerate(digests)}
    assert not agree(digests)
    ((name, groups),) = groups_of(seen, dict.fromkeys(seen, devices)).items()
    found = difference_of(name, groups, None)
    assert str(found) == text
    worker, value = found.reference, digests[found.reference].split(",")
    has = dict(zip(devices, value * len(devices) if len(value) == 1 else value, strict=False))[found.device]
    assert has == "a", f"worker {worker} would publish the value of another replica"


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_one_flipped_bit_is_found_and_located_in_every_dtype(name: str) -> None:
    dtype = np.dtype(name)
    reference = np.ones((3, 5), dtype)
    for place, bit in ((0, 0), (7, 8 * dtype.itemsize - 1), (14, 3)):
        if name == "bool" and bit:
            continue
        mine = reference.copy()
        mine.reshape(-1).view(f"u{dtype.itemsize}")[place] ^= np.array(1 << bit, f"u{dtype.itemsize}")
        found = deviation(mine, reference)
        assert (found.count, found.of, found.first_index) == (1, 15, divmod(place, 5))
        assert found.largest_absolute > 0


def test_equal_bits_do_not_deviate_even_if_nan() -> None:
    value = np.array([np.nan, -0.0, np.inf])
    assert deviation(value, value.copy()) == Deviation(0, 3, 0.0, 0.0, None)


def test_zeros_of_another_sign_and_other_nans_deviate_without_a_distance() -> None:
    other_nan = np.array([0x7FF8000000000001], np.uint64).view(np.float64)[0]
    found = deviation(np.array([0.0, np.nan]), np.array([-0.0, other_nan]))
    assert found == Deviation(2, 2, 0.0, 0.0, (0,))
    assert str(found) == "2 of 2 elements, first at [0]; the values are equal, the bits differ"


def test_one_number_has_no_first_place_and_what_is_nan_on_one_side_has_no_distance() -> None:
    assert str(deviation(np.array(2), np.array(4))) == "its only element, by at most 2 (0.5 relative)"
    minus_zero = deviation(np.array(0.0), np.array(-0.0))
    assert str(minus_zero) == "its only element; the values are equal, the bits differ"
    one_side = deviation(np.array([1.0, np.nan]), np.array([1.0, 2.0]))
    assert str(one_side) == "1 of 2 elements, first at [1], 1 NaN on one side only"


def test_what_is_nan_on_one_side_is_counted_apart_and_infinity_is_infinitely_far() -> None:
    found = deviation(np.array([1.0, np.nan, 3.0]), np.array([1.5, 1.0, 3.0]))
    assert (found.count, found.one_is_nan, found.largest_absolute) == (2, 1, 0.5)
    assert found.largest_relative == pytest.approx(1 / 3)
    assert deviation(np.array([np.inf]), np.array([1.0])).largest_absolute == math.inf


def test_the_first_of_many_pieces_counts_and_one_number_has_an_index_without_dimensions() -> None:
    reference = np.zeros(3_000_000, np.float32)
    mine = reference.copy()
    mine[[2_000_000, 2_999_999]] = 1, 2
    assert deviation(mine, reference) == Deviation(2, 3_000_000, 2.0, 1.0, (2_000_000,))
    assert deviation(np.array(2), np.array(4)) == Deviation(1, 1, 2.0, 0.5, ())


def test_values_of_another_shape_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match=r"Received: float64 \(2,\)"):
        deviation(np.zeros(2), np.zeros((2, 1)))


@pytest.mark.parametrize(
    "tables",
    [
        {"one": (10_000, 3 * SLICE_BYTES)},
        {"one": (1_000_003, 256_000_768), "two": (7, 9 * SLICE_BYTES), "three": (50_000, 12_800_000)},
    ],
)
def test_one_round_of_audits_compares_every_row_of_every_table_once(
    tables: dict[str, tuple[int, int]],
) -> None:
    audits = rows_in_turn(tables, 0)[0].audits
    seen: dict[str, list[tuple[int, int]]] = {name: [] for name in tables}
    for turn in range(5 * audits, 6 * audits):
        found = rows_in_turn(tables, turn)
        assert [one.variable for one in found] == list(tables)
        assert [one.audits for one in found] == [audits] * len(tables)
        compared = [one for one in found if one.stop]
        assert len(compared) == 1
        seen[compared[0].variable].append((compared[0].start, compared[0].stop))
    for name, (rows, _) in tables.items():
        starts, stops = zip(*sorted(seen[name]), strict=True)
        assert (starts[0], stops[-1]) == (0, rows)
        assert starts[1:] == stops[:-1]


@pytest.mark.parametrize(
    ("optimizer", "widths"),
    [("SGD", [64]), ("RowWiseAdagrad", [64, 1]), ("Adagrad", [64, 64]), ("LazyAdam", [64, 64, 64])],
)
def test_audit_md_says_within_how_many_steps_a_bit_of_any_row_is_found(
    optimizer: str, widths: list[int]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "audit.md").read_text()
    said = re.search(rf"\| `{optimizer}` \| [^|]* \| ([\d,]+) steps \| ([\d,]+) steps \|", page)
    assert said
    for rows, steps in zip((1_000_000, 10_000_000), said.groups(), strict=True):
        tables = {str(place): (rows, 4 * width * rows) for place, width in enumerate(widths)}
        assert int(steps.replace(",", "")) == 100 * rows_in_turn(tables, 0)[0].audits


def test_without_large_tables_nothing_is_compared_in_turns() -> None:
    assert rows_in_turn({}, 3) == ()
