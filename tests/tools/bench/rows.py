"""The messages of a benchmark: how they get into the outbox, and what the ledger must find of them.

The rows are numbered 1, 2, 3 … by `n`; every field follows from `n`, in SQL here and in Python below, so nothing is
read back from the outbox. 100 rows are one transaction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.tools.ledger.account import Account, Handled, Order, compare
from tests.tools.ledger.commitlog import Committed

if TYPE_CHECKING:
    from collections.abc import Iterable

    import psycopg

KEYS = 1000
"""Different keys, in turn."""
PER_TRANSACTION = 100
BYTES = 206
"""Of a message's data."""
_OTHERS = 97
"""Bytes of the data beside its text."""


def make_row(keys: int = KEYS, size: int = BYTES) -> str:
    """Return what each row is made of, for a statement that reads `n` from generate_series."""
    key = f"'order-' || lpad((n % {keys})::text, 4, '0')"
    text = f"rpad('', {size - _OTHERS} - length(n::text), 'text ')"
    return (
        f"{key} AS key, 'm-' || n AS id, 'OrderPlaced' AS type, jsonb_build_object('orderKey', {key}, "
        f"'sequence', n / {keys} + 1, 'cents', n % 10000, 'n', n, 'status', 'placed', 'text', {text}) AS data"
    )


ROW = make_row()
_INSERT = """
DO $$ DECLARE first bigint := {}; last bigint := {}; BEGIN
    WHILE first <= last LOOP
        INSERT INTO outbox.messages (publication_id, partition_key, message_id, message_type, data)
        SELECT 'bench', key, id, type, data FROM (
            SELECT {} FROM generate_series(first, least(first + {} - 1, last)) AS n) AS row;
        COMMIT;
        first := first + {};
    END LOOP;
END $$"""


def insert(connection: psycopg.Connection[Any], first: int, last: int, row: str = ROW) -> None:
    """Commit the rows `first` to `last` into the outbox."""
    connection.execute(_INSERT.format(first, last, row, PER_TRANSACTION, PER_TRANSACTION))


def key_of(n: int, keys: int = KEYS) -> str:
    """Return the key of row `n`."""
    return f"order-{n % keys:04d}"


def committed(first: int, last: int, keys: int = KEYS) -> list[Committed]:
    """Return what the ledger compares with: the rows `first` to `last`, as they were committed."""
    numbers = range(first, last + 1)
    return [Committed(f"m-{n}", (0, n), key_of(n, keys), n // keys + 1, n % 10_000, 0, 0) for n in numbers]


def handled(n: int, keys: int = KEYS) -> Handled:
    """Return the trace of row `n` in a target that keeps nothing but the number."""
    return Handled(f"m-{n}", key_of(n, keys), n // keys + 1)


def judge(first: int, last: int, found: Iterable[Handled], order: Order, keys: int = KEYS) -> str:
    """Compare a target with what was committed; return what is wrong, or nothing."""
    return describe(compare("", committed(first, last, keys), found, order=order))


def describe(account: Account) -> str:
    """Say in one line what an account found wrong; nothing: the target is exact."""
    wrong = {
        "lost": account.lost,
        "duplicated": account.duplicated,
        "out of order": account.out_of_order or 0,
        "never committed": account.foreign,
        "with another id": account.renamed,
    }
    counts = [f"{number:,} {what}" for what, number in wrong.items() if number]
    if not counts:
        return ""
    return f"{', '.join(counts)} of {account.produced:,} (first: {account.findings[0]})"
