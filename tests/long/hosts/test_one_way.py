"""A network that is open in one direction only: both launchers end their workers and meet again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hosts.launchers import machines, noted_pid
from tests.hosts.network import missing
from tests.hosts.test_launchers import WAITS

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "namespaces")


@pytest.mark.parametrize("sender", [0, 1])
def test_hosts_that_hear_nothing_of_one_another_end_their_workers_and_meet_again(
    tmp_path: Path, sender: int
) -> None:
    (tmp_path / "train.py").write_text(WAITS)
    with machines(tmp_path) as two:
        launched = two.launch_all("--max-restarts", "3", "--run-dir", "run", "train.py")
        for rank in range(2):
            noted_pid(tmp_path / f"pid-0-{rank}")
        two.network.drop(sender=two.hosts[sender], receiver=two.hosts[1 - sender])
        for node, one in enumerate(launched):
            one.wait_for(f"restart 1 of 3 because host {two.hosts[1 - node].address} was lost")
        two.network.mend()
        for rank in range(2):
            noted_pid(tmp_path / f"pid-1-{rank}")
        (tmp_path / "finish-1").touch()
        assert [one.finish() for one in launched] == [0, 0]
