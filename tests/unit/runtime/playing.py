"""Helpers for the tests of the runtime: updates, outcomes, and a training that measures."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from replicast.core.entries import Stage
from replicast.errors import UpdatePending, UpdateRefused
from replicast.replicas.proposals import Ticket
from replicast.update.update import Update
from tests.threads import DEADLINE_SECS, Worker, eventually


def own_threads() -> set[threading.Thread]:
    """The threads of replicast in this process, also those that other tests have left."""
    return {one for one in threading.enumerate() if one.name.startswith("replicast-")}


def bias(amount: float, **options: Any) -> Update:
    return Update(**options).add("dense/bias", np.full(3, amount, np.float32))


def bias_of(worker: Worker) -> float:
    values = set(worker.state.values["dense/bias"].tolist())
    assert len(values) == 1
    return float(values.pop())


def adding(amount: float) -> Callable[[Mapping[str, Any]], Any]:
    """A function that can be proposed."""
    return lambda values: {"bias": values["bias"] + np.float32(amount)}


def refusal(ticket: Ticket) -> UpdateRefused:
    with pytest.raises(UpdateRefused) as refused:
        ticket.result(DEADLINE_SECS)
    assert ticket.stage in (Stage.REFUSED, Stage.WITHDRAWN)
    return refused.value


def scheduled(ticket: Ticket) -> Ticket:
    """Blocks until every worker will stop at its step."""
    eventually(lambda: ticket.stage is Stage.SCHEDULED)
    return ticket


def pending(ticket: Ticket, timeout: float | None = None) -> UpdatePending:
    with pytest.raises(UpdatePending) as raised:
        ticket.result(timeout)
    assert raised.value.update_id == ticket.id
    return raised.value


def flip(worker: Worker, name: str, place: int = 0, bit: int = 0) -> None:
    """Changes one bit of one element of one replica."""
    value = worker.state.values[name] = worker.state.values[name].copy()
    value.reshape(-1).view(np.uint32)[place] ^= np.uint32(1 << bit)


def loss_of_bias(worker: Worker, step: int) -> Mapping[str, float]:
    """A step of training, the same on all workers and another at each step; worse the larger the bias is."""
    loss = 1.0 + float(worker.state.values["dense/bias"][0])
    values = worker.state.values
    values["dense/kernel"] = values["dense/kernel"] * np.float32(1.01) + np.float32(step)
    return {"loss": loss, "accuracy": -loss}
