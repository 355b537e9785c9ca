"""The shop: eight connections that place orders and store a message for each step in the same transaction.

A process of its own (`python -m tests.tools.demo.producing.producers`): connection by libpq's PG* variables, so no
password is on a command line. Each connection keeps its own commit log: a line for each transaction, on the disk before
the next one begins, written only after COMMIT answered. It runs until the wanted number of messages is committed *and*
its standard input is closed; in between it goes on slowly, so that whoever needs traffic has it.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final, LiteralString

import psycopg

from tests.tools.demo.producing.transactions import LARGE_BYTES, Book, Draft, Kind, plan_transaction
from tests.tools.ledger.commitlog import CommitLog, Committed

if TYPE_CHECKING:
    from collections.abc import Sequence

INSERT_ORDERS: Final[LiteralString] = """
INSERT INTO shop.orders (order_key, customer)
SELECT * FROM unnest(%(keys)s::text[], %(customers)s::text[])
"""
INSERT_MESSAGES: Final[LiteralString] = """
INSERT INTO outbox.messages (publication_id, partition_key, message_id, message_type, data)
SELECT 'orders', key, id, type, payload
  FROM unnest(%(keys)s::text[], %(ids)s::text[], %(types)s::text[], %(payloads)s::jsonb[]) AS m(key, id, type, payload)
