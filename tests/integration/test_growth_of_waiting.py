"""What waits costs what is taken or counted of it, however much else waits: in pages that the server touches.

A session's first call of a function is not counted where few pages are expected: it reads the catalogs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
from psycopg import sql

from outbox_core.errors import HandlerError
from outbox_core.processor.claimed_batch import RefusalAction, RefusalDecision
from outbox_core.progress.checkpoint import Checkpoint
from outbox_core.progress.coverage import as_snapshot_range
from outbox_worker.postgres.admin import pruning
from outbox_worker.postgres.feeds import competing
from outbox_worker.postgres.progress import checkpoints
from outbox_worker.postgres.reading.read_range import ReadRange
from outbox_worker.postgres.reading.table import OutboxTable
from tests.support.database.consuming import (
    HOUR,
    JOBS,
    KEY,
    claim,
    cut,
    defer,
    drain,
    join,
    produce,
    put,
    taker,
)
from tests.support.database.contract import own
from tests.support.servers.postgres import build_source

if TYPE_CHECKING:
    import psycopg

LIMIT = 50
FEW = 200
"""Pages, where thousands of messages wait."""
TOKEN = str(uuid4())
TAKE = "SELECT * FROM outbox.take_due_messages('orders', 0, %s, %s::uuid, %s, true)"
HOLD = """
    INSERT INTO outbox.held_messages (processor_id, key, place, transaction_id, position, message_id, blocks, behind,
                                      next_attempt_at)
    SELECT 'orders', 'key-' || i %% 100, nextval('outbox.held_order'), '5', i, i, false, false,
           now() - CASE WHEN %(together)s THEN interval '1 hour' ELSE i * interval '1 ms' END
    FROM generate_series(1, %(count)s) AS i
"""


class Counting:
    """Runs what the adapter runs, keeps each statement's plan, and counts the pages that it touches."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self.connection = connection
        self.plans: list[dict[str, Any]] = []

    def execute(self, query, parameters=None):
        text = sql.SQL("EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {}").format(
            sql.SQL(query) if isinstance(query, str) else query
        )
        with self.connection.transaction(force_rollback=True):
            row = self.connection.execute(text, parameters).fetchone()
        assert row is not None
        self.plans.append(row[0][0]["Plan"])
        return self.connection.execute(query, parameters)

    @property
    def pages(self):
        return max(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] for plan in self.plans)

    def scanned(self):
        """The tables that are read from end to end."""
        todo, found = list(self.plans), set()
        while todo:
            node = todo.pop()
            todo += node.get("Plans", [])
            if node["Node Type"] == "Seq Scan":
                found.add(node["Relation Name"])
        return found


@pytest.mark.parametrize("together", [True, False], ids=["at one moment", "one after the other"])
def test_of_many_messages_that_are_due_those_are_looked_at_that_are_taken(database, together):
    epoch, connection = own(database, TOKEN), database.direct()
    touched = []
    for count in (1_000, 20_000):
        connection.execute("TRUNCATE outbox.held_messages")
        connection.execute(HOLD, {"together": together, "count": count})
        connection.execute("VACUUM ANALYZE outbox.held_messages")
        counting = Counting(connection)
        assert len(counting.execute(TAKE, (epoch, TOKEN, LIMIT)).fetchall()) == LIMIT
        touched.append(counting.pages)
    assert touched[1] <= touched[0] + 10 * LIMIT, touched


def test_messages_that_are_held_and_not_due_cost_a_look_nothing(database):
    epoch, connection = own(database, TOKEN), database.direct()
    connection.execute(HOLD, {"together": True, "count": 20_000})
    connection.execute("UPDATE outbox.held_messages SET next_attempt_at = now() + interval '1 hour'")
    connection.execute("VACUUM ANALYZE outbox.held_messages")
    warm_up, counting = Counting(connection), Counting(connection)
    for each in (warm_up, counting):
        assert len(each.execute(TAKE, (epoch, TOKEN, LIMIT)).fetchall()) == 1, "that there is none"
    assert counting.pages < FEW


