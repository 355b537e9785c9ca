"""Messages of some megabytes: a process has a bounded number of bytes in memory, however many a batch may have."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from tests.support.large import HANDLER, MOST, SIZE, peak, produce
from tests.support.nightly import at_night
from tests.support.servers.postgres import wait_until
from tests.support.servers.receiver import receiving
from tests.support.worker import PYTHON_TARGET, build_config

UNITS: dict[str, dict[str, Any]] = {
    "TransactionOrder": {"source": {"cursor": "TransactionOrder"}},
    "Snapshot": {"source": {"cursor": "Snapshot"}},
    "Partitioned": {"source": {"cursor": None}, "delivery": {"mode": "Partitioned", "partitions": {"count": 2}}},
    "Competing": {
        "source": {"cursor": None},
        "delivery": {"mode": "Competing", "competing": {"leaseDuration": "10s"}, "leaseDuration": "15s"},
    },
}


@pytest.mark.parametrize("unit", [*at_night("TransactionOrder", "Snapshot"), "Partitioned", "Competing"])
def test_a_handler_gets_batches_of_so_many_bytes(outbox, workers, unit):
    ids = produce(outbox)
    config = build_config(outbox.database, PYTHON_TARGET, **UNITS[unit])
    worker = workers.start(config, outbox.database.uri(), handler=HANDLER)
    wait_until(lambda: outbox.count() >= len(ids), "all are handled")
    assert sorted(outbox.handled()) == sorted(ids)
    assert peak(worker) < MOST
    sizes = [row[0] for row in outbox.connection.execute("SELECT count(*) * %s FROM handled GROUP BY pod", (SIZE,))]
    assert max(sizes) <= 16 << 20, "of one batch"


@pytest.mark.parametrize("unit", ["TransactionOrder", *at_night("Competing")])
def test_messages_that_failed_are_tried_again_in_such_batches(outbox, workers, unit):
    ids = produce(outbox)
    delivery = UNITS[unit].get("delivery", {}) | {
        "retry": {"maxAttempts": 1000, "initialBackoff": "50ms", "maxBackoff": "3s"}
    }
    if unit != "Competing":
        delivery["blocks"] = "Nothing"
    config = build_config(outbox.database, PYTHON_TARGET, **(UNITS[unit] | {"delivery": delivery}))
    home = workers.prepare(config, outbox.database.uri(), handler=HANDLER)
    (home / "refuse").touch()
    worker = workers.launch(home)
    table = "competing_retries" if unit == "Competing" else "held_messages"
    failed: set[str] = set()

    def have_all_failed() -> bool:
        # Those that are tried again at this moment are not in the table.
        failed.update(row[0] for row in outbox.connection.execute(f"SELECT message_id FROM outbox.{table}"))
        return failed == set(ids)

    wait_until(have_all_failed, "all failed")
    (home / "refuse").unlink()
    wait_until(lambda: outbox.count() >= len(ids), "all are handled")
    assert sorted(outbox.handled()) == sorted(ids)
    assert peak(worker) < MOST + 100, "a batch that failed is in memory with its error"


def test_a_broker_that_takes_several_batches_at_a_time(outbox, workers, rabbitmq):
    ids, name = produce(outbox), f"large-{uuid.uuid4().hex[:8]}"
    target = {"rabbitmq": {"connection": {"secretRef": {"name": "broker"}}, "routingKey": name}}
    with rabbitmq.queue(name) as client:
        config = build_config(outbox.database, target)
        worker = workers.start(config, outbox.database.uri(), target=rabbitmq.uri)
        worker.wait_for("all is stored", lambda r: r.handled == len(ids))
        assert peak(worker) < MOST + 100, "three batches, each as text and as frames"
        assert [each.message_id for each in client.drain(name)] == ids


def test_an_endpoint(outbox, workers, tmp_path):
    ids = produce(outbox)
    with receiving(tmp_path) as receiver:
        http = {"url": receiver.url, "connection": {"secretRef": {"name": "receiver"}}}
        home = workers.prepare(build_config(outbox.database, {"http": http}), outbox.database.uri())
        receiver.files(home / "connections/target")
        worker = workers.launch(home)
        worker.wait_for("all is stored", lambda r: r.handled == len(ids))
        assert sorted(each.id for each in receiver.requests) == sorted(ids)
        assert peak(worker) < MOST
