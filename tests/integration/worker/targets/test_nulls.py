"""A mapped table with null in every column that may have it, and times that Python cannot hold: nothing stops."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest

from outbox_core.progress.checkpoint import BEGINNING, Checkpoint
from outbox_core.progress.snapshot_range import SnapshotRange
from outbox_core.spec import Source
from outbox_worker.postgres.reading.messages import MessageReader
from tests.integration.cli.conftest import Cli
from tests.integration.worker.targets.test_rabbitmq import build_target
from tests.support.nightly import by_day
from tests.support.servers.kafka import headers
from tests.support.servers.postgres import wait_until
from tests.support.worker import PYTHON_TARGET, build_config

TABLE = """
CREATE TABLE public.legacy (
    position bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, transaction_id xid8 DEFAULT pg_current_xact_id(),
    id text, kind text, tenant text, customer text, body {payload}, extra jsonb, stored timestamptz, due timestamptz
);
CREATE INDEX ON public.legacy (transaction_id, position);
CREATE TABLE public.seen (n serial, id text, kind text, tenant text, customer text, body text, stored text)
"""
NAMES = ("id", "kind", "tenant", "customer", "body", "extra", "stored", "due")
WHOLE: dict[str, Any] = {
    "id": "whole", "kind": "Placed", "tenant": "shop", "customer": "anna", "body": '{"n": 1}', "extra": "{}",
    "stored": "2026-01-01 00:00:00+00", "due": "2026-01-01 00:00:00+00",
}  # fmt: skip
ROWS: dict[str, dict[str, Any]] = {
    "first": {}, "no-type": {"kind": None}, "no-tenant": {"tenant": None}, "no-key": {"customer": None},
    "tombstone": {"body": None}, "no-extra": {"extra": None}, "not-stored": {"stored": None}, "not-due": {"due": None},
    "at-infinity": {"stored": "infinity"}, "before-all": {"stored": "-infinity", "due": "-infinity"},
    "bc": {"stored": "0044-03-15 00:00:00+00 BC", "due": "0044-03-15 00:00:00+00 BC"},
    "nothing": dict.fromkeys(("kind", "tenant", "customer", "body", "extra", "stored", "due")), "last": {},
}  # fmt: skip
COLUMNS = {
    "messageId": "id", "messageType": "kind", "publicationId": "tenant", "partitionKey": "customer", "data": "body",
    "metadata": "extra", "scheduled": "stored", "deliverAfter": "due",
}  # fmt: skip
MODES = [
    pytest.param("Ordered", "TransactionOrder", id="Ordered"),
    pytest.param("Ordered", "Snapshot", id="Ordered, Snapshot"),
    pytest.param("Partitioned", "TransactionOrder", id="Partitioned"),
    pytest.param("Partitioned", "Snapshot", id="Partitioned, Snapshot"),
    pytest.param("Competing", None, id="Competing"),
]
FEW = by_day(MODES, "Ordered, Snapshot", "Partitioned", "Competing")
"""Each mode and each cursor: what is read is the same for every target."""
SETTINGS: dict[str, dict[str, Any]] = {
    "Ordered": {"mode": "Ordered"},
    "Partitioned": {"mode": "Partitioned", "partitions": {"count": 2}},
    "Competing": {"mode": "Competing", "competing": {"leaseDuration": "5s"}},
}
HANDLER = """
def handle(batch, connection):
    for m in batch:
        m.json()
        connection.execute(
            "INSERT INTO public.seen (id, kind, tenant, customer, body, stored) VALUES (%s, %s, %s, %s, %s, %s)",
            (m.message_id, m.message_type, m.publication_id, m.partition_key, m.data,
             None if m.scheduled is None else str(m.scheduled.year)),
        )
