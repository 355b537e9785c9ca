"""PURE: a message as a record of Kafka. What is the same for many messages is built once."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from outbox_core.progress.barrier import key_of
from outbox_worker.targets.templates import build_refusal, fill_template
from outbox_worker.targets.trace_context import read_trace

if TYPE_CHECKING:
    from datetime import datetime

    from outbox_core.message import Message
    from outbox_core.spec import PartitionKey

    Headers = list[tuple[str, str | bytes | None]]

_TOPIC: Final = re.compile(r"(?!\.{1,2}$)[a-zA-Z0-9._-]{1,249}")
_OVERHEAD: Final = 64
"""Bytes that a record takes at most beside its key, value and headers."""
_NEW: Final = tuple.__new__
_NAME: Final = 30
"""Bytes that the name of a header and the lengths around it take at most."""


class Record(NamedTuple):
    """What is sent of one message; `size`: how many bytes it takes in a request at most."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: Headers
    size: int


class RecordBuilder:
    """Builds the records of one processor."""

    def __init__(self, topic: str, key: PartitionKey, *, processor_id: str, pod: str) -> None:
        """Keep what every record has: `topic` is the resource's template, the others are headers."""
        self._template, self._key = topic, key
        self._is_plain = key.data is None and key.metadata is None and key.column in (None, "partition_key")
        self._fixed = topic if _TOPIC.fullmatch(topic) else None
        self._told = [("x-outbox-processor", processor_id.encode()), ("x-outbox-pod", pod.encode())]
        self._of_epoch: tuple[int, Headers, int] = (-1, [], 0)
        self._time: tuple[datetime | None, bytes] = (None, b"")

    def build(self, message: Message, epoch: int) -> Record:
        """Build the record of a message; headers: its place, the publisher's, those of its row, its trace context.

        Raises:
            HandlerError: there is no topic for it.

        """
        if self._of_epoch[0] != epoch:
            self._begin_epoch(epoch)
        _, told, size = self._of_epoch
        _, _, message_id, message_type, publication_id, partition_key, data, metadata, scheduled, _ = message
        topic = self._fixed if self._fixed is not None else build_topic(message, self._template)
        at, name = message.pair.encode(), message_id.encode()
        headers = [("x-outbox-checkpoint", at), *told, ("x-outbox-message-id", name)]
        size += len(at) + len(name)
        if message_type is not None:
            text = message_type.encode()
            headers.append(("x-outbox-message-type", text))
            size += _NAME + len(text)
        if publication_id is not None:
            text = publication_id.encode()
            headers.append(("x-outbox-publication", text))
            size += _NAME + len(text)
        if partition_key is not None:
            text = partition_key.encode()
            headers.append(("x-outbox-partition-key", text))
            size += _NAME + len(text)
        if scheduled is not None:
            if self._time[0] != scheduled:  # messages of one transaction have the same
                self._time = (scheduled, scheduled.isoformat().encode())
            headers.append(("x-outbox-scheduled", self._time[1]))
            size += _NAME + len(self._time[1])
        if data is None:
            headers.append(("x-outbox-tombstone", b"true"))
            size += _NAME + 4
        if metadata is not None and "traceparent" in metadata:
            for header, stored in read_trace(metadata).items():
                headers.append((header, stored.encode()))
                size += _NAME + len(stored)
        key = partition_key if self._is_plain else key_of(message, self._key)
        encoded, value = None if key is None else key.encode(), None if data is None else data.encode()
        size += (0 if encoded is None else len(encoded)) + (0 if value is None else len(value))
        return _NEW(Record, (topic, encoded, value, headers, size))  # one for each message: `Record(…)` takes longer

    def _begin_epoch(self, epoch: int) -> None:
        """Keep what all records of an epoch have, and how many bytes that takes beside place and message id."""
        told: Headers = [*self._told, ("x-outbox-epoch", str(epoch).encode())]
        size = _OVERHEAD + 2 * _NAME + sum(_NAME + len(text or b"") for _, text in told)
        self._of_epoch = (epoch, told, size)


def build_topic(message: Message, template: str) -> str:
    """Fill in the template.

    Raises:
        HandlerError: the row lacks a value, or what comes out is no name of a topic.

    """
    topic = fill_template(template, message, field="target.kafka.topic")
    if not _TOPIC.fullmatch(topic):
        why = "a topic has 1 to 249 of the characters a-z, A-Z, 0-9, '.', '_' and '-'"
        raise build_refusal(message, f"its topic would be {topic[:300]!r}, and {why}")
    return topic
