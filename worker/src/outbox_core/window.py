"""PURE: the checkpoint of the cursor Snapshot: what was committed when, instead of a place in an order.

A *snapshot* says of every transaction whether it was over when the snapshot was taken: PostgreSQL's `pg_snapshot`,
written `xmin:xmax:ids in progress`. A *window* is what an upper snapshot sees and a lower did not, read in the order
of positions. Nothing that commits later can get into a window, so its pages are the same for every reader and after
every restart; whatever it does not hold is in a later one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import Final

LOWEST_POSITION: Final = -(2**63)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Which transactions were over: all below `end` but those in progress."""

    end: int
    in_progress: frozenset[int]

    def sees(self, transaction_id: int) -> bool:
        """Say whether the transaction was over (committed or rolled back) when this was taken."""
        return transaction_id < self.end and transaction_id not in self.in_progress

    def covers(self, other: Snapshot) -> bool:
        """Say whether this sees all that the other one sees: it was taken at the same time or later."""
        return other.end <= self.end and not any(other.sees(each) for each in self.in_progress)


class Plan(Enum):
    """How the messages of a window are found; which ones they are does not depend on it."""

    BY_TRANSACTION = "by transaction"
    """A small window: all its messages' keys, by transaction id, sorted by position."""
    BY_POSITION = "by position"
    """A large one: along the positions, looking at each message whether it belongs."""
    BY_SORTING = "by sorting"
    """A large one whose messages lie far apart, or whose first position is not known: all of it is looked at."""


@lru_cache(maxsize=64)
def parse_snapshot(text: str) -> Snapshot:
    """Read PostgreSQL's text form.

    Raises:
        ValueError: it is none.

    """
    parts = text.split(":")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts[:2]):
        msg = f"{text!r} is not a snapshot; PostgreSQL writes it as xmin:xmax:id,id"
        raise ValueError(msg)
    return Snapshot(int(parts[1]), frozenset(int(each) for each in parts[2].split(",") if each))


@dataclass(frozen=True, slots=True)
class Window:
    """How far a processor has examined the outbox.

    Everything that `lower` sees is examined; of what `upper` sees besides, everything up to and including `position`.
    Between two windows `upper` and `position` are None.

    Attributes:
        lower: a snapshot's text; None: nothing is examined yet.
        upper: the snapshot that ends the window, fixed until the window is read.
        position: of the last message examined inside the window.
        plan: a reader's note of how its last page was found, never stored.

    """

    lower: str | None = None
    upper: str | None = None
    position: int | None = None
    plan: Plan = field(default=Plan.BY_TRANSACTION, compare=False)

    def __post_init__(self) -> None:
        """Refuse half a window.

        Raises:
            ValueError: a text is no snapshot, or an upper end without a position, or the other way round.

        """
        if (self.upper is None) is not (self.position is None):
            msg = "half a window: an upper snapshot goes with a position inside it"
            raise ValueError(msg)
        for text in (self.lower, self.upper):
            if text is not None:
                parse_snapshot(text)

    @property
    def is_open(self) -> bool:
        """Some of the window is read, and some may be left."""
        return self.upper is not None

    @property
    def end(self) -> str | None:
        """The snapshot that will be the lower one once this window is read."""
        return self.lower if self.upper is None else self.upper

    def rewound(self, position: int) -> Window:
        """Go back so that every message at or above a position is handled again, and none is passed over.

        What is examined shrinks to what is below the position. Inside an open window that holds below the place where
        reading is; above it, the whole of the open window is read again.
        """
        upper = self.lower
        if self.upper is not None and self.position is not None and position <= self.position:
            upper = self.upper
        return Window() if upper is None else Window(None, upper, max(position - 1, LOWEST_POSITION))

    def skipped(self, position: int, now: str) -> Window:
        """Go forward: what is below a position and committed `now` is passed over, unless it was examined anyway."""
        reached = LOWEST_POSITION if self.position is None else self.position
        return Window(self.lower, now, max(position - 1, reached))


def find_transactions(lower: str | None, upper: str | None) -> tuple[list[int], tuple[int, int | None] | None]:
    """Return the transaction ids that a window can hold: those that were in progress, and a range (from, to before).

    Of the range the upper snapshot does not see what is in its own list. Without an upper snapshot there is no end, and
    whatever was in progress counts.
    """
    above = None if upper is None else parse_snapshot(upper)
    if lower is None:
        return [], (0, None if above is None else above.end)
    below = parse_snapshot(lower)
    late = sorted(each for each in below.in_progress if above is None or above.sees(each))
    if above is not None and above.end <= below.end:
        return late, None
    return late, (below.end, None if above is None else above.end)
