"""Small TCP proxies: one cuts a connection at a COMMIT or delays its answer, another plays a server that is gone."""

from __future__ import annotations

import socket
import threading
import time
from enum import Enum

from typing_extensions import override


class Cut(Enum):
    """Where the connection breaks."""

    BEFORE = "the COMMIT never reaches the server, which sees the connection end"
    AFTER = "the server commits, its answer is lost"
    UNNOTICED = "the COMMIT never reaches the server, which does not see the connection end"


class Proxy:
    """Forwards one port to another; what is done with a connection is the subclass's."""

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def uri(self, uri: str) -> str:
        """The same database through this proxy."""
        return uri.replace(f":{self._target[1]}/", f":{self.port}/")

    def close(self) -> None:
        _shut(self._listener)  # wakes the thread that accepts
        self._accepting.join()
        self._listener.close()
        for open_socket in self._sockets:
            _shut(open_socket)
        for thread in self._threads:
            thread.join(5)
        for open_socket in self._sockets:
            open_socket.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if not self._admits():
                client.close()
                continue
            server = socket.create_connection(self._target)
            self._sockets += [client, server]
            for serve in (self._to_server, self._to_client):
                ends = (client, server) if serve == self._to_server else (server, client)
                self._threads.append(threading.Thread(target=serve, args=ends, daemon=True))
                self._threads[-1].start()

    def _admits(self) -> bool:
        return True

    def _to_server(self, client: socket.socket, server: socket.socket) -> None:
        raise NotImplementedError

    def _to_client(self, server: socket.socket, client: socket.socket) -> None:
        raise NotImplementedError


class Relay(Proxy):
    """Can cut what is open and refuse what comes, or take it and say nothing."""

    def __init__(self, port: int) -> None:
        self._flowing = threading.Event()
        self._flowing.set()
        self._refusing = False
        super().__init__(port)

    def cut(self) -> None:
        """The server is gone: connections break, new ones are refused."""
        self._refusing = True
        for each in self._sockets:
            _shut(each)

    def hang(self) -> None:
        """The network is gone: nothing comes through and nothing breaks."""
        self._flowing.clear()

    def heal(self) -> None:
        self._refusing = False
        self._flowing.set()

    @override
    def close(self) -> None:
        self._flowing.set()
        super().close()

    @override
    def _admits(self) -> bool:
        return not self._refusing

    @override
    def _to_server(self, client: socket.socket, server: socket.socket) -> None:
        self._pump(client, server)

    @override
    def _to_client(self, server: socket.socket, client: socket.socket) -> None:
        self._pump(server, client)

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        while data := _receive(source):
            self._flowing.wait()
            if not _send(sink, data):
                break
        _shut(source)
        _shut(sink)


class CommitCutter(Proxy):
    """`arm` cuts every connection at its next COMMIT, or at the statement `said`; or once one that said `after`."""

    def __init__(self, port: int) -> None:
        self._cut: Cut | None = None
        self._after = b""
        self._once = False
        self._said, self._answer = b"COMMIT", b"COMMIT\x00"
        self._waiting: socket.socket | None = None
        self.cuts = 0
        super().__init__(port)

    def arm(
        self,
        cut: Cut,
        *,
        after: bytes = b"",
        once: bool = False,
        said: bytes = b"COMMIT",
        answer: bytes = b"COMMIT\x00",
    ) -> None:
        self._said, self._answer = said, answer
        self._cut, self._after, self._once = cut, after, once

    @override
    def uri(self, uri: str) -> str:
        """Without TLS: this proxy must read what is said."""
        return super().uri(uri) + "?sslmode=disable"

    @override
    def _to_server(self, client: socket.socket, server: socket.socket) -> None:
        said_it = False
        while data := _receive(client):
            cut = self._cut
            said_it = said_it or (cut is not None and self._after in data)
            if cut is not None and said_it and self._said in data:
                self.cuts += 1
                self._cut = None if self._once else cut
                if cut is Cut.AFTER:
                    self._answered, self._waiting = threading.Event(), server
                    _send(server, data)
                    self._answered.wait(10)
                elif cut is Cut.BEFORE:
                    _shut(server)
                _shut(client)
                return
            if not _send(server, data):
                break
        if self._cut is not Cut.UNNOTICED:
            _shut(server)

    @override
    def _to_client(self, server: socket.socket, client: socket.socket) -> None:
        while data := _receive(server):
            if self._waiting is server and self._answer in data:
                self._answered.set()
                return
            if not _send(client, data):
                return
        _shut(client)


class LateCommit(CommitCutter):
    """Cuts nothing: the answer to the COMMIT of one transaction, in which `said` was said, comes `seconds` late."""

    def __init__(self, port: int, said: bytes, seconds: float) -> None:
        self._seconds = seconds
        self.delayed = threading.Event()
        super().__init__(port)
        self._said = said

    @override
    def _to_server(self, client: socket.socket, server: socket.socket) -> None:
        while data := _receive(client):
            if self._said in data:
                self._waiting = server
            if not _send(server, data):
                break
        _shut(server)

    @override
    def _to_client(self, server: socket.socket, client: socket.socket) -> None:
        while data := _receive(server):
            if self._waiting is server and self._answer in data and not self.delayed.is_set():
                self.delayed.set()
                time.sleep(self._seconds)
            if not _send(client, data):
                return
        _shut(client)


def _receive(source: socket.socket) -> bytes:
    try:
        return source.recv(65536)
    except OSError:
        return b""


def _send(end: socket.socket, data: bytes) -> bool:
    """False: the other side, or the test, closed it."""
    try:
        end.sendall(data)
    except OSError:
        return False
    return True


def _shut(end: socket.socket) -> None:
    try:
        end.shutdown(socket.SHUT_RDWR)
    except OSError:
        end.close()
