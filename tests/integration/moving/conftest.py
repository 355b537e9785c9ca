"""Two databases: messages in one, a projection with its checkpoint in the other."""

from __future__ import annotations

import contextlib
import socket
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.postgres import wait_until
from tests.support.worker import Outbox, Workers, build_config

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.postgres import Database, Servers
    from tests.support.worker import Worker

STATEMENT = (
    "INSERT INTO seen (message_id, total, pair) SELECT message_id, (data->>'total')::int, "
    "transaction_id || ':' || position FROM batch ORDER BY transaction_id, position"
)


@dataclass
class Apart:
    """A source's database and a target's, as a worker is given them."""

    outbox: Outbox
    target: Database
    workers: Workers

    def __post_init__(self) -> None:
        self.connection = self.target.direct()
        self.connection.execute("CREATE TABLE seen (n serial PRIMARY KEY, message_id text, total int, pair text)")

    def config(self, statement: str = STATEMENT, **fields: Any) -> dict[str, Any]:
        target = fields.pop("target", None) or {"sql": {"statement": statement}}
        for chosen in target.values():
            chosen.setdefault("connection", {"secretRef": {"name": "reporting"}})
        return build_config(self.outbox.database, target, **fields)

    def prepare(self, *, handler: str | None = None, source_uri: str = "", target_uri: str = "", **fields: Any) -> Path:
        return self.workers.prepare(
            self.config(**fields),
            source_uri or self.outbox.database.uri(),
            target=target_uri or self.target.uri(),
            handler=handler,
        )

    def start(self, *arguments: str, pod: str | None = None, **fields: Any) -> Worker:
        return self.workers.launch(self.prepare(**fields), *arguments, pod=pod)

    def seen(self) -> list[str]:
        return [row[0] for row in self.connection.execute("SELECT message_id FROM seen ORDER BY n").fetchall()]

    def wait_seen(self, expected: list[str], seconds: float = 60.0) -> None:
        """Wait for exactly these, once each and in order."""
        wait_until(lambda: len(self.seen()) >= len(expected), f"{len(expected)} messages projected", seconds)
        assert self.seen() == expected

    def stored(self, processor_id: str = "orders") -> str | None:
        row = self.connection.execute(
            "SELECT last_processed_transaction_id::text || ':' || last_processed_position "
            "FROM outbox.processor_checkpoints WHERE processor_id = %s",
            (processor_id,),
        ).fetchone()
        return None if row is None else str(row[0])


class Relay:
    """Forwards a port; can cut what is open and refuse what comes, or take it and say nothing."""

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._open: list[socket.socket] = []
        self._pumps: list[threading.Thread] = []
        self._flowing = threading.Event()
        self._flowing.set()
        self._refusing = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def uri(self, uri: str) -> str:
        return uri.replace(f":{self._target[1]}/", f":{self.port}/")

    def cut(self) -> None:
        """The server is gone: connections break, new ones are refused."""
        self._refusing = True
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def hang(self) -> None:
        """The network is gone: nothing comes through and nothing breaks."""
        self._flowing.clear()

    def heal(self) -> None:
        self._refusing = False
        self._flowing.set()

    def close(self) -> None:
        self.cut()
        self._flowing.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for pump in self._pumps:
            pump.join(5)
        for each in self._open:
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._refusing:
                client.close()
                continue
            server = socket.create_connection(self._target)
            self._open += [client, server]
            for source, sink in ((client, server), (server, client)):
                self._pumps.append(threading.Thread(target=self._pump, args=(source, sink), daemon=True))
                self._pumps[-1].start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._flowing.wait()
                sink.sendall(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def outbox(database: Database) -> Outbox:
    """An outbox with a table `handled` for effects."""
    return Outbox(database)


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    """Starts worker processes and ends what is left of them."""
    running = Workers(tmp_path)
    yield running
    running.stop()


@pytest.fixture
def apart(outbox: Outbox, servers: Servers, workers: Workers) -> Iterator[Apart]:
    """Another database, of which nothing is ours yet."""
    with servers.database(template="empty_template") as target:
        yield Apart(outbox, target, workers)
