"""Target `kafka`: a batch is handed to an idempotent producer and counts as delivered when the brokers confirmed all.

AtLeastOnce: what is published again has the same header `x-outbox-message-id`. A message that the brokers refuse is
named in the error; what was taken is not published again by this process, but for a round that an alarm ended. In a
backlog the next batch is handed over once the one before is confirmed, while that one's checkpoint is stored
(docs/adr/0028-several-batches-under-way.md).
Guarantee Transactional is another sink: `outbox_worker.targets.librdkafka.transactional_sink`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from typing_extensions import override

from outbox_core.ports import PipelinedTarget
from outbox_core.processor.taken import TakenMessages
from outbox_core.spec import Guarantee
from outbox_worker.targets.librdkafka.producer import KafkaProducer
from outbox_worker.targets.librdkafka.rounds import Attempt, Rounds
from outbox_worker.targets.librdkafka.settings import read_broker_settings
from outbox_worker.targets.librdkafka.transactional_sink import TransactionalKafkaSink
from outbox_worker.targets.values import check_key

if TYPE_CHECKING:
    from pathlib import Path

    from outbox_core.config import ProcessorConfig
    from outbox_core.message import Batch, Message
    from outbox_core.spec.target import KafkaTarget
    from outbox_worker.settings import Settings
    from outbox_worker.targets.librdkafka.rounds import Round


@dataclass(slots=True)
class _Begun:
    """A batch of which messages were handed over.

    Attributes:
        left: its messages that no round has tried yet, in parts that are sent one after the other.
        round: the one that is not answered.

    """

    batch: Batch
    attempt: Attempt
    producer: KafkaProducer
    left: list[list[Message]]
    round: Round | None = None


class KafkaSink(PipelinedTarget):
    """Publisher of one processor."""

    most_under_way = 2
    awaits_confirms = True

    def __init__(self, target: KafkaTarget, directory: Path, config: ProcessorConfig, pod: str) -> None:
        """Keep the settings; `directory` is the mounted Secret of `target.connection`. Nothing is opened."""
        self._directory = directory
        self._timeout = config.delivery.timeout.total_seconds()
        self._name = f"outbox {config.processor_id} {pod}"
        self._rounds = Rounds(target.topic, config, pod)
        self._producer: KafkaProducer | None = None
        self._begun: dict[int, _Begun] = {}
        self._taken = TakenMessages()

    @override
    def check(self) -> None:
        """Look at Secret and key. The brokers themselves are asked when there is something to publish."""
        check_key(self._rounds.key, "kafka")
        read_broker_settings(self._directory)

    @override
    def keep_alive(self) -> None:
        """Hear what librdkafka has to say; it looks after its connections by itself."""
        if self._producer is not None:
            self._producer.serve()
            if self._producer.is_broken:
                self.close()

    @override
    def close(self) -> None:
        """Drop the producer, what it has not sent yet, and what was begun."""
        self._begun.clear()
        self._drop_producer()

    def _drop_producer(self) -> None:
        if self._producer is not None:
            self._producer.close()
            self._producer = None

    @override
    def begin(self, batch: Batch, epoch: int) -> None:
        """Hand over what the brokers have not taken yet of the batch, as much as makes a round."""
        try:
            self._begin(batch, epoch)
            if self._producer is not None:
                self._producer.start_sending()
        except BaseException:
            self.close()
            raise

    @override
    def is_under_way(self, batch: Batch) -> bool:
        begun = self._begun.get(batch.partition)
        return begun is not None and begun.batch is batch

    @override
    def deliver(self, batch: Batch, epoch: int) -> int:
        try:
            if not self.is_under_way(batch):
                self._begin(batch, epoch)
            self._complete(self._begun[batch.partition])
        except BaseException:
            if self.is_under_way(batch):
                self._taken.add(batch, self._begun[batch.partition].attempt.taken)
            self.close()
            raise
        attempt = self._begun.pop(batch.partition).attempt
        return self._taken.conclude(batch, attempt.messages, attempt.failed)

    def _begin(self, batch: Batch, epoch: int) -> None:
        """Begin with a batch when all that was begun before is answered, also that of other partitions.

        A broker refuses all of a request for one message: were there messages of two batches in it, a good one could be
        alone among those of its batch, and be blamed. What a partition had begun and does not deliver is forgotten and
        published again in its turn: left out, it would let an earlier message of its key that comes again be the last.
        """
        for each in self._begun.values():
            self._complete(each)
        attempt = Attempt(self._taken.left_of(batch, epoch), epoch, time.monotonic() + self._timeout)
        begun = self._begun[batch.partition] = _Begun(batch, attempt, self._open(), [attempt.messages])
        self._begin_round(begun)

    def _complete(self, begun: _Begun) -> None:
        """Await what is under way of a batch, and send what is left of it, one round after the other."""
        begun.attempt.deadline = time.monotonic() + self._timeout
        while begun.round is not None:
            self._rounds.finish(begun.attempt, begun.round, begun.producer)
            begun.left[:0] = [*begun.round.again, begun.round.part[begun.round.tried :]]
            self._begin_round(begun)

    def _begin_round(self, begun: _Begun) -> None:
        begun.round = None
        while begun.left and begun.round is None:
            part = begun.left.pop(0)
            if part:
                begun.round = self._rounds.begin(begun.attempt, part, begun.producer)

    def _open(self) -> KafkaProducer:
        settings, producer = read_broker_settings(self._directory), self._producer
        if producer is None or not producer.serves(settings):
            self._drop_producer()
            producer = self._producer = KafkaProducer(settings, self._name)
        producer.begin()
        return producer


def build(target: KafkaTarget, config: ProcessorConfig, settings: Settings) -> KafkaSink | TransactionalKafkaSink:
    """Build the target, of the guarantee that is asked for."""
    sink = TransactionalKafkaSink if config.guarantee is Guarantee.TRANSACTIONAL else KafkaSink
    return sink(target, settings.target, config, settings.pod)
