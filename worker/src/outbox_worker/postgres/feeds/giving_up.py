"""Messages that a person gives up while their processor stands at them: recorded by `outbox`, found by the worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox_core.progress.checkpoint import Checkpoint, parse_checkpoint
from outbox_worker.postgres.call import fetch_one, fetch_row
from outbox_worker.postgres.errors import translated
from outbox_worker.postgres.queries import in_schema, load

if TYPE_CHECKING:
    from psycopg import sql

    from outbox_worker.postgres.connection import Connection
    from outbox_worker.postgres.key import ProcessorKey


@dataclass(frozen=True, slots=True)
class FoundMessage:
    """A message as a person knows it."""

    place: Checkpoint
    message_id: str
    message_type: str | None
    key: str | None


def find_message(connection: Connection, rows: sql.Composable) -> FoundMessage | None:
    """Return the first message of a range; None: its row is gone."""
    row = fetch_row(connection, load("name_message").format(rows=rows))
    return None if row is None else FoundMessage(Checkpoint(int(row[0]), row[1]), *row[2:])


def record(connection: Connection, key: ProcessorKey, place: Checkpoint, *, reason: str, decided_by: str) -> None:
    """Write down that the processor goes on without the message at this place, should it stand there."""
    parameters = _at(key, place) | {"reason": reason, "decided_by": decided_by}
    with translated():
        connection.execute(in_schema("record_giving_up", key.schema), parameters)


def find(connection: Connection, key: ProcessorKey, place: str) -> bool:
    """Say whether a person gave the message at this place up, since the processor was last rewound."""
    (given_up,) = fetch_one(connection, in_schema("find_giving_up", key.schema), _at(key, parse_checkpoint(place)))
    return bool(given_up)


def _at(key: ProcessorKey, place: Checkpoint) -> dict[str, Any]:
    return {
        "processor_id": key.processor_id, "partition": key.partition,
        "transaction_id": str(place.transaction_id), "position": place.position,
    }  # fmt: skip
