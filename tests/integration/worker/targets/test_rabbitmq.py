"""Target `rabbitmq` against a real broker: confirms, returns, refusals, outages, duplicates."""

from __future__ import annotations

import contextlib
import json
import signal
import uuid

import pytest

from tests.support.servers.postgres import wait_until
from tests.support.servers.proxy import Relay
from tests.support.worker import build_config
from tests.tools.ledger.amqp import BrokerError


def build_target(queue, **fields):
    return {"rabbitmq": {"connection": {"secretRef": {"name": "broker"}}, "routingKey": queue, **fields}}


@pytest.fixture
def queue_name():
    return f"orders-{uuid.uuid4().hex[:8]}"


def start(outbox, workers, rabbitmq, target, uri=None, **fields):
    config = build_config(outbox.database, target, **fields)
    return workers.start(config, outbox.database.uri(), target=uri or rabbitmq.uri)


def wait_count(client, name, count, seconds=20.0):
    wait_until(lambda: client.count(name) >= count, f"{count} messages in {name}", seconds)


def test_messages_arrive_in_order_with_their_properties(outbox, workers, rabbitmq, queue_name):
    ids = outbox.produce(2500)
    large = outbox.connection.execute(
        "INSERT INTO outbox.messages (message_id, message_type, data) "
        "SELECT 'large', 'Large', jsonb_build_object('text', repeat('ä', 150000)) RETURNING message_id"
    ).fetchone()
    with rabbitmq.queue(queue_name) as client:
        worker = start(outbox, workers, rabbitmq, build_target(queue_name))
        worker.wait_for("all is stored", lambda r: r.handled == 2501, 30)
        deliveries = client.drain(queue_name)
    assert large is not None
    assert [each.message_id for each in deliveries] == [*ids, *large]
    first = deliveries[0]
    assert (first.message_type, json.loads(first.body)) == ("OrderPlaced", {"n": 1, "total": 10})
    expected = {
        "x-outbox-publication": "shop", "x-outbox-partition-key": "order-1", "x-outbox-processor": "orders",
        "x-outbox-pod": "pod-0", "x-outbox-epoch": 1,
    }  # fmt: skip
    assert expected.items() <= first.headers.items()
    assert first.headers["x-outbox-checkpoint"].endswith(":1")
    assert json.loads(deliveries[-1].body) == {"text": "ä" * 150_000}
    assert outbox.stored() == outbox.last()


def test_routing_keys_are_made_of_the_message(outbox, workers, rabbitmq, queue_name):
    outbox.produce(7)
    exchange = f"exchange-{queue_name}"
    target = build_target("{publicationId}.{messageType}.{partitionKey}", exchange=exchange)
    with rabbitmq.queue(queue_name, exchange) as client:
        start(outbox, workers, rabbitmq, target)
        wait_count(client, queue_name, 7)


def test_a_broker_that_is_down_and_comes_up(outbox, workers, rabbitmq, queue_name):
    with rabbitmq.queue(queue_name) as client:
        ids = outbox.produce(5)
        worker = start(outbox, workers, rabbitmq, build_target(queue_name), delivery={"retry": {"maxAttempts": 1}})
        worker.wait_for("the first are stored", lambda r: r.handled == 5)
        before = outbox.stored()
        rabbitmq.stop()
        more = outbox.produce(5, start=5)
        report = worker.wait_state("Retrying", "TargetUnavailable")
        assert report.attempt == 0
        assert str(rabbitmq.port) in report.message
        assert "s3cret" not in worker.log() + report.model_dump_json()
        assert outbox.stored() == before
        rabbitmq.start()
        worker.wait_for("the rest is stored", lambda r: r.handled == 10, 30)
        with contextlib.suppress(BrokerError, OSError):
            client.count(queue_name)  # this client's connection died with the broker
        with rabbitmq.client() as fresh:
            delivered = [each.message_id for each in fresh.drain(queue_name)]
    assert list(dict.fromkeys(delivered)) == ids + more


def test_a_message_that_no_queue_takes_names_exchange_and_key(outbox, workers, rabbitmq, queue_name):
    ids = outbox.produce(3)
    delivery = {"retry": {"initialBackoff": "50ms", "maxBackoff": "200ms", "forever": ["MessageUnroutable"]}}
    worker = start(outbox, workers, rabbitmq, build_target(queue_name), delivery=delivery)
    report = worker.wait_state("Retrying", "MessageUnroutable")
    assert "the default exchange" in report.message
    assert f"'{queue_name}'" in report.message
    assert "NO_ROUTE" in report.message
    assert outbox.stored() == "0:0"
    with rabbitmq.queue(queue_name) as client:
        worker.wait_for("it goes on by itself", lambda r: r.handled == 3 and r.state == "Active")
        assert [each.message_id for each in client.drain(queue_name)] == ids


def test_an_exchange_that_is_not_declared(outbox, workers, rabbitmq, queue_name):
    outbox.produce(3)
    worker = start(outbox, workers, rabbitmq, build_target("key", exchange=f"none-{queue_name}"))
    report = worker.wait_state("Retrying", "MessageUnroutable")
    assert f"no exchange 'none-{queue_name}'" in report.message
    with rabbitmq.queue(queue_name, f"none-{queue_name}") as client:
        wait_count(client, queue_name, 3)


