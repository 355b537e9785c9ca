"""Each target against real servers: everything once, in order, and the checkpoint of the last message examined."""

from __future__ import annotations

import pytest

from tests.support.processes import memory_mb
from tests.support.servers.postgres import POOLED, wait_until
from tests.support.worker import PYTHON_HANDLER, PYTHON_TARGET, SQL_TARGET, Outbox, build_config

LOG_TARGET = {"log": {"payload": True}}


@pytest.mark.parametrize("checkpoint", ["AfterHandling", "BeforeHandling"])
@pytest.mark.parametrize("target", [SQL_TARGET, PYTHON_TARGET], ids=["sql", "python"])
def test_a_transactional_target_handles_each_message_once_in_order(outbox, workers, target, checkpoint):
    first = outbox.produce(2500)
    config = build_config(outbox.database, target, delivery={"checkpoint": checkpoint})
    worker = workers.start(config, outbox.database.uri(), handler=PYTHON_HANDLER)
    outbox.wait_handled(first)
    second = outbox.produce(3, start=2500)
    outbox.wait_handled(first + second)
    report = worker.wait_for("everything is stored", lambda r: r.checkpoints[0].pair == outbox.last())
    assert report.handled == 2503
    assert report.start_from_used is True
    assert outbox.stored() == outbox.last()
    assert worker.terminate() == 0


@pytest.mark.parametrize("target", [SQL_TARGET, PYTHON_TARGET], ids=["sql", "python"])
def test_at_least_once_is_possible_in_the_database_too(outbox, workers, target):
    ids = outbox.produce(30)
    config = build_config(outbox.database, target, delivery={"guarantee": "AtLeastOnce", "batchSize": 7})
    worker = workers.start(config, outbox.database.uri(), handler=PYTHON_HANDLER)
    outbox.wait_handled(ids)
    worker.wait_for("everything is stored", lambda r: r.handled == 30)
    assert outbox.stored() == outbox.last()


def test_the_log_target_prints_a_line_for_each_message(outbox, workers):
    ids = outbox.produce(20)
    worker = workers.start(build_config(outbox.database, LOG_TARGET), outbox.database.uri())
    worker.wait_for("everything is stored", lambda r: r.handled == 20)
    lines = worker.lines()
    assert [line["messageId"] for line in lines] == ids
    assert lines[0]["data"] == {"n": 1, "total": 10}


def test_everything_works_through_pgbouncer(servers, workers):
    with servers.database(POOLED) as database:
        outbox = Outbox(database)
        ids = outbox.produce(500)
        config = build_config(database, PYTHON_TARGET, delivery={"batchSize": 50})
        worker = workers.start(config, database.uri(), handler=PYTHON_HANDLER)
        outbox.wait_handled(ids)
        assert worker.terminate() == 0
        assert outbox.stored() == outbox.last()


def test_filters_let_others_pass_and_the_checkpoint_still_moves(outbox, workers):
    outbox.produce(300, message_type="Noise")
    wanted = outbox.produce(5, start=300)
    outbox.produce(300, start=305, message_type="Noise")
    config = build_config(outbox.database, SQL_TARGET, source={"messageTypes": ["OrderPlaced"]})
    worker = workers.start(config, outbox.database.uri())
    outbox.wait_handled(wanted)
    # Nothing matches behind the last one, and the pair that is stored is that of the last message examined.
    wait_until(lambda: outbox.stored() == outbox.last(), "examined rows are stored")
    worker.wait_for("they are counted", lambda report: report.handled == len(wanted))


@pytest.mark.parametrize(
    ("start_from", "expected"),
    [({"type": "Beginning"}, 9), ({"type": "End"}, 2), ({"type": "Position", "position": 4}, 6)],
    ids=["beginning", "end", "position"],
)
def test_start_from(outbox, workers, start_from, expected):
    outbox.produce(7)
    worker = workers.start(build_config(outbox.database, SQL_TARGET, startFrom=start_from), outbox.database.uri())
    worker.wait_state("Active")
    outbox.produce(2, start=7)
    wait_until(lambda: len(outbox.handled()) == expected, "messages from the start on")
    assert outbox.handled()[-1] == "message-9"


