"""A TCP proxy before PostgreSQL that cuts a connection at its COMMIT: the client never learns the outcome."""

from __future__ import annotations

import contextlib
import socket
import threading
from enum import Enum


class Cut(Enum):
    """What happens to the COMMIT of a transaction that stored a checkpoint."""

    NEVER = "passed on"
    BEFORE = "not passed on: the transaction is rolled back"
    AFTER = "passed on, its answer is not: the transaction is committed"


class CommitCutter:
    """Forwards to one port; `armed` is used up by the first COMMIT that it meets."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.armed = Cut.NEVER
        self.cuts = 0
        self._sockets: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def uri(self, uri: str) -> str:
        """The same database through this proxy, without TLS: it must read what is said."""
        return uri.replace(f":{self._target}/", f":{self.port}/") + "?sslmode=disable"

    def close(self) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._target))
            self._sockets += [client, server]
            muted = threading.Event()
            threading.Thread(target=self._requests, args=(client, server, muted), daemon=True).start()
            threading.Thread(target=self._answers, args=(server, client, muted), daemon=True).start()

    def _requests(self, client: socket.socket, server: socket.socket, muted: threading.Event) -> None:
        storing = False
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                storing = storing or b"store_processor_checkpoint" in data
                if storing and b"COMMIT" in data and self.armed is not Cut.NEVER:
                    cut, self.armed = self.armed, Cut.NEVER
                    self.cuts += 1
                    muted.set()
                    if cut is Cut.AFTER:
                        server.sendall(data)
                        server.recv(1)  # the server has committed when it answers
                    break
                server.sendall(data)
        for each in (client, server):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _answers(self, server: socket.socket, client: socket.socket, muted: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                if muted.is_set():
                    return
                client.sendall(data)
