"""Looks around in the database for status and metrics, on the heartbeat's connection, every two seconds."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from outbox_core.errors import TransientError
from outbox_core.report import CheckpointView, Lag, LeaseView, Reason
from outbox_worker.engine.throttle import HeldWatch
from outbox_worker.feeds.partition_reader import reader_of
from outbox_worker.logs import get_logger
from outbox_worker.observe.change import look_at_change
from outbox_worker.postgres.connection import limited
from outbox_worker.postgres.feeds import holding
from outbox_worker.postgres.ownership import partitions, rebalance
from outbox_worker.postgres.progress import checkpoints, conflicts
from outbox_worker.postgres.reading.messages import LAG_CAP
from outbox_worker.postgres.reading.stall import HighWaterMarkObserver

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from outbox_core.config import ProcessorConfig
    from outbox_core.progress.checkpoint import Checkpoint
    from outbox_worker.observe.status import ProcessStatus
    from outbox_worker.ownership.membership import Membership
    from outbox_worker.postgres.connection import Connection
    from outbox_worker.postgres.key import ProcessorKey
    from outbox_worker.postgres.progress.checkpoints import StoredCheckpoint
    from outbox_worker.postgres.reading.messages import MessageReader

_LIMIT_SHARE: Final = 0.15
"""Of the lease: a statement that takes longer is cut, so that the heartbeat is in time."""
_BUDGET_SHARE: Final = 0.3
"""Of the lease: after that nothing more is looked at this time."""
_log = get_logger("outbox.observer")


class Observer:
    """Fills the process status with checkpoint, conflicts, lag and high-water mark."""

    def __init__(self, key: ProcessorKey, status: ProcessStatus, *, lease: float, remote_target: bool = False) -> None:
        """Observe nothing until the main loop found the schema to be there.

        `remote_target`: the messages are in another database, which is observed on a connection, and in a thread, of
        its own.
        """
        self._apart = remote_target
        self._stored: Mapping[int, StoredCheckpoint] = {}
        self._key = key
        self._status = status
        self._limit = max(0.1, lease * _LIMIT_SHARE)
        self._budget = lease * _BUDGET_SHARE
        self.watch = HeldWatch()
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
        """Look once. A count that takes too long is left out."""
        if not self.ready:
            return
        enough = time.monotonic() + self._budget
        with self._limited(connection):
            stored = self._load(connection)
            if stored:
                views = [
                    CheckpointView(partition=partition, pair=str(each.pair), stored_at=each.stored_at)
                    for partition, each in stored.items()
                ]
                self._status.set_observed(checkpoints=views)
            self._status.set_observed(conflicts=conflicts.summary(connection, self._key))
            failures, seen = holding.observe(connection, self._key)
            self._status.set_observed(failures=failures)
            self.watch.note(seen)
        self._stored = stored
        if not self._apart:
            self.observe_source(connection, enough)

    def observe_source(self, connection: Connection, enough: float | None = None) -> None:
        """Look at what waits in the source's database behind the checkpoints last seen, and at its high-water mark."""
        reader, bound = self._reader, self._high_water_mark
        if reader is None or bound is None:
            return
        enough = time.monotonic() + self._budget if enough is None else enough
        if time.monotonic() < enough:
            # Who holds the high-water mark is promised within seconds; counting may take all the time there is, every
            # time.
            with self._limited(connection):
                self._status.set_observed(bound=bound.observe(connection))
        stored = self._stored
        if stored and time.monotonic() < enough:
            self._status.set_observed(lag=self._measure(connection, reader, stored, enough))

    def _load(self, connection: Connection) -> Mapping[int, StoredCheckpoint]:
        stored = checkpoints.load(connection, self._key)
        return {} if stored is None else {self._key.partition: stored}

    def _measure(
        self,
        connection: Connection,
        reader: MessageReader,
        stored: Mapping[int, StoredCheckpoint],
        enough: float,
    ) -> Lag | None:
        del enough  # one statement, which is cut by itself
        return self._count(connection, reader, stored[self._key.partition].pair)

    def _count(self, connection: Connection, reader: MessageReader, pair: Checkpoint, cap: int = LAG_CAP) -> Lag | None:
        try:
            with self._limited(connection):
                return reader.lag(connection, pair, cap)
        except TransientError as err:
            if err.reason is not Reason.STATEMENT_FAILED:
                raise
            return None

    def _limited(self, connection: Connection) -> AbstractContextManager[None]:
        return limited(connection, self._limit)


class PartitionedObserver(Observer):
    """The same for a partitioned processor, over all its partitions: any process can speak for the whole."""

    def __init__(
        self, key: ProcessorKey, status: ProcessStatus, *, lease: float, membership: Membership, config: ProcessorConfig
    ) -> None:
        """Prepare a reader for each partition."""
        super().__init__(key, status, lease=lease, remote_target=config.has_remote_target)
        self._membership = membership
        self._source = config.source
        self._readers = [reader_of(config, partition) for partition in range(membership.count)]
        self._lags: dict[int, Lag] = {}
        self._next = 0

    @override
    def _load(self, connection: Connection) -> Mapping[int, StoredCheckpoint]:
        self._status.set_observed(
            leases=[
                LeaseView(partition=lease.partition, epoch=lease.epoch, pod=lease.pod,
                          held=lease.token == self._membership.token)
                for lease in self._membership.leases
            ]
        )  # fmt: skip
        return partitions.load_checkpoints(connection, self._key)

    @override
    def observe(self, connection: Connection) -> None:
        """Look once; also how far a change of the number of partitions is."""
        super().observe(connection)
        if not self.ready:
            return
        try:
            with self._limited(connection):
                now = rebalance.fetch(connection, self._key)
                if now is not None:
                    stored = partitions.load_checkpoints(connection, self._key)
                    pairs = {number: each.pair for number, each in stored.items()}
                    division = look_at_change(connection, self._key, self._source, now, pairs)
                    self._status.set_observed(division=division)
        except TransientError as err:
            if err.reason is not Reason.STATEMENT_FAILED:
                raise

    @override
    def _measure(
        self,
        connection: Connection,
        reader: MessageReader,
        stored: Mapping[int, StoredCheckpoint],
        enough: float,
    ) -> Lag | None:
        """Count partition after partition, from where the last look ended, within the time that a look may take."""
        count = self._membership.count
        for _ in range(count):
            partition, self._next = self._next, (self._next + 1) % count
            if partition in stored:
                lag = self._count(connection, self._readers[partition], stored[partition].pair, LAG_CAP // count)
                if lag is not None:
                    self._lags[partition] = lag
            if time.monotonic() > enough:
                break
        if not self._lags:
            return None
        lags = self._lags.values()
        return Lag(
            messages=sum(lag.messages for lag in lags),
            at_least=len(self._lags) < count or any(lag.at_least for lag in lags),
            seconds=max(lag.seconds for lag in lags),
        )
