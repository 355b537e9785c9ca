"""A divided processor under test: who owns what, and a ledger by key: each message once, each key in order."""

from __future__ import annotations

from collections import defaultdict

from tests.support.servers.postgres import wait_until
from tests.support.worker import PYTHON_HANDLER, PYTHON_TARGET, build_config

COUNT = 6
KEYS = 40


def divided(outbox, target=PYTHON_TARGET, count=COUNT, **fields):
    delivery = {"mode": "Partitioned", "partitions": {"count": count}, "batchSize": 20} | fields.pop("delivery", {})
    return build_config(outbox.database, target, delivery=delivery, **fields)


def start(outbox, workers, pod, handler=PYTHON_HANDLER, **fields):
    return workers.start(divided(outbox, **fields), outbox.database.uri(), handler=handler, pod=pod)


def owners(outbox):
    """The pod that owns each partition, as the database has it."""
    rows = outbox.connection.execute(
        "SELECT partition, pod FROM outbox.processor_leases WHERE expires_at > clock_timestamp()"
    )
    return dict(rows.fetchall())


def shares(outbox):
    found = list(owners(outbox).values())
    return sorted(found.count(pod) for pod in set(found))


def wait_shared(outbox, *expected, seconds=20.0):
    wait_until(lambda: shares(outbox) == sorted(expected), f"shares of {expected}", seconds)


def produce(outbox, count, start=0):
    """Messages n of key n % KEYS, in one transaction."""
    outbox.connection.execute(
        "INSERT INTO outbox.messages (partition_key, message_id, message_type, data) "
        "SELECT 'key-' || n %% %s, 'message-' || n, 'OrderPlaced', jsonb_build_object('total', n) "
        "FROM generate_series(%s::int, %s::int) AS n",
        (KEYS, start, start + count - 1),
    )


def assert_each_once_and_in_order(outbox, count):
    """Effects are numbered as they were written: per key they must rise."""
    rows = outbox.connection.execute("SELECT total FROM handled ORDER BY n").fetchall()
    numbers = [row[0] for row in rows]
    assert sorted(numbers) == list(range(count))
    by_key = defaultdict(list)
    for number in numbers:
        by_key[number % KEYS].append(number)
    assert all(each == sorted(each) for each in by_key.values())


def wait_count(outbox, count, seconds=30.0):
    wait_until(lambda: outbox.count() >= count, f"{count} messages handled", seconds)
