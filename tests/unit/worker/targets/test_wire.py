"""What is written to a broker's socket: frames, one after the other, each of them whole."""

from __future__ import annotations

import socket
import ssl
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from outbox_core.errors import TransientError
from outbox_worker.targets.amqp.broker import BrokerAddress
from outbox_worker.targets.amqp.wire import Wire
from tests.support.servers.certificates import make_certificates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

BEAT = b"<beat>"
FRAME = b"<a frame of a message>"
ADDRESS = BrokerAddress("h", 5672, "u", "p", "/", tls=False)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Callable[[socket.socket, bytes], Wire]:
    def connect(ours: socket.socket, beat: bytes) -> Wire:
        ours.setblocking(False)
        monkeypatch.setattr("outbox_worker.targets.amqp.wire.open_socket", lambda *_: ours)
        return Wire(ADDRESS, beat=beat, take=len)

    return connect


def exchange(wire: Wire, data: bytes) -> None:
    wire.exchange(data, time.monotonic() + 5, lambda: True)


def send_beat_and_frame(wire: Wire) -> None:
    """As after a time in which there was nothing to send."""
    wire._last_sent -= wire.heartbeat
    exchange(wire, b"")
    exchange(wire, FRAME)


def receive(theirs: socket.socket, size: int) -> bytes:
    """Receive so many bytes, later than they are sent."""
    time.sleep(0.3)
    theirs.settimeout(5)
    received = bytearray()
    while len(received) < size:
        received += theirs.recv(size - len(received))
    return bytes(received)


def fill(ours: socket.socket) -> int:
    """Send until there is no room; return how much that was."""
    ours.setblocking(False)
    sent = 0
    with suppress(BlockingIOError):
        while True:
            sent += ours.send(bytes(65536))
    return sent


def wrap(ours: socket.socket, theirs: socket.socket, directory: Path) -> tuple[ssl.SSLSocket, ssl.SSLSocket]:
    make_certificates(directory)
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context(cafile=directory / "ca.crt")
    server.load_cert_chain(directory / "server.crt", directory / "server.key")
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(server.wrap_socket, theirs, server_side=True)
        return client.wrap_socket(ours, server_hostname="localhost"), accepted.result()


def test_the_next_frame_waits_for_the_rest_of_a_heartbeat(pair, connect):
    ours, theirs = pair
    beat = b"<" + 10_000_000 * b"b" + b">"  # there is no room for all of it
    wire = connect(ours, beat)
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(receive, theirs, len(beat + FRAME))
        send_beat_and_frame(wire)
        assert received.result() == beat + FRAME


def test_the_next_frame_waits_for_a_heartbeat_that_tls_keeps(pair, connect, tmp_path):
    """What there was no room for TLS sends with the next frame, and counts as the first bytes of that."""
    with pair[0].dup() as under_ours, pair[1].dup() as under_theirs:
        ours, theirs = wrap(pair[0], pair[1], tmp_path)
        with ours, theirs, ThreadPoolExecutor(1) as pool:
            wire, size = connect(ours, BEAT), fill(under_ours)
            received = pool.submit(lambda: (receive(under_theirs, size), receive(theirs, len(BEAT + FRAME)))[1])
            send_beat_and_frame(wire)
            assert received.result() == BEAT + FRAME


@pytest.mark.parametrize(("size", "farewell"), [(100, b"bye"), (10_000_000, b"")], ids=["whole", "cut off"])
def test_no_farewell_becomes_the_end_of_a_frame_that_is_cut_off(pair, connect, size, farewell):
    """The broker would take it for the rest of a payload."""
    ours, theirs = pair
    wire = connect(ours, b"")
    theirs.setblocking(False)
    with suppress(TransientError):  # there is no room for all of the frame
        wire.exchange(b"x" * size, time.monotonic() + 0.3, lambda: True)
    with suppress(BlockingIOError):
        while theirs.recv(1 << 20):
            pass
    wire.close(b"bye")
    assert theirs.recv(10) == farewell
