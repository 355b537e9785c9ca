"""PURE: a message as a record of Kafka. What is the same for many messages is built once."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from outbox_core.progress.barrier import key_of
from outbox_worker.targets.values import KEPT, build_refusal, fill_template, read_trace

if TYPE_CHECKING:
    from datetime import datetime

    from outbox_core.message import Message
    from outbox_core.spec import PartitionKey

    Headers = list[tuple[str, str | bytes | None]]
    """As the client declares them; ours are texts."""

_TOPIC: Final = re.compile(r"(?!\.{1,2}$)[a-zA-Z0-9._-]{1,249}")
_OVERHEAD: Final = 64
"""Bytes that a record takes at most beside its key, value and headers."""
_NEW: Final = tuple.__new__
_NAME: Final = 30
"""Bytes that the name of a header and the lengths around it take at most."""


class Record(NamedTuple):
    """What is sent of one message; `size`: how many bytes it takes in a request at most."""

    topic: str
    key: str | None
    value: str | None
    headers: Headers
    size: int


class RecordBuilder:
    """Builds the records of one processor. Texts stay texts: the client encodes them, for less than it costs here."""

    def __init__(self, topic: str, key: PartitionKey, *, processor_id: str, pod: str) -> None:
        """Keep what every record has: `topic` is the resource's template, the others are headers."""
        self._template, self._key = topic, key
        self._is_plain = key.data is None and key.metadata is None and key.column in (None, "partition_key")
        self._fixed = topic if _TOPIC.fullmatch(topic) else None
        self._told = [("x-outbox-processor", processor_id), ("x-outbox-pod", pod)]
        self._epoch = -1
        self._kinds: dict[tuple[str | None, str | None], tuple[Headers, int]] = {}
        self._time: tuple[datetime | None, str] = (None, "")

    def build(self, message: Message, epoch: int) -> Record:
        """Build the record of a message; headers: its place, the publisher's, those of its row, its trace context.

        Raises:
            HandlerError: there is no topic for it.

        """
        transaction_id, position, name, kind, publication, partition_key, data, metadata, scheduled, _ = message
        if self._epoch != epoch:
            self._epoch, self._kinds = epoch, {}
        same, size = self._kinds.get((kind, publication)) or self._keep(kind, publication)
        topic = self._fixed if self._fixed is not None else build_topic(message, self._template)
        at = f"{transaction_id}:{position}"
        headers: Headers = [("x-outbox-checkpoint", at), ("x-outbox-message-id", name), *same]
        size += len(at) + (len(name) if name.isascii() else _size(name))
        if partition_key is not None:
            headers.append(("x-outbox-partition-key", partition_key))
            size += _NAME + (len(partition_key) if partition_key.isascii() else _size(partition_key))
        if scheduled is not None:
            if self._time[0] != scheduled:  # messages of one transaction have the same
                self._time = (scheduled, scheduled.isoformat())
            headers.append(("x-outbox-scheduled", self._time[1]))
            size += _NAME + len(self._time[1])
        if data is None:
            headers.append(("x-outbox-tombstone", "true"))
            size += _NAME + 4
        else:
            size += len(data) if data.isascii() else _size(data)
        if metadata is not None and "traceparent" in metadata:
            for header, stored in read_trace(metadata).items():
                headers.append((header, stored))
                size += _NAME + _size(stored)
        key = partition_key if self._is_plain else key_of(message, self._key)
        if key is not None:
            size += len(key) if key.isascii() else _size(key)
        return _NEW(Record, (topic, key, data, headers, size))  # one for each message: `Record(…)` takes longer

    def _keep(self, kind: str | None, publication: str | None) -> tuple[Headers, int]:
        """Keep the headers of one type and publication, and how many bytes they take with those of the message."""
        of_row = [("x-outbox-message-type", kind), ("x-outbox-publication", publication)]
        texts = [*self._told, ("x-outbox-epoch", str(self._epoch))]
        texts += [(header, text) for header, text in of_row if text is not None]
        headers: Headers = [*texts]
        size = _OVERHEAD + 2 * _NAME + sum(_NAME + _size(text) for _, text in texts)
        if len(self._kinds) >= KEPT:
            self._kinds.clear()
        return self._kinds.setdefault((kind, publication), (headers, size))


def _size(text: str) -> int:
    """Return how many bytes a text takes; where it is asked of each message, one that is ASCII is not asked of."""
    return len(text) if text.isascii() else len(text.encode())


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
