"""One producer: a process with one connection, straight to the server, that outlives every crash of it.

A transaction is written into the commit log when COMMIT was answered, or, when the answer was lost, after the database
said what became of it. Until then nothing new begins, so a key's messages follow each other whatever happens.
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

from tests.demo.transactions import Book, Draft, Kind, plan_transaction
from tests.ledger.commitlog import CommitLog, Committed

if TYPE_CHECKING:
    from collections.abc import Sequence

INSERT: Final[LiteralString] = """
INSERT INTO outbox.messages (publication_id, partition_key, message_id, message_type, data)
SELECT 'orders', key, id, type, payload
  FROM unnest(%s::text[], %s::text[], %s::text[], %s::jsonb[]) AS m(key, id, type, payload)
RETURNING position, transaction_id::text
"""
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

    def __init__(self, uri: str, number: int, seed: int, directory: Path, rate: float) -> None:
        self._uri = uri
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
        connection.execute("BEGIN")
        if plan.kind is Kind.EARLY:
            connection.execute("SELECT pg_current_xact_id()")
            time.sleep(pause)
        stored = self._insert(connection, book.draft(self._random, plan.inserts[0]))
        if plan.kind is Kind.SAVEPOINT:
            connection.execute("SAVEPOINT before_second_thoughts")
            self._insert(connection, book.copy().draft(self._random, plan.inserts[1]))
            connection.execute("ROLLBACK TO SAVEPOINT before_second_thoughts")
        if plan.kind in (Kind.PAUSED, Kind.OPEN, Kind.SAVEPOINT):
            time.sleep(pause)
            stored += self._insert(connection, book.draft(self._random, plan.inserts[1]))
        mark = str(UUID(int=self._random.getrandbits(128)))
        connection.execute(MARK, [mark])
        if plan.kind is Kind.ROLLBACK:
            connection.execute("ROLLBACK")
        elif self._commit(connection, mark):
            self._log.append(stored[0].pair[0], stored)
            self._book = book

    def _insert(self, connection: psycopg.Connection[Any], drafts: Sequence[Draft]) -> list[Committed]:
        columns = [
            [d.key for d in drafts],
            [d.message_id for d in drafts],
            [d.message_type for d in drafts],
            [json.dumps({"orderKey": d.key, "sequence": d.sequence, "cents": d.cents}) for d in drafts],
        ]
        return [
            Committed(d.message_id, (int(xid), position), d.key, d.sequence, d.cents, 0, self._number)
            for d, (position, xid) in zip(drafts, connection.execute(INSERT, columns), strict=True)
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
    arguments = parser.parse_args()
    producer = Producer(arguments.uri, arguments.number, arguments.seed, arguments.log_dir, arguments.rate)

    def stop(*_: object) -> None:
        producer.stopping = True

    signal.signal(signal.SIGTERM, stop)
    producer.run()


if __name__ == "__main__":
    main()
