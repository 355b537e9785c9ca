"""The stored checkpoint: read it, store the first one and the next one, settle an unanswered COMMIT.

For a target whose receiver drops what it has, the number of a message is beside it (outbox_core.progress.numbering).

The contract itself is SQL (`store_processor_checkpoint`), because other programs call it too. Its
functions keep a shadow checkpoint beside it, so that a worker that loads a row sees that it was edited by hand
(`find_tampering`), although the audit log has no such decision.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from psycopg import sql

from outbox_core.errors import ConfigurationError, OutboxError
from outbox_core.progress.checkpoint import MAX_POSITION, Checkpoint, StoreAnswer
from outbox_core.progress.numbering import Numbering
from outbox_core.progress.snapshot_range import SnapshotRange
from outbox_core.report import Reason
from outbox_core.spec import DEFAULT_CURSOR, Cursor
from outbox_worker.postgres.call import call_row, call_rows, compose_call, fetch_one, fetch_rows, in_schema

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import datetime

    from outbox_core.processor.outcomes import HeldLease
    from outbox_core.spec import Source
    from outbox_worker.postgres.connection import Connection
    from outbox_worker.postgres.key import ProcessorKey

GONE_RANGE: Final = Checkpoint(0, 1)
"""What is expected where a snapshot range was deleted, and its counter with it: a counter that tells the cursor."""


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """The row: the pair of the last message examined, and when it was stored."""

    pair: Checkpoint
    stored_at: datetime


@dataclass(frozen=True, slots=True)
class Settled:
    """What is stored after a commit whose outcome was unknown.

    Attributes:
        owned: the epoch is still the live owner's; if not, stop and acquire a new one.
        pair: the stored pair, None where there is no row; only said to the owner.

    """

    owned: bool
    pair: Checkpoint | None


@dataclass(frozen=True, slots=True)
class Start:
    """Where to go on, and whether `startFrom` decided it (False: a checkpoint was stored already)."""

    pair: Checkpoint
    start_from_used: bool


@dataclass(frozen=True, slots=True)
class TamperCheck:
    """What the contract's functions stored, None where that is gone too, and what was put in its place."""

    kept: Checkpoint | None
    stored: Checkpoint | None

    @property
    def answer(self) -> StoreAnswer:
        """What an owner is told that expects the pair that was kept."""
        if self.stored is None or (self.kept is not None and self.stored < self.kept):
            return StoreAnswer.OLDER
        return StoreAnswer.AHEAD


class TamperedError(OutboxError):
    """The checkpoint was edited by hand: nothing goes on from it until a person decides."""

    def __init__(self, edit: TamperCheck) -> None:
        """Keep both pairs."""
        super().__init__(
            f"the checkpoint was {edit.kept}, and a program or person without the lease made it {edit.stored}"
        )
        self.edit = edit


def load(connection: Connection, key: ProcessorKey) -> StoredCheckpoint | None:
    """Read the stored pair; None where the processor never stored one."""
    return load_all(connection, key, key.partition).get(key.partition)


def load_all(connection: Connection, key: ProcessorKey, partition: int | None = None) -> dict[int, StoredCheckpoint]:
    """Read the stored pairs by partition, all of the processor or one."""
    parameters = key.names | {"partition": partition}
    rows = fetch_rows(connection, in_schema("fetch_checkpoints", key.schema), parameters)
    return {number: StoredCheckpoint(build_checkpoint(*row), stored_at) for number, stored_at, *row in rows}


def load_untampered(connection: Connection, key: ProcessorKey) -> StoredCheckpoint | None:
    """Read the stored pair to go on from it.

    The row is read before it is compared with its copy: an edit in between, or later, is met by the next store.

    Raises:
        TamperedError: it was changed or deleted past the contract.

    """
    stored = load(connection, key)
    if edits := call_rows(connection, key.schema, "find_tampering", **key.names):
        raise TamperedError(TamperCheck(build_pair(*edits[0][:2]), build_pair(*edits[0][2:])))
    return stored


def find_expected(connection: Connection, key: ProcessorKey, source: Source, edit: TamperCheck) -> Checkpoint | None:
    """Return the pair that was kept; of a snapshot range that is gone GONE_RANGE: a person names a position for it.

    Of which cursor a checkpoint was that is gone the resource says, or the other partitions do.
    """
    if edit != TamperCheck(None, None):
        return edit.kept
    others = {} if source.cursor is not None else load_all(connection, key)
    if others:
        is_range = any(each.pair.snapshot_range is not None for each in others.values())
    else:
        is_range = (source.cursor or DEFAULT_CURSOR) is Cursor.SNAPSHOT
    return GONE_RANGE if is_range else None


