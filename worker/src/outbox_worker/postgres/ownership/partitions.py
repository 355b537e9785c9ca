"""A processor that is partitioned by key: how, who its live processes are, which of them owns what; another number.

Each call is one statement for any number of partitions. What the barrier of a change is and why no worker has read
beyond it: see `ask_partitions`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING
from uuid import UUID

from outbox_core.partition import PartitionOwners
from outbox_core.progress.barrier import Obstacle, Partitioning, snapshot_barrier
from outbox_worker.postgres.call import call, call_row, call_rows, fetch_one, fetch_row, fetch_rows, in_schema
from outbox_worker.postgres.progress.checkpoints import build_pair, fetch_high_water_mark, leased

if TYPE_CHECKING:
    from datetime import timedelta

    from outbox_core.processor.outcomes import HeldLease
    from outbox_core.progress.checkpoint import Checkpoint
    from outbox_core.report import ResourceRef
    from outbox_worker.postgres.connection import Connection
    from outbox_worker.postgres.key import ProcessorKey


@dataclass(frozen=True, slots=True)
class Begun:
    """How the processor is partitioned.

    Attributes:
        owned: the caller holds the lease; if not, nothing was done.
        count: partitions; None: the processor has a checkpoint and was never partitioned.
        by: the key, in `describe_key`'s words.
        begun: by this very call, all partitions at the pair it named.

    """

    owned: bool
    count: int | None
    by: str | None
    begun: bool


@dataclass(frozen=True, slots=True)
class SeenLease:
    """A live lease as the database has it."""

    partition: int
    token: UUID
    epoch: int
    pod: str


@dataclass(frozen=True, slots=True)
class SeenOwners(PartitionOwners):
    """The partitioning as the database has it, with the leases for people to read.

    `found`: how many partitions the processor has, which may be another number than `count`; None: it is
    not partitioned.
    """

    leases: tuple[SeenLease, ...] = ()
    found: int | None = None


def begin(
    connection: Connection, key: ProcessorKey, lease: HeldLease, *, count: int, by: str, start: Checkpoint | None
) -> Begun:
    """Partition the processor and start it at `start`, as the owner of any partition; or learn how it is."""
    row = call_row(
        connection, key.schema, "begin_partitions", **leased(key, lease), count=count, key=by,
        transaction_id=None if start is None else str(start.transaction_id),
        position=None if start is None else start.position,
    )  # fmt: skip
    begun = Begun(*row)
    if begun.begun and start is not None and start.snapshot_range is not None:
        snapshot_range = start.snapshot_range
        call(
            connection, key.schema, "begin_ranges", **leased(key, lease), lower=snapshot_range.lower,
            upper=snapshot_range.upper, position=snapshot_range.position,
        )  # fmt: skip
    return begun


def fetch_count(connection: Connection, key: ProcessorKey) -> int | None:
    """Say how many partitions the processor has; None: it is not partitioned."""
    row = fetch_row(connection, in_schema("fetch_partitions", key.schema), key.names)
    return None if row is None else int(row[0])


def renew_membership(
    connection: Connection,
    key: ProcessorKey,
    *,
    claim_uid: str,
    pod: str,
    token: UUID,
    lease: timedelta,
) -> dict[int, int]:
    """Say that this process lives; return the epochs of the partitions it still owns."""
    rows = call_rows(
        connection, key.schema, "renew_membership", processor_id=key.processor_id, claim_uid=claim_uid, pod=pod,
        token=token, lease=lease,
    )  # fmt: skip
    return dict(rows)


def end_membership(connection: Connection, key: ProcessorKey, token: UUID) -> None:
    """Leave: everything that this process owns is free at once."""
    call(connection, key.schema, "end_membership", processor_id=key.processor_id, token=token)


def fetch_owners(connection: Connection, key: ProcessorKey, *, claim_uid: str, count: int) -> SeenOwners:
    """See who lives, who owns what of `count` partitions, and how many there are. A member that lapsed owns nothing."""
    statement = in_schema("fetch_owners", key.schema)
    found, members, rows = fetch_one(connection, statement, key.names | {"claim_uid": claim_uid})
    leases = tuple(SeenLease(partition, UUID(token), epoch, pod) for partition, token, epoch, pod in rows or ())
    owners = {lease.partition: lease.token for lease in leases}
    return SeenOwners(count, tuple(members), owners, leases, found)


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
