"""Who holds the reading bound back.

Any open transaction of the whole server that has written holds it: another database's, and a prepared one, which no
session shows (`pg_prepared_xacts`). Every role sees the transaction ids, programs and databases of all sessions; when
a session's transaction began is shown to members of its role and, with `GRANT pg_read_all_stats`, to ours. Without it
the age is counted from when this process first saw the bound.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from outbox_core.report import Bound
from outbox_worker.postgres.errors import translated
from outbox_worker.postgres.queries import load

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    from outbox_worker.postgres.messages import MessageReader


class BoundObserver:
    """Watches the bound of one source over time."""

    def __init__(self, reader: MessageReader, clock: Callable[[], float] = time.monotonic) -> None:
        """Start with nothing seen; `clock` counts seconds."""
        self._reader = reader
        self._clock = clock
        self._transaction_id = ""
        self._since = 0.0

    def observe(self, connection: psycopg.Connection[Any]) -> Bound:
        """Look at the bound; its age is 0 while no committed message waits behind it."""
        found = observe_bound(connection)
        now = self._clock()
        if found.transaction_id != self._transaction_id:
            self._transaction_id, self._since = found.transaction_id, now
        if found.holder is None or not self._reader.has_waiting(connection):
            return Bound(transaction_id=found.transaction_id, age_seconds=0.0)
        return found.model_copy(update={"age_seconds": max(found.age_seconds, now - self._since)})


def observe_bound(connection: psycopg.Connection[Any]) -> Bound:
    """Look once: the bound, who holds it, and for how long as far as this role may see (else 0)."""
    with translated():
        row = connection.execute(load("observe_bound")).fetchone()
    if row is None:
        return Bound(transaction_id="0", age_seconds=0.0)
    transaction_id, pid, application, database, user, gid, prepared_in, age = row
    holder = None
    if gid is not None:
        holder = (
            f"prepared transaction '{gid}' in database {prepared_in} (COMMIT PREPARED or ROLLBACK PREPARED it there)"
        )
    elif pid is not None:
        named = f", application '{application}'" if application else ""
        holder = f"session {pid} of role {user} in database {database}{named}"
    return Bound(transaction_id=transaction_id, age_seconds=max(0.0, age or 0.0), holder=holder)
