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

import psycopg
import pyarrow as pa
from psycopg import sql
from pyarrow import csv
from pyspark.sql import functions as f
from pyspark.sql.types import BinaryType

from outbox_core.errors import TransientError
from outbox_core.report import Reason
from outbox_spark.columns import is_nested, staging_columns
from outbox_worker.logs import get_logger
from outbox_worker.postgres.errors import translate, translated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructField

    from outbox_worker.postgres.connection import Connection, ConnectionFiles

_APPLICATION_NAME: Final = "outbox-spark-staging"
_log = get_logger("outbox.spark.staging")
_ATTEMPT: Final = "outbox_attempt"
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
        counted = connection.execute(sql.SQL("SELECT count(*) FROM ({}) AS staged").format(self.relation())).fetchone()
        return counted is not None and int(counted[0]) == self.rows


class StagingArea:
    """The staging tables of one owner; used by the driver."""

    def __init__(self, files: ConnectionFiles, schema: str, processor_id: str, epoch: int) -> None:
        """Remember whose tables they are; create nothing. `files` are at the same path on driver and executors."""
        self._files = files
        self._schema = schema
        self._processor_id = processor_id
        self._epoch = epoch
        self._ready: dict[tuple[tuple[str, str], ...], StagingTable] = {}

    def load(self, rows: DataFrame) -> Staged:
        """Have executors load the rows, and return what Spark reports as done.

        Collects one small row for each task, never the rows themselves.

        Raises:
            HandlerError: the rows have a column that cannot be staged.

        """
        table = self._ensure(staging_columns(rows.schema))
        prepared = rows.select(*(_prepared(field) for field in rows.schema.fields))
        copy = _copier(self._files, table)
        done = prepared.mapInArrow(copy, "attempt string, loaded long").collect()
        staged = Staged(table, tuple(row.attempt for row in done if row.loaded), sum(row.loaded for row in done))
        if staged.rows >= _ANALYZE_FROM_ROWS:
            self._execute(sql.SQL("ANALYZE {}").format(table.identifier))
        return staged

    def clear(self) -> None:
        """Empty the tables between two batches; rows left behind are no attempt of any later batch."""
        for table in self._ready.values():
            try:
                self._execute(sql.SQL("SET LOCAL lock_timeout = '2s'"), sql.SQL("TRUNCATE {}").format(table.identifier))
            except TransientError as error:  # a session reads it: try after the next batch
                _log.warning("a staging table is not emptied", extra={"table": table.name, "error": str(error)})

    def sweep(self) -> int:
        """Drop the tables of earlier owners, and of an earlier query of this one; return how many went.

        One that another session reads, pg_dump for example, is left for the next time: nothing of it is ever merged.
        """
        registry = sql.Identifier(self._schema, "spark_staging")
        find = sql.SQL("SELECT table_name FROM {} WHERE processor_id = %s AND epoch <= %s ORDER BY 1").format(registry)
        with self._files.connect(_APPLICATION_NAME) as connection, translated():
            names = [str(row[0]) for row in connection.execute(find, (self._processor_id, self._epoch)).fetchall()]
        return sum(self._drop(name) for name in names)

    def _drop(self, name: str) -> bool:
        try:
            self._execute(
                sql.SQL("SET LOCAL lock_timeout = '2s'"),
                sql.SQL("DROP TABLE IF EXISTS {}").format(sql.Identifier(self._schema, name)),
                sql.SQL("DELETE FROM {} WHERE table_name = {}").format(
                    sql.Identifier(self._schema, "spark_staging"), sql.Literal(name)
                ),
            )
        except TransientError as error:
            if error.reason is not Reason.STATEMENT_FAILED:
                raise
            _log.warning("a staging table is not dropped", extra={"table": name, "error": str(error)})
            return False
        return True

    def _ensure(self, columns: tuple[tuple[str, str], ...]) -> StagingTable:
        if columns not in self._ready:
            name = staging_name(self._processor_id, self._epoch, columns)
            table = StagingTable(self._schema, name, tuple(column for column, _ in columns))
            self._execute(*self._create(table, columns))
            self._ready[columns] = table
        return self._ready[columns]

    def _create(self, table: StagingTable, columns: tuple[tuple[str, str], ...]) -> list[sql.Composed]:
        wanted = [sql.SQL("{} uuid NOT NULL").format(sql.Identifier(_ATTEMPT))]
        wanted += [sql.SQL("{} {}").format(sql.Identifier(name), _type(kind)) for name, kind in columns]
        return [
            sql.SQL("CREATE UNLOGGED TABLE IF NOT EXISTS {} ({})").format(table.identifier, sql.SQL(", ").join(wanted)),
            sql.SQL(
                "INSERT INTO {} (table_name, processor_id, epoch) VALUES ({}, {}, {}) ON CONFLICT DO NOTHING"
            ).format(
                sql.Identifier(self._schema, "spark_staging"),
                sql.Literal(table.name),
                sql.Literal(self._processor_id),
                sql.Literal(self._epoch),
            ),
        ]

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


def _type(name: str) -> sql.SQL:
    return sql.SQL(cast("Any", name))  # from columns.py's closed list


def _copier(
    files: ConnectionFiles, table: StagingTable
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Make the function that a task runs; it carries a path and a name, never a secret."""

    def copy(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield copy_rows(files, table, batches)

    return copy


def copy_rows(files: ConnectionFiles, table: StagingTable, batches: Iterator[pa.RecordBatch]) -> pa.RecordBatch:
    """Copy one task's rows under a new attempt and return the attempt and their number; runs on an executor.

    Every chunk is rendered before its transaction begins: computing the rows takes no transaction id.
    """
    attempt, loaded = str(uuid.uuid4()), 0
    statement = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT csv)").format(
        table.identifier, sql.SQL(", ").join(sql.Identifier(name) for name in (_ATTEMPT, *table.columns))
    )
    connection: Connection | None = None
    try:
        for batch in batches:
            for start in range(0, batch.num_rows, _CHUNK_ROWS):
                chunk = batch.slice(start, _CHUNK_ROWS)
                text = to_csv(chunk, attempt)
                connection = connection or files.connect(_APPLICATION_NAME)
                with connection.cursor() as cursor, cursor.copy(statement) as copying:
                    copying.write(text)
                loaded += chunk.num_rows
    except psycopg.Error as error:
        raise translate(error) from error
    finally:
        if connection is not None:
            connection.close()
    return pa.RecordBatch.from_arrays([_one(attempt), _one(str(loaded)).cast(pa.int64())], names=["attempt", "loaded"])


def _one(text: str) -> pa.Array:
    """Make a column of one text, without importing pandas as `pyarrow.array` would (see `reader.parse_page`)."""
    encoded = text.encode()
    offsets = struct.pack("=2i", 0, len(encoded))
    return pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(offsets), pa.py_buffer(encoded)])
