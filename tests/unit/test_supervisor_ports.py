import socket
import threading

import pytest

from replicast.errors import ClusterError
from replicast.launcher.ports import hold_free_ports, hold_ports


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
    with hold_free_ports(200) as first, hold_free_ports(200) as second:
        assert len({*first.numbers, *second.numbers}) == 400


def test_a_worker_can_listen_on_a_held_port() -> None:
    with (
        hold_free_ports(1) as ports,
        listening(ports.numbers[0]) as server,
        socket.create_connection(("127.0.0.1", ports.numbers[0]), timeout=120),
    ):
        accepted, _ = server.accept()
        accepted.close()


def test_another_process_without_reuse_cannot_bind_a_held_port() -> None:
    with hold_free_ports(1) as ports, socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(("127.0.0.1", ports.numbers[0]))


def test_a_port_in_use_is_refused_with_a_remedy() -> None:
    with listening() as server:
        port = server.getsockname()[1]
        with pytest.raises(ClusterError, match=f"Port {port} is in use.*choose another port"):
            hold_ports([port])


def test_a_refused_set_of_ports_leaves_none_held() -> None:
    with hold_free_ports(1) as probe:
        free = probe.numbers[0]
    with listening() as server, pytest.raises(ClusterError):
        hold_ports([free, server.getsockname()[1]])
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", free))


def test_a_released_port_is_free_again() -> None:
    with hold_free_ports(1) as ports:
        pass
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", ports.numbers[0]))


def test_a_port_of_workers_that_are_just_ending_is_waited_for() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    ends = threading.Timer(0.3, server.close)
    ends.start()
    with hold_ports([port], within_secs=120.0) as held:
        assert held.numbers == (port,)
    ends.join()
