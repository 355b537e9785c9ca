"""What a Spark processor does with a backlog by default: large micro-batches, the next one at once."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows

from outbox_core.progress.checkpoint import BEGINNING
from outbox_spark.offsets import format_offset
from outbox_spark.options import parse_options
from outbox_spark.reader import RangeReader
from outbox_spark.source import OutboxStreamReader
from tests.support.servers.postgres import wait_until
from tests.support.spark import PATIENCE, Drivers, Orders, SharedJvm, spark_config

if TYPE_CHECKING:
    from pathlib import Path

    from outbox_core.progress.checkpoint import Checkpoint
    from outbox_spark.options import ReadOptions
    from tests.support.servers.postgres import Database

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

COUNT = {"sql": {"statement": "INSERT INTO public.batches SELECT count(*), now() FROM batch"}}
"""A row for each micro-batch."""
SLOW = """
import time

def handle(messages, effects):
    if not getattr(time, "outbox_slept", False):
        time.outbox_slept = True
        time.sleep({seconds})
    effects.sql(messages.select("position"), "INSERT INTO public.batches SELECT count(*), now() FROM batch")
"""


@pytest.fixture
def orders(database: Database, tmp_path: Path) -> Orders:
    orders = Orders(database, tmp_path / "files")
    orders.connection.execute("CREATE TABLE public.batches (messages int, committed timestamptz)")
    return orders


def handled(orders: Orders) -> int:
    row = orders.connection.execute("SELECT coalesce(sum(messages), 0) FROM public.batches").fetchone()
    return int(row[0]) if row else 0


def options_of(database: Database, **options: str) -> ReadOptions:
    return parse_options({"connection": str(database.files().directory)} | options)


def reader(database: Database, **options: str) -> RangeReader:
    return RangeReader(options_of(database, **options))


def fetch_end(planner: RangeReader, after: Checkpoint, limit: int) -> tuple[Checkpoint, int | None, bool]:
    whole, full = planner.fetch_next(after, limit)
    return whole.end, whole.count, full


def test_a_micro_batch_ends_where_its_bytes_are_reached(database: Database, orders: Orders) -> None:
    """Payloads of 5 kB that do not compress: two fit 12,000 bytes; one that is larger than all comes alone."""
    orders.connection.execute(
        "INSERT INTO outbox.messages (message_type, data) "
        "SELECT 'Large', to_jsonb(string_agg(md5(random()::text), '')) "
        "FROM generate_series(1, 5) AS message, generate_series(1, 160) AS part GROUP BY message"
    )
    pairs = orders.connection.execute(
        "SELECT transaction_id::text, position FROM outbox.messages ORDER BY transaction_id, position"
    ).fetchall()
    ends = [f"{transaction_id}:{position}" for transaction_id, position in pairs]
    limited = reader(database, batchBytes="12000")
    wait_until(lambda: str(fetch_end(limited, BEGINNING, 5)[0]) == ends[1], "no transaction holds the bound")
    end, count, full = fetch_end(limited, BEGINNING, 1000)
    assert (str(end), count, full) == (ends[1], 2, True)
    end, count, full = fetch_end(limited, end, 1000)
    assert (str(end), count, full) == (ends[3], 2, True)
    end, count, full = fetch_end(limited, end, 1000)
    assert (str(end), count, full) == (ends[4], 1, False), "the last one alone leaves nothing behind it"
    end, count, full = fetch_end(reader(database, batchBytes="100"), BEGINNING, 1000)
    assert (str(end), count, full) == (ends[0], 1, True)
    end, count, full = fetch_end(reader(database), BEGINNING, 3)
    assert (str(end), count, full) == (ends[2], 3, True)


def test_of_a_backlog_without_statistics_no_more_is_read_than_a_micro_batch_has(
    database: Database, orders: Orders
) -> None:
    """A server that never analysed the table expects fewer rows than a batch may have, and sorts them all rather."""
    orders.connection.execute("ALTER TABLE outbox.messages SET (autovacuum_enabled = off)")
    for _ in range(60):
        orders.connection.execute(
            "INSERT INTO outbox.messages (message_type, data) SELECT 'Placed', '{}' FROM generate_series(1, 1000)"
        )
    planned, entries = reader(database, partitions="2"), index_entries(orders)
    wait_until(lambda: not planned.fetch_next(BEGINNING, 1)[0].empty, "no transaction holds the bound")
    whole, _ = planned.fetch_next(BEGINNING, 20_000)
    rows = [sum(page.num_rows for page in planned.read(piece)) for piece in planned.fetch_pieces(whole)]
    assert rows == [10_000, 10_000]
    wait_until(lambda: index_entries(orders) - entries >= 50_000, "the sessions have told what they read")
    assert index_entries(orders) - entries < 51_000, "the batch's end, one piece's end, and the rows"


def test_while_nothing_comes_the_offset_is_the_same_or_spark_would_begin_a_batch(
    database: Database, orders: Orders
) -> None:
    orders.connection.execute(
        "INSERT INTO outbox.messages (message_type, data) SELECT 'Placed', '{}' FROM generate_series(1, 7)"
    )
    stream, beginning = OutboxStreamReader(options_of(database, interval="0")), format_offset(BEGINNING)
    wait_until(lambda: stream.latestOffset(beginning, ReadMaxRows(9)) != beginning, "no transaction holds the bound")
    first = stream.latestOffset(beginning, ReadMaxRows(4))
    second = stream.latestOffset(first, ReadMaxRows(4))
    assert (first["messages"], second["messages"]) == (4, 3)
    assert json.dumps(stream.latestOffset(second, ReadMaxRows(4))) == json.dumps(second)
    stream.stop()


def index_entries(orders: Orders) -> int:
    """Say how many entries of the index in the order of the pairs were read since the server began."""
    row = orders.connection.execute(
        "SELECT idx_tup_read FROM pg_stat_user_indexes WHERE indexrelname = 'messages_cursor'"
    ).fetchone()
    return int(row[0]) if row else 0


def test_a_backlog_is_handled_in_large_batches_and_the_next_one_begins_at_once(
    drivers: Drivers, shared_jvm: SharedJvm, database: Database, orders: Orders, tmp_path: Path
) -> None:
    """220,000 messages with the defaults but a trigger of a minute: three micro-batches, none waits for the trigger."""
    orders.produce(220_000)
    config = spark_config(database, tmp_path, target=COUNT, spark={"trigger": {"processingTime": "1m"}})
    del config["delivery"]["batchSize"]
    driver = drivers.launch(drivers.prepare(config, database.uri()), jvm=shared_jvm)
    wait_until(lambda: handled(orders) >= 220_000 or driver.process.poll() is not None, "all is handled", PATIENCE)
    rows = orders.connection.execute("SELECT messages, committed FROM public.batches ORDER BY committed").fetchall()
    assert [messages for messages, _ in rows] == [100_000, 100_000, 20_000], driver.log()[-4000:]
    took = (rows[-1][1] - rows[0][1]).total_seconds()
    assert took < 60, f"the second and third micro-batch took {took} s: they waited for the trigger"
    began = time.monotonic()
    assert driver.terminate(60) == 0
    assert time.monotonic() - began < 30, "a driver that waits for its trigger ends at once"


def test_the_first_batch_may_take_longer_than_delivery_timeout(
    drivers: Drivers, shared_jvm: SharedJvm, database: Database, orders: Orders, tmp_path: Path
) -> None:
    """Pulling images and compiling the first plan are no handling: `delivery.timeout` is 2 s, they take 6."""
    orders.produce(10)
    config = spark_config(database, tmp_path, delivery={"timeout": "2s"})
    home = drivers.prepare(config, database.uri(), handler=SLOW.format(seconds=6))
    driver = drivers.launch(home, jvm=shared_jvm)
    wait_until(lambda: handled(orders) >= 10 or driver.process.poll() is not None, "the batch is handled", PATIENCE)
    assert "HandlerTimeout" not in driver.log()
    row = orders.connection.execute("SELECT count(*) FROM public.batches").fetchone()
    assert row == (1,)
    assert driver.terminate(60) == 0
