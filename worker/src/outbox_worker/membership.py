"""Which partitions this process shall own: worked out by the heartbeat, read by the lanes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox_core.partition import decide_wanted

if TYPE_CHECKING:
    from uuid import UUID

    from outbox_worker.postgres.partitions import SeenDivision, SeenLease


class Membership:
    """What the heartbeat last saw. One attribute is replaced whole, so threads need no lock."""

    def __init__(self, count: int, token: UUID) -> None:
        """Want nothing until the first look."""
        self.count = count
        self.token = token
        self._seen: tuple[frozenset[int], tuple[SeenLease, ...]] = (frozenset(), ())

    def wants(self, partition: int) -> bool:
        """Say whether this process shall own the partition."""
        return partition in self._seen[0]

    @property
    def leases(self) -> tuple[SeenLease, ...]:
        """Live leases of the whole processor."""
        return self._seen[1]

    def note(self, seen: SeenDivision) -> bool:
        """Take what the database has; say whether this process shall own other partitions than before."""
        wanted = decide_wanted(seen, self.token)
        changed = wanted != self._seen[0]
        self._seen = (wanted, seen.leases)
        return changed
