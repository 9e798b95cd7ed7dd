"""The filter that limits who may connect to TensorFlow's port, on real sockets of the kernel."""

from __future__ import annotations

import ipaddress
import socket
import threading

import pytest

from replicast.config import LOOPBACK, Cluster, Network, trusted_networks
from replicast.connections import look_up
from replicast.errors import ClusterError
from replicast.port_filter import limit_port, port_limit


def listening() -> socket.socket:
    """A socket as TensorFlow opens it: on every address, IPv4 and IPv6."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def answers(port: int, source: str) -> bool:
    """Whether a connection from a loopback address is accepted. A dropped packet means silence."""
    target = "::1" if ":" in source else "127.0.0.1"
    try:
        socket.create_connection((target, port), timeout=0.3, source_address=(source, 0)).close()
    except TimeoutError:
        return False
    return True


def networks(*texts: str) -> list[Network]:
    return [ipaddress.ip_network(text) for text in texts]


def test_only_the_trusted_networks_reach_a_port_that_is_open_on_all_addresses() -> None:
    with listening() as server:
        port = server.getsockname()[1]
        assert answers(port, "127.0.0.1")
        assert answers(port, "127.9.0.1")
        limit_port(port, networks("127.0.0.0/30", "10.0.0.0/8", "fd00::/8"))
        assert answers(port, "127.0.0.2")
        assert not answers(port, "127.9.0.1")
        if server.family == socket.AF_INET6:
            assert not answers(port, "::1")
            limit_port(port, networks("fd00::/8", "::1/128"))
            assert answers(port, "::1")
            assert not answers(port, "127.0.0.1")
        limit_port(port, networks("0.0.0.0/0"))
        assert answers(port, "127.9.0.1")


def test_a_port_without_a_socket_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with listening() as server:
        port = server.getsockname()[1]
    limit_port(port, LOOPBACK)
    assert f"port {port} accepts connections from every network" in caplog.text


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [(("127.0.0.1", "localhost", "[::1]"), LOOPBACK), (("127.0.0.1", "gpu2"), None), (("10.0.0.1",), None)],
)
def test_a_job_on_the_loopback_trusts_only_that_and_one_between_machines_any(
    hosts: tuple[str, ...], expected: object
) -> None:
    assert trusted_networks({}, [f"{host}:2222" for host in hosts]) == expected


def test_the_variable_names_networks_or_any_and_the_loopback_is_always_trusted() -> None:
    read = {"REPLICAST_TRUSTED_NETWORKS": "10.1.0.0/16, fd00::/8"}
    assert trusted_networks(read, ["gpu1:1"]) == (*LOOPBACK, *networks("10.1.0.0/16", "fd00::/8"))
    assert trusted_networks({"REPLICAST_TRUSTED_NETWORKS": "any"}, ["127.0.0.1:1"]) is None


def test_a_network_that_is_none_is_refused_before_anything_starts() -> None:
    cluster = Cluster(("gpu1:2222", "gpu2:2222"), 0)
    with pytest.raises(ClusterError, match=r"REPLICAST_TRUSTED_NETWORKS must be networks.*10\.1\.0\.0/16"):
        port_limit(cluster, {"REPLICAST_TRUSTED_NETWORKS": "gpu1"})


def test_a_worker_outside_the_trusted_networks_is_named(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster(("10.1.0.1:2222", "10.1.0.2:2222", "10.2.0.3:2222"), 0)
    port_limit(cluster, {"REPLICAST_TRUSTED_NETWORKS": "10.1.0.0/16"})
    assert [record.message.partition(":")[0] for record in caplog.records] == ["worker 2 (10.2.0.3"]
    caplog.clear()
    port_limit(cluster, {"REPLICAST_TRUSTED_NETWORKS": "10.0.0.0/8"})
    port_limit(cluster, {})
    assert not caplog.records


def test_a_lookup_for_which_no_thread_can_be_started_has_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fails)
    with pytest.raises(OSError, match="no thread could be started to look up its name"):
        look_up("gpu1").result()
