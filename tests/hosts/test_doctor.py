"""`replicast doctor --hosts` on machines played by namespaces: one table for all, and who did not come."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.launchers import Machines, machines
from tests.hosts.network import missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "namespaces")
HOSTS = "10.77.0.1,10.77.0.2"


@pytest.fixture(name="two")
def two_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    monkeypatch.setenv("COLUMNS", "300")
    with machines(tmp_path) as made:
        yield made


def test_hosts_that_can_be_a_job_print_one_table(two: Machines) -> None:
    (two.directory / "run").mkdir()
    options = ("--hosts", HOSTS, "--run-dir", "run")
    first, second = (two.launch(node, *options, command="doctor") for node in range(2))
    assert (first.finish(), second.finish()) == (0, 0), first.text
    table = [line for line in first.text.splitlines() if not line.startswith("replicast: waiting")]
    assert table == [line for line in second.text.splitlines() if not line.startswith("replicast: waiting")]
    text = "\n".join(table)
    for said in (
        "all 2 came",
        "10.77.0.1, 10.77.0.2 on all",
        "29500 of each host is reached on all",
        "seen on all",
        "s apart",
        "These hosts can run a job together.",
    ):
        assert said in text, text
    assert text.count(" on all") >= 5, "versions, cores"
    assert list((two.directory / "run").iterdir()) == []


def test_a_host_that_did_not_come_is_named_and_one_that_waits_says_for_whom(two: Machines) -> None:
    first = two.launch(0, "--hosts", HOSTS, "--timeout", "1", command="doctor")
    assert first.finish() == 1
    assert "waiting for the launcher on 10.77.0.2, 0 s of at most 1 s" in first.text
    assert "10.77.0.2: it did not join within 1 s" in first.text
    assert "Fix first: Hosts." in first.text
    second = two.launch(1, "--hosts", HOSTS, "--timeout", "1", command="doctor")
    assert second.finish() == 1
    assert "10.77.0.1: it did not join within 1 s" in second.text
    assert "(10.77.0.1:29499: Connection refused)" in second.text
    assert "TensorFlow" in second.text, "what is known of this one"


def test_a_closed_port_and_a_directory_that_others_do_not_see_are_named(two: Machines) -> None:
    two.hosts[1].namespaces.run("nft", "add rule inet faults in tcp dport 29500 drop")
    for node in range(2):
        (two.directory / f"run-{node}").mkdir()
    launched = [
        two.launch(node, "--hosts", HOSTS, "--run-dir", f"run-{node}", command="doctor") for node in range(2)
    ]
    assert [one.finish() for one in launched] == [1, 1]
    for one in launched:
        assert "10.77.0.2:29500 from 10.77.0.1: timed out" in one.text
        assert "seen on 10.77.0.1; not seen on 10.77.0.2" in one.text
        assert "Fix first: Ports." in one.text