def test_without_mandatory_the_broker_drops_what_no_queue_takes(outbox, workers, rabbitmq, queue_name):
    outbox.produce(3)
    worker = start(outbox, workers, rabbitmq, build_target(queue_name, mandatory=False))
    report = worker.wait_for("all is stored", lambda r: r.handled == 3)
    assert (report.state, report.attempt, outbox.stored()) == ("Active", 0, outbox.last())


def test_a_refusal_by_the_broker_counts_as_attempt(outbox, workers, rabbitmq, queue_name):
    outbox.produce(5)
    arguments = {"x-max-length": 2, "x-overflow": "reject-publish"}
    with rabbitmq.queue(queue_name, **arguments):
        worker = start(outbox, workers, rabbitmq, build_target(queue_name), delivery={"retry": {"maxAttempts": 2}})
        report = worker.wait_state("Stopped")
    assert "MessageRejected" in report.message
    assert "nack" in report.message
    assert outbox.stored().endswith(":2"), "what the queue took is passed"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("tests:s3cret", "AuthenticationFailed"),
        ("/nowhere", "ConnectionSecretInvalid"),
        ("amqp", "ConnectionSecretInvalid"),
    ],
    ids=["password", "virtual host", "no URI"],
)
def test_a_wrong_login_is_said_and_recovers(outbox, workers, rabbitmq, queue_name, change, reason):
    outbox.produce(3)
    wrong = {
        "tests:s3cret": rabbitmq.uri.replace("s3cret%20word", "guess"),
        "/nowhere": rabbitmq.uri + "nowhere",
        "amqp": "not a uri",
    }[change]
    with rabbitmq.queue(queue_name) as client:
        config = build_config(outbox.database, build_target(queue_name))
        home = workers.prepare(config, outbox.database.uri(), target=wrong)
        worker = workers.launch(home)
        report = worker.wait_state("Unavailable", reason)
        assert "guess" not in worker.log() + report.model_dump_json()
        (home / "connections/target/uri").write_text(rabbitmq.uri)
        wait_count(client, queue_name, 3)


def test_permissions_that_are_taken_away_are_named_and_it_goes_on_once_they_are_back(
    outbox, workers, rabbitmq, queue_name
):
    rabbitmq.control("add_user", "limited", "f1rst")
    rabbitmq.control("set_permissions", "limited", "", ".*", "")
    try:
        with rabbitmq.queue(queue_name) as client:
            uri = f"amqp://limited:f1rst@127.0.0.1:{rabbitmq.port}/"
            worker = start(outbox, workers, rabbitmq, build_target(queue_name), uri)
            outbox.produce(3)
            worker.wait_for("the first are stored", lambda r: r.handled == 3)
            rabbitmq.control("clear_permissions", "limited")
            rabbitmq.control("close_all_user_connections", "limited", "tests")
            outbox.produce(3, start=3)
            report = worker.wait_state("Unavailable", "ConnectionSecretInvalid")
            assert "refuses the virtual host /" in report.message
            assert "give user limited permissions there" in report.message
            rabbitmq.control("set_permissions", "limited", "", ".*", "")
            wait_count(client, queue_name, 6)
    finally:
        rabbitmq.control("delete_user", "limited")


def test_tls_with_the_authority_of_the_secret(outbox, workers, rabbitmq, queue_name):
    outbox.produce(3)
    uri = rabbitmq.uri.replace("amqp:", "amqps:").replace(
        f"127.0.0.1:{rabbitmq.port}", f"localhost:{rabbitmq.tls_port}"
    )
    with rabbitmq.queue(queue_name) as client:
        home = workers.prepare(
            build_config(outbox.database, build_target(queue_name)), outbox.database.uri(), target=uri
        )
        worker = workers.launch(home)
        report = worker.wait_state("Unavailable", "ConnectionSecretInvalid")
        assert "certificate is not trusted" in report.message
        authority = (rabbitmq.directory / "ca.crt").read_text()
        (home / "connections/target/ca.crt").write_text(authority)
        wait_count(client, queue_name, 3)


@pytest.mark.parametrize("timeout", ["1m", "4s"])
def test_a_broker_that_blocks_publishers(outbox, workers, rabbitmq, queue_name, timeout):
    with rabbitmq.queue(queue_name) as client:
        worker = start(outbox, workers, rabbitmq, build_target(queue_name), delivery={"timeout": timeout})
        outbox.produce(1)
        worker.wait_for("one is stored", lambda r: r.handled == 1)
        rabbitmq.control("set_vm_memory_high_watermark", "0.000001")
        try:
            outbox.produce(3, start=1)
            report = worker.wait_state("Retrying", "TargetUnavailable", 40)
            assert "blocks publishers" in report.message
            assert "memory" in report.message
            assert "HandlerTimeout" not in worker.log()
        finally:
            rabbitmq.control("set_vm_memory_high_watermark", "0.4")
        worker.wait_for("all is stored", lambda r: r.handled == 4, 40)
        seen = [each.message_id for each in client.drain(queue_name)]
    assert set(seen) == {f"message-{n}" for n in range(1, 5)}


