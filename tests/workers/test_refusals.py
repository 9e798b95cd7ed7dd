"""What cannot work is refused immediately on every worker, with an alternative."""

from __future__ import annotations

from typing import Any

import pytest

import replicast
from tests.pool import Pool
from tests.workers.recipes import arrays, perceptron


def jit_compiled(strategy: Any) -> None:
    perceptron(strategy, jit_compile=True).fit(*arrays(), verbose=0)


def jit_compiled_train_on_batch(strategy: Any) -> None:
    perceptron(strategy, jit_compile=True).train_on_batch(*arrays())


def message_of_refusal(strategy: Any, name: str) -> str:
    with pytest.raises(replicast.NotSupported) as refusal:
        globals()[name](strategy)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("jit_compiled", "jit_compile=True is not supported here"),
        ("jit_compiled_train_on_batch", "Compile the model with jit_compile=False"),
    ],
)
def test_what_cannot_work_is_refused_on_every_worker(name: str, expected: str, pool2: Pool) -> None:
    messages = pool2.run(message_of_refusal, name)
    assert all(expected in message for message in messages), messages
