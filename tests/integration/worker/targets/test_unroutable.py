"""One message of many that no queue takes: every other message arrives once, that one ends as `delivery` says."""

from __future__ import annotations

import time
import uuid

import pytest

from tests.integration.cli import test_detour
from tests.integration.worker.targets.test_rabbitmq import build_target, start
from tests.support.nightly import at_night, by_day
from tests.support.servers.postgres import wait_until
from tests.support.worker import build_config

COUNT, LOST = 300, 150
FEW = {"retry": {"maxAttempts": 3, "initialBackoff": "50ms", "maxBackoff": "100ms"}}
ORDERED = {"mode": "Ordered"}
PARTITIONED = {"mode": "Partitioned", "partitions": {"count": 4}}
COMPETING = {"mode": "Competing", "competing": {"leaseDuration": "5s"}}


@pytest.fixture
def names():
    """The queue that is there, and one that is not."""
    suffix = uuid.uuid4().hex[:8]
    return f"here-{suffix}", f"nowhere-{suffix}"


def produce(outbox, here, nowhere, lost=(LOST,), *, first=1, last=COUNT):
    """Store messages whose type is the queue they go to; return the ids of those that arrive."""
    outbox.connection.execute(
        "INSERT INTO outbox.messages (partition_key, message_id, message_type, data) "
        "SELECT 'key-' || n %% 7, 'message-' || n, CASE WHEN n = ANY (%s) THEN %s ELSE %s END, '{}' "
        "FROM generate_series(%s::int, %s::int) AS n",
        (list(lost), nowhere, here, first, last),
    )
    return [f"message-{n}" for n in range(first, last + 1) if n not in lost]


def run(outbox, workers, rabbitmq, delivery):
    fields = {} if delivery["mode"] != "Competing" else {"source": {"cursor": None}}
    return start(outbox, workers, rabbitmq, build_target("{messageType}"), delivery=FEW | delivery, **fields)


def dead(outbox):
    rows = outbox.connection.execute("SELECT message_id, error_class FROM outbox.dead_letters").fetchall()
    return [tuple(row) for row in rows]


def acts(outbox):
    row = outbox.connection.execute("SELECT count(*) FROM outbox.audit_log WHERE action = 'Skip'").fetchone()
    return row[0]


ENDS = [
    pytest.param(end, delivery, id=f"{end}-{name}")
    for end in ("DeadLetter", "Skip")
    for name, delivery in {
        "Ordered, partition": ORDERED | {"blocks": "Partition"},
        "Ordered, key": ORDERED | {"blocks": "Key"},
        "Ordered, nothing": ORDERED | {"blocks": "Nothing"},
        "Partitioned, partition": PARTITIONED | {"blocks": "Partition"},
        "Partitioned, key": PARTITIONED | {"blocks": "Key"},
        "Competing": COMPETING,
    }.items()
]
FEW_ENDS = by_day(
    ENDS, "DeadLetter-Ordered, key", "DeadLetter-Partitioned, partition", "DeadLetter-Competing",
    "Skip-Ordered, partition", "Skip-Ordered, nothing", "Skip-Partitioned, key",
)  # fmt: skip


@pytest.mark.parametrize(("end", "delivery"), FEW_ENDS)
def test_the_others_arrive_once_and_the_lost_one_is_given_up(outbox, workers, rabbitmq, names, delivery, end):
    here, nowhere = names
    others = produce(outbox, here, nowhere)
    with rabbitmq.queue(here) as client:
        worker = run(outbox, workers, rabbitmq, delivery | {"whenExhausted": end})
        given_up = (lambda: dead(outbox) == [("message-150", "MessageUnroutable")]) if end == "DeadLetter" else (
            lambda: acts(outbox) == 1
        )  # fmt: skip
        wait_until(given_up, f"the message that no queue takes ends with {end}", 30)
        wait_until(lambda: client.count(here) >= len(others), "the others arrive", 30)
        more = produce(outbox, here, nowhere, first=COUNT + 1, last=COUNT + 7)
        wait_until(lambda: client.count(here) >= len(others) + 6, "what comes later arrives", 30)
        time.sleep(0.5)
        arrived = [each.message_id for each in client.drain(here)]
    # With DeadLetter and blocks Key, what comes later of its key waits behind it.
    waits = end == "DeadLetter" and delivery.get("blocks") == "Key"
    expected = [*others, *(each for each in more if not waits or int(each.split("-")[1]) % 7 != LOST % 7)]
    assert sorted(arrived) == sorted(expected)
    assert worker.report().state == "Active"


