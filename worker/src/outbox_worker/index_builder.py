"""Builds the index by slots in a thread of its own, or tells a person how: partitions are read by a scan meanwhile.

A build takes as long as the outbox is large and waits for every transaction that writes into it; the loop, which holds
leases and handles messages, must not wait for that. No liveness hangs on this thread.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from outbox_worker.background import BackgroundThread
from outbox_worker.postgres.errors import DatabaseError
from outbox_worker.postgres.reading.slots import ensure_slot_index

if TYPE_CHECKING:
    from outbox_core.spec import PartitionKey, Source
    from outbox_worker.observe.observer import Observer
    from outbox_worker.observe.status import ProcessStatus
    from outbox_worker.postgres.connection import Connection
    from outbox_worker.session import Session

LOOK_SECONDS: Final = 5.0
"""Between two looks while the index is missing: another replica may be building it, or a person follow the advice."""


class IndexBuilder(BackgroundThread):
    """Looks for the index until it is there, builds it where that is ours to do, and sets the advice in the status."""

    def __init__(
        self, observer: Observer, status: ProcessStatus, session: Session, source: Source, key: PartitionKey
    ) -> None:
        super().__init__("building the index by slots", session)
        self._observer = observer
        self._status = status
        self._source = source
        self._key = key
        self._is_there = False
        self._connection: Connection | None = None

    @override
    def work(self) -> float | None:
        if not self._observer.ready:
            return 0.1
        self.attempt(self._ensure)
        return None if self._is_there else LOOK_SECONDS

    @override
    def stop(self) -> None:
        """End the thread, and what it builds: the next process drops what was left of it and begins anew."""
        self._stopping.set()  # first: then no other build begins
        if self._connection is not None:
            with suppress(DatabaseError):
                self._connection.cancel()
        super().stop()

    def _ensure(self, connection: Connection) -> None:
        self._connection = connection
        self._status.advice = ensure_slot_index(connection, self._source, self._key)
        self._is_there = self._status.advice is None
