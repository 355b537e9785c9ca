"""A small TCP proxy that cuts a connection at a COMMIT, before or after the server has heard of it."""

from __future__ import annotations

import socket
import threading
from enum import Enum


class Cut(Enum):
    """Where the connection breaks."""

    BEFORE = "the COMMIT never reaches the server, which sees the connection end"
    AFTER = "the server commits, its answer is lost"
    UNNOTICED = "the COMMIT never reaches the server, which does not see the connection end"


class CommitCutter:
    """Forwards one port to another; `arm` cuts every connection at its next COMMIT, or once one that said `after`."""

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._cut: Cut | None = None
        self._after = b""
        self._once = False
        self._waiting: socket.socket | None = None
        self.cuts = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self.port: int = self._listener.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def arm(self, cut: Cut, *, after: bytes = b"", once: bool = False) -> None:
        self._cut, self._after, self._once = cut, after, once

    def uri(self, uri: str) -> str:
        """The same database through this proxy, without TLS: it must read what is said."""
        return uri.replace(f":{self._target[1]}/", f":{self.port}/") + "?sslmode=disable"

    def close(self) -> None:
        _shut(self._listener)  # wakes the thread that accepts
        self._accepting.join()
        self._listener.close()
        for open_socket in self._sockets:
            _shut(open_socket)
            open_socket.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._target)
            self._sockets += [client, server]
            threading.Thread(target=self._to_server, args=(client, server), daemon=True).start()
            threading.Thread(target=self._to_client, args=(server, client), daemon=True).start()

    def _to_server(self, client: socket.socket, server: socket.socket) -> None:
        said_it = False
        while data := _receive(client):
            cut = self._cut
            said_it = said_it or (cut is not None and self._after in data)
            if cut is not None and said_it and b"COMMIT" in data:
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

    def _to_client(self, server: socket.socket, client: socket.socket) -> None:
        while data := _receive(server):
            if self._waiting is server and b"COMMIT\x00" in data:
                self._answered.set()
                return
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
