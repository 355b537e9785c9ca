"""Staging and hidden files on real PostgreSQL with real tasks: lost attempts, crashes between commit and rename."""

from __future__ import annotations

import datetime as dt
import json
import re
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import functions as f

from outbox_core.config import ProcessorConfig
from outbox_core.errors import ConfigurationError, HandlerError, PermanentError, TransientError
from outbox_core.message import Batch
from outbox_core.progress.checkpoint import BEGINNING, Checkpoint
from outbox_core.report import Reason
from outbox_core.spec import Connection, ObjectRef, Source
from outbox_spark.offsets import OffsetRange, format_offset
from outbox_spark.options import ReadOptions, parse_options
from outbox_spark.reader import RangeReader
from outbox_spark.session import SessionStarter
from outbox_spark.streaming.directory import QueryDirectories, QueryDirectory
from outbox_spark.streaming.lineage import fetch_history, store_begin
from outbox_spark.streaming.pipeline import SparkPipeline
from outbox_spark.streaming.resume import Lineage, Resume, ResumeDecision, decide_resume
from outbox_spark.writing.effects import Effects
from outbox_spark.writing.files import FileArea, PendingFile, reveal, write_messages, write_piece
from outbox_spark.writing.staging import StagingArea, copy_rows
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.transactions.transaction import Transaction
from tests.support.servers.crash import CrashingServer
from tests.support.spark import spark_config, start_notebook_session

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.servers.postgres import Database

pytestmark = pytest.mark.spark

SOURCE = Source(connection=Connection(secret_ref=ObjectRef(name="db")))
WHOLE = OffsetRange(Checkpoint(1, 1), Checkpoint(9, 9))


@pytest.fixture(scope="module")
def notebook() -> Iterator[Any]:
    session = start_notebook_session()
    yield session
    session.stop()


def staging(database: Database, epoch: int = 1) -> StagingArea:
    files = database.files()
    return StagingArea(files, "outbox", "orders", epoch)


def fail_the_first_attempt(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """As an executor that dies at the end of its task."""
    from pyspark import TaskContext

    yield from batches
    context = TaskContext.get()
    if context is not None and context.attemptNumber() == 0:
        raise RuntimeError("this attempt is lost")


def test_only_the_attempts_that_spark_counts_are_merged(notebook, database):
    rows = notebook.range(0, 1000, numPartitions=2).mapInArrow(fail_the_first_attempt, "id long")
    staged = staging(database).load(rows)
    assert staged.rows == 1000
    assert len(staged.attempts) == 2
    # One that Spark never heard of again after it had loaded its rows.
    copy_rows(database.files(), staged.table, iter([pa.RecordBatch.from_pydict({"id": [1, 2, 3]})]))
    look = database.direct()
    assert sorted(row[0] for row in look.execute(staged.relation()).fetchall()) == list(range(1000))
    (everything,) = look.execute(f"SELECT count(*) FROM outbox.{staged.table.name}").fetchone()
    assert everything >= 1003


@pytest.mark.parametrize("name", ["the statement of effects.sql", "target.sql.statement"])
def test_a_statement_that_fails_is_named_where_it_stands(notebook, database, name):
    effects = Effects(staging(database), FileArea(database.files(), "outbox", "orders", 1), WHOLE)
    rows, statement = notebook.range(3), "INSERT INTO public.nowhere SELECT id FROM batch"
    if name == "target.sql.statement":
        effects.run(rows, statement, name)
    else:
        effects.sql(rows, statement)
    with (
        database.direct(autocommit=False) as connection,
        pytest.raises(HandlerError, match=f"^{name} failed") as caught,
    ):
        effects.apply(Transaction(connection, None), Batch(WHOLE.start, WHOLE.end, (), 3, full=True))
    assert 'relation "public.nowhere" does not exist' in str(caught.value)


def test_values_arrive_as_they_were(notebook, database):
    rows = notebook.range(1).select(
        f.struct(f.lit(1).alias("a"), f.lit("x").alias("b")).alias("nested"),
        f.array(f.lit(1), f.lit(2)).alias("list"),
        f.lit(bytearray(b"\x00\xff")).alias("bytes"),
        f.lit("").alias("empty"),
        f.lit(None).cast("string").alias("nothing"),
        f.lit('say "hi",\n\\bye').alias("quoted"),
        f.expr("cast(1.20 as decimal(5, 2))").alias("money"),
        f.expr("double('infinity')").alias("much"),
        f.expr("date'2026-01-02'").alias("day"),
        f.expr("timestamp'2026-01-02 03:04:05.000006 UTC'").alias("at"),
        f.lit(True).alias("yes"),
        f.lit(2**62).alias("Big Name"),
    )
    staged = staging(database).load(rows)
    (row,) = database.direct().execute(staged.relation()).fetchall()
    moment = dt.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=dt.UTC)
    assert row == (
        {"a": 1, "b": "x"}, [1, 2], b"\x00\xff", "", None, 'say "hi",\n\\bye', Decimal("1.20"), float("inf"),
        dt.date(2026, 1, 2), moment, True, 2**62,
    )  # fmt: skip


