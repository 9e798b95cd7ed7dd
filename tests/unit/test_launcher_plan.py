"""What can be refused is refused before anything starts; and what each worker gets."""

from __future__ import annotations

import json
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from replicast.config import Cluster
from replicast.errors import ClusterError, LaunchRefused
from replicast.launcher.plan import (
    JobPlan,
    Machine,
    WorkerPlan,
    check_job,
    check_script,
    hold_ports,
    parse_tee,
    plan_workers,
    spread_over_devices,
    thread_settings,
    visible_gpus,
    warnings,
)

JOB = JobPlan(argv=("python", "train.py", "--lr", "1"), workers=2)
GIVEN = Cluster(addresses=("a:1", "b:2", "c:3"), rank=2)


def planned(job: JobPlan = JOB, **changes: object) -> tuple[WorkerPlan, ...]:
    known: dict[str, object] = {
        "ports": (7001, 7002),
        "attempt": 0,
        "run_dir": Path("/run"),
        "machine": Machine(cores=8),
        "environ": {},
    }
    return plan_workers(job, **{**known, **changes})  # type: ignore[arg-type]


def test_each_local_worker_gets_its_rank() -> None:
    first, second = planned()
    assert (first.rank, second.rank) == (0, 1)
    assert first.argv == second.argv == JOB.argv
    assert second.env["RANK"] == second.env["LOCAL_RANK"] == "1"
    assert second.env["WORLD_SIZE"] == second.env["LOCAL_WORLD_SIZE"] == "2"
    assert json.loads(second.env["TF_CONFIG"]) == {
        "cluster": {"worker": ["127.0.0.1:7001", "127.0.0.1:7002"]},
        "task": {"type": "worker", "index": 1},
    }
    assert second.env["PYTHONUNBUFFERED"] == "1"


def test_each_worker_gets_run_directory_and_attempt_and_its_own_log() -> None:
    plan = planned(attempt=3)[1]
    assert plan.env["REPLICAST_RUN_DIR"] == "/run"
    assert plan.env["REPLICAST_ATTEMPT"] == "3"
    assert plan.env["REPLICAST_LAUNCHED"] == "1"
    assert str(plan.log) == "/run/logs/attempt-3/worker-1.log"


def test_ranks_continue_from_one_host_to_the_next() -> None:
    job = replace(JOB, hosts=("h1", "h2", "h3"), node_rank=1, port=4000)
    plans = planned(job, ports=job.fixed_ports)
    assert [plan.env["RANK"] for plan in plans] == ["2", "3"]
    assert [plan.env["LOCAL_RANK"] for plan in plans] == ["0", "1"]
    assert {plan.env["WORLD_SIZE"] for plan in plans} == {"6"}
    assert json.loads(plans[1].env["TF_CONFIG"]) == {
        "cluster": {"worker": ["h1:4000", "h1:4001", "h2:4000", "h2:4001", "h3:4000", "h3:4001"]},
        "task": {"type": "worker", "index": 3},
    }


def test_an_existing_tf_config_is_not_changed() -> None:
    (plan,) = planned(replace(JOB, workers=1, given=GIVEN), environ={"LOCAL_RANK": "1"})
    assert "TF_CONFIG" not in plan.env
    assert "LOCAL_RANK" not in plan.env
    assert (plan.env["RANK"], plan.env["WORLD_SIZE"]) == ("2", "3")
    assert plan.log.name == "worker-2.log"


def test_a_task_of_tf_config_becomes_a_worker_for_each_of_its_devices() -> None:
    given = Cluster(("h1:4000", "h2:4000", "[::1]:5000"), rank=1, chiefs=1)
    job = spread_over_devices(replace(JOB, workers=1, given=given), 2)
    check_job(replace(job, given=None))
    assert job.fixed_ports == (4000, 4001)
    plans = planned(job, ports=job.fixed_ports, machine=Machine(8, ("4", "5")), environ={"LOCAL_RANK": "0"})
    assert [plan.env["RANK"] for plan in plans] == ["2", "3"]
    assert [plan.env["LOCAL_RANK"] for plan in plans] == ["0", "1"]
    assert [plan.env["CUDA_VISIBLE_DEVICES"] for plan in plans] == ["4", "5"]
    assert {plan.env["WORLD_SIZE"] for plan in plans} == {"6"}
    assert json.loads(plans[1].env["TF_CONFIG"]) == {
        "cluster": {"worker": ["h1:4000", "h1:4001", "h2:4000", "h2:4001", "[::1]:5000", "[::1]:5001"]},
        "task": {"type": "worker", "index": 3},
    }
    one = spread_over_devices(replace(JOB, workers=1, given=given), 1)
    assert "TF_CONFIG" not in planned(one)[0].env, "one worker for each task: as it is given"


