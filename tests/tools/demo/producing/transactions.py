"""PURE: what a producer does in its next transaction, drawn from a seeded generator.

The mix is what makes an outbox hard to read: transactions that roll back leave gaps, ones that pause commit positions
out of order, ones that take their id early and add messages late turn (transaction_id, position) against the positions,
and ones that stay open for seconds hold the high-water mark.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final
from uuid import UUID

if TYPE_CHECKING:
    from random import Random

LARGE_SHARE: Final = 0.004
"""Of the messages; these carry more than 8 kB that do not compress."""
LARGE_BYTES: Final = 9_000
MOST_IN_ONE_INSERT: Final = 60
OPEN_ORDERS: Final = 12
"""Orders of one producer that take turns."""
TYPES: Final = ("OrderPlaced", "OrderLineAdded", "OrderPaid", "OrderShipped")


class Kind(StrEnum):
    """The shape of one transaction."""

    QUICK = "quick"
    PAUSED = "paused between two inserts"
    EARLY = "takes its id early, writes messages late"
    SAVEPOINT = "rolls back to a savepoint"
    ROLLBACK = "rolls back"
    OPEN = "stays open for seconds"


_WEIGHTS: Final = {
    Kind.QUICK: 600,
    Kind.PAUSED: 170,
    Kind.EARLY: 80,
    Kind.SAVEPOINT: 80,
    Kind.ROLLBACK: 64,
    Kind.OPEN: 6,
}


@dataclass(frozen=True, slots=True)
class Transaction:
    """One transaction: so many messages in each insert, a pause between them."""

    kind: Kind
    inserts: tuple[int, int]
    pause: float


@dataclass(frozen=True, slots=True)
class Draft:
    """A message before it is stored."""

    message_id: str
    message_type: str
    key: str
    sequence: int
    customer: str
    cents: int
    large: bool


@dataclass(slots=True)
class Book:
    """A producer's open orders: how many messages each has. Copied for what may be rolled back."""

    producer: int
    open: dict[str, int] = field(default_factory=dict)
    placed: int = 0

    def copy(self) -> Book:
        """Return a book to try things in."""
        return Book(self.producer, dict(self.open), self.placed)

    def draft(self, random: Random, count: int) -> list[Draft]:
        """Write down the next messages of some orders."""
        return [self._draft_one(random) for _ in range(count)]

    def _draft_one(self, random: Random) -> Draft:
        if len(self.open) < OPEN_ORDERS:
            self.placed += 1
            key = f"order-{self.producer}-{self.placed}"
        else:
            key = random.choice(tuple(self.open))
        sequence = self.open.get(key, 0) + 1
        self.open[key] = sequence
        if sequence == len(TYPES):
            del self.open[key]
        return Draft(
            message_id=str(UUID(int=random.getrandbits(128))),
            message_type=TYPES[sequence - 1],
            key=key,
            sequence=sequence,
            customer=f"customer-{random.randrange(500)}",
            cents=random.randrange(100, 100_000),
            large=random.random() < LARGE_SHARE,
        )


def plan_transaction(random: Random, most: int = MOST_IN_ONE_INSERT) -> Transaction:
    """Draw the next transaction; `most` messages in one insert."""
    kind = random.choices(tuple(_WEIGHTS), tuple(_WEIGHTS.values()))[0]
    inserts = (random.randint(1, most), random.randint(1, most))
    match kind:
        case Kind.OPEN:
            pause = random.uniform(1.5, 4.0)
        case Kind.QUICK | Kind.ROLLBACK:
            pause = 0.0
        case _:
            pause = random.uniform(0.01, 0.3)
    return Transaction(kind, inserts, pause)
