"""PURE: a PostgreSQL snapshot as text (`xmin:xmax:id,…`): which transactions were over when it was taken.

What one snapshot sees and an earlier one does not is a *snapshot range* (`outbox_core.progress.snapshot_range`).
Nothing that commits later can get into one, and what it does not hold is in a later one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from typing_extensions import override


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything below `xmin` is settled, nothing from `xmax` on is seen, nor is what was in progress between them."""

    xmin: int
    xmax: int
    in_progress: frozenset[int] = frozenset()

    def sees(self, transaction_id: int) -> bool:
        """Say whether a transaction that committed is visible in it, as `pg_visible_in_snapshot` does."""
        return transaction_id < self.xmax and transaction_id not in self.in_progress

    def covers(self, other: Snapshot) -> bool:
        """Say whether this sees everything that the other sees: of one server, that it was taken no earlier."""
        if any(other.sees(each) for each in self.in_progress):
            return False
        hidden = sum(each >= self.xmax for each in other.in_progress)
        return other.xmax <= self.xmax or hidden == other.xmax - self.xmax

    def ended_since(self, upper: Snapshot) -> list[int]:
        """Return the transactions that were in progress for this one and are over for a later one, in order."""
        return sorted(each for each in self.in_progress if upper.sees(each))

    @override
    def __str__(self) -> str:
        """Write it as PostgreSQL does."""
        return f"{self.xmin}:{self.xmax}:{','.join(str(each) for each in sorted(self.in_progress))}"


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
    return Snapshot(int(parts[0]), int(parts[1]), frozenset(int(each) for each in parts[2].split(",") if each))