@pytest.mark.parametrize(
    ("given", "count", "expected"),
    [
        (None, 2, "there is none"),
        (Cluster(("h1:4000", "h1:4001"), 0), 2, "Received: h1:4001 for two workers"),
        (Cluster(("h1:65535",), 0), 2, "ports above 65535"),
        (Cluster(("h1:4000",), 0), 0, "-n must be at least 1"),
    ],
)
def test_tasks_that_cannot_have_several_workers_are_refused(
    given: Cluster | None, count: int, expected: str
) -> None:
    with pytest.raises(ClusterError) as caught:
        spread_over_devices(replace(JOB, workers=1, given=given), count)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("job", "ports"),
    [
        (JOB, None),
        (replace(JOB, hosts=("h1", "h2"), port=4000), (4000, 4001)),
        (replace(JOB, workers=1, given=GIVEN), (3,)),
    ],
)
def test_which_ports_must_be_free(job: JobPlan, ports: tuple[int, ...] | None) -> None:
    assert job.fixed_ports == ports


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"http_proxy": ""}, None),
        ({"http_proxy": "p:1"}, "127.0.0.1"),
        ({"https_proxy": "p:1", "no_proxy": "x,y"}, "x,y,127.0.0.1"),
        ({"grpc_proxy": "p:1", "no_proxy": "x", "no_grpc_proxy": "z"}, "z,127.0.0.1"),
    ],
)
def test_workers_do_not_talk_to_each_other_through_a_proxy(
    environ: dict[str, str], expected: str | None
) -> None:
    assert planned(environ=environ)[0].env.get("no_grpc_proxy") == expected


@pytest.mark.parametrize(
    ("cores", "workers", "intra", "inter"),
    [(8, 2, "4", "4"), (2, 2, "1", "2"), (1, 4, "1", "2"), (7, 2, "3", "3"), (8, 1, None, None)],
)
def test_workers_share_the_cores_unless_the_user_says_otherwise(
    cores: int, workers: int, intra: str | None, inter: str | None
) -> None:
    settings = thread_settings(cores, workers, {})
    assert settings.get("TF_NUM_INTRAOP_THREADS") == settings.get("OMP_NUM_THREADS") == intra
    assert settings.get("TF_NUM_INTEROP_THREADS") == inter
    assert "OMP_NUM_THREADS" not in planned(environ={"OMP_NUM_THREADS": "3"})[0].env


def test_workers_have_large_memory_in_huge_pages_unless_the_user_says_otherwise() -> None:
    assert planned()[0].env["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    own = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
    assert planned(environ=own)[0].env["GLIBC_TUNABLES"] == own["GLIBC_TUNABLES"]


@pytest.mark.parametrize(
    ("setting", "nodes", "expected"),
    [
        (None, [], ()),
        ("0,1", [], ()),
        (None, ["nvidia1", "nvidia0", "nvidiactl", "nvidia-uvm", "nvidia10"], ("0", "1", "10")),
        ("2, 0", ["nvidia0", "nvidia1", "nvidia2"], ("2", "0")),
        ("", ["nvidia0", "nvidia1"], ()),
        ("-1", ["nvidia0", "nvidia1"], ()),
        ("1,-1,0", ["nvidia0", "nvidia1"], ("1",)),
        ("GPU-a,MIG-b", ["nvidia0"], ("GPU-a", "MIG-b")),
    ],
)
def test_which_gpus_may_be_used(setting: str | None, nodes: list[str], expected: tuple[str, ...]) -> None:
    assert visible_gpus(setting, nodes) == expected


@pytest.mark.parametrize(
    ("gpus", "workers", "expected"),
    [
        ((), 2, [None, None]),
        (("0",), 2, [None, None]),
        (("0", "1"), 2, ["0", "1"]),
        (("0", "1", "2", "3"), 2, ["0", "1"]),
        (("3", "1"), 1, ["3"]),
        (("0", "1"), 3, ["0", "1", "0"]),
    ],
)
def test_each_worker_gets_one_gpu(gpus: tuple[str, ...], workers: int, expected: list[str | None]) -> None:
    plans = planned(replace(JOB, workers=workers), ports=(1, 2, 3), machine=Machine(8, gpus))
    assert [plan.env.get("CUDA_VISIBLE_DEVICES") for plan in plans] == expected
    (given,) = planned(replace(JOB, workers=1, given=GIVEN), machine=Machine(8, gpus))
    assert "CUDA_VISIBLE_DEVICES" not in given.env


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (replace(JOB, workers=-3), "Received: -3"),
        (replace(JOB, given=GIVEN), "Leave out -n"),
        (replace(JOB, given=GIVEN), "--from-tf-config"),
        (replace(JOB, workers=1, hosts=("h1",), given=GIVEN), "unset TF_CONFIG"),
        (replace(JOB, hosts=("h1", "h2"), node_rank=2), "--node-rank must be from 0 to 1"),
        (replace(JOB, hosts=("h1", "h2"), node_rank=-1), "--node-rank must be from 0 to 1"),
        (replace(JOB, hosts=("h1", "h1")), "twice"),
        (replace(JOB, hosts=("h1", "")), "--hosts must be names"),
        (replace(JOB, hosts=("h1:5", "h2")), "--port"),
        (replace(JOB, hosts=("h1", "h2"), port=0), "--port"),
        (replace(JOB, hosts=("h1", "h2"), port=65535), "--port"),
    ],
)
def test_a_job_that_cannot_run_is_refused(job: JobPlan, expected: str) -> None:
    with pytest.raises(ClusterError) as caught:
        check_job(job)
    assert expected in str(caught.value)


