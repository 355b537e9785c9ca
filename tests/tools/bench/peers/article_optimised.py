"""The last loop of "Scaling the Outbox Pattern": a batch is published at once, confirmed as a whole, updated at once.

Arguments: database, port of the broker, queue, batch size, workers. Workers are threads of one process, as the
article's are tasks of one; each has a connection to the database and one to the broker. They take other rows than
their neighbours (SKIP LOCKED), so there is no order. Frames and confirms are the minimal script's: no Python client is
faster.
"""

from __future__ import annotations

import sys
import threading
import time
from queue import SimpleQueue

import psycopg

from tests.tools.bench.peers.minimal_publisher import Publisher

_TABLE = (
    "CREATE TABLE outbox_messages (id text PRIMARY KEY, type text NOT NULL, content jsonb NOT NULL, "
    "occurred_on timestamptz NOT NULL, processed_on timestamptz)"
)
_INDEX = (
    "CREATE INDEX outbox_messages_unprocessed ON outbox_messages (occurred_on, processed_on) "
    "INCLUDE (id, type, content) WHERE processed_on IS NULL"
)
_FETCH = (
    "SELECT occurred_on, id, content::text FROM outbox_messages WHERE processed_on IS NULL "
    "ORDER BY occurred_on LIMIT %s FOR UPDATE SKIP LOCKED"
)
_DONE = "UPDATE outbox_messages SET processed_on = clock_timestamp() WHERE id = ANY(%s)"


def work(database: str, port: int, queue: str, batch: int) -> None:
    """Be one worker, until it fails."""
    connection = psycopg.connect(database, autocommit=True)
    publisher = Publisher(port, queue)
    while True:
        with connection.transaction():
            rows = connection.execute(_FETCH, (batch,), prepare=True).fetchall()
            if rows:
                publisher.publish(rows)
                connection.execute(_DONE, ([message_id for _, message_id, _ in rows],), prepare=True)
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