@pytest.mark.parametrize(
    "delivery",
    [
        pytest.param(ORDERED | {"blocks": "Partition"}, id="Ordered, partition"),
        pytest.param(ORDERED | {"blocks": "Key"}, id="Ordered, key"),
        pytest.param(PARTITIONED | {"blocks": "Key"}, id="Partitioned, key"),
        pytest.param(COMPETING | {"whenExhausted": "Requeue"}, id="Competing, requeue"),
    ],
)
def test_the_lost_one_arrives_once_its_queue_is_bound(outbox, workers, rabbitmq, names, delivery):
    here, nowhere = names
    others = produce(outbox, here, nowhere)
    many = {"retry": FEW["retry"] | {"maxAttempts": 1000}}
    with rabbitmq.queue(here) as client:
        worker = run(outbox, workers, rabbitmq, many | delivery)
        wait_until(lambda: client.count(here) == len(others), "the others arrive", 30)
        time.sleep(1.0)
        assert client.count(here) == len(others)
        with rabbitmq.queue(nowhere) as late:
            wait_until(lambda: late.count(nowhere) == 1, "the message arrives", 30)
            worker.wait_for("all is handled", lambda r: r.state == "Active" and r.handled == COUNT)
            assert [each.message_id for each in late.drain(nowhere)] == [f"message-{LOST}"]
        arrived = [each.message_id for each in client.drain(here)]
    assert sorted(arrived) == sorted(others)


@pytest.mark.parametrize("delivery", [ORDERED, COMPETING], ids=["Ordered", "Competing"])
def test_with_stop_it_says_at_which_message_and_publishes_nothing_more(outbox, workers, rabbitmq, names, delivery):
    here, nowhere = names
    others = produce(outbox, here, nowhere)
    with rabbitmq.queue(here) as client:
        worker = run(outbox, workers, rabbitmq, delivery | {"whenExhausted": "Stop"})
        report = worker.wait_state("Stopped", "AttemptsExhausted")
        if delivery is ORDERED:
            assert f"message-{LOST}" in report.message
        assert f"'{nowhere}'" in report.message
        wait_until(lambda: client.count(here) >= LOST - 1, "what comes before it arrives", 30)
        arrived = [each.message_id for each in client.drain(here)]
    assert len(arrived) == len(set(arrived))
    assert set(arrived) <= set(others)


@pytest.mark.parametrize("delivery", [pytest.param(ORDERED, id="Ordered"), *at_night(COMPETING)])
def test_a_resource_that_waits_for_the_queue_repeats_nothing_else(outbox, workers, rabbitmq, names, delivery):
    here, nowhere = names
    others = produce(outbox, here, nowhere)
    with rabbitmq.queue(here) as client:
        retry = FEW["retry"] | {"forever": ["MessageUnroutable"]}
        worker = run(outbox, workers, rabbitmq, delivery | {"retry": retry})
        report = worker.wait_state("Retrying", "MessageUnroutable")
        assert f"'{nowhere}'" in report.message
        time.sleep(2.0)
        with rabbitmq.queue(nowhere) as late:
            wait_until(lambda: late.count(nowhere) == 1, "the message arrives", 30)
            worker.wait_for("all is handled", lambda r: r.state == "Active" and r.handled == COUNT)
        arrived = [each.message_id for each in client.drain(here)]
    assert sorted(arrived) == sorted(others)


def test_many_lost_ones_among_many_keys(outbox, workers, rabbitmq, names):
    here, nowhere = names
    others = produce(outbox, here, nowhere, lost=range(3, COUNT, 3))
    with rabbitmq.queue(here) as client:
        run(outbox, workers, rabbitmq, ORDERED | {"blocks": "Nothing", "whenExhausted": "DeadLetter"})
        wait_until(lambda: len(dead(outbox)) == COUNT - len(others), "they are dead", 60)
        wait_until(lambda: client.count(here) >= len(others), "the others arrive", 30)
        arrived = [each.message_id for each in client.drain(here)]
    assert sorted(arrived) == sorted(others)


