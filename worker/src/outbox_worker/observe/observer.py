"""Looks around in the database for status and metrics, on the heartbeat's connection, every two seconds.

Where nothing waits and the server wrote nothing since, there is nothing new to look at.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override

from outbox_core.report import CheckpointView
from outbox_worker.background import BackgroundThread
from outbox_worker.postgres.call import fetch_rows, load
from outbox_worker.postgres.connection import limited
from outbox_worker.postgres.feeds import holding
from outbox_worker.postgres.progress import conflicts
from outbox_worker.postgres.reading.stall import HighWaterMarkObserver

if TYPE_CHECKING:
    from outbox_worker.observe.sight import Sight, Stored
    from outbox_worker.observe.status import ProcessStatus
    from outbox_worker.postgres.connection import Connection
    from outbox_worker.postgres.feeds.holding import Seen
    from outbox_worker.postgres.key import ProcessorKey
    from outbox_worker.postgres.reading.messages import MessageReader
    from outbox_worker.session import Session

_LIMIT_SHARE: Final = 0.15
"""Of the lease: a statement that takes longer is cut, so that the heartbeat is in time."""
_BUDGET_SHARE: Final = 0.3
"""Of the lease: after that nothing more is looked at this time."""
_WATCH_SECONDS: Final = 2.0


class Observer:
    """Fills the process status with checkpoint, conflicts, lag and high-water mark."""

    def __init__(
        self, key: ProcessorKey, status: ProcessStatus, sight: Sight, *, lease: float, remote_target: bool = False
    ) -> None:
        """Observe nothing until the main loop found the schema to be there.

        A look takes a part of the lease, in seconds, at most. `remote_target`: the messages are in another database,
        which is observed on a connection, and in a thread, of its own.
        """
        self._apart = remote_target
        self._stored: Stored = {}
        self._empty_at: list[tuple[Any, ...]] | None = None
        """Where the server's log was before a look that found nothing waiting: there another one finds no more."""
        self._key = key
        self._status = status
        self._sight = sight
        self._limit = max(0.1, lease * _LIMIT_SHARE)
        self._budget = lease * _BUDGET_SHARE
        self.held_seen: dict[int, Seen] = {}
        """What was last seen of held messages, by partition; each runner takes its own. Replaced whole: no lock."""
        self._reader: MessageReader | None = None
        self._high_water_mark: HighWaterMarkObserver | None = None

    @property
    def ready(self) -> bool:
        """There is a schema to look at."""
        return self._reader is not None

    def start(self, reader: MessageReader) -> None:
        """The schema is there: from now on look."""
        if self._reader is None:
            self._high_water_mark = HighWaterMarkObserver(reader)
            self._reader = reader

    def observe(self, connection: Connection) -> None:
        """Look once, where there may be something new. A count that takes too long is left out."""
        if not self.ready:
            return
        place = fetch_rows(connection, load("fetch_wal_place"))
        if place and place == self._empty_at:
            return
        self._empty_at = None
        enough = time.monotonic() + self._budget
        self._sight.look(connection, self._limit)
        with limited(connection, self._limit):
            stored = self._sight.load(connection)
            if stored:
                views = [
                    CheckpointView(partition=partition, pair=str(each.pair), stored_at=each.stored_at)
                    for partition, each in stored.items()
                ]
                self._status.set_observed(checkpoints=views)
            self._status.set_observed(conflicts=conflicts.summary(connection, self._key))
            failures, seen = holding.observe(connection, self._key)
            self._status.set_observed(failures=failures)
            if self._sight.by_lease:
                self.held_seen = dict(seen)
        self._stored = stored
        if not self._apart and self.observe_source(connection, enough) and not failures.held:
            self._empty_at = place

    def observe_source(self, connection: Connection, enough: float | None = None) -> bool:
        """Look at what waits in the source's database behind the checkpoints last seen, and at its high-water mark.

        Say whether nothing waits, as far as there is a checkpoint to count from.
        """
        reader, bound = self._reader, self._high_water_mark
        if reader is None or bound is None:
            return False
        enough = time.monotonic() + self._budget if enough is None else enough
        is_empty = True
        if self._sight.by_lease and time.monotonic() < enough:
            # Who holds the high-water mark is promised within seconds; counting may take all the time there is, every
            # time.
            with limited(connection, self._limit):
                mark = bound.observe(connection)
            self._status.set_observed(high_water_mark=mark)
            is_empty = not mark.age_seconds
        if self._stored:
            lag = None
            if time.monotonic() < enough:
                lag = self._sight.measure(connection, reader, self._stored, enough, self._limit)
                self._status.set_observed(lag=lag)
            is_empty = is_empty and lag is not None and not lag.messages
        return is_empty


class SourceWatch(BackgroundThread):
    """Observes a source that is not the checkpoint's database, every two seconds, in a thread of its own.

    The heartbeat must not: a source that does not answer would keep it from renewing the lease in the other database.
    No liveness hangs on this thread either: status gets old, and nothing else.
    """

    def __init__(self, observer: Observer, session: Session) -> None:
        super().__init__("observing the source", session)
        self._observer = observer

    @override
    def work(self) -> float:
        if self._observer.ready:
            self.attempt(self._observer.observe_source)
        return _WATCH_SECONDS
