"""`outbox run` with a broker as target: its connection is a folder beside the database's, or one of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import yaml

from tests.support.servers.postgres import wait_until
from tests.support.streams import STREAM, read_stream
from tests.support.worker import FAST

PROGRAM = Path(sys.executable).with_name("outbox")


@pytest.mark.parametrize("own", [False, True], ids=["beside the database's", "of its own"])
def test_messages_reach_the_broker(outbox, rabbitmq, tmp_path, own):
    ids = outbox.produce(3)
    name = f"orders-{uuid.uuid4().hex[:8]}"
    target = {"rabbitmq": {"connection": {"secretRef": {"name": "broker"}}, "routingKey": name}}
    spec = {"source": {"connection": {"secretRef": {"name": "db"}}}, "target": target, "delivery": FAST}
    head = {"apiVersion": "outbox-operator.dev/v1alpha1", "kind": "OutboxProcessor", "metadata": {"name": "orders"}}
    (tmp_path / "orders.yaml").write_text(yaml.safe_dump(head | {"spec": spec}))
    (tmp_path / "source").symlink_to(outbox.database.files().directory)
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "uri").write_text(rabbitmq.uri)
    where = ["--connections", tmp_path]
    if own:
        where = ["--connection", tmp_path / "source", "--target-connection", tmp_path / "target"]
    with rabbitmq.queue(name) as client:
        with (tmp_path / "log").open("wb") as log:
            process = subprocess.Popen([PROGRAM, "run", "-f", tmp_path / "orders.yaml", *where], stderr=log)
        try:
            wait_until(lambda: client.count(name) == 3, "three messages in the queue", 30)
            wait_until(lambda: outbox.stored() == "0:4", "the counter of the fourth message to come is stored")
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0, (tmp_path / "log").read_text()
        finally:
            process.kill()
            process.wait()
        assert [delivery.message_id for delivery in client.drain(name)] == ids


def test_messages_reach_a_stream_and_a_manifest_without_its_order_is_refused(outbox, rabbitmq, tmp_path):
    ids = outbox.produce(3)
    name = f"orders-{uuid.uuid4().hex[:8]}"
    target = {"rabbitmqStream": {"connection": {"secretRef": {"name": "broker"}}, "stream": name}}
    head = {"apiVersion": "outbox-operator.dev/v1alpha1", "kind": "OutboxProcessor", "metadata": {"name": "orders"}}
    source = {"connection": {"secretRef": {"name": "db"}}}
    (tmp_path / "source").symlink_to(outbox.database.files().directory)
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "uri").write_text(rabbitmq.stream_uri)
    command = [PROGRAM, "run", "-f", tmp_path / "orders.yaml", "--connections", tmp_path]
    with rabbitmq.queue(name, **STREAM), (tmp_path / "log").open("wb") as log:
        (tmp_path / "orders.yaml").write_text(yaml.safe_dump(head | {"spec": {"source": source, "target": target}}))
        refused = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
        assert refused.returncode != 0
        assert "set source.cursor: TransactionOrder" in refused.stderr
        spec = {"source": source | {"cursor": "TransactionOrder"}, "target": target, "delivery": FAST}
        (tmp_path / "orders.yaml").write_text(yaml.safe_dump(head | {"spec": spec}))
        process = subprocess.Popen(command, stderr=log)
        try:
            assert [each.message_id for each in read_stream(rabbitmq, name, 3)] == ids
            wait_until(lambda: outbox.stored() == outbox.last(), "the checkpoint is stored")
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0, (tmp_path / "log").read_text()
        finally:
            process.kill()
            process.wait()
