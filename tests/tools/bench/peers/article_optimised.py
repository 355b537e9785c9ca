"""The last loop of "Scaling the Outbox Pattern": a batch is published at once, confirmed as a whole, updated at once.

Arguments: database, port of the broker, queue, batch size, workers. Workers are threads of one process, as the
article's are tasks of one; each has a connection to the database and one to the broker. They take other rows than
their neighbours (SKIP LOCKED), so there is no order. The client is py-amqp, as the article's loop has a client library.
"""

from __future__ import annotations

import sys
import threading
import time
from queue import SimpleQueue

import amqp  # type: ignore[import-not-found]
import psycopg

_TABLE = (
    "CREATE TABLE outbox_messages (id text PRIMARY KEY, type text NOT NULL, content jsonb NOT NULL, "
    "occurred_on timestamptz NOT NULL, processed_on timestamptz)"
)
_INDEX = (
    "CREATE INDEX outbox_messages_unprocessed ON outbox_messages (occurred_on, processed_on) "
    "INCLUDE (id, type, content) WHERE processed_on IS NULL"
)
_FETCH = (
    "SELECT id, type, content::text FROM outbox_messages WHERE processed_on IS NULL "
    "ORDER BY occurred_on LIMIT %s FOR UPDATE SKIP LOCKED"
)
_DONE = "UPDATE outbox_messages SET processed_on = clock_timestamp() WHERE id = ANY(%s)"


class Publisher:
    """One connection in confirm mode."""

    def __init__(self, port: int, queue: str) -> None:
        # Without heartbeats: a paused program sends none.
        self._connection = amqp.Connection(f"127.0.0.1:{port}", "tests", "s3cret word", heartbeat=0)
        self._connection.connect()
        self._channel = self._connection.channel()
        self._channel.confirm_select()
        self._channel.events["basic_ack"].add(self._confirm)
        self._channel.events["basic_nack"].add(self._refuse)
        self._queue = queue
        self._sent = 0
        self._unconfirmed: set[int] = set()

    def publish(self, rows: list[tuple[str, str, str]]) -> None:
        """Publish all of them, and return when all are confirmed."""
        for message_id, kind, content in rows:
            message = amqp.Message(
                content, content_type="application/json", delivery_mode=2, message_id=message_id, type=kind
            )
            self._sent += 1
            self._unconfirmed.add(self._sent)
            self._channel.basic_publish(message, routing_key=self._queue)
        while self._unconfirmed:
            self._connection.drain_events()

    def _confirm(self, tag: int, multiple: bool) -> None:
        if multiple:
            self._unconfirmed = {each for each in self._unconfirmed if each > tag}
        else:
            self._unconfirmed.discard(tag)

    def _refuse(self, tag: int, _multiple: bool) -> None:
        raise ConnectionError(f"the broker refused message {tag}")


def work(database: str, port: int, queue: str, batch: int) -> None:
    """Be one worker, until it fails."""
    connection = psycopg.connect(database, autocommit=True)
    publisher = Publisher(port, queue)
    while True:
        with connection.transaction():
            rows = connection.execute(_FETCH, (batch,), prepare=True).fetchall()
            if rows:
                publisher.publish(rows)
                connection.execute(_DONE, ([message_id for message_id, _, _ in rows],), prepare=True)
        if not rows:
            time.sleep(0.01)


def main(database: str, port: int, queue: str, batch: int, workers: int) -> None:
    """Work until it is ended, or until one worker fails.

    Raises:
        Exception: what the first worker to fail failed with.

    """
    with psycopg.connect(database) as connection:
        connection.execute(_TABLE)
        connection.execute(_INDEX)
    failures: SimpleQueue[Exception] = SimpleQueue()

    def work_or_tell() -> None:
        try:
            work(database, port, queue, batch)
        except Exception as err:  # noqa: BLE001 - the main thread raises it
            failures.put(err)

    for _ in range(workers):
        threading.Thread(target=work_or_tell, daemon=True).start()
    print("ready", flush=True)
    raise failures.get()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
