"""Looks around in the database for status and metrics, on the heartbeat's connection, every two seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from psycopg import sql

from outbox_core.report import CheckpointView
from outbox_worker.postgres import checkpoints, conflicts
from outbox_worker.postgres.stall import BoundObserver

if TYPE_CHECKING:
    import psycopg

    from outbox_worker.postgres.key import ProcessorKey
    from outbox_worker.postgres.messages import MessageReader
    from outbox_worker.status import StatusBoard

_LIMIT_SHARE: Final = 0.15
"""Of the lease: a look around that takes longer is cut, so that the heartbeat is in time."""


class Observer:
    """Fills the board with checkpoint, conflicts, lag and bound."""

    def __init__(self, key: ProcessorKey, board: StatusBoard, *, lease: float) -> None:
        """Observe nothing until the main loop found the schema to be there."""
        self._key = key
        self._board = board
        self._limit = max(100, int(lease * _LIMIT_SHARE * 1000))
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
        """Look once, in a transaction that writes nothing."""
        reader, bound = self._reader, self._bound
        if reader is None or bound is None:
            return
        with connection.transaction():
            connection.execute(
                sql.SQL("SELECT set_config('statement_timeout', {}, true)").format(sql.Literal(str(self._limit)))
            )
            stored = checkpoints.load(connection, self._key)
            if stored is not None:
                view = CheckpointView(partition=self._key.partition, pair=str(stored.pair), stored_at=stored.stored_at)
                self._board.set_observed(checkpoints=[view])
            self._board.set_observed(conflicts=conflicts.summary(connection, self._key))
            if stored is not None:
                self._board.set_observed(lag=reader.lag(connection, stored.pair))
            self._board.set_observed(bound=bound.observe(connection))
