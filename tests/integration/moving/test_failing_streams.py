"""Streams in which messages fail at random, for a while: in the end each is handled once, in the order of its key.

What fails is written in a table that the projection asks, so that it changes while the worker runs. The messages, when
they come and which of them fail follow from a seed.
"""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from tests.support.nightly import at_night, by_day
from tests.support.servers.postgres import wait_until
from tests.support.worker import build_config

KEYS = 6
ROUNDS = 12
REFUSED = """
CREATE TABLE refused (message_id text PRIMARY KEY);
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT 1 FROM refused r WHERE r.message_id = NEW.message_id) THEN
        RAISE EXCEPTION 'message % is refused', NEW.message_id USING ERRCODE = '22000';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER refuse BEFORE INSERT ON seen FOR EACH ROW EXECUTE FUNCTION refuse();
"""
STATEMENT = "INSERT INTO seen (message_id, total) SELECT message_id, 0 FROM batch ORDER BY ordinal"
RETRY = {"maxAttempts": 1000, "initialBackoff": "20ms", "maxBackoff": "200ms"}
ORDERED: dict[str, Any] = {}
PARTITIONED: dict[str, Any] = {"mode": "Partitioned", "partitions": {"count": 3}}
COMPETING: dict[str, Any] = {"mode": "Competing", "competing": {"leaseDuration": "2s"}}


class Stream:
    """Produces messages of a few keys, and changes which of them are refused."""

    def __init__(self, source, target, seed):
        self.source, self.target = source, target
        self.random = random.Random(seed)
        self.produced: list[tuple[str, str]] = []

    def play(self):
        for _ in range(ROUNDS):
            self.fail()
            self.produce(self.random.randint(1, 60))
            time.sleep(self.random.choice((0, 0.02, 0.2)))
        self.target.execute("DELETE FROM refused")

    def fail(self):
        """Of the messages that come next some are refused; of those that were, some are not any more."""
        begin = len(self.produced)
        share = self.random.choice((0.0, 0.02, 0.2, 1.0))
        chosen = [f"m{n}" for n in range(begin, begin + 60) if self.random.random() < share]
        corrected = [f"m{n}" for n in range(begin) if self.random.random() < 0.3]
        self.target.execute("DELETE FROM refused WHERE message_id = ANY (%s::text[])", (corrected,))
        self.target.execute("INSERT INTO refused SELECT unnest(%s::text[]) ON CONFLICT DO NOTHING", (chosen,))

    def produce(self, count):
        begin = len(self.produced)
        rows = [(f"m{n}", f"key-{self.random.randrange(KEYS)}") for n in range(begin, begin + count)]
        self.source.execute(
            "INSERT INTO outbox.messages (message_id, partition_key, message_type, data) "
            "SELECT r.id, r.key, 't', '{}' FROM unnest(%s::text[], %s::text[]) WITH ORDINALITY AS r (id, key, n) "
            "ORDER BY r.n",
            ([each for each, _ in rows], [key for _, key in rows]),
        )
        self.produced += rows


def of_keys(produced):
    return {key: [each for each, its in produced if its == key] for key in {key for _, key in produced}}


CASES = [
    pytest.param(place, mode, cursor, blocks, id=f"{place}-{name}-{cursor}-{blocks}")
    for place in ("here", "apart")
    for name, mode in (("ordered", ORDERED), ("partitioned", PARTITIONED))
    for cursor in ("TransactionOrder", "Snapshot")
    for blocks in ("Key", "Nothing")
]
HALF = by_day(
    CASES, "here-ordered-TransactionOrder-Key", "here-ordered-Snapshot-Nothing",
    "here-partitioned-TransactionOrder-Nothing", "here-partitioned-Snapshot-Key",
    "apart-ordered-TransactionOrder-Nothing", "apart-ordered-Snapshot-Key",
    "apart-partitioned-TransactionOrder-Key", "apart-partitioned-Snapshot-Nothing",
)  # fmt: skip
"""Any two values of place, mode, cursor and blocks meet."""


@pytest.mark.parametrize("seed", [1, *at_night(2)])
@pytest.mark.parametrize(("place", "mode", "cursor", "blocks"), HALF, indirect=["cursor"])
def test_each_message_is_handled_once(apart, place, mode, cursor, blocks, seed):
    if place == "here":
        apart.outbox.connection.execute(
            "CREATE TABLE seen (n serial PRIMARY KEY, message_id text, total int, pair text)"
        )
    effects = apart.outbox.connection if place == "here" else apart.connection
    effects.execute(REFUSED)
    stream = Stream(apart.outbox.connection, effects, seed)
    delivery = {"blocks": blocks, "batchSize": 40, "retry": RETRY} | mode
    if place == "here":
        database = apart.outbox.database
        target = {"sql": {"statement": STATEMENT}}
        apart.workers.start(
            build_config(database, target, source={"cursor": cursor}, delivery=delivery), database.uri()
        )  # fmt: skip
    else:
        apart.start(statement=STATEMENT, delivery=delivery)
    stream.play()

    def handled():
        return [row[0] for row in effects.execute("SELECT message_id FROM seen ORDER BY n").fetchall()]

    wait_until(lambda: len(handled()) >= len(stream.produced), f"{len(stream.produced)} messages are handled")
    found = handled()
    assert sorted(found) == sorted(each for each, _ in stream.produced)
    if blocks == "Key":
        key_of = dict(stream.produced)
        assert of_keys([(each, key_of[each]) for each in found]) == of_keys(stream.produced)


@pytest.mark.parametrize("seed", [1, *at_night(2)])
def test_each_message_is_handled_once_by_consumers(apart, seed):
    apart.outbox.connection.execute("CREATE TABLE seen (n serial PRIMARY KEY, message_id text, total int, pair text)")
    apart.outbox.connection.execute(REFUSED)
    stream = Stream(apart.outbox.connection, apart.outbox.connection, seed)
    database = apart.outbox.database
    config = build_config(
        database, {"sql": {"statement": STATEMENT}}, source={"cursor": None},
        delivery={"batchSize": 40, "retry": RETRY} | COMPETING,
    )  # fmt: skip
    for pod in ("one", "two"):
        apart.workers.start(config, database.uri(), pod=pod)
    stream.play()

    def handled():
        return [row[0] for row in apart.outbox.connection.execute("SELECT message_id FROM seen").fetchall()]

    wait_until(lambda: len(handled()) >= len(stream.produced), f"{len(stream.produced)} messages are handled")
    assert sorted(handled()) == sorted(each for each, _ in stream.produced)
