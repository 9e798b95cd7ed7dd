"""As tests/faults/test_stock_strategies.py, with `fit` of tf_keras; and workers of three devices."""

from __future__ import annotations

from pathlib import Path

from tests.faults.test_stock_strategies import assert_same_bits
from tests.pool import Pool
from tests.workers.test_any_model import assert_all_held, life


def test_an_update_a_flipped_bit_and_a_kill_end_with_the_same_bits_in_fit_of_tf_keras(tmp_path: Path) -> None:
    assert_same_bits("stock_tf_keras.py", "hidden/kernel", "out/bias", tmp_path)


def test_every_feature_with_two_workers_of_three_devices(stock2x3: Pool, tmp_path: Path) -> None:
    assert_all_held("keras 3", stock2x3.run(life, "keras 3", tmp_path), devices=3)
