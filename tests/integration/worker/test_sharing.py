"""Several processors in one process: each has its owner and its checkpoint, and they share thread and connections."""

from __future__ import annotations

import json
import signal
import time

import pytest

from tests.support.servers.postgres import wait_until
from tests.support.worker import build_config

MANY = 20


def statement(table):
    return f"INSERT INTO {table} (message_id) SELECT message_id FROM batch ORDER BY ordinal"


def named(outbox, name, target=None, **fields):
    """A processor whose effects are in a table of its name."""
    resource = {"name": name, "uid": f"uid-{name}"}
    return build_config(
        outbox.database,
        target or {"sql": {"statement": statement(name)}},
        processor_id=name,
        resource=resource,
        **fields,
    )


@pytest.fixture
def tables(outbox):
    """Makes the tables of processors, and says what is in one."""

    class Tables:
        def make(self, *names):
            for name in names:
                outbox.connection.execute(f"CREATE TABLE {name} (n serial PRIMARY KEY, message_id text)")

        def handled(self, name):
            return [each for (each,) in outbox.connection.execute(f"SELECT message_id FROM {name} ORDER BY n")]

        def wait(self, name, ids, seconds=60.0):
            wait_until(lambda: len(self.handled(name)) >= len(ids), f"{name} handled {len(ids)}", seconds)
            assert self.handled(name) == ids

    return Tables()


def are_active(seen):
    return all(each.state == "Active" for each in seen.values())


def sessions(outbox):
    """Connections of workers in the database."""
    return outbox.connection.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'outbox %'"
    ).fetchone()[0]


def resident_bytes(worker):
    lines = worker.get("/metrics")[1].splitlines()
    return float(next(line for line in lines if line.startswith("process_resident_memory_bytes ")).split()[1])


@pytest.mark.parametrize("cursor", ["TransactionOrder", "Snapshot"])
def test_each_handles_all_messages_over_three_connections(outbox, workers, tables, cursor):
    names = [f"p{number}" for number in range(MANY)]
    tables.make(*names)
    worker = workers.start_shared(
        [named(outbox, name, source={"cursor": cursor}) for name in names], outbox.database.uri()
    )
    worker.wait_for_all("all are active", are_active)
    ids = [each for start in range(0, 50, 10) for each in outbox.produce(10, start=start)]
    for name in names:
        tables.wait(name, ids)
    assert {name: each.handled for name, each in worker.reports().items()} == dict.fromkeys(names, 50)
    last = outbox.last()
    wait_until(lambda: all(outbox.has_examined(last, name) for name in names), "all checkpoints are stored")
    assert sessions(outbox) <= 4, "the loop's, the heartbeat's, one that waits for messages, one that reads ahead"
    assert resident_bytes(worker) / MANY < 8 * 2**20


def test_messages_are_noticed_at_once_while_others_of_the_process_store(outbox, workers, tables):
    """The log moves with each checkpoint of another processor: a look for all of them tells that from a message."""
    names = [f"p{number}" for number in range(MANY)]
    tables.make(*names)
    slow = {"delivery": {"pollInterval": "30s"}}
    worker = workers.start_shared([named(outbox, name, **slow) for name in names], outbox.database.uri())
    worker.wait_for_all("all are active", are_active)
    took = []
    for number in range(10):
        time.sleep(0.2)
        began = time.monotonic()
        ids = outbox.produce(1, start=number)
        wait_until(lambda: all(tables.handled(name)[-1:] == ids for name in names), "all handled it")  # noqa: B023
        took.append(time.monotonic() - began)
    assert sorted(took)[5] < 10.0


def test_one_that_fails_keeps_none_of_the_others_waiting(outbox, workers, tables):
    tables.make("good", "late")
    broken = named(outbox, "broken", {"sql": {"statement": statement("missing")}})
    code = named(outbox, "code", {"python": {"module": "m", "function": "f", "configMapRef": {"name": "h"}}})
    parts = named(outbox, "parts", delivery={"mode": "Partitioned", "partitions": {"count": 2}})
    worker = workers.start_shared(
        [broken, code, named(outbox, "good"), parts, named(outbox, "late")], outbox.database.uri()
    )
    ids = outbox.produce(30)
    tables.wait("good", ids)
    tables.wait("late", ids)
    seen = worker.reports()
    assert "missing" in seen["broken"].message
    assert seen["code"].state == "Stopped"
    assert "target.python is code of its own; run it in one of its own" in seen["code"].message
    assert "delivery.mode is Partitioned" in seen["parts"].message
    outbox.connection.execute("CREATE TABLE missing (n serial PRIMARY KEY, message_id text)")
    tables.wait("missing", ids)


