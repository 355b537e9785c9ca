"""Target `sql` with a connection of its own: the statement runs in another database than the one that has the messages.

The batch travels there, as `outbox_worker.handlers.carrying` says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox_worker.targets.sql import SqlSink, no_relation

if TYPE_CHECKING:
    from outbox_core.spec import SqlTarget


class CarriedSqlSink(SqlSink):
    """Runs one statement over a batch that was read elsewhere."""

    needs_payload = True

    def __init__(self, target: SqlTarget) -> None:
        """Keep the statement."""
        super().__init__(target, no_relation)
