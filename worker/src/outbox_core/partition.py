"""PURE: which messages belong to which partition, and which process shall own which partition.

A key is hashed into one of 64 slots, byte for byte the same here and in SQL (`hash_slot`): the first
byte of SHA-256 (FIPS 180-4) over the key's UTF-8 bytes, modulo 64. Partition p of N reads the slots s with s % N = p.
Slots, not partitions, are what the index is built on, so that it serves every N. A row with neither key nor message id
has none; partition 0 reads it (`outbox_worker.postgres.reading.messages`).

Who owns what is not negotiated: every process sees the same members and leases in the database and works out the same
partitioning. Views differ for moments; then two want one partition, and the lease lets one of them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from uuid import UUID

SLOTS: Final = 64
"""Also the largest number of partitions."""


def slot_of(key: str) -> int:
    """Return the slot of a key, 0 to 63."""
    return hashlib.sha256(key.encode()).digest()[0] % SLOTS


def partition_of(key: str, count: int) -> int:
    """Return the partition, 0 to `count` - 1, that a key's messages belong to."""
    return slot_of(key) % count


def slots_of(partition: int, count: int) -> tuple[int, ...]:
    """Return the slots that a partition reads.

    Raises:
        ValueError: there is no such partition, or more partitions than slots.

    """
    if not (1 <= count <= SLOTS and 0 <= partition < count):
        msg = f"no partition {partition} of {count}: there are 1 to {SLOTS}, counted from 0"
        raise ValueError(msg)
    return tuple(range(partition, SLOTS, count))


@dataclass(frozen=True, slots=True)
class PartitionOwners:
    """What one process sees of the partitioning of a processor.

    Attributes:
        members: live processes, the oldest first.
        owners: for each partition that has a live owner, its token; members or not (a process that is leaving).

    """

    count: int
    members: Sequence[UUID]
    owners: Mapping[int, UUID]


def decide_assigned(partitions: PartitionOwners, me: UUID) -> frozenset[int]:
    """Decide which partitions this process shall own.

    Each member gets an equal share, the oldest ones one more where it does not divide. A member with too many gives
    back the highest numbers; partitions without an owner go to members with too few, the oldest first. Nothing else
    moves. A process that is not (yet) a member keeps what it has and takes nothing.
    """
    held = {
        member: sorted(p for p, owner in partitions.owners.items() if owner == member) for member in partitions.members
    }
    if me not in held:
        return frozenset(p for p, owner in partitions.owners.items() if owner == me)
    share, more = divmod(partitions.count, len(partitions.members))
    free = [p for p in range(partitions.count) if p not in partitions.owners]
    for rank, member in enumerate(partitions.members):
        quota = share + (1 if rank < more else 0)
        lacking = max(0, quota - len(held[member]))
        given, free = free[:lacking], free[lacking:]
        if member == me:
            return frozenset([*held[member][:quota], *given])
    return frozenset()
