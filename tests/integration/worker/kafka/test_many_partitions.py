"""How long it takes to take many partitions over, in transactions of a real broker."""

from __future__ import annotations

import time
import uuid
from contextlib import closing
from itertools import pairwise

import pytest

from outbox_core.config import ProcessorConfig
from outbox_core.ports import OwnerStart
from outbox_core.progress.checkpoint import BEGINNING
from outbox_worker.targets.librdkafka.transactional_sink import TransactionalKafkaSink
from tests.support.worker import build_config

pytestmark = pytest.mark.calm
PARTITIONS = 32


def test_they_are_taken_over_without_waiting_for_timers_of_the_client(kafka, tmp_path):
    """Which ask again after one second or three, in one of four cases; something else may be late now and then."""
    kafka.files(tmp_path / "secret")
    target = {"kafka": {"connection": {"secretRef": {"name": "kafka"}}, "topic": "orders"}}
    delivery = {"guarantee": "Transactional", "mode": "Partitioned", "partitions": {"count": PARTITIONS}}
    fields = build_config(None, target, delivery=delivery, processor_id=f"orders-{uuid.uuid4().hex[:8]}")
    config = ProcessorConfig.model_validate(fields)
    assert config.target is not None
    assert config.target.kafka is not None
    for epoch in (1, 2):
        began = [time.monotonic()]
        with closing(TransactionalKafkaSink(config.target.kafka, tmp_path / "secret", config, "pod-0")) as sink:
            for partition in range(PARTITIONS):
                sink.begin_owner(OwnerStart(database="here", partition=partition, epoch=epoch, checkpoint=BEGINNING))
                began.append(time.monotonic())
    seconds = [later - before for before, later in pairwise(began)]
    assert sum(each > 0.9 for each in seconds) <= 3, seconds
