"""`Replicas` of every kind of model on TensorFlow's own strategies, with one replica per device.

The table in docs/strategies.md names these tests.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import replicast
from tests.pool import Pool
from tests.scripts.compare import heard
from tests.workers.any_model import FEATURES, KINDS, OUTPUTS, Trained, trained

WAIT_SECS = 60.0
HALVES = np.full((FEATURES, OUTPUTS), 0.5, np.float32)


class Loop:
    """A custom training loop with `Replicas`, on one worker."""

    def __init__(self, strategy: Any, kind: str, run_dir: Path, **options: Any) -> None:
        self.trained = trained(strategy, kind)
        self.replicas = replicas_of(self.trained, run_dir, **options)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.replicas.boundary(logs={"loss": self.trained.step()})

    def parts(self, name: str = "") -> list[bytes]:
        """The bits of a variable on each device of this worker; of a weight if none is named."""
        return [one.numpy().tobytes() for one in self.components(name or self.trained.weight)]

    def all_parts(self) -> dict[str, list[bytes]]:
        return {one.name: self.parts(one.name) for one in self.replicas.schema}

    def components(self, name: str) -> Any:
        """TensorFlow's variables behind a name, one for each device."""
        return self.replicas._worker.state._components[self.replicas.schema.resolve(name).name]

    def flip(self, name: str, device: int) -> None:
        """Changes one bit on one device of this worker."""
        one = self.components(name)[device]
        value = one.numpy()
        value.reshape(-1).view("u4")[1] ^= 1
        one.assign(value)

    def settle(self) -> None:
        """Until all that is proposed has happened."""
        assert self.replicas.sync() is None


def replicas_of(model: Trained, run_dir: Path, **options: Any) -> replicast.Replicas:
    timeouts = replicast.Timeouts(join_secs=60)
    return replicast.Replicas(
        model.model, optimizer=model.optimizer, run_dir=run_dir, timeouts=timeouts, **options
    )


def life(strategy: Any, kind: str, run_dir: Path) -> dict[str, Any]:
    """All that can be done with replicas, once."""
    loop = Loop(strategy, kind, run_dir)
    replicas, weight, slot = loop.replicas, loop.trained.weight, loop.trained.slot
    last = replicas.rank == replicas.size - 1
    seen: dict[str, Any] = {"schema": replicas.schema.to_json(), "rank": replicas.rank}
    loop.train(2)
    if last:
        replicas.propose(replicast.Update().assign(weight, HALVES))
    loop.settle()
    seen["updated"] = loop.parts()
    replicas.propose(lambda values: {weight: values[weight] * 4})  # by all, and run once
    loop.settle()
    seen["computed"] = loop.parts()
    if replicas.rank == 0:
        replicas.revert(2)
    loop.settle()
    seen["reverted"] = loop.parts()

    before = loop.all_parts()
    if last:
        loop.flip(weight, -1)
    if replicas.rank == 0:
        loop.flip(slot, 0)
    report = replicas.audit(on_divergence="heal")
    seen["audit"] = [str(one) for one in report.differences]
    seen["deviations"] = [one.differing for one in report.differences]
    seen["healed"] = report.outcome, loop.all_parts() == before

    if last:  # which makes the loss worse
        replicas.propose(
            replicast.Update().assign(weight, 100 * HALVES),
            trial=replicast.Trial(steps=1),
            at_step=replicas.step + 2,
        )
    loop.train(1)
    loop.settle()  # the others know of the trial
    kept: list[Any] = []
    loop.trained.step()
    kept.append(loop.all_parts())
    replicas.boundary(logs={"loss": 1.0})
    seen["on trial"] = loop.parts()
    loop.train(2)
    seen["trials"] = [
        one.stage if hasattr(one, "stage") else one.trial.outcome for one in replicas.history[-1:]
    ]

    replicas.save().result(WAIT_SECS)
    seen["saved"] = loop.all_parts()
    loop.train(1)
    seen["history"] = [len(set(receipt.digests.values())) for receipt in replicas.history]
    replicas.close()
    again = replicas_of(loop.trained, run_dir)
    loop.replicas = again
    restored = again.restore()
    seen["restored"] = loop.all_parts()
    seen["restored step"] = restored is not None and restored.step == again.step
    again.close()
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_every_feature(kind: str, stock2x2: Pool, tmp_path: Path) -> None:
    for one in stock2x2.run(life, kind, tmp_path):
        for k, v in one.items():
            if k not in ("saved", "restored", "schema"):
                print(k, v)
