"""A backend is killed (the kernel was out of memory): the server recovers without a restart, and a pool hides it.

Transaction ids that were handed out are handed out again, and commits that nothing waited for are undone. What a worker
remembers of before means nothing then, and nobody edited its checkpoint.
"""

from __future__ import annotations

import json
import signal
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from outbox_core.errors import TransientError
from outbox_core.processor.claimed_batch import ClaimedBatch
from outbox_core.processor.turns import Turn
from outbox_core.progress.checkpoint import BEGINNING
from outbox_core.report import Reason, ResourceRef
from outbox_core.spec import Competing, StartFrom
from outbox_worker.postgres import identity
from outbox_worker.postgres.feeds.competing import BatchTaker, Consumer, join
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.ownership import leases as ownership
from outbox_worker.postgres.reading.ahead import ReadAhead
from outbox_worker.postgres.reading.messages import MessageReader
from outbox_worker.postgres.reading.read_range import ReadRange
from tests.support.servers.crash import CrashingServer, Place
from tests.support.servers.postgres import VERSIONS, build_source, wait_until
from tests.support.servers.receiver import Answer, receiving
from tests.support.streams import STREAM, count_written, read_stream
from tests.support.worker import GATED_HANDLER, PYTHON_TARGET, SQL_TARGET, HandlerGate, build_config

if TYPE_CHECKING:
    from collections.abc import Iterator

PARTITIONED = {"mode": "Partitioned", "partitions": {"count": 2}}
COMPETING = {"mode": "Competing", "competing": {"leaseDuration": "60s"}}
CALM = {"pollInterval": "1s", "leaseDuration": "60s"}
"""Between two looks there is time to freeze a worker that has nothing under way."""
LOOKED = 1.7
"""Seconds in which it looks, and stores nothing that could be waited for."""
WAYS = [
    pytest.param({}, {"cursor": "TransactionOrder"}, id="Ordered, TransactionOrder"),
    pytest.param({}, {"cursor": "Snapshot"}, id="Ordered, Snapshot"),
    pytest.param(PARTITIONED, {"cursor": "TransactionOrder"}, id="Partitioned, TransactionOrder"),
    pytest.param(PARTITIONED, {"cursor": "Snapshot"}, id="Partitioned, Snapshot"),
]
HIDDEN = "the server recovered from a crash"


@pytest.fixture(scope="module")
def server(request) -> Iterator[CrashingServer]:
    """Of one version, or of every one where a test asks for that."""
    server = CrashingServer(getattr(request, "param", VERSIONS[-1]))
    yield server
    server.stop()


@pytest.fixture
def pooled(server):
    database = server.database()
    yield Place(database)
    database.close()


@pytest.fixture(params=[True, False], ids=["pooled", "direct"])
def place(server, request):
    database = server.database(pooled=request.param)
    yield Place(database)
    database.close()


def start(workers, place, target, **fields):
    handler = GATED_HANDLER if target is PYTHON_TARGET else None
    return workers.start(build_config(place.database, target, **fields), place.database.uri(), handler=handler)


def names(prefix, count):
    return [f"{prefix}-{number}" for number in range(count)]


@pytest.mark.parametrize("server", VERSIONS, indirect=True)
@pytest.mark.parametrize("delivery", [{}, PARTITIONED], ids=["Ordered", "Partitioned"])
def test_a_message_whose_transaction_id_was_a_rolled_back_ones_is_handled(server, pooled, workers, delivery):
    """An idle worker has looked beyond the id in memory only; the pool keeps its connection over the crash."""
    worker = start(workers, pooled, SQL_TARGET, source={"cursor": "Snapshot"}, delivery=CALM | delivery)
    pooled.produce("before")
    pooled.wait_count(1, "it is at work")
    server.flush()

    with server.crashed():
        burned = pooled.burn(300)
        time.sleep(LOOKED)
        worker.send(signal.SIGSTOP)
    pooled.skip_to(burned)
    (reused,) = pooled.produce("after")
    assert reused in burned, "the id was handed out again"
    worker.send(signal.SIGCONT)

    pooled.wait_count(2, "it is handled", 20)
    assert pooled.handled() == ["before", "after"]
    if delivery is not PARTITIONED:  # of several runners on one connection one may find it open anew, and says nothing
        # Frozen within a statement it finds its connection closed.
        assert HIDDEN in worker.log() or Reason.DATABASE_UNAVAILABLE in worker.log()
    assert pooled.asked_for_a_person() == 0


