"""What target `kafka` publishes in transactions of a real broker, and what owners that come later know of it."""

from __future__ import annotations

import contextlib
import random
import string
import uuid
from dataclasses import replace

import pytest
from confluent_kafka import Producer

from outbox_core.config import ProcessorConfig
from outbox_core.errors import HandlerError, MessagesFailedError, OutboxError, TransientError
from outbox_core.message import Batch, Held
from outbox_core.ports import OwnerStart
from outbox_core.progress.checkpoint import BEGINNING, Checkpoint
from outbox_core.progress.snapshot_range import SnapshotRange
from outbox_core.report import Reason
from outbox_worker.shutdown import Interrupted
from outbox_worker.targets.librdkafka.rounds import Rounds
from outbox_worker.targets.librdkafka.transaction import TransactionalProducer
from outbox_worker.targets.librdkafka.transactional_sink import TransactionalKafkaSink
from tests.integration.worker.kafka.test_kafka_sink import message
from tests.support.nightly import at_night
from tests.support.servers.kafka import Topic
from tests.support.servers.postgres import wait_until
from tests.support.worker import build_config

TOO_LARGE = "".join(random.Random(1).choices(string.ascii_letters, k=4000))
"""Compression does not make it small enough."""
BEYOND = Checkpoint(200, 0)
"""The row has passed the held messages."""


@pytest.fixture
def own():
    """The name of the test's processor."""
    return f"orders-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def make(kafka, tmp_path, own):
    """Build sinks of one processor; they are closed after the test."""
    with contextlib.ExitStack() as stack:

        def build(topic, delivery=None, *, processor=own, keys=None, secure=False, checkpoints=None):
            directory = tmp_path / "secret"
            (kafka.secure_files if secure else kafka.files)(directory, **(keys or {}))
            target = {"connection": {"secretRef": {"name": "kafka"}}, "topic": topic}
            if checkpoints is not None:
                target["checkpointTopic"] = checkpoints
            delivery = {"guarantee": "Transactional"} | (delivery or {})
            fields = build_config(None, {"kafka": target}, delivery=delivery, processor_id=processor)
            config = ProcessorConfig.model_validate(fields)
            assert config.target is not None
            assert config.target.kafka is not None
            sink = TransactionalKafkaSink(config.target.kafka, directory, config, "pod-0")
            return stack.enter_context(contextlib.closing(sink))

        yield build


def batch(*messages, after=BEGINNING):
    return Batch(after, messages[-1].checkpoint, messages, len(messages), full=True)


def held(*messages, after=BEYOND):
    places = tuple(Held(each.checkpoint, "k", each.message_id) for each in messages)
    return Batch(after, after, messages, len(messages), full=True, held=places)


def start(epoch, checkpoint=BEGINNING, **fields):
    return OwnerStart(**({"database": "here", "partition": 0, "epoch": epoch, "checkpoint": checkpoint} | fields))


def ids(*numbers):
    return [f"m-{number}" for number in numbers]


