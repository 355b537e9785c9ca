"""Target `kafka` against a real broker: keys, order, refusals, outages, logins, duplicates."""

from __future__ import annotations

import json
import uuid

import pytest

from tests.support.servers.kafka import headers
from tests.support.worker import build_config

QUICK = {"initialBackoff": "50ms", "maxBackoff": "200ms"}


@pytest.fixture
def start(outbox, workers, kafka):
    """Start a worker whose target is a topic, with these keys in its Secret."""

    def started(topic, delivery=None, *, keys=None, secure=False, **fields):
        target = {"kafka": {"connection": {"secretRef": {"name": "kafka"}}, "topic": topic}}
        config = build_config(outbox.database, target, delivery=delivery or {}, **fields)
        home = workers.prepare(config, outbox.database.uri())
        write = kafka.secure_files if secure else kafka.files
        write(home / "connections/target", **(keys or {}))
        return workers.launch(home)

    return started


def insert(outbox, rows):
    """Store messages: (id, key, SQL of the payload)."""
    for name, key, data in rows:
        outbox.connection.execute(
            f"INSERT INTO outbox.messages (partition_key, message_id, message_type, data) VALUES (%s, %s, 't', {data})",
            (key, name),
        )


def large(size):
    """SQL of a payload that compression does not make smaller."""
    text = f"(SELECT string_agg(md5(n::text || '{uuid.uuid4()}'), '') FROM generate_series(1, {size // 32}) AS n)"
    return f"jsonb_build_object('text', {text})"


def by_key(messages):
    found: dict[bytes | None, list[str]] = {}
    for each in messages:
        found.setdefault(each.key(), []).append(headers(each)["x-outbox-message-id"])
    return found


def test_messages_arrive_in_order_per_key_with_their_headers(outbox, kafka, start):
    ids = outbox.produce(2500)
    with kafka.topic(partitions=4) as topic:
        worker = start(topic.name)
        worker.wait_for("all is stored", lambda r: r.handled == 2500, 30)
        assert sorted(topic.wait_for(2500)) == sorted(ids)
        messages = topic.read()
    for key, arrived in by_key(messages).items():
        assert key is not None
        assert arrived == [each for each in ids if each in set(arrived)], "in the order of the outbox"
    first = next(each for each in messages if headers(each)["x-outbox-message-id"] == ids[0])
    assert (first.key(), json.loads(first.value())) == (b"order-1", {"n": 1, "total": 10})
    expected = {
        "x-outbox-publication": "shop", "x-outbox-partition-key": "order-1", "x-outbox-processor": "orders",
        "x-outbox-pod": "pod-0", "x-outbox-epoch": "1", "x-outbox-message-type": "OrderPlaced",
    }  # fmt: skip
    assert expected.items() <= headers(first).items()
    assert headers(first)["x-outbox-checkpoint"].endswith(":1")
    assert outbox.stored() == outbox.last()
