"""Where the launchers of a job meet, from the options of `replicast run`."""

from __future__ import annotations

import pytest

from replicast.errors import ClusterError, LaunchRefused
from replicast.launcher.plan import (
    JobPlan,
    own_node,
    parse_endpoint,
    parse_nnodes,
    place_on_hosts,
    read_secret,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("h1:5", ("h1", 5)), ("h1", ("h1", 29400)), ("[::1]:7", ("::1", 7)), ("[::1]", ("::1", 29400))],
)
def test_the_endpoint_is_that_of_torchrun(text: str, expected: tuple[str, int]) -> None:
    assert parse_endpoint(text) == expected


def test_an_endpoint_that_is_none_and_a_range_of_nodes_are_refused_with_what_works() -> None:
    for text in ("", ":5", "h1:", "h1:0", "h1:70000", "h1:x", "h1:" + "9" * 4301):
        with pytest.raises(ClusterError, match="--rdzv-endpoint"):
            parse_endpoint(text)
    with pytest.raises(ClusterError, match="start it again with the same --run-dir"):
        parse_nnodes("1:4")
    for text in ("0", "9" * 4301):
        with pytest.raises(ClusterError, match="--nnodes"):
            parse_nnodes(text)


def test_this_host_is_found_by_its_address() -> None:
    assert own_node(("198.51.100.1", "127.0.0.1")) == 1
    with pytest.raises(ClusterError, match="none of --hosts is"):
        own_node(("198.51.100.1", "198.51.100.2"))
    with pytest.raises(ClusterError, match="several of --hosts are"):
        own_node(("127.0.0.1", "127.0.0.2"))


JOB = JobPlan(argv=("python", "train.py"), workers=2)


def test_hosts_alone_say_where_the_launchers_meet() -> None:
    job = place_on_hosts(JOB, hosts="198.51.100.1,127.0.0.1")
    assert (job.nodes, job.node_rank, job.endpoint) == (2, 1, ("198.51.100.1", 29499))
    assert job.world_size == 4
    assert place_on_hosts(JOB).endpoint is None
    assert place_on_hosts(JOB, hosts="h1").endpoint is None
    assert place_on_hosts(JOB, nnodes="1").endpoint is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"nnodes": "2"}, "--nnodes needs --rdzv-endpoint"),
        ({"nnodes": "2", "rdzv_endpoint": "h1"}, "--nnodes needs --node-rank"),
        ({"nnodes": "3", "hosts": "h1,h2"}, "does not fit --hosts, which lists 2"),
        ({"nnodes": "2", "rdzv_endpoint": "h1", "node_rank": 2}, "--node-rank must be from 0 to 1"),
        ({"nnodes": "2", "node_rank": 0, "rdzv_endpoint": "h1:29501"}, "use ports 29500 to 29501"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(ClusterError, match=said):
        place_on_hosts(JOB, **options)  # type: ignore[arg-type]


def test_the_secret_comes_from_a_file_or_the_environment(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("secret")
    (directory / "one").write_text("from a file\n")
    (directory / "none").write_text("\n")
    environ = {"REPLICAST_JOB_SECRET": "from the environment"}
    assert read_secret(environ, directory / "one") == b"from a file"
    assert read_secret(environ, None) == b"from the environment"
    assert read_secret({}, None) == b""
    for name in ("none", "missing"):
        with pytest.raises(LaunchRefused, match="--secret-file"):
            read_secret(environ, directory / name)
