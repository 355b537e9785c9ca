"""Target `kafka`: a batch is handed to an idempotent producer and counts as delivered when the brokers confirmed all.

AtLeastOnce: what is published again has the same header `x-outbox-message-id`. A message that the brokers refuse is
named in the error; what was taken is not published again by this process. Guarantee Transactional is another sink:
`outbox_worker.targets.librdkafka.transactional_sink`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from typing_extensions import override

from outbox_core.errors import TransientError
from outbox_core.ports import OutsideTransaction
from outbox_core.processor.taken import TakenMessages
from outbox_core.report import Reason
from outbox_core.spec import Guarantee
from outbox_worker.shutdown import Interrupted
from outbox_worker.targets.librdkafka.producer import KafkaProducer
from outbox_worker.targets.librdkafka.rounds import Attempt, Rounds
from outbox_worker.targets.librdkafka.settings import read_broker_settings
from outbox_worker.targets.librdkafka.transactional_sink import TransactionalKafkaSink

if TYPE_CHECKING:
    from pathlib import Path

    from outbox_core.config import ProcessorConfig
    from outbox_core.message import Batch
    from outbox_core.spec.target import KafkaTarget
    from outbox_worker.settings import Settings


class KafkaSink(OutsideTransaction):
    """Publisher of one processor."""

    def __init__(self, target: KafkaTarget, directory: Path, config: ProcessorConfig, pod: str) -> None:
        """Keep the settings; nothing is opened.

        Args:
            target: the resource's words.
            directory: the mounted Secret of `target.connection`.
            config: the processor's, for its name, key and time limits.
            pod: who publishes, named in headers: a receiver can tell whose a duplicate was.

        """
        self._directory = directory
        self._delivery, self._name = config.delivery, f"outbox {config.processor_id} {pod}"
        self._rounds = Rounds(target.topic, config, pod)
        self._producer: KafkaProducer | None = None
        self._taken = TakenMessages()

    @override
    def check(self) -> None:
        """Look at Secret and key. The brokers themselves are asked when there is something to publish."""
        self._rounds.check_key()
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
        """Drop the producer, and what it has not sent yet."""
        if self._producer is not None:
            self._producer.close()
            self._producer = None

    @override
    def deliver(self, batch: Batch, epoch: int) -> int:
        """Publish what the brokers have not taken yet of the batch, and await every confirm.

        Raises:
            MessagesFailedError: the brokers took all messages of the batch but those named.
            HandlerError: the only message of the batch failed.
            OutboxError: the brokers did not answer for all of the batch.

        """
        deadline = time.monotonic() + self._delivery.timeout.total_seconds()
        attempt = Attempt(self._taken.left_of(batch, epoch), epoch, deadline)
        try:
            self._publish(attempt)
        except BaseException as err:
            self.close()
            self._taken.add(batch, attempt.taken)
            if isinstance(err, Interrupted) and not err.draining and len(batch) == 1:  # of several, half may be in time
                raise TransientError(
                    "Kafka did not confirm one message within delivery.timeout; it is published until it does",
                    reason=Reason.TARGET_UNAVAILABLE,
                ) from err
            raise
        return self._taken.conclude(batch, attempt.messages, attempt.failed)

    def _publish(self, attempt: Attempt) -> None:
        if not attempt.messages:
            return
        producer = self._open()
        parts = [attempt.messages]
        while parts:
            part = parts.pop(0)
            if part:
                sent = self._rounds.send(attempt, part, producer)
                parts[:0] = [*sent.again, part[sent.tried :]]

    def _open(self) -> KafkaProducer:
        settings, producer = read_broker_settings(self._directory), self._producer
        if producer is None or not producer.serves(settings):
            self.close()
            producer = self._producer = KafkaProducer(settings, self._name)
        producer.begin()
        return producer


def build(target: KafkaTarget, config: ProcessorConfig, settings: Settings) -> KafkaSink | TransactionalKafkaSink:
    """Build the target, of the guarantee that is asked for."""
    sink = TransactionalKafkaSink if config.guarantee is Guarantee.TRANSACTIONAL else KafkaSink
    return sink(target, settings.connections / "target", config, settings.pod)
