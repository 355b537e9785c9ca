"""Measures mode Competing: rate and size before, while and after another transaction holds an old snapshot.

python -m tests.load.competing [--queue] [--batches 30000] [--size 10] [--snapshot read|write]

A consumer takes batches, reads them, calls a function for each message and completes each batch in a transaction, while
messages are stored between. It prints batches and messages a second, pages visited for a batch, and the tables' sizes,
for each tenth.
"""

from __future__ import annotations

import argparse
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from outbox_core.competing import NothingTaken, Work
from outbox_core.report import ResourceRef
from outbox_core.spec import Competing, StartFrom
from outbox_worker.postgres import competing, ownership
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.window import Stretch
from tests.support.postgres import Servers, build_source

if TYPE_CHECKING:
    import psycopg

    from tests.support.postgres import Database

KEY = ProcessorKey("outbox", "measured")
_SIZES = """
SELECT coalesce(sum(pg_total_relation_size(i.inhrelid)), 0)::bigint FROM pg_inherits i
WHERE i.inhparent = ANY (%s::regclass[])"""


class Measure:
    """One consumer, one producer, one observer."""

    def __init__(self, database: Database, *, queue: bool, size: int) -> None:
        self.connection = database.direct()
        self.settings = Competing(queue="measured" if queue else None)
        self.table = "queue_measured" if queue else "messages"
        ownership.claim(self.connection, KEY, ResourceRef(cluster="c", namespace="n", name="a", uid="u"))
        if queue:
            competing.ensure_queue(self.connection, "outbox", "measured", create=True)
        consumer = competing.Consumer("me", "pod", "u", timedelta(minutes=1))
        competing.join(self.connection, KEY, consumer, build_source(), self.settings, StartFrom())
        self.taker = competing.BatchTaker(KEY, consumer, build_source(), self.settings, size)
        self.handled = 0

    def produce(self, count: int) -> None:
        self.connection.execute(
            f"INSERT INTO outbox.{self.table} (message_type, data) "
            "SELECT 't', jsonb_build_object('n', n, 'text', repeat('x', 150)) FROM generate_series(1, %s) AS n",
            (count,),
        )

    def handle(self, _message: object) -> None:
        """What a user's function would do."""
        self.handled += 1

    def run(self, batches: int, maintain_every: float = 2.0) -> float:
        """Take and complete so many batches; return the seconds."""
        started = time.monotonic()
        done, next_look = 0, started + maintain_every
        while done < batches:
            work = self.taker.cut(self.connection)
            if isinstance(work, NothingTaken):
                if not work.moved:
                    break
                continue
            self.complete(work)
            done += 1
            if time.monotonic() > next_look:
                competing.maintain(self.connection, KEY, self.settings)
                next_look = time.monotonic() + maintain_every
        return time.monotonic() - started

    def complete(self, work: Work) -> None:
        for message in self.taker.reader.fetch(self.connection, Stretch.of(work)):
            self.handle(message)
        with self.connection.transaction():
            if not self.taker.complete(self.connection, work, work.upto, work.count):
                raise AssertionError("lost a batch")

    def visited(self) -> int:
        """Pages that the server has looked at since it started: work that other load on the machine does not change."""
        self.connection.execute("SELECT pg_stat_force_next_flush()")
        self.connection.execute("SELECT pg_stat_clear_snapshot()")
        row = self.connection.execute(
            "SELECT blks_hit + blks_read FROM pg_stat_database WHERE datname = current_database()"
        ).fetchone()
        return int(row[0]) if row else 0

    def sizes(self) -> str:
        def of(*tables: str) -> int:
            row = self.connection.execute(_SIZES, ([f"outbox.{table}" for table in tables],)).fetchone()
            return int(row[0]) // 1024 if row else 0

        state = of("competing_batches", "competing_frontiers")
        return f"state {state} kB" + (f", queue {of(self.table)} kB" if self.table != "messages" else "")


def measure(measured: Measure, phase: str, batches: int, size: int) -> float:
    """Produce and handle a tenth; print and return messages a second."""
    measured.produce(batches * size)
    pages = measured.visited()
    seconds = measured.run(batches)
    pages = (measured.visited() - pages) // batches
    rate = batches * size / seconds
    print(
        f"{phase:<8} {batches / seconds:8.0f} batches/s {rate:9.0f} messages/s {pages:5} pages/batch   "
        f"{measured.sizes()}",
        flush=True,
    )
    return rate


def hold(connection: psycopg.Connection[Any], kind: str) -> None:
    """Hold the horizon: an old snapshot, or a transaction that has written."""
    connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    connection.execute("SELECT pg_current_xact_id()" if kind == "write" else "SELECT 1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queue", action="store_true", help="a queue of its own; else the outbox")
    parser.add_argument("--batches", type=int, default=30_000, help="while the snapshot is held")
    parser.add_argument("--size", type=int, default=10, help="messages in a batch")
    parser.add_argument("--snapshot", choices=("read", "write"), default="read", help="who holds the horizon")
    given = parser.parse_args()
    servers = Servers()
    try:
        with servers.database() as database:
            measured = Measure(database, queue=given.queue, size=given.size)
            tenth = given.batches // 10
            measure(measured, "warm", tenth, given.size)
            before = [measure(measured, "before", tenth, given.size) for _ in range(3)]
            holder = database.direct(autocommit=False)
            hold(holder, given.snapshot)
            held = [measure(measured, f"held {n}", tenth, given.size) for n in range(1, 11)]
            holder.rollback()
            measure(measured, "after", tenth, given.size)
            mean, last = sum(before) / len(before), sum(held[-3:]) / 3
            print(f"before {mean:.0f}/s, last three under the snapshot {last:.0f}/s: {last / mean - 1:+.1%}")
    finally:
        servers.stop()


if __name__ == "__main__":
    main()
