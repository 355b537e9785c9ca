"""A real HTTPS server that receives what target `http` posts, answers as it is told, and remembers when."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from typing_extensions import override

from tests.support.servers.certificates import make_certificates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@dataclass(frozen=True)
class Answer:
    """What the receiver says to one request."""

    status: int = 202
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    delay: float = 0.0


@dataclass
class Request:
    """One request, with the monotonic times between which it was in hand; `connection` numbers the TCP connection."""

    path: str
    headers: dict[str, str]
    body: bytes
    began: float
    connection: int
    ended: float = 0.0
    status: int = 0

    @property
    def id(self) -> str:
        return unquote(self.headers["idempotency-key"])

    @property
    def key(self) -> str | None:
        if "ce-specversion" in self.headers:
            return self.headers.get("ce-partitionkey")
        key = json.loads(self.body).get("partitionkey")
        return None if key is None else str(key)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    receiver: Receiver

    @override
    def get_request(self) -> tuple[Any, Any]:
        # The handshake belongs to the connection's thread, or one slow client stops all.
        connection, address = super().get_request()
        self.receiver.connections.append(connection)
        return connection, address

    @override
    def finish_request(self, request: Any, client_address: Any) -> None:
        with contextlib.suppress(OSError):
            if (context := self.receiver.context) is not None:
                request = context.wrap_socket(request, server_side=True)
            with contextlib.closing(request):
                super().finish_request(request, client_address)

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no error of the test."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    @override
    def setup(self) -> None:
        super().setup()
        self.number = self.server.receiver.number()

    def do_POST(self) -> None:
        receiver = self.server.receiver
        length = int(self.headers.get("Content-Length", "0"))
        body = self.rfile.read(length)
        if len(body) < length:
            return  # who sent it was killed
        told = {name.lower(): value for name, value in self.headers.items()}
        request = Request(self.path, told, body, time.monotonic(), self.number)
        with receiver.lock:
            receiver.requests.append(request)
        answer = receiver.answer(request)
        time.sleep(answer.delay)
        request.ended, request.status = time.monotonic(), answer.status
        self.send_response(answer.status)
        for name, value in {"Content-Length": str(len(answer.body)), **answer.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer.body)

    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


class Receiver:
    """The server; `answer` may be set to what it shall say."""

    def __init__(self, directory: Path, *, tls: bool = True, port: int = 0) -> None:
        self.context: ssl.SSLContext | None = None
        if tls:
            if not (directory / "ca.crt").exists():
                make_certificates(directory)
            self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self.context.load_cert_chain(directory / "server.crt", directory / "server.key")
        self.authority = directory / "ca.crt"
        self.requests: list[Request] = []
        self.connections: list[Any] = []
        self.lock = threading.Lock()
        self.answer: Callable[[Request], Answer] = lambda _: Answer()
        self._number = 0
        self._server = _Server(("127.0.0.1", port), _Handler)
        self._server.receiver = self
        self.port = self._server.server_address[1]
        self.url = f"{'https' if tls else 'http'}://localhost:{self.port}/events?from=tests"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def number(self) -> int:
        with self.lock:
            self._number += 1
            return self._number

    def files(self, directory: Path, **keys: str) -> Path:
        """Write the target's Secret: the authority, and what is given."""
        directory.mkdir(parents=True, exist_ok=True)
        if self.context is not None:
            (directory / "ca.crt").write_text(self.authority.read_text())
        for name, value in keys.items():
            (directory / name).write_text(value)
        return directory

    def ids(self, status: int = 202) -> list[str]:
        with self.lock:
            return [each.id for each in self.requests if each.status == status]

    def of_key(self) -> dict[str | None, list[Request]]:
        found: dict[str | None, list[Request]] = {}
        with self.lock:
            for each in self.requests:
                found.setdefault(each.key, []).append(each)
        return found

    def most_at_once(self) -> int:
        """Most requests that were in hand at one moment."""
        with self.lock:
            times = [(each.began, 1) for each in self.requests] + [(each.ended, -1) for each in self.requests]
        most = now = 0
        for _, change in sorted(times):
            now += change
            most = max(most, now)
        return most

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        for each in self.connections:
            with contextlib.suppress(OSError):
                each.close()


@contextlib.contextmanager
def receiving(directory: Path, *, tls: bool = True, port: int = 0) -> Iterator[Receiver]:
    receiver = Receiver(directory, tls=tls, port=port)
    try:
        yield receiver
    finally:
        receiver.close()


@contextlib.contextmanager
def answering(handle: Callable[[socket.socket], None]) -> Iterator[str]:
    """Let a function answer on the socket of each connection; yield the URL."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    # Else what is said right before closing may never be sent.
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    threading.Thread(target=answer, args=(connection,), daemon=True).start()

        def answer(connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                handle(connection)

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://localhost:{server.getsockname()[1]}/"


def read_head(connection: socket.socket) -> bytes:
    """Read a request up to its body, and return it."""
    head = b""
    while b"\r\n\r\n" not in head:
        more = connection.recv(512)
        if not more:
            raise ConnectionResetError
        head += more
    return head
