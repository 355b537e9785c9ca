"""A session that waits for its client in a COPY."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.servers.postgres import wait_until

if TYPE_CHECKING:
    from tests.support.servers.postgres import Database

COPY = "COPY outbox.messages (message_type, data) FROM STDIN"
_WAITS = """
SELECT FROM pg_stat_activity
WHERE datname = current_database() AND query LIKE 'COPY %' AND wait_event_type = 'Client'"""


def wait_for_copy(database: Database) -> None:
    """Wait until the server waits for what is copied: the client is told that it may send a moment before."""
    watching = database.direct()
    wait_until(lambda: watching.execute(_WAITS).fetchone() is not None, "the server waits for the client")
