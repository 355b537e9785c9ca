"""What a Spark processor does with a backlog by default: large micro-batches, the next one at once."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from outbox_core.progress.checkpoint import BEGINNING
from outbox_spark.offsets import OffsetRange
from outbox_spark.options import parse_options
from outbox_spark.reader import RangeReader
from tests.support.servers.postgres import wait_until
from tests.support.spark import PATIENCE, Drivers, Orders, SharedJvm, spark_config

if TYPE_CHECKING:
    from pathlib import Path

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


def reader(database: Database, **options: str) -> RangeReader:
    return RangeReader(parse_options({"connection": str(database.files().directory)} | options))


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
    wait_until(lambda: str(limited.fetch_end(BEGINNING, 5)[0]) == ends[1], "no transaction holds the bound")
    end, full = limited.fetch_end(BEGINNING, 1000)
    assert (str(end), full) == (ends[1], True)
    end, full = limited.fetch_end(end, 1000)
    assert (str(end), full) == (ends[3], True)
    end, full = limited.fetch_end(end, 1000)
    assert (str(end), full) == (ends[4], False), "the last one alone leaves nothing behind it"
    end, full = reader(database, batchBytes="100").fetch_end(BEGINNING, 1000)
    assert (str(end), full) == (ends[0], True)
    end, full = reader(database).fetch_end(BEGINNING, 3)
    assert (str(end), full) == (ends[2], True)


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
    wait_until(lambda: not planned.fetch_end(BEGINNING, 1)[0].is_same(BEGINNING), "no transaction holds the bound")
    end, _ = planned.fetch_end(BEGINNING, 20_000)
    pieces = planned.fetch_pieces(OffsetRange(BEGINNING, end))
    rows = [sum(page.num_rows for page in planned.read(piece)) for piece in pieces]
    assert rows == [10_000, 10_000]
    wait_until(lambda: index_entries(orders) - entries >= 70_000, "the sessions have told what they read")
    assert index_entries(orders) - entries < 71_000, "the end, the count, one piece's end, and the rows"


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
