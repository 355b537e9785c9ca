"""Staging: rows on their way into a SQL target, loaded by executors, merged by the driver's one transaction.

An executor task copies its rows into an unlogged table under a name of its own, its *attempt*, in transactions as
short as a chunk: an open transaction with an id would hold back the high-water mark of every processor. A task that
Spark runs again gets another attempt. Spark hands the driver the results of the attempts that it counts as done,
and of no other, so the driver merges exactly the attempts it was handed; rows of killed, repeated or speculative
attempts stay behind and are cleared.

One table serves one owner's epoch and one list of columns, and is emptied after every batch. A later epoch drops
what earlier ones left, so executors of a driver that lost its lease find no table to write to.
"""

from __future__ import annotations

import hashlib
import io
import json
import struct
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

import pyarrow as pa
from psycopg import sql
from pyarrow import csv
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql.types import BinaryType, StructField

from outbox_core.errors import TransientError
from outbox_spark.columns import is_nested, staging_columns
from outbox_worker.logs import get_logger
from outbox_worker.postgres.call import fetch_one, fetch_rows
from outbox_worker.postgres.errors import translated
from outbox_worker.session import Session

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outbox_worker.postgres.connection import Connection, ConnectionFiles

_APPLICATION_NAME: Final = "outbox-spark-staging"
_log = get_logger("outbox.spark.staging")
_ATTEMPT: Final = "outbox_attempt"
_COPIED: Final = "attempt string, loaded long"
_CHUNK_ROWS: Final = 10_000
_ANALYZE_FROM_ROWS: Final = 10_000


@dataclass(frozen=True, slots=True)
class StagingTable:
    """A staging table and the columns that a statement sees in it."""

    schema: str
    name: str
    columns: tuple[str, ...]

    @property
    def identifier(self) -> sql.Identifier:
        """The qualified name."""
        return sql.Identifier(self.schema, self.name)


@dataclass(frozen=True, slots=True)
class Staged:
    """Rows that Spark reports as loaded: which table, by which attempts, how many."""

    table: StagingTable
    attempts: tuple[str, ...]
    rows: int

    def relation(self) -> sql.Composed:
        """Compose the SELECT of the loaded rows, without those of attempts that Spark gave up."""
        return sql.SQL("SELECT {columns} FROM {table} WHERE {attempt} = ANY({attempts}::uuid[])").format(
            columns=sql.SQL(", ").join(sql.Identifier(name) for name in self.table.columns),
            table=self.table.identifier,
            attempt=sql.Identifier(_ATTEMPT),
            attempts=sql.Literal(list(self.attempts)),
        )

    def is_complete(self, connection: Connection) -> bool:
        """Say whether all of them are still there."""
        (count,) = fetch_one(connection, sql.SQL("SELECT count(*) FROM ({}) AS staged").format(self.relation()))
        return bool(count == self.rows)


