"""Can these hosts be a job? What is said of differences, from what each host has found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from replicast.launcher.checks import Check, Verdict
from replicast.launcher.hosts_doctor import Evidence, Facts, Found

GOOD, NOTE, BROKEN = Verdict.GOOD, Verdict.NOTE, Verdict.BROKEN
HOSTS = ("h1", "h2")
ITSELF = {
    "Python": "3.11.2",
    "TensorFlow": "tensorflow 2.21.0",
    "Shared memory": "1 GiB",
    "Cores and GPUs": "8",
}


def facts(node: int, *changed: Check, **changes: Any) -> Facts:
    by_subject = {subject: Check(subject, GOOD, found) for subject, found in ITSELF.items()}
    checks = tuple({**by_subject, **{one.subject: one for one in changed}}.values())
    known: dict[str, Any] = {
        "node": node,
        "addresses": ("10.0.0.1", "10.0.0.2"),
        "checks": checks,
        "run_dir": "writable",
    }
    return Facts(**{**known, **changes})


FOUND = Found(reach={0: "answers", 1: "answers"}, sees_mark=True)
WELL = Evidence(HOSTS, 29500, {0: facts(0), 1: facts(1)}, {0: FOUND, 1: FOUND}, {0: 0.0, 1: 0.01}, 60.0)


def check_of(evidence: Evidence, subject: str) -> Check:
    (found,) = [check for check in evidence.checks() if check.subject == subject]
    return found


def second(*changed: Check, **changes: Any) -> Evidence:
    return replace(WELL, facts={0: facts(0), 1: facts(1, *changed, **changes)})


def test_hosts_that_are_alike_are_good() -> None:
    assert {check.verdict for check in WELL.checks()} == {GOOD}


@pytest.mark.parametrize(
    ("evidence", "subject", "verdict", "said"),
    [
        (replace(WELL, facts={0: facts(0)}), "Hosts", BROKEN, "h2 did not join within 60 s"),
        (replace(WELL, facts={0: facts(0)}), "Names", GOOD, "on every host, of those that came"),
        (replace(WELL, facts={0: facts(0)}), "Ports", GOOD, "from every host, of those that came"),
        (replace(WELL, facts={0: facts(0)}), "Python", GOOD, "on all, of those that came"),
        (second(addresses=("10.0.0.1", "127.0.1.1")), "Names", BROKEN, "h2 is 127.0.1.1 on h2"),
        (second(addresses=("", "10.0.0.2")), "Names", BROKEN, "h1 has no address on h2"),
        (second(addresses=("10.9.0.1", "10.0.0.2")), "Names", NOTE, "h1 is 10.0.0.1 on h1, 10.9.0.1 on h2"),
        (second(port="h2:29500 cannot be used on h2"), "Ports", BROKEN, "h2:29500 cannot be used"),
        (
            replace(WELL, found={0: FOUND, 1: Found(reach={0: "timed out"}, sees_mark=True)}),
            "Ports",
            BROKEN,
            "h1:29500 from h2: timed out",
        ),
        (replace(WELL, found={0: FOUND}), "Ports", NOTE, "not known from h2"),
        (replace(WELL, clocks={0: 0.0, 1: -75.0}), "Clocks", NOTE, "75.0 s apart: h1 +0.0 s, h2 -75.0 s"),
        # TensorFlow listens at every address.
        (replace(WELL, hosts=("127.0.0.1", "127.0.0.2")), "Names", BROKEN, "the ports clash"),
        (
            second(Check("TensorFlow", GOOD, "tensorflow 2.20.0")),
            "TensorFlow",
            BROKEN,
            "tensorflow 2.21.0 on h1; tensorflow 2.20.0 on h2",
        ),
        (second(Check("Python", GOOD, "3.11.9")), "Python", NOTE, "3.11.9 on h2"),
        (second(Check("Python", GOOD, "3.12.0")), "Python", BROKEN, "3.12.0 on h2"),
        (second(Check("Python", BROKEN, "3.11.1")), "Python", BROKEN, "3.11.1 on h2"),
        (second(Check("Shared memory", GOOD, "2 GiB")), "Shared memory", GOOD, "1 GiB on h1; 2 GiB on h2"),
        (second(Check("Shared memory", NOTE, "1 MiB")), "Shared memory", NOTE, "1 MiB on h2"),
        (second(Check("Cores and GPUs", GOOD, "4")), "Cores and GPUs", NOTE, "8 on h1; 4 on h2"),
        (second(checks=()), "Shared memory", NOTE, "not known on h2"),
        (
            replace(WELL, found={0: FOUND, 1: Found(reach=FOUND.reach, sees_mark=False)}),
            "Run directory",
            NOTE,
            "h2: not the one of h1",
        ),
        (
            replace(WELL, facts={0: facts(0, run_dir="not writable"), 1: facts(1)}),
            "Run directory",
            BROKEN,
            "not writable on h1",
        ),
    ],
)
def test_what_differs_is_named(evidence: Evidence, subject: str, verdict: Verdict, said: str) -> None:
    check = check_of(evidence, subject)
    assert check.verdict is verdict
    assert said in check.found
