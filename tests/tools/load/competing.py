"""Measures mode Competing, and the storing of a checkpoint, while another transaction holds an old snapshot.

python -m tests.tools.load.competing [--minutes 10] [--queue] [--size 10] [--snapshot read|write] [--phase 5]

A busy machine is told from a slow table by a twin: two databases of one server do the same work in turns of a few
seconds. In one of them another transaction holds the horizon; in the other nobody does. One that has written (`write`)
keeps nothing from being emptied; an old snapshot (`read`) does, for a dump's sake: tables grow until it ends. Each pair
of turns gives a ratio, and medians of ratios are compared: before anybody holds anything, in each third of the time,
and after.

A turn: a consumer takes batches, reads them, calls a function for each message and completes each batch in a
transaction, while messages are stored between; then an owner of mode Ordered stores its checkpoint again and again,
each time in a transaction of its own.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from outbox_core.processor.claimed_batch import ClaimedBatch
from outbox_core.processor.outcomes import HeldLease, NothingTaken
from outbox_core.progress.checkpoint import Checkpoint, StoreAnswer
from outbox_core.report import ResourceRef
from outbox_core.spec import Competing, StartFrom
from outbox_worker.postgres.feeds import competing
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.ownership import leases as ownership
from outbox_worker.postgres.progress import checkpoints
from outbox_worker.postgres.reading.read_range import ReadRange
from tests.support.servers.postgres import Servers, build_source

if TYPE_CHECKING:
    import psycopg

    from tests.support.servers.postgres import Database

KEY = ProcessorKey("outbox", "measured")
ORDERED = ProcessorKey("outbox", "ordered")
RESOURCE = ResourceRef(cluster="c", namespace="n", name="a", uid="u")
STORES = 400
"""Checkpoints stored in a turn."""
CHUNK = 10
"""Stored at a time, now by the one and now by the other: what the machine does besides strikes both alike."""
ALLOWED = 0.10
"""What a held snapshot may cost, by the issue that this answers."""
_SIZES = """
SELECT coalesce(sum(pg_total_relation_size(i.inhrelid)), 0)::bigint FROM pg_inherits i
WHERE i.inhparent = ANY (%s::regclass[])"""


class Measure:
    """One consumer, one producer, one observer."""

    def __init__(self, database: Database, *, queue: bool, size: int) -> None:
        self.connection = database.direct()
        self.settings = Competing(queue="measured" if queue else None)
        self.table = "queue_measured" if queue else "messages"
        ownership.claim(self.connection, KEY, RESOURCE)
        if queue:
            competing.ensure_queue(self.connection, "outbox", "measured", create=True)
        consumer = competing.Consumer("me", "pod", "u", timedelta(minutes=1))
        competing.join(self.connection, KEY, consumer, build_source(), self.settings, StartFrom())
        self.taker = competing.BatchTaker(KEY, consumer, build_source(), self.settings, size)
        self.size = size
        self.handled = 0
        self.token = uuid4()
        ownership.claim(self.connection, ORDERED, RESOURCE)
        lease = ownership.acquire_lease(
            self.connection, ORDERED, claim_uid="u", pod="pod", token=self.token, lease=timedelta(hours=1)
        )
        self.epoch, self.stored = lease.epoch, Checkpoint(7, 0)
        self.store(None)

    def produce(self, count: int) -> None:
        self.connection.execute(
            f"INSERT INTO outbox.{self.table} (message_type, data) "
            "SELECT 't', jsonb_build_object('n', n, 'text', repeat('x', 150)) FROM generate_series(1, %s) AS n",
            (count,),
        )

    def handle(self, _message: object) -> None:
        """What a user's function would do."""
        self.handled += 1

    def run(self, seconds: float) -> float:
        """Take and complete batches for so long; return messages a second of taking and completing alone."""
        before, spent = self.handled, 0.0
        while spent < seconds:
            self.produce(100 * self.size)
            started = time.monotonic()
            while not isinstance(claimed := self.taker.claim_next(self.connection), NothingTaken) or claimed.moved:
                if isinstance(claimed, ClaimedBatch):
                    self.complete(claimed)
            spent += time.monotonic() - started
            competing.advance_checkpoint(self.connection, KEY)
            competing.empty_tables(self.connection, KEY, self.settings)
        return (self.handled - before) / spent

    def store(self, expected: Checkpoint | None) -> None:
        """Store the next checkpoint in a transaction of its own."""
        with self.connection.transaction():
            lease, new = HeldLease(0, self.epoch or 0, self.token), Checkpoint(7, self.stored.position + 1)
            answer = checkpoints.store(self.connection, ORDERED, lease, new=new, expected=expected)
            if answer is not StoreAnswer.STORED:
                raise AssertionError(answer)
        self.stored = Checkpoint(7, self.stored.position + 1)

    def time_stores(self) -> list[float]:
        """Store a few checkpoints; return their times in microseconds."""
        times = []
        for _ in range(CHUNK):
            started = time.perf_counter()
            self.store(self.stored)
            times.append((time.perf_counter() - started) * 1e6)
        return times

    def complete(self, claimed: ClaimedBatch) -> None:
        for message in self.taker.reader.fetch(self.connection, ReadRange.of(claimed)):
            self.handle(message)
        with self.connection.transaction():
            if not self.taker.complete(self.connection, claimed, claimed.upto, claimed.count):
                raise AssertionError("lost a batch")

    def sizes(self) -> str:
        def of(*tables: str) -> int:
            row = self.connection.execute(_SIZES, ([f"outbox.{table}" for table in tables],)).fetchone()
            return int(row[0]) // 1024 if row else 0

        state = of("competing_batches", "competing_dispatch_positions")
        row = self.connection.execute("SELECT pg_total_relation_size('outbox.processor_checkpoints')").fetchone()
        kept = int(row[0]) // 1024 if row else 0
        return f"state {state} kB, checkpoints {kept} kB" + (
            f", queue {of(self.table)} kB" if self.table != "messages" else ""
        )