def test_where_none_can_be_run_the_last_word_says_why_of_each(outbox, workers):
    code = named(outbox, "code", {"python": {"module": "m", "function": "f", "configMapRef": {"name": "h"}}})
    parts = named(outbox, "parts", delivery={"mode": "Partitioned", "partitions": {"count": 2}})
    worker = workers.start_shared([code, parts], outbox.database.uri())
    assert worker.process.wait(30) == 12
    said = (worker.directory / "termination-log").read_text()
    assert "code: processor 'code' cannot share a process: target.python is code of its own" in said
    assert "parts: processor 'parts' cannot share a process: delivery.mode is Partitioned" in said


@pytest.mark.parametrize(
    "leave",
    [
        pytest.param("SET search_path = nowhere", id="a setting"),
        pytest.param("SET ROLE pg_monitor", id="a role"),
        pytest.param("CREATE TEMP TABLE IF NOT EXISTS other (n int, message_id text)", id="a temporary table"),
    ],
)
def test_what_a_statement_leaves_in_the_session_no_other_processor_finds(outbox, workers, tables, leave):
    tables.make("careless", "other")
    outbox.connection.execute("GRANT USAGE ON SCHEMA outbox TO pg_monitor")
    outbox.connection.execute("GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA outbox TO pg_monitor")
    outbox.connection.execute("GRANT ALL ON outbox.messages, careless, careless_n_seq TO pg_monitor")
    outbox.connection.execute(
        f"CREATE FUNCTION leave() RETURNS text LANGUAGE plpgsql AS $$BEGIN {leave}; RETURN ''; END$$"
    )
    spoil = "INSERT INTO public.careless (message_id) SELECT message_id || public.leave() FROM batch ORDER BY ordinal"
    careless = named(outbox, "careless", {"sql": {"statement": spoil}})
    workers.start_shared([careless, named(outbox, "other")], outbox.database.uri())
    ids: list[str] = []
    for _ in range(3):
        ids += outbox.produce(5, start=len(ids))
        tables.wait("careless", ids, 20.0)
        tables.wait("other", ids, 20.0)


def test_a_target_that_is_down_is_tried_again_beside_the_others(outbox, workers, tables, rabbitmq):
    tables.make("good")
    queue = {"rabbitmq": {"connection": {"secretRef": {"name": "mq"}}, "routingKey": "shared-queue", "exchange": ""}}
    away = named(outbox, "away", queue)
    worker = workers.start_shared(
        [away, named(outbox, "good")], outbox.database.uri(), target="amqp://guest:guest@127.0.0.1:1/"
    )
    ids = outbox.produce(30)
    tables.wait("good", ids)
    worker.wait_for_all("it says that the broker is away", lambda seen: seen["away"].reason == "TargetUnavailable")
    ids += outbox.produce(30, start=30)
    tables.wait("good", ids)


def test_a_locked_table_of_one_keeps_the_others_waiting_for_its_timeout_only(outbox, workers, tables):
    tables.make("locked", "good")
    outbox.connection.execute("CREATE TABLE theirs (LIKE outbox.messages INCLUDING ALL)")
    source = {"cursor": "Snapshot", "table": {"schemaName": "public", "name": "theirs"}}
    locked = named(outbox, "locked", source=source, delivery={"timeout": "1s"})
    worker = workers.start_shared([locked, named(outbox, "good", source={"cursor": "Snapshot"})], outbox.database.uri())
    worker.wait_for_all("all are active", are_active)
    with outbox.database.direct(autocommit=False) as holder:
        holder.execute("LOCK TABLE theirs IN ACCESS EXCLUSIVE MODE")
        ids: list[str] = []
        for _ in range(5):
            ids += outbox.produce(5, start=len(ids))
            tables.wait("good", ids, 20.0)
            time.sleep(0.5)
        report = worker.reports()["locked"]
        assert (report.state, report.reason, report.attempt) == ("Unavailable", "DatabaseUnavailable", 0)
        assert "took longer than delivery.timeout" in report.message
    worker.wait_for_all("all are active", are_active)
    assert worker.reports()["good"].last_error is None


