"""The compacted topic in which each transaction writes down what it published: create it, and read a unit's records.

Partition n of the topic is that of partition n of the processor. So what a unit has written ends where its partition
ends: no open transaction of another unit stands before it, and few records are read to find the last one.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._listoffsets import EarliestSpec, LatestSpec, OffsetSpec
from confluent_kafka.cimpl import NewPartitions, NewTopic

from outbox_core.errors import ConfigurationError, TransientError
from outbox_core.plain import plain_count
from outbox_core.report import Reason
from outbox_worker.logs import get_logger
from outbox_worker.targets.librdkafka.answers import is_login, is_settling
from outbox_worker.targets.librdkafka.producer import SLICE, Heard
from outbox_worker.targets.librdkafka.published import Record
from outbox_worker.targets.librdkafka.threads import check_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from confluent_kafka import Message as Report

    from outbox_worker.targets.librdkafka.published import Unit
    from outbox_worker.targets.librdkafka.settings import BrokerSettings

_SETTINGS: Final = {
    "cleanup.policy": "compact",
    "min.cleanable.dirty.ratio": "0.1",
    "segment.bytes": str(64 * 1024 * 1024),
    "max.message.bytes": str(8 * 1024 * 1024),
    "message.timestamp.type": "LogAppendTime",  # else brokers refuse the records of a worker whose clock is ahead
}
_BACK: Final = 64
"""Offsets before the end where a unit's last record is looked for first; 16 times as many each time it is not there."""
_log = get_logger(__name__)


