"""What a person at a terminal asks of one database: every processor, what waits for a decision, what was decided.

Reads only, with nothing but SELECT on the schema's tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox_core.report import ResourceRef
from outbox_worker.postgres.call import fetch_dicts, in_schema
from outbox_worker.postgres.errors import translated
from outbox_worker.postgres.ownership.partitions import build_partitioning
from outbox_worker.postgres.progress.checkpoints import build_checkpoint, build_pair

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from outbox_core.progress.barrier import Partitioning
    from outbox_core.progress.checkpoint import Checkpoint
    from outbox_worker.postgres.connection import Connection


@dataclass(frozen=True, slots=True)
class ProcessorView:
    """One partition of one processor, as the database has it.

    Attributes:
        holder: the resource that claims the processor; None while none does.
        vacated_at: its last process left without a word; others may claim 30 s later.
        epoch: the lease's number; None if there never was one.
        token: of the process that has the lease.
        pod: who has the lease, live or lapsed.
        live: the lease has not lapsed, by the database's clock.
        pair: the stored checkpoint.
        is_gone: a checkpoint was stored, and its row was deleted since.
        partitioning: how many partitions the processor has, and a change of that; None: it is not partitioned.
        conflicts: refusals that are kept: of the processor the last 1,000, and those that wait for a person.
        open_conflict: the number of the one that waits for a person.

    """

    processor_id: str
    partition: int
    holder: ResourceRef | None
    claimed_at: datetime | None
    vacated_at: datetime | None
    epoch: int | None
    token: UUID | None
    pod: str | None
    expires_at: datetime | None
    live: bool
    pair: Checkpoint | None
    stored_at: datetime | None
    conflicts: int
    open_conflict: int | None
    is_gone: bool
    partitioning: Partitioning | None = None


@dataclass(frozen=True, slots=True)
class ConflictView:
    """One refusal and what became of it; pairs as in the report, None where there was no row."""

    id: int
    processor_id: str
    partition: int
    code: int
    expected: Checkpoint | None
    stored: Checkpoint | None
    new: Checkpoint | None
    pod: str
    time: datetime
    needs_person: bool
    resolved_at: datetime | None
    resolution: str | None
    decided_by: str | None

    @property
    def is_open(self) -> bool:
        """It waits for a person, and no worker processes meanwhile."""
        return self.needs_person and self.resolved_at is None


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One entry: what a user decided."""

    id: int
    action: str
    processor_id: str | None
    partition: int | None
    before: Checkpoint | None
    after: Checkpoint | None
    reason: str
    decided_by: str
    session_role: str
    decided_at: datetime


def list_processors(connection: Connection, schema: str, processor_id: str | None = None) -> list[ProcessorView]:
    """Read every processor's partitions, or those of one, in order; empty where the id is unknown."""
    rows = fetch_dicts(connection, in_schema("list_processors", schema), {"processor_id": processor_id})
    return [_processor(row) for row in rows]


def list_conflicts(
    connection: Connection,
    schema: str,
    *,
    processor_id: str | None = None,
    conflict_id: int | None = None,
    resolved: bool = False,
    limit: int = 100,
) -> list[ConflictView]:
    """Read conflicts, the latest first: those that wait for a person, with `resolved` all."""
    parameters = {"processor_id": processor_id, "conflict_id": conflict_id, "resolved": resolved, "limit": limit}
    rows = fetch_dicts(connection, in_schema("list_conflicts", schema), parameters)
    return [_conflict(row) for row in rows]


def list_audit_log(
    connection: Connection, schema: str, processor_id: str | None = None, limit: int = 100
) -> list[AuditEntry]:
    """Read what people decided, the latest first."""
    rows = fetch_dicts(connection, in_schema("list_audit_log", schema), {"processor_id": processor_id, "limit": limit})
    return [
        AuditEntry(
            before=build_pair(row["from_transaction_id"], row["from_position"]),
            after=build_pair(row["to_transaction_id"], row["to_position"]),
            **_take(row, *_AUDIT_FIELDS),
        )
        for row in rows
    ]


_AUDIT_FIELDS = ("id", "action", "processor_id", "partition", "reason", "decided_by", "session_role", "decided_at")


def record_audit_entry(
    connection: Connection,
    schema: str,
    *,
    action: str,
    processor_id: str | None,
    reason: str,
    decided_by: str,
) -> None:
    """Write an entry that no function of the schema records; for its owner, in the transaction of what was decided."""
    parameters = {"action": action, "processor_id": processor_id, "reason": reason, "decided_by": decided_by}
    with translated():
        connection.execute(in_schema("record_audit_entry", schema), parameters)


def _processor(row: dict[str, Any]) -> ProcessorView:
    resource, partitioning, stored = (_take(row, *names) for names in (_RESOURCE, _PARTITIONING, _STORED))
    return ProcessorView(
        holder=None if resource["name"] is None else ResourceRef(**resource),
        partitioning=None if partitioning["partition_count"] is None else build_partitioning(*partitioning.values()),
        pair=None if stored["position"] is None else build_checkpoint(*stored.values()),
        **row,
    )


_RESOURCE = ("cluster", "namespace", "name", "uid")
_PARTITIONING = (
    "partition_count", "key", "next_count", "barrier_transaction_id", "barrier_position", "barrier_mark",
    "barrier_snapshot",
)  # fmt: skip
_STORED = ("transaction_id", "position", "cursor_kind", "lower", "upper", "range_position")


def _take(row: dict[str, Any], *names: str) -> dict[str, Any]:
    """Take columns out of a row."""
    return {name: row.pop(name) for name in names}


def _conflict(row: dict[str, Any]) -> ConflictView:
    same = (
        "id", "processor_id", "partition", "code", "pod", "needs_person", "resolved_at", "resolution", "decided_by",
    )  # fmt: skip
    return ConflictView(
        expected=build_pair(row["expected_transaction_id"], row["expected_position"]),
        stored=build_pair(row["stored_transaction_id"], row["stored_position"]),
        new=build_pair(row["new_transaction_id"], row["new_position"]),
        time=row["recorded_at"],
        **_take(row, *same),
    )
