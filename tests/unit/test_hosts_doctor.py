"""Can these hosts be a job? What is said of differences, from what each host has found."""

from __future__ import annotations

import pytest

from replicast.launcher.checks import Check, Verdict
from replicast.launcher.failure import LaunchOrder, Phase, WorkerExit
from replicast.launcher.hosts_doctor import table

GOOD, NOTE, BROKEN = Verdict.GOOD, Verdict.NOTE, Verdict.BROKEN
HOSTS = ("h1", "h2")
SUBJECTS = {
    "Names": "h1 is 10.0.0.1",
    "Ports": "29500 of each host is reached",
    "Clocks": "100.0",
    "Python": "3.11.2",
    "TensorFlow": "tensorflow 2.21.0",
    "Shared memory": "1 GiB",
    "Cores and GPUs": "8",
    "Run directory": "seen",
}
OVER = LaunchOrder(phase=Phase.OVER)


def host(*changed: Check) -> list[Check]:
    found = {subject: Check(subject, GOOD, found) for subject, found in SUBJECTS.items()}
    return [*(found | {one.subject: one for one in changed}).values()]


def test_hosts_that_are_alike_are_good() -> None:
    assert {check.verdict for check in table(HOSTS, {0: host(), 1: host()}, OVER)} == {GOOD}


@pytest.mark.parametrize(
    ("other", "verdict", "said"),
    [
        (Check("Names", BROKEN, "h2 is 127.0.1.1"), BROKEN, "h1 is 10.0.0.1 on h1; h2 is 127.0.1.1 on h2"),
        (Check("Names", GOOD, "h1 is 10.9.0.1"), NOTE, "h1 is 10.0.0.1 on h1; h1 is 10.9.0.1 on h2"),
        (Check("Ports", BROKEN, "h1:29500 from h2: timed out"), BROKEN, "h1:29500 from h2: timed out on h2"),
        (Check("Clocks", GOOD, "25.0"), NOTE, "75.0 s apart: h1 +75.0 s, h2 +0.0 s"),
        (Check("Clocks", GOOD, "100.01"), GOOD, "0.010 s apart at most"),
        (Check("Clocks", GOOD, "noon"), GOOD, "0.000 s apart at most"),
        (
            Check("TensorFlow", GOOD, "tensorflow 2.20.0"),
            BROKEN,
            "tensorflow 2.21.0 on h1; tensorflow 2.20.0 on h2",
        ),
        (Check("Python", GOOD, "3.11.9"), NOTE, "3.11.9 on h2"),
        (Check("Python", GOOD, "3.12.0"), BROKEN, "3.12.0 on h2"),
        (Check("Python", BROKEN, "3.11.1"), BROKEN, "3.11.1 on h2"),
        (Check("Shared memory", GOOD, "2 GiB"), GOOD, "1 GiB on h1; 2 GiB on h2"),
        (Check("Shared memory", NOTE, "1 MiB"), NOTE, "1 MiB on h2"),
        (Check("Cores and GPUs", GOOD, "4"), NOTE, "8 on h1; 4 on h2"),
        (Check("Run directory", NOTE, "not seen"), NOTE, "seen on h1; not seen on h2"),
    ],
)
def test_what_differs_is_named(other: Check, verdict: Verdict, said: str) -> None:
    (check,) = [
        one for one in table(HOSTS, {0: host(), 1: host(other)}, OVER) if one.subject == other.subject
    ]
    assert check.verdict is verdict
    assert said in check.found


def test_a_host_that_did_not_come_is_named_and_the_others_are_compared() -> None:
    late = LaunchOrder(phase=Phase.OVER, failure=WorkerExit(host=1, why="it did not join within 60 s"))
    came, *others = table(HOSTS, {0: host()}, late)
    assert (came.verdict, came.found) == (BROKEN, "h2: it did not join within 60 s")
    assert "3.11.2 on all, of those that came" in [check.found for check in others]


def test_what_a_host_did_not_say_is_not_known() -> None:
    found = table(HOSTS, {0: host(), 1: []}, OVER)
    assert "1 GiB on h1; not known on h2" in [check.found for check in found]