def test_a_stored_checkpoint_wins_over_start_from_and_status_says_so(outbox, workers):
    ids = outbox.produce(4)
    worker = workers.start(build_config(outbox.database, SQL_TARGET), outbox.database.uri())
    outbox.wait_handled(ids)
    worker.terminate()
    again = workers.start(
        build_config(outbox.database, SQL_TARGET, startFrom={"type": "Beginning"}), outbox.database.uri()
    )
    report = again.wait_state("Active", "Idle")
    assert report.start_from_used is False
    assert outbox.handled() == ids


STATEMENTS = {
    "a WITH list of its own": (
        2,
        (
            "WITH doubled AS (SELECT message_id, 2 AS total FROM batch) "
            "INSERT INTO handled (message_id, total) SELECT message_id, total FROM doubled; -- done"
        ),
    ),
    "a recursive one": (
        3,
        (
            "WITH RECURSIVE t(n) AS (VALUES (1) UNION ALL SELECT n + 1 FROM t WHERE n < 3) "
            "INSERT INTO handled (message_id, total) SELECT message_id, (SELECT max(n) FROM t) FROM batch"
        ),
    ),
    "per cent signs": (
        2,
        (
            "INSERT INTO handled (message_id, total) SELECT message_id, 5 % 3 FROM batch "
            "WHERE message_id LIKE 'message-%' AND '%s %(x)s' <> ''"
        ),
    ),
}
"""What they write as total, and the statement."""


@pytest.mark.parametrize(("total", "statement"), STATEMENTS.values(), ids=STATEMENTS)
def test_a_statement_may_have(outbox, workers, total, statement):
    ids = outbox.produce(12)
    workers.start(build_config(outbox.database, {"sql": {"statement": statement}}), outbox.database.uri())
    outbox.wait_handled(ids)
    assert outbox.connection.execute("SELECT DISTINCT total FROM handled").fetchall() == [(total,)]


def test_an_idle_worker_is_small_and_holds_no_transaction_id(outbox, workers):
    ids = outbox.produce(10)
    worker = workers.start(build_config(outbox.database, SQL_TARGET), outbox.database.uri())
    outbox.wait_handled(ids)
    worker.wait_for("it has looked around", lambda r: r.lag is not None and r.high_water_mark is not None)
    assert 0 < memory_mb(worker.process.pid, "resident") < 97
    held = outbox.connection.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'outbox orders%' AND backend_xid IS NOT NULL"
    ).fetchone()
    assert held == (0,)


def test_metrics_and_status_open_no_connections(outbox, workers):
    ids = outbox.produce(10)
    worker = workers.start(build_config(outbox.database, SQL_TARGET), outbox.database.uri())
    outbox.wait_handled(ids)
    worker.wait_for("it has looked around", lambda r: r.lag is not None and r.lag.messages == 0)
    sessions = (
        "SELECT array_agg(regexp_replace(application_name, '^outbox orders pod-0 ?', '') ORDER BY application_name) "
        "FROM pg_stat_activity WHERE application_name LIKE 'outbox orders%'"
    )
    expected = ["", "heartbeat", "waiting"]
    wait_until(lambda: outbox.connection.execute(sessions).fetchone() == (expected,), "it waits for messages")
    for _ in range(20):
        code, text = worker.get("/metrics")
        assert code == 200
    assert outbox.connection.execute(sessions).fetchone() == (expected,)
    for line in (
        'outbox_messages_handled_total{processor="orders"} 10.0', 'outbox_lag_messages{processor="orders"} 0.0',
        'outbox_state{processor="orders",state="Active"} 1.0',
        'outbox_conflicts_total{code="4",processor="orders"} 0.0',
        'outbox_owner{processor="orders"} 1.0', 'outbox_checkpoint_position{partition="0",processor="orders"} 10.0',
    ):  # fmt: skip
        assert line in text


def test_a_strangers_open_transaction_is_reported_as_a_stall(outbox, workers):
    stranger = outbox.database.direct(autocommit=False)
    stranger.execute("SELECT pg_current_xact_id()")
    outbox.produce(5)
    worker = workers.start(build_config(outbox.database, SQL_TARGET), outbox.database.uri())
    report = worker.wait_for(
        "it is seen",
        lambda r: r.high_water_mark is not None and r.high_water_mark.age_seconds > 1 and r.lag is not None,
    )
    assert report.high_water_mark is not None
    assert "stranger" in str(report.high_water_mark.holder)
    assert report.lag is not None
    assert report.lag.messages == 5
    assert outbox.handled() == []
    stranger.rollback()
    wait_until(lambda: len(outbox.handled()) == 5, "the stall is over")
