"""The messages of a benchmark: how they get into the outbox, and what the ledger must find of them.

The rows are numbered 1, 2, 3 … by `n`; every field follows from `n`, in SQL here and in Python below, so nothing is
read back from the outbox. 100 rows are one transaction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, LiteralString

from tests.tools.ledger.account import Account, Handled, Order, compare
from tests.tools.ledger.commitlog import Committed

if TYPE_CHECKING:
    from collections.abc import Iterable

    import psycopg

KEYS = 1000
"""Different keys, in turn."""
PER_TRANSACTION = 100
_DATA: LiteralString = (
    "jsonb_build_object('orderKey', 'order-' || lpad((n % 1000)::text, 4, '0'), 'sequence', n / 1000 + 1, "
    "'cents', n % 10000, 'n', n, 'status', 'placed', 'text', rpad('', 109 - length(n::text), 'text '))"
)
ROW: LiteralString = (
    "'order-' || lpad((n % 1000)::text, 4, '0') AS key, 'm-' || n AS id, 'OrderPlaced' AS type, " + _DATA + " AS data"
)
"""What each row is made of, for a statement that reads `n` from generate_series."""
_INSERT: LiteralString = """
DO $$ DECLARE first bigint := {}; last bigint := {}; BEGIN
    WHILE first <= last LOOP
        INSERT INTO outbox.messages (publication_id, partition_key, message_id, message_type, data)
        SELECT 'bench', key, id, type, data FROM (
            SELECT {} FROM generate_series(first, least(first + {} - 1, last)) AS n) AS row;
        COMMIT;
        first := first + {};
    END LOOP;
END $$"""


def insert(connection: psycopg.Connection[Any], first: int, last: int) -> None:
    """Commit the rows `first` to `last` into the outbox."""
    connection.execute(_INSERT.format(first, last, ROW, PER_TRANSACTION, PER_TRANSACTION))


def key_of(n: int) -> str:
    """Return the key of row `n`."""
    return f"order-{n % KEYS:04d}"


def committed(first: int, last: int) -> list[Committed]:
    """Return what the ledger compares with: the rows `first` to `last`, as they were committed."""
    return [Committed(f"m-{n}", (0, n), key_of(n), n // KEYS + 1, n % 10_000, 0, 0) for n in range(first, last + 1)]


def handled(n: int) -> Handled:
    """Return the trace of row `n` in a target that keeps nothing but the number."""
    return Handled(f"m-{n}", key_of(n), n // KEYS + 1)


def judge(first: int, last: int, found: Iterable[Handled], order: Order) -> str:
    """Compare a target with what was committed; return what is wrong, or nothing."""
    return describe(compare("", committed(first, last), found, order=order))


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
