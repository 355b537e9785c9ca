"""For how long the high-water mark has stood still, and who holds it back: what status, condition and metrics tell.

Who it is comes from `writers`. A stall lasts since the holder's transaction began or since the first message behind it
was stored, whichever is later. Where the first is hidden from our role (`GRANT pg_read_all_stats` shows it), and where
no view of the server shows a holder, it is counted from when this process first saw it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from outbox_core.report import HighWaterMark, HighWaterMarkHolder
from outbox_worker.postgres.reading.writers import describe, list_writers, missing_grant, remedy

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox_worker.postgres.connection import Connection
    from outbox_worker.postgres.reading.messages import MessageReader


class HighWaterMarkObserver:
    """Watches the high-water mark of one source over time."""

    def __init__(self, reader: MessageReader, clock: Callable[[], float] = time.monotonic) -> None:
        """Start with nothing seen; `clock` counts seconds."""
        self._reader = reader
        self._clock = clock
        self._transaction_id: str | None = None
        self._since = 0.0

    def observe(self, connection: Connection) -> HighWaterMark:
        """Look at the high-water mark; its age is 0 while no committed message waits behind it."""
        found = observe_high_water_mark(connection)
        waiting = self._reader.waiting_seconds(connection)
        now = self._clock()
        if waiting is None:
            self._transaction_id = None
            return HighWaterMark(transaction_id=found.transaction_id, age_seconds=0.0)
        if found.transaction_id != self._transaction_id:
            self._transaction_id, self._since = found.transaction_id, now
        # A table without a column for it says 0: then the holder's age counts alone.
        known = min(found.age_seconds, waiting) if waiting else found.age_seconds
        return found.model_copy(update={"age_seconds": max(known, now - self._since)})


def observe_high_water_mark(connection: Connection) -> HighWaterMark:
    """Look once: the high-water mark, who holds it, and for how long as far as this role may see (else 0)."""
    found = list_writers(connection)
    holder = found.holder
    if holder is None:
        return HighWaterMark(transaction_id=found.high_water_mark, age_seconds=0.0)
    grant = missing_grant(found) if holder.age_seconds is None else None
    return HighWaterMark(
        transaction_id=found.high_water_mark,
        age_seconds=holder.age_seconds or 0.0,
        holder=describe(holder),
        held_by=HighWaterMarkHolder.model_validate(holder, from_attributes=True),
        others=len(found.writers) - 1,
        remedy=remedy(holder) if grant is None else f"{remedy(holder)}; {grant}",
    )