@pytest.mark.parametrize(("mode", "cursor"), test_detour.MODES)
def test_the_command_that_the_message_names_lets_the_rest_through(outbox, workers, rabbitmq, mode, cursor):
    queue = f"detour-{uuid.uuid4().hex[:8]}"
    outbox.produce(20)
    outbox.connection.execute(
        "UPDATE outbox.messages SET publication_id = %s WHERE message_id <> 'message-7'", (queue,)
    )
    config = build_config(
        outbox.database, build_target("{publicationId}"), source={"cursor": cursor}, delivery=test_detour.settings(mode)
    )
    with rabbitmq.queue(queue) as client:
        worker = workers.start(config, outbox.database.uri(), target=rabbitmq.uri)
        test_detour.walk(outbox, worker, mode)
        wait_until(lambda: client.count(queue) >= 19, "the others arrive")
        arrived = [each.message_id for each in client.drain(queue)]
    assert sorted(arrived) == sorted(f"message-{n}" for n in range(1, 21) if n != 7)


@pytest.mark.parametrize("delivery", [ORDERED, PARTITIONED], ids=["Ordered", "Partitioned"])
def test_lost_ones_of_one_key_arrive_in_their_order(outbox, workers, rabbitmq, names, delivery):
    here, nowhere = names
    lost = range(3, COUNT, 7)
    others = produce(outbox, here, nowhere, lost=lost)
    many = {"retry": FEW["retry"] | {"maxAttempts": 1000}}
    with rabbitmq.queue(here) as client:
        run(outbox, workers, rabbitmq, many | delivery | {"blocks": "Key"})
        wait_until(lambda: client.count(here) == len(others), "the others arrive", 30)
        statement = "SELECT count(*) FILTER (WHERE behind), count(*) FROM outbox.held_messages"
        waiting = (len(lost) - 1, len(lost))
        wait_until(lambda: outbox.connection.execute(statement).fetchone() == waiting, "they wait behind the first", 30)
        with rabbitmq.queue(nowhere) as late:
            wait_until(lambda: late.count(nowhere) == len(lost), "they arrive", 30)
            assert [each.message_id for each in late.drain(nowhere)] == [f"message-{n}" for n in lost]
        assert sorted(each.message_id for each in client.drain(here)) == sorted(others)


@pytest.mark.parametrize(("blocks", "attempts"), [("Key", [1, 0, 0, 0]), ("Nothing", [2, 2, 2, 2])])
def test_of_held_lost_ones_only_the_first_of_a_key_uses_up_an_attempt(
    outbox, workers, rabbitmq, names, blocks, attempts
):
    """The first of the key is given up, so the next is tried, and those behind it with it: they wait again, untried."""
    here, nowhere = names
    # One of another key beside them: a message that is tried alone is not named.
    others = produce(outbox, here, nowhere, lost=[3, 4, 10, 17, 24, 31], last=40)
    most = 2 if blocks == "Key" else 10
    retry = {"retry": {"maxAttempts": most, "initialBackoff": "2s", "maxBackoff": "2s", "jitter": 0}}
    with rabbitmq.queue(here) as client:
        run(outbox, workers, rabbitmq, ORDERED | retry | {"blocks": blocks, "whenExhausted": "Skip"})
        wait_until(lambda: client.count(here) == len(others), "the others arrive", 30)
        later = "message_id NOT IN ('message-3', 'message-4')"
        statement = f"SELECT attempts FROM outbox.held_messages WHERE {later} ORDER BY place"
        gone = "SELECT NOT EXISTS (SELECT FROM outbox.held_messages WHERE message_id = 'message-3' AND attempts < 2)"

        def look():
            return [row[0] for row in outbox.connection.execute(statement).fetchall()]

        wait_until(lambda: len(look()) == 4, "they are held", 30)
        wait_until(lambda: outbox.connection.execute(gone).fetchone()[0], "the first was tried twice", 30)
        wait_until(lambda: look()[0] == attempts[0], "the next one was tried", 30)
        assert look() == attempts
