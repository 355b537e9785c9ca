"""A bound that does not move is named in time, and no slow handler of ours holds another processor up."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import psycopg
import pytest

from outbox_core.report import STALLED_AFTER
from outbox_operator.decision.decide import decide
from outbox_worker.postgres.reading.stall import describe, list_writers, missing_grant, remedy
from tests.support.servers.postgres import POOLED, wait_until
from tests.support.worker import GATED_HANDLER, PYTHON_TARGET, SQL_TARGET, HandlerGate, build_config
from tests.unit.operator.building import NOW, build_observed, build_pod, build_report, condition

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.servers.postgres import Servers
    from tests.support.worker import Outbox, Worker, Workers

ASKED_EVERY = 2.0
"""Seconds between two looks of the operator at its workers."""
SLOW = {"name": "slow", "uid": "uid-slow"}
FAST_SQL = {"sql": {"statement": "INSERT INTO fast (message_id) SELECT message_id FROM batch"}}
WAITS_FIRST = """
import pathlib, time
def handle(batch, connection):
    hold = pathlib.Path("hold")
    while hold.exists():
        pathlib.Path("entered").touch()
        time.sleep(0.01)
    with connection.cursor() as cursor:
        cursor.executemany("INSERT INTO handled (message_id, total) VALUES (%s, 0)", [(m.message_id,) for m in batch])
