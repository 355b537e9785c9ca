"""A thread beside the loop, with a session of its own: heartbeat, observer of a remote source, builder of the index."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from typing_extensions import override

from outbox_core.errors import OutboxError
from outbox_worker.logs import get_logger
from outbox_worker.postgres.errors import DatabaseError

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox_worker.postgres.connection import Connection
    from outbox_worker.session import Session

_log = get_logger("outbox.background")


class BackgroundThread(threading.Thread, ABC):
    """Does its work again and again until it is stopped; no failure ends it."""

    def __init__(self, name: str, session: Session) -> None:
        """Keep the session, which only this thread uses; `name` is in the log, too."""
        super().__init__(name=name, daemon=True)
        self._session = session
        self._stopping = threading.Event()
        self._failing = False

    @abstractmethod
    def work(self) -> float | None:
        """Do it once; return the seconds until it is to be done again, None: it is done for good."""

    @override
    def run(self) -> None:
        while not self._stopping.is_set() and (seconds := self.work()) is not None:
            self._stopping.wait(seconds)
        self._session.discard()

    def stop(self) -> None:
        """End the thread and wait for it; a connection attempt that hangs is left to itself."""
        self._stopping.set()
        if self.is_alive():
            self.join(timeout=1.5)

    def attempt(self, act: Callable[[Connection], object]) -> None:
        """Do what needs the database; log the first of several failures in a row, and connect anew after each."""
        try:
            act(self._session.connection())
            self._failing = False
        except (OutboxError, DatabaseError) as err:
            self._session.discard()
            if not (self._failing or self._stopping.is_set()):
                _log.warning(f"{self.name} failed; it is tried again", extra={"error": str(err)})
            self._failing = True
        except Exception:  # noqa: BLE001 - the thread must not die: without the heartbeat the lease lapses
            self._session.discard()
            _log.exception(f"{self.name} failed unexpectedly")
