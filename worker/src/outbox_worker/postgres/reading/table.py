"""The outbox table as the source names it, and its columns as SQL expressions under the names this product uses."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Final, Literal

from psycopg import sql

from outbox_core.errors import ConfigurationError
from outbox_core.message import Message
from outbox_core.spec import Columns

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from outbox_core.spec import PartitionKey, Source

OWN_TABLE: Final = "messages"
OWN_COLUMNS: Final = Columns(
    publication_id="publication_id", partition_key="partition_key", metadata="metadata", scheduled="scheduled",
    deliver_after="deliver_after",
)  # fmt: skip


@dataclass(frozen=True)
class OutboxTable:
    """Schema, name and columns; `columns` has None for what a mapped table lacks.

    What is the same for every batch is composed once, and kept as text.
    """

    schema: str
    name: str
    columns: Columns

    @classmethod
    def of(cls, source: Source) -> OutboxTable:
        """Take the mapped table, or `messages` in the product's own schema."""
        if source.table is None:
            return cls(source.schema_name, OWN_TABLE, OWN_COLUMNS)
        return cls(source.table.schema_name, source.table.name, source.table.columns)

    @cached_property
    def identifier(self) -> sql.Identifier:
        """`"schema"."table"`."""
        return sql.Identifier(self.schema, self.name)

    @cached_property
    def names(self) -> dict[str, sql.Identifier]:
        """Names for statements: `table`, `transaction_id`, `position`, `scheduled` (where there is none: position)."""
        columns = self.columns
        found = {"transaction_id": columns.transaction_id, "position": columns.position}
        found["scheduled"] = columns.scheduled or columns.position
        return {"table": self.identifier, **{name: sql.Identifier(column) for name, column in found.items()}}

    @cached_property
    def pair(self) -> sql.SQL:
        """`o.transaction_id, o.position`: for comparing as a row, and for the order."""
        return as_text(sql.SQL("{}, {}").format(self.transaction_id, self.position))

    @cached_property
    def transaction_id(self) -> sql.SQL:
        """The transaction id of `o`."""
        return as_text(sql.Identifier("o", self.columns.transaction_id))

    @cached_property
    def position(self) -> sql.SQL:
        """The position of `o`."""
        return as_text(sql.Identifier("o", self.columns.position))

    @property
    def named_pair(self) -> sql.Composed:
        """Both as columns of a SELECT: `transaction_id`, `position`."""
        return sql.SQL("{} AS transaction_id, {} AS position").format(self.transaction_id, self.position)

    def rows_of(self, keys: sql.Composable) -> sql.Composed:
        """Return, for FROM, the rows `o` of a SELECT of pairs: looked up one by one, however many are expected."""
        return sql.SQL(
            "({}) AS k CROSS JOIN LATERAL (SELECT o.* FROM {} AS o WHERE {} = k.transaction_id AND {} = k.position "
            "OFFSET 0) AS o"
        ).format(keys, self.identifier, self.transaction_id, self.position)

    def inside_transaction(
        self, transaction_id: sql.Composable, after: sql.Composable, up_to: sql.Composable
    ) -> sql.Composed:
        """Whether `o` is of one transaction, behind a position and up to another one.

        Two pairs compared as rows say the same, but before PostgreSQL 18 an index scan that ends at such a pair goes on
        to the end of its transaction.
        """
        return sql.SQL("{t} = {id}::xid8 AND {p} > {after}::bigint AND {p} <= {up_to}::bigint").format(
            t=self.transaction_id, p=self.position, id=transaction_id, after=after, up_to=up_to,
        )  # fmt: skip

    def between_ids(self, first: sql.Composable, last: sql.Composable) -> sql.Composed:
        """Whether the transaction id of `o` is one of two or between them: beside a range of pairs, for the planner.

        Of bounds of one column it knows how many rows lie between them; two pairs compared as rows are for it two
        conditions that have nothing to do with each other. In the middle of a table each is true of half of the rows,
        so it would read the whole table for what it takes for a quarter of it.
        """
        return sql.SQL("{t} >= {first}::xid8 AND {t} <= {last}::xid8").format(
            t=self.transaction_id, first=first, last=last
        )

    @cached_property
    def moment(self) -> sql.Composable:
        """When `o` was stored, within what Python can hold; null where the row does not say."""
        if self.columns.scheduled is None:
            return sql.SQL("NULL::timestamptz")  # not the time of reading: that says nothing of when it was stored
        return within_python(_column(self.columns.scheduled))

    def slot(self, key: PartitionKey, functions: str, row: str | None = "o") -> sql.Composed:
        """Return the expression of a message's hash slot: of its key, or where that is null of its message id.

        Null where both are: an index may stand on the expression, so it can never change.

        Args:
            key: what the resource says.
            functions: the schema that holds `hash_slot`.
            row: the table's alias; None for an index, which must be built on the very same expression.

        Raises:
            ConfigurationError: the key needs a column that the table does not have.

        """
        return sql.SQL("{}(coalesce({}, {}))").format(
            sql.Identifier(functions, "hash_slot"),
            self._key(key, row),
            _column(self.columns.message_id, "text", row=row),
        )

    def computed_slot(self, key: PartitionKey) -> sql.Composed:
        """Return the slot of `o` as `slot` does, for where no index is read by it: in the words of `hash_slot` itself.

        The server cannot put that function's body in its place, and calling a function in SQL takes longer than to
        compute the hash.

        Raises:
            ConfigurationError: the key needs a column that the table does not have.

        """
        return sql.SQL(
            "(pg_catalog.get_byte(pg_catalog.sha256(pg_catalog.convert_to(coalesce({}, {}), 'UTF8')), 0) & 63)"
        ).format(self._key(key, "o"), _column(self.columns.message_id, "text"))

    def key_text(self, key: PartitionKey | None) -> sql.Composed:
        """Return the expression of a message's key as text: the key, or where it is null the message id.

        None asks for the table's partition key column, where it has one.

        Raises:
            ConfigurationError: the key needs a column that the table does not have.

        """
        message_id = self.message_id
        if key is None and self.columns.partition_key is None:
            return sql.Composed([message_id])
        own = _column(self.columns.partition_key, "text") if key is None else self._key(key, "o")
        return sql.SQL("coalesce({}, {})").format(own, message_id)

    @cached_property
    def message_id(self) -> sql.Composed:
        """The id as text; of a message without one, which our own table cannot have, its place."""
        message_id = _column(self.columns.message_id, "text")
        if self.columns is OWN_COLUMNS:
            return sql.Composed([message_id])
        return sql.SQL("coalesce({}, concat_ws(':', {}))").format(message_id, self.pair)

    @cached_property
    def deliver_after(self) -> sql.Composable:
        """When `o` may be handled; null: at once."""
        return _column(self.columns.deliver_after, "timestamptz", absent="NULL::timestamptz")

    def _key(self, key: PartitionKey, row: str | None) -> sql.Composable:
        for path, column, field in (
            (key.data, self.columns.data, "data"),
            (key.metadata, self.columns.metadata, "metadata"),
        ):
            if path is not None and column is None:
                raise ConfigurationError(
                    f"delivery.partitions.key.{field} needs source.table.columns.{field}: name the column"
                )
            if path is not None:
                # One constant array: an index expression must be written the same way as the query's.
                return sql.SQL("({} #>> {}::text[])").format(_column(column, "jsonb", row=row), sql.Literal(path))
        name = key.column or self.columns.partition_key
        if name is None:
            raise ConfigurationError(
                "delivery.mode Partitioned needs a key: name delivery.partitions.key, or "
                "source.table.columns.partitionKey"
            )
        return _column(name, "text", row=row)

    def matches(self, types: sql.Composable | None) -> sql.Composable:
        """Whether the row `o` passes the filter on types."""
        if types is None:
            return sql.SQL("true")
        return sql.SQL("(o.{}::text = ANY ({}::text[]))").format(sql.Identifier(self.columns.message_type), types)

    @cached_property
    def publication_id(self) -> sql.Composable:
        """The publication of `o`, in a table that has a column for it."""
        return _column(self.columns.publication_id)

    def is_published(self, publications: Sequence[str]) -> sql.Composed:
        """Whether `o` belongs to one of these publications."""
        return sql.SQL("{} = ANY ({}::text[])").format(self.publication_id, sql.Literal(list(publications)))

    def picked(
        self,
        columns: sql.Composable,
        ids: sql.Composable,
        positions: sql.Composable,
        conditions: Sequence[sql.Composable],
    ) -> sql.Composed:
        """Return the SELECT of the messages with these pairs, in no order: each is looked up on an index.

        Args:
            columns: of `o`.
            ids: an array of transaction ids.
            positions: as many positions.
            conditions: that they are known to meet: of publications, where the index begins with those.

        """
        where = [sql.SQL("({}) = (w.t, w.p)").format(self.pair), *conditions]
        return sql.SQL(
            "SELECT {columns} FROM ROWS FROM (unnest({ids}::xid8[]), unnest({positions}::bigint[])) AS w (t, p) "
            "CROSS JOIN LATERAL (SELECT o.* FROM {table} AS o WHERE {conditions} OFFSET 0) AS o"
        ).format(
            columns=columns, ids=ids, positions=positions, table=self.identifier,
            conditions=sql.SQL(" AND ").join(where),
        )  # fmt: skip

    def picked_batch(
        self, ids: sql.Composable, positions: sql.Composable, conditions: Sequence[sql.Composable], *, near: bool
    ) -> sql.Composed:
        """Return `picked` for a user's statement; `near`: positions ascend, with few others between them.

        Then a walk along the index of positions costs half of looking up each message. Where `ids` is null, all
        messages from the first position to the last, which costs less again: nothing is looked for in arrays.
        """
        columns = self.selection(payload="jsonb")
        if not near:
            return self.picked(columns, ids, positions, conditions)
        return sql.SQL(
            "SELECT {columns} FROM {table} AS o WHERE {p} >= ({at}::bigint[])[1] "
            "AND {p} <= ({at}::bigint[])[cardinality({at}::bigint[])] "
            "AND ({ids}::xid8[] IS NULL OR {p} + 0 = ANY ({at}::bigint[]) AND {t} = ANY ({ids}::xid8[]))"
        ).format(
            columns=columns, table=self.identifier, p=self.position, at=positions, ids=ids, t=self.transaction_id,
        )  # fmt: skip

    def selection(self, *, payload: Literal["text", "jsonb"]) -> sql.SQL:
        """List the columns of `o` under their standard names.

        `payload` is `text` (shipped as it is, never parsed) or `jsonb` (for a user's statement).
        """
        return _select(self, payload, None)

    def outline(self, small: int | None) -> sql.SQL:
        """List the columns with payloads as text, but for those stored in more than `small` bytes: empty, not read."""
        return _select(self, "text", small)

    def stored_payload(self, *, copied: bool = False) -> sql.Composed:
        """The place of `o` and its payload as it is stored: nothing of it is read yet. A copy's has columns of its own.

        A copy is text, and the payload may be jsonb: in one column both would have to be read.
        """
        columns = self.columns
        payload = _column(columns.data), _column(columns.metadata)
        absent = sql.SQL("NULL"), sql.SQL("NULL")
        return sql.SQL(
            "{} AS transaction_id, {} AS position, {} AS data, {} AS metadata, {} AS copied_data, {} AS copied_metadata"
        ).format(self.transaction_id, self.position, *(absent + payload if copied else payload + absent))

    @cached_property
    def stored_bytes(self) -> sql.Composable:
        """How many bytes the payload of `o` has as it is stored, compressed or not: nothing of it is read."""
        payload = _column(self.columns.data), _column(self.columns.metadata, absent="NULL::text")
        return sql.SQL("coalesce(pg_column_size({}), 0) + coalesce(pg_column_size({}), 0)").format(*payload)


