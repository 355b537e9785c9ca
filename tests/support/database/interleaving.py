"""Producers and a reader on a real server, one statement after the other in any order that a test thinks of.

Producers are transactions on connections of their own: they lock a key (`SKIP LOCKED`, so that one thread can play all
of them), insert, set savepoints, roll back to them, commit, roll back, prepare. The truth is kept here: what was
committed, and for each key in which order. The reader reads pages, stores its checkpoint through the contract, crashes.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from outbox_core.progress.checkpoint import Checkpoint, StoreAnswer
from outbox_core.progress.snapshot_range import SnapshotRange
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.progress import checkpoints
from outbox_worker.postgres.reading.snapshots import fetch_snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import psycopg

    from outbox_core.message import Batch
    from outbox_worker.postgres.reading.messages import MessageReader
    from outbox_worker.postgres.reading.range_reader import SnapshotReader
    from tests.support.servers.postgres import Database

KEYS = 3
PUBLICATIONS = ("eu", "us")


@dataclass
class Producer:
    """One transaction at a time; what it stored, by savepoint."""

    connection: psycopg.Connection[Any]
    open: bool = False
    levels: list[list[tuple[str, str]]] = field(default_factory=lambda: [[]])
    """For each savepoint the messages stored since, as (key, message id); the first list is the transaction's own."""
    locked: list[set[str]] = field(default_factory=lambda: [set()])

    @property
    def stored(self) -> list[tuple[str, str]]:
        return [message for level in self.levels for message in level]

    def forget(self) -> None:
        self.open, self.levels, self.locked = False, [[]], [set()]


class World:
    """The producers and what is true of their messages."""

    def __init__(self, database: Database, producers: int = 4) -> None:
        self.database = database
        admin = database.direct()
        admin.execute("CREATE TABLE IF NOT EXISTS keys (key text PRIMARY KEY)")
        admin.execute("TRUNCATE keys")
        admin.execute("INSERT INTO keys SELECT 'k' || n FROM generate_series(0, %s) AS n", (KEYS - 1,))
        self.producers = [Producer(database.direct(autocommit=True)) for _ in range(producers)]
        self.reader = database.connect()
        self.finisher = database.direct()
        self.stranger = database.server.connect("postgres", autocommit=True)
        self.stranger_open = False
        self.prepared: dict[str, list[tuple[str, str]]] = {}
        self.committed: dict[str, list[str]] = defaultdict(list)
        self.published: dict[str, str] = {}
        self.count = 0

    def reset(self) -> Checkpoint:
        """End whatever is open and forget what was; return a start from here on."""
        for producer in self.producers:
            if producer.open:
                producer.connection.execute("ROLLBACK")
            producer.forget()
        for gid in list(self.prepared):
            self.end_prepared(gid, commit=False)
        if self.stranger_open:
            self.toggle_stranger()
        self.committed.clear()
        return Checkpoint(0, 1, SnapshotRange(fetch_snapshot(self.reader)))

    def close(self) -> None:
        self.reset()
        self.stranger.close()

    def begin(self, number: int) -> Producer:
        producer = self.producers[number % len(self.producers)]
        if not producer.open:
            producer.connection.execute("BEGIN")
            producer.open = True
        return producer

    def insert(self, number: int, key_number: int, rows: int) -> None:
        """Lock the key, unless this transaction has it or another one does, then store messages."""
        producer, key = self.begin(number), f"k{key_number % KEYS}"
        if not any(key in level for level in producer.locked):
            row = producer.connection.execute(
                "SELECT 1 FROM keys WHERE key = %s FOR UPDATE SKIP LOCKED", (key,)
            ).fetchone()
            if row is None:
                return
            producer.locked[-1].add(key)
        for _ in range(rows):
            self.count += 1
            name, publication = f"m{self.count}", PUBLICATIONS[self.count % 2]
            producer.connection.execute(
                "INSERT INTO outbox.messages (message_id, message_type, partition_key, publication_id, data) "
                "VALUES (%s, %s, %s, %s, '{}')",
                (name, f"t{self.count % 3}", key, publication),
            )
            self.published[name] = publication
            producer.levels[-1].append((key, name))

    def touch(self, number: int) -> None:
        """Take a transaction id early, without a message."""
        self.begin(number).connection.execute("SELECT pg_current_xact_id()")

    def savepoint(self, number: int) -> None:
        producer = self.begin(number)
        producer.connection.execute(f"SAVEPOINT s{len(producer.levels)}")
        producer.levels.append([])
        producer.locked.append(set())

    def roll_back_to_savepoint(self, number: int) -> None:
        producer = self.begin(number)
        if len(producer.levels) > 1:
            # The savepoint stays, so the level does: emptied, like the locks that were taken since.
            producer.connection.execute(f"ROLLBACK TO SAVEPOINT s{len(producer.levels) - 1}")
            producer.levels[-1], producer.locked[-1] = [], set()

    def end(self, number: int, *, commit: bool) -> None:
        producer = self.producers[number % len(self.producers)]
        if producer.open:
            producer.connection.execute("COMMIT" if commit else "ROLLBACK")
            self._note(producer.stored if commit else [])
            producer.forget()

    def prepare(self, number: int) -> None:
        producer = self.producers[number % len(self.producers)]
        if producer.open:
            gid = f"{self.database.name}-{uuid4().hex[:8]}"
            producer.connection.execute(f"PREPARE TRANSACTION '{gid}'")
            self.prepared[gid] = producer.stored
            producer.forget()

    def end_prepared(self, gid: str, *, commit: bool) -> None:
        self.finisher.execute(f"{'COMMIT' if commit else 'ROLLBACK'} PREPARED '{gid}'")
        stored = self.prepared.pop(gid)
        self._note(stored if commit else [])

    def end_first_prepared(self, *, commit: bool) -> None:
        if self.prepared:
            self.end_prepared(next(iter(self.prepared)), commit=commit)

    def toggle_stranger(self) -> None:
        """Another database's transaction takes an id and stays open, or ends."""
        self.stranger.execute("COMMIT" if self.stranger_open else "BEGIN")
        if not self.stranger_open:
            self.stranger.execute("SELECT pg_current_xact_id()")
        self.stranger_open = not self.stranger_open

    def _note(self, stored: list[tuple[str, str]]) -> None:
        for key, name in stored:
            self.committed[key].append(name)


