"""Target `rabbitmqStream` against a real broker: each message once, over kills, freezes, rewinds and restarts."""

from __future__ import annotations

import json
import uuid

import pytest

from tests.support.streams import STREAM, read_stream
from tests.support.worker import build_config


def build_target(stream):
    return {"rabbitmqStream": {"connection": {"secretRef": {"name": "broker"}}, "stream": stream}}


@pytest.fixture
def stream(rabbitmq):
    name = f"orders-{uuid.uuid4().hex[:8]}"
    with rabbitmq.queue(name, **STREAM):
        yield name


def start(outbox, workers, rabbitmq, stream, uri=None, **fields):
    config = build_config(outbox.database, build_target(stream), **fields)
    return workers.start(config, outbox.database.uri(), target=uri or rabbitmq.stream_uri)


def read_ids(rabbitmq, stream, count):
    return [each.message_id for each in read_stream(rabbitmq, stream, count)]


def test_messages_arrive_in_order_with_their_properties(outbox, workers, rabbitmq, stream):
    ids = outbox.produce(2500)
    outbox.connection.execute(
        "INSERT INTO outbox.messages (message_id, message_type, data) "
        "SELECT 'large', 'Large', jsonb_build_object('text', repeat('ä', 150000))"
    )
    worker = start(outbox, workers, rabbitmq, stream)
    worker.wait_for("all is stored", lambda r: r.handled == 2501, 30)
    found = read_stream(rabbitmq, stream, 2501)
    assert [each.message_id for each in found] == [*ids, "large"]
    first = found[0]
    assert (first.subject, first.content_type, json.loads(first.body)) == (
        "OrderPlaced", "application/json", {"n": 1, "total": 10},
    )  # fmt: skip
    expected = {
        "x-outbox-publication": "shop", "x-outbox-partition-key": "order-1", "x-outbox-processor": "orders",
        "x-outbox-pod": "pod-0", "x-outbox-epoch": 1,
    }  # fmt: skip
    assert expected.items() <= first.headers.items()
    assert first.headers["x-outbox-checkpoint"].endswith(":1")
    assert json.loads(found[-1].body) == {"text": "ä" * 150_000}
    assert outbox.stored() == outbox.last()


def test_killed_between_confirm_and_checkpoint_the_stream_has_each_once(outbox, workers, rabbitmq, stream):
    ids = outbox.produce(10)
    first = start(outbox, workers, rabbitmq, stream, delivery={"leaseDuration": "3s"})
    first.wait_for("all is stored", lambda r: r.handled == 10)
    # The checkpoint's row is locked: the batch is published and confirmed, and its checkpoint cannot be stored.
    holder = outbox.database.direct(autocommit=False)
    with outbox.connection.transaction():
        more = outbox.produce(10, start=10)
        # Its transaction id is above the messages': it holds the row, not the high-water mark.
        holder.execute("SELECT 1 FROM outbox.processor_checkpoints FOR UPDATE")
    assert read_ids(rabbitmq, stream, 20) == ids + more
    first.kill()
    holder.rollback()
    late = outbox.produce(5, start=20)
    second = start(outbox, workers, rabbitmq, stream, delivery={"leaseDuration": "3s"})
    second.wait_for("all is stored", lambda r: r.handled == 15)
    assert read_ids(rabbitmq, stream, 25) == ids + more + late
    assert "the stream has messages beyond the checkpoint" in second.log()
