"""A PostgreSQL snapshot as text (`xmin:xmax:xip,…`): which transactions it sees."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything below `xmin` is settled, nothing from `xmax` on is seen, nor is what was in progress between them."""

    xmin: int
    xmax: int
    in_progress: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Snapshot:
        """Read the text form of pg_snapshot.

        Raises:
            ValueError: it is no snapshot.

        """
        xmin, xmax, in_progress = text.split(":")
        return cls(int(xmin), int(xmax), tuple(int(each) for each in in_progress.split(",") if each))

    def sees(self, transaction_id: int) -> bool:
        """Say whether a transaction that committed is visible in it, as `pg_visible_in_snapshot` does."""
        return transaction_id < self.xmax and transaction_id not in self.in_progress

    @override
    def __str__(self) -> str:
        """Write it as PostgreSQL does."""
        return f"{self.xmin}:{self.xmax}:{','.join(str(each) for each in self.in_progress)}"
