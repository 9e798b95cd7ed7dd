"""Whether a process itself stood still: with clocks that are set by hand."""

from __future__ import annotations

from replicast.silence import Pauses


class Clocks:
    """The time, and the CPU time of the process."""

    def __init__(self) -> None:
        self.now = 100.0
        self.cpu = 3.0

    def pauses(self) -> Pauses:
        return Pauses(5.0, lambda: self.now, lambda: self.cpu)


def test_a_process_that_did_not_run_knows_for_how_long_and_forgets_it_later() -> None:
    clocks = Clocks()
    pauses = clocks.pauses()
    assert pauses.last_secs(within_secs=30.0) is None
    clocks.now += 15.0
    assert pauses.last_secs(within_secs=30.0) == 15.0
    clocks.now += 4.0
    assert pauses.last_secs(within_secs=30.0) == 15.0, "a short delay is none"
    for _ in range(7):
        clocks.now += 4.0
        pauses.look()
    assert pauses.last_secs(within_secs=30.0) is None


def test_a_process_whose_thread_had_no_turn_was_running() -> None:
    clocks = Clocks()
    pauses = clocks.pauses()
    clocks.now, clocks.cpu = clocks.now + 15.0, clocks.cpu + 9.0
    assert pauses.last_secs(within_secs=30.0) is None