class TestWhatTheNextOwnerKnows:
    def test_what_is_published_and_not_stored_is_not_published_again(self, kafka, make):
        with kafka.topic(partitions=1) as topic:
            first, second = make(topic.name), make(topic.name)
            first.begin_owner(start(1))
            assert first.deliver(batch(message(1), message(2)), 1) == 2
            second.begin_owner(start(2))
            assert second.deliver(batch(message(1)), 2) == 1, "a batch of another size"
            assert second.deliver(batch(message(2), message(3), after=Checkpoint(100, 1)), 2) == 2
            first.begin_owner(start(3, Checkpoint(100, 3)))
            assert first.deliver(held(message(2), message(4)), 3) == 2, "one that was held and not handled"
            assert topic.wait_for(4) == ids(1, 2, 3, 4)

    @pytest.mark.parametrize("dies", [False, True], ids=["lives", "dies"])
    def test_what_is_held_behind_one_that_stopped_its_partition_is_not_published_again(self, kafka, make, dies):
        """A person redrives a dead letter of its key, while it is published and not stored."""
        with kafka.topic(partitions=1, max_message_bytes="2000") as topic:
            sink = make(topic.name, {"blocks": "Partition"})
            sink.begin_owner(start(1))
            large = message(1, "other", data=f'"{TOO_LARGE}"')
            with pytest.raises(MessagesFailedError):
                sink.deliver(batch(large, message(2), message(3)), 1)
            passed = batch(message(3), after=Checkpoint(100, 1))
            assert sink.deliver(replace(passed, excluded=(Checkpoint(100, 2),)), 1) == 1
            assert sink.deliver(batch(message(4), after=Checkpoint(100, 3)), 1) == 1
            if dies:
                sink = make(topic.name, {"blocks": "Partition"})
                sink.begin_owner(start(2, Checkpoint(100, 4)))
            assert sink.deliver(held(message(2)), 2 if dies else 1) == 1
            assert sorted(topic.wait_for(3)) == ids(2, 3, 4)

    def test_what_the_row_has_passed_is_forgotten(self, kafka, make):
        with kafka.topic(partitions=1) as topic:
            sink = make(topic.name)
            sink.begin_owner(start(1))
            for number in range(1, 6):
                sink.deliver(batch(message(number), after=Checkpoint(100, number - 1)), 1)
            assert list(sink._publishers[0].published.fresh.values()) == [Checkpoint(100, 5)]
            sink.begin_owner(start(2, Checkpoint(100, 5)))
            assert sink._publishers[0].published.fresh == {}
            assert topic.wait_for(5) == ids(1, 2, 3, 4, 5)

    def test_of_a_batch_that_two_owners_died_of_nothing_is_forgotten(self, kafka, make):
        """The second one stored half of it: the other half is still known to the third, though its row has moved."""
        with kafka.topic(partitions=1) as topic:
            make(topic.name).begin_owner(start(1))
            first, second, third = make(topic.name), make(topic.name), make(topic.name)
            first.begin_owner(start(2))
            first.deliver(batch(*map(message, (1, 2, 3, 4))), 2)
            second.begin_owner(start(3))
            second.deliver(batch(message(1), message(2)), 3)
            third.begin_owner(start(4, Checkpoint(100, 2)))
            third.deliver(batch(message(3), message(4), message(5), after=Checkpoint(100, 2)), 4)
            assert topic.wait_for(5) == ids(1, 2, 3, 4, 5)

    def test_with_cursor_snapshot_the_ranges_say_what_is_stored(self, kafka, make):
        """The next owner's snapshot range has a message of a lower position, so that its batches end elsewhere."""
        before = Checkpoint(0, 7, SnapshotRange("90:90:", None, None))
        middle = Checkpoint(0, 10, SnapshotRange("90:90:", "120:120:", 2))
        with kafka.topic(partitions=1) as topic:
            first, second = make(topic.name), make(topic.name)
            first.begin_owner(start(1, before))
            first.deliver(batch(message(1), message(3), message(4), after=before), 1)
            second.begin_owner(start(2, before))
            second.deliver(batch(message(1), message(2), after=before), 2)
            second.deliver(batch(message(3), message(4), message(5), after=middle), 2)
            assert topic.wait_for(5) == ids(1, 3, 4, 2, 5)

    def test_held_messages_are_named_beside_the_fresh_ones(self, kafka, make):
        with kafka.topic(partitions=1) as topic:
            first, second = make(topic.name), make(topic.name)
            first.begin_owner(start(1))
            first.deliver(held(message(1), message(2)), 1)
            first.deliver(batch(message(201)), 1)
            second.begin_owner(start(2))
            second.deliver(held(message(2), message(3)), 2)
            second.deliver(batch(message(201), message(202)), 2)
            second.deliver(held(message(1)), 2)
            assert topic.wait_for(5) == ids(1, 2, 201, 3, 202)

    def test_what_a_person_asks_for_again_is_published_again(self, kafka, make):
        """To the very place where the batch was read, so that only the act tells it from a crash."""
        with kafka.topic(partitions=1) as topic:
            sink = make(topic.name)
            sink.begin_owner(start(1))
            sink.deliver(batch(message(1)), 1)
            sink.deliver(held(message(2)), 1)
            sink.begin_owner(start(2, moved=5))
            sink.deliver(batch(message(1)), 2)
            sink.deliver(held(message(2)), 2)
            sink.begin_owner(start(3, moved=5))
            sink.deliver(batch(message(1)), 3)
            sink.deliver(held(message(2)), 3)
            assert topic.wait_for(4) == ids(1, 2, 1, 2)

    def test_a_checkpoint_that_was_made_just_now_knows_nothing(self, kafka, make):
        with kafka.topic(partitions=1) as topic:
            sink = make(topic.name)
            sink.begin_owner(start(1))
            sink.deliver(batch(message(1)), 1)
            sink.deliver(held(message(2)), 1)
            sink.begin_owner(start(2, checkpoint=None))
            sink.deliver(batch(message(1)), 2)
            sink.close()
            sink.deliver(held(message(2)), 2)
            assert topic.wait_for(4) == ids(1, 2, 1, 2)

    def test_another_message_at_the_same_place_is_another(self, kafka, make):
        with kafka.topic(partitions=1) as topic:
            sink = make(topic.name)
            sink.begin_owner(start(1))
            sink.deliver(batch(message(1)), 1)
            sink.begin_owner(start(2))
            sink.deliver(batch(message(1, message_id="other")), 2)
            assert topic.wait_for(2) == ["m-1", "other"]

    def test_two_databases_have_processors_of_one_name(self, kafka, make):
        with kafka.topic(partitions=1) as topic:
            one, other = make(topic.name), make(topic.name)
            one.begin_owner(start(3))
            other.begin_owner(start(1, database="there"))
            one.deliver(batch(message(1)), 3)
            other.deliver(batch(message(1)), 1)
            one.deliver(batch(message(2)), 3)
            assert topic.wait_for(3) == ids(1, 1, 2)

    def test_the_last_record_is_found_before_many_that_were_taken_back(self, kafka, make):
        with kafka.topic(partitions=1) as topic:
            first, second = make(topic.name), make(topic.name)
            first.begin_owner(start(1))
            first.deliver(batch(message(1)), 1)
            producer, checkpoints = first._publishers[0].producer, first._topic
            for _ in range(100):
                producer.begin_transaction(1e9)
                producer._producer.produce(checkpoints, b"{}", b"key", partition=0)
                producer._producer.flush()
                producer.abort(1e9)
            second.begin_owner(start(2))
            second.deliver(batch(message(1), message(2)), 2)
            assert topic.wait_for(2) == ids(1, 2)