@pytest.mark.parametrize("server", VERSIONS, indirect=True)
@pytest.mark.parametrize("durably", [True, False])
def test_a_crash_takes_back_nothing_of_what_was_read_ahead_durably(server, place, durably):
    """A message whose number a receiver has is still there; else another one would get that number."""
    with place.database.connect() as connection:
        run = identity.fetch_run(connection, "outbox")
        ahead = ReadAhead(place.database.connect)
        reader = MessageReader(build_source(), ahead=ahead)
        server.flush()
        with server.crashed():
            place.produce(*names("message", 10))
            reader.read_ahead(BEGINNING, 10, run, durably=durably)
            assert reader.take_ahead(connection, BEGINNING, 10)
            ahead.close()
    assert place.stored() == (names("message", 10) if durably else [])


def test_a_message_that_a_stream_has_outlives_the_crash_also_where_it_was_read_ahead(server, place, workers, rabbitmq):
    """Its number is another one's else, which the stream would drop."""
    target = {"rabbitmqStream": {"connection": {"secretRef": {"name": "broker"}}, "stream": "crashed"}}
    config = build_config(place.database, target, delivery={"batchSize": 10, "leaseDuration": "60s"})
    ids = names("message", 40)
    with rabbitmq.queue("crashed", **STREAM), place.connect(autocommit=False) as holder:
        worker = workers.start(config, place.database.uri(), target=rabbitmq.stream_uri)
        worker.wait_state("Active")
        server.flush()
        with server.crashed():
            with place.connect(autocommit=False) as producer:
                place.insert(producer, *ids[:30])
                holder.execute("SELECT 1 FROM outbox.processor_checkpoints FOR UPDATE")
            wait_until(lambda: count_written(rabbitmq, "crashed") == 20, "two batches are published, none is stored")
            place.produce(*ids[30:])
            holder.rollback()
            wait_until(lambda: count_written(rabbitmq, "crashed") == 40, "the last one, read ahead, is published")
        assert place.stored() == ids
        worker.wait_for(
            "all is stored", lambda r: r.lag is not None and r.lag.messages == 0 and r.state == "Active", 30
        )
        assert [each.message_id for each in read_stream(rabbitmq, "crashed", 40)] == ids
        assert count_written(rabbitmq, "crashed") == 40


def test_no_message_is_passed_by_a_batch_beyond_what_memory_knows(server, pooled, workers):
    """There is work at once, so the worker comes to no idle look: its transaction sees that the server is another."""
    worker = start(workers, pooled, SQL_TARGET, source={"cursor": "Snapshot"}, delivery=CALM)
    pooled.produce("before")
    pooled.wait_count(1, "it is at work")
    server.flush()

    with server.crashed():
        burned = pooled.burn(300)
        time.sleep(LOOKED)
        worker.send(signal.SIGSTOP)
    pooled.skip_to(burned)
    (reused,) = pooled.produce("after")
    assert reused in burned, "the id was handed out again"
    pooled.skip_all(burned)
    pooled.produce("beyond")
    worker.send(signal.SIGCONT)

    pooled.wait_count(3, "both are handled", 20)
    assert pooled.handled() == ["before", "after", "beyond"]
    assert HIDDEN in worker.log()
    assert pooled.asked_for_a_person() == 0


