"""Asks whether the lease is ours in the round trip that reads a batch, instead of in one of its own after it.

What is handed over cannot be recalled, so the answer counts for a moment only, from before the question was sent: a
process that was frozen meanwhile, or a read that took long, has to ask again.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from psycopg import sql

from outbox_worker.postgres.call import compose_call
from outbox_worker.postgres.errors import translated

if TYPE_CHECKING:
    from datetime import timedelta

    from outbox_core.processor.outcomes import HeldLease
    from outbox_worker.postgres.connection import Connection
    from outbox_worker.postgres.key import ProcessorKey

FRESH: Final = 0.05
"""Seconds for which an answer counts."""


class LeaseLook:
    """About the lease of one unit, beside each read of its messages."""

    def __init__(self, key: ProcessorKey, lease: timedelta) -> None:
        """Ask about nothing yet; `lease` is how long a lease lasts."""
        self._key = key
        self._seconds = lease
        self._lease: HeldLease | None = None
        self._statement: sql.Composable = sql.SQL("SELECT NULL")
        self._fresh_until = 0.0

    def ask(self, lease: HeldLease) -> None:
        """Ask about this lease from now on."""
        self._fresh_until = 0.0
        if lease != self._lease:
            key, self._lease = self._key, lease
            self._statement = compose_call(
                key.schema, "keep_lease", **key.names, epoch=lease.epoch, token=lease.token,
                lease=self._seconds,
            )  # fmt: skip

    def is_fresh(self, lease: HeldLease) -> bool:
        """Say whether the database just said that this lease is ours, with four fifths of its time or more."""
        return self._lease == lease and time.monotonic() < self._fresh_until

    def read(self, connection: Connection, statement: sql.Composable) -> list[tuple[Any, ...]]:
        """Return the rows of a statement that has no parameters, and take what is said of the lease after it."""
        asked = time.monotonic()
        with translated():
            cursor = connection.execute(sql.SQL("{}; {}").format(statement, self._statement))
            rows: list[tuple[Any, ...]] = cursor.fetchall()
            kept = cursor.fetchone() if cursor.nextset() else None
        if kept is not None and kept[0] is True:
            self._fresh_until = asked + FRESH
        return rows
