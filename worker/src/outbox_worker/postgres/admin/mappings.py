"""Which table a processor reads, written down beside its claim: for a person who counts or deletes messages."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from outbox_core.spec import Source
from outbox_worker.postgres.call import call, fetch_dicts, in_schema

if TYPE_CHECKING:
    from outbox_worker.postgres.connection import Connection
    from outbox_worker.postgres.key import ProcessorKey


def note(connection: Connection, key: ProcessorKey, claim_uid: str, source: Source) -> None:
    """Write down table, columns and filters, as the claim's holder; nothing is written where nothing changed."""
    table = source.table
    call(
        connection, key.schema, "note_mapping", processor_id=key.processor_id, claim_uid=claim_uid,
        table_schema=None if table is None else table.schema_name, table_name=None if table is None else table.name,
        columns=None if table is None else json.dumps(table.columns.model_dump(by_alias=True, exclude_none=True)),
        publications=source.publications, message_types=source.message_types,
    )  # fmt: skip


def list_mappings(connection: Connection, schema: str) -> dict[str, Source]:
    """Return the source of each processor that ever said it."""
    rows = fetch_dicts(connection, in_schema("list_mappings", schema))
    return {row["processor_id"]: _source(schema, row) for row in rows}


def _source(schema: str, row: dict[str, Any]) -> Source:
    table = None
    if row["table_name"] is not None:
        table = {"schemaName": row["table_schema"], "name": row["table_name"], "columns": row["columns"] or {}}
    return Source.model_validate(
        {
            "connection": {"secretRef": {"name": "unused"}},
            "schemaName": schema,
            "table": table,
            "publications": row["publications"],
            "messageTypes": row["message_types"],
        }
    )