@cache
def _select(table: OutboxTable, payload: Literal["text", "jsonb"], small: int | None) -> sql.SQL:
    """Compose what `selection` and `outline` return."""
    columns = table.columns
    as_payload = sql.SQL(payload)
    expressions = {
        "transaction_id": table.transaction_id,
        "position": table.position,
        "message_id": table.message_id,
        "message_type": _column(columns.message_type, "text"),
        "publication_id": _column(columns.publication_id, "text", absent="'default'::text"),
        "partition_key": _column(columns.partition_key, "text", absent="NULL::text"),
        "data": _withheld(_column(columns.data), as_payload, small),
        "metadata": _withheld(
            _column(columns.metadata, absent="NULL"), as_payload, small if columns.metadata else None
        ),
        "scheduled": table.moment if payload == "text" else _column(columns.scheduled, absent="NULL::timestamptz"),
    }
    if payload == "text":
        expressions["deliver_after"] = (
            within_python(table.deliver_after) if columns.deliver_after is not None else sql.SQL("NULL::timestamptz")
        )
    return as_text(
        sql.SQL(", ").join(
            sql.SQL("{} AS {}").format(expression, sql.Identifier(name)) for name, expression in expressions.items()
        )
    )


def _withheld(column: sql.Composable, cast: sql.SQL, small: int | None) -> sql.Composed:
    cast_column = sql.SQL("{}::{}").format(column, cast)
    if small is None:
        return cast_column
    return sql.SQL("CASE WHEN pg_column_size({}) > {} THEN '' ELSE {} END").format(
        column, sql.Literal(small), cast_column
    )


