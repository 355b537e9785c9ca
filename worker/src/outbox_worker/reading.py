"""Which reader a partition of a processor needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox_worker.postgres.messages import MessageReader, Slice

if TYPE_CHECKING:
    from outbox_core.config import ProcessorConfig


def reader_of(config: ProcessorConfig, partition: int) -> MessageReader:
    """Return the reader of one partition; a processor that is not divided has number 0 only."""
    divided = config.delivery.partitions
    return MessageReader(config.source, None if divided is None else Slice(partition, divided))
