"""A producer with a transactional id: another one of the same name shuts it out, for good."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from confluent_kafka import KafkaException
from typing_extensions import override

from outbox_core.errors import ConfigurationError, OutboxError, TransientError
from outbox_core.report import Reason
from outbox_worker.targets.librdkafka.answers import classify_error
from outbox_worker.targets.librdkafka.producer import SLICE, KafkaProducer

if TYPE_CHECKING:
    from collections.abc import Callable

    from confluent_kafka import KafkaError
    from confluent_kafka import Message as Report

    from outbox_worker.targets.librdkafka.settings import BrokerSettings

_ANSWER_SLICE: Final = 0.01
"""Seconds of one wait for answers: once the client sends nothing more, nothing but the end of a wait tells."""
_FIRST_WAIT: Final = 0.01
"""Seconds of the first wait while former producers are shut out."""
_LONG_WAIT: Final = 5.0
"""Seconds of a wait after which the topics are looked for."""
_MARGIN: Final = 10.0
"""Seconds beyond delivery.timeout: the brokers do not end a transaction that is still worked on."""
_LONGEST: Final = 900.0
"""What brokers allow where nothing else is set (`transaction.max.timeout.ms`)."""

_LINGER: Final = 1000
"""Milliseconds, less than a message may take. Of a round that is more than one request an abort takes all back."""


class TransactionalProducer(KafkaProducer):
    """Publishes in transactions. After an error other than a refused message it is closed and another one made."""

    in_transaction = True

    def __init__(self, settings: BrokerSettings, client: str, name: str, timeout: float) -> None:
        """Make it; it connects by itself. `name` is the transactional id; a batch may take `timeout` seconds."""
        milliseconds = int(min(timeout + _MARGIN, _LONGEST) * 1000)
        super().__init__(
            settings, client,
            {"transactional.id": name, "transaction.timeout.ms": milliseconds, "message.timeout.ms": milliseconds,
             "delivery.report.only.error": False, "linger.ms": _LINGER},
        )  # fmt: skip
        self.name = name
        self._is_open = False
        self._made = time.monotonic()
        self.shut_out_after: float | None = None
        """Seconds that it took to shut the former ones out; None: they are not."""

    def try_shut_out(self, deadline: float, seconds: float = 0.0) -> float:
        """Begin, or go on, to end what former producers of this name have open, and to refuse all that they may send.

        Each call lets the client ask the brokers at once. By itself it asks again after half a second, and once is
        never enough: nothing is connected at first, and then the brokers are still taking back what was open. It waits
        for so many seconds until it is done, and returns after how many to call again; 0: it is done.

        Raises:
            OutboxError: the brokers do not answer, or do not allow it.

        """
        if self.shut_out_after is not None:
            return 0.0
        is_done = self._try(self._producer.init_transactions, seconds, deadline)
        lasted = time.monotonic() - self._made
        if is_done:
            self.shut_out_after = lasted
            return 0.0
        return min(max(_FIRST_WAIT, lasted / 8), SLICE)

    def shut_out(self, deadline: float) -> None:
        """Wait until it is done.

        Raises:
            OutboxError: the brokers do not answer, or do not allow it.

        """
        seconds = self.try_shut_out(deadline)
        while seconds:
            seconds = self.try_shut_out(deadline, seconds)

    def begin_transaction(self, deadline: float) -> None:
        """Begin a transaction.

        Raises:
            OutboxError: this producer can send nothing more, or the time is over.

        """
        self.begin()
        self._look(deadline)
        try:
            self._producer.begin_transaction()
        except KafkaException as err:
            raise self._classify(err.args[0]) from None
        self._is_open = True

    @override
    def await_answers(self, deadline: float, is_refused: Callable[[], bool]) -> bool:
        """Wait for the answers, but for no longer than until the transaction can only be taken back."""
        looked = time.monotonic()
        while self.waiting and not is_refused():
            self._hear(self._producer.flush, _ANSWER_SLICE)
            if self.waiting:
                if self._must_abort():
                    return False
                self._look(deadline)
                looked = self._look_for_topics(looked, deadline)
        return not is_refused()

    def _look_for_topics(self, last: float, deadline: float) -> float:
        """Where a wait is long, look whether all topics are there; return when they were looked for.

        The client asks without end to add a topic that was deleted to the transaction, and says nothing of it.
        """
        if time.monotonic() - last < _LONG_WAIT:
            return last
        for topic in list(self.topics):
            self.find_topic(topic, deadline)
        return time.monotonic()

    def _must_abort(self) -> bool:
        """Say whether nothing more is sent: after a refusal the client finds that its sequence has a gap.

        Nothing but the answer to another `begin_transaction` tells, which changes nothing.
        """
        try:
            self._producer.begin_transaction()
        except KafkaException as err:
            return bool(err.args[0].txn_requires_abort())
        return False

    def abort(self, deadline: float) -> None:
        """Take back all that was sent since `begin_transaction`.

        Raises:
            OutboxError: the brokers do not answer.

        """
        if self._is_open:
            self._await(self._producer.abort_transaction, deadline)
            self._is_open = False

    def commit(self, topic: str, partition: int, key: bytes, value: bytes, deadline: float) -> int:
        """Commit the transaction with a record about it; return the record's offset.

        Raises:
            OutboxError: it may be committed or not: only another producer that shuts this one out can tell.

        """
        offset, refused = -1, None

        def note(error: KafkaError | None, report: Report) -> None:
            nonlocal offset, refused
            place = report.offset()
            offset, refused = -1 if place is None else place, error

        self.topics.add(topic)
        try:
            self._producer.produce(topic, value, key, partition=partition, on_delivery=note)
            self._await(self._producer.commit_transaction, deadline)
        except KafkaException as err:
            raise self._refused(err.args[0], topic) from None
        except OutboxError:
            if refused is not None:
                raise self._refused(refused, topic) from None
            raise
        self._is_open = False
        self.serve()
        if offset < 0:  # committed; the next producer finds the record itself
            raise TransientError("Kafka did not say where its record is; it is read", reason=Reason.TARGET_UNAVAILABLE)
        return offset

    def _refused(self, error: KafkaError, topic: str) -> OutboxError:
        if error.name() in ("MSG_SIZE_TOO_LARGE", "RECORD_LIST_TOO_LARGE"):
            return ConfigurationError(
                f"the record about a batch is too large for topic {topic} ({error.name()}): raise its "
                "`max.message.bytes`, or lower delivery.batchSize"
            )
        return classify_error(error, self.settings, topic=topic)

    def _await(self, act: Callable[[float], None], deadline: float) -> None:
        looked = time.monotonic()
        while not self._try(act, SLICE, deadline):
            looked = self._look_for_topics(looked, deadline)

    def _try(self, act: Callable[[float], None], seconds: float, deadline: float) -> bool:
        """Let it go on for so long; say whether it is done."""
        try:
            act(seconds)
        except KafkaException as err:
            error: KafkaError = err.args[0]
            if error.fatal() or error.txn_requires_abort() or not error.retriable():
                raise self._classify(error) from None
            self.serve()
            self._look(deadline)
            return False
        return True

    def _classify(self, error: KafkaError) -> OutboxError:
        if error.fatal():
            self._heard.note_error(error)
        return self._heard.fault or classify_error(error, self.settings, transaction=self.name)

    @override
    def close(self) -> None:
        self._is_open = False
        super().close()
