"""The servers of a benchmark: durable, and otherwise started as the tests start theirs."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.support.servers.kafka import KafkaServer
from tests.support.servers.postgres import Servers
from tests.support.servers.rabbitmq import RabbitmqServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.servers.postgres import Database

POSTGRES = "18"
SETTINGS = {
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "autovacuum": "on",
    "shared_buffers": "1GB",
    "max_wal_size": "8GB",
    "wal_level": "logical",
    "wal_sender_timeout": "0",  # a paused peer answers nothing
}
EMULATOR = "+sbwt none"
"""Erlang does not spin while it waits: spinning would count as CPU time of a message."""
KAFKA_JAVA = ("-Xms1g", "-Xmx1g")
"""As the broker's own script starts it, and not as tests do, which want it small and soon there."""
HEARTBEAT = 60
"""Seconds within which our worker promises RabbitMQ a sign of life; the node itself asks for none."""


@dataclass(frozen=True)
class Place:
    """Where one case runs: servers, a database of its own, a folder for its files."""

    servers: Servers
    broker: RabbitmqServer
    database: Database
    folder: Path
    databases: ExitStack
    """Others that candidates made for themselves; they end with the case."""
    kafka: KafkaServer | None = None
    """For cases that name it among their servers."""
    version: str = POSTGRES

    def server_pids(self) -> dict[str, int]:
        """Return the processes whose CPU time is counted beside the candidates'."""
        pids = {"PostgreSQL": self.database.server.pid, "RabbitMQ": self.broker.pid}
        return pids if self.kafka is None else pids | {"Kafka": self.kafka.pid}


class BenchServers:
    """The servers, from the first case that needs them to the last."""

    def __init__(self) -> None:
        self._closing = ExitStack()
        self._kafka: KafkaServer | None = None
        self.postgres = Servers(SETTINGS)
        self._closing.callback(self.postgres.stop)
        try:
            self.postgres.get(POSTGRES)
            self.rabbitmq = RabbitmqServer(emulator=EMULATOR, settings=("heartbeat = 0",))
            self._closing.callback(self.rabbitmq.close)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        self._closing.close()

    @contextmanager
    def place(self, folder: Path, *, with_kafka: bool = False) -> Iterator[Place]:
        """A fresh database with the product's schema."""
        kafka = self._start_kafka() if with_kafka else None
        with self.postgres.database(POSTGRES) as database, ExitStack() as databases:
            yield Place(self.postgres, self.rabbitmq, database, folder, databases, kafka)

    def _start_kafka(self) -> KafkaServer:
        if self._kafka is None:
            self._kafka = KafkaServer(java=KAFKA_JAVA)
            self._closing.callback(self._kafka.close)
        return self._kafka

    def versions(self) -> dict[str, str]:
        """Return what the servers say they are."""
        with self.postgres.get(POSTGRES).connect("postgres") as connection:
            row = connection.execute("SHOW server_version").fetchone()
        found = {"PostgreSQL": row[0] if row else "?", "RabbitMQ": self.rabbitmq.control("version").strip()}
        return found if self._kafka is None else found | {"Kafka": self._kafka.version}
