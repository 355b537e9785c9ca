"""PURE: the checkpoint of the cursor Snapshot: what was committed when, instead of a place in an order.

A *window* is what an upper snapshot sees and a lower did not (`outbox_core.snapshot`), read in the order of positions;
its pages are the same for every reader and after every restart.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from outbox_core.snapshot import parse_snapshot

LOWEST_POSITION: Final = -(2**63)


class Plan(Enum):
    """How the messages of a window are found; which ones they are does not depend on it."""

    BY_TRANSACTION = "by transaction"
    """A small window: all its messages' keys, by transaction id, sorted by position."""
    BY_POSITION = "by position"
    """A large one: along the positions, looking at each message whether it belongs."""
    BY_SORTING = "by sorting"
    """A large one whose messages lie far apart, or whose first position is not known: all of it is looked at."""


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
        """Go forward: what is below a position and committed `now` is passed over, and nothing else.

        Inside an open window that is read beyond the position already there is nothing to pass over that could be said:
        what came since lies on both sides of it. The window stays as it is.
        """
        if self.position is not None and position - 1 < self.position:
            return self
        return Window(self.lower, now, max(position - 1, LOWEST_POSITION))


def find_transactions(lower: str | None, upper: str | None) -> tuple[list[int], tuple[int, int | None] | None]:
    """Return the transaction ids that a window can hold: those that were in progress, and a range (from, to before).

    Of the range the upper snapshot does not see what is in its own list. Without an upper snapshot there is no end, and
    everything that was in progress counts.
    """
    above = None if upper is None else parse_snapshot(upper)
    if lower is None:
        return [], (0, None if above is None else above.xmax)
    below = parse_snapshot(lower)
    late = sorted(below.in_progress) if above is None else below.ended_since(above)
    if above is not None and above.xmax <= below.xmax:
        return late, None
    return late, (below.xmax, None if above is None else above.xmax)
