"""How far a change of the number of partitions is, and what it waits for: read for status and for `outbox status`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox_core.progress.barrier import NAMED, Obstacle, describe_change, find_waiting, key_of, parse_key
from outbox_core.report import PartitioningView
from outbox_core.spec import Partitions
from outbox_worker.postgres.ownership import partitions
from outbox_worker.postgres.reading.messages import MessageReader, Slice

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outbox_core.progress.barrier import Partitioning
    from outbox_core.progress.checkpoint import Checkpoint
    from outbox_core.spec import Source
    from outbox_worker.postgres.connection import Connection
    from outbox_worker.postgres.key import ProcessorKey


def look_at_change(
    connection: Connection,
    key: ProcessorKey,
    source: Source,
    now: Partitioning,
    stored: Mapping[int, Checkpoint],
) -> PartitioningView:
    """Say how far the change is. A fixed number of statements, each of which reads a few rows."""
    if now.next_count is None:
        return PartitioningView(count=now.count)
    waiting = find_waiting(now, stored)
    obstacles = partitions.fetch_obstacles(connection, key)
    told = {obstacle.partition for obstacle in obstacles}
    for number in [number for number in waiting if number not in told and number in stored][:NAMED]:
        if now.barrier is None:
            break
        batch = part_reader(source, now, number).fetch(connection, stored[number], 1)
        first = next(iter(batch), None)
        if first is not None:
            obstacles.append(Obstacle(number, first.message_id, key_of(first, parse_key(now.by))))
    settled = now.barrier is None or partitions.is_settled(connection, now.barrier)
    return PartitioningView(
        count=now.count,
        next_count=now.next_count,
        at_barrier=now.count - len(waiting),
        message=describe_change(now, waiting, obstacles, settled=settled),
    )


def part_reader(source: Source, now: Partitioning, partition: int) -> MessageReader:
    """Return the reader of one partition as the database has the processor partitioned, up to the barrier, if any."""
    return MessageReader(source, Slice(partition, Partitions(count=now.count, key=parse_key(now.by)), now.barrier))
