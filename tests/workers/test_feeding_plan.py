"""Which worker gets which rows: pure functions, tested with tables."""

from __future__ import annotations

import numpy as np
import pytest

from replicast import NotSupported
from replicast.strategy.feeding import epoch_order, rows_of_share, shares_of_order
from replicast.strategy.samples import (
    Sample,
    differing_parts,
    digest_of_batch,
    refuse_other_lengths,
    sample_of_arrays,
    sample_of_batch,
)


@pytest.mark.parametrize(
    ("rows", "size", "expected"),
    [
        (128, 2, [(0, 64), (64, 128)]),
        (128, 3, [(0, 42), (42, 85), (85, 128)]),
        (1, 3, [(0, 0), (0, 0), (0, 1)]),
        (0, 2, [(0, 0), (0, 0)]),
    ],
)
def test_a_batch_is_divided_among_the_workers(rows: int, size: int, expected: list[tuple[int, int]]) -> None:
    assert [rows_of_share(rows, rank, size) for rank in range(size)] == expected


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("shuffle", [False, True, "batch"])
def test_together_the_workers_have_every_row_of_each_batch_once(size: int, shuffle: bool | str) -> None:
    order = epoch_order(47, 9, shuffle, (1, 2))
    by_worker = [list(shares_of_order(order, 9, rank, size)) for rank in range(size)]
    batches = [np.concatenate(parts).tolist() for parts in zip(*by_worker, strict=True)]
    assert [len(batch) for batch in batches] == [9, 9, 9, 9, 9, 2]
    assert sorted(sum(batches, start=[])) == [*range(47)]  # noqa: RUF017 - six short lists


def test_the_order_of_an_epoch_follows_from_its_seed() -> None:
    orders = [
        epoch_order(100, 10, True, seed).tolist() for seed in ((1, 1, 0), (1, 1, 0), (1, 1, 1), (2, 1, 0))
    ]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2] != orders[3] != orders[0]


def test_shuffling_by_batch_keeps_each_batch_together() -> None:
    order = epoch_order(20, 5, "batch", (3,))
    assert [sorted(order[first : first + 5]) for first in range(0, 20, 5)] == np.arange(20).reshape(
        4, 5
    ).tolist()
    assert order.tolist() != [*range(20)]


def test_the_digest_of_a_batch_sees_values_and_shapes() -> None:
    batch = (np.arange(6.0).reshape(2, 3), np.array([b"a", b"bc"], dtype=object))
    assert digest_of_batch(batch) == digest_of_batch(tuple(part.copy() for part in batch))
    assert digest_of_batch(batch) != digest_of_batch((batch[0].reshape(3, 2), batch[1]))
    assert digest_of_batch(batch) != digest_of_batch((batch[0], np.array([b"a", b"bd"], dtype=object)))
    assert digest_of_batch((np.zeros((0, 3)),)) == digest_of_batch((np.zeros((0, 3)),))


def test_samples_name_the_workers_and_the_parts_that_differ() -> None:
    rows, labels = np.arange(12.0).reshape(6, 2), np.arange(6)
    same = sample_of_arrays("training data", (rows, labels))
    other = sample_of_arrays("training data", (rows, labels + 1))
    assert differing_parts({0: same, 1: same, 2: other}) == {2: ["y"]}


def test_samples_of_arrays_see_the_first_row_the_last_row_and_rows_between() -> None:
    rows = np.arange(2000.0).reshape(1000, 2)
    for row in (0, 999, *range(0, 1000, 999 // 3)):
        changed = rows.copy()
        changed[row] = -1.0
        samples = {0: sample_of_arrays("training data", rows), 1: sample_of_arrays("training data", changed)}
        assert differing_parts(samples) == {1: ["x"]}


def test_inputs_that_differ_under_the_same_targets_are_augmented_unless_all_targets_are_alike() -> None:
    rows, labels = np.arange(12.0).reshape(6, 2), np.arange(6)
    for targets, expected in ((labels, {}), (labels * 0, {1: ["x"]})):
        batches = {0: (rows, targets), 1: (rows + 1, targets)}
        samples = {worker: sample_of_batch("training data", batch) for worker, batch in batches.items()}
        assert differing_parts(samples) == expected


def test_samples_of_batches_in_another_order_are_not_compared() -> None:
    samples = {0: Sample("training data", order="a", digests={"x": "1"})}
    samples[1] = Sample("training data", order="b", digests={"x": "2"})
    assert differing_parts(samples) == {}


def test_only_lengths_that_are_known_are_compared() -> None:
    refuse_other_lengths({0: Sample("training data", length=5), 1: Sample("training data")})
    with pytest.raises(NotSupported, match="worker 0 has 5 batches, worker 2 has 6 batches"):
        refuse_other_lengths({0: Sample("training data", length=5), 2: Sample("training data", length=6)})


def test_a_sample_survives_its_way_to_another_worker() -> None:
    sample = sample_of_arrays("training data", (np.zeros((3, 2)), np.array(["a", "é", "c"], dtype=object)))
    assert Sample.from_text(sample.to_text()) == sample
