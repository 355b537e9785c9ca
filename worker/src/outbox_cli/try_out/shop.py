"""The shop: eight connections that place orders, each storing its messages in the transaction of its own state.

Some transactions pause and commit late, some roll back, whole or to a savepoint, some take their transaction id long
before they write a message. Each connection keeps a commit log: one line for each transaction, written after COMMIT was
answered. Those logs are what was produced.
"""

from __future__ import annotations

import json
import signal
import threading
import uuid
from dataclasses import dataclass, field
from enum import Enum
from random import Random
from typing import TYPE_CHECKING, Any, Final

import psycopg

from outbox_cli.try_out.ledger import Message

if TYPE_CHECKING:
    from mmap import mmap
    from pathlib import Path

    from outbox_worker.postgres.connection import Connection

CONNECTIONS: Final = 8
APPLICATION: Final = "outbox-try-shop"
_CUSTOMERS: Final = 200
_OPEN_ORDERS: Final = 6
"""Orders of one connection that take turns."""
_TYPES: Final = ("OrderPlaced", "OrderLineAdded", "OrderPaid", "OrderShipped")
_MOST: Final = 8
"""Messages of one insert."""
_PAUSE: Final = 0.45
"""Seconds, on average, between two transactions of a connection."""
_INSERT_ORDERS: Final = """
INSERT INTO shop.orders (order_key, customer)
SELECT * FROM unnest(%(keys)s::text[], %(customers)s::text[])
"""
_INSERT_MESSAGES: Final = """
INSERT INTO outbox.messages (publication_id, partition_key, message_id, message_type, data)
SELECT 'orders', key, id, type, payload
FROM unnest(%(keys)s::text[], %(ids)s::text[], %(types)s::text[], %(payloads)s::jsonb[]) AS m (key, id, type, payload)
RETURNING position, transaction_id::text
"""


class Kind(Enum):
    """What a transaction does, and of a hundred so many."""

    QUICK = 58
    LATE = 18
    EARLY = 9
    SAVEPOINT = 6
    ROLLED_BACK = 8
    OPEN = 1


_KINDS: Final = tuple(Kind)
_WEIGHTS: Final = tuple(kind.value for kind in Kind)


@dataclass(slots=True)
class Orders:
    """The open orders of one connection: how many messages each has. Copied for what may be rolled back."""

    producer: int
    open: dict[str, int] = field(default_factory=dict)
    placed: int = 0

    def copy(self) -> Orders:
        """Return orders to try things with."""
        return Orders(self.producer, dict(self.open), self.placed)

    def draw(self, random: Random) -> tuple[str, str]:
        """Choose the next message's key and type."""
        if len(self.open) < _OPEN_ORDERS:
            self.placed += 1
            key = f"order-{self.producer}-{self.placed}"
        else:
            key = random.choice(tuple(self.open))
        step = self.open.get(key, 0)
        self.open[key] = step + 1
        if step + 1 == len(_TYPES):
            del self.open[key]
        return key, _TYPES[step]


