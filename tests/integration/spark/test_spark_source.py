"""The data source in a local session, as in a notebook: streaming with limits, parallel pieces, bounded backfill."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from psycopg import sql
from pyspark.errors import AnalysisException
from pyspark.sql.streaming.datasource import ReadMaxRows

from outbox_core.errors import OutboxError
from outbox_core.progress.checkpoint import BEGINNING
from outbox_spark.offsets import OffsetRange
from outbox_spark.options import parse_options
from outbox_spark.reader import RangeReader, _copy
from outbox_spark.source import OutboxStreamReader
from tests.support.servers.postgres import wait_until
from tests.support.spark import start_notebook_session

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.servers.postgres import Database

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def notebook() -> Iterator[Any]:
    session = start_notebook_session()
    yield session
    session.stop()


def produce(database: Database, count: int, *, message_type: str = "OrderPlaced", publication: str = "shop") -> None:
    with database.direct() as connection:
        connection.execute(
            "INSERT INTO outbox.messages (publication_id, message_type, data) "
            "SELECT %s, %s, jsonb_build_object('n', n) FROM generate_series(1, %s) AS n",
            (publication, message_type, count),
        )


def options(database: Database, **more: object) -> dict[str, str]:
    return {"connection": str(database.files().directory)} | {key: str(value) for key, value in more.items()}


def run_available(notebook: Any, source: dict[str, str], query: Path) -> list[int]:
    """Run a stream over what is there, and return the rows of each micro-batch that has some."""
    sizes: list[int] = []
    stream = (
        notebook.readStream.format("outbox").options(**source).load()
        .writeStream.foreachBatch(lambda rows, _: sizes.append(rows.count()))
        .option("checkpointLocation", str(query)).trigger(availableNow=True).start()
    )  # fmt: skip
    stream.awaitTermination()
    return [size for size in sizes if size]


def test_a_backfill_reads_every_message_once_in_parallel_pieces(notebook, database):
    produce(database, 1000)
    rows = notebook.read.format("outbox").options(**options(database, partitions=4, fetchSize=100)).load()
    assert rows.rdd.getNumPartitions() == 4
    found = rows.select("position", "data", "message_type", "publication_id").collect()
    assert sorted(row.position for row in found) == list(range(1, 1001))
    assert {json.loads(row.data)["n"] for row in found} == set(range(1, 1001))
    assert {(row.message_type, row.publication_id) for row in found} == {("OrderPlaced", "shop")}


def test_a_backfill_is_bounded_by_checkpoints(notebook, database):
    produce(database, 100)
    with database.direct() as connection:
        (transaction_id,) = connection.execute("SELECT min(transaction_id)::text FROM outbox.messages").fetchone()
    bounds = options(database, start=f"{transaction_id}:10", end=f"{transaction_id}:30")
    found = notebook.read.format("outbox").options(**bounds).load().select("position").collect()
    assert sorted(row.position for row in found) == list(range(11, 31))
    assert notebook.read.format("outbox").options(**options(database, start="end")).load().count() == 0


def test_filters_read_only_what_they_name(notebook, database):
    produce(database, 10)
    produce(database, 5, message_type="OrderCancelled")
    produce(database, 3, publication="warehouse")
    read = notebook.read.format("outbox")
    assert read.options(**options(database, messageTypes="OrderCancelled")).load().count() == 5
    assert notebook.read.format("outbox").options(**options(database, publications="warehouse")).load().count() == 3


def test_what_is_in_flight_is_not_read_and_not_skipped_later(notebook, database, tmp_path):
    """Fault of other readers: a transaction that took its id early commits behind the reader."""
    early = database.direct(autocommit=False)
    early.execute("INSERT INTO outbox.messages (message_type, data) VALUES ('OrderPlaced', '{\"n\": 0}')")
    produce(database, 10)
    source = options(database)
    assert run_available(notebook, source, tmp_path / "query") == []
    early.commit()
    assert run_available(notebook, source, tmp_path / "query") == [11]


def test_a_stream_keeps_to_its_read_limit_and_its_offsets_are_checkpoints(notebook, database, tmp_path):
    produce(database, 25)
    assert run_available(notebook, options(database, batchSize=10), tmp_path / "query") == [10, 10, 5]
    with database.direct() as connection:
        (transaction_id,) = connection.execute("SELECT min(transaction_id)::text FROM outbox.messages").fetchone()
    logged = [(tmp_path / "query/offsets" / str(n)).read_text().splitlines()[-1] for n in range(3)]
    assert [json.loads(line) for line in logged[:2]] == [
        {"transaction_id": transaction_id, "position": 10, "messages": 10},
        {"transaction_id": transaction_id, "position": 20, "messages": 10},
    ]
    assert run_available(notebook, options(database, batchSize=10), tmp_path / "query") == []


def test_a_range_read_again_gives_the_same_rows(notebook, database):
    produce(database, 50)
    whole = notebook.read.format("outbox").options(**options(database)).load().select("position", "message_id")
    first = sorted(whole.collect())
    with database.direct() as connection:
        (end,) = connection.execute("SELECT min(transaction_id)::text || ':50' FROM outbox.messages").fetchone()
    produce(database, 50)
    again = notebook.read.format("outbox").options(**options(database, end=end)).load()
    assert sorted(again.select("position", "message_id").collect()) == first


def test_who_plans_a_stream_keeps_a_connection_until_the_server_ends_it_or_its_time_is_over(database, monkeypatch):
    produce(database, 3)
    planner = OutboxStreamReader(parse_options(options(database)))
    server = database.direct()

    def sessions() -> list[int]:
        named = "SELECT pid FROM pg_stat_activity WHERE application_name = 'outbox-spark-reader'"
        return [pid for (pid,) in server.execute(named).fetchall()]

    def look() -> list[int]:
        assert planner.latestOffset(planner.initialOffset(), ReadMaxRows(10))["position"] == 3
        return sessions()

    (first,) = look()
    assert look() == [first]
    server.execute("SELECT pg_terminate_backend(%s, 10000)", (first,))
    (second,) = look()
    assert second != first
    monkeypatch.setattr(planner._reader, "_kept_until", time.monotonic())
    planner.latestOffset(planner.initialOffset(), ReadMaxRows(10))
    wait_until(lambda: len(sessions()) == 1 and sessions() != [second], "another one, and no more")
    planner.stop()
    wait_until(lambda: not sessions(), "it is closed")


def test_a_password_is_no_option(notebook, database):
    with pytest.raises(AnalysisException, match="option password is not taken"):
        notebook.read.format("outbox").options(**options(database, password="secret")).load().count()


def test_nulls_stay_null_and_times_are_brought_into_what_python_holds(notebook, database):
    with database.direct() as connection:
        for column in ("message_type", "publication_id", "data", "scheduled"):
            connection.execute(f"ALTER TABLE outbox.messages ALTER {column} DROP NOT NULL")
        connection.execute(
            "INSERT INTO outbox.messages (message_type, publication_id, data, scheduled) VALUES "
            "(NULL, NULL, NULL, NULL), ('t', 'p', '{}', 'infinity'), ('t', 'p', '{}', '-infinity'), "
            "('t', 'p', '{}', '0044-03-15 BC')"
        )
    rows = notebook.read.format("outbox").options(**options(database)).load()
    found = rows.selectExpr("message_type", "publication_id", "data", "year(scheduled)", "position").sort("position")
    assert [tuple(row)[:4] for row in found.collect()] == [
        (None, None, None, None), ("t", "p", "{}", 9999), ("t", "p", "{}", 1), ("t", "p", "{}", 1)
    ]  # fmt: skip


AWKWARD = (
    "", "NULL", "\\N", "\\.", ",", '"', '""', "\x01", "\x01\x02\x01\x01", "\x02\n", "a\r\nb\rc\n", " blank ",
    "\N{SNOWMAN}\u2028", "x" * 2_000_000,
)  # fmt: skip
"""What CSV quotes, or must not take for null."""


def test_every_text_is_read_as_it_was_written(database):
    """Each is on a page of its own, and all on one."""
    with database.direct() as connection:
        connection.cursor().executemany(
            "INSERT INTO outbox.messages (message_type, partition_key, data) VALUES (%s, %s, to_jsonb(%s::text))",
            [(text, None if text == "NULL" else text, text) for text in AWKWARD],
        )
        stored = connection.execute(
            "SELECT position, message_type, partition_key, data::text FROM outbox.messages ORDER BY position"
        ).fetchall()
    assert [row[1] for row in stored] == list(AWKWARD)
    for size in ("1", "5000"):
        reader = RangeReader(parse_options(options(database, fetchSize=size)))
        pages = list(reader.read(OffsetRange(BEGINNING, reader.fetch_settled())))
        assert len(pages) == (len(AWKWARD) if size == "1" else 1)
        found = [row for page in pages for row in page.to_pylist()]
        columns = ("position", "message_type", "partition_key", "data")
        assert [tuple(row[column] for column in columns) for row in found] == stored


def test_of_rows_that_are_larger_than_those_before_few_are_in_memory_at_once(database):
    with database.direct() as connection:
        connection.execute(
            "INSERT INTO outbox.messages (message_type, data) SELECT 't', to_jsonb(repeat('x', CASE "
            "WHEN n <= 600 THEN 1 ELSE 1000000 END)) FROM generate_series(1, 660) AS n"
        )
        stored = connection.execute("SELECT position FROM outbox.messages ORDER BY position").fetchall()
    reader = RangeReader(parse_options(options(database)))
    pages = list(reader.read(OffsetRange(BEGINNING, reader.fetch_settled())))
    assert max(page.nbytes for page in pages) < 18_000_000
    assert [position for page in pages for position in page["position"].to_pylist()] == [row[0] for row in stored]


def test_a_copy_that_fails_after_some_rows_fails_and_leaves_the_connection_as_it_was(database):
    connection = database.direct()
    late = sql.SQL("COPY (SELECT 1 / (90000 - n) FROM generate_series(1, 100000) AS n) TO STDOUT")
    with pytest.raises(OutboxError, match="division by zero"):
        _copy(connection, late)
    assert _copy(connection, sql.SQL("COPY (SELECT 7) TO STDOUT")) == (bytearray(b"7\n"), True)


WITHOUT_PANDAS = """
import sys
from pathlib import Path

