"""One idempotent producer. librdkafka sends in threads of its own; all callbacks run in the thread that waits here."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import KafkaError, KafkaException, Producer

from outbox_core.errors import OutboxError, TransientError
from outbox_core.report import Reason
from outbox_worker.logs import get_logger
from outbox_worker.targets.librdkafka.answers import classify_error, describe, is_login, is_settling
from outbox_worker.targets.librdkafka.threads import check_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from confluent_kafka import Message as Report

    from outbox_worker.targets.librdkafka.records import Record
    from outbox_worker.targets.librdkafka.settings import BrokerSettings

    Answer = Callable[[KafkaError | None, Report], None]
    """Called with why a message was not taken; None, where that is called at all, says that it was."""

SLICE: Final = 0.1
"""Seconds of one wait: between two of them signals are handled."""
_MOST_TOPICS: Final = 1000
"""A producer remembers each topic that it ever sent to; beyond so many, another one is made for the next batch."""
_DOWN_SECONDS: Final = 3.0
"""So long no broker at all can be reached before they are given up."""
_TOPIC_SECONDS: Final = 2.0
"""So long a topic may be missing: the brokers may be making it."""
_MOMENT: Final = 0.001
"""Seconds for its threads to wake and build the requests: the shortest time that it knows. A busy machine may give them
no processor in it: what is not sent by then goes out when it is awaited, for only `flush` does not linger."""
_PURGE_SECONDS: Final = 1.0
"""So long threads of librdkafka may take to give up what they have."""
_log = get_logger(__name__)


class Heard:
    """What librdkafka said to a client. It does not know the client, which would otherwise outlive its last use."""

    def __init__(self, settings: BrokerSettings, *, topic: str = "", operation: str = "Write") -> None:
        """Hear nothing yet; `topic` and `operation` are what the client is for."""
        self.classify = partial(classify_error, settings=settings, topic=topic, operation=operation)
        self.fault: OutboxError | None = None
        self.fatal: KafkaError | None = None
        self.down_since: float | None = None
        self.last = ""
        self.told = 0
        """Errors and lines of the log: until they are told they count as what waits."""

    def log(self, level: int, line: str, *values: object) -> None:
        """Hear a line of its log."""
        self.told += 1
        _log.log(level, line, *values)

    def note_error(self, error: KafkaError) -> None:
        """Hear of an error that is no message's."""
        self.told += 1
        if error.fatal():
            self.fatal = self.fatal or error
        elif is_login(error):
            self.fault = self.classify(error)
        elif error.code() == KafkaError._ALL_BROKERS_DOWN:
            self.down_since = self.down_since or time.monotonic()
        else:
            self.last = describe(error)

    @property
    def is_down(self) -> bool:
        """No broker at all can be reached, for so long that they are given up."""
        return self.down_since is not None and time.monotonic() - self.down_since > _DOWN_SECONDS


