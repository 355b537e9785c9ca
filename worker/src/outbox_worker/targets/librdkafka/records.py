"""PURE: a message as a record of Kafka. What is the same for many messages is built once."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from outbox_core.progress.barrier import key_of
from outbox_worker.targets.templates import build_refusal, fill_template
from outbox_worker.targets.trace_context import read_trace

if TYPE_CHECKING:
    from outbox_core.message import Message
    from outbox_core.spec import PartitionKey

    Headers = list[tuple[str, str | bytes | None]]

_TOPIC: Final = re.compile(r"(?!\.{1,2}$)[a-zA-Z0-9._-]{1,249}")
_OVERHEAD: Final = 64
"""Bytes that a record takes at most beside its key, value and headers."""
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
        self._fixed = topic if _TOPIC.fullmatch(topic) else None
        self._told = [("x-outbox-processor", processor_id.encode()), ("x-outbox-pod", pod.encode())]
        self._of_epoch: tuple[int, Headers] = (-1, [])

    def build(self, message: Message, epoch: int) -> Record:
        """Build the record of a message.

        Raises:
            HandlerError: there is no topic for it.

        """
        if self._of_epoch[0] != epoch:
            self._of_epoch = (epoch, [*self._told, ("x-outbox-epoch", str(epoch).encode())])
        topic = self._fixed if self._fixed is not None else build_topic(message, self._template)
        key, value = key_of(message, self._key), None if message.data is None else message.data.encode()
        headers = build_headers(message, self._of_epoch[1])
        encoded = None if key is None else key.encode()
        size = _OVERHEAD + _NAME * len(headers) + len(encoded or b"") + len(value or b"")
        for _, text in headers:
            size += len(text or b"")
        return Record(topic, encoded, value, headers, size)


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


def build_headers(message: Message, told: Headers) -> Headers:
    """Build a message's headers: its place, those of the publisher (`told`), those of its row, its trace context."""
    headers = [
        ("x-outbox-checkpoint", message.pair.encode()),
        *told,
        ("x-outbox-message-id", message.message_id.encode()),
    ]
    if message.message_type is not None:
        headers.append(("x-outbox-message-type", message.message_type.encode()))
    if message.publication_id is not None:
        headers.append(("x-outbox-publication", message.publication_id.encode()))
    if message.partition_key is not None:
        headers.append(("x-outbox-partition-key", message.partition_key.encode()))
    if message.scheduled is not None:
        headers.append(("x-outbox-scheduled", message.scheduled.isoformat().encode()))
    if message.data is None:
        headers.append(("x-outbox-tombstone", b"true"))
    if message.metadata is not None:
        headers += [(name, value.encode()) for name, value in read_trace(message.metadata).items()]
    return headers