def test_leases_are_renewed_while_looking_around_takes_long(outbox, workers, tables):
    """The heartbeat looks around for each processor, and a locked table makes each of these looks take long."""
    names = [f"p{number}" for number in range(MANY)]
    tables.make(*names)
    long = {"delivery": {"leaseDuration": "5s"}}
    worker = workers.start_shared([named(outbox, name, **long) for name in names], outbox.database.uri())
    worker.wait_for_all("all are active", are_active)
    with outbox.database.direct(autocommit=False) as holder:
        holder.execute("LOCK TABLE outbox.processor_conflicts IN ACCESS EXCLUSIVE MODE")
        until = time.monotonic() + 8.0
        while time.monotonic() < until:
            assert are_active(worker.reports())
            time.sleep(0.05)


def test_killed_another_process_takes_all_over(outbox, workers, tables):
    names = ["first", "second", "third"]
    tables.make(*names)
    configs = [named(outbox, name) for name in names]
    worker = workers.start_shared(configs, outbox.database.uri())
    ids = outbox.produce(50)
    for name in names:
        tables.wait(name, ids)
    worker.kill()
    ids += outbox.produce(50, start=50)
    workers.start_shared(configs, outbox.database.uri())
    for name in names:
        tables.wait(name, ids)


def test_frozen_while_another_process_takes_all_over_it_handles_nothing_twice(outbox, workers, tables):
    names = ["first", "second", "third"]
    tables.make(*names)
    configs = [named(outbox, name) for name in names]
    frozen = workers.start_shared(configs, outbox.database.uri())
    ids = outbox.produce(50)
    for name in names:
        tables.wait(name, ids)
    frozen.send(signal.SIGSTOP)
    ids += outbox.produce(50, start=50)
    other = workers.start_shared(configs, outbox.database.uri())
    for name in names:
        tables.wait(name, ids)
    frozen.send(signal.SIGCONT)
    frozen.wait_for_all("it stands by", lambda seen: all(each.state == "Standby" for each in seen.values()))
    ids += outbox.produce(50, start=100)
    for name in names:
        tables.wait(name, ids)
    assert {each.state for each in other.reports().values()} == {"Active"}


def test_asked_to_stop_it_gives_every_lease_back(outbox, workers, tables):
    names = ["first", "second", "third"]
    tables.make(*names)
    worker = workers.start_shared(
        [named(outbox, name, delivery={"leaseDuration": "60s"}) for name in names], outbox.database.uri()
    )
    ids = outbox.produce(50)
    for name in names:
        tables.wait(name, ids)
    worker.send(signal.SIGTERM)
    assert worker.process.wait(20) == 0
    held = outbox.connection.execute("SELECT count(*) FROM outbox.processor_leases WHERE token IS NOT NULL").fetchone()
    assert held == (0,)
    lines = [json.loads(line) for line in worker.log().splitlines()]
    for told in ("lease acquired", "checkpoint loaded", "claim vacated"):
        assert [line["processor"] for line in lines if line["message"] == told] == names


def test_a_checkpoint_that_a_person_changed_stops_one_of_them(outbox, workers, tables):
    tables.make("first", "second")
    worker = workers.start_shared([named(outbox, name) for name in ("first", "second")], outbox.database.uri())
    ids = outbox.produce(20)
    for name in ("first", "second"):
        tables.wait(name, ids)
    outbox.connection.execute(
        "UPDATE outbox.processor_checkpoints SET last_processed_position = last_processed_position - 5 "
        "WHERE processor_id = 'first'"
    )
    ids += outbox.produce(20, start=20)
    tables.wait("second", ids)
    worker.wait_for_all("the first one waits for a person", lambda seen: seen["first"].state == "Blocked")
    assert worker.reports()["second"].state == "Active"


def test_a_competing_processor_shares_too(outbox, workers, tables):
    tables.make("ordered", "competing")
    competing = named(outbox, "competing", delivery={"mode": "Competing", "competing": {}})
    workers.start_shared([competing, named(outbox, "ordered")], outbox.database.uri())
    ids = outbox.produce(40)
    tables.wait("ordered", ids)
    wait_until(lambda: sorted(tables.handled("competing")) == sorted(ids), "all are handled once")
