"""Starting where another processor stands: its checkpoint, copied once, when the new one is first owned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox_core.checkpoint import Checkpoint
from outbox_core.errors import ConfigurationError
from outbox_core.report import Reason
from outbox_core.spec import DEFAULT_CURSOR, Cursor
from outbox_worker.postgres import apart
from outbox_worker.postgres.checkpoints import build_window
from outbox_worker.postgres.errors import translated
from outbox_worker.postgres.queries import in_schema, load

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

    import psycopg

    from outbox_core.spec import Source
    from outbox_worker.postgres.key import ProcessorKey


@dataclass(frozen=True, slots=True)
class OtherStart:
    """Where another processor stands.

    Attributes:
        pairs: by partition; one that is not divided has number 0 only.
        count: into how many partitions it is divided; None: it is not.
        by: by which key, in `describe_key`'s words.

    """

    pairs: Mapping[int, Checkpoint]
    count: int | None
    by: str | None

    @property
    def windowed(self) -> bool:
        """Its cursor is Snapshot."""
        return any(pair.window is not None for pair in self.pairs.values())

    @property
    def start(self) -> Checkpoint:
        """Where one that starts here begins: behind it nothing was handled that is not handled by all."""
        lowest = min(self.pairs.values())
        return lowest if lowest.window is None else Checkpoint(0, 1, lowest.window)

    def divided_like(self, count: int, by: str) -> bool:
        """The same keys are in the same partitions, and each stands at a pair."""
        return (self.count, self.by) == (count, by) and len(self.pairs) == count and not self.windowed


def find_other(
    home: psycopg.Connection[Any],
    reading: psycopg.Connection[Any],
    source: Source,
    key: ProcessorKey,
    other_id: str,
) -> OtherStart:
    """Find another processor's checkpoint: beside our own, or in the source's database.

    Raises:
        ConfigurationError: `StartNotFound`: it has none, or in both, or it is of another source.

    """
    if reading is home:
        found = _read(home, key, other_id, None)
    else:
        beside = _read(home, key, other_id, apart.identify(reading, source).identity)
        exists, readable = _has_checkpoints(reading, key)
        # One that may not be read is no reason to refuse what was found; without it, the refusal names the right.
        there = _read(reading, key, other_id, None) if readable or (exists and beside is None) else None
        if beside is not None and there is not None:
            raise ConfigurationError(
                f"startFrom: processor {other_id!r} has a checkpoint in the source's database and one in the target's: "
                "which is meant? Start from a position or a time instead",
                reason=Reason.START_NOT_FOUND,
            )
        found = beside or there
    if found is None:
        raise ConfigurationError(
            f"startFrom: processor {other_id!r} has no checkpoint in schema {key.schema}: correct "
            "startFrom.processorId, or let that processor start first",
            reason=Reason.START_NOT_FOUND,
        )
    _check_kind(found, source, other_id)
    return found


def _check_kind(found: OtherStart, source: Source, other_id: str) -> None:
    kind = Cursor.SNAPSHOT if found.windowed else Cursor.TRANSACTION_ORDER
    wanted = source.cursor or DEFAULT_CURSOR
    if kind is not wanted:
        raise ConfigurationError(
            f"startFrom: the checkpoint of processor {other_id!r} is of cursor {kind}, and this one would read by "
            f"{wanted}: a checkpoint of one kind means nothing to the other. Set source.cursor to {kind}, or start "
            "from a position or a time",
            reason=Reason.START_NOT_FOUND,
        )
    if found.windowed and len(found.pairs) > 1:
        raise ConfigurationError(
            f"startFrom: the {len(found.pairs)} partitions of processor {other_id!r} stand at windows between "
            "snapshots, of which none is the lowest: start from a position or a time",
            reason=Reason.START_NOT_FOUND,
        )


def _read(
    connection: psycopg.Connection[Any], key: ProcessorKey, other_id: str, identity: str | None
) -> OtherStart | None:
    with translated():
        rows = connection.execute(in_schema("find_processor", key.schema), {"processor_id": other_id}).fetchall()
    if not rows:
        return None
    count, by, source, competing = rows[0][3], rows[0][4], rows[0][5], rows[0][10]
    if source != identity:
        raise ConfigurationError(
            f"startFrom: processor {other_id!r} reads another database than {key.processor_id!r}: its checkpoint means "
            "nothing here",
            reason=Reason.START_NOT_FOUND,
        )
    if competing:
        raise ConfigurationError(
            f"startFrom: processor {other_id!r} hands out batches (mode Competing): behind its checkpoint are messages "
            "that are handled already. Start from a position or a time",
            reason=Reason.START_NOT_FOUND,
        )
    return OtherStart({row[0]: Checkpoint(int(row[1]), row[2], build_window(*row[6:10])) for row in rows}, count, by)


def _has_checkpoints(connection: psycopg.Connection[Any], key: ProcessorKey) -> tuple[bool, bool]:
    parameters = {"schema": key.schema, "table": "processor_checkpoints"}
    with translated():
        row = connection.execute(load("find_relation"), parameters).fetchone()
    return (False, False) if row is None else (row[0], row[1])


def spread(
    connection: psycopg.Connection[Any],
    key: ProcessorKey,
    pairs: Mapping[int, Checkpoint],
    *,
    epoch: int,
    token: UUID,
) -> bool:
    """Give each partition the start that is its own, in the transaction that divided the processor."""
    parameters = {
        "processor_id": key.processor_id,
        "partitions": list(pairs),
        "transaction_ids": [str(pair.transaction_id) for pair in pairs.values()],
        "positions": [pair.position for pair in pairs.values()],
        "partition": key.partition,
        "epoch": epoch,
        "token": token,
    }
    with translated():
        row = connection.execute(in_schema("spread_start", key.schema), parameters).fetchone()
    return row is not None and row[0] is True
