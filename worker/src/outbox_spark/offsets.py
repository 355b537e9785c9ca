"""Spark's offset of an outbox stream is a checkpoint: here is its JSON form, ranges of it, and how one is split. PURE.

A range is open at its start and closed at its end, like a checkpoint: the start has been examined, the end will be.
Spark keeps offsets as JSON in its query checkpoint directory, where `transaction_id` is a string because JSON numbers
cannot hold every xid8.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from outbox_core.progress.checkpoint import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """What lies after `start`, up to and including `end`; the unit of idempotence, never Spark's batch id.

    Attributes:
        count: so many messages were in it when it was planned, for who cuts it into pieces; None: that is not known.

    """

    start: Checkpoint
    end: Checkpoint
    count: int | None = field(default=None, compare=False)

    @property
    def empty(self) -> bool:
        """Nothing can lie in it."""
        return self.end <= self.start

    def after(self, floor: Checkpoint) -> OffsetRange:
        """Leave out what lies at or before `floor`; the result may be empty."""
        return self if floor <= self.start else OffsetRange(floor, self.end)

    @override
    def __str__(self) -> str:
        """Write `start..end`, the form used in logs and names of records."""
        return f"{self.start}..{self.end}"


def format_offset(checkpoint: Checkpoint, count: int | None = None) -> dict[str, Any]:
    """Give Spark a checkpoint as an offset; `count`: messages of the micro-batch that ends with it."""
    offset = {"transaction_id": str(checkpoint.transaction_id), "position": checkpoint.position}
    return offset if count is None else offset | {"messages": count}


def parse_offset(offset: Mapping[str, Any]) -> Checkpoint:
    """Read an offset back.

    Raises:
        ValueError: it is not one of ours.

    """
    try:
        transaction_id, position = offset["transaction_id"], offset["position"]
    except (KeyError, TypeError) as error:
        msg = f"{offset!r} is not an outbox offset: it needs transaction_id and position"
        raise ValueError(msg) from error
    if not isinstance(transaction_id, str) or not transaction_id.isdecimal() or not isinstance(position, int):
        msg = f"{offset!r} is not an outbox offset: transaction_id is a string of digits, position a whole number"
        raise ValueError(msg)
    return Checkpoint(int(transaction_id), position)


def parse_range(start: Checkpoint, end: Mapping[str, Any]) -> OffsetRange:
    """Read the range up to an offset.

    Raises:
        ValueError: it is not one of ours.

    """
    count = end.get("messages")
    return OffsetRange(start, parse_offset(end), count if isinstance(count, int) else None)


def split_range(whole: OffsetRange, boundaries: Iterable[Checkpoint]) -> tuple[OffsetRange, ...]:
    """Cut a range at each boundary: the pieces are disjoint, in order, and cover it exactly; none when it is empty.

    Boundaries outside the range, repeated or out of order change nothing but where the cuts are.
    """
    if whole.empty:
        return ()
    cuts = [*sorted({b for b in boundaries if whole.start < b < whole.end}), whole.end]
    starts = [whole.start, *cuts[:-1]]
    return tuple(OffsetRange(start, end) for start, end in zip(starts, cuts, strict=True))
