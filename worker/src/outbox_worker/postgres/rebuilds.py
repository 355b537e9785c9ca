"""One processor replacing another: what the database knows of it, and the two statements that make the swap safe."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from psycopg.rows import dict_row

from outbox_core.checkpoint import Checkpoint
from outbox_core.errors import ConfigurationError
from outbox_core.spec import Cursor
from outbox_worker.postgres.errors import translated
from outbox_worker.postgres.queries import in_schema

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    import psycopg

    from outbox_worker.postgres.key import ProcessorKey


class SupersedeAnswer(IntEnum):
    """What `supersede_processor` answers; everything but DONE rolls the swap back."""

    ALREADY = 0
    DONE = 1
    MOVED = 2
    """The other processor stored something since it was looked at."""
    NO_MATCH = 3
    """It has no checkpoint here, or reads another source."""
    NOT_OWNER = 4
    """The caller is not the live owner, or has not handled what the other one has."""
    BY_ANOTHER = 5
    """A third one replaced it."""


@dataclass(frozen=True, slots=True)
class Noted:
    """What is so of a rebuild: made, and by whom the other processor was replaced, if it was."""

    swapped_at: datetime | None
    superseded_by: str | None


@dataclass(frozen=True, slots=True)
class RebuildRow:
    """One rebuild for people; `at` is the pair at which the replaced one stood."""

    processor_id: str
    of: str
    begun_at: datetime
    swapped_at: datetime | None
    at: Checkpoint | None
    new: Checkpoint | None
    old: Checkpoint | None


def note(connection: psycopg.Connection[Any], key: ProcessorKey, of: str, *, epoch: int, token: UUID) -> Noted:
    """Write down, as the owner, which processor is to be replaced; learn whether it is."""
    parameters = {"processor_id": key.processor_id, "of": of, "epoch": epoch, "token": token}
    with translated():
        row = connection.execute(in_schema("note_rebuild", key.schema), parameters).fetchone()
    if row is None:
        return Noted(None, None)
    noted_of, swapped_at, superseded_by = row
    return Noted(swapped_at if noted_of == of else None, superseded_by)


def find_superseding(connection: psycopg.Connection[Any], key: ProcessorKey) -> str | None:
    """Name the processor that replaced this one."""
    with translated():
        row = connection.execute(
            in_schema("fetch_superseding", key.schema), {"processor_id": key.processor_id}
        ).fetchone()
    return None if row is None else str(row[0])


def furthest(connection: psycopg.Connection[Any], key: ProcessorKey) -> tuple[Checkpoint, str | None] | None:
    """Return the furthest pair that a processor has stored, over its partitions, and which source it reads.

    Raises:
        ConfigurationError: it has no pair, but windows or batches, whose ends cannot be compared with ours.

    """
    with translated():
        rows = connection.execute(
            in_schema("find_processor", key.schema), {"processor_id": key.processor_id}
        ).fetchall()
    if not rows:
        return None
    if rows[0][10] or any(row[6] == Cursor.SNAPSHOT for row in rows):
        raise ConfigurationError(
            f"processor {key.processor_id!r} cannot be replaced by a swap: its checkpoint is no pair, for its cursor "
            "is Snapshot or its mode Competing. Stop it, and start the new one with startFrom"
        )
    return max(Checkpoint(int(row[1]), row[2]) for row in rows), rows[0][5]


def count_held(connection: psycopg.Connection[Any], key: ProcessorKey) -> int:
    """Count the messages that the processor's checkpoint has passed and that wait to be handled."""
    with translated():
        row = connection.execute(in_schema("count_held", key.schema), {"processor_id": key.processor_id}).fetchone()
    return int(row[0]) if row is not None else 0


def stand_still(connection: psycopg.Connection[Any], key: ProcessorKey) -> None:
    """Wait for the end of the processor's transactions and let none begin until ours ends.

    Raises:
        TransientError: it did not end within the transaction's lock timeout.

    """
    parameters = {"processor_id": key.processor_id, "schema": key.schema}
    with translated():
        connection.execute(in_schema("stand_still", key.schema), parameters)


def supersede(
    connection: psycopg.Connection[Any],
    key: ProcessorKey,
    of: str,
    at: Checkpoint,
    *,
    epoch: int,
    token: UUID,
    decided_by: str,
) -> SupersedeAnswer:
    """Let `of` never store again, in the open transaction of the swap."""
    parameters = {
        "processor_id": of,
        "by": key.processor_id,
        "partition": key.partition,
        "epoch": epoch,
        "token": token,
        "transaction_id": str(at.transaction_id),
        "position": at.position,
        "decided_by": decided_by,
    }
    with translated():
        row = connection.execute(in_schema("supersede", key.schema), parameters).fetchone()
    return SupersedeAnswer(row[0] if row is not None else SupersedeAnswer.NOT_OWNER)


def list_rebuilds(
    connection: psycopg.Connection[Any], schema: str, processor_id: str | None = None
) -> list[RebuildRow]:
    """Read all rebuilds, or those that a processor has part in."""
    with translated(), connection.cursor(row_factory=dict_row) as cursor:
        rows = cursor.execute(in_schema("list_rebuilds", schema), {"processor_id": processor_id}).fetchall()
    return [
        RebuildRow(
            row["processor_id"], row["of_processor_id"], row["begun_at"], row["swapped_at"],
            _pair(row["t"], row["position"]), _pair(row["new_t"], row["new_p"]), _pair(row["old_t"], row["old_p"]),
        )
        for row in rows
    ]  # fmt: skip


def _pair(transaction_id: str | None, position: int | None) -> Checkpoint | None:
    return None if transaction_id is None or position is None else Checkpoint(int(transaction_id), position)
