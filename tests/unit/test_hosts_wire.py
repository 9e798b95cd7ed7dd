"""Lines between launchers: who does not know the secret is not heard, and no line counts twice."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from replicast.errors import ClusterError, LaunchRefused
from replicast.launcher.hosts.messages import Failure, Order, Phase, Report, from_json, to_json
from replicast.launcher.hosts.placing import place_on_hosts
from replicast.launcher.hosts.setup import own_node, parse_endpoint, parse_nnodes, read_secret
from replicast.launcher.hosts.wire import MAX_LINE, NotAuthentic, Wire
from replicast.launcher.plan import Job

ONE, OTHER = "1" * 64, "2" * 64


def pair(secret: bytes = b"s", theirs: bytes = b"s") -> tuple[Wire, Wire]:
    first, other = Wire(secret, ONE, is_first=True), Wire(theirs, OTHER, is_first=False)
    assert first.feed(other.opening()) == other.feed(first.opening()) == []
    return first, other


@pytest.mark.parametrize("secret", [b"s", b""])
def test_what_one_packs_the_other_unpacks(secret: bytes) -> None:
    first, other = pair(secret, secret)
    assert other.feed(first.pack({"a": 1}) + first.pack({"b": 2})) == [{"a": 1}, {"b": 2}]
    line = other.pack({"c": [3]})
    assert first.feed(line[:10]) == []
    assert first.feed(line[10:]) == [{"c": [3]}]


def test_another_secret_is_not_accepted() -> None:
    first, other = pair(b"s", b"t")
    with pytest.raises(NotAuthentic, match="another secret"):
        first.feed(other.pack({"a": 1}))


def test_a_host_without_a_secret_is_told_so() -> None:
    first, other = Wire(b"s", ONE, is_first=True), Wire(b"", OTHER, is_first=False)
    with pytest.raises(NotAuthentic, match="this host has a secret of the job, the other has none"):
        first.feed(other.opening())
    with pytest.raises(NotAuthentic, match="the other host has a secret of the job, this one has none"):
        other.feed(first.opening())


def test_a_line_counts_once_on_its_connection_and_in_its_direction_only() -> None:
    first, other = pair()
    line = other.pack({"a": 1})
    assert first.feed(line) == [{"a": 1}]
    with pytest.raises(NotAuthentic):
        first.feed(line)
    with pytest.raises(NotAuthentic):
        pair()[1].feed(line)
    later = Wire(b"s", "3" * 64, is_first=True)
    later.feed(Wire(b"s", OTHER, is_first=False).opening())
    with pytest.raises(NotAuthentic):
        later.feed(line)


def test_a_changed_line_is_not_accepted() -> None:
    first, other = pair()
    with pytest.raises(NotAuthentic):
        first.feed(other.pack({"code": 0}).replace(b"0}", b"1}"))


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n",
        b"x" * 5000,
        b"[1]\n",
        b'{"replicast": "launchers 2"}\n',
        b"\n",
        b"[" * 900 + b"\n",
        Wire(b"s", ONE, is_first=True).opening(),
    ],
)
def test_something_else_is_not_a_launcher(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"is not a launcher|without an end|repeats"):
        Wire(b"s", ONE, is_first=True).feed(data)


def test_a_line_without_an_end_takes_bounded_memory() -> None:
    first, _ = pair()
    assert first.feed(b"x" * MAX_LINE) == []
    with pytest.raises(ValueError, match="without an end"):
        first.feed(b"x")


@pytest.mark.parametrize(
    "message",
    [
        Report(next_attempt=3, failure=Failure(host=1, worker=2, code=-9, lines=("a", "ü"))),
        Order(
            session="s", phase=Phase.END, attempt=1, restarts=1, max_restarts=2, hosts=("a", "b"), signal=15
        ),
    ],
)
def test_messages_survive_their_json(message: Report | Order) -> None:
    assert from_json(to_json(message), 2) == message


@pytest.mark.parametrize(
    "fields", [{}, {"report": {}}, {"report": {"next_attempt": "1"}}, {"order": []}, {"x": 1}]
)
def test_other_fields_are_no_message(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"message|report"):
        from_json(fields, 2)


REPORT = Report(next_attempt=0)
ORDER = Order(session="s", phase=Phase.END, attempt=1, restarts=1, max_restarts=2, hosts=("a", "b"))
FAILURE = Failure(host=1, worker=2, code=-9)


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (replace(REPORT, signal=9999), "the signal 9999"),
        (replace(ORDER, signal=-1), "the signal -1"),
        (replace(REPORT, next_attempt=-1), "the attempts"),
        (replace(REPORT, attempt=2**40), "the attempts"),
        (replace(REPORT, restarts=-1), "-1 restarts"),
        (replace(REPORT, failure=replace(FAILURE, host=2)), "a failure on the hosts"),
        (replace(REPORT, failure=replace(FAILURE, worker=-2)), "worker -2"),
        (replace(ORDER, failure=replace(FAILURE, code=-1000)), "the code -1000"),
        (replace(ORDER, failure=replace(FAILURE, reported_by=-1)), "a failure on the hosts"),
        (replace(ORDER, failure=replace(FAILURE, ran_secs=-1.0)), "after -1.0 s"),
        (replace(ORDER, code=256), "the exit code 256"),
        (replace(ORDER, stopped_on=2), "the hosts [2] of 2"),
        (replace(ORDER, missing=(0, 7)), "the hosts [0, 7] of 2"),
        (replace(ORDER, hosts=("a",)), "1 hosts"),
    ],
)
def test_values_that_fit_their_type_and_cannot_be_are_no_message(message: Report | Order, named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        from_json(to_json(message), 2)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("h1:5", ("h1", 5)), ("h1", ("h1", 29400)), ("[::1]:7", ("::1", 7)), ("[::1]", ("::1", 29400))],
)
def test_the_endpoint_is_that_of_torchrun(text: str, expected: tuple[str, int]) -> None:
    assert parse_endpoint(text) == expected


@pytest.mark.parametrize("text", ["", ":5", "h1:", "h1:0", "h1:70000", "h1:x"])
def test_an_endpoint_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ClusterError, match="--rdzv-endpoint"):
        parse_endpoint(text)


def test_a_range_of_nodes_is_refused_with_what_works() -> None:
    with pytest.raises(ClusterError, match="start it again with the same --run-dir"):
        parse_nnodes("1:4")
    with pytest.raises(ClusterError, match="--nnodes"):
        parse_nnodes("0")


def test_this_host_is_found_by_its_address() -> None:
    assert own_node(("198.51.100.1", "127.0.0.1")) == 1
    with pytest.raises(ClusterError, match="none of --hosts is"):
        own_node(("198.51.100.1", "198.51.100.2"))
    with pytest.raises(ClusterError, match="several of --hosts are"):
        own_node(("127.0.0.1", "127.0.0.2"))


JOB = Job(argv=("python", "train.py"), workers=2)


def test_hosts_alone_say_where_the_launchers_meet() -> None:
    job = place_on_hosts(JOB, hosts="198.51.100.1,127.0.0.1")
    assert (job.nodes, job.node_rank, job.endpoint) == (2, 1, ("198.51.100.1", 29499))
    assert job.world_size == 4
    assert place_on_hosts(JOB).endpoint is None
    assert place_on_hosts(JOB, hosts="h1").endpoint is None
    assert place_on_hosts(JOB, nnodes="1").endpoint is None


@pytest.mark.parametrize(
    ("options", "same"),
    [
        ({"master_addr": "h1", "master_port": 7}, "h1:7"),
        ({"master_addr": "h1"}, "h1"),
        ({"master_addr": "fd00::1", "master_port": 7}, "[fd00::1]:7"),
    ],
)
def test_master_addr_and_port_are_the_rendezvous_endpoint(options: dict[str, object], same: str) -> None:
    placed = place_on_hosts(JOB, nnodes="2", node_rank=1, **options)  # type: ignore[arg-type]
    assert placed == place_on_hosts(JOB, nnodes="2", node_rank=1, rdzv_endpoint=same)
    assert place_on_hosts(JOB, master_port=7) == JOB, "as torchrun's users give it on one machine"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"nnodes": "2"}, "--nnodes needs --rdzv-endpoint"),
        ({"nnodes": "2", "rdzv_endpoint": "h1"}, "--nnodes needs --node-rank"),
        ({"nnodes": "3", "hosts": "h1,h2"}, "does not fit --hosts, which lists 2"),
        ({"nnodes": "2", "rdzv_endpoint": "h1", "node_rank": 2}, "--node-rank must be from 0 to 1"),
        ({"nnodes": "2", "master_port": 7}, "--master-port needs --master-addr"),
        ({"nnodes": "2", "master_addr": "h1", "rdzv_endpoint": "h1"}, "say the same"),
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