FAIL = """
    SELECT outbox.fail_held_messages('orders', 0, %(epoch)s, %(token)s::uuid, jsonb_agg(jsonb_build_object(
        't', '5', 'p', i, 'action', '{action}', 'blocks', true, 'attempts', 2, 'wait', 60)))
    FROM generate_series(1, %(count)s) AS i
"""
SETTLE = """
    SELECT outbox.settle_held_messages('orders', 0, %(epoch)s, %(token)s::uuid, array_agg('5'::xid8),
                                       array_agg(i::bigint))
    FROM generate_series(1, %(count)s) AS i
"""
READ = "SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_xact_user_tables WHERE relname = 'held_messages'"


@pytest.mark.parametrize(
    "settle",
    [FAIL.format(action="Hold"), FAIL.format(action="Skip"), SETTLE],
    ids=["failed again", "skipped", "handled"],
)
def test_of_many_held_messages_those_are_read_that_were_tried(database, settle):
    """Also where the table was never analysed, as in the first minute in which many fail."""
    epoch, connection = own(database, TOKEN), database.direct(autocommit=False)
    connection.execute("ALTER TABLE outbox.held_messages SET (autovacuum_enabled = false)")
    connection.execute(HOLD, {"together": True, "count": 2_000})
    connection.commit()
    row = connection.execute(settle, {"epoch": epoch, "token": TOKEN, "count": 20}).fetchone()
    assert row == (20,)
    (read,) = connection.execute(READ).fetchone()
    assert read < 500
    connection.rollback()


@pytest.fixture
def consumer(database):
    connection = database.direct()
    for name in ("competing_retries", "competing_copies"):
        connection.execute(f"ALTER TABLE outbox.{name} SET (autovacuum_enabled = false)")
    claim(connection)
    return connection


@pytest.mark.parametrize("failed", [True, False])
def test_delayed_messages_that_are_not_due_cost_a_consumers_look_nothing(consumer, failed):
    competing.ensure_queue(consumer, "outbox", "jobs", create=True)
    join(consumer)
    put(consumer, 20_000, deliver_after="2100-01-01", last_error="E: no" if failed else None)
    consumer.execute(
        "INSERT INTO outbox.competing_retries "
        "(processor_id, transaction_id, position, message_id, due_at, error_class) "
        "SELECT 'orders', '5', i, i, '2100-01-01', %s FROM generate_series(1, 20000) AS i",
        ("E" if failed else None,),
    )
    consumer.execute("VACUUM ANALYZE outbox.queue_jobs")
    consumer.execute("VACUUM ANALYZE outbox.competing_retries")
    warm_up, counting = Counting(consumer), Counting(consumer)
    for each in (warm_up, counting):
        each.execute("SELECT outbox.promote_waiting('jobs', 100, %s)", (failed,))
        each.execute("SELECT * FROM outbox.take_waiting('orders', 'u1', 'one', 'pod', '1 h', 100, %s)", (failed,))
    assert counting.pages < FEW


def test_messages_that_wait_for_another_attempt_are_counted_up_to_a_bound(consumer):
    join(consumer)
    consumer.execute(
        "INSERT INTO outbox.competing_retries (processor_id, transaction_id, position, message_id, due_at) "
        "SELECT 'orders', '5', i, i, '2100-01-01' FROM generate_series(1, 20000) AS i"
    )
    produce(consumer, 3)
    consumer.execute("VACUUM ANALYZE outbox.competing_retries")
    counting: Any = Counting(consumer)

    lag = competing.measure_lag(counting, KEY, taker().reader, LIMIT)

    assert (lag.messages, lag.at_least) == (LIMIT + 1 + 3, True)
    assert counting.pages < FEW // 10
    assert not competing.measure_lag(consumer, KEY, taker().reader, 20_000).at_least
    assert competing.count_unfinished(consumer, KEY).retries == 10_000


