"""Consumers whose target fails: the breaker, the rate, messages that wait for their time, a broker. Real processes."""

from __future__ import annotations

import signal
import threading
import time
import uuid

import pytest

from tests.support.failing import Failing
from tests.support.servers.postgres import free_port, wait_until
from tests.support.servers.proxy import CommitCutter, Cut
from tests.support.worker import GATED_HANDLER, PYTHON_HANDLER, PYTHON_TARGET, SQL_TARGET, HandlerGate, build_config

QUICK = {"maxAttempts": 3, "initialBackoff": "50ms", "maxBackoff": "100ms"}
LEASE = 2.0


@pytest.fixture
def failing(outbox):
    return Failing(outbox)


def config_of(outbox, target=SQL_TARGET, queue=None, lease="2s", **delivery):
    over = {"leaseDuration": lease} | ({"queue": queue} if queue else {})
    delivery = {"mode": "Competing", "competing": over, "batchSize": 20, "leaseDuration": "15s"} | delivery
    return build_config(outbox.database, target, delivery=delivery)


def start(failing, workers, pod, target=SQL_TARGET, handler=PYTHON_HANDLER, **delivery):
    config = config_of(failing.outbox, target, **delivery)
    return workers.start(config, failing.outbox.database.uri(), handler=handler, pod=pod)


def owners(connection):
    """Who has batches."""
    query = (
        "SELECT DISTINCT pod FROM outbox.competing_batches WHERE owner IS NOT NULL AND expires_at > clock_timestamp()"
    )
    return {row[0] for row in connection.execute(query).fetchall()}


@pytest.mark.parametrize("guarantee", ["Transactional", "AtLeastOnce"])
def test_a_target_that_fails_everything_is_spared_and_nothing_is_kept_meanwhile(failing, workers, guarantee):
    """While all breakers are open nobody has a batch; probes are single messages; mended, all is handled once."""
    failing.break_at(*range(200))
    breaker = {"failures": 3, "openFor": "4s"}
    begun = time.monotonic()
    consumers = [
        start(failing, workers, pod, guarantee=guarantee, retry=QUICK | {"maxAttempts": 1000}, circuitBreaker=breaker)
        for pod in ("pod-a", "pod-b")
    ]
    for consumer in consumers:
        consumer.wait_state("Active")
    failing.produce(200)
    for consumer in consumers:
        report = consumer.wait_state("Retrying", "CircuitOpen", 60)
        assert report.circuit == "Open"
        assert 'outbox_circuit{phase="Open",processor="orders"} 1.0' in consumer.get("/metrics")[1]
    wait_until(lambda: owners(failing.connection) == set(), "what was in hand is handed back", 20)
    query = "SELECT count(*), sum(attempts) FROM outbox.competing_retries"
    tried, attempts = failing.connection.execute(query).fetchone()
    # To tell an outage from a row of bad messages each is tried once; of those that failed one in a while is.
    assert attempts - tried <= 4 * (time.monotonic() - begun) + 2
    failing.mend()
    failing.wait_handled(set(range(200)))
    assert len(failing.handled()) == 200, "an effect is doubled"
    reports = [
        consumer.wait_for("it goes on", lambda r: r.circuit != "Open" and r.state == "Active") for consumer in consumers
    ]
    # One that found nothing left to probe with stays half open until something comes.
    assert "Closed" in {report.circuit for report in reports}


def test_a_piece_whose_completion_has_no_answer_keeps_the_rest_of_its_batch_from_nobody(failing, workers):
    """It was completed: asked again the database says no. What is left is in this consumer's name, which goes on."""
    proxy = CommitCutter(failing.outbox.database.server.port)
    proxy.arm(Cut.AFTER, once=True, said=b"defer_messages", answer=b"SELECT 1\x00")
    failing.break_at(7)
    failing.produce(20)
    config = config_of(
        failing.outbox, PYTHON_TARGET, guarantee="AtLeastOnce", retry=QUICK, whenExhausted="DeadLetter"
    )  # fmt: skip
    workers.start(config, proxy.uri(failing.outbox.database.uri()), handler=PYTHON_HANDLER, pod="pod-a")
    failing.wait_handled(set(range(20)) - {7}, 30)
    failing.wait_dead(1)
    assert proxy.cuts == 1
    proxy.close()