class TestZombies:
    def test_a_former_producer_publishes_nothing_more(self, kafka, make):
        with kafka.topic(partitions=1) as topic:
            old, new = make(topic.name), make(topic.name)
            old.begin_owner(start(1))
            old.deliver(batch(message(1)), 1)
            new.begin_owner(start(2, Checkpoint(100, 1)))
            with pytest.raises(TransientError, match="another producer took over") as caught:
                old.deliver(batch(message(2)), 1)
            assert caught.value.reason is Reason.TARGET_UNAVAILABLE
            new.deliver(batch(message(2)), 2)
            assert topic.wait_for(2) == ids(1, 2)

    def test_one_that_makes_another_producer_learns_of_the_later_owner(self, kafka, make):
        with kafka.topic(partitions=1) as topic:
            old, new = make(topic.name), make(topic.name)
            old.begin_owner(start(1))
            new.begin_owner(start(2))
            new.deliver(batch(message(1)), 2)
            old.close()
            for _ in range(3):
                with pytest.raises(TransientError, match="the owner with epoch 2 has begun"):
                    old.deliver(batch(message(2)), 1)
            with pytest.raises(TransientError, match="another producer took over"):
                new.deliver(batch(message(2)), 2)
            assert new.deliver(batch(message(2)), 2) == 1, "with another producer"
            assert topic.wait_for(2) == ids(1, 2)

    def test_what_is_open_is_taken_back_when_the_next_owner_begins(self, kafka, make):
        with kafka.topic(partitions=1) as topic:
            old, new = make(topic.name), make(topic.name)
            old.begin_owner(start(1))
            producer = old._publishers[0].producer
            producer.begin_transaction(1e9)
            producer._producer.produce(topic.name, b"open", b"k", headers=[("x-outbox-message-id", b"m-1")])
            producer._producer.flush()
            new.begin_owner(start(2))
            new.deliver(batch(message(1)), 2)
            with contextlib.closing(Topic(kafka, topic.name, isolation="read_uncommitted")) as everything:
                assert everything.wait_for(2) == ids(1, 1)
            assert topic.wait_for(1) == ids(1)

    def test_what_is_committed_just_before_it_is_shut_out_is_known(self, kafka, make, monkeypatch):
        """The former owner wakes while its successor begins, and commits at the last moment."""
        with kafka.topic(partitions=1) as topic:
            old, new = make(topic.name), make(topic.name)
            old.begin_owner(start(1))
            shut_out = TransactionalProducer.shut_out

            def wake(producer, deadline):
                old.deliver(batch(message(1)), 1)
                shut_out(producer, deadline)

            monkeypatch.setattr(TransactionalProducer, "shut_out", wake)
            new.begin_owner(start(2))
            new.deliver(batch(message(1), message(2)), 2)
            assert topic.wait_for(2) == ids(1, 2)

    def test_a_database_that_was_set_back_is_believed_when_its_lease_was_looked_at(self, kafka, make):
        with kafka.topic(partitions=1) as topic:
            sink = make(topic.name)
            sink.begin_owner(start(9))
            sink.deliver(batch(message(1), message(2)), 9)
            with pytest.raises(TransientError, match="the owner with epoch 9 has begun"):
                sink.begin_owner(start(4))
            with pytest.raises(TransientError, match="the owner with epoch 9 has begun"):
                sink.begin_owner(start(5))
            sink.begin_owner(start(5))  # the engine has looked at the lease in between
            sink.deliver(batch(message(1), message(2), message(3)), 5)
            assert topic.wait_for(3) == ids(1, 2, 3)

    def test_nothing_is_delivered_for_an_epoch_that_has_not_begun(self, make):
        sink = make("orders")
        with pytest.raises(TransientError, match="has not begun with epoch 1"):
            sink.deliver(batch(message(1)), 1)


