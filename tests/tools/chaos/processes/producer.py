"""One producer: a process with one connection, straight to the server, that outlives every crash of it.

A transaction is written into the commit log when COMMIT was answered, or, when the answer was lost, after the database
said what became of it. Until then nothing new begins, so a key's messages follow each other whatever happens.

Most keys are one producer's own. Some are everybody's: those are locked before they are written to, some of them by
transactions that have taken their id long before, so that the order of commits is not that of the pairs.
"""

from __future__ import annotations

import argparse
import json
import signal
import time
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final, LiteralString
from uuid import UUID

import psycopg
from psycopg import sql

from tests.tools.demo.producing.transactions import Book, Draft, Kind, plan_transaction
from tests.tools.ledger.commitlog import CommitLog, Committed

if TYPE_CHECKING:
    from collections.abc import Sequence

INSERT: Final[LiteralString] = """
INSERT INTO outbox.messages (publication_id, partition_key, message_id, message_type, data)
SELECT 'orders', key, id, type, payload
  FROM unnest(%s::text[], %s::text[], %s::text[], %s::jsonb[]) AS m(key, id, type, payload)
RETURNING position, transaction_id::text
"""
ENQUEUE: Final[LiteralString] = """
INSERT INTO outbox.{} (partition_key, message_id, message_type, data, priority, deliver_after, unique_key)
SELECT key, id, type, payload, priority, clock_timestamp() + wait * interval '1 second', uniqueness
  FROM unnest(%s::text[], %s::text[], %s::text[], %s::jsonb[], %s::int[], %s::float8[], %s::text[])
    AS m(key, id, type, payload, priority, wait, uniqueness)
"""
NEXT: Final[LiteralString] = "UPDATE chaos.keys SET sequence = sequence + 1 WHERE order_key = %s RETURNING sequence"
SHARED_KEYS: Final = tuple(f"shared-{number}" for number in range(1, 7))
SHARED_SHARE: Final = 0.4
"""Of the transactions, those that write to keys that all producers write to."""
DELAYED_SHARE: Final = 0.05
UNIQUE_SHARE: Final = 0.1
LONGEST_DELAY: Final = 3.0
MARK: Final[LiteralString] = "INSERT INTO chaos.transactions (mark, committed) VALUES (%s, true)"
RULE_OUT: Final[LiteralString] = """
INSERT INTO chaos.transactions (mark, committed) VALUES (%s, false) ON CONFLICT (mark) DO NOTHING
"""
"""Waits for a transaction that is still about to end; afterwards it has committed, or never can."""
ASK: Final[LiteralString] = "SELECT committed FROM chaos.transactions WHERE mark = %s"
MOST_IN_ONE_INSERT: Final = 6
LONGEST_PAUSE: Final = 1.0
"""A transaction holds every processor's bound so long, at most: a recovery is not to be measured against it."""