def test_a_later_epoch_drops_the_tables_so_that_strays_of_an_earlier_one_fail(notebook, database):
    earlier = staging(database, 1)
    staged = earlier.load(notebook.range(3))
    assert staging(database, 2).sweep() == 1
    stray = iter([pa.RecordBatch.from_pydict({"id": [1]})])
    with pytest.raises(ConfigurationError, match=staged.table.name):
        copy_rows(database.files(), staged.table, stray)


def test_what_a_failed_attempt_staged_goes_with_the_next_query_and_a_reader_stops_nobody(notebook, database):
    staging(database, 1).load(notebook.range(3))
    reader = database.direct(autocommit=False)
    reader.execute("SELECT * FROM outbox.spark_staging")
    ((name,),) = reader.execute("SELECT table_name FROM outbox.spark_staging").fetchall()
    reader.execute(f"LOCK TABLE outbox.{name} IN ACCESS SHARE MODE")  # as pg_dump, for as long as it runs
    assert staging(database, 2).sweep() == 0
    reader.rollback()
    assert staging(database, 1).sweep() == 1, "another query of the same owner"
    assert database.direct().execute("SELECT count(*) FROM outbox.spark_staging").fetchone() == (0,)


def test_rows_that_a_crash_emptied_are_missed(notebook, database):
    area = staging(database)
    staged = area.load(notebook.range(3))
    connection = database.direct()
    assert staged.is_complete(connection)
    connection.execute(f"TRUNCATE outbox.{staged.table.name}")  # what recovery does with unlogged tables
    assert not staged.is_complete(connection)


def test_an_emptied_table_serves_the_next_batch(notebook, database):
    area = staging(database)
    area.load(notebook.range(3))
    area.clear()
    again = area.load(notebook.range(5))
    (everything,) = database.direct().execute(f"SELECT count(*) FROM outbox.{again.table.name}").fetchone()
    assert everything == 5


def test_files_appear_when_their_checkpoint_is_stored_and_not_before(notebook, database, tmp_path):
    area = FileArea(database.files(), "outbox", "orders", 1)
    pending = area.write(notebook.range(0, 100, numPartitions=3), tmp_path, WHOLE)
    assert sum(file.rows for file in pending) == 100
    assert not list(tmp_path.glob("*.parquet"))
    with database.direct(autocommit=False) as connection:
        area.list_in(connection, pending)
        connection.rollback()
    assert area.roll_forward() == 0
    assert not list(tmp_path.glob("*.parquet")), "rolled back: not there"


def test_after_a_crash_between_commit_and_rename_the_next_owner_rolls_forward(notebook, database, tmp_path):
    path = tmp_path / "all orders, ä"
    first = FileArea(database.files(), "outbox", "orders", 1)
    pending = first.write(notebook.range(0, 100, numPartitions=2), path, WHOLE)
    first.write(notebook.range(0, 100), path, WHOLE)  # of a batch that was never stored
    with database.direct() as connection:
        first.list_in(connection, pending)
    pending[0].hidden.rename(pending[0].final)  # the crash came after the first of two
    assert notebook.read.parquet(str(path)).count() == pending[0].rows
    second = FileArea(database.files(), "outbox", "orders", 2)
    assert second.roll_forward() == 2
    second.write(notebook.range(0, 1), path, WHOLE)
    assert sorted(row.id for row in notebook.read.parquet(str(path)).collect()) == list(range(100))
    assert len(list(path.glob("_outbox/*/*"))) == 1, "what was never stored is swept, the new epoch's own stays"
    assert second.roll_forward() == 0


