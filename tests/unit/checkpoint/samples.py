"""States and drafts for the tests of checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from replicast.storage.checkpoints import CheckpointStore, Manifest
from replicast.update.edits import Variable
from replicast.update.schema import Schema

Arrays = dict[str, npt.NDArray[Any]]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def state_of(seed: int = 0) -> Arrays:
    """Every dtype, none and no dimension, nothing in it, odd bits."""
    generator = np.random.default_rng(seed)
    return {
        "dense/kernel": generator.normal(size=(4, 3)).astype(np.float32),
        "dense/bias": np.array([np.nan, -0.0, 1e-40], np.float32),
        "table": generator.normal(size=(5, 2)).astype(BFLOAT16),
        "half": generator.normal(size=3).astype(np.float16),
        "mask": np.array([True, False, True]),
        "empty": np.zeros((0, 3), np.float64),
        "optimizer/iteration": np.array(2**62 + seed, np.int64),
        "optimizer/learning_rate": np.array(0.1, np.float32),
        "bytes/é": np.arange(5, dtype=np.uint8),
    }


def schema_of(arrays: Mapping[str, npt.NDArray[Any]]) -> Schema:
    return Schema(
        Variable(name, array.shape, array.dtype.name, "trainable") for name, array in arrays.items()
    )


def draft_of(arrays: Mapping[str, npt.NDArray[Any]], step: int = 1200, **fields: Any) -> Manifest:
    known: dict[str, Any] = {
        "step": step,
        "sequence": 3,
        "epoch": 2,
        "batch": 7,
        "created_at": 1700000000.25,
        "workers": 3,
        "attempt": 1,
        "schema": schema_of(arrays),
        "metrics": {"loss": 0.5},
        "versions": {"replicast": "0.1.0"},
        "script": {"fits": [[3, 20, None]], "inside": "fit"},
    }
    return Manifest(**known | fields)


def written(store: CheckpointStore, step: int, seed: int = 0, **fields: Any) -> Manifest:
    arrays = state_of(seed)
    return store.write(draft_of(arrays, step, **fields), arrays)


def made(folder: Path, step: int, arrays: Arrays, **fields: Any) -> Path:
    """The directory of a new checkpoint."""
    store = CheckpointStore(folder)
    store.write(draft_of(arrays, step, **fields), arrays)
    return store.path(step).as_path()


def assert_holds(store: CheckpointStore, step: int, arrays: Arrays) -> None:
    reader = store.open(step)
    reader.verify()
    assert reader.names() == tuple(arrays)
    for name, array in arrays.items():
        found = reader.read(name)
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        assert found.tobytes() == array.tobytes()
        assert not found.flags.writeable


def flip(path: Path, place: int, bit: int = 1) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= bit
    path.write_bytes(content)
