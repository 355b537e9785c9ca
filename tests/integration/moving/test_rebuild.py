"""A projection built anew beside the one that is read, and swapped for it: nothing lost or doubled for readers."""

from __future__ import annotations

import os
import random
import threading

import psycopg
import pytest
from typing_extensions import override

from tests.integration.cli.conftest import Cli
from tests.integration.moving.conftest import BOTH
from tests.support.database.contract import NOT_OWNER, store, stored
from tests.support.servers.postgres import wait_until
from tests.support.servers.proxy import CommitCutter, Cut, LateCommit
from tests.support.worker import build_config

OLD = "INSERT INTO old_orders (message_id, n) SELECT message_id, (data->>'n')::int FROM batch"
NEW = "INSERT INTO new_orders (message_id, n) SELECT message_id, (data->>'n')::int FROM batch"
SWAP = "CREATE OR REPLACE VIEW orders AS SELECT * FROM new_orders; COMMENT ON VIEW orders IS 'version 2'"
RESOURCE = {"name": "orders-v2", "uid": "uid-v2"}
PAIRS, SNAPSHOT = {"cursor": "TransactionOrder"}, {"cursor": "Snapshot"}
DIVIDED = {"mode": "Partitioned", "partitions": {"count": 3}}
CURSORS = pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(PAIRS, PAIRS, id="pairs"),
        pytest.param(SNAPSHOT, SNAPSHOT, id="snapshot ranges"),
        pytest.param(PAIRS, SNAPSHOT, id="snapshot ranges after pairs"),
        pytest.param(SNAPSHOT, PAIRS, id="pairs after snapshot ranges"),
    ],
)

ONE_OR_THREE = pytest.mark.parametrize(
    ("source", "mode"),
    [pytest.param(PAIRS, {}, id="pairs"), pytest.param(SNAPSHOT, DIVIDED, id="snapshot ranges divided")],
)


class Versions:
    """Two versions of one projection, and what readers see."""

    def __init__(self, outbox, workers):
        self.outbox, self.workers = outbox, workers
        self.connection = outbox.database.direct()
        self.connection.execute(
            "CREATE TABLE old_orders (message_id text PRIMARY KEY, n int); "
            "CREATE TABLE new_orders (message_id text PRIMARY KEY, n int); "
            "CREATE VIEW orders AS SELECT * FROM old_orders"
        )

    def old(self, pod="old", **fields):
        source = PAIRS | fields.pop("source", {})
        config = build_config(self.outbox.database, {"sql": {"statement": OLD}}, source=source, **fields)
        return self.workers.start(config, self.outbox.database.uri(), pod=pod)

    def new_config(self, **fields):
        rebuild = {"processorId": "orders", "swapStatement": SWAP} | fields.pop("rebuild", {})
        source = PAIRS | fields.pop("source", {})
        return build_config(
            self.outbox.database, {"sql": {"statement": fields.pop("statement", NEW)}}, processor_id="orders-v2",
            resource=RESOURCE, rebuildOf=rebuild, source=source, **fields,
        )  # fmt: skip

    def new(self, pod="new", **fields):
        return self.workers.start(self.new_config(**fields), self.outbox.database.uri(), pod=pod)

    def comment(self):
        row = self.connection.execute("SELECT obj_description('orders'::regclass)").fetchone()
        return row[0] if row else None

    def wait_swapped(self, news):
        """Whoever of them makes it; fail with what they say."""
        try:
            wait_until(lambda: self.comment() == "version 2", "it is swapped")
        except AssertionError as err:
            said = "\n".join(each.log()[-3000:] for each in news)
            raise AssertionError(f"{err}\n{said}") from err

    def count(self, table):
        return self.connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]


@pytest.fixture
def versions(outbox, workers):
    return Versions(outbox, workers)


def swapped(report):
    return report.rebuild is not None and report.rebuild.state == "Swapped"


@CURSORS
def test_the_new_version_catches_up_and_is_swapped(versions, outbox, before, after):
    outbox.produce(300)
    old = versions.old(source=before)
    wait_until(lambda: versions.count("old_orders") == 300, "the old version has all")
    new = versions.new(delivery={"batchSize": 50}, source=after)
    new.wait_for("it is swapped", swapped)
    assert versions.comment() == "version 2"
    report = old.wait_state("Unavailable", "Superseded")
    assert "'orders-v2' replaced this one" in report.message
    outbox.produce(50, start=300)
    wait_until(lambda: versions.count("orders") == 350, "the new version goes on")
    assert versions.count("old_orders") == 300
    code, text = new.get("/metrics")
    assert code == 200
    assert 'outbox_rebuild_swapped{processor="orders-v2"} 1.0' in text
    ((act, processor, reason, by),) = versions.connection.execute(
        "SELECT action, processor_id, reason, decided_by FROM outbox.audit_log"
    ).fetchall()
    assert (act, processor, reason, by) == ("Swap", "orders", "superseded by orders-v2", "test/shop/orders-v2")


