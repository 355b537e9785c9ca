"""Which reader a partition of a processor needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox_worker.postgres.messages import MessageReader, Slice

if TYPE_CHECKING:
    from outbox_core.checkpoint import Checkpoint
    from outbox_core.config import ProcessorConfig


def reader_of(config: ProcessorConfig, partition: int, barrier: Checkpoint | None = None) -> MessageReader:
    """Return the reader of one partition, up to the barrier; a processor that is not partitioned has number 0 only."""
    partitions = config.delivery.partitions
    part = None if partitions is None else Slice(partition, partitions, barrier)
    return MessageReader(config.source, part, remote_target=config.has_remote_target)


def partitioned_into(config: ProcessorConfig, count: int) -> ProcessorConfig:
    """Return the configuration with as many partitions as there are, instead of those that were asked for."""
    delivery = config.delivery
    if delivery.partitions is None or delivery.partitions.count == count:
        return config
    partitions = delivery.partitions.model_copy(update={"count": count})
    return config.model_copy(update={"delivery": delivery.model_copy(update={"partitions": partitions})})
