"""Says when the server wrote to its log (WAL), so that a worker looks for messages when there may be some.

Every commit of a message moves the log: first where it is written (`insert`), then where it is flushed. A statement on
a connection of its own waits for that on the server, and this process sleeps in `select` meanwhile. Producers pay
nothing, no trigger is needed and no privilege. The log moves for other reasons too; then the worker looks in vain, and
waits longer and longer before it does so again. ADR 0025 has the figures, and what else was considered.

While the log rests nothing can have been committed, and the worker polls less often. A fault here is silent,
and the worker polls as if there were no log.
"""

from __future__ import annotations

import time
from functools import cache
from math import ceil
from typing import TYPE_CHECKING, Final

import psycopg
from psycopg import pq

from outbox_core.errors import OutboxError
from outbox_core.retry import wake_wait
from outbox_worker.postgres.call import Template, load, place

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox_worker.postgres.connection import Connection

LONGEST: Final = 0.9
"""Seconds for one statement, or less where the server would log it as slow; so long a session may outlive us."""
CLOSE: Final = 0.0005
"""Seconds between two looks at the log while messages come; the server makes a millisecond of it, of 0.001 two."""
CALM: Final = 0.05
"""The same when none came for `CALM_AFTER` seconds: a look costs the server about 30 us."""
CALM_AFTER: Final = 5.0
BELIEVED: Final = 60.0
"""Seconds after which a log that was never seen to move may be one that this server does not show."""
PAUSE: Final = 60.0
"""Seconds without watching after a fault, or where a pooler stands between: it would lend us a session for good."""
_MOMENT: Final = 1.0
_OWN: Final = -1
"""The look because of the checkpoint that we stored counts as none in vain."""
_NOWHERE: Final[tuple[str | None, str | None]] = (None, None)


class WalWatch:
    """At most one statement under way; shared by all partitions of a process, used by one thread."""

    def __init__(self, connect: Callable[[], Connection]) -> None:
        """Keep how to connect; there is no connection before the first wait."""
        self._connect = connect
        self._connection: Connection | None = None
        self._waits = False
        self._place = _NOWHERE
        """Where the log was, written and flushed, before the last look at the outbox."""
        self.is_working = False
        """This server was seen to tell where its log is."""
        self._longest = LONGEST
        self._useless = 0
        self.found = False
        """The last look found messages: the loop says so before it asks again whether the log moved."""
        self._own = self._outdated = False
        self._found_at = self._paused_until = self._moved_at = self._known_until = 0.0

    def begin(self) -> int | None:
        """Let the server wait, if it does not already. Return the socket that becomes readable; None: do not wait.

        Not before the look that is due because the log moved: where others write all the time it would move at once.
        """
        if not self._waits and time.monotonic() < self._paused_until:
            return None
        try:
            if self._connection is None or self._connection.closed:
                self.close()
                self._connection = self._connect()
                self._longest = _find_longest(self._connection)
            if not self._waits:
                self._send(self._connection)
        except (OutboxError, psycopg.Error):
            self._pause()
            return None
        return self._connection.pgconn.socket

    def take(self) -> tuple[int | None, bool]:
        """Say whether the log moved: how many looks in a row found nothing though it had; None: it did not.

        And whether it is known not to have moved since before the last look. That is believed only of a server whose
        log was seen to move lately: each heartbeat moves it. And no longer than the statement may take, and a moment
        for the next one: a connection may be lost without a sign.
        """
        if self.found:
            self._useless, self._found_at, self.found = _OWN, time.monotonic(), False
        moved, now = self._look(), time.monotonic()
        return moved, now < self._known_until and now - self._moved_at < BELIEVED

    def _look(self) -> int | None:
        if not self._waits or self._connection is None:
            return None
        session = self._connection.pgconn
        try:
            session.consume_input()
            if session.is_busy():
                return None
            moved = self._note(_receive(session), self._connection)
        except psycopg.Error:
            self._pause()
            return None
        return max(0, self._useless - 1) if moved else None

    def _note(self, result: pq.abc.PGresult | None, connection: Connection) -> bool:
        """Remember where the log is now; say whether it moved."""
        self._waits = False
        outdated, self._outdated = self._outdated, False
        if result is None or result.status != pq.ExecStatus.TUPLES_OK:
            self._pause()
            return False
        answered, written, flushed = ((result.get_value(0, column) or b"").decode() for column in range(3))
        if int(answered) != connection.pgconn.backend_pid:
            self._pause()
            return False
        if outdated:
            return False
        if self._place == (written, flushed):
            self._useless = 0
            return False
        now = time.monotonic()
        if self._place != _NOWHERE:
            self._moved_at = now
        self._place, self._known_until, self.is_working = (written, flushed), 0.0, True
        self._paused_until = now + wake_wait(max(0, self._useless))
        self._useless += 1
        return True

    def note_own(self, written: str, flushed: str, *, saw_all: bool = False) -> None:
        """Take where the log was after a commit of ours, so that it needs not be asked.

        A look is due because of it, unless all that was committed by then was examined.
        """
        self._place, self._known_until, self._own, self.is_working = (written, flushed), 0.0, not saw_all, True
        self._outdated = self._waits  # what the statement under way waits for is that commit

    def take_own(self) -> bool:
        """Say once whether a look is due because of a commit of ours."""
        own, self._own = self._own, False
        if own:
            self._useless = 0
        return own

    def close(self) -> None:
        """Close the connection, in every state; what another one sees is compared with nothing."""
        self._waits, self._place, self._known_until = False, _NOWHERE, 0.0
        self._own = self._outdated = self.is_working = False
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _pause(self) -> None:
        self.close()
        self._paused_until = time.monotonic() + PAUSE

    def _send(self, connection: Connection) -> None:
        step = CLOSE if time.monotonic() - self._found_at < CALM_AFTER else CALM
        statement = _template().fill(
            {
                "steps": ceil(self._longest / step), "seconds": step, "longest": self._longest,
                "pid": connection.pgconn.backend_pid, "inserted": self._place[0], "flushed": self._place[1],
            }
        )  # fmt: skip
        connection.pgconn.send_query(statement.as_bytes(None))
        connection.pgconn.flush()
        self._waits = True
        if self._place != _NOWHERE:
            self._known_until = time.monotonic() + self._longest + _MOMENT


def _find_longest(connection: Connection) -> float:
    """Return how long a statement may take and not be logged as slow; where all are logged, few are best."""
    row = connection.execute(load("fetch_log_threshold")).fetchone()
    seconds = 0.0 if row is None else 0.9 * row[0] / 1000
    return min(LONGEST, seconds) if seconds > 0 else LONGEST


@cache
def _template() -> Template:
    names = ("steps", "seconds", "longest", "pid", "inserted", "flushed")
    return Template(load("await_wal").format(**{name: place(name) for name in names}))


def _receive(session: pq.abc.PGconn) -> pq.abc.PGresult | None:
    """Take all that the statement returned; the first result is what it says."""
    result = session.get_result()
    while session.get_result() is not None:
        pass
    return result