def test_a_message_at_the_very_pair_of_one_that_was_lost_is_handled(server, pooled, workers):
    """TransactionOrder: a message that does not match is passed over in memory, and its commit is lost."""
    source = {"cursor": "TransactionOrder", "messageTypes": ["wanted"]}
    worker = start(workers, pooled, SQL_TARGET, source=source, delivery=CALM)
    pooled.produce("before", message_type="wanted")
    pooled.wait_count(1, "it is at work")
    server.flush()

    with server.crashed():
        lost = pooled.produce(*names("lost", 5), message_type="unwanted")
        time.sleep(LOOKED)
        worker.send(signal.SIGSTOP)
    reused = pooled.produce(*names("after", 2), message_type="wanted")
    assert set(reused) & set(lost), "an id was handed out again"
    worker.send(signal.SIGCONT)

    pooled.wait_count(3, "they are handled", 20)
    assert pooled.handled() == ["before", "after-0", "after-1"]
    assert pooled.asked_for_a_person() == 0


def test_what_a_receiver_took_of_a_lost_transaction_is_not_what_comes_at_its_place(server, place, workers, tmp_path):
    """A row without an id is known by its place, which after the crash is another message's."""
    with place.connect() as connection:
        connection.execute(
            "CREATE TABLE mine (position bigserial PRIMARY KEY, message_id text, message_type text DEFAULT 'm', "
            "key text, data jsonb, transaction_id xid8 DEFAULT pg_current_xact_id()); "
            "CREATE INDEX ON mine (transaction_id, position)"
        )

    def insert(*said: str) -> int:
        with place.connect(autocommit=False) as producer:
            for each in said:
                producer.execute("INSERT INTO mine (key, data) VALUES (%s, to_jsonb(%s::text))", (each, each))
            row = producer.execute("SELECT min(transaction_id)::text FROM mine").fetchone()
        assert row is not None
        return int(row[0])

    table = {"schemaName": "public", "name": "mine", "columns": {"partitionKey": "key"}}
    with receiving(tmp_path, tls=False) as receiver:
        receiver.answer = lambda request: Answer(409 if b"refused" in request.body else 202)
        config = build_config(
            place.database, {"http": {"url": receiver.url}}, delivery=CALM,
            source={"cursor": "TransactionOrder", "table": table},
        )  # fmt: skip
        worker = workers.start(config, place.database.uri())
        worker.wait_state("Active")
        server.flush()
        with server.crashed():
            lost = insert("refused", "taken")
            wait_until(lambda: len(receiver.ids()) == 1, "one of two messages is taken", 20)
            worker.wait_state("Retrying")
            worker.send(signal.SIGSTOP)
        place.skip_to([lost])
        assert insert("first", "second") == lost, "the id was handed out again"
        worker.send(signal.SIGCONT)

        def are_handed_over() -> bool:
            with receiver.lock:
                accepted = [json.loads(each.body)["data"] for each in receiver.requests if each.status == 202]
            return {"first", "second"} <= set(accepted)

        wait_until(are_handed_over, "both are handed over", 20)
    assert place.asked_for_a_person() == 0


@pytest.mark.parametrize(("delivery", "source"), WAYS)
def test_a_checkpoint_that_was_lost_calls_for_no_person(server, place, workers, delivery, source):
    """synchronous_commit = off: the tail goes with its effects, and is handled again."""
    worker = start(workers, place, SQL_TARGET, source=source, delivery=CALM | delivery)
    kept = names("kept", 3)
    place.produce(*kept)
    place.wait_count(3, "it is at work")
    more = names("more", 5)
    worker.send(signal.SIGSTOP)
    place.produce(*more)
    server.flush()

    with server.crashed():
        worker.send(signal.SIGCONT)
        place.wait_count(8, "it goes on")
        time.sleep(0.3)  # until it has heard of its commit
        worker.send(signal.SIGSTOP)
    assert sorted(place.handled()) == kept, "the crash took effects and checkpoint back"
    worker.send(signal.SIGCONT)
    place.wait_count(8, "they are handled again", 20)
    last = names("last", 2)
    place.produce(*last)
    place.wait_count(10, "and what comes after them", 20)

    assert sorted(place.handled()) == sorted([*kept, *more, *last])
    if not delivery:
        assert place.handled() == [*kept, *more, *last]
    assert place.asked_for_a_person() == 0
    worker.wait_state("Active")


