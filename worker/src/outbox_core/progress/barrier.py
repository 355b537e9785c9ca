"""PURE: changing the number of partitions: where the barrier is, which partitions have not reached it, and the message.

A barrier is a place that no worker has read beyond: a pair, or with the cursor Snapshot a snapshot that sees all that
any worker has read. Every partition stops there; when all have, the number changes and the new partitions go on from
it. So each key's messages up to the barrier are handled under the old number, those after it under the new one, and a
message that cannot be handled keeps the change waiting.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from outbox_core.progress.checkpoint import Checkpoint
from outbox_core.progress.snapshot import parse_snapshot
from outbox_core.progress.snapshot_range import SnapshotRange
from outbox_core.spec import PartitionKey

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from outbox_core.message import Message

_LONGEST_INTEGER: Final = 4300
"""Digits, from which on Python refuses to read one."""
NAMED: Final = 3
"""Partitions that are named one by one; of more, only the numbers."""


@dataclass(frozen=True, slots=True)
class Partitioning:
    """How a processor is partitioned in the database.

    Attributes:
        by: the key, in `describe_key`'s words.
        next_count: what it changes to; None: it stays.
        barrier: the barrier of that change; `snapshot_barrier` for the cursor Snapshot, None while it is not drawn.
        mark: cursor Snapshot: the transaction that asked for the change. A worker with a range that sees it may know
            of the change; one with a range that does not is behind the barrier, drawn or not.

    """

    count: int
    by: str
    next_count: int | None = None
    barrier: Checkpoint | None = None
    mark: int | None = None

    @property
    def is_drawn(self) -> bool:
        """The barrier is known, or none is needed."""
        return self.mark is None or self.barrier is not None

    def has_same_barrier(self, other: Partitioning | None) -> bool:
        """Say whether the other one was seen under the same line, or both under none; None: nothing was seen yet."""
        return (self.mark, self.barrier) == ((None, None) if other is None else (other.mark, other.barrier))

    def is_at_barrier(self, checkpoint: Checkpoint | None) -> bool:
        """Say whether exactly what is up to the barrier has been examined."""
        if self.barrier is None or checkpoint is None:
            return False
        if self.barrier.snapshot_range is None:
            return checkpoint == self.barrier
        return checkpoint.snapshot_range == self.barrier.snapshot_range

    def is_beyond_barrier(self, checkpoint: Checkpoint) -> bool:
        """Say whether more than what is up to the barrier has been examined, or is being.

        A batch must be dropped then.
        """
        if self.mark is None or checkpoint.snapshot_range is None:
            return self.barrier is not None and checkpoint > self.barrier
        end = checkpoint.snapshot_range.end
        at_barrier = (
            self.barrier is not None
            and self.barrier.snapshot_range is not None
            and end == self.barrier.snapshot_range.lower
        )
        return end is not None and not at_barrier and parse_snapshot(end).sees(self.mark)


@dataclass(frozen=True, slots=True)
class Obstacle:
    """What one partition waits for: a message that is next, or held because it failed; or a conflict."""

    partition: int
    message_id: str | None = None
    key: str | None = None
    error: str | None = None
    conflict: int | None = None


def snapshot_barrier(snapshot: str | None) -> Checkpoint | None:
    """Write a snapshot as a barrier. Counters are each partition's own: only the range says where the barrier is."""
    return None if snapshot is None else Checkpoint(0, 0, SnapshotRange(snapshot))


def describe_barrier(partitioning: Partitioning) -> str:
    """Write the barrier down for people; empty while there is none."""
    barrier = partitioning.barrier
    if barrier is None:
        return ""
    return str(barrier) if barrier.snapshot_range is None else str(barrier.snapshot_range.lower)


def find_waiting(partitioning: Partitioning, stored: Mapping[int, Checkpoint]) -> tuple[int, ...]:
    """Return the partitions that are not at the barrier, in order."""
    if partitioning.next_count is None:
        return ()
    return tuple(number for number in range(partitioning.count) if not partitioning.is_at_barrier(stored.get(number)))


def describe_change(
    partitioning: Partitioning, waiting: Sequence[int], obstacles: Sequence[Obstacle], *, settled: bool = True
) -> str:
    """Say how far the change is, and what the partitions that are not at the barrier wait for; empty: there is none.

    `settled`: no transaction from before the barrier is open any more.
    """
    if partitioning.next_count is None:
        return ""
    count = partitioning.count
    there = f"{count - len(waiting)} of {count} at the barrier"
    text = f"changing partitions {count} -> {partitioning.next_count}: {there}"
    named = [_describe(obstacle) for obstacle in obstacles[:NAMED]]
    known = {obstacle.partition for obstacle in obstacles[:NAMED]}
    others = [str(number) for number in waiting if number not in known]
    if others:
        named.append(f"partition{'s' if len(others) > 1 else ''} {', '.join(others)}")
    if not settled:
        named.append("a transaction that began before the barrier was drawn and is still open")
    return f"{text}, waiting for {'; '.join(named)}" if named else text


def _describe(obstacle: Obstacle) -> str:
    if obstacle.conflict is not None:
        return f"partition {obstacle.partition}: conflict {obstacle.conflict} waits for a person"
    if obstacle.message_id is None:
        return f"partition {obstacle.partition}"
    key = f" of key {obstacle.key!r}" if obstacle.key is not None else ""
    held = f", which failed and is held: {obstacle.error}" if obstacle.error is not None else ""
    return f"partition {obstacle.partition}: message {obstacle.message_id!r}{key}{held}"


def key_of(message: Message, key: PartitionKey) -> str | None:
    """Return the key of a message, for people to read; None: it has none, or it is in a column that is not read."""
    path, text = (key.data, message.data) if key.data is not None else (key.metadata, message.metadata)
    if path is None:
        return message.partition_key if key.column in (None, "partition_key") else None
    return _follow(text, path)


def _read_integer(digits: str) -> int | str:
    """Read one of any length; Python makes no number of more than 4,300 digits, which jsonb takes."""
    return int(digits) if len(digits) < _LONGEST_INTEGER else digits


def _follow(text: str | None, path: Sequence[str]) -> str | None:
    try:
        found = json.loads(text, parse_int=_read_integer) if text is not None else None
    except (ValueError, RecursionError):
        return None
    for step in path:
        if not isinstance(found, dict):
            return None
        found = found.get(step)
    if isinstance(found, str):
        return found.encode(errors="replace").decode()  # JSON can name half of a character
    return None if found is None else json.dumps(found)


def describe_key(key: PartitionKey) -> str:
    """Write a partition key down, so that the database can tell one from another."""
    if key.data is not None:
        return f"data {json.dumps(key.data)}"
    if key.metadata is not None:
        return f"metadata {json.dumps(key.metadata)}"
    return f"column {key.column}" if key.column is not None else "partition key"


def parse_key(text: str) -> PartitionKey:
    """Read what `describe_key` wrote."""
    kind, _, rest = text.partition(" ")
    if kind == "column":
        return PartitionKey(column=rest)
    return PartitionKey(**{kind: json.loads(rest)}) if kind in ("data", "metadata") else PartitionKey()
