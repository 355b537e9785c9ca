"""The first loop of "Scaling the Outbox Pattern": each message is published, confirmed and updated alone.

Arguments: database, port of the broker, queue, batch size. It has no index but the primary key's, as the article's has
none when it begins.
"""

from __future__ import annotations

import sys
import time

import pika  # type: ignore[import-not-found]
import psycopg

_TABLE = (
    "CREATE TABLE outbox_messages (id text PRIMARY KEY, type text NOT NULL, content jsonb NOT NULL, "
    "occurred_on timestamptz NOT NULL, processed_on timestamptz)"
)
_FETCH = "SELECT id, type, content::text FROM outbox_messages WHERE processed_on IS NULL ORDER BY occurred_on LIMIT %s"
_DONE = "UPDATE outbox_messages SET processed_on = clock_timestamp() WHERE id = %s"


def main(database: str, port: int, queue: str, batch: int) -> None:
    """Work until it is ended."""
    connection = psycopg.connect(database, autocommit=True)
    connection.execute(_TABLE)
    credentials = pika.PlainCredentials("tests", "s3cret word")
    # Without heartbeats: a paused program sends none.
    broker = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port, "/", credentials, heartbeat=0))
    channel = broker.channel()
    channel.confirm_delivery()  # basic_publish returns when the broker has confirmed, and raises where it refuses
    print("ready", flush=True)
    while True:
        with connection.transaction():
            rows = connection.execute(_FETCH, (batch,), prepare=True).fetchall()
            for message_id, kind, content in rows:
                properties = pika.BasicProperties(
                    content_type="application/json", delivery_mode=2, message_id=message_id, type=kind
                )
                channel.basic_publish("", queue, content.encode(), properties, mandatory=True)
                connection.execute(_DONE, (message_id,), prepare=True)
        if not rows:
            time.sleep(0.01)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
