"""Dead letters and stopped messages as a person sees and decides about them, outside any worker."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from outbox_core.progress.checkpoint import Checkpoint
from outbox_worker.postgres.call import call, fetch_rows, in_schema

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from outbox_worker.postgres.connection import Connection
    from outbox_worker.postgres.key import ProcessorKey


@dataclass(frozen=True, slots=True)
class Filter:
    """Which dead letters: all that are given must hold; a list holds where one of it does. The queries' parameters."""

    processor_id: str | None = None
    ids: list[int] | None = None
    keys: list[str] | None = None
    message_ids: list[str] | None = None
    types: list[str] | None = None
    classes: list[str] | None = None
    text: str | None = None
    since: datetime | None = None
    until: datetime | None = None


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One message that waits for a person; `behind` is how many of its key wait for it, counted up to 1,000."""

    id: int
    processor_id: str
    partition: int
    key: str | None
    message_id: str
    message_type: str
    pair: Checkpoint
    attempts: int
    error_class: str
    error: str
    blocks: bool
    died_at: datetime
    data: str | None
    behind: int


@dataclass(frozen=True, slots=True)
class HeldView:
    """One held message; `next_attempt_at` None: it waits for a person, or behind another one of its key (`is_behind`).

    `behind` is the number of messages that wait behind this one.
    """

    place: int
    processor_id: str
    partition: int
    key: str
    message_id: str
    message_type: str
    pair: Checkpoint
    attempts: int
    crash_count: int
    error_class: str | None
    error: str | None
    blocks: bool
    held_at: datetime
    next_attempt_at: datetime | None
    behind: int
    is_behind: bool


def list_dead(
    connection: Connection,
    schema: str,
    wanted: Filter,
    *,
    limit: int,
    payload: bool = False,
) -> list[DeadLetter]:
    """Return dead letters in the order of their numbers."""
    parameters = {"numbers": find_dead(connection, schema, wanted, limit=limit), "payload": payload}
    rows = fetch_rows(connection, in_schema("list_dead_letters", schema), parameters)
    return [DeadLetter(*(*row[:6], Checkpoint(int(row[6]), row[7]), *row[8:])) for row in rows]


def find_dead(connection: Connection, schema: str, wanted: Filter, *, limit: int | None = None) -> list[int]:
    """Return the numbers of dead letters, in their order; no limit: of all."""
    rows = fetch_rows(connection, in_schema("find_dead_letters", schema), asdict(wanted) | {"limit": limit})
    return [number for (number,) in rows]


def list_held(
    connection: Connection, schema: str, wanted: Filter, *, limit: int, stopped: bool = False
) -> list[HeldView]:
    """Return held messages by processor, key or message id; `stopped`: only those that wait for a person.

    What is behind another one of its key is found by its message id only.
    """
    parameters = asdict(wanted) | {"limit": limit, "stopped": stopped}
    rows = fetch_rows(connection, in_schema("list_held_messages", schema), parameters)
    return [HeldView(*(*row[:6], Checkpoint(int(row[6]), row[7]), *row[8:])) for row in rows]


def decide_dead(
    connection: Connection, key: ProcessorKey, ids: Sequence[int], *, drop: bool, reason: str, decided_by: str
) -> int:
    """Give dead letters back or up for good, in one transaction of its own; return how many still were there.

    Raises:
        TransientError: the owner was at it for more than two seconds; ask again.

    """
    if drop:
        decided = call(
            connection, key.schema, "drop_dead_letters", **key.names, ids=list(ids), reason=reason,
            decided_by=decided_by,
        )  # fmt: skip
    else:
        decided = call(
            connection, key.schema, "redrive_dead_letters", **key.names, ids=list(ids), reason=reason,
            decided_by=decided_by,
        )  # fmt: skip
    return int(decided)


def decide_held(
    connection: Connection, key: ProcessorKey, places: Sequence[int], *, drop: bool, reason: str, decided_by: str
) -> int:
    """Try messages again that stop their key, or drop them; otherwise like `decide_dead`."""
    decided: int = call(
        connection, key.schema, "decide_held_messages", **key.names, places=list(places), drop=drop, reason=reason,
        decided_by=decided_by,
    )  # fmt: skip
    return decided