@pytest.mark.parametrize(
    ("before", "after", "mode"),
    [
        pytest.param(PAIRS, PAIRS, {}, id="by an ordered one"),
        pytest.param(SNAPSHOT, SNAPSHOT, {}, id="snapshot ranges by an ordered one"),
        pytest.param(PAIRS, SNAPSHOT, DIVIDED, id="pairs by a divided one of snapshot ranges"),
        pytest.param(SNAPSHOT, PAIRS, DIVIDED, id="snapshot ranges by a divided one of pairs"),
    ],
)
def test_a_divided_processor_is_replaced_on_all_its_processes(versions, outbox, before, after, mode):
    outbox.produce(300)
    divided = {"mode": "Partitioned", "partitions": {"count": 4}, "batchSize": 20}
    olds = [versions.old(pod=f"old-{number}", delivery=divided, source=before) for number in range(2)]
    wait_until(lambda: versions.count("old_orders") == 300, "the old version has all")
    versions.new(source=after, delivery=mode).wait_for("it is swapped", swapped)
    for old in olds:
        old.wait_state("Unavailable", "Superseded")
    outbox.produce(50, start=300)
    wait_until(lambda: versions.count("orders") == 350, "the new version goes on")
    assert versions.count("old_orders") == 300


def test_what_was_replaced_can_never_store_again(versions, outbox):
    """Not by its worker, one started anew, one that takes over by force, nor a stranger; not after a release."""
    outbox.produce(10)
    old = versions.old()
    wait_until(lambda: versions.count("old_orders") == 10, "the old version has all")
    new = versions.new()
    new.wait_for("it is swapped", swapped)
    old.wait_state("Unavailable", "Superseded")
    old.terminate()
    outbox.produce(10, start=10)
    wait_until(lambda: versions.count("orders") == 20, "the new version goes on")
    versions.old(pod="again").wait_state("Unavailable", "Superseded")
    config = build_config(outbox.database, {"sql": {"statement": OLD}}, resource={"uid": "another"})
    forced = versions.workers.start(config, outbox.database.uri(), "--take-over")
    forced.wait_state("Unavailable", "Superseded")
    admin = outbox.database.direct()
    before = stored(admin) or (0, 0)
    for statement in (
        "DELETE FROM outbox.processor_claims WHERE processor_id = 'orders'",
        "SELECT outbox.release_claim('orders', 'uid-v2')",
        "SELECT outbox.confirm_identity('renew')",
    ):
        admin.execute(statement)
        assert store(admin, (2**40, 1), before) == NOT_OWNER
    assert stored(admin) == before
    assert versions.count("old_orders") == 10


def test_the_status_of_what_was_replaced_says_by_which_and_not_that_its_pod_is_silent(versions, outbox):
    outbox.produce(10)
    versions.old(delivery={"mode": "Partitioned", "partitions": {"count": 2}})
    wait_until(lambda: versions.count("old_orders") == 10, "the old version has all")
    versions.new().wait_for("it is swapped", swapped)
    cli = Cli(outbox.database.files().directory)
    outbox.connection.execute("UPDATE outbox.process_statuses SET stored_at = stored_at - interval '1 hour'")
    done = cli.run("status", "orders")
    assert done.stderr == "orders: processor orders-v2 replaced it; it never runs again: delete its resource\n"
    assert "silent" not in done.stdout
    assert [each["process"] for each in cli.json("status", "orders")] == [None, None]


