"""`Replicas` of every kind of model on TensorFlow's own strategies, with one replica per device.

The table in docs/strategies.md names these tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import replicast
from tests.pool import Pool
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
        assert self.replicas.sync(variables=[self.trained.weight]) is None


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
    seen: dict[str, Any] = {"names": [replicas.schema.resolve(name).name for name in (weight, slot)]}
    loop.train(2)
    if last:
        replicas.propose(replicast.Update().assign(weight, HALVES))
    loop.settle()
    seen["updated"] = loop.parts()
    if replicas.rank == 0:
        replicas.propose(lambda values: {weight: values[weight] * 4})
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

    if last:  # which fails: no loss is that much smaller
        update, trial = (
            replicast.Update().assign(weight, 100 * HALVES),
            replicast.Trial(steps=1, max_increase=-2.0),
        )
        replicas.propose(update, trial=trial, at_step=replicas.step + 2)
    loop.settle()  # all know of it
    loop.train(1)
    loss = loop.trained.step()
    before = loop.all_parts()
    replicas.boundary(logs={"loss": loss})
    seen["on trial"] = loop.parts()
    loop.train(1)
    seen["taken back"] = loop.all_parts() == before

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


def assert_all_held(kind: str, workers: list[dict[str, Any]], devices: int) -> None:
    """What `life` has seen on each worker."""
    replicas = len(workers) * devices
    halves, fours = [HALVES.tobytes()] * devices, [(4 * HALVES).tobytes()] * devices
    for seen in workers:
        assert (seen["updated"], seen["computed"], seen["reverted"]) == (halves, fours, halves)
        assert seen["on trial"] == [(100 * HALVES).tobytes()] * devices
        assert seen["taken back"]
        assert set(seen["history"]) == {1}
        assert seen["healed"] == ("healed", True)
        assert seen["audit"] == workers[0]["audit"]
        assert seen["restored step"]
    (weight, slot), first = workers[0]["names"], workers[0]["audit"]
    last = f"worker {len(workers) - 1} (CPU:{devices - 1})"
    assert first[0] == f"{weight}: {last} differs from worker 0 (majority)"
    assert first[1].startswith(f"{slot}: worker 0 (CPU:0) differs from worker ")
    (found,) = workers[0]["deviations"][0].values()
    assert (found.count, found.of) == (1, FEATURES * OUTPUTS)
    for name in workers[0]["saved"]:
        everywhere = {value for seen in workers for value in seen["saved"][name]}
        restored = {value for seen in workers for value in seen["restored"][name]}
        if "moving" in name:  # each replica's own: their mean is saved
            assert (len(everywhere), len(restored)) == (replicas, 1)
        else:
            assert everywhere == restored, name
            assert len(everywhere) == 1, name


@pytest.mark.parametrize("kind", KINDS)
def test_every_feature_with_two_workers_of_two_devices(kind: str, stock2x2: Pool, tmp_path: Path) -> None:
    assert_all_held(kind, stock2x2.run(life, kind, tmp_path), devices=2)


def test_every_feature_with_two_workers_of_three_devices(stock2x3: Pool, tmp_path: Path) -> None:
    assert_all_held("keras 3", stock2x3.run(life, "keras 3", tmp_path), devices=3)
