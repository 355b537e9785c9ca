"""Which messages are read in the order of pairs, and statements that differ in that alone: each is composed once.

Numbers stay literals: with parameters the server may keep a plan that it made while the table was empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from psycopg import sql

from outbox_core.progress.checkpoint import BEGINNING, Checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from outbox_core.processor.claimed_batch import ClaimedBatch
    from outbox_core.progress.snapshot_range import SnapshotRange

Relation: TypeAlias = sql.Composed
"""A SELECT of messages, to stand in another statement."""

Form: TypeAlias = tuple[bool, ...]
_MARK = "\0"
"""No identifier and no literal of PostgreSQL can hold it."""


def place(name: str) -> sql.SQL:
    """Mark the place of a number in a statement; the statement says its type."""
    return sql.SQL(f"'{_MARK}{name}{_MARK}'")


class Template:
    """A statement with places."""

    def __init__(self, composed: sql.Composable) -> None:
        """Keep the text between the places."""
        parts = composed.as_string(None).split(_MARK)
        self._texts, self._names = parts[::2], parts[1::2]

    def fill(self, numbers: Mapping[str, int]) -> sql.Composed:
        """Return the statement with its numbers.

        Raises:
            KeyError: a place has no number.

        """
        texts = iter(self._texts)
        filled = [next(texts)]
        for name, text in zip(self._names, texts, strict=True):
            filled += (str(int(numbers[name])), text)
        return sql.Composed([sql.SQL("".join(filled))])


@dataclass(frozen=True, slots=True)
class ReadRange:
    """Which messages are read in the order of pairs: after a pair, up to one, at most so many.

    Attributes:
        below_high_water_mark: without `up_to`: none of a transaction that may still be open.
        window: only those of a snapshot range.
        listed: only those at these pairs.
        excluded: positions that are left out.
        priority: of a queue's messages.
        is_short: most likely few messages are there, because the page read last was not full.

    """

    after: Checkpoint = BEGINNING
    up_to: Checkpoint | None = None
    limit: int | None = None
    below_high_water_mark: bool = True
    window: SnapshotRange | None = None
    listed: tuple[Checkpoint, ...] = ()
    excluded: tuple[int, ...] = ()
    priority: int = 0
    is_short: bool = False

    @classmethod
    def of(cls, claimed: ClaimedBatch, upto: Checkpoint | None = None, limit: int | None = None) -> ReadRange:
        """What is left of a claimed batch, or the beginning of that."""
        return cls(
            claimed.after, upto or claimed.upto, limit, window=claimed.window,
            listed=tuple(pair for pair, _ in claimed.listed), excluded=claimed.excluded, priority=claimed.priority,
        )  # fmt: skip

    @property
    def is_in_one_transaction(self) -> bool:
        """Whether all of it is of the transaction at whose message it begins."""
        return self.up_to is not None and self.up_to.transaction_id == self.after.transaction_id

    @property
    def form(self) -> Form:
        """What a statement over a range without a snapshot range depends on, but for its numbers."""
        return (
            self.up_to is not None, self.is_in_one_transaction, self.below_high_water_mark, self.limit is not None,
            self.is_short,
        )  # fmt: skip

    @property
    def numbers(self) -> dict[str, int]:
        """What differs from batch to batch."""
        found = {"after_id": self.after.transaction_id, "after_position": self.after.position}
        if self.up_to is not None:
            found |= {"up_to_id": self.up_to.transaction_id, "up_to_position": self.up_to.position}
        return found if self.limit is None else found | {"limit": self.limit}


class Templates:
    """Statements over ranges by name."""

    def __init__(self) -> None:
        """Begin without one."""
        self._known: dict[tuple[str, Form], Template] = {}

    def fill(self, name: str, wanted: ReadRange, compose: Callable[[], sql.Composable]) -> sql.Composed:
        """Return the statement over this range; it is composed once for each form of a range."""
        template = self._known.get((name, wanted.form))
        if template is None:
            template = self._known[name, wanted.form] = Template(compose())
        return template.fill(wanted.numbers)