class Producer:
    """One connection."""

    def __init__(self, number: int, uri: str, folder: Path, counters: Counters, closing: threading.Event) -> None:
        self._number = number
        self._uri = uri
        self._folder = folder
        self._counters = counters
        self._closing = closing
        self._random = Random()  # noqa: S311  # chance, not a secret
        self._orders = Orders(number)

    def run(self) -> None:
        """Place orders until the shop closes."""
        connection = psycopg.connect(self._uri, application_name=APPLICATION, autocommit=True)
        with connection, (self._folder / f"producer-{self._number}.jsonl").open("a", encoding="utf-8") as log:
            while not self._closing.is_set():
                log.write(json.dumps(self._run_transaction(connection), separators=(",", ":")) + "\n")
                log.flush()
                self._closing.wait(self._random.uniform(0, 2 * _PAUSE))

    def _run_transaction(self, connection: Connection) -> dict[str, list[Any]]:
        """Run one; return what it committed and what it rolled back."""
        kind = self._random.choices(_KINDS, _WEIGHTS)[0]
        orders = self._orders.copy()
        cursor = connection.cursor()
        cursor.execute("BEGIN")
        if kind is Kind.EARLY:
            cursor.execute("SELECT pg_current_xact_id()")
            self._pause(0.3)
        stored, undone = self._insert(cursor, orders), []
        if kind is Kind.SAVEPOINT:
            cursor.execute("SAVEPOINT before_second_thoughts")
            undone = self._insert(cursor, orders.copy())
            cursor.execute("ROLLBACK TO SAVEPOINT before_second_thoughts")
        if kind in {Kind.LATE, Kind.OPEN, Kind.SAVEPOINT}:
            self._pause(2.0 if kind is Kind.OPEN else 0.3)
            stored += self._insert(cursor, orders)
        if kind is Kind.ROLLED_BACK:
            cursor.execute("ROLLBACK")
            stored, undone = [], stored
        else:
            cursor.execute("COMMIT")
            self._orders = orders
        self._counters.add(self._number, len(stored), len(undone))
        return {"committed": stored, "undone": [message_id for message_id, *_ in undone]}

    def _pause(self, seconds: float) -> None:
        self._closing.wait(self._random.uniform(0, 2 * seconds))

    def _insert(self, cursor: psycopg.Cursor[Any], orders: Orders) -> list[list[Any]]:
        """Store some messages; return id, key, transaction id and position of each."""
        drawn = [orders.draw(self._random) for _ in range(self._random.randint(1, _MOST))]
        customers = [f"customer-{self._random.randrange(_CUSTOMERS)}" for _ in drawn]
        if placed := [(key, who) for (key, type_), who in zip(drawn, customers, strict=True) if type_ == _TYPES[0]]:
            cursor.execute(
                _INSERT_ORDERS, {"keys": [key for key, _ in placed], "customers": [who for _, who in placed]}
            )
        ids = [str(uuid.uuid4()) for _ in drawn]
        payloads = [json.dumps({"customer": who, "cents": self._random.randrange(100, 100_000)}) for who in customers]
        values = {"keys": [k for k, _ in drawn], "ids": ids, "types": [t for _, t in drawn], "payloads": payloads}
        rows = cursor.execute(_INSERT_MESSAGES, values).fetchall()
        return [
            [message_id, key, int(transaction_id), position]
            for message_id, (key, _), (position, transaction_id) in zip(ids, drawn, rows, strict=True)
        ]


class Counters:
    """How many messages each connection has committed and rolled back, in memory that two processes share."""

    SIZE: Final = 2 * CONNECTIONS * 8
    """Bytes."""

    def __init__(self, memory: mmap) -> None:
        """Use anonymous shared memory of SIZE bytes."""
        self._numbers = memoryview(memory).cast("q")

    def add(self, producer: int, committed: int, rolled_back: int) -> None:
        """Count one transaction. Each number has one writer."""
        self._numbers[producer] += committed
        self._numbers[CONNECTIONS + producer] += rolled_back

    @property
    def committed(self) -> int:
        """Messages in committed transactions."""
        return sum(self._numbers[:CONNECTIONS])

    @property
    def rolled_back(self) -> int:
        """Messages that were stored and rolled back."""
        return sum(self._numbers[CONNECTIONS:])


def run_shop(uri: str, folder: Path, counters: Counters) -> int:
    """Run all connections until SIGTERM; return the exit status."""
    closing = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: closing.set())
    failed: list[BaseException] = []

    def run(number: int) -> None:
        try:
            Producer(number, uri, folder, counters, closing).run()
        except BaseException as err:
            failed.append(err)
            closing.set()
            raise

    threads = [threading.Thread(target=run, args=(number,)) for number in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    while not closing.wait(0.5):
        pass
    for thread in threads:
        thread.join()
    return 1 if failed else 0


def read_commit_logs(folder: Path) -> tuple[list[Message], set[str]]:
    """Read every message that a producer knows to be committed, and the ids of those that it rolled back."""
    committed: list[Message] = []
    undone: set[str] = set()
    for path in sorted(folder.glob("producer-*.jsonl")):
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                if not line.endswith("\n"):
                    break  # cut off: the producer was killed while it wrote
                entry = json.loads(line)
                committed += [Message(str(m), str(k), (int(x), int(p))) for m, k, x, p in entry["committed"]]
                undone.update(entry["undone"])
    return committed, undone