def test_files_that_readers_see_are_of_a_checkpoint_that_no_crash_takes_back(tmp_path):
    """The server's `synchronous_commit` is off, and it crashes once the files have their names."""
    server = CrashingServer("15")
    try:
        database = server.database(pooled=False)
        area = FileArea(database.files(), "outbox", "orders", 1)
        effects = Effects(StagingArea(database.files(), "outbox", "orders", 1), area, WHOLE)
        hidden = tmp_path / "_outbox/orders/1-a/part-0.parquet"
        hidden.parent.mkdir(parents=True)
        hidden.touch()
        effects.pending.append(PendingFile(hidden, tmp_path / "a.parquet", 1))
        server.flush()
        with server.crashed():
            with database.direct(autocommit=False) as connection:
                connection.execute("CREATE TABLE public.stored ()")  # in place of the checkpoint
                effects.apply(Transaction(connection, None), Batch(WHOLE.start, WHOLE.end, (), 1, full=True))
            assert area.roll_forward() == 1
        with server.connect(database.name) as again:
            assert again.execute("SELECT to_regclass('public.stored')::text").fetchone() == ("stored",)
        area.roll_forward()
        assert [file.name for file in tmp_path.glob("*.parquet")] == ["a.parquet"]
        database.close()
    finally:
        server.stop()


def test_a_batch_without_rows_leaves_no_files(notebook, database, tmp_path):
    assert FileArea(database.files(), "outbox", "orders", 1).write(notebook.range(0), tmp_path, WHOLE) == []
    assert not list(tmp_path.glob("_outbox/*/*")), "nor a directory: there may be one such batch a second"


def produce(database: Database) -> ReadOptions:
    """300 messages in three transactions, among them what Parquet's columns differ by."""
    with database.direct() as connection:
        for column in ("message_type", "data", "scheduled"):
            connection.execute(f"ALTER TABLE outbox.messages ALTER {column} DROP NOT NULL")
        for count in (99, 99, 99):
            connection.execute(
                "INSERT INTO outbox.messages (message_type, partition_key, data, metadata) SELECT 't\u2028', "
                "nullif(n %% 7, 0)::text, jsonb_build_object('n', n), '{}' FROM generate_series(1, %s) AS n",
                (count,),
            )
        connection.execute(
            "INSERT INTO outbox.messages (message_type, partition_key, data, scheduled) VALUES "
            "(NULL, '', NULL, NULL), ('', ' ', '{}', '2026-01-02 03:04:05.000006Z'), ('t', 'k', '[1]', '1901-02-03Z')"
        )
    return parse_options({"connection": str(database.files().directory), "partitions": "3", "fetchSize": "40"})


def test_messages_written_by_those_who_read_them_are_in_files_as_spark_writes_them(notebook, database, tmp_path):
    options = produce(database)
    read = notebook.read.format("outbox").option("connection", str(options.connection)).load()
    whole = OffsetRange(BEGINNING, RangeReader(options).fetch_settled())
    area = FileArea(database.files(), "outbox", "orders", 1)
    ours, sparks = tmp_path / "all messages, ä", tmp_path / "by Spark"
    pending = area.write(read, ours, whole, options)
    assert [file.rows for file in pending] == [100, 100, 100]
    assert not list(ours.glob("*.parquet")), "not before the checkpoint"
    reveal(pending)
    reveal(area.write(read, sparks, whole))
    found, expected = (notebook.read.parquet(str(path)) for path in (ours, sparks))
    assert found.schema.json() == expected.schema.json(), "what each column is in PostgreSQL, too"
    assert found.sort("position").collect() == expected.sort("position").collect()
    assert found.count() == 300
    first, other = (next(path.glob("*.parquet")) for path in (ours, sparks))
    assert [str(field.type) for field in pq.read_schema(first)] == [str(field.type) for field in pq.read_schema(other)]
    tables = [pq.read_table(file.final, columns=["position"]) for file in pending]
    positions = pa.concat_tables(tables).column(0).to_pylist()
    assert positions == sorted(positions), "the files are numbered in the messages' order"


