"""Asks for the next batch of a backlog while the one before is handled: the server looks for it meanwhile.

The statement is sent on a connection of its own and nothing waits for it: no thread takes the interpreter from the
handler. What came back is used where a reader asks for the very same statement, which says all that a batch depends
on: where it begins, how long it is, the partition's slots, the barrier, the snapshot range. Which messages are held,
delayed or wait behind one of their key is asked later, on the connection that handles them.

Of what was found only a full page is used. It stays as it is: nothing appears below the high-water mark, or in a range
whose end is fixed. A page that is not full says that nothing more is there, which is true at one moment only.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import pq, sql
from psycopg.adapt import Transformer

from outbox_core.errors import OutboxError
from outbox_worker.postgres.call import load
from outbox_worker.waiting import wait_ready

if TYPE_CHECKING:
    from collections.abc import Callable

    from psycopg.pq.abc import PGresult

    from outbox_worker.postgres.connection import Connection

LONGEST: Final = 5.0
"""Seconds that the server may take for a statement, or wait for this process to take the rows."""
FRESH: Final = 30.0
"""Seconds for which what was found may be used: a user may have changed the rows since."""
IDLE: Final = 30.0
"""Seconds without a backlog after which the connection is closed."""
PAUSE: Final = 30.0
"""Seconds without reading ahead after a fault: the server may have no connection to spare."""
_RESULTS: Final = 4
"""Of BEGIN, its settings, the server's run and the statement; then those of the end."""
_ANSWERED: Final = (pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK)


@dataclass(frozen=True, slots=True)
class _Sent:
    """A statement that is under way: for which reader, in which run of the server, and until when it is of use."""

    reader: object
    run: str
    statement: bytes
    until: float


class ReadAhead:
    """At most one statement under way, of one partition; shared by all partitions of a process, used by one thread.

    It is an optimisation: every fault is silent, and what it did not find is read in the plain way, which reports one.
    """

    def __init__(self, connect: Callable[[], Connection]) -> None:
        """Keep how to connect; there is no connection without a backlog."""
        self._connect = connect
        self._connection: Connection | None = None
        self._sent: _Sent | None = None
        self._used = 0.0

    def send(self, reader: object, schema: str, run: str, statement: sql.Composed, *, durably: bool = False) -> None:
        """Let the server look for what the reader will ask for next; nothing where it is busy with another one's.

        `durably`: as `remote_target.read_durably`: no crash of the server takes back what was read.
        """
        now = time.monotonic()
        if self._sent is not None and now > self._sent.until:
            self.forget(self._sent.reader)
        if self._sent is not None or now < self._used:
            return
        try:
            if self._connection is None or self._connection.closed:
                self._connection = self._connect()
            text = statement.as_bytes(self._connection)
            begin = load("begin_reading_ahead").format(
                schema=sql.Identifier(schema), longest=sql.Literal(f"{LONGEST:.0f}s")
            )
            end = load("end_durable_read").as_bytes(self._connection) if durably else b"COMMIT"
            self._connection.pgconn.send_query(b";\n".join((begin.as_bytes(self._connection), text, end)))
            self._connection.pgconn.flush()
        except (OutboxError, psycopg.Error):
            self._pause()
            return
        self._sent, self._used = _Sent(reader, run, text, now + FRESH), now

    def take(
        self, reader: object, connection: Connection, statement: sql.Composed, size: int | None
    ) -> list[tuple[Any, ...]] | None:
        """Return the rows of a statement that returns at most `size`, if just this was sent and so many were found.

        None: execute it. What was sent for this reader is used now, or never.
        """
        sent = self._sent
        if sent is None or sent.reader is not reader:
            return None
        same = sent.statement == statement.as_bytes(connection) and time.monotonic() <= sent.until
        rows = self._collect(sent, LONGEST if same else 0.0)
        return rows if same and rows is not None and size is not None and len(rows) >= size else None

    def forget(self, reader: object) -> None:
        """Do not use what was asked for on behalf of this reader; close a connection that was idle for long."""
        if self._sent is not None and self._sent.reader is reader:
            self._collect(self._sent, 0.0)
        elif self._sent is None and self._connection is not None and time.monotonic() > self._used + IDLE:
            self.close()

    def close(self) -> None:
        """Close the connection, in every state."""
        self._sent = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _pause(self) -> None:
        self.close()
        self._used = time.monotonic() + PAUSE

    def _collect(self, sent: _Sent, seconds: float) -> list[tuple[Any, ...]] | None:
        """Take what came back; where not all of it comes in time, close the connection."""
        connection, self._sent = self._connection, None
        try:
            results = None if connection is None else _receive(connection.pgconn, time.monotonic() + seconds)
            if connection is None or results is None:
                self.close()
                return None
            if len(results) <= _RESULTS or any(each.status not in _ANSWERED for each in results):
                self._pause()
                return None
            run, rows = (_rows(connection, each) for each in results[_RESULTS - 2 : _RESULTS])
        except (psycopg.Error, OSError):
            self._pause()
            return None
        except BaseException:
            self.close()
            raise
        return rows if run == [(sent.run,)] else None


def _receive(pgconn: pq.abc.PGconn, until: float) -> list[PGresult] | None:
    """Return all results; None: they did not come in time."""
    results: list[PGresult] = []
    while True:
        pgconn.consume_input()
        while pgconn.is_busy():
            left = until - time.monotonic()
            pgconn.flush()
            if left <= 0 or not wait_ready(left, [pgconn.socket]):
                return None
            pgconn.consume_input()
        if (result := pgconn.get_result()) is None:
            return results
        results.append(result)


def _rows(connection: Connection, result: PGresult) -> list[tuple[Any, ...]]:
    transformer = Transformer.from_context(connection)
    transformer.set_pgresult(result)
    return transformer.load_rows(0, result.ntuples, tuple)
