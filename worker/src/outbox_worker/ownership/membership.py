"""Which partitions this process shall own: worked out by the heartbeat, read by the runners."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox_core.partition import decide_assigned

if TYPE_CHECKING:
    from uuid import UUID

    from outbox_worker.postgres.ownership.partitions import SeenLease, SeenOwners


class Membership:
    """What the heartbeat last saw. Attributes are replaced whole, so threads need no lock."""

    def __init__(self, count: int, token: UUID, *, asked: int | None = None) -> None:
        """Want nothing until the first look.

        This process is made for `count` partitions, and its resource asks for `asked`; None: for as many.
        """
        self.count = count
        self.token = token
        self.asked = count if asked is None else asked
        self.found = count
        """How many partitions there are, as far as this process was told."""
        self.assigned: frozenset[int] = frozenset()
        """The partitions that this process shall own; none of those that are no more."""
        self.is_able = True
        """The target could work when this process last looked, or it did not look yet; else it takes no share."""
        self.leases: tuple[SeenLease, ...] = ()
        """Live leases of the whole processor."""

    @property
    def outdated(self) -> bool:
        """There are more or fewer partitions than this process is made for: it gives all back and begins anew."""
        return self.found != self.count

    def note_count(self, count: int | None) -> bool:
        """Take how many there are (None: not partitioned yet); return `outdated`, which stays so once it is."""
        if count is not None and not self.outdated:
            self.found = count
        if self.outdated:
            self.assigned = frozenset()
        return self.outdated

    def note(self, seen: SeenOwners) -> bool:
        """Take what the database has; say whether this process shall own other partitions than before."""
        assigned, before = decide_assigned(seen, self.token), self.assigned
        self.assigned, self.leases = assigned, seen.leases
        if self.outdated:  # looked at last: the main thread may learn it at this moment
            self.assigned = frozenset()
        return assigned != before
