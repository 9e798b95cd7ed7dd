"""The bytes of a checkpoint: they must stay readable, and be written unchanged."""

from pathlib import Path

import ml_dtypes
import numpy as np

from replicast.core.entries import Pending, Proposal
from replicast.storage.checkpoints import CheckpointStore, Manifest, open_checkpoint
from replicast.update.edits import Variable
from replicast.update.schema import Schema
from replicast.update.trial import Trial

FOLDER = Path(__file__).parent / "files" / "checkpoint"
FILES = ("manifest.json", "state.safetensors")


def arrays() -> dict[str, np.ndarray]:
    return {
        "dense/kernel": np.array([[1.5, -0.0], [1e-40, np.inf]], np.float32),
        "dense/bias": np.array([0.25, -3.0], ml_dtypes.bfloat16),
        "mask": np.array([True, False]),
        "nothing": np.zeros((0, 3), np.float16),
        "optimizer/m": np.array([[0.0, 1.0], [2.0, 3.0]], np.float32),
        "optimizer/iteration": np.array(2**62 + 1, np.int64),
    }


def draft() -> Manifest:
    kinds = {"optimizer/m": "optimizer", "optimizer/iteration": "optimizer", "mask": "non_trainable"}
    variables = [
        Variable(
            name,
            array.shape,
            array.dtype.name,
            kinds.get(name, "trainable"),  # type: ignore[arg-type]
            (("optimizer/m", 0.5),) if name == "dense/kernel" else (),
        )
        for name, array in arrays().items()
    ]
    return Manifest(
        step=1200,
        sequence=42,
        epoch=3,
        batch=17,
        created_at=1700000000.25,
        workers=3,
        attempt=1,
        schema=Schema(variables, {"optimizer/learning_rate": "it is computed by a schedule"}),
        parent={"step": 1200, "path": "runs/é/checkpoints/00001200", "update_id": "golden-1"},
        metrics={"loss": 0.5, "perplexity": float("inf")},
        versions={"replicast": "0.1.0", "keras": "3.12.0"},
        missing=(40, 41),
        pending=(
            Pending(
                Proposal("golden-2", "d" * 32, None, 1300, Trial(50), author="me", note="why"),
                ("0-7", "inbox-3"),
            ),
            Pending(Proposal("golden-3", "e" * 32, author="me", reverts=7, forced=True), ("0-8",)),
        ),
        script={"fits": [[3, 20, None]], "inside": "fit"},
        measured='[[1200, 1, {"loss": 0.5}]]',
    )


def test_a_checkpoint_stays_what_it_is(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    manifest = store.write(draft(), arrays())
    assert {name: (store.path(1200).as_path() / name).read_bytes() for name in FILES} == {
        name: (FOLDER / name).read_bytes() for name in FILES
    }
    with open_checkpoint(FOLDER) as reader:
        reader.verify()
        assert reader.manifest == manifest
        assert reader.manifest.to_json() == manifest.to_json()
        for name, array in arrays().items():
            assert reader.read(name).tobytes() == array.tobytes()
