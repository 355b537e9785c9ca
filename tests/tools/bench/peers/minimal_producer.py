"""Reads the outbox by position, publishes to Kafka by an idempotent producer, stores how far it came. Nothing else.

No lease, no second owner, no failing messages, no transactions that commit late: what the product adds costs the
difference to this.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

import psycopg
from confluent_kafka import Producer

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message

_FETCH = (
    "SELECT position, message_id, partition_key, data::text FROM outbox.messages WHERE position > %s "
    "ORDER BY position LIMIT %s"
)
_STORE = "UPDATE minimal_checkpoints SET position = %s WHERE name = %s"


def _confirm(error: KafkaError | None, _message: Message) -> None:
    if error is not None:
        raise ConnectionError(error.str())


def main() -> None:
    """Work until it is ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--database", required=True)
    parser.add_argument("--servers", required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--batch", type=int, default=1000)
    given = parser.parse_args()
    connection = psycopg.connect(given.database, autocommit=True)
    connection.execute("CREATE TABLE IF NOT EXISTS minimal_checkpoints (name text PRIMARY KEY, position bigint)")
    connection.execute("INSERT INTO minimal_checkpoints VALUES (%s, 0) ON CONFLICT DO NOTHING", (given.topic,))
    producer = Producer({"bootstrap.servers": given.servers, "enable.idempotence": True, "acks": "all"})
    stored = 0
    print("ready", flush=True)
    while True:
        rows = connection.execute(_FETCH, (stored, given.batch), prepare=True).fetchall()
        for _, message_id, key, data in rows:
            producer.produce(given.topic, data, key, headers={"id": message_id}, on_delivery=_confirm)
        if not rows:
            time.sleep(0.01)
            continue
        if producer.flush(30):
            raise ConnectionError("Kafka did not confirm all messages within 30 s")
        stored = rows[-1][0]
        connection.execute(_STORE, (stored, given.topic), prepare=True)


if __name__ == "__main__":
    main()
