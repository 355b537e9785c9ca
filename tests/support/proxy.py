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
    """Forwards one port to another; `arm` cuts every connection at its next COMMIT."""

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._cut: Cut | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self.port: int = self._listener.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def arm(self, cut: Cut) -> None:
        self._cut = cut

    def close(self) -> None:
        self._listener.close()
        for open_socket in self._sockets:
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
        while data := _receive(client):
            if self._cut is not None and b"COMMIT" in data:
                if self._cut is Cut.AFTER:
                    self._answered = threading.Event()
                    server.sendall(data)
                    self._answered.wait(10)
                elif self._cut is Cut.BEFORE:
                    _shut(server)
                _shut(client)
                return
            server.sendall(data)
        if self._cut is not Cut.UNNOTICED:
            _shut(server)

    def _to_client(self, server: socket.socket, client: socket.socket) -> None:
        while data := _receive(server):
            if self._cut is Cut.AFTER and b"COMMIT\x00" in data:
                self._answered.set()
                return
            try:
                client.sendall(data)
            except OSError:
                return
        _shut(client)


def _receive(source: socket.socket) -> bytes:
    try:
        return source.recv(65536)
    except OSError:
        return b""


def _shut(end: socket.socket) -> None:
    try:
        end.shutdown(socket.SHUT_RDWR)
    except OSError:
        end.close()