class StagingArea:
    """The staging tables of one owner; used by the driver. `files` are at the same path on driver and executors."""

    def __init__(self, files: ConnectionFiles, schema: str, processor_id: str, epoch: int) -> None:
        self._files = files
        self._schema = schema
        self._registry = sql.Identifier(schema, "spark_staging")
        self._processor_id = processor_id
        self._epoch = epoch
        self._ready: dict[tuple[tuple[str, str], ...], StagingTable] = {}

    def load(self, rows: DataFrame) -> Staged:
        """Have executors load the rows, and return what Spark reports as done: one small row for each task.

        Raises:
            HandlerError: the rows have a column that cannot be staged.

        """
        table = self._ensure(staging_columns(rows.schema))
        prepared = rows.select(*(_prepared(field) for field in rows.schema.fields))
        files = self._files  # a path: a task is sent no secret
        done = prepared.mapInArrow(lambda batches: iter([copy_rows(files, table, batches)]), _COPIED).collect()
        staged = Staged(table, tuple(row.attempt for row in done if row.loaded), sum(row.loaded for row in done))
        if staged.rows >= _ANALYZE_FROM_ROWS:
            self._execute(sql.SQL("ANALYZE {}").format(table.identifier))
        return staged

    def clear(self) -> None:
        """Empty the tables between two batches; rows left behind are no attempt of any later batch."""
        for table in self._ready.values():
            self._try(table.name, sql.SQL("TRUNCATE {}").format(table.identifier))

    def sweep(self) -> int:
        """Drop the tables of earlier owners, and of an earlier query of this one; return how many went."""
        find = sql.SQL("SELECT table_name FROM {} WHERE processor_id = %(processor_id)s AND epoch <= %(epoch)s")
        with self._files.connect(_APPLICATION_NAME) as connection:
            owner = {"processor_id": self._processor_id, "epoch": self._epoch}
            names = [str(name) for (name,) in fetch_rows(connection, find.format(self._registry), owner)]
        drop, forget = sql.SQL("DROP TABLE IF EXISTS {}"), sql.SQL("DELETE FROM {} WHERE table_name = {}")
        return sum(
            self._try(
                name, drop.format(sql.Identifier(self._schema, name)), forget.format(self._registry, sql.Literal(name))
            )
            for name in names
        )

    def _try(self, table: str, *statements: sql.Composed) -> bool:
        """Run statements that wait for every reader of a table, pg_dump for example, or leave them for the next time.

        What stays in the table is never merged.
        """
        try:
            self._execute(sql.SQL("SET LOCAL lock_timeout = '2s'"), *statements)
        except TransientError as error:
            _log.warning("a staging table is left as it is", extra={"table": table, "error": str(error)})
            return False
        return True

    def _ensure(self, columns: tuple[tuple[str, str], ...]) -> StagingTable:
        if columns not in self._ready:
            name = staging_name(self._processor_id, self._epoch, columns)
            table = StagingTable(self._schema, name, tuple(column for column, _ in columns))
            typed = [
                sql.SQL("{} {}").format(sql.Identifier(column), sql.SQL(cast("Any", kind)))  # of those of columns.py
                for column, kind in ((_ATTEMPT, "uuid NOT NULL"), *columns)
            ]
            self._execute(
                sql.SQL("CREATE UNLOGGED TABLE IF NOT EXISTS {} ({})").format(
                    table.identifier, sql.SQL(", ").join(typed)
                ),
                sql.SQL("INSERT INTO {} (table_name, processor_id, epoch) VALUES ({}) ON CONFLICT DO NOTHING").format(
                    self._registry, sql.SQL(", ").join(map(sql.Literal, (name, self._processor_id, self._epoch)))
                ),
            )
            self._ready[columns] = table
        return self._ready[columns]

    def _execute(self, *statements: sql.SQL | sql.Composed) -> None:
        """Run statements in one transaction of their own, sent at once: frozen, this process leaves none open."""
        with self._files.connect(_APPLICATION_NAME) as connection, translated():
            connection.execute(sql.SQL("; ").join(statements))


def staging_name(processor_id: str, epoch: int, columns: tuple[tuple[str, str], ...]) -> str:
    """Name a table after its owner's epoch and its columns, within 63 bytes for every processor's id."""
    owner = hashlib.sha256(processor_id.encode()).hexdigest()[:12]
    shape = hashlib.sha256(json.dumps(columns).encode()).hexdigest()[:12]
    return f"spark_staging_{owner}_{epoch}_{shape}"


def to_csv(batch: pa.RecordBatch, attempt: str) -> bytes:
    """Write rows as PostgreSQL's COPY reads CSV: NULL is nothing, an empty string is quoted."""
    tagged = pa.Table.from_arrays(
        [pa.repeat(_one(attempt)[0], batch.num_rows), *batch.columns], names=[_ATTEMPT, *batch.schema.names]
    )
    out = io.BytesIO()
    csv.write_csv(tagged, out, csv.WriteOptions(include_header=False, quoting_style="needed"))
    return out.getvalue()


def _prepared(field: StructField) -> Column:
    """Write what CSV and PostgreSQL do not share as text that PostgreSQL reads."""
    column = f.col(f"`{field.name.replace('`', '``')}`")
    if is_nested(field):
        return f.to_json(column).alias(field.name)
    if isinstance(field.dataType, BinaryType):
        return f.concat(f.lit("\\x"), f.hex(column)).alias(field.name)
    return column


def copy_rows(files: ConnectionFiles, table: StagingTable, batches: Iterator[pa.RecordBatch]) -> pa.RecordBatch:
    """Copy one task's rows under a new attempt and return the attempt and their number; runs on an executor.

    Every chunk is rendered before its transaction begins: computing the rows takes no transaction id.
    """
    attempt, loaded = str(uuid.uuid4()), 0
    statement = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT csv)").format(
        table.identifier, sql.SQL(", ").join(sql.Identifier(name) for name in (_ATTEMPT, *table.columns))
    )
    session = Session(files, _APPLICATION_NAME)
    try:
        for batch in batches:
            for start in range(0, batch.num_rows, _CHUNK_ROWS):
                chunk = batch.slice(start, _CHUNK_ROWS)
                text = to_csv(chunk, attempt)
                with translated(), session.connection().cursor() as cursor, cursor.copy(statement) as copying:
                    copying.write(text)
                loaded += chunk.num_rows
    finally:
        session.discard()
    return pa.RecordBatch.from_arrays([_one(attempt), _one(str(loaded)).cast(pa.int64())], names=["attempt", "loaded"])


def _one(text: str) -> pa.Array:
    """Make a column of one text, without importing pandas as `pyarrow.array` would (see `reader.parse_page`)."""
    encoded = text.encode()
    offsets = struct.pack("=2i", 0, len(encoded))
    return pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(offsets), pa.py_buffer(encoded)])
