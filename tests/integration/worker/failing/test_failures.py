"""What becomes of messages that fail: whom they block, how they are tried again, where they end. Real processes."""

from __future__ import annotations

import signal
from itertools import pairwise
from typing import Any

import pytest

from outbox_worker.postgres.admin import dead_letters
from outbox_worker.postgres.key import ProcessorKey
from tests.support.failing import KEYS, Failing
from tests.support.nightly import at_night
from tests.support.servers.postgres import wait_until
from tests.support.worker import PYTHON_HANDLER, PYTHON_TARGET, SQL_TARGET, build_config

QUICK = {"maxAttempts": 3, "initialBackoff": "50ms", "maxBackoff": "100ms"}


@pytest.fixture
def failing(outbox):
    return Failing(outbox)


def start(failing, workers, target=PYTHON_TARGET, pod=None, **delivery):
    config = failing.config(target, **delivery)
    return workers.start(config, failing.outbox.database.uri(), handler=PYTHON_HANDLER, pod=pod)


def of_key(key, below):
    return set(range(key, below, KEYS))


@pytest.mark.parametrize(
    ("target", "guarantee", "partitioned", "cursor"),
    [
        pytest.param(SQL_TARGET, "Transactional", True, "TransactionOrder", id="sql, partitioned"),
        pytest.param(PYTHON_TARGET, "AtLeastOnce", True, "TransactionOrder", id="python at least once, partitioned"),
        pytest.param(PYTHON_TARGET, "Transactional", False, "TransactionOrder", id="python, ordered"),
        pytest.param(SQL_TARGET, "AtLeastOnce", False, "TransactionOrder", id="sql at least once, ordered"),
        pytest.param(SQL_TARGET, "Transactional", False, "Snapshot", id="sql, ordered, by snapshots"),
        pytest.param(PYTHON_TARGET, "Transactional", True, "Snapshot", id="python, partitioned, by snapshots"),
    ],
)
def test_a_failing_message_blocks_its_key_only_and_in_order(failing, workers, target, guarantee, partitioned, cursor):
    failing.break_at(7, 12)
    failing.produce(60)
    delivery = {"blocks": "Key", "guarantee": guarantee, "partitioned": partitioned, "cursor": cursor}
    worker = start(failing, workers, target, retry=QUICK | {"maxAttempts": 1000}, **delivery)

    free = set(range(60)) - (of_key(2, 60) - {2})
    failing.wait_handled(free)
    failing.produce(40, start=60)
    free = set(range(100)) - (of_key(2, 100) - {2})
    failing.wait_handled(free)
    report = worker.wait_for(
        "the key is named, and nothing waits behind the checkpoints",
        lambda r: (
            r.failures is not None
            and (len(r.failures.blocked_keys), r.failures.held) == (1, 19)
            and r.lag is not None
            and not r.lag.messages
        ),
    )
    (blocked,) = report.failures.blocked_keys
    assert (blocked.key, blocked.message_id, blocked.dead_letter) == ("key-2", "message-7", False)
    assert report.state == "Active"

    failing.mend()
    failing.wait_handled(set(range(100)))
    # AtLeastOnce lets go of what it held in a transaction that follows the handling.
    wait_until(lambda: failing.held() == [], "nothing is held any more")
    failing.assert_once_and_in_order()


@pytest.mark.parametrize(
    ("guarantee", "cursor"),
    [
        pytest.param("Transactional", "TransactionOrder", id="Transactional-TransactionOrder"),
        pytest.param("Transactional", "Snapshot", id="Transactional-Snapshot", marks=pytest.mark.nightly),
        pytest.param("AtLeastOnce", "TransactionOrder", id="AtLeastOnce-TransactionOrder", marks=pytest.mark.nightly),
        pytest.param("AtLeastOnce", "Snapshot", id="AtLeastOnce-Snapshot"),
    ],
)
def test_a_handler_that_is_slow_to_refuse_loses_nothing(failing, workers, guarantee, cursor):
    """It takes longer for the first half of a failing batch than the search for the message may take."""
    slow = "import time\n" + PYTHON_HANDLER.replace(
        "    with connection", "    time.sleep(0.8 if len(batch) > 1 else 0)\n    with connection"
    )
    failing.break_at(3)
    failing.produce(20)
    config = failing.config(
        PYTHON_TARGET, partitioned=False, cursor=cursor, blocks="Key", guarantee=guarantee,
        retry=QUICK | {"maxAttempts": 1000},
    )  # fmt: skip
    workers.start(config, failing.outbox.database.uri(), handler=slow)
    failing.wait_handled(set(range(20)) - of_key(3, 20))
    failing.mend()
    failing.wait_handled(set(range(20)))
    failing.assert_once_and_in_order()


