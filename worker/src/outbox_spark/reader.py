"""Reading ranges of the outbox from PostgreSQL as Arrow batches: on the driver to plan, on executors to read.

A range that was planned lies below `pg_snapshot_xmin` of its planning, so every transaction in it was over: reading
it again, at any time, by any task, gives the same rows, as long as the server loses no transactions (`resume.py` says
what happens then). No statement here takes a transaction id, and none holds a snapshot for longer than a page.
"""

from __future__ import annotations

import gc
import time
from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Final

import psycopg
import pyarrow as pa
from psycopg import sql
from psycopg.pq import ExecStatus
from pyarrow import csv

from outbox_core.progress.checkpoint import Checkpoint
from outbox_core.spec import StartFrom, StartType
from outbox_spark.columns import message_arrow_schema
from outbox_spark.offsets import OffsetRange, split_range
from outbox_worker.postgres.call import fetch_rows
from outbox_worker.postgres.connection import Connection, ConnectionFiles
from outbox_worker.postgres.errors import DatabaseError, translated
from outbox_worker.postgres.feeds import holding
from outbox_worker.postgres.progress import starts
from outbox_worker.postgres.reading.messages import MessageReader
from outbox_worker.postgres.reading.table import within_python
from outbox_worker.session import Session

if TYPE_CHECKING:
    from collections.abc import Iterator

    from psycopg.pq.abc import PGconn

    from outbox_spark.options import ReadOptions

_APPLICATION_NAME: Final = "outbox-spark-reader"
_KEPT_SECONDS: Final = 10.0
"""So long a connection is kept: its name may lead to another server by now, where the tasks read already."""
_FIRST_PAGE: Final = 500
_PAGE_BYTES: Final = 8_000_000
"""About so much of a range is in an executor's memory at once; twice that of rows larger than those before."""
_DELIMITER: Final = "\x02"
_QUOTE: Final = "\x01"
"""Neither is in JSON, so no JSON has to be quoted, with each of its quotation marks twice."""

_PAGE: Final = sql.SQL(
    """COPY (SELECT r.position, r.transaction_id, r.message_id, r.message_type, r.publication_id, r.partition_key,
                    r.data, r.metadata, (extract(epoch FROM {scheduled}) * 1000000)::bigint
             FROM ({relation}) AS r
             ORDER BY r.transaction_id, r.position
             LIMIT {limit}) TO STDOUT (FORMAT csv, DELIMITER {delimiter}, QUOTE {quote}, ENCODING 'UTF8')"""
)

_SCHEDULED: Final = within_python(sql.SQL("r.scheduled"))

_CUT: Final = sql.SQL(
    """SELECT r.transaction_id::text, r.position
       FROM ({relation}) AS r
       ORDER BY r.transaction_id, r.position
       LIMIT 1 OFFSET {skipped}"""
)  # an index has both columns, and where VACUUM has been no row is looked at: numbering rows takes four times as long

_REACH: Final = sql.SQL(
    """SELECT n.t::text, n.p, n.number
       FROM (SELECT r.transaction_id AS t, r.position AS p, row_number() OVER pairs AS number,
                    sum(coalesce(pg_column_size(r.data), 0)) OVER pairs AS bytes
             FROM ({relation}) AS r
             WINDOW pairs AS (ORDER BY r.transaction_id, r.position ROWS UNBOUNDED PRECEDING)) AS n
       WHERE (SELECT sum(pg_column_size(r.data)) FROM ({relation}) AS r) > {most}
         AND (n.bytes <= {most} OR n.number = 1)
       ORDER BY n.number DESC
       LIMIT 1"""
)  # pg_column_size: as stored, so that what PostgreSQL keeps compressed or out of line is not read for it

_COUNT: Final = sql.SQL("SELECT count(*) FROM ({relation}) AS r")

_UNSORTED: Final = "SET LOCAL enable_sort = off; SET LOCAL idle_in_transaction_session_timeout = '30s'"
"""An index has the order. Without statistics the planner expects few rows, and would read and sort all of a backlog.

Frozen between two statements, a process must not keep its locks.
"""


