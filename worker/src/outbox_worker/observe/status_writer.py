"""Stores what a process says of itself: with each heartbeat, soon when the state changes, and at the end.

It is for users, and never costs a lease: in a statement of its own, after all else, and for a little time only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from outbox_core.errors import OutboxError
from outbox_worker.logs import get_logger
from outbox_worker.postgres.connection import limited
from outbox_worker.postgres.errors import DatabaseError
from outbox_worker.postgres.ownership.process_statuses import ProcessStatusRow, format_statuses, store_status

if TYPE_CHECKING:
    from datetime import timedelta
    from uuid import UUID

    from outbox_worker.observe.status import ProcessStatus
    from outbox_worker.postgres.connection import Connection
    from outbox_worker.postgres.key import ProcessorKey
    from outbox_worker.postgres.ownership.process_statuses import PartitionState

_log = get_logger("outbox.worker")
_SHARE: Final = 0.1
"""Of the lease; a third of it lies between two heartbeats."""
_LONGEST: Final = 1.0
"""Seconds."""


class StatusWriter:
    """Knows what the process says of itself, and what of that the database has."""

    def __init__(self, status: ProcessStatus, *, claim_uid: str, pod: str, token: UUID) -> None:
        self._status = status
        self._claim_uid = claim_uid
        self._pod = pod
        self._token = token
        self._stored: tuple[PartitionState, ...] = ()
        self._failing = False

    @property
    def has_news(self) -> bool:
        """The state of some partition is another one than was stored: the next heartbeat need not be waited for."""
        return _states(self._status.partition_statuses) != _states(self._stored)

    def write(self, connection: Connection, key: ProcessorKey, lease: timedelta, *, ended: bool = False) -> None:
        """Store it, if there is any; what cannot be stored is stored with the next heartbeat."""
        self._stored = self._status.partition_statuses
        if not self._stored:
            return
        row = ProcessStatusRow(self._claim_uid, self._pod, format_statuses(self._stored))
        try:
            with limited(connection, min(_LONGEST, lease.total_seconds() * _SHARE)):
                store_status(connection, key, row, token=self._token, lease=lease, ended=ended)
            self._failing = False
        except (OutboxError, DatabaseError) as err:
            if not self._failing:
                _log.warning("the status could not be stored in the database", extra={"error": str(err)})
            self._failing = True


def _states(statuses: tuple[PartitionState, ...]) -> set[tuple[int, str]]:
    return {(each.partition, each.state) for each in statuses}
