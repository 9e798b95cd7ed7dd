"""The start of real workers, as it was seen when the strategy of the pool was built."""

from __future__ import annotations

import ctypes
import signal
from typing import Any

import pytest

from replicast.config import Cluster
from replicast.training import strategy as connecting
from tests.pool import Pool, start


def calls_at_the_start(strategy: Any) -> tuple[list[str], list[str]]:
    return start.unwatched_calls, start.watched_calls


def test_no_call_into_the_service_is_made_before_the_job_is_watched(pool2: Pool) -> None:
    for unwatched, watched in pool2.run(calls_at_the_start):
        assert unwatched == []
        assert any("replicast/allreduce" in call for call in watched), "the calls were seen"


def signals_after_the_start(strategy: Any) -> tuple[list[bool], list[bool]]:
    return start.catches_sigterm, start.keeps_sigint


def test_sigterm_and_sigint_do_again_what_they_did_after_the_strategy_is_built(pool2: Pool) -> None:
    assert pool2.run(signals_after_the_start) == [([False], [True])] * 2


def test_ctrl_c_right_before_the_workers_are_connected_leaves_to_sigint_what_it_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    libc, interrupted = ctypes.CDLL(None), list[bool]()

    class Interrupting:
        def sigaction(self, signum: int, action: Any, old: Any) -> None:
            libc.sigaction(signum, action, old)
            if signum == signal.SIGINT and action is not None and not any(bytes(action)):
                interrupted.append(start.is_caught(signal.SIGINT))
                raise KeyboardInterrupt

    monkeypatch.setattr(connecting.ctypes, "CDLL", lambda _: Interrupting())
    monkeypatch.setattr(connecting.rendezvous, "meet", lambda *_: 1.0)
    monkeypatch.setattr(connecting, "port_limit", lambda *_: None)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            connecting._connect(None, Cluster(("a:1", "b:2"), rank=0), None)
        assert (interrupted, start.is_caught(signal.SIGINT)) == ([False], True)
    finally:
        signal.signal(signal.SIGINT, before)
