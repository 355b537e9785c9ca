"""Target `kafka`: a batch is handed to an idempotent producer and counts as delivered when the brokers confirmed all.

AtLeastOnce: what is published again has the same header `x-outbox-message-id`. A batch is sent in rounds, each awaited
before the next: in a round each partition gets one request, so that nothing overtakes an earlier message of its key. A
broker refuses all of a request for one message of it: halves of those messages are sent again, until the one to blame
is alone. It is named in the error; what was taken is not published again by this process.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from confluent_kafka import KafkaException
from typing_extensions import override

from outbox_core.errors import ConfigurationError, HandlerError, OutboxError, TransientError
from outbox_core.ports import OutsideTransaction
from outbox_core.processor.taken import TakenMessages
from outbox_core.progress.barrier import key_of
from outbox_core.report import Reason
from outbox_core.spec import Blocks, Mode, PartitionKey
from outbox_worker.shutdown import Interrupted
from outbox_worker.targets.librdkafka.answers import build_refusal, classify_error, is_not_tried, is_refusal
from outbox_worker.targets.librdkafka.producer import KafkaProducer
from outbox_worker.targets.librdkafka.records import RecordBuilder
from outbox_worker.targets.librdkafka.settings import ROUND_BYTES, ROUND_MESSAGES, read_broker_settings

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from confluent_kafka import KafkaError

    from outbox_core.config import ProcessorConfig
    from outbox_core.message import Batch, Message
    from outbox_core.progress.checkpoint import Checkpoint
    from outbox_core.spec.target import KafkaTarget
    from outbox_worker.settings import Settings
    from outbox_worker.targets.librdkafka.records import Record
    from outbox_worker.targets.librdkafka.settings import BrokerSettings

_MOST_TOPICS: Final = 1000
"""A producer remembers each topic that it ever sent to; beyond so many, another one is made for the next batch."""


class Refused(NamedTuple):
    """A message in a request that the brokers refused."""

    message: Message
    error: KafkaError
    topic: str
    partition: int


@dataclass(slots=True)
class _Attempt:
    """One attempt at a batch: what was taken, which messages failed and why, and the keys that wait behind them."""

    messages: list[Message]
    epoch: int
    deadline: float
    taken: list[Message] = field(default_factory=list)
    failed: dict[Checkpoint, HandlerError] = field(default_factory=dict)
    blocked: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Answers:
    """What the brokers said of one round. `fault`: what no message is to blame for, the first of it."""

    attempt: _Attempt
    settings: BrokerSettings
    refused: list[Refused] = field(default_factory=list)
    fault: OutboxError | None = None

    def note(self, message: Message, topic: str, error: KafkaError | None, partition: int) -> None:
        if error is None:
            self.attempt.taken.append(message)
        elif is_refusal(error):
            self.refused.append(Refused(message, error, topic, partition))
        elif not is_not_tried(error):
            self.note_fault(error, topic)

    def note_fault(self, error: KafkaError, topic: str) -> None:
        found = classify_error(error, self.settings.servers, topic=topic, user=self.settings.username)
        self.fault = self.fault or found


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
        self._key = config.delivery.message_key or PartitionKey()
        self._records = RecordBuilder(target.topic, self._key, processor_id=config.processor_id, pod=pod)
        self._producer: KafkaProducer | None = None
        self._taken = TakenMessages()

    @override
    def check(self) -> None:
        """Look at Secret and key. The brokers themselves are asked when there is something to publish."""
        if self._key.column not in (None, "partition_key"):
            where = "source.table.columns.partitionKey"
            raise ConfigurationError(f"target.kafka sees the key in a column only where {where} names it: do that")
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
        attempt = _Attempt(self._taken.left_of(batch, epoch), epoch, deadline)
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

    def _publish(self, attempt: _Attempt) -> None:
        if not attempt.messages:
            return
        producer = self._open()
        parts = [attempt.messages]
        while parts:
            part = parts.pop(0)
            if part:
                parts[:0] = self._send_round(attempt, part, producer)

    def _open(self) -> KafkaProducer:
        settings, producer = read_broker_settings(self._directory), self._producer
        if (
            producer is None
            or producer.is_broken
            or producer.settings != settings
            or len(producer.topics) > _MOST_TOPICS
        ):
            self.close()
            producer = self._producer = KafkaProducer(settings, self._name)
        producer.begin()
        return producer

    def _send_round(self, attempt: _Attempt, part: list[Message], producer: KafkaProducer) -> list[list[Message]]:
        """Send the first messages of a part, as many as make a round; return what is left of it, in parts.

        Raises:
            OutboxError: no message is to blame.

        """
        answers, count, size = _Answers(attempt, producer.settings), 0, 0
        answered = len(attempt.taken) + len(attempt.failed)
        for message in part:
            if (taken := self._hand_over(message, answers, producer, room=ROUND_BYTES - size, first=not size)) is None:
                break
            count, size = count + 1, size + taken
            if size >= ROUND_BYTES or count >= ROUND_MESSAGES:
                break
        producer.await_answers(attempt.deadline)
        if producer.fatal is not None and not answers.refused:
            answers.note_fault(producer.fatal, "")
        if answers.fault is not None:
            raise answers.fault
        for each in find_blamed(answers.refused):
            self._fail(attempt, each.message, build_refusal(each.error, each.topic, each.message.checkpoint))
        if len(attempt.taken) + len(attempt.failed) - answered == count:
            return [part[count:]]
        done = {message.checkpoint for message in attempt.taken} | set(attempt.failed)
        left = [message for message in part[:count] if message.checkpoint not in done]
        if left and not answers.refused:
            raise TransientError(
                "the Kafka client gave messages up and does not say why; they are tried again with another producer",
                reason=Reason.TARGET_UNAVAILABLE,
            )
        half = (len(left) + 1) // 2
        return [left[:half], left[half:], part[count:]]

    def _hand_over(
        self, message: Message, answers: _Answers, producer: KafkaProducer, *, room: int, first: bool
    ) -> int | None:
        """Give one message to the producer; return its size. None: it is not for this round, or no more can be sent."""
        attempt = answers.attempt
        try:
            record = self._build_record(message, attempt)
            if record.size > room and not first:
                return None
            producer.find_topic(record.topic, attempt.deadline)
            given = producer.send(record, partial(answers.note, message, record.topic), attempt.deadline)
        except HandlerError as err:
            self._fail(attempt, message, err)
        except KafkaException as err:
            error: KafkaError = err.args[0]
            if not is_refusal(error):
                answers.note_fault(error, record.topic)
                return None
            self._fail(attempt, message, build_refusal(error, record.topic, message.checkpoint))
        except OutboxError as err:  # what was given before it is awaited first
            answers.fault = answers.fault or err
            return None
        else:
            return record.size if given else None
        return 0

    def _fail(self, attempt: _Attempt, message: Message, error: HandlerError) -> None:
        attempt.failed[message.checkpoint] = error
        if (behind := self._blocked_by(message)) is not None:
            attempt.blocked.add(behind)

    def _blocked_by(self, message: Message) -> str | None:
        """Return the key that waits when this message fails; None: nothing does."""
        if self._delivery.mode is Mode.COMPETING or self._delivery.blocking is Blocks.NOTHING:
            return None
        return key_of(message, self._key)

    def _build_record(self, message: Message, attempt: _Attempt) -> Record:
        """Build what is sent.

        Raises:
            HandlerError: the message cannot be sent now.

        """
        if attempt.blocked and self._blocked_by(message) in attempt.blocked:
            raise HandlerError(
                "not published: it waits behind one of its key that failed", reason=Reason.MESSAGE_REJECTED
            )
        return self._records.build(message, attempt.epoch)


def find_blamed(refused: Iterable[Refused]) -> list[Refused]:
    """Find those that were alone in their request: no other message can be to blame."""
    refused = list(refused)
    together = Counter((each.topic, each.partition) for each in refused)
    return [each for each in refused if together[each.topic, each.partition] == 1]


def build(target: KafkaTarget, config: ProcessorConfig, settings: Settings) -> KafkaSink:
    """Build the target."""
    return KafkaSink(target, settings.connections / "target", config, settings.pod)
