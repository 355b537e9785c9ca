"""Looks around in the database for status and metrics, on the heartbeat's connection, every two seconds."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from psycopg import sql

from outbox_core.errors import TransientError
from outbox_core.report import CheckpointView, Reason
from outbox_worker.postgres import checkpoints, conflicts
from outbox_worker.postgres.stall import BoundObserver

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg

    from outbox_core.checkpoint import Checkpoint
    from outbox_core.report import Lag
    from outbox_worker.postgres.key import ProcessorKey
    from outbox_worker.postgres.messages import MessageReader
    from outbox_worker.status import StatusBoard

_LIMIT_SHARE: Final = 0.15
"""Of the lease: a statement that takes longer is cut, so that the heartbeat is in time."""
_BUDGET_SHARE: Final = 0.3
"""Of the lease: after that nothing more is looked at this time, whatever each statement took."""


class Observer:
    """Fills the board with checkpoint, conflicts, lag and bound."""

    def __init__(self, key: ProcessorKey, board: StatusBoard, *, lease: float) -> None:
        """Observe nothing until the main loop found the schema to be there."""
        self._key = key
        self._board = board
        self._limit = max(100, int(lease * _LIMIT_SHARE * 1000))
        self._budget = lease * _BUDGET_SHARE
        self._reader: MessageReader | None = None
        self._bound: BoundObserver | None = None

    @property
    def ready(self) -> bool:
        """There is a schema to look at."""
        return self._reader is not None

    def start(self, reader: MessageReader) -> None:
        """The schema is there: from now on look."""
        if self._reader is None:
            self._bound = BoundObserver(reader)
            self._reader = reader

    def observe(self, connection: psycopg.Connection[Any]) -> None:
        """Look once, in transactions that write nothing. A count that takes too long is left out."""
        reader, bound = self._reader, self._bound
        if reader is None or bound is None:
            return
        enough = time.monotonic() + self._budget
        with self._limited(connection):
            stored = checkpoints.load(connection, self._key)
            if stored is not None:
                view = CheckpointView(partition=self._key.partition, pair=str(stored.pair), stored_at=stored.stored_at)
                self._board.set_observed(checkpoints=[view])
            self._board.set_observed(conflicts=conflicts.summary(connection, self._key))
        if stored is not None and time.monotonic() < enough:
            self._board.set_observed(lag=self._count(connection, reader, stored.pair))
        if time.monotonic() > enough:
            return
        with self._limited(connection):
            self._board.set_observed(bound=bound.observe(connection))

    def _count(self, connection: psycopg.Connection[Any], reader: MessageReader, pair: Checkpoint) -> Lag | None:
        try:
            with self._limited(connection):
                return reader.lag(connection, pair)
        except TransientError as err:
            if err.reason is not Reason.STATEMENT_FAILED:
                raise
            return None

    @contextmanager
    def _limited(self, connection: psycopg.Connection[Any]) -> Iterator[None]:
        with connection.transaction():
            connection.execute(
                sql.SQL("SELECT set_config('statement_timeout', {}, true)").format(sql.Literal(str(self._limit)))
            )
            yield
