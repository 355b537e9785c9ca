"""Observes a source that is not the checkpoint's database, in a thread of its own.

The heartbeat must not: a source that does not answer would keep it from renewing the lease in the other database. No
liveness hangs on this thread either: status gets old, and nothing else.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from outbox_core.errors import OutboxError
from outbox_worker.logs import get_logger
from outbox_worker.postgres.errors import DatabaseError

if TYPE_CHECKING:
    from outbox_worker.observe.observer import Observer
    from outbox_worker.session import Session

WATCH_SECONDS: Final = 2.0
_log = get_logger("outbox.source")


class SourceWatch(threading.Thread):
    """Looks every two seconds at lag and high-water mark."""

    def __init__(self, observer: Observer, session: Session) -> None:
        """Keep what is needed; `session` is used by this thread only."""
        super().__init__(name="source watch", daemon=True)
        self._observer = observer
        self._session = session
        self._stopping = threading.Event()
        self._failing = False

    @override
    def run(self) -> None:
        """Look until stopped."""
        while not self._stopping.is_set():
            if self._observer.ready:
                self._look()
            self._stopping.wait(WATCH_SECONDS)
        self._session.discard()

    def stop(self) -> None:
        """End the thread; a connection attempt that hangs is left to itself."""
        self._stopping.set()
        if self.is_alive():
            self.join(timeout=1.5)

    def _look(self) -> None:
        try:
            self._observer.observe_source(self._session.connection())
            self._failing = False
        except (OutboxError, DatabaseError) as err:
            self._session.discard()
            if not self._failing:
                _log.warning("the source could not be observed", extra={"error": str(err)})
            self._failing = True
        except Exception:  # noqa: BLE001 - the thread must not die: status would keep a lag of long ago
            self._session.discard()
            _log.exception("observing the source failed unexpectedly")