class RangeReader:
    """Plans and reads ranges. It can be sent to another process as long as it keeps no connection."""

    def __init__(self, options: ReadOptions, *, keeps_connection: bool = False) -> None:
        """Open nothing; `keeps_connection`: all calls of some seconds have one, for who looks again and again."""
        self._options = options
        self._keeps = keeps_connection
        self._kept_until = 0.0
        self._session = Session(ConnectionFiles(options.connection), _APPLICATION_NAME)

    def fetch_start(self) -> Checkpoint:
        """Return the pair that `start` names."""
        start = self._options.start
        if isinstance(start, Checkpoint):
            return start
        with self._connect() as connection:
            return starts.start_pair(connection, self._options.source, start)

    def fetch_next(self, after: Checkpoint, limit: int) -> tuple[OffsetRange, bool]:
        """Return the range of the next micro-batch, and whether it is full: more may wait behind it.

        It ends with a settled pair, and has at most `limit` rows and about `batchBytes`; it is empty when nothing is
        there.
        """
        with self._connect() as connection, _unsorted(connection):
            reader = MessageReader(self._options.source)
            reach, size = reader.fetch_sized_extent(connection, after, limit)
            if reach.delayed_count:
                # In order, so all waits for a message whose time has not come.
                rows = reader.keyed_relation(after, reach.examined, None)
                reach = holding.cut_at_delayed(
                    connection, reach, rows, lambda most: reader.fetch_extent(connection, after, most)
                )
            whole = OffsetRange(after, reach.examined, reach.matched_count)
            return self._within_bytes(connection, whole, size, full=reach.full)

    def _within_bytes(
        self, connection: Connection, whole: OffsetRange, size: int | None, *, full: bool
    ) -> tuple[OffsetRange, bool]:
        """Return the part of the range that has at most `batchBytes`, and whether the batch is full.

        `size`: the range has at most so many bytes; None: that is not known.
        """
        most = self._options.batch_bytes
        if most is None or whole.empty or (size is not None and size <= most):
            return whole, full
        found = fetch_rows(connection, _REACH.format(relation=self._relation(whole), most=sql.Literal(most)))
        if not found:
            return whole, full
        transaction_id, position, count = found[0]
        return OffsetRange(whole.start, Checkpoint(int(transaction_id), position), count), True

    def fetch_settled(self) -> Checkpoint:
        """Return a pair at or after the last settled row, and before everything that is not settled."""
        with self._connect() as connection:
            return starts.start_pair(connection, self._options.source, StartFrom(type=StartType.END))

    def fetch_pieces(self, whole: OffsetRange) -> tuple[OffsetRange, ...]:
        """Cut a range into `partitions` pieces with about as many rows each."""
        pieces, cuts = self._options.partitions, [whole.start]
        if pieces > 1 and not whole.empty:
            with self._connect() as connection, _unsorted(connection):
                count = self._count(connection, whole) if whole.count is None else whole.count
                size = max(1, -(-count // pieces))
                for _ in range(size, count, size):
                    rest = OffsetRange(cuts[-1], whole.end)
                    cut = _CUT.format(relation=self._relation(rest), skipped=sql.Literal(size - 1))
                    cuts += [Checkpoint(int(t), p) for t, p in fetch_rows(connection, cut)]
        return split_range(whole, cuts)

    def fetch_count(self, whole: OffsetRange) -> int:
        """Count the messages of a range that the filters let through."""
        if whole.empty:
            return 0
        with self._connect() as connection:
            return self._count(connection, whole)

    def _count(self, connection: Connection, whole: OffsetRange) -> int:
        return int(fetch_rows(connection, _COUNT.format(relation=self._relation(whole)))[0][0])

    def read(self, piece: OffsetRange) -> Iterator[pa.RecordBatch]:
        """Yield a range's messages in order, as Arrow batches of `fetchSize` rows, or fewer when payloads are large."""
        _keep_loaded()
        schema, limit = message_arrow_schema(), min(self._options.fetch_size, _FIRST_PAGE)
        with self._connect() as connection:
            while not piece.empty:
                text, is_whole = _copy(connection, self._page(piece, limit))
                if not text:
                    return
                page = parse_page(text, schema)
                yield page
                if is_whole and page.num_rows < limit:
                    return
                last = page.slice(page.num_rows - 1)
                place = Checkpoint(int(last["transaction_id"][0].as_py()), last["position"][0].as_py())
                piece = OffsetRange(place, piece.end)
                limit = min(self._options.fetch_size, max(1, _PAGE_BYTES * page.num_rows // max(page.nbytes, 1)))

    def close(self) -> None:
        """Close the connection that is kept."""
        self._session.discard()

    @contextmanager
    def _connect(self) -> Iterator[Connection]:
        """Lend a connection: another one where the server has ended the one that was kept, or it was kept for long."""
        if (now := time.monotonic()) >= self._kept_until:
            self._session.discard()
            self._kept_until = now + _KEPT_SECONDS
        with suppress(DatabaseError):
            self._session.connection().pgconn.consume_input()
        is_kept = False
        try:
            yield self._session.connection()
            is_kept = self._keeps
        finally:
            if not is_kept:
                self._session.discard()

    def _page(self, piece: OffsetRange, limit: int) -> sql.Composed:
        return _PAGE.format(
            relation=self._relation(piece), limit=sql.Literal(limit), scheduled=_SCHEDULED,
            delimiter=sql.Literal(_DELIMITER), quote=sql.Literal(_QUOTE),
        )  # fmt: skip

    def _relation(self, whole: OffsetRange) -> sql.Composed:
        return MessageReader(self._options.source).batch_relation(whole.start, whole.end)


@cache
def _keep_loaded() -> None:
    """Take what is loaded from the garbage collector: Spark has it look through all of it after each task."""
    gc.freeze()


@contextmanager
def _unsorted(connection: Connection) -> Iterator[None]:
    """Make a transaction in which rows come in the order of an index."""
    with translated(), connection.transaction():
        connection.execute(_UNSORTED)
        yield


def _copy(connection: Connection, query: sql.SQL | sql.Composed) -> tuple[bytearray, bool]:
    """Return the rows that a COPY writes, and whether they are all; not all, where they are far more than a page.

    Each row is asked of libpq, which waits for it: psycopg's own loop takes three times as long.
    """
    text, server = bytearray(), connection.pgconn
    with _unsorted(connection), connection.cursor() as cursor, cursor.copy(query) as copying:
        while len(text) < 2 * _PAGE_BYTES:
            length, row = server.get_copy_data(0)
            if length < 0:
                _end(server)
                return text, True
            text += row
        copying.finish(psycopg.errors.QueryCanceled())
    return text, False


def _end(server: PGconn) -> None:
    """Take all results that follow a COPY; it may have failed, after some of its rows or before."""
    for result in list(iter(server.get_result, None)):
        if result.status != ExecStatus.COMMAND_OK:
            raise psycopg.errors.error_from_result(result)


def parse_page(text: bytes | bytearray, schema: pa.Schema) -> pa.RecordBatch:
    """Read rows of the schema as PostgreSQL's COPY writes CSV, at least one, with times as microseconds since 1970.

    NULL is nothing, an empty string is quoted. No value becomes an object of Python: `pyarrow.array`, which makes Arrow
    of such objects, would import pandas, two seconds of processor time in each Python worker before its first row.
    """
    types = {field.name: pa.int64() if pa.types.is_timestamp(field.type) else field.type for field in schema}
    table = csv.read_csv(
        pa.BufferReader(text),
        # One block: a row may be longer than any block of a fixed size.
        read_options=csv.ReadOptions(column_names=schema.names, use_threads=False, block_size=len(text)),
        parse_options=csv.ParseOptions(delimiter=_DELIMITER, quote_char=_QUOTE, newlines_in_values=True),
        convert_options=csv.ConvertOptions(
            column_types=types, null_values=[""], strings_can_be_null=True, quoted_strings_can_be_null=False
        ),
    )
    columns = [table[field.name].combine_chunks().cast(field.type) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
