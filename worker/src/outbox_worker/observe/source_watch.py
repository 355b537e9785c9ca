"""Observes a source that is not the checkpoint's database, in a thread of its own.

The heartbeat must not: a source that does not answer would keep it from renewing the lease in the other database. No
liveness hangs on this thread either: status gets old, and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from typing_extensions import override

from outbox_worker.background import BackgroundThread

if TYPE_CHECKING:
    from outbox_worker.observe.observer import Observer
    from outbox_worker.session import Session

WATCH_SECONDS: Final = 2.0


class SourceWatch(BackgroundThread):
    """Looks every two seconds at lag and high-water mark."""

    def __init__(self, observer: Observer, session: Session) -> None:
        super().__init__("observing the source", session)
        self._observer = observer

    @override
    def work(self) -> float:
        if self._observer.ready:
            self.attempt(self._observer.observe_source)
        return WATCH_SECONDS