class Producer:
    """Runs transactions until it is told to stop."""

    def __init__(
        self, uri: str, number: int, seed: int, directory: Path, rate: float, queues: Sequence[str] = ()
    ) -> None:
        """Keep where to write: into the outbox, and what is written there into each of the queues."""
        self._uri = uri
        self._queues = [sql.SQL(ENQUEUE).format(sql.Identifier(f"queue_{queue}")) for queue in queues]
        self._random = Random(f"{seed}/producer/{number}")
        self._book = Book(number)
        self._log = CommitLog(directory / f"producer-{number}.jsonl", number)
        self._number = number
        self._pause = 1 / rate
        self._connection: psycopg.Connection[Any] | None = None
        self.stopping = False

    def run(self) -> None:
        while not self.stopping:
            try:
                self._run_transaction(self._connect())
                time.sleep(self._random.uniform(0, 2) * self._pause)
            except psycopg.Error:
                # Before COMMIT: the server has rolled it back, or will. The book is as it was.
                self._drop()
                time.sleep(0.05)
        self._drop()
        self._log.close()

    def _connect(self) -> psycopg.Connection[Any]:
        if self._connection is None or self._connection.closed:
            self._connection = psycopg.connect(
                self._uri, autocommit=True, connect_timeout=5, application_name=f"producer-{self._number}"
            )
        return self._connection

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _run_transaction(self, connection: psycopg.Connection[Any]) -> None:
        plan = plan_transaction(self._random, MOST_IN_ONE_INSERT)
        pause = min(plan.pause, LONGEST_PAUSE)
        book = self._book.copy()
        # All locks are taken at one place of the transaction, in one order: producers never wait in a ring.
        shared = sorted(self._random.sample(SHARED_KEYS, 2)) if self._random.random() < SHARED_SHARE else []
        late = plan.kind in (Kind.PAUSED, Kind.OPEN, Kind.SAVEPOINT) and self._random.random() < 0.5
        connection.execute("BEGIN")
        if plan.kind is Kind.EARLY:
            connection.execute("SELECT pg_current_xact_id()")
            time.sleep(pause)
        drafts = book.draft(self._random, plan.inserts[0])
        stored = self._insert(connection, drafts if late else drafts + self._draft_shared(connection, shared))
        if plan.kind is Kind.SAVEPOINT:
            connection.execute("SAVEPOINT before_second_thoughts")
            self._insert(connection, book.copy().draft(self._random, plan.inserts[1]))
            connection.execute("ROLLBACK TO SAVEPOINT before_second_thoughts")
        if plan.kind in (Kind.PAUSED, Kind.OPEN, Kind.SAVEPOINT):
            time.sleep(pause)
            drafts = book.draft(self._random, plan.inserts[1])
            stored += self._insert(connection, drafts + self._draft_shared(connection, shared) if late else drafts)
        mark = str(UUID(int=self._random.getrandbits(128)))
        connection.execute(MARK, [mark])
        if plan.kind is Kind.ROLLBACK:
            connection.execute("ROLLBACK")
        elif self._commit(connection, mark):
            self._log.append(stored[0].pair[0], stored)
            self._book = book

    def _draft_shared(self, connection: psycopg.Connection[Any], keys: Sequence[str]) -> list[Draft]:
        """Lock the keys, and write down the next message of each."""
        drafts = []
        for key in keys:
            ((sequence,),) = connection.execute(NEXT, [key]).fetchall()
            message_id = str(UUID(int=self._random.getrandbits(128)))
            cents = self._random.randrange(100, 100_000)
            drafts.append(Draft(message_id, "OrderPaid", key, sequence, "", cents, large=False))
        return drafts

    def _insert(self, connection: psycopg.Connection[Any], drafts: Sequence[Draft]) -> list[Committed]:
        columns = [
            [d.key for d in drafts],
            [d.message_id for d in drafts],
            [d.message_type for d in drafts],
            [json.dumps({"orderKey": d.key, "sequence": d.sequence, "cents": d.cents}) for d in drafts],
        ]
        rows = connection.execute(INSERT, columns).fetchall()
        chance = self._random.random
        more = [
            [self._random.randrange(10) for _ in drafts],
            [LONGEST_DELAY * chance() if chance() < DELAYED_SHARE else None for _ in drafts],
            [d.message_id if chance() < UNIQUE_SHARE else None for d in drafts],
        ]
        for enqueue in self._queues:
            connection.execute(enqueue, columns + more)
        return [
            Committed(d.message_id, (int(xid), position), d.key, d.sequence, d.cents, 0, self._number)
            for d, (position, xid) in zip(drafts, rows, strict=True)
        ]

    def _commit(self, connection: psycopg.Connection[Any], mark: str) -> bool:
        try:
            connection.execute("COMMIT")
        except psycopg.Error:
            self._drop()
            return self._has_committed(mark)
        return True

    def _has_committed(self, mark: str) -> bool:
        """Ask until the database says what became of the transaction; it must, before anybody may count.

        Never by `pg_xact_status`: a transaction id that was not yet on the disk when the server crashed is given out
        again, and then somebody else's commit answers.
        """
        while True:
            try:
                self._connect().execute(RULE_OUT, [mark])
                row = self._connect().execute(ASK, [mark]).fetchone()
            except psycopg.Error:
                self._drop()
            else:
                if row is not None:
                    return bool(row[0])
            time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--uri", required=True)
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--log-dir", type=Path, required=True)
    parser.add_argument("--rate", type=float, default=7.0, help="transactions a second, about")
    parser.add_argument("--queue", action="append", default=[], help="name of a queue that gets every message too")
    arguments = parser.parse_args()
    producer = Producer(
        arguments.uri, arguments.number, arguments.seed, arguments.log_dir, arguments.rate, arguments.queue
    )

    def stop(*_: object) -> None:
        producer.stopping = True

    signal.signal(signal.SIGTERM, stop)
    producer.run()


if __name__ == "__main__":
    main()