def test_nothing_is_blocked_where_the_resource_says_so(failing, workers):
    failing.break_at(7)
    failing.produce(60)
    worker = start(failing, workers, SQL_TARGET, blocks="Nothing", retry=QUICK | {"maxAttempts": 1000})
    failing.wait_handled(set(range(60)) - {7})
    worker.wait_for(
        "it is seen", lambda r: r.failures is not None and (r.failures.held, r.failures.blocked_keys) == (1, [])
    )
    failing.mend()
    failing.wait_handled(set(range(60)))
    assert failing.handled()[-1] == 7


@pytest.mark.parametrize("target", [SQL_TARGET, PYTHON_TARGET], ids=["sql", "python"])
def test_whose_attempts_ran_out_becomes_a_dead_letter_and_its_key_waits(failing, workers, target):
    failing.break_at(7)
    failing.produce(60)
    worker = start(failing, workers, target, whenExhausted="DeadLetter", retry=QUICK)
    failing.wait_dead(1)
    failing.produce(20, start=60)
    failing.wait_handled(set(range(80)) - (of_key(2, 80) - {2}))
    assert failing.dead() == [("message-7", 3, "P0042", True)]
    behind = [f"message-{n}" for n in range(12, 80, KEYS)]
    wait_until(lambda: [name for name, _ in failing.held()] == behind, "the key is held behind it")
    report = worker.wait_for(
        "it is seen",
        lambda r: r.failures is not None and (r.failures.dead_letters, len(r.failures.blocked_keys)) == (1, 1),
    )
    assert report.failures.blocked_keys[0].dead_letter
    row = failing.connection.execute("SELECT key, data, error, place FROM outbox.dead_letters").fetchone()
    assert row is not None
    assert (row[0], row[1]) == ("key-2", '{"total": 7}')
    assert "refused message-7" in row[2]


def test_a_dead_letter_of_a_blocked_partition_blocks_nothing_more(failing, workers):
    failing.break_at(7)
    failing.produce(60)
    start(failing, workers, SQL_TARGET, partitioned=False, whenExhausted="DeadLetter", retry=QUICK)
    failing.wait_handled(set(range(60)) - {7})
    assert failing.handled() == [n for n in range(60) if n != 7]
    assert failing.dead() == [("message-7", 3, "P0042", False)]


@pytest.mark.parametrize("partitioned", [True, False], ids=["its key", "everything"])
def test_a_skipped_message_is_recorded_in_the_audit_log(failing, workers, partitioned):
    failing.break_at(7)
    failing.produce(30)
    start(failing, workers, partitioned=partitioned, whenExhausted="Skip", retry=QUICK)
    failing.wait_handled(set(range(30)) - {7})
    failing.assert_once_and_in_order()
    acts = failing.connection.execute("SELECT action, reason, decided_by FROM outbox.audit_log").fetchall()
    assert [(act, by) for act, _, by in acts] == [("Skip", "delivery.whenExhausted")]
    assert acts[0][1].startswith("message message-7 of type Numbered, key key-2, after 3 attempts: P0042: ")
    assert (failing.held(), failing.dead()) == ([], [])


@pytest.mark.parametrize("mode", ["Ordered", "Competing"])
def test_a_message_of_a_mapped_table_without_a_payload_is_kept_like_any_other(failing, workers, mode):
    connection, columns = failing.connection, {"data": "payload", "deliverAfter": "due"}
    connection.execute(
        "CREATE TABLE shop_outbox (position bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, transaction_id xid8 "
        "NOT NULL DEFAULT pg_current_xact_id(), message_id text NOT NULL, message_type text NOT NULL, payload jsonb, "
        "due timestamptz)"
    )
    connection.execute("CREATE INDEX ON shop_outbox (transaction_id, position)")
    failing.break_at(1)
    connection.execute("INSERT INTO shop_outbox (message_id, message_type) SELECT 'message-' || n, 't' FROM "
                       "generate_series(1, 3) AS n")  # fmt: skip
    own = {"blocks": "Key"} if mode == "Ordered" else {"mode": mode, "competing": {}}
    config = failing.config(SQL_TARGET, partitioned=False, whenExhausted="DeadLetter", retry=QUICK, **own)
    config["source"]["table"] = {"schemaName": "public", "name": "shop_outbox", "columns": columns}
    workers.start(config, failing.outbox.database.uri())
    failing.wait_dead(1)
    failing.mend()
    key = ProcessorKey("outbox", "orders")
    (dead,) = dead_letters.list_dead(connection, "outbox", dead_letters.Filter(), limit=10)
    assert dead_letters.decide_dead(connection, key, [dead.id], drop=False, reason="mended", decided_by="me") == 1

    def handled():
        return {row[0] for row in connection.execute("SELECT message_id FROM handled").fetchall()}

    wait_until(lambda: handled() == {"message-1", "message-2", "message-3"}, "all are handled", 30)


