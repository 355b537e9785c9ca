"""What the observer looks at in each mode: where the checkpoints are, and how much waits behind them."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from typing_extensions import override

from outbox_core.errors import TransientError
from outbox_core.report import Lag, LeaseView, Reason
from outbox_worker.feeds.partition_reader import reader_of
from outbox_worker.logs import get_logger
from outbox_worker.observe.change import look_at_change
from outbox_worker.postgres.connection import limited
from outbox_worker.postgres.feeds import competing
from outbox_worker.postgres.ownership import partitions
from outbox_worker.postgres.progress import checkpoints
from outbox_worker.postgres.reading.arrivals import Arrivals
from outbox_worker.postgres.reading.dispatch_reader import DispatchReader
from outbox_worker.postgres.reading.messages import LAG_CAP

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from outbox_core.config import ProcessorConfig
    from outbox_core.progress.checkpoint import Checkpoint
    from outbox_worker.competing.consumer import ThisConsumer
    from outbox_worker.observe.status import ProcessStatus
    from outbox_worker.ownership.membership import Membership
    from outbox_worker.postgres.connection import Connection
    from outbox_worker.postgres.key import ProcessorKey
    from outbox_worker.postgres.progress.checkpoints import StoredCheckpoint
    from outbox_worker.postgres.reading.arrivals import Seen
    from outbox_worker.postgres.reading.messages import MessageReader

    Stored = Mapping[int, StoredCheckpoint]
    """The stored checkpoints by partition; a processor that is not partitioned has number 0."""

_log = get_logger("outbox.observer")
_Counted = TypeVar("_Counted")


class Sight:
    """What one mode has to show; without more than this: one owner, one checkpoint."""

    by_lease: bool = True
    """Units are owned by a lease: held messages wake their owner, and the high-water mark says how far it may read."""

    def __init__(self, key: ProcessorKey) -> None:
        self._key = key

    def look(self, connection: Connection, seconds: float) -> None:
        """See what only this mode has; a statement may take so many seconds."""
        del connection, seconds

    def load(self, connection: Connection) -> Stored:
        """Return the stored checkpoints; empty: there are none yet."""
        stored = checkpoints.load(connection, self._key)
        return {} if stored is None else {self._key.partition: stored}

    def measure(
        self, connection: Connection, reader: MessageReader, stored: Stored, enough: float, seconds: float
    ) -> Lag | None:
        """Count what waits behind the checkpoints, at least one, in the messages' database; None: it takes too long.

        `reader` is that of the whole processor. Nothing is begun after `enough`, of the monotonic clock; a statement
        may take so many seconds.
        """
        del enough
        pair = stored[self._key.partition].pair
        return _within(connection, seconds, partial(reader.lag, connection, pair, LAG_CAP))


class PartitionedSight(Sight):
    """All partitions: any process can speak for the whole."""

    def __init__(
        self, key: ProcessorKey, status: ProcessStatus, config: ProcessorConfig, membership: Membership
    ) -> None:
        super().__init__(key)
        self._status = status
        self._membership = membership
        self._source = config.source
        self._readers = [reader_of(config, partition) for partition in range(membership.count)]
        self._lags: dict[int, Lag] = {}
        self._next = 0
        self._arrivals = None if config.has_remote_target else Arrivals(config.source, key.processor_id)
        self._empty: tuple[Mapping[int, Checkpoint], Seen] | None = None

    @override
    def look(self, connection: Connection, seconds: float) -> None:
        _within(connection, seconds, partial(self._look_at_change, connection))

    def _look_at_change(self, connection: Connection) -> None:
        """See how far a change of the number of partitions is."""
        now = partitions.fetch(connection, self._key)
        if now is not None:
            stored = checkpoints.load_all(connection, self._key) if now.next_count is not None else {}
            pairs = {number: each.pair for number, each in stored.items()}
            partitioning = look_at_change(connection, self._key, self._source, now, pairs)
            self._status.set_observed(partitioning=partitioning)

    @override
    def load(self, connection: Connection) -> Stored:
        self._status.set_observed(
            leases=[
                LeaseView(partition=lease.partition, epoch=lease.epoch, pod=lease.pod,
                          held=lease.token == self._membership.token)
                for lease in self._membership.leases
            ]
        )  # fmt: skip
        return checkpoints.load_all(connection, self._key)

    @override
    def measure(
        self, connection: Connection, reader: MessageReader, stored: Stored, enough: float, seconds: float
    ) -> Lag | None:
        """Count partition after partition, from where the last look ended, within the time that a look may take.

        Nothing waits where nothing did at the same checkpoints, and no message came since.
        """
        arrivals = self._arrivals
        seen = None if arrivals is None else _within(connection, seconds, partial(arrivals.look, connection))
        places = {number: each.pair for number, each in stored.items()}
        if seen is None or self._empty is None or self._empty[0] != places or not seen.has_none_since(self._empty[1]):
            complete = self._count(connection, stored, enough, seconds)
            is_empty = complete and not any(lag.messages for lag in self._lags.values())
            self._empty = (places, seen) if is_empty and seen is not None else None
        if not self._lags:
            return None
        lags = self._lags.values()
        return Lag(
            messages=sum(lag.messages for lag in lags),
            at_least=len(self._lags) < self._membership.count or any(lag.at_least for lag in lags),
            seconds=max(lag.seconds for lag in lags),
        )

    def _count(self, connection: Connection, stored: Stored, enough: float, seconds: float) -> bool:
        """Say whether all partitions were counted."""
        count = left = self._membership.count
        counted = 0

        def count_next() -> None:
            nonlocal left, counted
            while left > 0 and time.monotonic() <= enough:
                partition, self._next, left = self._next, (self._next + 1) % count, left - 1
                if partition in stored:
                    lag = self._readers[partition].lag(connection, stored[partition].pair, LAG_CAP // count)
                    self._lags[partition] = lag
                    counted += 1

        while left > 0 and time.monotonic() <= enough:
            _within(connection, seconds, count_next)
        return counted == count


class CompetingSight(Sight):
    """How far everything is done, and what is handed out; it also keeps the tables small."""

    by_lease = False

    def __init__(
        self, key: ProcessorKey, status: ProcessStatus, config: ProcessorConfig, consumer: ThisConsumer
    ) -> None:
        super().__init__(key)
        self._status = status
        self._consumer = consumer
        self._reader = DispatchReader(config.source, consumer.settings, key.processor_id)

    @override
    def look(self, connection: Connection, seconds: float) -> None:
        _within(connection, seconds, partial(competing.advance_checkpoint, connection, self._key))
        if emptied := competing.empty_tables(connection, self._key, self._consumer.settings):
            _log.debug("emptied", extra={"tables": emptied})
        unfinished = _within(connection, seconds, partial(competing.count_unfinished, connection, self._key))
        if unfinished is not None:
            self._status.set_observed(unfinished=unfinished)
            self._consumer.note_count(unfinished.consumers)

    @override
    def measure(
        self, connection: Connection, reader: MessageReader, stored: Stored, enough: float, seconds: float
    ) -> Lag | None:
        return _within(connection, seconds, partial(competing.measure_lag, connection, self._key, self._reader))


def _within(connection: Connection, seconds: float, count: Callable[[], _Counted]) -> _Counted | None:
    """Count in a transaction of its own; a count that takes too long is left out, with what would follow."""
    try:
        with limited(connection, seconds):
            return count()
    except TransientError as err:
        if err.reason is not Reason.STATEMENT_FAILED:
            raise
        return None
