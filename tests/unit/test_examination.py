"""The numbers that summarise the values of an update."""

from __future__ import annotations

import math

import numpy as np
import pytest

from replicast.update.edits import BFLOAT16
from replicast.update.guard import values_of, view_of
from replicast.update.update import Update


def test_the_norm_of_a_low_rank_is_that_of_the_product() -> None:
    random = np.random.default_rng(1)
    a, b = random.normal(size=(7, 2)).astype("f4"), random.normal(size=(2, 5)).astype("f4")
    view = view_of(Update().add_low_rank("x", a, b).edits[0])
    assert view.values is not None
    assert view.values.norm == pytest.approx(np.linalg.norm(a.astype("f8") @ b.astype("f8")))
    assert (view.shape, view.rank) == ((7, 5), 2)


def test_numbers_leave_out_what_is_not_finite() -> None:
    found = values_of(np.array([[3, math.nan], [-4, math.inf]], BFLOAT16))
    assert (found.size, found.nonfinite, found.minimum, found.maximum, found.norm) == (4, 2, -4, 3, 5)
    assert math.isnan(values_of(np.empty(0, "f4")).minimum)
    assert values_of(np.array([True, False])).maximum == 1
