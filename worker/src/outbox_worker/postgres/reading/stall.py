"""Who holds the high-water mark back, and for how long it has stood still: what status, condition and metrics tell.

Any open transaction of the whole server that has written holds it: another database's, and a prepared one, which no
session shows (`pg_prepared_xacts`). Every role sees transaction ids, programs and databases of all sessions. Since when
a session's transaction is open is shown to members of its role and, with `GRANT pg_read_all_stats`, to every role that
has that. What only reads, and a replication slot, hold dead rows (`backend_xmin`, `xmin`) but never the high-water
mark.

A stall lasts since the holder's transaction began or since the first message behind it was stored, whichever is later.
Where the first is hidden from our role, and where no view of the server shows a holder, it is counted from when this
process first saw it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from outbox_core.report import HighWaterMark, HighWaterMarkHolder
from outbox_core.span import format_age
from outbox_sql.guide import quote
from outbox_worker.postgres.call import fetch_dicts, load

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox_worker.postgres.connection import Connection
    from outbox_worker.postgres.reading.messages import MessageReader

_OURS: Final = "outbox "
"""How the application names of our workers begin (`outbox PROCESSOR POD`); the server cuts them at 63 bytes."""


@dataclass(frozen=True, slots=True)
class Writer:
    """One open transaction: a session's (`pid`), or a prepared one (`prepared`, its name).

    Attributes:
        transaction_id: its low 32 bits, as the server's views show it.
        holds: it is the one that the high-water mark waits for.
        age_seconds: since it began or was prepared; None where this role may not see it.

    """

    transaction_id: str
    holds: bool
    pid: int | None
    application: str | None
    database: str | None
    role: str | None
    state: str | None
    prepared: str | None
    age_seconds: float | None
    backend_type: str | None

    @property
    def kind(self) -> str:
        """What `HighWaterMarkHolder` calls it."""
        if self.prepared is not None:
            return "prepared"
        return "session" if self.processor is None else "worker"

    @property
    def processor(self) -> str | None:
        """Which processor's worker it is; None where it is none of ours."""
        if self.application is None or not self.application.startswith(_OURS):
            return None
        return self.application.removeprefix(_OURS).split(" ", 1)[0] or None

    @property
    def pod(self) -> str | None:
        """Of a worker of ours: which pod, perhaps cut short."""
        words = [] if self.processor is None else (self.application or "").split(" ")
        return words[2] if len(words) > 2 else None


@dataclass(frozen=True, slots=True)
class Writers:
    """The high-water mark and the open writers, the oldest first."""

    high_water_mark: str
    writers: tuple[Writer, ...]
    reader: str
    """The role that looked."""

    @property
    def holder(self) -> Writer | None:
        """Which transaction holds the high-water mark back; None when none does, or it ended while we looked."""
        return next((writer for writer in self.writers if writer.holds), None)


def list_writers(connection: Connection) -> Writers:
    """Look once."""
    rows = fetch_dicts(connection, load("list_transactions"))
    [(bound, reader), *_] = [(row.pop("bound"), row.pop("reader")) for row in rows]
    return Writers(bound, tuple(Writer(**row) for row in rows if row["transaction_id"] is not None), reader)


def describe(writer: Writer) -> str:
    """Say who it is and for how long."""
    age = "" if writer.age_seconds is None else f", open for {format_age(writer.age_seconds)}"
    if writer.prepared is not None:
        return f"prepared transaction '{writer.prepared}' of role {writer.role} in database {writer.database}{age}"
    role = f" of role {writer.role}" if writer.role else ""
    where = f" in database {writer.database}" if writer.database else ""
    state = f", {writer.state}" if writer.state else ""
    if writer.processor is not None:
        pod = f" (pod {writer.pod})" if writer.pod else ""
        return f"processor {writer.processor}{pod}: session {writer.pid}{role}{where}{state}{age}"
    named = f", application '{writer.application}'" if writer.application else ""
    kind = "" if writer.backend_type in (None, "client backend") else f"{writer.backend_type}, "
    return f"{kind}session {writer.pid}{role}{where}{named}{state}{age}"


def remedy(writer: Writer) -> str:
    """Say how to end it."""
    if writer.prepared is not None:
        name = _quoted(writer.prepared)
        return f"COMMIT PREPARED {name} or ROLLBACK PREPARED {name}, in database {writer.database}"
    if writer.processor is not None:
        return (
            f"its handler writes and goes on: delivery.timeout of {writer.processor} bounds it; write at the end of "
            "the handler, or lower delivery.batchSize"
        )
    return f"let its program finish, or SELECT pg_terminate_backend({writer.pid})"


def missing_grant(found: Writers) -> str | None:
    """Say which grant shows what is hidden from the role that looked; None where nothing is."""
    if all(writer.age_seconds is not None for writer in found.writers):
        return None
    return (
        "since when sessions of other roles are open is hidden from this role: "
        f"GRANT pg_read_all_stats TO {quote(found.reader)}"
    )


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


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