def test_of_files_of_messages_those_that_spark_counts_are_revealed(notebook, database, tmp_path):
    options = produce(database)
    whole = OffsetRange(BEGINNING, RangeReader(options).fetch_settled())
    lost, rows = write_piece(options, str(tmp_path), "snappy", whole)  # an attempt that Spark never heard of
    done = write_messages(notebook, options, whole, tmp_path)
    assert (rows, sum(done.values())) == (300, 300)
    assert tmp_path / lost not in done
    assert FileArea(database.files(), "outbox", "orders", 1).write(
        notebook.range(0), tmp_path, OffsetRange(whole.end, Checkpoint(whole.end.transaction_id + 9, 1)), options
    ) == []  # fmt: skip
    assert not list(tmp_path.glob("_outbox/*/*")), "nor is there a directory for a batch without messages"


def test_files_of_messages_are_compressed_as_spark_is_told(notebook, database, tmp_path):
    options = produce(database)
    whole = OffsetRange(BEGINNING, RangeReader(options).fetch_settled())
    for codec, written in (("zstd", "ZSTD"), ("uncompressed", "UNCOMPRESSED")):
        notebook.conf.set("spark.sql.parquet.compression.codec", codec)
        try:
            (file, *_) = write_messages(notebook, options, whole, tmp_path / codec)
        finally:
            notebook.conf.unset("spark.sql.parquet.compression.codec")
        assert pq.read_metadata(file).row_group(0).column(0).compression == written


def test_the_grants_that_the_page_lists_are_enough(notebook, database, tmp_path):
    for page, heading in (("sql/README.md", "### A processor"), ("docs/spark.md", "where it does not own the schema")):
        text = Path(page).read_text()
        block = re.search(r"```sql\n(.*?)```", text[text.index(heading) :], re.DOTALL)
        assert block is not None
        database.direct().execute(block[1])
    secret = database.files("processor")
    staged = StagingArea(secret, "outbox", "orders", 1).load(notebook.range(3))
    files = FileArea(secret, "outbox", "orders", 1)
    key = ProcessorKey("outbox", "orders")
    with secret.connect("test") as connection:
        connection.autocommit = False
        assert len(connection.execute(staged.relation()).fetchall()) == 3
        now, untouched = fetch_history(connection, SOURCE, key, Checkpoint(1, 1))
        assert untouched
        store_begin(connection, key, now, Checkpoint(1, 1))
        files.list_in(connection, files.write(notebook.range(0, 3, numPartitions=1), tmp_path, WHOLE))
        connection.commit()
    assert files.roll_forward() == 1
    assert StagingArea(secret, "outbox", "orders", 2).sweep() == 1


def test_a_person_who_rewinds_says_where_state_is_built_from(database):
    key, look = ProcessorKey("outbox", "orders"), database.direct()

    def fetch(stored: Checkpoint) -> tuple[Lineage, bool]:
        return fetch_history(look, SOURCE, key, stored)

    begun, _ = fetch(Checkpoint(5, 5))
    store_begin(look, key, begun, Checkpoint(5, 5))
    assert fetch(Checkpoint(5, 5)) == (begun, True), "begun here, and nothing handled since"
    assert fetch(Checkpoint(9, 9)) == (begun, False)
    look.execute("SELECT outbox.rewind_processor_checkpoint('orders', 0, '7', 7, 'a test', 'a person')")
    decided, untouched = fetch(Checkpoint(7, 7))
    assert decided.decisions > begun.decisions
    assert untouched
    assert fetch(Checkpoint(9, 9)) == (decided, False)


