"""Guarantee Transactional over a crash of the database that loses what was not flushed: Kafka keeps what it has."""

from __future__ import annotations

import signal
import uuid
from typing import TYPE_CHECKING

import pytest

from tests.support.servers.crash import CrashingServer, Place
from tests.support.servers.postgres import VERSIONS, wait_until
from tests.support.worker import build_config

if TYPE_CHECKING:
    from collections.abc import Iterator

DELIVERY = {"guarantee": "Transactional", "batchSize": 5, "leaseDuration": "60s"}


@pytest.fixture(scope="module")
def server() -> Iterator[CrashingServer]:
    server = CrashingServer(VERSIONS[-1])
    yield server
    server.stop()


@pytest.fixture(params=[True, False], ids=["pooled", "direct"])
def place(server, request):
    database = server.database(pooled=request.param)
    yield Place(database)
    database.close()


@pytest.fixture
def topic(kafka):
    with kafka.topic(1) as topic:
        yield topic


@pytest.fixture
def start(place, workers, kafka, topic):
    """Start a worker whose target is the topic, in transactions of Kafka."""
    records = f"records-{uuid.uuid4().hex[:8]}"

    def started(**delivery):
        target = {"kafka": {"connection": {"secretRef": {"name": "kafka"}}, "topic": topic.name}}
        target["kafka"]["checkpointTopic"] = records
        home = workers.prepare(build_config(place.database, target, delivery=DELIVERY | delivery), place.database.uri())
        kafka.files(home / "connections/target")
        return workers.launch(home)

    return started


def names(count):
    return [f"message-{number}" for number in range(count)]


def wait_stored(place, ids):
    def is_stored():
        with place.connect() as connection:
            row = connection.execute(
                "SELECT last_processed_transaction_id >= %s::text::xid8 FROM outbox.processor_checkpoints", (ids[-1],)
            ).fetchone()
        return row == (True,)

    wait_until(is_stored, "the last checkpoint is stored")


def test_batches_whose_checkpoints_a_crash_takes_back_are_not_published_again(server, place, start, topic):
    """The record of a batch no longer names those before: their checkpoints must outlive a crash by then."""
    worker = start()
    worker.wait_state("Active")
    worker.send(signal.SIGSTOP)
    ids = place.produce(*names(20))
    server.flush()
    with server.crashed():
        worker.send(signal.SIGCONT)
        topic.wait_for(20)
        wait_stored(place, ids)
        worker.send(signal.SIGSTOP)
    worker.send(signal.SIGCONT)
    wait_stored(place, ids)
    assert topic.ids() == names(20)


def test_what_is_published_outlives_the_crash(server, place, start, topic):
    """Else another message can have the place and the id of one that is published, and would be left out."""
    worker = start()
    worker.wait_state("Active")
    server.flush()
    with server.crashed():
        place.produce(*names(20))
        topic.wait_for(20)
        worker.send(signal.SIGSTOP)
    worker.send(signal.SIGCONT)
    assert place.stored() == topic.ids()


def test_a_checkpoint_by_which_an_owner_began_outlives_the_crash(server, place, start, topic):
    """Its first record names no message that the checkpoint has passed."""
    worker = start()
    worker.wait_state("Active")
    worker.send(signal.SIGSTOP)
    ids = place.produce(*names(5))
    server.flush()
    with server.crashed():
        worker.send(signal.SIGCONT)
        topic.wait_for(5)
        wait_stored(place, ids)
        assert worker.terminate() == 0
        second = start()
        second.wait_state("Active")
        second.send(signal.SIGSTOP)
    second.send(signal.SIGCONT)
    wait_stored(place, ids)
    assert topic.ids() == names(5)