def test_held_it_keeps_up_and_does_not_swap(versions, outbox):
    outbox.produce(30)
    versions.old()
    new = versions.new(rebuild={"hold": True})
    new.wait_for("it is held", lambda r: r.rebuild is not None and r.rebuild.state == "SwapHeld")
    outbox.produce(30, start=30)
    wait_until(lambda: versions.count("new_orders") == 60, "it keeps up")
    assert versions.comment() is None
    new.terminate()
    versions.new().wait_for("it is swapped", swapped)


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("ALTER TABLE no_such RENAME TO other", 'relation "no_such" does not exist [42P01]'),
        ("DO $$ BEGIN RAISE 'not today'; END $$", "not today"),
    ],
    ids=["no table", "an exception"],
)
def test_a_swap_that_fails_is_rolled_back_and_told_and_both_go_on(versions, outbox, statement, said):
    outbox.produce(30)
    old = versions.old()
    new = versions.new(rebuild={"swapStatement": f"COMMENT ON VIEW orders IS 'half'; {statement}"})
    new.wait_for("it fails", lambda r: r.rebuild is not None and said in r.rebuild.message)
    assert new.report().rebuild.state == "SwapNotPossible"
    outbox.produce(30, start=30)
    wait_until(lambda: versions.count("new_orders") == versions.count("old_orders") == 60, "both go on")
    assert versions.comment() is None
    assert (old.report().state, new.report().state) == ("Active", "Active")
    assert versions.count("outbox.audit_log") == 0


def test_a_swap_that_takes_too_long_is_told_and_is_no_attempt_of_a_message(versions, outbox):
    outbox.produce(30)
    versions.old()
    delivery = {"timeout": "1s", "retry": {"maxAttempts": 1, "initialBackoff": "50ms", "maxBackoff": "200ms"}}
    new = versions.new(rebuild={"swapStatement": "SELECT pg_sleep(20)"}, delivery=delivery)
    new.wait_for(
        "it is told", lambda r: r.rebuild is not None and "ran longer than delivery.timeout" in r.rebuild.message
    )
    outbox.produce(30, start=30)
    wait_until(lambda: versions.count("new_orders") == versions.count("old_orders") == 60, "both go on")
    assert new.report().rebuild.state == "SwapNotPossible"


@ONE_OR_THREE
def test_a_swap_whose_commit_lasts_longer_than_the_time_for_it_is_made(versions, outbox, source, mode):
    outbox.produce(30)
    versions.old(source=source)
    wait_until(lambda: versions.count("old_orders") == 30, "the old version has all")
    proxy = LateCommit(outbox.database.server.port, SWAP.encode(), 6.0)
    try:
        config = versions.new_config(source=source, delivery=mode | {"timeout": "3s"}, rebuild={"maxLag": 100})
        new = versions.workers.start(config, proxy.uri(outbox.database.uri()))
        wait_until(proxy.delayed.is_set, "the swap is committed, and not answered yet")
        outbox.produce(30, start=30)
        report = new.wait_for("it goes on", lambda r: swapped(r) and versions.count("orders") == 60, 30.0)
        assert (report.state, report.conflicts.count) == ("Active", 0)
    finally:
        proxy.close()


@ONE_OR_THREE
@pytest.mark.parametrize("cut", list(Cut), ids=lambda cut: cut.name)
def test_a_swap_whose_commit_has_no_answer_is_no_conflict(versions, outbox, traffic, cut, source, mode):
    producer, reader = traffic
    reader.in_order = not mode
    versions.old(source=source)
    wait_until(lambda: versions.count("old_orders") > 0, "the old version has begun")
    proxy = CommitCutter(outbox.database.server.port)
    try:
        proxy.arm(cut, after=SWAP.encode(), once=True)
        config = versions.new_config(source=source, delivery=mode, rebuild={"maxLag": 1000})
        new = versions.workers.start(config, proxy.uri(outbox.database.uri()))
        wait_until(lambda: proxy.cuts == 1, "the swap's COMMIT was cut")
        versions.wait_swapped([new])
        total = producer.end()
        wait_until(lambda: versions.count("orders") == total, "all are projected")
        assert new.wait_for("it says so", swapped).conflicts.count == 0
        reader.end()
        assert reader.faults == []
    finally:
        proxy.close()


def test_a_statement_that_ends_the_transaction_is_refused(versions, outbox):
    new = versions.new(rebuild={"swapStatement": "DROP VIEW orders; COMMIT"})
    report = new.wait_state("Unavailable", "InvalidConfiguration")
    assert "rebuildOf.swapStatement holds COMMIT" in report.message