class CheckpointTopic:
    """A look at the topic, or several in a row.

    Each call raises OutboxError where it cannot be done within the deadline; then another one is made.
    """

    def __init__(self, topic: str, settings: BrokerSettings, client: str, deadline: float) -> None:
        """Make the clients, which connect by themselves; `client` is their name in the brokers' logs.

        Raises:
            OutboxError: a setting cannot be, or this process may have no more threads.

        """
        self._topic, self._settings = topic, settings
        self._is_there = False
        self._heard = Heard(settings, topic=topic, operation="Read")
        self.begin(deadline)
        config: dict[str, Any] = settings.as_client(client) | {"error_cb": self._heard.note_error, "logger": _log}
        try:
            check_threads(settings)
            self._admin = AdminClient(config)
            check_threads(settings)
            self._consumer = Consumer(
                config
                | {
                    "group.id": f"outbox {topic}",  # no such group is made: partitions are assigned, nothing is stored
                    "enable.auto.commit": False,
                    "isolation.level": "read_committed",
                    "enable.partition.eof": True,
                    "fetch.wait.max.ms": 10,  # the end is told by an answer that waited so long in vain
                    "auto.offset.reset": "error",
                    "allow.auto.create.topics": False,
                }
            )
        except KafkaException as err:
            raise self._heard.classify(err.args[0]) from None

    def begin(self, deadline: float) -> None:
        """Begin with a look: a broker that was down has a moment more."""
        self.deadline = deadline
        self._heard.down_since = None
        self._hidden: tuple[int, int] | None = None

    def close(self) -> None:
        """Give up all connections."""
        self._consumer.close()
        del self._consumer, self._admin  # their threads end now, also where the traceback of an error holds this object

    def ensure(self, count: int) -> None:
        """Look once that the topic is there, with enough partitions; after that both clients know its brokers.

        librdkafka drops its first connection once the broker at its end has a number, with the requests that are under
        way there, and asks again for a topic's leaders after one second or three. Only `list_topics` asks at once.
        """
        if self._is_there:
            return
        found = self._count_partitions(self._consumer)
        if not found:
            _log.info("creating the checkpoint topic", extra={"topic": self._topic, "partitions": count})
            new = NewTopic(self._topic, num_partitions=count, replication_factor=-1, config=dict(_SETTINGS))
            self._change(lambda: self._admin.create_topics([new])[self._topic], "create it", "Create", count)
        elif found < count:
            more = NewPartitions(self._topic, count)
            change = f"give it {plain_count(count, 'partition')} instead of {found}"
            self._change(lambda: self._admin.create_partitions([more])[self._topic], change, "Alter", count)
        for client in (self._consumer, self._admin):
            while self._count_partitions(client) < count:
                time.sleep(SLICE)
                self._look()
        self._is_there = True

    def _count_partitions(self, client: Consumer | AdminClient) -> int:
        while True:
            try:
                found = client.list_topics(self._topic, timeout=5 * SLICE).topics[self._topic]
            except KafkaException as err:
                self._heard.note_error(err.args[0])
                client.poll(SLICE)
                self._look()
                continue
            if found.error is None:
                return len(found.partitions)
            if not is_settling(found.error):
                raise self._heard.classify(found.error)
            return 0

    def _change(self, ask: Callable[[], Any], what: str, operation: str, count: int) -> None:
        try:
            self._result(ask())
        except KafkaException as err:
            error: KafkaError = err.args[0]
            if error.code() in (KafkaError.TOPIC_ALREADY_EXISTS, KafkaError.INVALID_PARTITIONS):
                return  # another process was first
            if error.retriable() or error.code() in (KafkaError._TIMED_OUT, KafkaError.REQUEST_TIMED_OUT):
                raise self._heard.classify(error) from None
            raise ConfigurationError(
                f"guarantee Transactional needs the topic {self._topic}, and Kafka at {self._settings.servers} does "
                f"not let us {what} ({error.name()}: {error.str()}): create it with cleanup.policy=compact and at "
                f"least {plain_count(count, 'partition')}, name another one in target.kafka.checkpointTopic, "
                f"or allow the user the operation {operation} on it",
                reason=Reason.PERMISSION_DENIED if is_login(error) else Reason.INVALID_CONFIGURATION,
                classes=(error.name(),),
            ) from None

    def find_end(self, partition: int) -> int:
        """Where all ends that is there, open transactions among it: a committed record may lie behind one."""
        return self._offset(partition, LatestSpec())  # type: ignore[no-untyped-call]

    def find(self, unit: Unit, end: int) -> list[tuple[int, Record]]:
        """Find the last committed record of each kind before `end`, with its offset; the latest is the first."""
        low = self._offset(unit.partition, EarliestSpec())  # type: ignore[no-untyped-call]
        back, last = _BACK, None
        while last is None:
            start = max(low, end - back)
            for report in self._read(unit.partition, start, end):
                if report.key() in (unit.key(held=False), unit.key(held=True)):
                    last = self._decode(report) if report.value() else None  # a person deleted it
            if start == low:
                break
            back *= 16
        if last is None:
            return []
        other = last[1].other
        reports = [] if other is None else self._read(unit.partition, max(low, other), other + 1)
        return [last, *(self._decode(each) for each in reports if each.offset() == other)]

    def _decode(self, report: Report) -> tuple[int, Record]:
        try:
            return report.offset() or 0, Record.decode(report.value() or b"")
        except (ValueError, KeyError, TypeError) as err:
            raise ConfigurationError(
                f"topic {self._topic} has a record at offset {report.offset()} of partition {report.partition()} that "
                f"cannot be read ({err}): use a worker of the version that wrote it, or another "
                "target.kafka.checkpointTopic"
            ) from err

    def _offset(self, partition: int, spec: OffsetSpec) -> int:
        place = TopicPartition(self._topic, partition)
        while True:
            asked = self._admin.list_offsets(
                {place: spec}, isolation_level=IsolationLevel.READ_UNCOMMITTED, request_timeout=5.0
            )
            try:
                offset: int = self._result(asked[place]).offset
            except KafkaException as err:
                error: KafkaError = err.args[0]
                if is_login(error):
                    raise self._heard.classify(error) from None
                time.sleep(SLICE)
                self._look()
            else:
                return offset

    def _read(self, partition: int, start: int, end: int) -> Iterator[Report]:
        if start >= end:
            return
        self._consumer.assign([TopicPartition(self._topic, partition, start)])
        while True:
            report = self._consumer.poll(SLICE)
            if report is None:
                self._look()
                continue
            error, offset = report.error(), report.offset() or 0
            if error is None:
                if offset < end:
                    yield report
                offset += 1  # the next one
            elif is_login(error) or error.code() == KafkaError._AUTO_OFFSET_RESET:
                raise self._heard.classify(error)
            elif error.code() != KafkaError._PARTITION_EOF:
                self._look()
                continue
            if offset >= end:
                self._consumer.unassign()
                self._hidden = None
                return
            if error is not None:
                self._hidden = (partition, offset)

    def _result(self, future: Any) -> Any:
        """Wait for an answer in slices, so that signals are handled.

        An error is raised as another one. If the future's own were raised, it would know all frames that it passed, and
        they it: what they hold, among it a producer, would live until the collector finds it.
        """
        while True:
            try:
                error = future.exception(SLICE)
            except TimeoutError:
                self._admin.poll(0)
                self._look()
            else:
                if error is None:
                    return future.result()
                raise KafkaException(*error.args)

    def _look(self) -> None:
        if self._heard.fault is not None:
            raise self._heard.fault
        if (is_down := self._heard.is_down) or time.monotonic() > self.deadline:
            what = "cannot be reached" if is_down else "did not answer within delivery.timeout"
            if self._hidden is not None and not is_down:
                partition, offset = self._hidden
                what = (
                    f"has a transaction that began at offset {offset} of partition {partition} and did not end within "
                    "delivery.timeout; nothing behind it can be read (see docs/kafka.md)"
                )
            raise TransientError(
                f"Kafka at {self._settings.servers} {what}: what former owners published is not known yet (topic "
                f"{self._topic}); it is tried again until it answers",
                reason=Reason.TARGET_UNAVAILABLE,
            )