class Processor:
    """Reads pages and stores checkpoints as a worker does, without one: what it handled survives only if stored."""

    def __init__(
        self,
        connection: psycopg.Connection[Any],
        make_reader: Callable[[], MessageReader | SnapshotReader],
        start: Checkpoint,
        *,
        is_assigned: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self._make_reader = make_reader
        self.connection = connection
        self.key = ProcessorKey("outbox", uuid4().hex)
        self.is_assigned = is_assigned
        self.handled: list[str] = []
        self.by_key: dict[str, list[str]] = defaultdict(list)
        answer = checkpoints.store(self.connection, self.key, None, new=start, expected=None)
        assert answer is StoreAnswer.STORED
        self.restart()

    def restart(self) -> None:
        """Everything that was not stored is forgotten."""
        self.reader = self._make_reader()
        stored = checkpoints.load(self.connection, self.key)
        assert stored is not None
        self.stored = self.cursor = stored.pair
        self.page: Batch | None = None

    def read(self, limit: int) -> Batch:
        """Read a page, and check that the database gives the same one again as a relation."""
        batch = self.reader.fetch(self.connection, self.cursor, limit)
        read = [message.message_id for message in batch.messages]
        again = self.connection.execute(self.reader.batch_relation(batch.after, batch.examined)).fetchall()
        assert [row[2] for row in again] == read
        bound = self.reader.fetch_extent(self.connection, self.cursor, limit)
        whole = self.connection.execute(self.reader.batch_relation(bound.after, bound.examined)).fetchall()
        among = self.reader.batch_relation(bound.after, bound.examined, bound.positions)
        assert self.connection.execute(among).fetchall() == whole
        reached = [row[2] for row in whole]  # it may end earlier or later than the batch
        assert reached[: len(read)] == read[: len(reached)]
        assert reached or bound.full or not read
        self.page = batch
        if not batch.matched_count:
            self.cursor, self.page = batch.examined, None
        return batch

    def store(self) -> None:
        """Handle the page in hand: effects and checkpoint together."""
        if self.page is None:
            return
        answer = checkpoints.store(self.connection, self.key, None, new=self.page.examined, expected=self.stored)
        assert answer is StoreAnswer.STORED
        for message in self.page:
            self.handled.append(message.message_id)
            self.by_key[message.partition_key or ""].append(message.message_id)
        self.stored = self.cursor = self.page.examined
        self.page = None

    def drain(self, limit: int) -> None:
        """Read and handle until nothing is left."""
        for _ in range(10_000):
            batch = self.read(limit)
            self.store()
            if not batch.matched_count and not batch.full:
                return
        raise AssertionError("it never comes to an end")

    def check(self, committed: dict[str, list[str]], *, whole: bool) -> None:
        """Nothing twice, nothing out of commit order for its key; and if it is `whole`, nothing missing."""
        assert len(self.handled) == len(set(self.handled)), f"handled twice: {sorted(self.handled)}"
        for key in set(committed) | set(self.by_key):
            expected = [name for name in committed.get(key, []) if self.is_assigned(name)]
            got = self.by_key[key]
            assert got == expected[: len(got)], f"key {key}: {got} against commit order {expected}"
            if whole:
                assert len(got) == len(expected), f"key {key}: lost or stalled {expected[len(got) :]}"


def merge(processors: Iterable[Processor]) -> dict[str, list[str]]:
    """Return the messages that they handled, by key, each in its processor's order."""
    merged: dict[str, list[str]] = {}
    for processor in processors:
        for key, names in processor.by_key.items():
            if names:
                merged[key] = merged.get(key, []) + names
    return merged
