"""How a question is asked: turns, problems, stages, and what is compared."""

from __future__ import annotations

from benchmarks.groups import Failed, Group
from benchmarks.question import Contestant, Question, Ratio
from benchmarks.race import ask, order_of_round
from benchmarks.runner import BaseTask, Entry, Times, milliseconds

OURS = Contestant("ours", "replicast", "2")
PEER = Contestant("peer", "stock", "1")
SLOW = Contestant("slow peer", "stock", "8")
FLOOR = Contestant("floor", "stock", "0.5", role="floor")


class PlayedGroup:
    """Processes whose figures are in the names of their contestants, in milliseconds."""

    def __init__(self, pool: str, workers: int, log: list[str]) -> None:
        self.pool, self.workers, self.log = pool, workers, log
        self.broken = False

    def prepare(self, entry: Entry, timeout_secs: float) -> None:
        if entry.contestant == "broken":
            raise Failed("worker 1: no such thing")

    def order(self, order: str, entry: Entry, timeout_secs: float) -> list[Times]:
        self.log.append(f"{order} {entry.contestant} on {self.workers}")
        return [(1, 1 + round(float(entry.contestant) * 1e6))] * self.workers

    def end(self) -> None:
        self.log.append(f"end {self.pool} of {self.workers}")


def question(*contestants: Contestant, **other: object) -> Question:
    fields = {"name": "played", "title": "Played", "unit": "ms", "task": BaseTask(), **other}
    return Question(contestants=contestants, **fields)  # type: ignore[arg-type]


def asked(played: Question, rounds: int = 2) -> tuple[dict[str, float | None], list[str]]:
    log: list[str] = []

    def make(pool: str, workers: int) -> Group:
        return PlayedGroup(pool, workers, log)

    result = ask(played, rounds, lambda _: None, make)
    return {row.name: row.median() for row in result.rows}, log


def test_contestants_take_turns_and_their_processes_end() -> None:
    figures, log = asked(question(OURS, PEER, FLOOR))
    assert figures == {"ours": 2.0, "peer": 1.0, "floor": 0.5}
    assert [line for line in log if line.startswith("race")] == [
        *("race 2 on 2", "race 1 on 2", "race 0.5 on 2"),
        *("race 2 on 2", "race 0.5 on 2", "race 1 on 2"),  # the other way round
    ]
    assert log[-2:] == ["end replicast of 2", "end stock of 2"]


def test_a_contestant_that_fails_is_named_and_the_others_are_measured() -> None:
    broken = Contestant("broken", "stock", "broken")
    result = ask(question(OURS, broken), 1, lambda _: None, lambda *pool: PlayedGroup(*pool, []))
    ours, failed = result.rows
    assert ours.median() == 2.0
    assert (failed.median(), failed.problem) == (None, "worker 1: no such thing")


def test_what_has_several_numbers_of_workers_runs_one_after_the_other() -> None:
    both = [Contestant(f"{n} workers", "stock", "1", workers=n, series="stock", at=n) for n in (1, 4)]
    _, log = asked(question(*both, staged=True, axis="workers"), rounds=1)
    assert log.index("end stock of 1") < log.index("race 1 on 4")


def test_ours_is_compared_with_the_best_peer_and_with_the_floor() -> None:
    played = question(OURS, SLOW, PEER, FLOOR, ratios=(Ratio("ours / peer", OURS, PEER, "at most", 1.5),))
    result = ask(played, 3, lambda _: None, lambda *pool: PlayedGroup(*pool, []))
    ours = result.rows[0]
    assert (result.ratio_to_best(ours, "peer"), result.ratio_to_best(ours, "floor")) == (2.0, 4.0)
    assert result.ratio_to_best(result.rows[2], "peer") is None  # it is the best one itself
    (target,) = result.ratios
    assert target.met() is False
    assert result.order() == ("floor", "peer", "ours", "slow peer")


def test_a_time_is_from_the_first_start_to_the_last_end() -> None:
    assert milliseconds([(5_000_000, 7_000_000), (None, 9_000_000), (6_000_000, 8_000_000)]) == 4.0


def test_no_contestant_always_follows_the_same_one() -> None:
    three = (OURS, PEER, FLOOR)
    orders = {order_of_round(three, number) for number in range(6)}
    assert len(orders) == 6


def test_what_the_floors_differ_by_is_added_even_if_they_had_other_numbers_of_rounds() -> None:
    ours, slow, floor = (
        one.row((ms,) * rounds, None) for one, ms, rounds in ((OURS, 2.0, 2), (SLOW, 8.0, 3), (FLOOR, 6.0, 3))
    )
    rows = {OURS: ours, SLOW: slow, FLOOR: floor}
    assert Ratio("if only the floor grew", OURS, OURS, beyond=(SLOW, FLOOR)).of(rows).median() == 2.0
    rows[FLOOR] = FLOOR.row((None,), "worker 1: no such thing")
    assert Ratio("unknown", OURS, OURS, beyond=(SLOW, FLOOR)).of(rows).median() is None