@dataclass(frozen=True)
class Pair:
    """One turn of each: how the held one did, in parts of the free one."""

    phase: str
    rate: float
    store: float


def hold(connection: psycopg.Connection[Any], kind: str) -> None:
    """Hold the horizon: an old snapshot, or a transaction that has written."""
    connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    connection.execute("SELECT pg_current_xact_id()" if kind == "write" else "SELECT 1")


def take_turns(phase: str, held: Measure, free: Measure, seconds: float, *, held_first: bool) -> Pair:
    """Let both do the same, one after the other; print and return how they compare."""
    both = (held, free) if held_first else (free, held)
    rates = {each: each.run(seconds) for each in both}
    times: dict[Measure, list[float]] = {held: [], free: []}
    for _ in range(STORES // CHUNK):
        for each in both:
            times[each] += each.time_stores()
    stores = {each: median(found) for each, found in times.items()}
    pair = Pair(phase, rates[held] / rates[free], stores[held] / stores[free])
    print(
        f"{phase:<8} rate {rates[held]:8.0f} : {rates[free]:8.0f} messages/s = {pair.rate:5.2f}   "
        f"store {stores[held]:6.0f} : {stores[free]:6.0f} us = {pair.store:5.2f}   {held.sizes()}",
        flush=True,
    )
    return pair


def run_phase(phase: str, both: tuple[Measure, Measure], seconds: float, turn: float, least: int = 4) -> list[Pair]:
    """Take turns for so long, and `least` times at least; each goes first every other time."""
    pairs: list[Pair] = []
    until = time.monotonic() + seconds
    while len(pairs) < least or time.monotonic() < until:
        pairs.append(take_turns(phase, *both, turn, held_first=len(pairs) % 2 == 0))
    return pairs


def conclude(pairs: list[Pair], phases: list[str]) -> int:
    """Print the medians of each phase, as parts of the first one's; return 0, or 1 if a held snapshot costs too much.

    The spread says how far to trust them: half of the ratios lie within it. 2: too far apart before anything was held.
    """

    def of(phase: str, name: str) -> list[float]:
        return sorted(getattr(each, name) for each in pairs if each.phase == phase)

    base = {name: median(of(phases[0], name)) for name in ("rate", "store")}
    kept, quiet = True, True
    for phase in phases:
        said = []
        for name, worse in (("rate", -1), ("store", 1)):
            found = of(phase, name)
            change = median(found) / base[name] - 1
            spread = found[len(found) * 3 // 4] - found[len(found) // 4]
            said.append(f"{name} {change:+.1%} (spread {spread:.2f}, {len(found)} pairs)")
            quiet = quiet and (phase != phases[0] or spread <= 2 * ALLOWED)
            kept = kept and (not phase.startswith("held") or worse * change <= ALLOWED)
        print(f"{phase:<8} {'   '.join(said)}")
    answer = "yes" if kept else "NO"
    print(
        f"under the snapshot within {ALLOWED:.0%} of before: {answer if quiet else 'the machine is too busy to tell'}"
    )
    return 0 if kept and quiet else 1 if quiet else 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queue", action="store_true", help="a queue of its own; else the outbox")
    parser.add_argument("--minutes", type=float, default=10.0, help="for which the snapshot is held")
    parser.add_argument("--phase", type=float, default=5.0, help="seconds of one turn")
    parser.add_argument("--size", type=int, default=10, help="messages in a batch")
    parser.add_argument("--snapshot", choices=("read", "write"), default="write", help="who holds the horizon")
    given = parser.parse_args()
    servers = Servers()
    seconds = given.minutes * 60
    phases = ["before", "held 1/3", "held 2/3", "held 3/3", "after"]
    try:
        with ExitStack() as stack:
            databases = [stack.enter_context(servers.database()) for _ in range(2)]
            held, free = (Measure(each, queue=given.queue, size=given.size) for each in databases)
            run_phase("warm", (held, free), 0, given.phase, least=2)
            pairs = run_phase("before", (held, free), seconds / 5, given.phase)
            holder = databases[0].direct(autocommit=False)
            hold(holder, given.snapshot)
            began = time.monotonic()
            for phase in phases[1:4]:
                pairs += run_phase(phase, (held, free), seconds / 3, given.phase)
            print(f"the snapshot was held for {(time.monotonic() - began) / 60:.1f} minutes", flush=True)
            holder.rollback()
            pairs += run_phase("after", (held, free), seconds / 10, given.phase)
            return conclude(pairs, phases)
    finally:
        servers.stop()


if __name__ == "__main__":
    sys.exit(main())
