"""`rebuild`: which processor replaces which, how far it is, and whether its swap would work."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import psycopg

from outbox_cli.console import Record, record_of
from outbox_cli.context import Context, against_database
from outbox_cli.database.sources import Sources
from outbox_cli.errors import CommandError, Exit, RefusedError, UsageError
from outbox_core.progress.coverage import decide_catch_up
from outbox_worker.postgres.admin.overview import list_processors
from outbox_worker.postgres.admin.preview import count_between
from outbox_worker.postgres.progress.rebuilds import RebuildRow, list_rebuilds
from outbox_worker.postgres.transactions.statement import find_transaction_end

if TYPE_CHECKING:
    from outbox_worker.postgres.connection import Connection

_CAP: Final = 100_000
_STATUS: Final = {
    "PROCESSOR": "processorId", "REPLACES": "of", "STATE": "state", "CHECKPOINT": "checkpoint",
    "THE OTHER'S": "otherCheckpoint", "BEHIND": "behind", "SWAPPED": "swappedAt",
}  # fmt: skip


@against_database
def status(connection: Connection, context: Context) -> Exit:
    """List rebuilds: begun, and swapped."""
    with Sources(connection, context) as sources:
        records = [
            _record(row, _behind(sources, connection, context.schema, row))
            for row in list_rebuilds(connection, context.schema, context.processor_id)
        ]
    return context.console.show(records, _STATUS, empty=f"no processor of schema {context.schema} replaces another one")


def _behind(sources: Sources, connection: Connection, schema: str, row: RebuildRow) -> str | int | None:
    """Count what the other one has examined and this one has not, where the messages can be seen."""
    if row.swapped_at is not None or row.new is None or row.old is None:
        return None
    reading = sources.find(row.processor_id)
    if reading is None:
        return None
    theirs = [view.pair for view in list_processors(connection, schema, row.of) if view.pair is not None]
    total = 0
    for view in list_processors(connection, schema, row.processor_id):
        for after, up_to in decide_catch_up(view.pair, theirs).ranges if view.pair is not None else ():
            found = count_between(reading, sources.reader(view), after, up_to, cap=_CAP - total)
            total += found.total
            if found.at_least:
                return f"{total}+"
    return total


def _record(row: RebuildRow, behind: str | int | None) -> Record:
    state = "Running" if row.swapped_at is None else "Swapped"
    return record_of(row, but=("new", "old")) | {
        "state": state, "checkpoint": row.new, "otherCheckpoint": row.old, "behind": behind,
    }  # fmt: skip


@against_database
def try_swap(connection: Connection, context: Context) -> Exit:
    """Run the statement as this role in a transaction that is rolled back; its locks are held that long."""
    if context.manifest is None:
        raise UsageError("which swap? give the manifest with -f")
    rebuild = context.manifest.spec.rebuild_of
    if rebuild is None:
        raise RefusedError("the manifest has no spec.rebuildOf")
    if (command := find_transaction_end(rebuild.swap_statement)) is not None:
        raise RefusedError(f"swapStatement holds {command}: the transaction is the worker's")
    began = time.monotonic()
    try:
        with connection.transaction(force_rollback=True):
            connection.execute("SELECT set_config('lock_timeout', '2s', true)")
            connection.execute(rebuild.swap_statement.encode())
    except psycopg.Error as err:
        if err.sqlstate is None:  # the connection is lost: no fault of the statement
            raise
        raise CommandError(f"swapStatement failed: {err.diag.message_primary} [{err.sqlstate}]") from err
    seconds = time.monotonic() - began
    return context.console.tell(
        {"of": rebuild.processor_id, "works": True, "seconds": round(seconds, 3)},
        f"it works, and took {seconds:.3f} s; rolled back, nothing was changed",
    )