"""


@contextlib.contextmanager
def stranger(servers: Servers, outbox: Outbox) -> Iterator[psycopg.Connection]:
    """Somebody in another database of the same server who has written and is idle."""
    server = outbox.database.server
    other = server.create("empty_template")
    connection = psycopg.connect(server.uri(other), application_name="nightly-report")
    try:
        connection.execute("SELECT pg_current_xact_id()")
        yield connection
    finally:
        connection.close()
        server.drop(other)


def test_a_stall_is_a_condition_within_ten_seconds_of_its_begin(outbox, workers, servers):
    worker = workers.start(build_config(outbox.database, SQL_TARGET), outbox.database.uri())
    outbox.wait_handled(outbox.produce(3))
    with stranger(servers, outbox) as holder:
        began = time.monotonic()
        outbox.produce(2, start=3)
        report = worker.wait_for(
            "the stall is told", lambda r: r.high_water_mark is not None and r.high_water_mark.stalled
        )
        told = time.monotonic() - began
        print(f"told {told:.1f} s after it began")
        assert told + ASKED_EVERY <= 10
        assert told >= STALLED_AFTER

        decision = decide(build_observed(build_pod(report=build_report(high_water_mark=report.high_water_mark))), NOW)
        assert condition(decision, "SourceCurrent") == ("False", "HighWaterMarkStalled")
        (message,) = [c.message for c in decision.status.conditions if c.type == "SourceCurrent"]
        pid = holder.info.backend_pid
        for part in (f"session {pid}", "'nightly-report'", holder.info.dbname, "idle in transaction", "open for",
                     f"pg_terminate_backend({pid})"):  # fmt: skip
            assert part in message
        metrics = worker.get("/metrics")[1]
        assert 'outbox_high_water_mark_stalled{processor="orders"} 1.0' in metrics
        (line,) = [
            line for line in metrics.splitlines() if line.startswith("outbox_high_water_mark_holder_age_seconds{")
        ]
        assert f'pid="{pid}"' in line
        assert 'application="nightly-report"' in line
    worker.wait_for("it is over", lambda r: r.high_water_mark is not None and not r.high_water_mark.stalled)
    assert "outbox_high_water_mark_holder_age_seconds{" not in worker.get("/metrics")[1]


def start_fast(outbox: Outbox, workers: Workers) -> Worker:
    outbox.connection.execute("CREATE TABLE fast (n serial PRIMARY KEY, message_id text)")
    worker = workers.start(build_config(outbox.database, FAST_SQL, processor_id="fast"), outbox.database.uri())
    worker.wait_state("Active")
    return worker


def count_fast(outbox: Outbox) -> int:
    row = outbox.connection.execute("SELECT count(*) FROM fast").fetchone()
    assert row is not None
    return int(row[0])


def until_fast(outbox: Outbox, wanted: int) -> None:
    wait_until(lambda: count_fast(outbox) >= wanted, "the other processor goes on", 10)


def assert_unaffected(outbox: Outbox) -> None:
    """Each message is handled by the other processor as soon as it is stored."""
    waits = []
    for _ in range(20):
        wanted = count_fast(outbox) + 1
        stored = time.monotonic()
        outbox.produce(1, start=wanted)
        until_fast(outbox, wanted)
        waits.append(time.monotonic() - stored)
    print(f"slowest of {len(waits)}: {max(waits):.2f} s")
    assert sorted(waits)[len(waits) // 2] < 1.0, "half of them within a poll or two"


@pytest.mark.parametrize("guarantee", ["Transactional", "AtLeastOnce"])
def test_a_handler_that_is_slow_before_it_writes_holds_nobody_up(outbox, workers, guarantee):
    start_fast(outbox, workers)
    config = build_config(
        outbox.database, PYTHON_TARGET, processor_id="slow", resource=SLOW,
        delivery={"guarantee": guarantee, "leaseDuration": "15s"},
    )  # fmt: skip
    home = workers.prepare(config, outbox.database.uri(), handler=WAITS_FIRST)
    gate = HandlerGate(home)
    gate.close()
    workers.launch(home).wait_state("Active")
    outbox.produce(1)
    gate.wait_entered()
    wait_until(lambda: count_fast(outbox) == 1, "the first")

    assert_unaffected(outbox)

    assert outbox.handled() == [], "the slow one is still at its first message"
    gate.open()
    wait_until(lambda: len(outbox.handled()) == 21, "the slow one goes on")


def test_a_statement_that_is_slow_before_it_writes_holds_nobody_up(outbox, workers):
    start_fast(outbox, workers)
    slow = (
        "WITH waited AS MATERIALIZED (SELECT pg_sleep(5)) "
        "INSERT INTO handled (message_id) SELECT message_id FROM waited, batch"
    )
    config = build_config(outbox.database, {"sql": {"statement": slow}}, processor_id="slow", resource=SLOW)
    workers.start(config, outbox.database.uri()).wait_state("Active")
    outbox.produce(1)
    sleeping = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'"
    wait_until(lambda: outbox.connection.execute(sleeping).fetchone() == (1,), "the slow statement has begun")

    outbox.produce(3, start=1)
    wait_until(lambda: count_fast(outbox) == 4, "the other processor goes on", 4.5)

    assert outbox.handled() == []


def test_a_handler_that_writes_and_goes_on_is_named_by_its_processor_and_bounded(outbox, workers):
    fast = start_fast(outbox, workers)
    config = build_config(
        outbox.database, PYTHON_TARGET, processor_id="slow", resource=SLOW,
        delivery={"timeout": "8s", "leaseDuration": "15s"},
    )  # fmt: skip
    home = workers.prepare(config, outbox.database.uri(), handler=GATED_HANDLER)
    gate = HandlerGate(home)
    gate.close()
    workers.launch(home, pod="slow-pod").wait_state("Active")
    outbox.produce(1)
    gate.wait_entered()
    outbox.produce(3, start=1)
    began = time.monotonic()

    report = fast.wait_for("the stall is told", lambda r: r.high_water_mark is not None and r.high_water_mark.stalled)

    assert report.high_water_mark is not None
    assert report.high_water_mark.held_by is not None
    assert (report.high_water_mark.held_by.kind, report.high_water_mark.held_by.processor) == ("worker", "slow")
    assert "processor slow (pod slow-pod)" in (report.high_water_mark.holder or "")
    assert "delivery.timeout of slow bounds it" in (report.high_water_mark.remedy or "")
    wait_until(lambda: count_fast(outbox) == 4, "the timeout has ended it", 12)
    print(f"held for {time.monotonic() - began:.1f} s by a timeout of 8 s")


def test_a_plain_role_is_told_which_grant_shows_the_rest(database):
    first, second = (database.direct("stranger", autocommit=False) for _ in range(2))
    for writer in (first, second):
        writer.execute("SELECT pg_current_xact_id()")

    hidden, shown = list_writers(database.connect("processor")), list_writers(database.connect())

    assert [writer.pid for writer in hidden.writers] == [first.info.backend_pid, second.info.backend_pid]
    assert hidden.holder is not None
    assert (hidden.holder.age_seconds, hidden.holder.state) == (None, None)
    assert "GRANT pg_read_all_stats TO processor" in (missing_grant(hidden) or "")
    assert missing_grant(shown) is None


def test_behind_a_pool_a_worker_is_named_by_its_processor(servers):
    with servers.database(POOLED) as database:
        worker = database.connect(name="outbox orders orders-7d4b-x2x", autocommit=False)
        worker.execute("SELECT pg_current_xact_id()")

        holder = list_writers(database.connect(name="outbox other pod")).holder

        assert holder is not None
        assert (holder.processor, holder.pod) == ("orders", "orders-7d4b-x2x")
        assert "processor orders (pod orders-7d4b-x2x): session" in describe(holder)
        assert "delivery.timeout" in remedy(holder)


def test_what_only_reads_and_a_replication_slot_hold_dead_rows_but_not_the_bound(database):
    reader = database.direct(autocommit=False)
    reader.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    reader.execute("SELECT count(*) FROM outbox.messages")
    connection = database.direct()
    row = connection.execute("SELECT pg_current_xact_id()::text").fetchone()
    assert row is not None

    found = list_writers(connection)

    assert found.holder is None
    assert int(found.high_water_mark) > int(row[0])
    held = connection.execute(
        "SELECT backend_xmin IS NOT NULL FROM pg_stat_activity WHERE pid = %s", (reader.info.backend_pid,)
    )
    assert held.fetchone() == (True,), "vacuum waits for it"