def begins(sink, start):
    """Try it as a worker does, which tries again."""
    try:
        sink.begin_owner(start)
    except TransientError:
        return False
    return True


class TestATransactionWithoutAnEnd:
    """As brokers leave it that lose the mark of a commit (docs/adr/0030); here another producer has it open."""

    @pytest.fixture
    def leave_open(self, kafka):
        """Begin a transaction in the checkpoint topic of a sink, and return what ends it."""

        def begin(sink):
            settings = {"bootstrap.servers": kafka.servers, "transactional.id": uuid.uuid4().hex}
            producer = Producer(settings)
            producer.init_transactions()
            producer.begin_transaction()
            producer.produce(sink._topic, b"{}", b"other", partition=0)
            producer.flush()
            return producer.abort_transaction

        return begin

    def test_a_producer_that_is_replaced_goes_on_behind_its_own_record(self, kafka, make, leave_open):
        with kafka.topic(partitions=1) as topic:
            sink = make(topic.name, {"timeout": "5s"})
            sink.begin_owner(start(1))
            end = leave_open(sink)
            sink.deliver(batch(message(1)), 1)
            sink.close()
            assert sink.deliver(batch(message(1), message(2)), 1) == 2
            assert topic.wait_for(2) == ids(1, 2)
            end()

    def test_who_begins_says_what_hides_the_record_and_waits(self, kafka, make, leave_open):
        with kafka.topic(partitions=1) as topic:
            first, second = make(topic.name), make(topic.name, {"timeout": "2s"})
            first.begin_owner(start(1))
            end = leave_open(first)
            first.deliver(batch(message(1)), 1)
            with pytest.raises(TransientError, match="a transaction that began at offset 2 of partition 0") as caught:
                second.begin_owner(start(2))
            assert caught.value.reason is Reason.TARGET_UNAVAILABLE
            end()
            wait_until(lambda: begins(second, start(2)), "it begins, as soon as the broker answers within its 2 s")
            second.deliver(batch(message(1), message(2)), 2)
            assert topic.wait_for(2) == ids(1, 2)


