"""A processor that is partitioned by key: how, who its live processes are, and which of them owns what.

Each call is one statement for any number of partitions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID

from outbox_core.partition import PartitionOwners
from outbox_worker.postgres.call import call, call_row, call_rows, fetch_one, fetch_row, fetch_rows
from outbox_worker.postgres.progress.checkpoints import StoredCheckpoint, build_checkpoint
from outbox_worker.postgres.queries import in_schema

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import timedelta

    from outbox_core.progress.checkpoint import Checkpoint
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
    connection: Connection,
    key: ProcessorKey,
    *,
    count: int,
    by: str,
    start: Checkpoint | None,
    epoch: int,
    token: UUID,
) -> Begun:
    """Partition the processor and start it at `start`, as the owner of any partition; or learn how it is."""
    row = call_row(
        connection, key.schema, "begin_partitions", **key.names, count=count, key=by,
        transaction_id=None if start is None else str(start.transaction_id),
        position=None if start is None else start.position, epoch=epoch, owner_token=token,
    )  # fmt: skip
    begun = Begun(*row)
    if begun.begun and start is not None and start.snapshot_range is not None:
        snapshot_range = start.snapshot_range
        call(
            connection, key.schema, "begin_ranges", **key.names, lower=snapshot_range.lower, upper=snapshot_range.upper,
            position=snapshot_range.position, epoch=epoch, owner_token=token,
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


def load_checkpoints(connection: Connection, key: ProcessorKey) -> Mapping[int, StoredCheckpoint]:
    """Read the stored pairs by partition."""
    rows = fetch_rows(connection, in_schema("fetch_checkpoints", key.schema), key.names)
    return {
        partition: StoredCheckpoint(build_checkpoint(t, position, *snapshot_range), at)
        for partition, t, position, at, *snapshot_range in rows
    }