@pytest.mark.parametrize("mode", [{}, DIVIDED], ids=["ordered", "partitioned"])
def test_a_key_that_waits_behind_a_dead_letter_holds_the_swap_off(versions, outbox, mode):
    """Readers would miss what the old version has handled."""
    versions.connection.execute("ALTER TABLE new_orders ADD CONSTRAINT refused CHECK (n <> 5)")
    outbox.produce(30)
    versions.old()
    wait_until(lambda: versions.count("old_orders") == 30, "the old version has all")
    failing = {"blocks": "Key", "whenExhausted": "DeadLetter", "retry": {"maxAttempts": 1}}
    new = versions.new(delivery=mode | failing)
    report = new.wait_for("it is told", lambda r: r.rebuild is not None and "1 dead letter" in r.rebuild.message)
    assert report.rebuild.state == "CatchingUp"
    versions.connection.execute("ALTER TABLE new_orders DROP CONSTRAINT refused")
    assert versions.comment() is None
    versions.connection.execute(
        "SELECT outbox.redrive_dead_letters('orders-v2', d.partition, ARRAY[d.id], 'mended', 'test') "
        "FROM outbox.dead_letters AS d"
    )
    new.wait_for("it is swapped", swapped)
    assert versions.count("orders") == 30


def test_a_swap_that_fails_is_rolled_back_for_all_partitions(versions, outbox):
    outbox.produce(30)
    versions.old(source=SNAPSHOT)
    new = versions.new(source=SNAPSHOT, delivery=DIVIDED, rebuild={"swapStatement": f"{SWAP}; SELECT 1/0"})
    new.wait_for("it fails", lambda r: r.rebuild is not None and "division by zero" in r.rebuild.message)
    outbox.produce(30, start=30)
    wait_until(lambda: versions.count("new_orders") == versions.count("old_orders") == 60, "both go on")
    assert versions.comment() is None
    assert new.report().conflicts.count == 0


def test_a_processor_that_is_not_there_is_told(versions, outbox):
    outbox.produce(3)
    new = versions.new(rebuild={"processorId": "order"})
    report = new.wait_for("it is told", lambda r: r.rebuild is not None and r.rebuild.state == "SwapNotPossible")
    assert "no checkpoint" in report.rebuild.message
    wait_until(lambda: versions.count("new_orders") == 3, "it goes on")


def test_of_two_rebuilds_one_wins(versions, outbox):
    outbox.produce(30)
    versions.old()
    versions.new().wait_for("it is swapped", swapped)
    config = build_config(
        outbox.database, {"log": {}} | {"sql": {"statement": "SELECT 1 FROM batch"}}, processor_id="orders-v3",
        resource={"name": "orders-v3", "uid": "uid-v3"}, rebuildOf={"processorId": "orders", "swapStatement": SWAP},
    )  # fmt: skip
    config["target"] = {"sql": {"statement": "SELECT 1 FROM batch"}}
    third = versions.workers.start(config, outbox.database.uri())
    report = third.wait_for("it is told", lambda r: r.rebuild is not None and r.rebuild.state == "SwapNotPossible")
    assert "'orders-v2' replaced it already" in report.rebuild.message


class Reader(threading.Thread):
    """Reads the projection all the time: what was there once must stay, once, in whichever version."""

    def __init__(self, uri):
        super().__init__()
        self._uri = uri
        self._ended = threading.Event()
        self.in_order = True
        self.faults: list[str] = []
        self.looks = 0

    @override
    def run(self):
        most = 0
        with psycopg.connect(self._uri, autocommit=True) as connection:
            while not self._ended.is_set():
                ((count, distinct, highest),) = connection.execute(
                    "SELECT count(*), count(DISTINCT n), coalesce(max(n), 0) FROM orders"
                ).fetchall()
                self.looks += 1
                if count != distinct or count < most or (self.in_order and count != highest):
                    self.faults.append(f"{count} rows, {distinct} of them distinct, the last {highest}, before {most}")
                most = max(most, count)

    def end(self):
        self._ended.set()
        self.join()


class Producer(threading.Thread):
    """Stores numbered messages all the time, one after the other."""

    def __init__(self, uri):
        super().__init__()
        self._uri = uri
        self._ended = threading.Event()
        self.count = 0

    @override
    def run(self):
        with psycopg.connect(self._uri, autocommit=True) as connection:
            while not self._ended.is_set():
                self.count += 1
                connection.execute(
                    "INSERT INTO outbox.messages (message_id, message_type, data) "
                    "VALUES ('m' || %s::text, 'T', jsonb_build_object('n', %s::int))", (self.count, self.count),
                )  # fmt: skip
                self._ended.wait(0.001)

    def end(self):
        self._ended.set()
        self.join()
        return self.count


@pytest.fixture
def traffic(versions, outbox):
    producer, reader = Producer(outbox.database.uri()), Reader(outbox.database.uri())
    producer.start()
    reader.start()
    yield producer, reader
    producer.end()
    reader.end()


