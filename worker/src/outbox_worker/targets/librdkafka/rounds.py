"""Sends messages in rounds, each awaited before the next, and finds out whom an answer blames.

In a round each partition gets one request, so that nothing overtakes an earlier message of its key. A broker refuses
all of a request for one message of it: halves of those messages are sent again, until the one to blame is alone.

Of a round that an alarm ended nothing counts as taken: it may have ended `Round.note`, and that answer is lost.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from confluent_kafka import KafkaException

from outbox_core.errors import HandlerError, OutboxError, TransientError
from outbox_core.progress.barrier import key_of
from outbox_core.report import Reason
from outbox_core.spec import Blocks, Mode, PartitionKey
from outbox_worker.targets.librdkafka.answers import build_refusal, classify_error, is_not_tried, is_refusal
from outbox_worker.targets.librdkafka.records import RecordBuilder
from outbox_worker.targets.librdkafka.settings import ROUND_BYTES, ROUND_MESSAGES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from confluent_kafka import KafkaError
    from confluent_kafka import Message as Report

    from outbox_core.config import ProcessorConfig
    from outbox_core.message import Message
    from outbox_core.progress.checkpoint import Checkpoint
    from outbox_worker.targets.librdkafka.producer import KafkaProducer
    from outbox_worker.targets.librdkafka.settings import BrokerSettings


class Refused(NamedTuple):
    """A message in a request that the brokers refused."""

    message: Message
    error: KafkaError
    topic: str
    partition: int


@dataclass(slots=True)
class Attempt:
    """One attempt at a batch: what was taken, which messages failed and why, and the keys that wait behind them.

    Attributes:
        blocked: keys, each with the place in the batch behind which its messages wait: those before are sent again.

    """

    messages: list[Message]
    epoch: int
    deadline: float
    taken: list[Message] = field(default_factory=list)
    failed: dict[Checkpoint, HandlerError] = field(default_factory=dict)
    blocked: dict[str, int] = field(default_factory=dict)
    _order: dict[Checkpoint, int] = field(default_factory=dict)

    def block(self, key: str, message: Message) -> None:
        """Let the messages of a key wait that come after this one."""
        at = self._find(message)
        self.blocked[key] = min(at, self.blocked.get(key, at))

    def is_blocked(self, key: str | None, message: Message) -> bool:
        """Say whether a message waits behind one of its key that failed."""
        return key is not None and key in self.blocked and self._find(message) > self.blocked[key]

    def _find(self, message: Message) -> int:
        if not self._order:
            self._order = {each.checkpoint: at for at, each in enumerate(self.messages)}
        return self._order[message.checkpoint]


@dataclass(slots=True)
class Round:
    """Messages that were handed over together, and what the brokers said of them.

    Attributes:
        part: of which they are the first.
        before: how many messages of the attempt were answered before.
        tried: how many of the part are in it.
        given: messages that were handed over; the others failed by themselves.
        others: places of those that were not taken.
        refused: those of them that may be to blame themselves.
        again: messages to try again, in parts that are to be sent one after the other. Without a refusal, in a
            transaction: the client gave them up because of an earlier refusal.
        fault: what no message is to blame for, the first of it.

    """

    settings: BrokerSettings
    part: list[Message]
    before: int
    tried: int = 0
    given: list[Message] = field(default_factory=list)
    others: set[Checkpoint] = field(default_factory=set)
    refused: list[Refused] = field(default_factory=list)
    again: list[list[Message]] = field(default_factory=list)
    fault: OutboxError | None = None

    def note(self, message: Message, topic: str, error: KafkaError | None, report: Report) -> None:
        """Hear of one message; `error`: why it was not taken."""
        if error is None:
            return
        self.others.add(message.checkpoint)
        if is_refusal(error):
            partition = report.partition()
            self.refused.append(Refused(message, error, topic, -1 if partition is None else partition))
        elif not is_not_tried(error):
            self.note_fault(error, topic)

    def note_fault(self, error: KafkaError, topic: str) -> None:
        """Hear of what no message is to blame for."""
        self.fault = self.fault or classify_error(error, self.settings, topic=topic)

    def find_taken(self) -> list[Message]:
        """Return the messages that were taken, once all were answered."""
        return [each for each in self.given if each.checkpoint not in self.others] if self.others else self.given


class Rounds:
    """Sends the messages of one processor."""

    def __init__(self, topic: str, config: ProcessorConfig, pod: str) -> None:
        """Keep what decides about a message's record, and what waits behind one that fails; `topic` is a template."""
        self._delivery = config.delivery
        self.key = config.delivery.message_key or PartitionKey()
        self._records = RecordBuilder(topic, self.key, processor_id=config.processor_id, pod=pod)

    def send(self, attempt: Attempt, part: list[Message], producer: KafkaProducer) -> Round:
        """Send the first messages of a part, as many as make a round, and await the answers.

        Raises:
            OutboxError: no message is to blame.

        """
        sent = self.begin(attempt, part, producer)
        self.finish(attempt, sent, producer)
        return sent

    def begin(self, attempt: Attempt, part: list[Message], producer: KafkaProducer) -> Round:
        """Hand over the first messages of a part, as many as make a round; where that fails, `finish` says why."""
        begun = Round(producer.settings, part, len(attempt.taken) + len(attempt.failed))
        size = 0
        epoch, deadline = attempt.epoch, attempt.deadline
        for message in part:
            topic = ""
            try:
                if attempt.blocked:
                    self._look_for_blocked(message, attempt)
                record = self._records.build(message, epoch)
                topic = record.topic
                if size and size + record.size > ROUND_BYTES:
                    break
                if topic not in producer.topics:
                    producer.find_topic(topic, deadline)
                if not producer.send(record, partial(begun.note, message, topic), deadline):
                    break
                begun.given.append(message)
                size += record.size
            except (KafkaException, OutboxError) as err:
                if not self._is_its_own(err, message, topic, attempt, begun):
                    break
            begun.tried += 1
            if size >= ROUND_BYTES or begun.tried >= ROUND_MESSAGES:
                break
        return begun

    def finish(self, attempt: Attempt, begun: Round, producer: KafkaProducer) -> None:
        """Await the answers to a round that was begun.

        Raises:
            OutboxError: no message is to blame.

        """
        are_all_answered = False
        try:
            are_all_answered = producer.await_answers(attempt.deadline, lambda: bool(begun.refused))
        except OutboxError:
            are_all_answered = producer.give_up()
            raise
        finally:
            if are_all_answered:
                attempt.taken += begun.find_taken()
        if producer.fatal is not None and not begun.refused:
            begun.note_fault(producer.fatal, "")
        if begun.fault is not None and not (producer.in_transaction and begun.refused):
            raise begun.fault
        for each in find_blamed(begun.refused):
            self._fail(attempt, each.message, build_refusal(each.error, each.topic, each.message.checkpoint))
        if len(attempt.taken) + len(attempt.failed) - begun.before == begun.tried:
            return
        done = {message.checkpoint for message in attempt.taken} | set(attempt.failed)
        left = [message for message in begun.part[: begun.tried] if message.checkpoint not in done]
        if left and not begun.refused and not producer.in_transaction:
            raise TransientError(
                "the Kafka client gave messages up and does not say why; they are tried again with another producer",
                reason=Reason.TARGET_UNAVAILABLE,
            )
        begun.again = halves(left)

    def _is_its_own(
        self, error: KafkaException | OutboxError, message: Message, topic: str, attempt: Attempt, begun: Round
    ) -> bool:
        """Note why a message is not sent; say whether it failed by itself, so that those behind it are sent."""
        if isinstance(error, HandlerError):
            self._fail(attempt, message, error)
        elif isinstance(error, OutboxError):  # what was given before it is awaited first
            begun.fault = begun.fault or error
            return False
        else:
            refusal: KafkaError = error.args[0]
            if not is_refusal(refusal):
                begun.note_fault(refusal, topic)
                return False
            self._fail(attempt, message, build_refusal(refusal, topic, message.checkpoint))
        return True

    def _fail(self, attempt: Attempt, message: Message, error: HandlerError) -> None:
        attempt.failed[message.checkpoint] = error
        if (behind := self._blocked_by(message)) is not None:
            attempt.block(behind, message)

    def _blocked_by(self, message: Message) -> str | None:
        """Return the key that waits when this message fails; None: nothing does."""
        if self._delivery.mode is Mode.COMPETING or self._delivery.blocking is Blocks.NOTHING:
            return None
        return key_of(message, self.key)

    def _look_for_blocked(self, message: Message, attempt: Attempt) -> None:
        """Refuse a message that waits behind one of its key that failed."""
        if attempt.is_blocked(self._blocked_by(message), message):
            raise HandlerError(
                "not published: it waits behind one of its key that failed", reason=Reason.MESSAGE_REJECTED
            )


def find_blamed(refused: Iterable[Refused]) -> list[Refused]:
    """Find those that were alone in their request: no other message can be to blame."""
    refused = list(refused)
    together = Counter((each.topic, each.partition) for each in refused)
    return [each for each in refused if together[each.topic, each.partition] == 1]


def halves(messages: list[Message]) -> list[list[Message]]:
    """Divide messages in two, in their order."""
    half = (len(messages) + 1) // 2
    return [messages[:half], messages[half:]]
