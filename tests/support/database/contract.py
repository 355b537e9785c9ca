"""The checkpoint contract by itself: the SQL call as any program makes it, and a model written from the table.

The model knows nothing of the product: pairs are tuples, the steps are those of design section 3, in their order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psycopg

    from tests.support.servers.postgres import Database

Pair = tuple[int, int]
Half = tuple[int | None, int | None]

IGNORED, STORED, AHEAD, OLDER, NOT_OWNER = range(5)
ERROR = -1
NOTHING: Half = (None, None)

STORE = """SELECT outbox.store_processor_checkpoint(
    %s::text, %s::int, %s::text::xid8, %s::bigint, %s::text::xid8, %s::bigint, %s::bigint, %s::uuid)"""
ARTICLE_STORE = "SELECT outbox.store_processor_checkpoint(%s::text, %s::bigint, %s::bigint, %s::text::xid8)"


def _text(value: int | None) -> str | None:
    return None if value is None else str(value)


def store(
    connection: psycopg.Connection[Any],
    new: Half,
    expected: Half = NOTHING,
    *,
    owner: tuple[int | None, str | None] = (None, None),
    processor_id: str = "orders",
    partition: int = 0,
) -> int:
    """Call the function with eight arguments."""
    row = connection.execute(
        STORE, (processor_id, partition, _text(new[0]), new[1], _text(expected[0]), expected[1], *owner)
    ).fetchone()
    assert row is not None
    return int(row[0])


def store_by_position(
    connection: psycopg.Connection[Any],
    position: int,
    expected: int | None,
    transaction_id: int,
    *,
    processor_id="orders",
) -> int:
    """Call the article's form."""
    row = connection.execute(ARTICLE_STORE, (processor_id, position, expected, str(transaction_id))).fetchone()
    assert row is not None
    return int(row[0])


def stored(connection: psycopg.Connection[Any], processor_id: str = "orders", partition: int = 0) -> Pair | None:
    """Read the row as any program would."""
    row = connection.execute(
        "SELECT last_processed_transaction_id::text, last_processed_position FROM outbox.processor_checkpoints "
        "WHERE processor_id = %s AND partition = %s",
        (processor_id, partition),
    ).fetchone()
    return None if row is None else (int(row[0]), row[1])


def put(connection: psycopg.Connection[Any], pair: Pair | None, processor_id: str = "orders") -> None:
    """Edit the row as somebody who should not."""
    connection.execute("DELETE FROM outbox.processor_checkpoints WHERE processor_id = %s", (processor_id,))
    if pair is not None:
        connection.execute(
            "INSERT INTO outbox.processor_checkpoints VALUES (%s, 0, %s::text::xid8, %s)",
            (processor_id, str(pair[0]), pair[1]),
        )


def own(database: Database, token: str, *, processor_id="orders", uid="u1", pod="pod-1", lease="1 hour") -> int:
    """Claim the processor and take its lease; returns the epoch."""
    connection = database.direct()
    claimed = connection.execute(
        "SELECT granted FROM outbox.claim_processor(%s, 'c', 'n', 'a', %s)", (processor_id, uid)
    ).fetchone()
    assert claimed == (True,)
    row = connection.execute(
        "SELECT acquired, epoch FROM outbox.acquire_lease(%s, 0, %s, %s, %s::uuid, %s::interval)",
        (processor_id, uid, pod, token, lease),
    ).fetchone()
    connection.close()
    assert row is not None
    assert row[0] is True
    return int(row[1])


@dataclass
class Model:
    """What the table says, for one processor and partition."""

    row: Pair | None = None
    claimed: bool = False
    live: tuple[int, str] | None = None
    """Epoch and token of the live owner."""
    epoch: int = 0
    unowned_calls: int = 0
    history: list[Any] = field(default_factory=list)

    def store(self, new: Half, expected: Half, owner: tuple[int | None, str | None]) -> int:  # noqa: PLR0911
        # 1: a pair half null, new pair null, new <= expected: error
        if None in new or (expected[0] is None) != (expected[1] is None):
            return ERROR
        if expected[0] is not None and new <= expected:
            return ERROR
        # 2: not those of the live owner; or none is given while a claim exists
        if owner == (None, None):
            if self.claimed:
                self.unowned_calls += 1
                return NOT_OWNER
        elif owner != self.live:
            return NOT_OWNER
        # 3 to 8
        if self.row is not None and self.row == new:
            return IGNORED
        if self.row is None:
            if expected != NOTHING:
                return OLDER
        elif self.row != expected:
            return AHEAD if expected == NOTHING or self.row > expected else OLDER
        self.row = new  # type: ignore[assignment]
        return STORED
