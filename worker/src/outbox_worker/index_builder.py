"""Builds the index by slots in a thread of its own, or tells a person how: partitions are read by a scan meanwhile.

A build takes as long as the outbox is large and waits for every transaction that writes into it; the loop, which holds
leases and handles messages, must not wait for that. No liveness hangs on this thread.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from outbox_core.errors import OutboxError
from outbox_worker.logs import get_logger
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
_log = get_logger("outbox.index")


class IndexBuilder(threading.Thread):
    """Looks for the index until it is there, builds it where that is ours to do, and sets the advice in the status."""

    def __init__(
        self, observer: Observer, status: ProcessStatus, session: Session, source: Source, key: PartitionKey
    ) -> None:
        """Keep what is needed; `session` leads to the messages and is used by this thread only."""
        super().__init__(name="index builder", daemon=True)
        self._observer = observer
        self._status = status
        self._session = session
        self._source = source
        self._key = key
        self._stopping = threading.Event()
        self._connection: Connection | None = None

    @override
    def run(self) -> None:
        """Look until the index is there, or until stopped."""
        while not self._stopping.is_set() and not (self._observer.ready and self._ensure()):
            self._stopping.wait(LOOK_SECONDS if self._observer.ready else 0.1)
        self._session.discard()

    def stop(self) -> None:
        """End the thread, and what it builds: the next process drops what was left of it and begins anew."""
        self._stopping.set()
        if self._connection is not None:
            with suppress(DatabaseError):
                self._connection.cancel()
        if self.is_alive():
            self.join(timeout=1.5)

    def _ensure(self) -> bool:
        try:
            self._connection = self._session.connection()
            advice = ensure_slot_index(self._connection, self._source, self._key)
        except OutboxError as err:
            self._session.discard()
            if not self._stopping.is_set():
                _log.warning("the index by slots could not be built; it is tried again", extra={"error": str(err)})
            return False
        except Exception:  # noqa: BLE001 - the thread must not die: the index would never be built
            self._session.discard()
            _log.exception("building the index by slots failed unexpectedly")
            return False
        self._status.advice = advice
        return advice is None