def test_stop_stops_the_key_until_the_worker_is_started_again(failing, workers):
    failing.break_at(7)
    failing.produce(30)
    worker = start(failing, workers, retry=QUICK)
    free = set(range(30)) - (of_key(2, 30) - {2})
    failing.wait_handled(free)
    report = worker.wait_for(
        "it waits for a person",
        lambda r: r.failures is not None and [key.next_attempt_at for key in r.failures.blocked_keys] == [None],
    )
    assert (report.state, report.failures.blocked_keys[0].attempts) == ("Active", 3)
    failing.mend()
    worker.terminate()
    assert set(failing.handled()) == free
    start(failing, workers)
    failing.wait_handled(set(range(30)))
    failing.assert_once_and_in_order()


def test_classes_of_errors_decide_about_attempts(failing, workers):
    """One class is hopeless, one is nobody's fault: the first is dead at once, at the second everything waits."""
    failing.break_at(7)
    failing.produce(30)
    retry = {"initialBackoff": "1m", "maxBackoff": "1m", "never": ["P0"]}
    start(failing, workers, SQL_TARGET, whenExhausted="DeadLetter", retry=retry)
    failing.wait_dead(1)
    assert failing.dead() == [("message-7", 1, "P0042", True)]


def test_an_error_that_is_no_messages_fault_counts_no_attempts(failing, workers):
    failing.break_at(7)
    failing.produce(30)
    retry = QUICK | {"maxAttempts": 1, "forever": ["P0042"]}
    worker = start(failing, workers, partitioned=False, whenExhausted="Skip", retry=retry)
    report = worker.wait_state("Retrying", "HandlerFailed")
    assert report.attempt == 0
    failing.mend()
    failing.wait_handled(set(range(30)))
    assert failing.handled() == list(range(30))


def test_killed_while_held_messages_are_tried_each_is_handled_once_and_in_order(failing, workers):
    """Held messages of every key, a worker killed again and again in the middle of trying them."""
    failing.break_at(*range(KEYS))
    failing.produce(100)
    first = start(failing, workers, retry=QUICK | {"maxAttempts": 1000})
    wait_until(lambda: len(failing.held()) == 100, "all is held", 90)
    failing.mend()
    wait_until(lambda: len(failing.handled()) > 0, "held messages are tried")
    first.kill()
    second = start(failing, workers, retry=QUICK | {"maxAttempts": 1000}, batchSize=3)
    failing.produce(50, start=100)
    before = len(failing.handled())
    wait_until(lambda: len(failing.handled()) > before, "the next one goes on")
    second.send(signal.SIGKILL)
    second.process.wait()
    start(failing, workers, retry=QUICK)
    failing.wait_handled(set(range(150)), 90)
    failing.assert_once_and_in_order()


def test_nothing_is_asked_for_while_nothing_is_held(failing, workers):
    """The functions are counted by the server: once when the partition is loaded, then never."""
    failing.connection.execute(
        "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET track_functions = ''all''', current_database()); END $$"
    )
    failing.produce(100)
    worker = start(failing, workers, SQL_TARGET, partitioned=False, blocks="Key", batchSize=10)
    worker.wait_for("all is handled", lambda r: r.handled == 100 and r.reason == "Idle")
    worker.terminate()
    calls = {}

    def look():
        rows = failing.connection.execute(
            "SELECT funcname, calls FROM pg_stat_user_functions WHERE schemaname = 'outbox'"
        ).fetchall()
        calls.update(rows)
        return "store_processor_checkpoint" in calls

    wait_until(look, "the statistics are there")
    assert calls["store_processor_checkpoint"] == 11  # one for the start
    assert calls["review_partition"] == 1
    assert calls.keys().isdisjoint({"hold_messages", "take_due_messages", "settle_held_messages", "begin_in_flight"})