@pytest.mark.parametrize(
    ("target", "guarantee"),
    [
        pytest.param(SQL_TARGET, "Transactional", id="sql-Transactional"),
        pytest.param(SQL_TARGET, "AtLeastOnce", id="sql-AtLeastOnce", marks=pytest.mark.nightly),
        pytest.param(PYTHON_TARGET, "Transactional", id="python-Transactional", marks=pytest.mark.nightly),
        pytest.param(PYTHON_TARGET, "AtLeastOnce", id="python-AtLeastOnce"),
    ],
)
def test_no_step_takes_much_longer_than_the_timeout_while_a_message_that_hangs_is_found(
    failing, workers, target, guarantee
):
    """Else the process is taken for stuck and killed in the middle of the search, again and again."""
    connection = failing.connection
    connection.execute(
        "CREATE OR REPLACE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "IF EXISTS (SELECT 1 FROM bad b WHERE b.message_id = NEW.message_id) THEN PERFORM pg_sleep(60); END IF; "
        "RETURN NEW; END $$"
    )
    failing.break_at(0)
    failing.produce(20)
    ages = [0.0]
    age = (
        "SELECT coalesce(max(extract(epoch FROM clock_timestamp() - xact_start)), 0)::float8 FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )

    def is_found():
        ages.append(connection.execute(age).fetchone()[0])
        return len(failing.dead()) == 1

    start(
        failing, workers, "pod-a", target, guarantee=guarantee, timeout="1s", retry=QUICK | {"maxAttempts": 2},
        whenExhausted="DeadLetter",
    )  # fmt: skip
    wait_until(is_found, "the message is found twice", 60)
    assert [row[:2] for row in failing.dead()] == [("message-0", 2)]
    failing.wait_handled(set(range(1, 20)))
    assert 0.5 < max(ages) < 2.5, ages


def test_one_message_that_fails_for_ever_opens_no_breaker(failing, workers):
    failing.break_at(7)
    failing.produce(60)
    consumer = start(
        failing, workers, "pod-a", retry=QUICK | {"maxAttempts": 20}, whenExhausted="DeadLetter",
        circuitBreaker={"failures": 2, "openFor": "1h"},
    )  # fmt: skip
    failing.wait_dead(1)
    failing.wait_handled(set(range(60)) - {7})
    assert failing.dead() == [("message-7", 20, "P0042", False)]
    consumer.wait_for(
        "status says so", lambda r: r.failures is not None and r.failures.dead_letters == 1 and r.circuit == "Closed"
    )


def test_a_class_that_is_never_mended_is_given_up_at_once(failing, workers):
    failing.break_at(3)
    failing.produce(10)
    start(failing, workers, "pod-a", retry=QUICK | {"never": ["P0"]}, whenExhausted="DeadLetter")
    failing.wait_dead(1)
    assert failing.dead() == [("message-3", 1, "P0042", False)]


@pytest.mark.parametrize("guarantee", ["Transactional", "AtLeastOnce"])
@pytest.mark.parametrize("target", [SQL_TARGET, PYTHON_TARGET], ids=["sql", "python"])
def test_the_last_message_that_fails_leaves_no_batch_behind(failing, workers, target, guarantee):
    """The batch reaches further than its last message, by one that the processor does not ask for."""
    connection = failing.connection
    config = config_of(failing.outbox, target, guarantee=guarantee, retry=QUICK, whenExhausted="DeadLetter")
    config["source"]["messageTypes"] = ["Numbered"]
    failing.break_at(0)
    with connection.transaction():
        failing.produce(1)
        connection.execute("INSERT INTO outbox.messages (message_type, data) VALUES ('other', '{}')")
    consumer = workers.start(config, failing.outbox.database.uri(), handler=PYTHON_HANDLER, pod="pod-a")
    failing.wait_dead(1)
    wait_until(
        lambda: connection.execute("SELECT count(*) FROM outbox.competing_batches").fetchone() == (0,), "it is over", 10
    )
    failing.produce(1, start=1)
    failing.wait_handled({1})
    consumer.wait_for("what was left of the batch counts as no message", lambda r: r.handled == 1)


def test_a_rate_is_kept_over_all_consumers_whenever_they_come_and_each_has_its_part(failing, workers):
    connection, rate, burst = failing.connection, 40, 20
    connection.execute("ALTER TABLE handled ADD COLUMN at timestamptz DEFAULT clock_timestamp()")
    limit = {"messagesPerSecond": rate, "burst": burst}

    def begin(pod):
        return start(failing, workers, pod, PYTHON_TARGET, batchSize=10, rateLimit=limit)

    failing.produce(100)
    consumers = [begin("pod-a")]
    wait_until(lambda: len(failing.handled()) > burst, "the first is at work")
    consumers += [begin("pod-b"), begin("pod-c")]
    for consumer in consumers:
        consumer.wait_for("all know of each other", lambda r: r.unfinished is not None and r.unfinished.consumers == 3)
    failing.wait_handled(set(range(100)))
    (first,) = connection.execute("SELECT max(n) FROM handled").fetchone()
    failing.produce(150, start=100)
    failing.wait_handled(set(range(250)))

    times = [row[0].timestamp() for row in connection.execute("SELECT at FROM handled ORDER BY at").fetchall()]
    # What was begun within the rate may be written a moment later: a batch of each.
    slack = 3 * 10
    for begun, at in enumerate(times):
        most = max(found - begun + 1 - rate * (later - at) for found, later in enumerate(times) if found >= begun)
        assert most <= burst + slack, f"{most:.0f} more than the rate from {begun} on"
    query = "SELECT count(*) FROM handled WHERE n > %s GROUP BY pod"
    parts = [row[0] for row in connection.execute(query, (first,)).fetchall()]
    assert len(parts) == 3
    assert min(parts) >= 150 / 3 / 2, parts


def test_delayed_messages_of_the_outbox_come_when_they_are_due_and_nobody_waits_for_them(failing, workers):
    failing.connection.execute("ALTER TABLE handled ADD COLUMN at timestamptz DEFAULT clock_timestamp()")
    consumer = start(failing, workers, "pod-a")
    consumer.wait_state("Active")
    failing.produce(30)
    failing.produce(30, start=30, deliver_after="6 seconds")
    failing.produce(30, start=60)
    consumer.wait_for("they are counted", lambda r: r.unfinished is not None and r.unfinished.retries == 30)
    failing.wait_handled(set(range(90)))
    assert set(failing.handled()[:60]) == {*range(30), *range(60, 90)}
    early = failing.connection.execute(
        "SELECT h.message_id FROM handled h JOIN outbox.messages m USING (message_id) WHERE h.at < m.deliver_after"
    ).fetchall()
    assert early == []
    assert len(failing.handled()) == 90


def test_asked_to_stop_a_consumer_hands_back_what_it_has_as_it_is(failing, workers):
    """No attempt of a message is used, no death is counted, and nobody waits for the lease, which is the default."""
    first = start(failing, workers, "pod-a", PYTHON_TARGET, GATED_HANDLER, lease="60s", timeout="1s")
    first.wait_state("Active")
    gate = HandlerGate(first.directory)
    gate.close()
    failing.produce(20)
    gate.wait_entered()
    asked = time.monotonic()
    first.terminate()
    batch = "SELECT owner, chunk, crash_count, messages FROM outbox.competing_batches"
    assert failing.connection.execute(batch).fetchall() == [(None, None, 0, 20)]
    start(failing, workers, "pod-b", PYTHON_TARGET, lease="60s")
    failing.wait_handled(set(range(20)))
    assert time.monotonic() - asked < 15, "the lease is 60 s"
    assert failing.connection.execute("SELECT count(*) FROM outbox.competing_retries").fetchone() == (0,)


def test_a_broker_that_nobody_reaches_costs_no_attempt_and_who_reaches_it_goes_on_for_all(outbox, workers, rabbitmq):
    name = f"competing-{uuid.uuid4().hex[:8]}"
    target = {"rabbitmq": {"connection": {"secretRef": {"name": "broker"}}, "routingKey": name}}
    breaker = {"failures": 2, "openFor": "1s"}
    delivery = {"circuitBreaker": breaker, "retry": QUICK | {"maxAttempts": 1}, "whenExhausted": "DeadLetter"}
    config = config_of(outbox, target, lease="60s", **delivery)
    away = f"amqp://tests:s3cret%20word@127.0.0.1:{free_port()}/"
    ids = outbox.produce(100)
    with rabbitmq.queue(name) as client:
        first, second = (workers.start(config, outbox.database.uri(), target=away, pod=f"pod-{each}") for each in "ab")
        for consumer in (first, second):
            consumer.wait_state("Retrying", "CircuitOpen", 60)
        wait_until(lambda: owners(outbox.connection) == set(), "nobody keeps what nobody can publish", 20)
        (second.directory / "connections/target/uri").write_text(rabbitmq.uri)
        second.wait_for("it publishes what both had", lambda r: r.handled == 100)
        ids += outbox.produce(100, start=100)
        second.wait_for("it goes on", lambda r: r.handled == 200 and r.circuit == "Closed")
        assert first.report().handled == 0
        (first.directory / "connections/target/uri").write_text(rabbitmq.uri)
        first.wait_for("it is closed again", lambda r: r.circuit == "HalfOpen" or r.state == "Active")
        ids += outbox.produce(300, start=200)
        wait_until(lambda: first.report().handled + second.report().handled == 500, "both publish")
        delivered = [each.message_id for each in client.drain(name)]
    assert sorted(delivered) == sorted(ids), "no crash: nothing twice"
    assert outbox.connection.execute("SELECT count(*) FROM outbox.dead_letters").fetchone() == (0,)


def test_what_a_killed_consumer_had_is_with_others_after_the_lease_and_five_seconds_with_a_broker_too(
    outbox, workers, rabbitmq
):
    """Killed in the middle of handing over, which an alarm of the broker holds up."""
    name = f"competing-{uuid.uuid4().hex[:8]}"
    target = {"rabbitmq": {"connection": {"secretRef": {"name": "broker"}}, "routingKey": name}}
    config = config_of(outbox, target)
    with rabbitmq.queue(name) as client:
        first = workers.start(config, outbox.database.uri(), target=rabbitmq.uri, pod="pod-a")
        second = workers.start(config, outbox.database.uri(), target=rabbitmq.uri, pod="pod-b")
        for consumer in (first, second):
            consumer.wait_state("Active")
        rabbitmq.control("set_vm_memory_high_watermark", "absolute", "1")
        outbox.produce(20)
        wait_until(lambda: owners(outbox.connection), "one of them has the batch")
        (owner,) = owners(outbox.connection)
        dying, other = (first, second) if owner == "pod-a" else (second, first)
        dying.send(signal.SIGSTOP)  # the alarm's end would let it go on
        rabbitmq.control("set_vm_memory_high_watermark", "0.6")
        dying.kill()
        killed = time.monotonic()
        other.wait_for("all is done", lambda r: r.handled == 20, LEASE + 20)
        took = time.monotonic() - killed
        delivered = {each.message_id for each in client.drain(name)}
    assert len(delivered) == 20
    assert took < LEASE + 5.0, f"recovered after {took:.1f} s"


def test_a_queue_under_load_goes_through_its_segments_and_stays_small(outbox, workers):
    """Producers and consumers at once, through more than all four segments, beside an open writing transaction."""
    connection = outbox.connection
    connection.execute("SELECT outbox.create_queue('jobs')")
    connection.execute("CREATE TABLE seen (position bigint)")
    target = {"sql": {"statement": "INSERT INTO seen SELECT position FROM batch"}}
    config = config_of(outbox, target, queue="jobs", batchSize=2000)
    for pod in ("pod-a", "pod-b"):
        workers.start(config, outbox.database.uri(), pod=pod)
    insert = (
        "INSERT INTO outbox.queue_jobs (message_type, data) "
        "SELECT 't', jsonb_build_object('n', n, 'text', repeat('x', 1700)) FROM generate_series(1, %s) AS n"
    )
    largest, stored = 0, 0
    segments: set[int] = set()
    size = (
        "SELECT sum(pg_total_relation_size(i.inhrelid))::bigint FROM pg_inherits i "
        "WHERE i.inhparent = 'outbox.queue_jobs'::regclass"
    )
    with outbox.database.direct(autocommit=False) as old:
        old.execute("SELECT pg_current_xact_id()")
        deadline = time.monotonic() + 120
        while len(segments) < 5 and time.monotonic() < deadline:
            connection.execute(insert, (4000,))
            stored += 4000
            (position,) = connection.execute("SELECT last_value FROM outbox.queue_jobs_position").fetchone()
            segments.add(position >> 40)
            largest = max(largest, connection.execute(size).fetchone()[0])
            # Consumers are to keep up: what is unfinished is kept, and would be measured instead.
            wait_until(
                lambda total=stored: total - connection.execute("SELECT count(*) FROM seen").fetchone()[0] < 8000,  # type: ignore[misc]
                "they keep up",
            )
            # A segment is 32 MB and what comes until the next look at its size, two seconds later: at this pace 20 MB.
            threading.Event().wait(0.7)
        assert segments == set(range(5)), "all four, and the first of them again"
    wait_until(lambda: connection.execute("SELECT count(*) FROM seen").fetchone() == (stored,), "all are handled")
    assert connection.execute("SELECT count(DISTINCT position) FROM seen").fetchone() == (stored,)
    assert largest < 5 * 40 * 2**20, f"{largest / 2**20:.0f} MB for {stored} messages of 2 kB"