from outbox_core.errors import OutboxError
from outbox_core.progress.checkpoint import BEGINNING
from outbox_spark.offsets import OffsetRange
from outbox_spark.options import parse_options
from outbox_spark.source import OutboxStreamReader
from outbox_spark.reader import RangeReader, _copy
from outbox_spark.writing.files import write_piece
from outbox_spark.writing.staging import StagingTable, copy_rows
from outbox_worker.postgres.connection import ConnectionFiles

options = parse_options({"connection": sys.argv[1]})
reader = RangeReader(options)
_, written = write_piece(options, sys.argv[2], "snappy", OffsetRange(BEGINNING, reader.fetch_settled()))
assert written == 1
pages = reader.read(OffsetRange(BEGINNING, reader.fetch_settled()))
table = StagingTable("public", "staged", ("message_type", "data"))
done = copy_rows(ConnectionFiles(Path(sys.argv[1])), table, (page.select(table.columns) for page in pages))
assert "pandas" not in sys.modules
assert done.column("loaded")[0].as_py() == 1
"""


LITTLE = """
import pickle
import sys

from outbox_spark.source import OutboxDataSource

source = OutboxDataSource({"connection": "/nowhere"})
source.name(), source.schema()
assert not {"psycopg", "pyarrow", "pydantic"} & sys.modules.keys(), "to say its schema"
pickle.dumps([source.streamReader(source.schema()).read, source.reader(source.schema()).read])
assert not {"psycopg", "pyarrow"} & sys.modules.keys(), "to hand out who reads"
"""


def test_processes_that_read_nothing_import_little():
    """Spark starts two of them for each query: one asks for the schema, one hands out who reads."""
    subprocess.run([sys.executable, "-c", LITTLE], check=True, timeout=60)


def test_reading_staging_and_writing_import_no_pandas(database, tmp_path):
    """Pandas takes two seconds of processor time in each Python worker, before its first row."""
    with database.direct() as connection:
        connection.execute("INSERT INTO outbox.messages (message_type, data) VALUES ('t', '{}')")
        connection.execute("CREATE TABLE public.staged (outbox_attempt uuid, message_type text, data jsonb)")
    directory = str(database.files().directory)
    subprocess.run([sys.executable, "-c", WITHOUT_PANDAS, directory, str(tmp_path)], check=True, timeout=60)
    with database.direct() as connection:
        assert connection.execute("SELECT message_type, data::text FROM public.staged").fetchall() == [("t", "{}")]
