"""`replicast run --isolate`: a job in a network of its own. Real namespaces, workers without TensorFlow."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from replicast.launcher.isolation import check_isolation
from replicast.launcher.network import exposure_line, outside_addresses
from replicast.launcher.plan import Job

SECS = 120.0
WORKER = """
import json, os, pathlib, socket, sys
cluster = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]
rank, port = int(os.environ["RANK"]), int(cluster[0].rpartition(":")[2])
pathlib.Path(os.environ["REPLICAST_RUN_DIR"], f"owned-by-{rank}").touch()
if rank == 0:
    with socket.create_server(("", port)) as server:
        print("ready", *(name for _, name in socket.if_nameindex()), flush=True)
        server.accept()[0].recv(1)
else:
    for _ in range(100):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            break
        except OSError:
            import time; time.sleep(0.05)
    else:
        sys.exit("worker 0 does not answer")
sys.exit(int(sys.argv[1]) if rank == 0 else 0)
"""
WAITING = "import time; print('ready', flush=True); time.sleep(60)"


def may_isolate() -> bool:
    try:
        check_isolation(Job(argv=("true",)), {})
    except Exception:
        return False
    return True


needs_namespaces = pytest.mark.skipif(not may_isolate(), reason="this user may not make a network namespace")
needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("setpriv"), reason="gives up rights that only root has"
)


def command(tmp_path: Path, script: str, *arguments: str, options: tuple[str, ...] = ()) -> list[str]:
    path = tmp_path / "work.py"
    path.write_text(script)
    run = [
        sys.executable,
        "-m",
        "replicast",
        "run",
        "-n",
        "2",
        "--isolate",
        "--run-dir",
        str(tmp_path / "run"),
    ]
    return [*run, *options, str(path), *arguments]


@needs_namespaces
def test_isolated_workers_reach_each_other_and_nothing_else_and_exit_codes_and_owners_stay(
    tmp_path: Path,
) -> None:
    done = subprocess.run(command(tmp_path, WORKER, "7"), capture_output=True, text=True, timeout=SECS)
    assert done.returncode == 7, done.stderr
    assert "[worker 0] ready lo\n" in done.stdout
    for rank in (0, 1):
        assert (tmp_path / "run" / f"owned-by-{rank}").stat().st_uid == os.geteuid()


@needs_root
@needs_namespaces
def test_without_the_right_to_make_networks_a_user_namespace_gives_it_and_files_keep_their_owner(
    tmp_path: Path,
) -> None:
    unprivileged = ["setpriv", "--bounding-set=-sys_admin,-net_admin", "--inh-caps=-all"]
    full = [*unprivileged, *command(tmp_path, WORKER, "0")]
    done = subprocess.run(full, capture_output=True, text=True, timeout=SECS)
    assert done.returncode == 0, done.stderr
    assert "[worker 0] ready lo\n" in done.stdout
    assert (tmp_path / "run" / "owned-by-1").stat().st_uid == os.geteuid()


@needs_root
@needs_namespaces
def test_where_no_namespace_can_be_made_the_job_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    limits = "echo 0 > /proc/sys/user/max_user_namespaces && echo 0 > /proc/sys/user/max_net_namespaces"
    inside = ["unshare", "--user", "--map-root-user", "sh", "-c", f'{limits} && exec "$@"', "sh"]
    full = [*inside, *command(tmp_path, WORKER, "0")]
    done = subprocess.run(full, capture_output=True, text=True, timeout=SECS)
    assert done.returncode == 2
    assert "--isolate: this user may not make a network namespace here" in done.stderr
    assert "max_net_namespaces is reached" in done.stderr
    assert not (tmp_path / "run").exists()


@needs_root
@needs_namespaces
def test_a_launcher_with_threads_that_may_not_be_isolated_without_root_is_refused_and_nothing_is_left(
    tmp_path: Path,
) -> None:
    threaded = (
        "import threading; from replicast.cli import main\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "main()"
    )
    unprivileged = ["setpriv", "--bounding-set=-sys_admin,-net_admin", "--inh-caps=-all"]
    arguments = command(tmp_path, WORKER, "0")[3:]
    full = [*unprivileged, sys.executable, "-c", threaded, *arguments]
    done = subprocess.run(full, capture_output=True, text=True, timeout=SECS)
    assert done.returncode == 2
    assert "process of 2 threads" in done.stderr
    assert "leave out --isolate" in done.stderr
    assert not (tmp_path / "run").exists()


@needs_namespaces
def test_the_page_of_an_isolated_job_is_reachable_and_ctrl_c_ends_it(tmp_path: Path) -> None:
    options = ("--serve", "0")
    with subprocess.Popen(
        command(tmp_path, WAITING, options=options), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as launcher:
        try:
            assert launcher.stderr is not None
            assert launcher.stdout is not None
            address = launcher.stderr.readline().split()[-1]
            while "ready" not in launcher.stdout.readline():
                assert launcher.poll() is None
            with urllib.request.urlopen(f"{address}healthz", timeout=120) as answer:
                assert answer.status == 200
            launcher.send_signal(signal.SIGINT)
            assert launcher.wait(SECS) == 130
        finally:
            launcher.kill()


@pytest.mark.parametrize(
    ("tf_config", "options", "said"),
    [
        ("", ("--hosts", "a,b", "--node-rank", "0"), "for a job on one machine"),
        ("", ("--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "a"), "Leave out --nnodes"),
        (
            '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}',
            ("-n", "1"),
            "Leave out TF_CONFIG",
        ),
    ],
)
def test_a_job_on_several_machines_cannot_be_isolated(
    tmp_path: Path, tf_config: str, options: tuple[str, ...], said: str
) -> None:
    done = subprocess.run(
        command(tmp_path, WORKER, "0", options=options),
        capture_output=True,
        text=True,
        timeout=SECS,
        env={**os.environ, "TF_CONFIG": tf_config},
    )
    assert done.returncode == 2
    assert said in done.stderr


def test_a_job_between_machines_warns_once_and_one_on_the_loopback_or_with_trusted_networks_does_not() -> (
    None
):
    between = Job(argv=("true",), workers=2, hosts=("a", "b"))
    line = exposure_line(between, {}, ["10.0.0.1", "fd00::1", "10.1.0.1"])
    assert "any process that can reach 10.0.0.1, fd00::1 and 1 more can run code in the workers" in line
    assert "SECURITY.md" in line
    assert exposure_line(between, {"REPLICAST_TRUSTED_NETWORKS": "any"}, ["10.0.0.1"]) == ""
    assert exposure_line(between, {"REPLICAST_TRUSTED_NETWORKS": "10.0.0.0/8"}, ["10.0.0.1"]) == ""
    assert exposure_line(between, {}, []) == ""
    assert exposure_line(Job(argv=("true",), workers=2), {}, ["10.0.0.1"]) == ""


def test_the_loopback_and_link_local_addresses_are_not_outside() -> None:
    assert not {"127.0.0.1", "::1"} & set(outside_addresses())
    assert not any(address.startswith(("fe80", "169.254.")) for address in outside_addresses())


def test_a_system_that_does_not_tell_its_interfaces_stops_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses() -> list[tuple[int, str]]:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(socket, "if_nameindex", refuses)
    assert all(":" in address for address in outside_addresses()), "those of IPv6 come from a file"
