"""What a pod of examples/kubernetes.yaml runs, on machines played by namespaces instead of pods."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.hosts.network import Host, Network, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "-")

EXAMPLES = Path(__file__).parents[3] / "examples"
TRAINING = Path(__file__).parents[1] / "schedulers" / "slow_training.py"
SECS = 120.0


def container() -> dict[str, Any]:
    text = (EXAMPLES / "kubernetes.yaml").read_text()
    job = next(one for one in yaml.safe_load_all(text) if one["kind"] == "Job")
    found: dict[str, Any] = job["spec"]["template"]["spec"]["containers"][0]
    return found


class Pod:
    """One worker, started as the container of a pod with this index."""

    def __init__(self, host: Host, index: int, directory: Path) -> None:
        self._host = host
        self._here = {"/runs": str(directory), "/tmp/progress.json": str(directory / f"progress-{index}")}
        self._here["$(JOB_COMPLETION_INDEX)"] = str(index)
        self._here["restart.py"] = str(TRAINING)
        described = container()
        environ = {one["name"]: self._local(one["value"]) for one in described["env"] if "value" in one}
        program = [self._local(part) for part in described["command"]]
        assert program.pop(0) == "replicast"
        self.log = directory / f"log-{index}"
        with self.log.open("ab") as output:
            self.process = host.start(
                [sys.executable, "-m", "replicast", *program, "60", "0.25"],
                env={**os.environ, **environ},
                stdout=output,
            )

    def _local(self, text: str) -> str:
        for there, here in self._here.items():
            text = text.replace(there, here)
        return text

    def is_ready(self) -> bool:
        """What the readiness probe says."""
        probe = [self._local(part) for part in container()["readinessProbe"]["exec"]["command"]]
        done = subprocess.run(self._host.namespaces.inside(probe), capture_output=True, timeout=SECS)
        return done.returncode == 0

    def said(self) -> str:
        return self.log.read_text(errors="replace")


def wait(is_so: Callable[[], bool], pods: list[Pod]) -> None:
    ends = time.monotonic() + SECS
    while not is_so():
        assert time.monotonic() < ends, "\n".join(pod.said()[-2000:] for pod in pods)
        time.sleep(0.1)


def test_pods_become_ready_a_deleted_one_saves_and_its_successor_resumes(tmp_path: Path) -> None:
    with Network(2) as network:
        names = tmp_path / "hosts"
        names.write_text("127.0.0.1 localhost\n10.77.0.1 digits-0.digits\n10.77.0.2 digits-1.digits\n")
        for host in network.hosts:
            host.namespaces.run("mount", "--bind", str(names), "/etc/hosts")
        pods = [Pod(host, index, tmp_path) for index, host in enumerate(network.hosts)]
        assert not pods[0].is_ready()
        wait(lambda: all(pod.is_ready() for pod in pods), pods)
        pods[1].process.send_signal(signal.SIGTERM)  # kubectl delete pod digits-1
        assert pods[1].process.wait(SECS) == 143
        assert pods[0].process.wait(SECS) == 143, "which the policy of the job does not count as a failure"
        assert "was told to exit: the state is saved" in pods[0].said()
        again = [Pod(host, index, tmp_path) for index, host in enumerate(network.hosts)]
        assert [pod.process.wait(SECS) for pod in again] == [0, 0], again[0].said()[-2000:]
        first, resumed = re.findall(r"resumes after step (\w+)", pods[0].said())
        assert (first, int(resumed) > 0) == ("None", True)
        assert "trained 60 steps" in pods[0].said()