@pytest.mark.parametrize(
    ("before", "after", "mode"),
    [
        pytest.param(PAIRS, PAIRS, {}, id="pairs"),
        pytest.param(SNAPSHOT, PAIRS, {}, id="pairs after snapshot ranges"),
        pytest.param(SNAPSHOT, SNAPSHOT, {}, id="snapshot ranges"),
        pytest.param(SNAPSHOT, SNAPSHOT, DIVIDED, id="snapshot ranges divided"),
    ],
)
def test_swapped_under_load_readers_see_each_message_once_at_every_moment(
    versions, outbox, traffic, before, after, mode
):
    """A divided new one has two processes: the swap handles and moves what the other one owns."""
    producer, reader = traffic
    reader.in_order = not mode
    versions.old(delivery={"batchSize": 10, "pollInterval": "10ms"}, source=before)
    wait_until(lambda: versions.count("old_orders") > 0, "the old version has begun")
    delivery = {"batchSize": 50, "pollInterval": "10ms"} | mode
    news = [
        versions.new(pod=f"new-{number}", delivery=delivery, source=after, rebuild={"maxLag": 100})
        for number in range(2 if mode else 1)
    ]
    versions.wait_swapped(news)
    wait_until(lambda: versions.count("orders") > versions.count("old_orders"), "the new version goes on")
    total = producer.end()
    wait_until(lambda: versions.count("orders") == total, "all are projected")
    reader.end()
    assert reader.faults == []
    assert reader.looks > 20
    assert versions.connection.execute("SELECT count(DISTINCT n), max(n) FROM orders").fetchone() == (total, total)
    old = versions.connection.execute("SELECT count(DISTINCT n), max(n) FROM old_orders").fetchone()
    assert old[0] == old[1] < total


@ONE_OR_THREE
def test_killed_in_the_middle_of_the_swap_it_is_made_by_the_next(versions, outbox, traffic, source, mode):
    """SIGKILL while the swap's transaction is open, at moments that a seed decides."""
    producer, reader = traffic
    seed = int(os.environ.get("OUTBOX_SEED", "0")) or random.randrange(1 << 30)
    chance = random.Random(seed)
    print("seed", seed)
    reader.in_order = not mode
    fields = {"source": source, "delivery": mode}
    versions.old(delivery={"batchSize": 10, "pollInterval": "10ms"}, source=source)
    versions.connection.execute("CREATE TABLE gate (n int); INSERT INTO gate VALUES (1)")
    gate = outbox.database.direct(autocommit=False)
    slow = {"swapStatement": f"{SWAP}; SELECT pg_sleep(0.5); LOCK TABLE gate IN EXCLUSIVE MODE", "maxLag": 200}
    swapping = (
        "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'outbox orders-v2%' "
        "AND query LIKE '%VIEW orders%' AND state = 'active' AND pid <> pg_backend_pid()"
    )
    for _ in range(int(os.environ.get("OUTBOX_KILLS", "2"))):
        gate.execute("LOCK TABLE gate IN EXCLUSIVE MODE")  # it ends after the kill, however late that comes
        new = versions.new(rebuild=slow, **fields)
        wait_until(lambda: versions.connection.execute(swapping).fetchone() == (1,), "the swap is under way")
        threading.Event().wait(chance.uniform(0, 0.45))  # where in the transaction, not for anything to happen
        new.kill()
        gate.rollback()
        assert versions.comment() is None
    versions.new(rebuild={"maxLag": 200}, **fields).wait_for("it is swapped", swapped)
    total = producer.end()
    wait_until(lambda: versions.count("orders") == total, "all are projected")
    reader.end()
    assert reader.faults == []
    assert versions.count("outbox.audit_log") == 1


@BOTH
def test_a_rebuild_in_another_database(apart):
    """Both versions, their checkpoints and the swap are there."""
    apart.connection.execute(
        "CREATE TABLE new_orders (message_id text PRIMARY KEY, n int); "
        "CREATE VIEW orders AS SELECT message_id FROM seen"
    )
    flip = "CREATE OR REPLACE VIEW orders AS SELECT message_id FROM new_orders"
    ids = apart.outbox.produce(40)
    old = apart.start()
    apart.wait_handled(ids)
    new = apart.start(
        statement=NEW, processor_id="orders-v2", resource=RESOURCE,
        rebuildOf={"processorId": "orders", "swapStatement": flip},
    )  # fmt: skip
    new.wait_for("it is swapped", swapped)
    old.wait_state("Unavailable", "Superseded")
    apart.outbox.produce(10, start=40)
    wait_until(
        lambda: apart.connection.execute("SELECT count(*) FROM orders").fetchone() == (50,), "the new version goes on"
    )
    assert apart.handled() == ids
