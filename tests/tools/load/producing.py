"""One writer of the load test: transactions that lock keys, store numbered messages, and end in every way there is."""

from __future__ import annotations

import contextlib
import random
import time
from dataclasses import dataclass

import psycopg

SCHEMA = """
CREATE TABLE keys (key text PRIMARY KEY, number bigint NOT NULL DEFAULT 0) WITH (fillfactor = 50);
CREATE TABLE handled (n bigserial PRIMARY KEY, processor text NOT NULL, message_id text NOT NULL, key text NOT NULL,
                      number bigint NOT NULL);
"""
LOCK = "UPDATE keys SET number = number + %s WHERE key = %s RETURNING number"
STORE = """
INSERT INTO outbox.messages (message_type, partition_key, data)
SELECT 'Counted', %(key)s, jsonb_build_object('number', n)
FROM generate_series(%(first)s::bigint, %(last)s::bigint) AS n
"""


@dataclass(frozen=True)
class Share:
    """What one writer is to do; the seed decides everything but the timing."""

    uri: str
    name: str
    seed: int
    rows: int
    keys: int
    most: int
    """Messages that one transaction stores for one key."""


def produce(share: Share) -> int:
    """Store at least so many messages; return how many transactions it took. Runs in a process of its own."""
    chance = random.Random(share.seed)
    connection = psycopg.connect(share.uri, autocommit=True, application_name=share.name)
    connection.execute("SET lock_timeout = '5s'")
    stored = transactions = 0
    pending: list[tuple[float, str, int]] = []
    while stored < share.rows or pending:
        stored += _end_prepared(connection, pending, chance, everything=stored >= share.rows)
        if stored < share.rows:
            transactions += 1
            stored += _one(connection, share, chance, pending, f"{share.name}-{transactions}")
    connection.close()
    return transactions


def _one(
    connection: psycopg.Connection,
    share: Share,
    chance: random.Random,
    pending: list[tuple[float, str, int]],
    gid: str,
) -> int:
    count = 0
    try:
        connection.execute("BEGIN")
        if chance.random() < 0.3:
            connection.execute("SELECT pg_current_xact_id()")  # an id that is older than the key's lock
        for key in sorted(chance.sample(range(share.keys), chance.randint(1, 3))):
            if chance.random() < 0.2:
                # What is stored after a savepoint is taken back, and perhaps stored again.
                connection.execute("SAVEPOINT s")
                _store(connection, f"k{key}", chance.randint(1, share.most))
                connection.execute("ROLLBACK TO SAVEPOINT s")
            count += _store(connection, f"k{key}", chance.randint(1, share.most))
            if chance.random() < 0.2:
                connection.execute("SAVEPOINT kept")
        if chance.random() < 0.05:
            time.sleep(chance.random())  # an open transaction, while others overtake it
        fate = chance.random()
        if fate < 0.06 and len(pending) < 1:
            connection.execute(f"PREPARE TRANSACTION '{gid}'")
            pending.append((time.monotonic() + 2 * chance.random(), gid, count))
            return 0
        if fate < 0.16:
            connection.execute("ROLLBACK")
            return 0
        connection.execute("COMMIT")
    except (
        psycopg.errors.LockNotAvailable,
        psycopg.errors.DeadlockDetected,
        psycopg.errors.ConfigurationLimitExceeded,
    ):
        with contextlib.suppress(psycopg.errors.NoActiveSqlTransaction):
            connection.execute("ROLLBACK")
        return 0
    return count


def _store(connection: psycopg.Connection, key: str, count: int) -> int:
    """Lock the key, then number and store its messages: numbers are commit order."""
    row = connection.execute(LOCK, (count, key)).fetchone()
    assert row is not None
    connection.execute(STORE, {"key": key, "first": row[0] - count + 1, "last": row[0]})
    return count


def _end_prepared(
    connection: psycopg.Connection, pending: list[tuple[float, str, int]], chance: random.Random, *, everything: bool
) -> int:
    stored = 0
    for due, gid, count in list(pending):
        if everything or time.monotonic() >= due:
            commit = chance.random() < 0.7
            connection.execute(f"{'COMMIT' if commit else 'ROLLBACK'} PREPARED '{gid}'")
            pending.remove((due, gid, count))
            stored += count if commit else 0
    return stored