def test_a_decision_is_known_after_a_restore_that_gives_its_number_to_another_one(database, tmp_path):
    key, look, stored = ProcessorKey("outbox", "orders"), database.direct(), Checkpoint(7, 7)
    rewind = "SELECT outbox.rewind_processor_checkpoint('orders', 0, '7', 7, 'a test', 'a person')"
    for _ in range(2):
        look.execute(rewind)
    directories = QueryDirectories(tmp_path, "orders")
    directories.begin(fetch_history(look, SOURCE, key, stored)[0], stored)

    def decide() -> ResumeDecision:
        found, (now, untouched) = directories.current(), fetch_history(look, SOURCE, key, stored)
        assert found is not None
        return decide_resume(found.view(), stored, now=now, stateful=False, untouched=untouched, settled=True)

    assert decide().action is Resume.CONTINUE
    look.execute("TRUNCATE outbox.audit_log RESTART IDENTITY")  # a dump from before the two was restored
    assert decide().action is Resume.CONTINUE, "what is forgotten was decided before the directory was begun"
    for number in (1, 2):
        look.execute(rewind)
        assert fetch_history(look, SOURCE, key, stored)[0].decisions == number
        assert decide().action is Resume.BEGIN


def test_state_that_executor_pods_could_not_share_is_refused_with_the_remedy(notebook, database, tmp_path):
    """They write it and the driver reads it: without a volume under `queryCheckpointPath` neither finds the other's."""
    (tmp_path / "orders.py").write_text(
        "def transform(messages):\n    return messages.groupBy('message_type').count()\n"
    )
    target = {"sql": {"statement": "INSERT INTO public.counted SELECT message_type, count FROM batch"}}
    fields = spark_config(database, tmp_path, target=target)
    fields["spark"] |= {"application": {"module": "orders"}, "config": {"spark.master": "k8s://https://cluster"}}
    sessions = SessionStarter(lambda: notebook)
    pipeline = SparkPipeline(
        ProcessorConfig.model_validate(fields), ProcessorKey("outbox", "orders"),
        source=database.files().directory, handler=tmp_path, sessions=sessions,
    )  # fmt: skip
    pipeline.check()
    assert pipeline.is_started(30)
    with pytest.raises(PermanentError, match=r"(?s)Aggregate.*lies on no volume.*spark\.volumes") as refused:
        pipeline.open(database.direct(), 1, Checkpoint(0, 0))
    assert refused.value.reason is Reason.INVALID_CONFIGURATION


def test_a_planned_batch_is_run_again_once_the_server_has_settled_it(database, tmp_path):
    """The server lost transactions that were planned: their ids are yet to come, then open, then over."""
    config, files = ProcessorConfig.model_validate(spark_config(database, tmp_path)), database.files()
    key, look, stored = ProcessorKey("outbox", "orders"), database.direct(), Checkpoint(5, 5)
    lineage, _ = fetch_history(look, SOURCE, key, Checkpoint(1, 1))
    store_begin(look, key, lineage, Checkpoint(1, 1))  # since then batches were handled
    begun = QueryDirectories(tmp_path / "query", "orders").begin(lineage, stored)
    (next_id,) = look.execute("SELECT pg_snapshot_xmax(pg_current_snapshot())::text::int8").fetchone()
    planned = json.dumps(format_offset(Checkpoint(next_id, 9)))
    (begun.location / "offsets").mkdir(parents=True)
    (begun.location / "offsets/0").write_text(f"v1\n{{}}\n{planned}")
    sessions = SessionStarter(lambda: pytest.fail("Spark is not needed"))
    pipeline = SparkPipeline(config, key, source=files.directory, handler=tmp_path, sessions=sessions)

    def waits() -> bool:
        with pytest.raises(TransientError, match=f"above {next_id}.*a rewind to the stored") as refused:
            pipeline._directory(look, stored, stateful=True)
        return refused.value.reason is Reason.QUERY_STATE_MISMATCH

    assert waits(), "the id is yet to come"
    with database.direct(autocommit=False) as writer:
        (found,) = writer.execute("SELECT pg_current_xact_id()::text::int8").fetchone()
        while found < next_id:
            writer.rollback()
            (found,) = writer.execute("SELECT pg_current_xact_id()::text::int8").fetchone()
        database.direct().execute("SELECT pg_current_xact_id()")
        assert waits(), "it is open"
        writer.commit()
    assert pipeline._directory(look, stored, stateful=True) == begun
    (begun.location / "offsets/0").write_text(f"v1\n{{}}\n{json.dumps(format_offset(Checkpoint(next_id * 1000, 9)))}")
    anew = pipeline._directory(look, stored, stateful=False)
    assert isinstance(anew, QueryDirectory)
    assert (anew.start, anew.path.name, begun.path.exists()) == (stored, "1", False), "without state it does not wait"
