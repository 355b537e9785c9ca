"""PURE: a snapshot range: what an upper snapshot sees and a lower one does not (`outbox_core.progress.snapshot`).

It is the same for every reader and after every restart. The cursor Snapshot reads ranges in the order of positions, and
its checkpoint is one; consumers are handed chunks of them in the order of pairs (`outbox_core.processor.competing`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from outbox_core.progress.snapshot import Snapshot, parse_snapshot

LOWEST_POSITION: Final = -(2**63)
NOTHING: Final = "0:0:"
"""A snapshot that sees no transaction."""


class Plan(Enum):
    """How the messages of a range are found; which ones they are does not depend on it."""

    BY_TRANSACTION = "by transaction"
    """A small range: all its messages' keys, by transaction id, sorted by position."""
    BY_POSITION = "by position"
    """A large one: along the positions, looking at each message whether it belongs."""
    BY_SORTING = "by sorting"
    """A large one whose messages lie far apart: all of it is looked at."""


@dataclass(frozen=True, slots=True)
class SnapshotRange:
    """What `upper` sees and `lower` does not, and how much of it is examined.

    As a checkpoint: everything that `lower` sees is examined; of what `upper` sees besides, everything up to and
    including `position`. Between two ranges `upper` and `position` are None.

    Attributes:
        lower: a snapshot's text; None: nothing is examined yet.
        upper: the snapshot that ends the range, fixed until the range is read.
        position: of the last message examined inside the range; None: none, or the places in it are pairs.
        plan: a reader's note of how its last page was found, never stored.
        snapshots: both ends, read; one that is not there sees nothing.

    """

    lower: str | None = None
    upper: str | None = None
    position: int | None = None
    plan: Plan = field(default=Plan.BY_TRANSACTION, compare=False)
    snapshots: tuple[Snapshot, Snapshot] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Read both ends, and refuse half a range.

        Raises:
            ValueError: a text is no snapshot, or there is a position and no upper end.

        """
        if self.upper is None and self.position is not None:
            msg = "half a snapshot range: a position lies before an upper snapshot, and there is none"
            raise ValueError(msg)
        lower, upper = (parse_snapshot(NOTHING if text is None else text) for text in (self.lower, self.upper))
        object.__setattr__(self, "snapshots", (lower, upper))

    @property
    def is_open(self) -> bool:
        """Some of the range is read, and some may be left."""
        return self.upper is not None

    @property
    def end(self) -> str | None:
        """The snapshot that will be the lower one once this range is read."""
        return self.lower if self.upper is None else self.upper

    @property
    def after(self) -> int:
        """The position behind which the rest of the range lies."""
        return LOWEST_POSITION if self.position is None else self.position

    def rewound(self, position: int) -> SnapshotRange:
        """Go back so that every message at or above a position is handled again, and none is passed over.

        What is examined shrinks to what is below the position. Inside an open range that holds below the place where
        reading is; above it, the whole of the open range is read again.
        """
        upper = self.lower
        if self.upper is not None and self.position is not None and position <= self.position:
            upper = self.upper
        return SnapshotRange() if upper is None else SnapshotRange(None, upper, max(position - 1, LOWEST_POSITION))

    def skipped(self, position: int, now: str) -> SnapshotRange:
        """Go forward: what is below a position and committed `now` is passed over, and nothing else.

        Inside an open range that is read beyond the position already, no range says what to pass over: what came since
        lies on both sides of it. The range stays as it is.
        """
        if self.position is not None and position - 1 < self.position:
            return self
        return SnapshotRange(self.lower, now, max(position - 1, LOWEST_POSITION))