def fetch_last_move(connection: Connection, key: ProcessorKey) -> int:
    """Return the number of the last audit log entry by which a person moved the checkpoint; 0: none did."""
    (number,) = fetch_one(connection, in_schema("fetch_last_move", key.schema), key.names)
    return int(number)


def store(
    connection: Connection,
    key: ProcessorKey,
    lease: HeldLease | None,
    *,
    new: Checkpoint,
    expected: Checkpoint | None,
) -> StoreAnswer:
    """Store `new`, with its number if it has one, in the open transaction; roll back on every answer but STORED.

    Raises:
        PermanentError: `new` is not after `expected`.
        TransientError: not in READ COMMITTED, and another transaction stored since the snapshot.

    """
    return StoreAnswer(fetch_one(connection, compose_store(key, lease, new=new, expected=expected))[0])


def compose_store(
    key: ProcessorKey,
    lease: HeldLease | None,
    *,
    new: Checkpoint,
    expected: Checkpoint | None,
    run: str | None = None,
) -> sql.Composed:
    """Return the statement of `store`, to be one among others that are sent at once.

    `run`: in another run of the server nothing is stored, and the answer is null.
    """
    if new.snapshot_range is None:
        stored = compose_call(
            key.schema, "store_processor_checkpoint", **leased(key, lease),
            **pair_parameters(new=new, expected=expected),
        )  # fmt: skip
    else:
        stored = compose_call(
            key.schema, "store_processor_range", **leased(key, lease), **range_parameters("new", new),
            **range_parameters("expected", expected),
        )  # fmt: skip
    if run is not None:
        stored = sql.SQL("SELECT CASE WHEN {}.server_run()::text = {} THEN ({}) END").format(
            sql.Identifier(key.schema), sql.Literal(run), stored
        )
    if new.numbering is None:
        return stored
    number = compose_call(
        key.schema, "store_publisher_number", **key.names, space=new.numbering.space,
        transaction_id=str(new.transaction_id), position=new.position, number=new.numbering.last,
    )  # fmt: skip
    return sql.SQL(
        "WITH s (answer) AS MATERIALIZED ({}) SELECT s.answer, CASE WHEN s.answer = {} THEN ({}) END FROM s"
    ).format(stored, sql.Literal(StoreAnswer.STORED.value), number)


def open_numbers(
    connection: Connection, key: ProcessorKey, lease: HeldLease, stored: Checkpoint, mapping: str
) -> Checkpoint | None:
    """Return the stored checkpoint with its number, in the transaction that loaded it under the lease; None: it went.

    Raises:
        ConfigurationError: `CursorDiffers`: the checkpoint is a snapshot range.

    """
    if stored.snapshot_range is not None:
        raise ConfigurationError(
            f"the checkpoint of processor {key.processor_id!r} is of cursor Snapshot, and its target numbers messages "
            "in the order of cursor TransactionOrder: use another processorId with source.cursor: TransactionOrder and "
            "startFrom",
            reason=Reason.CURSOR_DIFFERS,
        )
    rows = call_rows(connection, key.schema, "open_publisher_numbers", **leased(key, lease), mapping=mapping)
    return replace(stored, numbering=Numbering(str(rows[0][0]), rows[0][1])) if rows else None


def settle(connection: Connection, key: ProcessorKey, lease: HeldLease) -> Settled:
    """Find out what is stored after a COMMIT without an answer; call it before anything else, on a new connection.

    Waits up to 2 s for the old transaction to end. The new pair: it was committed; the expected one: it was not.

    Raises:
        TransientError: the old transaction is not over yet, ask again.

    """
    owned, transaction_id, _ = call_row(connection, key.schema, "settle_processor_checkpoint", **leased(key, lease))
    # Only the owner, which is asking, could store another one between the two.
    stored = None if transaction_id is None else load(connection, key)
    return Settled(owned, None if stored is None else stored.pair)