@pytest.mark.parametrize(("delivery", "source"), [*WAYS, pytest.param(COMPETING, {}, id="Competing")])
def test_a_batch_in_hand_is_handled_once(server, pooled, workers, delivery, source):
    worker = start(workers, pooled, PYTHON_TARGET, source=source, delivery=CALM | delivery | {"pollInterval": "100ms"})
    gate = HandlerGate(worker.directory)
    expected = names("message", 7)
    pooled.produce(*expected)
    pooled.wait_count(7, "it is at work, and stores, unflushed")
    gate.close()
    last = names("last", 3)
    pooled.produce(*last)
    server.flush()
    with server.crashed():
        gate.wait_entered()
    gate.open()
    pooled.wait_count(10, "all is handled")
    assert sorted(pooled.handled()) == sorted([*expected, *last])
    assert pooled.asked_for_a_person() == 0


@pytest.mark.parametrize("server", VERSIONS, indirect=True)
@pytest.mark.parametrize("cursor", ["TransactionOrder", "Snapshot"])
def test_what_another_database_remembers_is_never_taken_back(server, pooled, servers, workers, cursor):
    """The checkpoint outlives a crash of the source, so nothing is projected that the source had not flushed."""
    with servers.database(template="empty_template") as target:
        seen = target.direct()
        seen.execute("CREATE TABLE seen (n serial PRIMARY KEY, message_id text)")

        def projected():
            return [row[0] for row in seen.execute("SELECT message_id FROM seen ORDER BY n").fetchall()]

        statement = "INSERT INTO seen (message_id) SELECT message_id FROM batch ORDER BY ordinal"
        to = {"sql": {"statement": statement, "connection": {"secretRef": {"name": "reporting"}}}}
        config = build_config(pooled.database, to, source={"cursor": cursor}, delivery=CALM)
        worker = workers.start(config, pooled.database.uri(), target=target.uri())
        pooled.produce("before")
        wait_until(lambda: projected() == ["before"], "it is at work")
        server.flush()

        unflushed = names("unflushed", 3)
        with server.crashed():
            pooled.produce(*unflushed)
            wait_until(lambda: len(projected()) == 4, "the target has them")
            burned = pooled.burn(300)
            time.sleep(LOOKED)
            worker.send(signal.SIGSTOP)
        (reused,) = pooled.produce("after")
        assert reused in burned, "the source lost what was not flushed"
        worker.send(signal.SIGCONT)

        wait_until(lambda: "after" in projected(), "it is projected", 20)
        assert projected() == ["before", *unflushed, "after"] == pooled.stored()


def test_a_consumer_does_not_complete_what_the_server_forgot_was_half_done(server, pooled):
    """Mode Competing: half of a batch is completed and lost; completing the rest would lose its effects for good."""
    config = build_config(pooled.database, SQL_TARGET, delivery=COMPETING)
    key, source = ProcessorKey("outbox", "orders"), build_source()
    resource = ResourceRef.model_validate(config["resource"])
    settings = Competing(lease_duration=timedelta(minutes=1))
    consumer = Consumer("a", "pod-a", resource.uid, settings.lease_duration)
    taker = BatchTaker(key, consumer, source, settings, batch_size=10)
    pooled.produce(*names("message", 4))
    first = pooled.database.connect()
    assert ownership.claim(first, key, resource).granted
    join(first, key, consumer, source, settings, StartFrom())
    taker.server_run = identity.fetch_run(first, "outbox")
    claimed = taker.claim_next(first)
    assert isinstance(claimed, ClaimedBatch)
    half = taker.reader.fetch(first, ReadRange.of(claimed, limit=2))[-1].checkpoint
    server.flush()

    with server.crashed():
        assert taker.complete(first, claimed, half, 2)
    first.close()
    again = pooled.database.connect()
    with pytest.raises(TransientError, match="recovered from a crash"):
        taker.complete(again, claimed, claimed.upto, 2)
    taker.server_run = identity.fetch_run(again, "outbox")
    assert taker.hand_back(again) == 1
    left = taker.take_left(again, Turn.FRESH)
    assert (claimed.count, left and left.count) == (4, 4), "all of it is handled again"
