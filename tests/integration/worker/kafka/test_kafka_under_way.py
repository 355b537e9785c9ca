"""Target `kafka` in a backlog: the next batch is published while the checkpoint of the confirmed one is stored."""

from __future__ import annotations

import signal
import time
from dataclasses import replace

import pytest

from outbox_core.errors import HandlerError
from outbox_core.message import Batch
from outbox_core.progress.checkpoint import Checkpoint
from tests.integration.worker.kafka.test_kafka import start
from tests.integration.worker.kafka.test_kafka_sink import SMALL, TOO_LARGE, batch, make, message
from tests.support.servers.postgres import wait_until

__all__ = ["make", "start"]

BATCH, MORE = 10, 99
BACKLOG = {"batchSize": BATCH, "leaseDuration": "3s"}
# A machine that stalls for seconds must not end the lease before two batches are published.
STUCK = {**BACKLOG, "leaseDuration": "10s"}


class TestTheCheckpointCannotBeStored:
    @pytest.fixture
    def stuck(self, outbox, kafka, start):
        """A worker whose first batch of a backlog cannot be stored, the ids of all, what holds its row, the topic.

        All but the last MORE ids are stored. A backlog whose second batch librdkafka had no time to send, before the
        worker waits for the row, is let go: that batch is sent when it is delivered.
        """
        with kafka.topic(partitions=1) as topic:
            worker = start(topic.name, STUCK)
            ids, deadline, holder = outbox.produce(1), time.monotonic() + 60, None
            while holder is None:
                assert time.monotonic() < deadline, "no second batch is published before the first one is stored"
                count = len(ids)
                worker.wait_for("all is stored", lambda r, count=count: r.handled == count)
                more, holder = outbox.produce_locked(MORE, start=count)
                ids += more
                topic.wait_for(count + BATCH)
                time.sleep(1)
                if len(topic.read()) == count + BATCH:
                    holder.close()
                    holder = None
            yield worker, ids, holder, topic
            holder.close()

    def test_one_more_batch_is_published_and_no_other_one(self, outbox, stuck):
        worker, ids, holder, topic = stuck
        time.sleep(0.5)
        assert len(topic.ids()) == len(ids) - MORE + 2 * BATCH
        holder.rollback()
        worker.wait_for("all is stored", lambda r: r.handled == len(ids))
        assert outbox.stored() == outbox.last()
        assert topic.ids() == ids, "each once"

    def test_killed_what_was_under_way_comes_again_and_nothing_else(self, outbox, start, stuck):
        worker, ids, holder, topic = stuck
        worker.kill()
        outbox.end_waiting_sessions()
        holder.rollback()
        second = start(topic.name, STUCK)
        second.wait_for("all is stored", lambda r: r.handled == MORE)
        assert topic.ids() == ids[: 2 * BATCH - MORE] + ids[-MORE:]

    def test_asked_to_stop_it_stores_what_is_under_way_and_begins_no_more(self, start, stuck):
        worker, ids, holder, topic = stuck
        worker.send(signal.SIGTERM)
        time.sleep(0.5)  # its main thread waits for the row, and says nothing before it has it
        holder.rollback()
        assert worker.process.wait(20) == 0
        assert len(topic.ids()) == len(ids) - MORE + 2 * BATCH
        second = start(topic.name, STUCK)
        second.wait_for("the rest is stored", lambda r: r.handled == MORE - 2 * BATCH)
        assert topic.ids() == ids, "each once"


def test_frozen_while_it_waits_for_a_confirm_it_begins_with_nothing_after_its_lease(outbox, kafka, start):
    with kafka.topic(partitions=1) as topic:
        first = start(topic.name, BACKLOG)
        ids = outbox.produce(1)
        first.wait_for("one is stored", lambda r: r.handled == 1)
        with kafka.frozen():
            with outbox.connection.transaction():
                ids += outbox.produce(99, start=1)
            time.sleep(0.5)  # by now it waits for the confirm of the first ten
            first.send(signal.SIGSTOP)
        second = start(topic.name, BACKLOG)
        second.wait_for("the rest is stored", lambda r: r.handled == 99)
        first.send(signal.SIGCONT)
        first.wait_state("Standby")
        found = topic.ids()
        assert list(dict.fromkeys(found)) == ids
        twice = [each for each in ids if found.count(each) > 1]
        assert twice == ids[1 : 1 + BATCH], "what was sent before it was frozen, and nothing else"


def following(before, *messages):
    return replace(batch(*messages), after=before.examined)


def test_what_was_begun_and_is_not_delivered_comes_again_in_its_turn(kafka, make):
    """The first one's checkpoint was not stored: were the second left out, the first would end a compacted topic."""
    with kafka.topic(partitions=1) as topic:
        sink, first = make(topic.name), batch(message(1))
        second = following(first, message(2))
        assert sink.deliver(first, 1) == 1
        sink.begin(second, 1)
        assert sink.is_under_way(second)
        assert sink.deliver(replace(first), 1) == 1
        assert not sink.is_under_way(second)
        assert sink.deliver(replace(second), 1) == 1
        assert topic.wait_for(4) == ["m-1", "m-2", "m-1", "m-2"]


@pytest.mark.parametrize("many", [1, 3])
def test_a_message_that_is_refused_blames_none_of_another_partitions_batch(kafka, make, many):
    with kafka.topic(partitions=1, **SMALL) as topic:
        sink = make(topic.name)
        good = batch(*(message(n) for n in range(1, 1 + many)))
        bad = Batch(
            Checkpoint(0, 0), Checkpoint(100, 9), (message(9, data=f'"{TOO_LARGE}"'),), 1, full=True, partition=1
        )
        sink.begin(good, 1)
        sink.begin(bad, 1)
        assert sink.deliver(good, 1) == many
        with pytest.raises(HandlerError, match="too large"):
            sink.deliver(bad, 1)
        wait_until(lambda: topic.ids() == [f"m-{n}" for n in range(1, 1 + many)], "the good ones are there, each once")