class TestRefusals:
    @pytest.mark.parametrize("bad", [*at_night({50}), {1, 2, 99, 100}])
    def test_those_that_are_too_large_are_named_and_the_others_are_there_once(self, kafka, make, bad):
        with kafka.topic(partitions=2, max_message_bytes="2000") as topic:
            sink = make(topic.name, {"blocks": "Nothing"})
            sink.begin_owner(start(1))
            messages = [message(n, f"k{n % 5}", **({"data": TOO_LARGE} if n in bad else {})) for n in range(1, 101)]
            for _ in range(2):
                with pytest.raises(MessagesFailedError) as caught:
                    sink.deliver(batch(*messages), 1)
                assert {place.position for place in caught.value.failed} == bad
                assert {each.error_class for each in caught.value.failed.values()} == {"MSG_SIZE_TOO_LARGE"}
            assert sorted(topic.wait_for(100 - len(bad))) == sorted(ids(*({*range(1, 101)} - bad)))
            for key in range(5):
                arrived = [each.value() for each in topic.read() if each.key() == f"k{key}".encode()]
                expected = [n for n in range(1, 101) if n % 5 == key and n not in bad]
                assert arrived == [f'{{"n": {n}}}'.encode() for n in expected], "in order"

    def test_what_waits_behind_it_is_not_published(self, kafka, make):
        with kafka.topic(partitions=1, max_message_bytes="2000") as topic:
            sink = make(topic.name, {"mode": "Partitioned", "partitions": {"count": 2}})
            sink.begin_owner(start(1))
            with pytest.raises(MessagesFailedError) as caught:
                sink.deliver(
                    batch(
                        message(1, "a"), message(2, "b"), message(3, "b", data=TOO_LARGE), message(4, "b"),
                        message(5, "a"), message(6, "b", data=TOO_LARGE), message(7, "c"),
                    ), 1
                )  # fmt: skip
            assert {place.position for place in caught.value.failed} == {3, 4, 6}
            assert "waits behind" in str(caught.value.failed[Checkpoint(100, 4)])
            assert topic.wait_for(4) == ids(1, 2, 5, 7), "what comes before it is"

    def test_one_alone_is_reported_with_its_own_error_and_the_next_is_published(self, kafka, make):
        with kafka.topic(partitions=1, max_message_bytes="2000") as topic:
            sink = make(topic.name)
            sink.begin_owner(start(1))
            with pytest.raises(HandlerError, match="too large") as caught:
                sink.deliver(batch(message(1, data=TOO_LARGE)), 1)
            assert not isinstance(caught.value, MessagesFailedError)
            assert sink.deliver(batch(message(2)), 1) == 1
            assert topic.wait_for(1) == ids(2)

    def test_one_that_has_no_topic_does_not_hold_the_others(self, kafka, make):
        with kafka.topic(partitions=1) as topic:
            sink = make("{messageType}")
            sink.begin_owner(start(1))
            with pytest.raises(MessagesFailedError) as caught:
                sink.deliver(batch(message(1, "a", message_type=topic.name), message(2, "b", message_type=None)), 1)
            assert {place.position for place in caught.value.failed} == {2}
            assert topic.wait_for(1) == ids(1)


