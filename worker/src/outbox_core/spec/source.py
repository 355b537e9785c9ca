"""Where messages are read, in which order, and from where on."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Final

from pydantic import ConfigDict, Field

from outbox_core.spec.base import Connection, ProcessorId, SpecModel, SqlIdentifier, rule, rules


class SchemaManagement(StrEnum):
    """Who brings the database schema to the version this processor needs."""

    MANAGE = "Manage"
    VERIFY = "Verify"


class Cursor(StrEnum):
    """In which order, and up to where, messages are read."""

    TRANSACTION_ORDER = "TransactionOrder"
    SNAPSHOT = "Snapshot"


DEFAULT_CURSOR: Final = Cursor.SNAPSHOT
"""Engine Worker: of a processor whose resource names none and that has no checkpoint yet; a stored one keeps its
kind. Engine Spark has TransactionOrder only."""


class StartType(StrEnum):
    """Where a processor without a stored checkpoint starts."""

    BEGINNING = "Beginning"
    END = "End"
    POSITION = "Position"
    TIMESTAMP = "Timestamp"
    PROCESSOR = "Processor"


class Columns(SpecModel):
    """Names of the outbox's columns, for a table that exists already under other names."""

    position: SqlIdentifier = Field("position", description="bigint from a sequence with CACHE 1.")
    transaction_id: SqlIdentifier = Field("transaction_id", description="xid8 with default pg_current_xact_id().")
    message_id: SqlIdentifier = Field("message_id", description="Identity of the message, read as text.")
    message_type: SqlIdentifier = Field("message_type", description="Type of the message, read as text.")
    data: SqlIdentifier = Field("data", description="The payload, jsonb, json or text holding JSON.")
    publication_id: SqlIdentifier | None = Field(
        None, description="Publication of the message; without it every message is of publication `default`."
    )
    partition_key: SqlIdentifier | None = Field(None, description="Key whose messages belong together.")
    metadata: SqlIdentifier | None = Field(None, description="jsonb with what is not payload.")
    scheduled: SqlIdentifier | None = Field(None, description="timestamptz at which the message was stored.")
    deliver_after: SqlIdentifier | None = Field(
        None, description="timestamptz before which the message is not handled; null: at once (not Ordered)."
    )


class Table(SpecModel):
    """An outbox table that is not the one this product creates."""

    schema_name: SqlIdentifier = Field(description="Schema of the table.")
    name: SqlIdentifier = Field(description="Name of the table.")
    columns: Columns = Field(default_factory=Columns, description="Names of its columns.")


class Source(SpecModel):
    """Where the messages are."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "!has(self.cursor) || !has(oldSelf.cursor) || self.cursor == oldSelf.cursor",
                "cursor cannot be changed: a checkpoint of one kind means nothing to the other; use another "
                "processorId",
            ),
        )
    )

    connection: Connection = Field(description="The PostgreSQL database that holds outbox and checkpoints.")
    schema_: SchemaManagement = Field(
        SchemaManagement.MANAGE,
        alias="schema",
        description=(
            "Manage: workers apply missing migrations at start. Verify: they only check, and wait while the "
            "schema is too old (run `outbox migrate` as its owner)."
        ),
    )
    schema_name: SqlIdentifier = Field(
        "outbox", description="Schema of checkpoints, claims, leases and functions, and of `messages`."
    )
    table: Table | None = Field(
        None, description="An outbox that exists already. Absent: the table `messages` in `schemaName`."
    )
    publications: list[Annotated[str, Field(min_length=1, max_length=128)]] = Field(
        default_factory=list,
        max_length=64,
        description="Handle only messages of these publications. Empty: of all.",
        json_schema_extra={"x-kubernetes-list-type": "set"},
    )
    message_types: list[Annotated[str, Field(min_length=1, max_length=256)]] = Field(
        default_factory=list,
        max_length=256,
        description="Handle only messages of these types; others are examined and passed over. Empty: all.",
        json_schema_extra={"x-kubernetes-list-type": "set"},
    )
    cursor: Cursor | None = Field(
        None,
        description=(
            "Snapshot (engine Worker): what was committed since the last look, by position; no other transaction "
            "holds it back, and messages of one key come in commit order if producers lock the key before they "
            "insert. TransactionOrder: by (transaction_id, position) below the oldest open transaction; one order for "
            "all. Absent: what the stored checkpoint has; where none is stored, Snapshot with engine Worker and "
            "TransactionOrder with Spark."
        ),
    )


def _goes_with(name: str, kind: StartType) -> dict[str, str]:
    return rule(f"(self.type == '{kind}') == has(self.{name})", f"{name} goes with type {kind}: set both or neither")


class StartFrom(SpecModel):
    """Where to start when no checkpoint is stored. With one stored, it is not used, and status says so."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            _goes_with("position", StartType.POSITION),
            _goes_with("timestamp", StartType.TIMESTAMP),
            _goes_with("processorId", StartType.PROCESSOR),
        )
    )

    type: StartType = Field(
        StartType.BEGINNING,
        description=(
            "Beginning: every message there is. End: what commits from now on, with what is in flight now. "
            "Position: from the first message whose position is at least `position`. "
            "Timestamp: from the first message stored at or after `timestamp`; earlier ones may come too. Processor: "
            "from where the checkpoint of `processorId` stands when this one first starts."
        ),
    )
    position: Annotated[int, Field(ge=0)] | None = Field(
        None, description="First position to handle.", json_schema_extra={"format": "int64"}
    )
    timestamp: datetime | None = Field(None, description="RFC 3339 time of the first message to handle.")
    processor_id: ProcessorId | None = Field(
        None,
        description=(
            "Another processor of the same source. Of a partitioned one its lowest checkpoint counts, or, with the "
            "same partitions, each partition's own."
        ),
    )
