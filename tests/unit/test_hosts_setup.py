"""Where the launchers of a job meet, from the options of `replicast run`."""

from __future__ import annotations

import pytest

from replicast.errors import ClusterError
from replicast.launcher.plan import (
    JobPlan,
    own_node,
    parse_endpoint,
    place_on_hosts,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("h1:5", ("h1", 5)), ("h1", ("h1", 29400)), ("[::1]:7", ("::1", 7)), ("[::1]", ("::1", 29400))],
)
def test_the_endpoint_is_that_of_torchrun(text: str, expected: tuple[str, int]) -> None:
    assert parse_endpoint(text) == expected


def test_an_endpoint_that_is_none_is_refused_with_what_works() -> None:
    for text in ("", ":5", "h1:", "h1:0", "h1:70000", "h1:x", "h1:" + "9" * 4301):
        with pytest.raises(ClusterError, match="--rdzv-endpoint"):
            parse_endpoint(text)


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
    assert place_on_hosts(JOB).nodes == 1
    assert place_on_hosts(JOB, hosts="h1").nodes == 1
    assert place_on_hosts(JOB, nnodes=1).nodes == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"nnodes": 2}, "--nnodes needs --rdzv-endpoint"),
        ({"nnodes": 2, "rdzv_endpoint": "h1"}, "--nnodes needs --node-rank"),
        ({"nnodes": 3, "hosts": "h1,h2"}, "does not fit --hosts, which lists 2"),
        ({"nnodes": 2, "rdzv_endpoint": "h1", "node_rank": 2}, "--node-rank must be from 0 to 1"),
        ({"nnodes": 2, "node_rank": 0, "rdzv_endpoint": "h1:29501"}, "use ports 29500 to 29501"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(ClusterError, match=said):
        place_on_hosts(JOB, **options)  # type: ignore[arg-type]
