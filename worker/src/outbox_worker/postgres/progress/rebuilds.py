"""One processor replacing another: what the database knows of it, and the two statements that make the swap safe."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from typing_extensions import override

from outbox_core.errors import ConfigurationError
from outbox_core.plain import plain_count
from outbox_worker.postgres.call import (
    call,
    call_row,
    fetch_dicts,
    fetch_one,
    fetch_row,
    fetch_rows,
    in_schema,
    let_lists_have_nulls,
)
from outbox_worker.postgres.errors import translated
from outbox_worker.postgres.progress.checkpoints import build_checkpoint, build_pair, leased, partition_parameters

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from outbox_core.processor.outcomes import HeldLease
    from outbox_core.progress.checkpoint import Checkpoint
    from outbox_worker.postgres.connection import Connection
    from outbox_worker.postgres.key import ProcessorKey


class SupersedeAnswer(IntEnum):
    """What `supersede_processor` answers; everything but DONE rolls the swap back."""

    ALREADY = 0
    DONE = 1
    MOVED = 2
    """The other processor stored something since it was looked at."""
    NO_MATCH = 3
    """It has no checkpoint here, hands out batches, or reads another source."""
    NOT_OWNER = 4
    """The caller is not the live owner, or has not handled what the other one has."""
    BY_ANOTHER = 5
    """A third one replaced it, or the caller replaced another one."""


@dataclass(frozen=True, slots=True)
class Noted:
    """What is so of a rebuild: made, by whom the other processor was replaced, and whom this one replaced instead."""

    swapped_at: datetime | None
    superseded_by: str | None
    replaced: str | None = None


@dataclass(frozen=True, slots=True)
class RebuildRow:
    """One rebuild for people, with both checkpoints; of a partitioned processor the furthest."""

    processor_id: str
    of: str
    begun_at: datetime
    swapped_at: datetime | None
    new: Checkpoint | None
    old: Checkpoint | None


def note(connection: Connection, key: ProcessorKey, lease: HeldLease, of: str) -> Noted:
    """Write down, as the owner, which processor is to be replaced; learn whether it is."""
    noted_of, swapped_at, superseded_by = call_row(
        connection, key.schema, "note_rebuild", processor_id=key.processor_id, of=of, epoch=lease.epoch,
        owner_token=lease.token,
    )  # fmt: skip
    if noted_of == of:
        return Noted(swapped_at, superseded_by)
    return Noted(None, superseded_by, noted_of if swapped_at is not None else None)


def find_superseding(connection: Connection, key: ProcessorKey) -> str | None:
    """Name the processor that replaced this one."""
    row = fetch_row(connection, in_schema("fetch_superseding", key.schema), {"processor_id": key.processor_id})
    return None if row is None else str(row[0])


@dataclass(frozen=True, slots=True)
class Coverage:
    """Where a processor stands, by partition; `text` differs if anything of it does (`coverage_of`)."""

    pairs: Mapping[int, Checkpoint]
    text: str

    @property
    def places(self) -> list[Checkpoint]:
        """Where its partitions stand."""
        return list(self.pairs.values())


def find_coverage(connection: Connection, key: ProcessorKey, *, but_partition: int | None = None) -> Coverage | None:
    """Read where a processor stands, without one partition where that is named; None: it has no such checkpoint.

    Raises:
        ConfigurationError: it hands out batches: behind its checkpoint are messages that are handled already.

    """
    parameters = {"processor_id": key.processor_id, "but_partition": but_partition}
    rows = fetch_rows(connection, in_schema("find_coverage", key.schema), parameters)
    if not rows:
        return None
    if rows[0][1]:
        raise ConfigurationError(
            f"processor {key.processor_id!r} cannot be replaced by a swap: its mode is Competing, so behind its "
            "checkpoint are messages that are handled already. Stop it, and start the new one with startFrom"
        )
    pairs = {row[2]: build_checkpoint(*row[3:9]) for row in rows}
    return Coverage(pairs, rows[0][0])


@dataclass(frozen=True, slots=True)
class Unhandled:
    """What a processor's checkpoint has passed and that is not handled, and more of the same keys may follow.

    Attributes:
        held: messages that wait to be tried again, or for their time.
        dead: dead letters behind which their key waits.

    """

    held: int
    dead: int

    def __bool__(self) -> bool:
        """There is some."""
        return bool(self.held or self.dead)

    @override
    def __str__(self) -> str:
        """Say it to a person, with what to do."""
        said = [f"{plain_count(self.held, 'message is', 'messages are')} held and not handled yet"] if self.held else []
        if self.dead:
            dead = plain_count(self.dead, "dead letter blocks its key", "dead letters block their keys")
            said.append(f"{dead}: redrive or drop what is dead (`outbox dead-letters`)")
        return "; ".join(said)


def count_unhandled(connection: Connection, key: ProcessorKey) -> Unhandled:
    """Count what keeps a projection from being what readers should get."""
    return Unhandled(
        *fetch_one(connection, in_schema("count_unhandled", key.schema), {"processor_id": key.processor_id})
    )


def stand_still(connection: Connection, key: ProcessorKey) -> None:
    """Wait for the end of the processor's transactions and let none begin until ours ends.

    Raises:
        TransientError: it did not end within the transaction's lock timeout.

    """
    parameters = {"processor_id": key.processor_id, "schema": key.schema}
    with translated():
        connection.execute(in_schema("stand_still", key.schema), parameters)


def advance_partitions(
    connection: Connection,
    key: ProcessorKey,
    lease: HeldLease,
    coverage: Coverage | None,
    goals: Mapping[int, Checkpoint],
) -> bool:
    """Put other partitions' checkpoints to where their messages were handled in the open transaction.

    `coverage` is where they stood when that began. False: one of them stored something since.
    """
    let_lists_have_nulls(connection)
    advanced = call(
        connection, key.schema, "advance_partitions", **leased(key, lease), **partition_parameters(goals),
        coverage=None if coverage is None else coverage.text,
    )  # fmt: skip
    return advanced is True


def supersede(
    connection: Connection, key: ProcessorKey, lease: HeldLease, of: str, coverage: Coverage, *, decided_by: str
) -> SupersedeAnswer:
    """Let `of` never store again, in the open transaction of the swap."""
    answer = call(
        connection, key.schema, "supersede_processor", processor_id=of, by=key.processor_id, partition=key.partition,
        epoch=lease.epoch, owner_token=lease.token, coverage=coverage.text, decided_by=decided_by,
    )  # fmt: skip
    return SupersedeAnswer(answer)


def list_rebuilds(connection: Connection, schema: str, processor_id: str | None = None) -> list[RebuildRow]:
    """Read all rebuilds, or those that a processor has part in."""
    rows = fetch_dicts(connection, in_schema("list_rebuilds", schema), {"processor_id": processor_id})
    return [
        RebuildRow(
            row["processor_id"], row["of_processor_id"], row["begun_at"], row["swapped_at"],
            build_pair(row["new_t"], row["new_p"]), build_pair(row["old_t"], row["old_p"]),
        )
        for row in rows
    ]  # fmt: skip
