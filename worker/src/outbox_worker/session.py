"""A connection, opened when needed and dropped when it broke. Each thread that needs the database has its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox_core.errors import OutboxError

if TYPE_CHECKING:
    from outbox_worker.postgres.connection import Connection, ConnectionFiles


class Session:
    """Holds at most one connection in autocommit."""

    def __init__(self, files: ConnectionFiles, application_name: str, place: str = "") -> None:
        """Keep how to connect, and the name the server's views show; `place` tells people which of two databases."""
        self._files = files
        self._name = application_name
        self._place = place
        self._connection: Connection | None = None
        self.opened = 0
        """How often: another number, another connection than before."""

    def connection(self) -> Connection:
        """Return the connection, a new one if there was none or it broke.

        Raises:
            OutboxError: it cannot be opened.

        """
        if self._connection is None or self._connection.closed:
            self._connection = None
            self._connection = self._connect(self._name)
            self.opened += 1
        return self._connection

    def another(self, purpose: str) -> Connection:
        """Open one connection more, in autocommit: the caller's own. The server's views show what for.

        Raises:
            OutboxError: it cannot be opened.

        """
        return self._connect(f"{self._name} {purpose}")

    def _connect(self, name: str) -> Connection:
        try:
            return self._files.connect(name)
        except OutboxError as err:
            if not self._place:
                raise
            raise type(err)(f"{self._place}: {err}", reason=err.reason) from err

    def discard(self) -> None:
        """Close it, in every state."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
