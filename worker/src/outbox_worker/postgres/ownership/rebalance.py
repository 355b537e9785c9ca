"""The number of partitions in the database: ask for another one, see how far the change is, carry it out.

Each call is one statement. What the barrier is and why no worker has read beyond it: see `ask_partitions`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from outbox_core.progress.barrier import Obstacle, Partitioning, snapshot_barrier
from outbox_worker.postgres.call import call, fetch_row, fetch_rows
from outbox_worker.postgres.progress.checkpoints import build_pair, fetch_high_water_mark
from outbox_worker.postgres.queries import in_schema

if TYPE_CHECKING:
    from outbox_core.progress.checkpoint import Checkpoint
    from outbox_core.report import ResourceRef
    from outbox_worker.postgres.connection import Connection
    from outbox_worker.postgres.key import ProcessorKey


def ask(
    connection: Connection,
    key: ProcessorKey,
    resource: ResourceRef,
    *,
    generation: int,
    count: int,
    by: str,
) -> int | None:
    """Say what the resource wants; return how many partitions the processor has now; None: it is not partitioned.

    Heeded only from the holder of the claim, and never from an older generation of the resource than was heeded before.
    """
    there: int | None = call(
        connection, key.schema, "ask_partitions", processor_id=key.processor_id, claim_uid=resource.uid,
        generation=generation, count=count, key=by, asked_by=f"{resource}, generation {generation}",
    )  # fmt: skip
    return there


def change(connection: Connection, key: ProcessorKey, claim_uid: str) -> bool:
    """Change the number if all partitions have stopped at the barrier; say whether this call did."""
    changed = call(connection, key.schema, "change_partitions", processor_id=key.processor_id, claim_uid=claim_uid)
    return changed is True


def fetch(connection: Connection, key: ProcessorKey) -> Partitioning | None:
    """See how the processor is partitioned and what that changes to; None: it is not partitioned."""
    row = fetch_row(connection, in_schema("fetch_partitions", key.schema), {"processor_id": key.processor_id})
    if row is None:
        return None
    return build_partitioning(*row)


@lru_cache(maxsize=64)
def build_partitioning(
    count: int,
    by: str,
    next_count: int | None,
    transaction_id: str | None,
    position: int | None,
    mark: str | None,
    snapshot: str | None,
) -> Partitioning:
    """Return what a row of the table says, ids and snapshot as text: while it stays the same, the same object."""
    if mark is not None:
        return Partitioning(count, by, next_count, snapshot_barrier(snapshot), int(mark))
    return Partitioning(count, by, next_count, build_pair(transaction_id, position))


def draw(connection: Connection, key: ProcessorKey, claim_uid: str) -> None:
    """Cursor Snapshot: draw the barrier of a change that was asked for, unless it is drawn; it is drawn once."""
    call(connection, key.schema, "draw_snapshot_barrier", processor_id=key.processor_id, claim_uid=claim_uid)


def fetch_obstacles(connection: Connection, key: ProcessorKey) -> list[Obstacle]:
    """List what stops a change and is no message that merely waits: conflicts, held messages that failed."""
    rows = fetch_rows(connection, in_schema("fetch_obstacles", key.schema), {"processor_id": key.processor_id})
    return [
        Obstacle(partition, message_id, name, error, conflict) for partition, message_id, name, error, conflict in rows
    ]


def is_settled(connection: Connection, barrier: Checkpoint) -> bool:
    """Say whether everything up to the barrier can be read: no transaction below it is open any more.

    What a snapshot sees is over.
    """
    return barrier.snapshot_range is not None or barrier <= fetch_high_water_mark(connection)