def test_a_broker_that_takes_messages_and_confirms_none_uses_up_no_attempt(outbox, workers, rabbitmq, queue_name):
    relay = Relay(rabbitmq.port)
    try:
        with rabbitmq.queue(queue_name) as client:
            worker = start(
                outbox, workers, rabbitmq, build_target(queue_name),
                rabbitmq.uri.replace(f":{rabbitmq.port}", f":{relay.port}"),
                delivery={"timeout": "1s", "retry": {"maxAttempts": 1, "initialBackoff": "50ms", "maxBackoff": "1s"}},
            )  # fmt: skip
            outbox.produce(1)
            worker.wait_for("one is stored", lambda r: r.handled == 1)
            relay.hang()
            outbox.produce(4, start=1)
            report = worker.wait_state("Retrying", "TargetUnavailable", 40)
            assert "did not confirm" in report.message
            relay.heal()
            worker.wait_for("all is stored", lambda r: r.handled == 5, 40)
            seen = [each.message_id for each in client.drain(queue_name)]
    finally:
        relay.close()
    assert list(dict.fromkeys(seen)) == [f"message-{n}" for n in range(1, 6)]


def test_killed_between_confirm_and_checkpoint_duplicates_keep_their_ids(outbox, workers, rabbitmq, queue_name):
    ids = outbox.produce(10)
    # Somebody holds the checkpoint's row: the batch is published and confirmed, and its checkpoint cannot be stored.
    with rabbitmq.queue(queue_name) as client:
        first = start(outbox, workers, rabbitmq, build_target(queue_name), delivery={"leaseDuration": "3s"})
        first.wait_for("all is stored", lambda r: r.handled == 10)
        holder = outbox.database.direct(autocommit=False)
        with outbox.connection.transaction():
            more = outbox.produce(10, start=10)
            # Its transaction id is above the messages': it holds the row, not the high-water mark.
            holder.execute("SELECT 1 FROM outbox.processor_checkpoints FOR UPDATE")
        wait_count(client, queue_name, 20)
        first.kill()
        outbox.end_waiting_sessions()
        holder.rollback()
        second = start(outbox, workers, rabbitmq, build_target(queue_name), delivery={"leaseDuration": "3s"})
        second.wait_for("all is stored", lambda r: r.handled == 10)
        deliveries = client.drain(queue_name)
    assert [each.message_id for each in deliveries] == ids + more + more
    assert [each.headers["x-outbox-pod"] for each in deliveries] == ["pod-0"] * 20 + ["pod-1"] * 10


def test_a_frozen_publisher_hands_nothing_over_after_its_lease(outbox, workers, rabbitmq, queue_name):
    with rabbitmq.queue(queue_name) as client:
        ids = outbox.produce(5)
        first = start(outbox, workers, rabbitmq, build_target(queue_name))
        first.wait_for("all is stored", lambda r: r.handled == 5)
        second = start(outbox, workers, rabbitmq, build_target(queue_name))
        second.wait_state("Standby")
        first.send(signal.SIGSTOP)
        second.wait_state("Active")
        more = outbox.produce(5, start=5)
        second.wait_for("the rest is stored", lambda r: r.handled == 5)
        first.send(signal.SIGCONT)
        first.wait_state("Standby")
        assert [each.message_id for each in client.drain(queue_name)] == ids + more


def test_a_message_that_no_queue_takes_becomes_a_dead_letter_and_the_others_arrive(
    outbox, workers, rabbitmq, queue_name
):
    """Its key waits behind it, others do not."""
    outbox.connection.execute(
        "INSERT INTO outbox.messages (partition_key, message_id, message_type, data) "
        "SELECT CASE WHEN n %% 10 = 7 THEN 'nowhere' ELSE %s END, 'message-' || n, 't', '{}' "
        "FROM generate_series(0, 49) AS n",
        (queue_name,),
    )
    delivery = {
        "blocks": "Key", "whenExhausted": "DeadLetter",
        "retry": {"maxAttempts": 2, "initialBackoff": "50ms", "maxBackoff": "50ms"},
    }  # fmt: skip
    with rabbitmq.queue(queue_name) as client:
        worker = start(outbox, workers, rabbitmq, build_target("{partitionKey}"), delivery=delivery)
        report = worker.wait_for(
            "it is dead, and its key waits", lambda r: r.failures is not None and r.failures.dead_letters == 1, 40
        )
        wait_until(lambda: outbox.stored() == outbox.last(), "all is passed")
        arrived = [each.message_id for each in client.drain(queue_name)]
    assert list(dict.fromkeys(arrived)) == [f"message-{n}" for n in range(50) if n % 10 != 7]
    assert report.failures.blocked_keys[0].key == "nowhere"
    rows = outbox.connection.execute("SELECT message_id, error_class FROM outbox.dead_letters").fetchall()
    assert rows == [("message-7", "MessageUnroutable")]