RETURNING position, transaction_id::text
"""
HAS_COMMITTED: Final[LiteralString] = """
SELECT pg_xact_status(%s::text::xid8) = 'committed' AND EXISTS (SELECT FROM outbox.messages WHERE message_id = %s)
"""
SLOW_PAUSE: Final = 2.5
"""Seconds, on average, between two transactions of a connection once enough is committed."""


@dataclass
class Counts:
    """What all connections did, for the line of progress."""

    committed: int = 0
    kinds: Counter[Kind] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)
    failure: BaseException | None = None

    def add(self, messages: int, kind: Kind) -> None:
        """Count one finished transaction."""
        with self.lock:
            self.committed += messages
            self.kinds[kind] += 1


@dataclass(frozen=True)
class Pace:
    """How fast one connection goes."""

    rate: float
    wanted: int
    closing: threading.Event

    def wait(self, random: Random, began: float, done: int) -> bool:
        """Pause at random around the rate; False when it is time to stop."""
        if done >= self.wanted:
            return not self.closing.wait(random.uniform(0, 2) * SLOW_PAUSE)
        ahead = done / self.rate - (time.monotonic() - began)
        if ahead > 0:
            time.sleep(random.uniform(0, 2) * min(ahead, 1.0))
        return True


class Producer:
    """One connection."""

    def __init__(self, number: int, seed: int, directory: Path, counts: Counts) -> None:
        """Connect and open the commit log; keys carry the start's own tag, so that a second run continues none."""
        self._random = Random(f"{seed}/{number}")
        self._book = Book(number)
        self._log = CommitLog(directory / f"producer-{number}.jsonl", number)
        self._connection = _connect(number)
        self._counts = counts
        self._number = number

    def run(self, pace: Pace) -> None:
        """Run transactions until the pace says stop."""
        began, done = time.monotonic(), 0
        while pace.wait(self._random, began, done):
            done += self.run_transaction()
        self._log.close()
        self._connection.close()

    def run_transaction(self) -> int:
        """Run one transaction of a random kind; return how many messages it committed."""
        plan = plan_transaction(self._random)
        book = self._book.copy()
        stored: list[Committed] = []
        cursor = self._connection.cursor()
        cursor.execute("BEGIN")
        if plan.kind is Kind.EARLY:
            cursor.execute("INSERT INTO shop.visits (producer) VALUES (%s)", [self._number])
            time.sleep(plan.pause)
        stored += self._insert(cursor, book.draft(self._random, plan.inserts[0]))
        if plan.kind is Kind.SAVEPOINT:
            cursor.execute("SAVEPOINT before_second_thoughts")
            self._insert(cursor, book.copy().draft(self._random, plan.inserts[1]))
            cursor.execute("ROLLBACK TO SAVEPOINT before_second_thoughts")
        if plan.kind in (Kind.PAUSED, Kind.OPEN, Kind.SAVEPOINT):
            time.sleep(plan.pause)
            stored += self._insert(cursor, book.draft(self._random, plan.inserts[1]))
        if plan.kind is Kind.ROLLBACK:
            cursor.execute("ROLLBACK")
            stored = []
        elif self._commit(stored[0]):
            self._log.append(stored[0].pair[0], stored)
            self._book = book
        else:
            stored = []
        self._counts.add(len(stored), plan.kind)
        return len(stored)

    def _insert(self, cursor: psycopg.Cursor[Any], drafts: Sequence[Draft]) -> list[Committed]:
        now = datetime.now(UTC)
        placed = [draft for draft in drafts if draft.sequence == 1]
        if placed:
            orders = {"keys": [d.key for d in placed], "customers": [d.customer for d in placed]}
            cursor.execute(INSERT_ORDERS, orders)
        values = {
            "keys": [d.key for d in drafts],
            "ids": [d.message_id for d in drafts],
            "types": [d.message_type for d in drafts],
            "payloads": [self._payload(d, now) for d in drafts],
        }
        minute = int(now.timestamp()) // 60 * 60
        return [
            Committed(d.message_id, (int(xid), position), d.key, d.sequence, d.cents, minute, self._number)
            for d, (position, xid) in zip(drafts, cursor.execute(INSERT_MESSAGES, values), strict=True)
        ]

    def _payload(self, draft: Draft, now: datetime) -> str:
        payload = {
            "orderKey": draft.key,
            "sequence": draft.sequence,
            "customer": draft.customer,
            "cents": draft.cents,
            "placedAt": now.isoformat(),
        }
        if draft.large:
            payload["note"] = self._random.randbytes(LARGE_BYTES // 2).hex()
        return json.dumps(payload)

    def _commit(self, first: Committed) -> bool:
        """Commit. When the connection is cut meanwhile, ask the database what became of the transaction.

        Its id is not enough: one that was not on the disk when the server crashed is given out again.
        """
        try:
            self._connection.execute("COMMIT")
        except psycopg.OperationalError:
            self._connection = _connect(self._number)
            row = self._connection.execute(HAS_COMMITTED, [str(first.pair[0]), first.message_id]).fetchone()
            return bool(row and row[0])
        return True


def _connect(number: int) -> psycopg.Connection[Any]:
    return psycopg.connect(application_name=f"shop-{number}", autocommit=True, connect_timeout=10)


def _run_thread(producer: Producer, pace: Pace, counts: Counts) -> None:
    try:
        producer.run(pace)
    except BaseException as error:  # noqa: BLE001  # told to the main thread, which ends the process with it
        counts.failure = error


def _close_at_end_of_input(closing: threading.Event) -> None:
    sys.stdin.read()
    closing.set()


def main() -> None:
    """Run the connections and print a line of progress each half second."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--log-dir", type=Path, required=True)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=90, help="spread the messages over about so long")
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    arguments.log_dir.mkdir(parents=True, exist_ok=True)
    counts, closing = Counts(), threading.Event()
    share = -(-arguments.messages // arguments.connections)
    pace = Pace(rate=share / arguments.seconds, wanted=share, closing=closing)
    producers = [Producer(n, arguments.seed, arguments.log_dir, counts) for n in range(arguments.connections)]
    threads = [threading.Thread(target=_run_thread, args=(p, pace, counts), daemon=True) for p in producers]
    threading.Thread(target=_close_at_end_of_input, args=(closing,), daemon=True).start()
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) and counts.failure is None:
        _print_progress(counts)
        threads[0].join(0.5)
    _print_progress(counts)
    if counts.failure is not None:
        raise counts.failure


def _print_progress(counts: Counts) -> None:
    with counts.lock:
        kinds = {kind.name.lower(): number for kind, number in counts.kinds.items()}
        line = json.dumps({"committed": counts.committed, "transactions": kinds})
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