def test_of_a_queues_delayed_messages_those_are_counted_that_wait_to_be_handled(consumer):
    competing.ensure_queue(consumer, "outbox", "jobs", create=True)
    join(consumer, JOBS)
    by = taker(settings=JOBS)
    done = put(consumer, 3000)
    assert drain(consumer, by) == done
    put(consumer, 20_000, deliver_after="2100-01-01")
    put(consumer, 7, deliver_after="2100-01-01", last_error="E: no", attempts=1)
    put(consumer, 3, deliver_after="2020-01-01", last_error="E: no", attempts=1)
    put(consumer, 2, deliver_after="-infinity")
    consumer.execute("VACUUM ANALYZE outbox.queue_jobs")
    counting: Any = Counting(consumer)

    assert by.reader.count_waiting(counting, LIMIT)[:2] == (12, 12)
    by.find_next_due(counting)
    assert by.reader.count_waiting(counting, 5)[:2] == (7, 7), "of each kind at most five"
    assert counting.pages < FEW
    assert not {name for name in counting.scanned() if name.startswith("queue_jobs")}


@pytest.mark.parametrize("has_statistics", [True, False], ids=["analyzed", "never analyzed"])
def test_the_checkpoint_passes_each_delayed_message_once_and_not_too_many_at_a_time(consumer, has_statistics):
    def advance():
        if has_statistics:
            consumer.execute("VACUUM ANALYZE outbox.competing_retries")
            consumer.execute("VACUUM ANALYZE outbox.competing_copies")
        counting = Counting(consumer)
        counting.execute("SELECT outbox.advance_competing_checkpoint('orders')")
        stored = checkpoints.load(consumer, KEY)
        assert stored is not None
        return stored.pair.position, counting.pages

    join(consumer)
    before = produce(consumer, 12_000, deliver_after="1 hour")
    (failing,) = produce(consumer, 1)
    behind = produce(consumer, 2_000, deliver_after="1 hour")
    by = taker(limit=20_000)
    claimed = cut(consumer, by)
    (message,) = by.reader.fetch(consumer, ReadRange.of(claimed))
    assert defer(consumer, by, claimed, message, RefusalDecision(RefusalAction.RETRY, 1), HandlerError("no"), HOUR)
    assert by.complete(consumer, claimed, claimed.upto, 0)
    drain(consumer, by)

    assert advance()[0] == before[9_999]
    assert advance()[0] == failing - 1
    position, pages = advance()
    assert (position, pages < FEW) == (failing - 1, True), pages
    consumer.execute("UPDATE outbox.competing_retries SET due_at = clock_timestamp() WHERE position = %s", (failing,))
    assert drain(consumer, by) == [failing]
    assert advance()[0] > behind[-1]
    assert advance()[1] < FEW


COPIES = {
    "held_messages": {"key": "'k'", "place": "i", "blocks": "false", "behind": "false"},
    "dead_letters": {"attempts": "1", "error_class": "'E'", "error": "'no'"},
    "competing_retries": {"due_at": "'2100-01-01'"},
}


@pytest.mark.parametrize("has_statistics", [True, False], ids=["analyzed", "never analyzed"])
@pytest.mark.parametrize("table", COPIES)
def test_a_page_that_is_pruned_costs_nothing_of_what_is_kept_elsewhere(database, table, has_statistics):
    connection = database.direct()
    connection.execute("INSERT INTO outbox.competing_processors (processor_id) VALUES ('orders')")
    connection.execute(
        "INSERT INTO outbox.messages (transaction_id, position, message_type, data) "
        "SELECT (5 + i % 3)::text::xid8, 20000 - i, 't', '{}' FROM generate_series(1, 300) AS i"
    )
    values = COPIES[table] | {"processor_id": "'orders'", "transaction_id": "'7'", "position": "i", "message_id": "i"}
    connection.execute(
        f"INSERT INTO outbox.{table} ({', '.join(values)}) "
        f"SELECT {', '.join(values.values())} FROM generate_series(1, 19998) AS i"
    )
    if has_statistics:
        connection.execute("VACUUM ANALYZE outbox.messages")
        connection.execute(f"VACUUM ANALYZE outbox.{table}")
    counting: Any = Counting(connection)
    plan = pruning.Pruning(OutboxTable.of(build_source()), ["outbox"], None, 300, delete=False)

    page = pruning.prune_page(counting, plan, [as_snapshot_range(Checkpoint(9, 9))], ("0", 0))

    assert (page.rows, page.chosen) == (300, 200), "what has a copy stays"
    assert table not in counting.scanned()
    assert counting.pages < 300 * 10