"""
STATEMENT = (
    "INSERT INTO public.seen (id, kind, tenant, customer, body, stored) "
    "SELECT message_id, message_type, publication_id, partition_key, data::text, extract(year FROM scheduled)::text "
    "FROM batch ORDER BY ordinal"
)


def prepare(outbox, payload="jsonb"):
    outbox.connection.execute(TABLE.format(payload=payload))


def produce(outbox, rows):
    with outbox.connection.cursor() as cursor:
        for name, changed in rows.items():
            row = WHOLE | {"id": name} | changed
            cursor.execute(
                f"INSERT INTO public.legacy ({', '.join(NAMES)}) VALUES ({', '.join(['%s'] * len(NAMES))})",
                [row[each] for each in NAMES],
            )


def configure(outbox, target, mode, cursor, **delivery):
    columns = {name: column for name, column in COLUMNS.items() if mode != "Ordered" or name != "deliverAfter"}
    source = {"cursor": cursor, "table": {"schemaName": "public", "name": "legacy", "columns": columns}}
    return build_config(outbox.database, target, source=source, delivery=SETTINGS[mode] | delivery)


def run(outbox, workers, target, mode, cursor, *, handler=None, uri=None, **delivery):
    config = configure(outbox, target, mode, cursor, **delivery)
    return workers.start(config, outbox.database.uri(), handler=handler, target=uri)


def seen(outbox):
    rows = outbox.connection.execute("SELECT id, kind, tenant, customer, body, stored FROM public.seen").fetchall()
    return {row[0]: tuple(row[1:]) for row in rows}


@pytest.mark.parametrize(("mode", "cursor"), MODES)
@pytest.mark.parametrize("target", ["sql", "python"])
def test_each_column_that_is_null_reaches_the_handler_as_null(outbox, workers, mode, cursor, target):
    prepare(outbox)
    produce(outbox, ROWS)
    chosen = {"sql": {"statement": STATEMENT}} if target == "sql" else PYTHON_TARGET
    worker = run(outbox, workers, chosen, mode, cursor, handler=HANDLER)
    worker.wait_for("all are handled", lambda r: r.handled == len(ROWS))
    found = seen(outbox)
    whole = ("Placed", "shop", "anna", '{"n": 1}', "2026")
    assert found["first"] == found["last"] == found["no-extra"] == found["not-due"] == whole
    assert found["no-type"] == (None, *whole[1:])
    assert found["no-tenant"] == (whole[0], None, *whole[2:])
    assert found["no-key"] == (*whole[:2], None, *whole[3:])
    assert found["tombstone"] == (*whole[:3], None, whole[4])
    assert found["not-stored"] == (*whole[:4], None)
    assert found["nothing"] == (None,) * 5
    assert len(found) == len(ROWS)
    if target == "python":
        assert [found[name][4] for name in ("at-infinity", "before-all", "bc")] == ["9999", "1", "1"]


@pytest.mark.parametrize(("mode", "cursor"), FEW)
def test_log_prints_null(outbox, workers, mode, cursor):
    prepare(outbox)
    produce(outbox, ROWS)
    worker = run(outbox, workers, {"log": {"payload": True}}, mode, cursor)
    worker.wait_for("all are printed", lambda r: r.handled == len(ROWS))
    lines = {line["messageId"]: line for line in worker.lines()}
    assert len(lines) == len(ROWS)
    assert lines["tombstone"]["data"] is None
    assert lines["first"]["data"] == {"n": 1}
    nothing = lines["nothing"]
    assert [nothing[name] for name in ("messageType", "publicationId", "partitionKey", "data", "scheduled")] == [
        None
    ] * 5


@pytest.mark.parametrize(("mode", "cursor"), FEW)
def test_a_broker_gets_a_tombstone(outbox, workers, rabbitmq, mode, cursor):
    prepare(outbox)
    produce(outbox, ROWS)
    queue = f"nulls-{uuid.uuid4().hex[:8]}"
    with rabbitmq.queue(queue) as client:
        worker = run(outbox, workers, build_target(queue), mode, cursor, uri=rabbitmq.uri)
        worker.wait_for("all are published", lambda r: r.handled == len(ROWS))
        deliveries = {each.message_id: each for each in client.drain(queue)}
    assert len(deliveries) == len(ROWS)
    first, tombstone, nothing = (deliveries[name] for name in ("first", "tombstone", "nothing"))
    assert json.loads(first.body) == {"n": 1}
    assert "x-outbox-tombstone" not in first.headers
    assert (tombstone.body, tombstone.headers["x-outbox-tombstone"]) == (b"", True)
    assert not nothing.message_type
    assert not {"x-outbox-publication", "x-outbox-partition-key"} & nothing.headers.keys()


@pytest.mark.parametrize(("mode", "cursor"), FEW)
def test_a_topic_gets_a_tombstone(outbox, workers, kafka, mode, cursor):
    prepare(outbox)
    produce(outbox, ROWS)
    with kafka.topic() as topic:
        target = {"kafka": {"connection": {"secretRef": {"name": "kafka"}}, "topic": topic.name}}
        home = workers.prepare(configure(outbox, target, mode, cursor), outbox.database.uri())
        kafka.files(home / "connections/target")
        worker = workers.launch(home)
        worker.wait_for("all are published", lambda r: r.handled == len(ROWS))
        topic.wait_for(len(ROWS))
        found = {headers(each)["x-outbox-message-id"]: each for each in topic.read()}
    assert len(found) == len(ROWS)
    assert (found["first"].key(), json.loads(found["first"].value())) == (b"anna", {"n": 1})
    assert "x-outbox-tombstone" not in headers(found["first"])
    assert (found["tombstone"].key(), found["tombstone"].value()) == (b"anna", None)
    assert headers(found["tombstone"])["x-outbox-tombstone"] == "true"
    assert (found["no-key"].key(), found["nothing"].key()) == (None, None)
    null = {"x-outbox-message-type", "x-outbox-publication", "x-outbox-partition-key", "x-outbox-scheduled"}
    assert not null & headers(found["nothing"]).keys()


@pytest.mark.parametrize(("mode", "cursor"), FEW)
def test_a_routing_key_that_null_leaves_without_a_word_fails_that_message(outbox, workers, rabbitmq, mode, cursor):
    prepare(outbox)
    queue = f"nulls-{uuid.uuid4().hex[:8]}"
    rows: dict[str, dict[str, Any]] = {name: {"kind": queue, **changed} for name, changed in ROWS.items()}
    produce(outbox, rows)
    retry = {"maxAttempts": 2, "initialBackoff": "50ms", "maxBackoff": "50ms"}
    with rabbitmq.queue(queue) as client:
        run(
            outbox, workers, build_target("{messageType}"), mode, cursor, uri=rabbitmq.uri, retry=retry,
            whenExhausted="DeadLetter", **({} if mode == "Competing" else {"blocks": "Nothing"}),
        )  # fmt: skip

        def dead():
            rows = outbox.connection.execute("SELECT message_id, error, data FROM outbox.dead_letters ORDER BY 1")
            return rows.fetchall()

        wait_until(lambda: len(dead()) == 2, "two are dead", 30)
        wait_until(lambda: client.count(queue) == len(ROWS) - 2, "the others arrive", 30)
    assert [row[0] for row in dead()] == ["no-type", "nothing"]
    assert "{messageType}, which is null in its row" in dead()[0][1]
    assert [row[2] for row in dead()] == ['{"n": 1}', None]


@pytest.mark.parametrize(("mode", "cursor"), FEW)
def test_a_message_of_nulls_that_the_statement_refuses_is_kept_and_redriven(outbox, workers, mode, cursor):
    prepare(outbox)
    outbox.connection.execute("ALTER TABLE public.seen ADD CONSTRAINT whole CHECK (body IS NOT NULL)")
    produce(outbox, ROWS)
    retry = {"maxAttempts": 2, "initialBackoff": "50ms", "maxBackoff": "50ms"}
    run(
        outbox, workers, {"sql": {"statement": STATEMENT}}, mode, cursor, retry=retry, whenExhausted="DeadLetter",
        **({} if mode == "Competing" else {"blocks": "Nothing"}),
    )  # fmt: skip

    def dead():
        rows = outbox.connection.execute("SELECT id, message_id FROM outbox.dead_letters ORDER BY 2").fetchall()
        return {row[1]: row[0] for row in rows}

    wait_until(lambda: len(dead()) == 2 and len(seen(outbox)) == len(ROWS) - 2, "two are dead, the others pass", 30)
    outbox.connection.execute("ALTER TABLE public.seen DROP CONSTRAINT whole")
    assert list(dead()) == ["nothing", "tombstone"]
    done = Cli(outbox.database.files().directory).run("redrive", "orders", "--all", "--reason", "mended", "--yes")
    assert done.returncode == 0, done.stderr
    wait_until(lambda: len(seen(outbox)) == len(ROWS), "all are handled", 30)
    assert seen(outbox)["nothing"] == (None,) * 5


@pytest.mark.parametrize("cursor", ["TransactionOrder", "Snapshot"])
def test_a_message_without_a_delay_is_not_delayed(outbox, cursor):
    prepare(outbox)
    produce(outbox, {"one": {"due": None, "stored": None}, "two": {"due": None}})
    source = Source.model_validate(
        {"connection": {"secretRef": {"name": "db"}}, "cursor": cursor,
         "table": {"schemaName": "public", "name": "legacy", "columns": COLUMNS}}
    )  # fmt: skip
    reader = MessageReader(source)
    with outbox.database.direct() as connection:
        after = BEGINNING if cursor == "TransactionOrder" else Checkpoint(0, 1, SnapshotRange())
        batch = reader.fetch(connection, after, 10)
        lag = reader.lag(connection, after)
    assert [(each.message_id, each.deliver_after) for each in batch] == [("one", None), ("two", None)]
    assert (batch.delayed_count, batch.messages[0].scheduled) == (0, None)
    assert lag.seconds < 366 * 86_400, "the row that does not say when it was stored is not two thousand years old"


@pytest.mark.parametrize("cursor", ["TransactionOrder", "Snapshot"])
def test_messages_without_a_delay_are_not_held_beside_one_that_fails(outbox, workers, cursor):
    """While a message is held each batch is looked through for what must wait: a delay of null is none."""
    prepare(outbox)
    connection = outbox.connection
    connection.execute("ALTER TABLE public.seen ADD CHECK (id <> 'bad')")
    connection.execute("CREATE TABLE public.once_held (id text)")
    connection.execute(
        "CREATE FUNCTION note_held() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN INSERT INTO public.once_held VALUES (NEW.message_id); RETURN NEW; END $$"
    )
    connection.execute(
        "CREATE TRIGGER note AFTER INSERT ON outbox.held_messages FOR EACH ROW EXECUTE FUNCTION note_held()"
    )

    def held():
        return {row[0] for row in connection.execute("SELECT id FROM public.once_held").fetchall()}

    healthy = {f"one-{n}": {"due": None, "customer": f"customer-{n}"} for n in range(10)}
    produce(outbox, {"bad": {"due": None}} | healthy)
    run(
        outbox, workers, {"sql": {"statement": STATEMENT}}, "Partitioned", cursor,
        blocks="Key", retry={"maxAttempts": 1000, "initialBackoff": "1s", "maxBackoff": "1s"},
    )  # fmt: skip
    wait_until(lambda: len(seen(outbox)) == 10 and held() == {"bad"}, "one is held, the others are handled")
    more = {f"two-{n}": row for n, row in enumerate(healthy.values())}
    with connection.transaction():
        produce(outbox, {"behind": {"due": None}, "later": {"due": "infinity", "customer": "later"}} | more)
    wait_until(lambda: len(seen(outbox)) == 20 and len(held()) >= 3, "those without a delay are handled")
    assert seen(outbox).keys() == healthy.keys() | more.keys()
    assert held() == {"bad", "behind", "later"}


@pytest.mark.parametrize(("mode", "cursor"), FEW)
def test_a_message_without_an_id_is_named_by_its_place(outbox, workers, mode, cursor):
    prepare(outbox)
    produce(outbox, {"one": {"id": None}, "two": {}})
    row = outbox.connection.execute(
        "SELECT concat(transaction_id, ':', position) FROM legacy WHERE id IS NULL"
    ).fetchone()
    worker = run(outbox, workers, PYTHON_TARGET, mode, cursor, handler=HANDLER)
    worker.wait_for("both are handled", lambda r: r.handled == 2)
    assert set(seen(outbox)) == {row[0], "two"}


@pytest.mark.parametrize(("mode", "cursor"), FEW)
def test_messages_with_neither_key_nor_id_are_all_handled(outbox, workers, mode, cursor):
    prepare(outbox)
    neither: dict[str, Any] = {"id": None, "customer": None}
    produce(outbox, {"one": {}, "two": neither, "three": {"customer": "berta"}, "four": neither, "five": {"id": None}})
    places = outbox.connection.execute("SELECT concat(transaction_id, ':', position) FROM legacy WHERE id IS NULL")
    expected = {"one", "three"} | {row[0] for row in places}
    worker = run(outbox, workers, PYTHON_TARGET, mode, cursor, handler=HANDLER)
    wait_until(lambda: set(seen(outbox)) == expected, "all are handled", 20)
    produce(outbox, {"six": neither, "seven": {"customer": "carla"}})
    worker.wait_for("and what comes later too", lambda r: r.handled == 7)
    assert len(seen(outbox)) == 7


@pytest.mark.parametrize("cursor", ["TransactionOrder", "Snapshot"])
def test_a_message_with_neither_key_nor_id_that_fails_is_kept_and_redriven(outbox, workers, cursor):
    prepare(outbox)
    outbox.connection.execute("ALTER TABLE public.seen ADD CONSTRAINT whole CHECK (body IS NOT NULL)")
    produce(outbox, {"one": {}, "two": {"id": None, "customer": None, "body": None}, "three": {}})
    retry = {"maxAttempts": 2, "initialBackoff": "50ms", "maxBackoff": "50ms"}
    chosen = {"sql": {"statement": STATEMENT}}
    run(outbox, workers, chosen, "Partitioned", cursor, retry=retry, whenExhausted="DeadLetter")

    def dead():
        return outbox.connection.execute("SELECT key, message_id FROM outbox.dead_letters").fetchall()

    wait_until(lambda: len(dead()) == 1 and len(seen(outbox)) == 2, "it is dead, the others pass", 30)
    outbox.connection.execute("ALTER TABLE public.seen DROP CONSTRAINT whole")
    done = Cli(outbox.database.files().directory).run("redrive", "orders", "--all", "--reason", "mended", "--yes")
    assert done.returncode == 0, done.stderr
    wait_until(lambda: len(seen(outbox)) == 3, "all are handled", 30)


@pytest.mark.parametrize(("mode", "cursor"), FEW)
@pytest.mark.parametrize("target", ["sql", "python"])
def test_a_payload_of_text_that_is_no_json_is_kept_as_it_is_and_the_others_pass(outbox, workers, mode, cursor, target):
    prepare(outbox, "text")
    later = {"due": "infinity"} if mode == "Competing" else {}
    produce(outbox, {"one": {}, "two": {"body": "<order/>"}, "three": {}, "four": {"body": "<later/>", **later}})
    retry = {"maxAttempts": 2, "initialBackoff": "50ms", "maxBackoff": "50ms"}
    chosen = {"sql": {"statement": STATEMENT}} if target == "sql" else PYTHON_TARGET
    run(
        outbox, workers, chosen, mode, cursor, handler=HANDLER, retry=retry, whenExhausted="DeadLetter",
        **({} if mode == "Competing" else {"blocks": "Nothing"}),
    )  # fmt: skip

    def dead():
        rows = outbox.connection.execute("SELECT message_id, data FROM outbox.dead_letters ORDER BY position")
        return rows.fetchall()

    wait_until(lambda: set(seen(outbox)) == {"one", "three"}, "the others are handled", 30)
    if later:
        # Copied when its time had not come: the copy is what is handed out.
        wait_until(lambda: len(dead()) == 1, "one is dead", 30)
        outbox.connection.execute("UPDATE outbox.competing_retries SET due_at = clock_timestamp()")
    wait_until(lambda: len(dead()) == 2, "two are dead", 30)
    assert dead() == [("two", "<order/>"), ("four", "<later/>")]
    outbox.connection.execute("UPDATE public.legacy SET body = '{\"n\": 2}'")  # the messages are what they were
    done = Cli(outbox.database.files().directory).run("redrive", "orders", "--all", "--reason", "again", "--yes")
    assert done.returncode == 0, done.stderr
    wait_until(lambda: not dead(), "they are tried again", 30)
    wait_until(lambda: len(dead()) == 2, "and dead again", 30)
    assert [row[1] for row in dead()] == ["<order/>", "<later/>"]