@pytest.mark.parametrize(
    ("target", "cursor"),
    [
        pytest.param(SQL_TARGET, "TransactionOrder", id="sql-TransactionOrder", marks=pytest.mark.nightly),
        pytest.param(SQL_TARGET, "Snapshot", id="sql-Snapshot"),
        pytest.param(PYTHON_TARGET, "TransactionOrder", id="python-TransactionOrder"),
        pytest.param(PYTHON_TARGET, "Snapshot", id="python-Snapshot", marks=pytest.mark.nightly),
    ],
)
def test_delayed_messages_are_handled_when_they_are_due(failing, workers, target, cursor):
    failing.connection.execute("ALTER TABLE handled ADD COLUMN at timestamptz DEFAULT clock_timestamp()")
    failing.produce(10, deliver_after="1 hour")
    failing.produce(10, start=10, deliver_after="3 seconds")
    failing.produce(20, start=20)
    start(failing, workers, target, cursor=cursor)
    failing.wait_handled(set(range(10, 40)))
    early = failing.connection.execute(
        "SELECT count(*) FROM handled JOIN outbox.messages USING (message_id) WHERE at < deliver_after"
    ).fetchone()
    assert early == (0,)
    assert len(failing.held()) == 10, "an hour is not over"


def test_a_delayed_message_that_fails_blocks_its_key_where_a_partition_would_wait(failing, workers):
    """Its partition has passed it, so that the partition cannot wait for it; its key can."""
    failing.break_at(7)
    start(failing, workers, SQL_TARGET, blocks="Partition", retry=QUICK | {"maxAttempts": 1000}).wait_state("Active")
    failing.produce(1, start=7, deliver_after="2 seconds")
    wait_until(lambda: any(attempts > 0 for _, attempts in failing.held()), "it has failed")
    failing.produce(12, start=8)
    free = set(range(8, 20)) - of_key(2, 20)
    failing.wait_handled(free)
    failing.mend()
    failing.wait_handled(free | {7, 12, 17})
    failing.assert_once_and_in_order()


@pytest.mark.parametrize("cursor", [*at_night("TransactionOrder"), "Snapshot"])
def test_mode_ordered_waits_for_a_delayed_message_and_says_so(failing, workers, cursor):
    failing.produce(5)
    failing.produce(1, start=5, deliver_after="1 hour")
    failing.produce(5, start=6)
    worker = start(failing, workers, SQL_TARGET, partitioned=False, cursor=cursor)
    report = worker.wait_state("Retrying", "MessageDelayed", 40)
    assert "message 'message-5' at" in report.message
    assert "use mode Partitioned" in report.message
    assert failing.handled() == list(range(5))
    failing.connection.execute("UPDATE outbox.messages SET deliver_after = NULL")
    failing.wait_handled(set(range(11)))
    assert failing.handled() == list(range(11))


def test_what_failed_is_tried_again_while_mode_ordered_waits_for_a_delayed_message(failing, workers):
    failing.break_at(3)
    failing.produce(5)
    failing.produce(1, start=5, deliver_after="1 hour")
    worker = start(failing, workers, SQL_TARGET, partitioned=False, blocks="Key", retry=QUICK | {"maxAttempts": 1000})
    worker.wait_state("Retrying", "MessageDelayed", 40)
    assert [message for message, *_ in failing.held()] == ["message-3"]
    failing.mend()
    failing.wait_handled(set(range(5)), 20)
    assert sorted(failing.handled()) == list(range(5)), "each once, and the delayed one not early"
    assert failing.held() == []


def test_a_rate_is_kept(failing, workers):
    failing.produce(60)
    start(failing, workers, partitioned=False, batchSize=10, rateLimit={"messagesPerSecond": 20, "burst": 10})
    failing.connection.execute("ALTER TABLE handled ADD COLUMN at timestamptz DEFAULT clock_timestamp()")
    failing.wait_handled(set(range(60)))
    times = [row[0] for row in failing.connection.execute("SELECT at FROM handled ORDER BY at").fetchall()]
    # At most the burst at once, and afterwards twenty a second.
    assert (times[-1] - times[0]).total_seconds() >= (60 - 10 - 10) / 20
    assert all(later >= earlier for earlier, later in pairwise(times))


def test_a_target_that_fails_everything_is_spared_and_nothing_is_set_aside_meanwhile(failing, workers):
    failing.break_at(*range(100))
    failing.produce(100)
    worker = start(
        failing, workers, retry=QUICK | {"maxAttempts": 1000}, circuitBreaker={"failures": 3, "openFor": "5s"}
    )
    report = worker.wait_state("Retrying", "CircuitOpen", 90)
    assert report.circuit == "Open"
    assert len(failing.held()) <= 4 + KEYS * 20, "three keys, and at most what is behind them"
    failing.mend()
    failing.wait_handled(set(range(100)))
    failing.assert_once_and_in_order()
    worker.wait_for("it is closed again", lambda r: r.circuit == "Closed")
    assert 'outbox_circuit{phase="Closed",processor="orders"} 1.0' in worker.get("/metrics")[1]