def test_a_good_job_is_accepted() -> None:
    for job in (
        JOB,
        replace(JOB, workers=1, given=GIVEN),
        replace(JOB, hosts=("h1", "h2"), node_rank=1, port=65534),
    ):
        check_job(job)


@pytest.mark.parametrize(
    ("text", "node_rank", "expected"),
    [
        (None, 0, {0}),
        (None, 1, {2}),
        ("all", 1, {2, 3}),
        ("none", 0, set()),
        ("0,1", 0, {0, 1}),
        ("0, 3", 1, {3}),
    ],
)
def test_whose_output_is_shown(text: str | None, node_rank: int, expected: set[int]) -> None:
    assert parse_tee(text, replace(JOB, hosts=("h1", "h2"), node_rank=node_rank)) == expected


def test_a_worker_that_does_not_exist_cannot_be_shown() -> None:
    for text in ("", "2", "0,", "-1", "every", "²", "9" * 4301):
        with pytest.raises(ClusterError, match="--tee"):
            parse_tee(text, JOB)


def test_python_itself_is_refused_as_a_script_and_a_name_that_only_begins_like_it_is_not(
    tmp_path: Path,
) -> None:
    for name in ("python_train", "pythonic"):
        (tmp_path / name).touch()
        check_script(str(tmp_path / name))
    for name in ("python", "python3", "/usr/bin/python3.11"):
        with pytest.raises(LaunchRefused, match="is Python itself"):
            check_script(name)


def listening(port: int = 0) -> socket.socket:
    """Listens as TensorFlow's gRPC server does: on all interfaces, with SO_REUSEADDR."""
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind(("", port))
        server.listen()
    except BaseException:
        server.close()
        raise
    return server


def test_the_kernel_never_gives_out_a_held_port() -> None:
    with hold_ports([0] * 200) as first, hold_ports([0] * 200) as second:
        assert len({*first.numbers, *second.numbers}) == 400


def test_only_a_worker_can_listen_on_a_held_port() -> None:
    with hold_ports([0]) as ports, socket.socket() as stranger:
        (port,) = ports.numbers
        with listening(port) as server, socket.create_connection(("127.0.0.1", port), timeout=120):
            server.accept()[0].close()
        with pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))


def test_a_port_in_use_is_refused_with_a_remedy_and_what_was_held_is_free_again() -> None:
    with hold_ports([0]) as probe:
        (free,) = probe.numbers
    with listening() as server:
        port = server.getsockname()[1]
        with pytest.raises(ClusterError, match=f"Port {port} is in use.*choose another port"):
            hold_ports([free, port])
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", free))


def test_a_port_of_workers_that_are_just_ending_is_waited_for() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    ends = threading.Timer(0.3, server.close)
    ends.start()
    with hold_ports([port], within_secs=120.0) as held:
        assert held.numbers == (port,)
    ends.join()


def test_a_job_between_machines_warns_once_and_one_on_the_loopback_or_with_trusted_networks_does_not() -> (
    None
):
    between = JobPlan(argv=("true",), workers=2, hosts=("a", "b"), secret=b"secret")
    (line,) = warnings(between, {})
    assert "any process that can reach this machine can run code in the workers" in line
    assert "SECURITY.md" in line
    for networks in ("any", "10.0.0.0/8"):
        assert not list(warnings(between, {"REPLICAST_TRUSTED_NETWORKS": networks}))
    assert not list(warnings(JobPlan(argv=("true",), workers=2), {}))
