"""The outbox table as the source names it, and its columns as SQL expressions under the names this product uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from psycopg import sql

from outbox_core.spec import Columns

if TYPE_CHECKING:
    from outbox_core.spec import Source

OWN_TABLE: Final = "messages"
_OWN_COLUMNS: Final = Columns(
    publication_id="publication_id", partition_key="partition_key", metadata="metadata", scheduled="scheduled"
)


@dataclass(frozen=True, slots=True)
class OutboxTable:
    """Schema, name and columns; `columns` has None for what a mapped table lacks."""

    schema: str
    name: str
    columns: Columns

    @classmethod
    def of(cls, source: Source) -> OutboxTable:
        """Take the mapped table, or `messages` in the product's own schema."""
        if source.table is None:
            return cls(source.schema_name, OWN_TABLE, _OWN_COLUMNS)
        return cls(source.table.schema_name, source.table.name, source.table.columns)

    @property
    def identifier(self) -> sql.Identifier:
        """`"schema"."table"`."""
        return sql.Identifier(self.schema, self.name)

    @property
    def pair(self) -> sql.Composed:
        """`o.transaction_id, o.position`: for comparing as a row, and for the order."""
        return sql.SQL("{}, {}").format(
            sql.Identifier("o", self.columns.transaction_id), sql.Identifier("o", self.columns.position)
        )

    def matches(self, types: sql.Composable | None) -> sql.Composable:
        """Whether the row `o` passes the filter on types."""
        if types is None:
            return sql.SQL("true")
        return sql.SQL("(o.{}::text = ANY ({}::text[]))").format(sql.Identifier(self.columns.message_type), types)

    def selection(self, *, payload: str) -> sql.Composed:
        """List the columns of `o` under their standard names.

        `payload` is `text` (shipped as it is, never parsed) or `jsonb` (for a user's statement).
        """
        columns = self.columns
        as_payload = sql.SQL(payload)
        expressions = {
            "transaction_id": _column(columns.transaction_id),
            "position": _column(columns.position),
            "message_id": _column(columns.message_id, "text"),
            "message_type": _column(columns.message_type, "text"),
            "publication_id": _column(columns.publication_id, "text", absent="'default'::text"),
            "partition_key": _column(columns.partition_key, "text", absent="NULL::text"),
            "data": sql.SQL("{}::{}").format(_column(columns.data), as_payload),
            "metadata": sql.SQL("{}::{}").format(_column(columns.metadata, absent="NULL"), as_payload),
            "scheduled": _column(columns.scheduled, absent="clock_timestamp()"),
        }
        return sql.SQL(", ").join(
            sql.SQL("{} AS {}").format(expression, sql.Identifier(name)) for name, expression in expressions.items()
        )


def _column(name: str | None, cast: str | None = None, absent: str = "NULL") -> sql.Composable:
    if name is None:
        return sql.SQL(absent)
    column = sql.Identifier("o", name)
    return column if cast is None else sql.SQL("{}::{}").format(column, sql.SQL(cast))