class KafkaProducer:
    """Sends messages and waits for what becomes of them."""

    in_transaction = False
    """The brokers take all that is sent between two calls, or nothing."""

    def __init__(self, settings: BrokerSettings, client: str, more: Mapping[str, Any] | None = None) -> None:
        """Make it; it connects by itself.

        `client` is its name in the brokers' logs; `more` are settings of librdkafka that differ.

        Raises:
            OutboxError: a setting cannot be, or this process may have no more threads.

        """
        self.settings = settings
        self._heard = Heard(settings)
        self._is_answer_lost = False
        self.topics: set[str] = set()
        """Those that it knows, until its end."""
        config = settings.as_producer(client) | dict(more or {})
        check_threads(settings)
        try:
            self._producer = Producer(config, logger=self._heard, error_cb=self._heard.note_error)
        except KafkaException as err:
            raise self._heard.classify(err.args[0]) from None  # its text may name settings, never values

    @property
    def waiting(self) -> int:
        """How many messages have no answer yet, and what else is not heard yet."""
        return len(self._producer) + self._is_answer_lost

    @property
    def is_broken(self) -> bool:
        """Whether another one must be made: it ended, or was refused while nothing was sent."""
        return self._heard.fatal is not None or self._heard.fault is not None

    def serves(self, settings: BrokerSettings) -> bool:
        """Say whether the next batch can be sent with it: the Secret is the same, and it knows few topics."""
        return not self.is_broken and self.settings == settings and len(self.topics) <= _MOST_TOPICS

    @property
    def fatal(self) -> KafkaError | None:
        """Why it can send nothing more; None: it can."""
        return self._heard.fatal

    def begin(self) -> None:
        """Begin with a batch: what was heard before it is over, and a broker that was down has a moment more."""
        self._heard.last = ""
        if self._heard.down_since is not None:
            self._heard.down_since = time.monotonic()

    def find_topic(self, topic: str, deadline: float) -> None:
        """Have the partitions of a topic known before anything is sent to it: else a round would not be one request.

        Raises:
            OutboxError: it is not there, or nothing answers.

        """
        until = time.monotonic() + _TOPIC_SECONDS
        while self._heard.fatal is None:
            try:
                error = self._producer.list_topics(topic, timeout=5 * SLICE).topics[topic].error
            except KafkaException as err:
                self._hear(self._producer.poll, SLICE)
                self._heard.last = self._heard.last or describe(err.args[0])
                self._look(deadline)
                continue
            if error is None:
                self.topics.add(topic)
                return
            if not is_settling(error) or time.monotonic() > until:
                raise classify_error(error, self.settings, topic=topic)
            self._hear(self._producer.poll, SLICE)
            self._look(deadline)

    def send(self, record: Record, answer: Answer, deadline: float) -> bool:
        """Hand one message over, waiting for a place in the queue; False: no message can be sent any more.

        `answer` is called where the message is not taken. Outside of a transaction nothing tells of those that are: a
        call for each costs more than to send it.

        Raises:
            KafkaException: this message cannot be sent.
            OutboxError: the brokers do not take what is in the queue.

        """
        topic, key, value, headers, _ = record
        while self._heard.fatal is None:
            try:
                self._producer.produce(topic, value, key, -1, answer, None, 0, headers)
            except BufferError:
                self._hear(self._producer.flush, SLICE)  # what is in the queue would linger
                self._look(deadline)
            except KafkaException as err:
                if err.args[0].code() == KafkaError._FATAL:
                    return False
                raise
            else:
                return True
        return False

    def start_sending(self) -> None:
        """Let what was handed over go out now, and wait for no answer."""
        self._hear(self._producer.flush, _MOMENT)

    def serve(self) -> None:
        """Call what is due: reports, errors, lines of the log."""
        self._hear(self._producer.poll, 0)

    def await_answers(self, deadline: float, is_refused: Callable[[], bool]) -> bool:
        """Wait until each message that was sent has its answer; return whether each has.

        In a transaction nothing is awaited any more once a message was refused (`is_refused`).

        Raises:
            OutboxError: the brokers do not answer.

        """
        del is_refused
        while before := self.waiting:
            told = self._heard.told
            self._hear(self._producer.flush, SLICE)  # sends at once, without lingering
            if left := self.waiting:
                if left + self._heard.told - told < before:  # a message was answered
                    self._heard.down_since = None
                self._look(deadline)
        self._heard.down_since = None
        return True

    def give_up(self) -> bool:
        """Give up what has no answer: each of those messages is told as not taken; False: not in time."""
        self._producer.purge()
        until = time.monotonic() + _PURGE_SECONDS
        while self.waiting and time.monotonic() < until:
            self._hear(self._producer.poll, SLICE)
        return not self.waiting

    def _hear(self, wait: Callable[[float], int], seconds: float) -> None:
        try:
            wait(seconds)
        except KafkaException as err:  # how the end of the producer is told
            self._heard.note_error(err.args[0])
        except SystemError as err:  # the same while it called for an answer: that call failed, and the answer is lost
            if not isinstance(err.__cause__, KafkaException):
                raise
            self._is_answer_lost = True
            self._heard.note_error(err.__cause__.args[0])
            self._heard.fault = self._heard.classify(err.__cause__.args[0])

    def _look(self, deadline: float) -> None:
        heard = self._heard
        if heard.fault is not None:
            raise heard.fault
        last = f" ({heard.last})" if heard.last else ""
        if heard.is_down:
            raise self._unavailable(f"cannot be reached{last}")
        if time.monotonic() > deadline:
            raise self._unavailable(f"did not confirm all messages within delivery.timeout{last}")

    def _unavailable(self, what: str) -> TransientError:
        return TransientError(
            f"Kafka at {self.settings.servers} {what}; it is tried again until it answers",
            reason=Reason.TARGET_UNAVAILABLE,
        )

    def close(self) -> None:
        """Give up what is still waiting, and all connections. Nothing waits for the brokers."""
        self._producer.purge(blocking=False)