class TestTheBrokersFaults:
    def test_a_broker_that_does_not_answer_and_then_does(self, kafka, make):
        with kafka.topic(partitions=1) as topic:
            sink = make(topic.name, {"timeout": "2s"})
            sink.begin_owner(start(1))
            sink.deliver(batch(message(1)), 1)
            with kafka.frozen(), pytest.raises(TransientError, match=r"delivery\.timeout"):
                sink.deliver(batch(message(2), message(3)), 1)
            deliver(sink, batch(message(2), message(3)), 1)
            assert topic.wait_for(3) == ids(1, 2, 3)

    def test_an_answer_that_is_lost_is_looked_up(self, kafka, make):
        """The transaction is committed, and who committed it never learns of it."""
        with kafka.topic(partitions=1) as topic:
            sink = make(topic.name)
            sink.begin_owner(start(1))
            commit = sink._publishers[0].producer._await

            def lose(call, deadline):
                commit(call, deadline)
                raise TransientError("as if", reason=Reason.TARGET_UNAVAILABLE)

            sink._publishers[0].producer._await = lose
            with pytest.raises(TransientError, match="as if"):
                sink.deliver(batch(message(1)), 1)
            assert sink.deliver(batch(message(1), message(2)), 1) == 2
            assert topic.wait_for(2) == ids(1, 2)

    @pytest.mark.parametrize(("rounds", "expected"), [(2, TransientError), (6, Interrupted)])
    def test_an_alarm_lets_a_batch_be_halved_once_a_refused_message_was_found(
        self, kafka, make, monkeypatch, rounds, expected
    ):
        send, left = Rounds.send, [None] * rounds

        def send_until_alarm(*given):
            if not left:
                raise Interrupted(draining=False)
            left.pop()
            return send(*given)

        with kafka.topic(partitions=1, max_message_bytes="2000") as topic:
            sink, messages = make(topic.name, {"blocks": "Nothing"}), [message(n, data=TOO_LARGE) for n in range(1, 9)]
            sink.begin_owner(start(1))
            monkeypatch.setattr(Rounds, "send", send_until_alarm)
            with pytest.raises(expected):
                sink.deliver(batch(*messages), 1)

    def test_a_delivery_timeout_beyond_what_brokers_allow_is_no_fault(self, kafka, make):
        with kafka.topic(partitions=1) as topic:
            sink = make(topic.name, {"timeout": "1h"})
            sink.begin_owner(start(1))
            assert sink.deliver(batch(message(1)), 1) == 1

    def test_a_missing_topic_is_waited_for(self, kafka, make):
        name = f"later-{uuid.uuid4().hex[:8]}"
        sink = make(name)
        sink.begin_owner(start(1))
        with pytest.raises(TransientError, match=f"has no topic {name}"):
            sink.deliver(batch(message(1)), 1)
        kafka.create_topic(name, 1)
        sink.deliver(batch(message(1)), 1)
        with contextlib.closing(Topic(kafka, name)) as topic:
            assert topic.wait_for(1) == ids(1)
        kafka.delete_topic(name)


def deliver(sink, messages, epoch):
    """As the engine: again and again, while it is the brokers' fault."""
    for _ in range(30):
        with contextlib.suppress(OutboxError):
            return sink.deliver(messages, epoch)
    raise AssertionError("it is never delivered")


def deliver_begin(sink, begun):
    """Begin, once the brokers have heard of what is allowed."""
    for left in range(20, -1, -1):
        try:
            return sink.begin_owner(begun)
        except TransientError:
            if not left:
                raise
    return None
