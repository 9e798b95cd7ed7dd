"""Digests that are stored in files: they must not change."""

import ml_dtypes
import numpy as np

from replicast.update.digest import digest_array, digest_state

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def test_digests_stay_what_they_are_from_version_to_version() -> None:
    assert digest_array(np.arange(4, dtype=np.float32)) == "62113c3c0de444b40ae18917c34b5369"
    assert digest_array(np.array(1.5, BFLOAT16)) == "592be1533d2bfb376a167e118f2f63a5"
    assert (
        digest_state({"b": np.arange(2, dtype=np.int64), "a": np.zeros((), np.float32)})
        == "010cd7fbfcb213719959c02f083be804"
    )
