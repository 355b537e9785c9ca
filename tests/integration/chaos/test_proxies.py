"""Chaos' proxies, on a real toxiproxy."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest

from tests.tools.chaos.processes.proxies import Proxies


@pytest.fixture
def proxies(tmp_path):
    made = Proxies(tmp_path / "toxiproxy.log")
    yield made
    made.close()


def test_toxic_is_removed_also_where_the_server_behind_hangs_for_a_while(proxies) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = proxies.add("slow", listener.getsockname()[1])
        with socket.create_connection(("127.0.0.1", port)) as client, contextlib.ExitStack() as toxic:
            toxic.enter_context(proxies.toxic("slow", "latency", {"latency": 1}))
            server, _ = listener.accept()
            with server:
                client.settimeout(0.5)
                with contextlib.suppress(TimeoutError):
                    while True:
                        client.sendall(bytes(65_536))
                removing = threading.Thread(target=toxic.close)
                removing.start()
                removing.join(3)
                assert removing.is_alive(), "the server that hangs did not hold the toxic"
                threading.Thread(target=_read_all, args=(server.dup(),)).start()
                removing.join(10)
                assert not removing.is_alive()
        with proxies.toxic("slow", "latency", {"latency": 1}):
            pass


def _read_all(server: socket.socket) -> None:
    with server:
        while server.recv(65_536):
            pass