def as_text(composed: sql.Composable) -> sql.SQL:
    """Keep what consists of identifiers and literals, already quoted, as one text: composing it again takes time."""
    return sql.SQL(composed.as_string(None))


def within_python(moment: sql.Composable) -> sql.Composed:
    """Bring a timestamptz into what Python can hold: PostgreSQL has infinity, years before 1 and beyond 9999.

    Null stays null: `greatest` and `least` alone would pass it over and give the first day of year 1.
    """
    bounded = "CASE WHEN {0} IS NOT NULL THEN least(greatest({0}, '0001-01-03Z'::timestamptz), '9999-12-30Z') END"
    return sql.SQL(bounded).format(moment)


def build_messages(rows: Iterable[tuple[Any, ...]]) -> tuple[Message, ...]:
    """Build messages of rows of `OutboxTable.selection` with payloads as text."""
    new = tuple.__new__  # of what Python writes for a named tuple, `_make` takes twice as long
    return tuple(
        [
            new(
                Message, (int(transaction_id), position, name, kind, publication, key, data, metadata, scheduled, after)
            )
            for transaction_id, position, name, kind, publication, key, data, metadata, scheduled, after in rows
        ]
    )


def _column(name: str | None, cast: str | None = None, absent: str = "NULL", row: str | None = "o") -> sql.Composable:
    if name is None:
        return sql.SQL(absent)
    column = sql.Identifier(name) if row is None else sql.Identifier(row, name)
    return column if cast is None else sql.SQL("{}::{}").format(column, sql.SQL(cast))
