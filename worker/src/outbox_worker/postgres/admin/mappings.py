"""Which table a processor reads, written down beside its claim: for a person who counts or deletes messages."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from outbox_core.spec import Source
from outbox_worker.postgres.call import call, fetch_rows, in_schema

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
    rows = fetch_rows(connection, in_schema("list_mappings", schema))
    return {processor_id: _source(schema, *mapping) for processor_id, *mapping in rows}


def _source(
    schema: str,
    table_schema: str | None,
    name: str | None,
    columns: dict[str, str] | None,
    publications: list[str],
    message_types: list[str],
) -> Source:
    table = None if name is None else {"schemaName": table_schema, "name": name, "columns": columns or {}}
    return Source.model_validate(
        {
            "connection": {"secretRef": {"name": "unused"}},
            "schemaName": schema,
            "table": table,
            "publications": publications,
            "messageTypes": message_types,
        }
    )