def check_kind(key: ProcessorKey, source: Source, stored: Checkpoint) -> None:
    """Refuse a checkpoint of another kind than the resource names; one that names none goes on with what is stored.

    Raises:
        ConfigurationError: `CursorDiffers`.

    """
    kind = Cursor.TRANSACTION_ORDER if stored.snapshot_range is None else Cursor.SNAPSHOT
    if source.cursor not in (None, kind):
        raise ConfigurationError(
            f"the checkpoint of processor {key.processor_id!r} is of cursor {kind}, and source.cursor is "
            f"{source.cursor}: a checkpoint of one kind means nothing to the other. Set source.cursor to {kind} or "
            "leave it out (engine Spark has TransactionOrder only), or use another processorId",
            reason=Reason.CURSOR_DIFFERS,
        )


def ensure_start(
    connection: Connection, key: ProcessorKey, lease: HeldLease, source: Source, find: Callable[[], Checkpoint]
) -> Start | None:
    """Load the checkpoint, or find and store the first one under our lease, all in the connection's transaction.

    None: we are not the owner (any more): roll back. Commit otherwise, before reading.

    Raises:
        TamperedError: it was changed or deleted past the contract: roll back, and record that.

    """
    stored = load_untampered(connection, key)
    if stored is not None:
        check_kind(key, source, stored.pair)
        return Start(stored.pair, start_from_used=False)
    pair = find()
    answer = store(connection, key, lease, new=pair, expected=None)
    if answer is StoreAnswer.STORED:
        return Start(pair, start_from_used=True)
    stored = None if answer is StoreAnswer.NOT_OWNER else load_untampered(connection, key)
    return None if stored is None else Start(stored.pair, start_from_used=False)


def fetch_high_water_mark(connection: Connection) -> Checkpoint:
    """Return the last pair that any settled transaction can have."""
    (high_water_mark,) = fetch_one(connection, "SELECT pg_snapshot_xmin(pg_current_snapshot())::text")
    return Checkpoint(int(high_water_mark) - 1, MAX_POSITION)


def build_checkpoint(
    transaction_id: str,
    position: int,
    cursor_kind: str,
    lower: str | None,
    upper: str | None,
    range_position: int | None,
) -> Checkpoint:
    """Return the checkpoint of a row; one of the cursor Snapshot has a snapshot range."""
    snapshot_range = SnapshotRange(lower, upper, range_position) if cursor_kind == Cursor.SNAPSHOT else None
    return Checkpoint(int(transaction_id), position, snapshot_range)


def build_pair(transaction_id: str | None, position: int | None) -> Checkpoint | None:
    """Return the pair of a row that may have none."""
    return None if transaction_id is None or position is None else Checkpoint(int(transaction_id), position)


def range_parameters(name: str, checkpoint: Checkpoint | None) -> dict[str, Any]:
    """Spread a checkpoint of cursor Snapshot over `NAME_counter`, `_lower`, `_upper` and `_position`."""
    snapshot_range = (
        SnapshotRange() if checkpoint is None or checkpoint.snapshot_range is None else checkpoint.snapshot_range
    )
    return {
        f"{name}_counter": None if checkpoint is None else checkpoint.position,
        f"{name}_lower": snapshot_range.lower,
        f"{name}_upper": snapshot_range.upper,
        f"{name}_position": snapshot_range.position,
    }


def leased(key: ProcessorKey, lease: HeldLease | None) -> dict[str, Any]:
    """Name the key and a lease, which the function compares; None: the caller has none."""
    return key.names | {"epoch": lease and lease.epoch, "owner_token": lease and lease.token}


def partition_parameters(pairs: Mapping[int, Checkpoint]) -> dict[str, list[Any]]:
    """Spread the checkpoints of several partitions, of either cursor, over lists of the same order."""
    ranges = [pair.snapshot_range or SnapshotRange() for pair in pairs.values()]
    return {
        "partitions": list(pairs),
        "transaction_ids": [str(pair.transaction_id) for pair in pairs.values()],
        "counters": [pair.position for pair in pairs.values()],
        "lowers": [snapshot_range.lower for snapshot_range in ranges],
        "uppers": [snapshot_range.upper for snapshot_range in ranges],
        "positions": [snapshot_range.position for snapshot_range in ranges],
    }


def pair_parameters(**pairs: Checkpoint | None) -> dict[str, Any]:
    """Spread each pair over `NAME_transaction_id` (as text: JSON and drivers have no xid8) and `NAME_position`."""
    parameters: dict[str, Any] = {}
    for name, pair in pairs.items():
        parameters[f"{name}_transaction_id"] = None if pair is None else str(pair.transaction_id)
        parameters[f"{name}_position"] = None if pair is None else pair.position
    return parameters