@pytest.mark.parametrize(
    ("loop", "tries"),
    [
        pytest.param("batch", 3, id="a loop over the batch"),
        pytest.param("batch.messages", 3, id="a loop over its messages"),
        pytest.param("list(batch)", 9, id="all of them at once"),
    ],
)
@pytest.mark.parametrize("mode", ["Ordered", "Competing"])
def test_a_message_that_fails_is_known_by_how_far_the_handlers_loop_came(outbox, workers, loop, tries, mode):
    """The batch, a part of it, and that message alone: none of the others is tried without it to find it."""
    handler = (
        "def handle(batch, connection):\n"
        f"    for message in {loop}:\n"
        "        with open('begun', 'a') as file:\n"
        "            print(message.message_id, file=file)\n"
        "        if message.json()['total'] == 40:\n"
        "            raise ValueError('40')\n"
        "        connection.execute(\n"
        "            'INSERT INTO handled (message_id, total) VALUES (%s, 1)', (message.message_id,))\n"
    )
    ids = [row[0] for row in outbox.connection.execute(
        "INSERT INTO outbox.messages (message_id, message_type, data) "
        "SELECT 'message-' || n, 't', jsonb_build_object('total', n) FROM generate_series(0, 63) AS n "
        "RETURNING message_id"
    )]  # fmt: skip
    delivery: dict[str, Any] = {"mode": mode, "batchSize": 64, "whenExhausted": "DeadLetter"}
    delivery |= {"competing": dict[str, Any]()} if mode == "Competing" else {"blocks": "Key"}
    delivery["retry"] = {"maxAttempts": 1}
    config = build_config(outbox.database, PYTHON_TARGET, delivery=delivery, source={"cursor": None})
    worker = workers.start(config, outbox.database.uri(), handler=handler)
    outbox.wait_handled([each for each in ids if each != "message-40"])

    begun = (worker.directory / "begun").read_text().splitlines()
    assert 2 <= begun.count("message-40") <= tries


BAD = {*range(100, 1000, 100), *range(140, 150), 555, 556, 999}


@pytest.mark.parametrize(
    ("delivery", "cursor"),
    [
        pytest.param({"mode": "Ordered", "blocks": "Key"}, "TransactionOrder", id="ordered"),
        pytest.param({"mode": "Ordered", "blocks": "Nothing"}, "Snapshot", id="ordered, by snapshots"),
        pytest.param(
            {"mode": "Partitioned", "partitions": {"count": 3}, "blocks": "Key"}, "Snapshot", id="partitioned"
        ),
        pytest.param({"mode": "Competing", "competing": {}}, None, id="competing"),
    ],
)
def test_many_parts_of_a_large_batch_are_tried_with_few_calls_and_each_message_is_handled_once(
    outbox, workers, delivery, cursor
):
    target = {"sql": {"statement": "INSERT INTO handled (message_id, total) SELECT message_id, 1 / (data->>'n')::int "
                                   "FROM batch ORDER BY ordinal"}}  # fmt: skip
    outbox.connection.execute(
        "INSERT INTO outbox.messages (partition_key, message_id, message_type, data) "
        "SELECT 'key-' || n, n, 't', jsonb_build_object('n', CASE WHEN n = ANY (%s) THEN 0 ELSE 1 END) "
        "FROM generate_series(0, 999) AS n",
        (sorted(BAD),),
    )
    again = {"whenExhausted": "DeadLetter", "retry": {"maxAttempts": 1}}
    config = build_config(outbox.database, target, delivery=delivery | again, source={"cursor": cursor})
    workers.start(config, outbox.database.uri())
    expected = [str(n) for n in range(1000) if n not in BAD]
    wait_until(lambda: len(outbox.handled()) >= len(expected), "all healthy ones are handled")
    if delivery["mode"] == "Partitioned":
        assert sorted(outbox.handled(), key=int) == expected
    else:
        assert outbox.handled() == expected, "each once, in order"
    dead = "SELECT count(*) FROM outbox.dead_letters"
    wait_until(lambda: outbox.connection.execute(dead).fetchone() == (len(BAD),), "the others are dead letters")
