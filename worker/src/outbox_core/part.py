"""PURE: a part of a batch, for either cursor, and which of a batch's messages wait because others of their keys failed.

A part is a batch itself: what targets and the relation `batch` make of a batch, they make of a part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from outbox_core.progress.checkpoint import Checkpoint
from outbox_core.progress.snapshot_range import SnapshotRange

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from outbox_core.message import Batch, Message


SMALL: Final = 16
"""Messages of a part that are looked up one by one: a statement for a range, above all for one of many hash slots,
costs more than handling so few."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a message is in the outbox, and its key."""

    checkpoint: Checkpoint
    key: str


@dataclass(frozen=True, slots=True)
class Places:
    """Where the messages of a batch are, with their keys, in order.

    In columns, because only those of which something comes are looked at one by one; transaction ids are text, as they
    travel.
    """

    transaction_ids: Sequence[str] = ()
    positions: Sequence[int] = ()
    keys: Sequence[str] = ()

    @classmethod
    def of(cls, places: Iterable[Place]) -> Places:
        """Take them apart."""
        found = [(str(each.checkpoint.transaction_id), each.checkpoint.position, each.key) for each in places]
        return cls(*zip(*found, strict=True)) if found else cls()

    def of_messages(self, messages: Iterable[Message]) -> Places:
        """Return where these messages are, with their keys as far as they are here; else each is its own."""
        pairs = zip(self.transaction_ids, self.positions, strict=True)
        keys = dict(zip(pairs, self.keys, strict=True))
        found = [(str(each.transaction_id), each.position, each.message_id) for each in messages]
        return Places(
            [id_ for id_, _, _ in found], [position for _, position, _ in found],
            [keys.get((id_, position), message_id) for id_, position, message_id in found],
        )  # fmt: skip

    def __len__(self) -> int:
        """How many messages there are."""
        return len(self.positions)

    def __getitem__(self, number: int) -> Place:
        """The message with this number, from 0."""
        return Place(Checkpoint(int(self.transaction_ids[number]), self.positions[number]), self.keys[number])

    def __iter__(self) -> Iterator[Place]:
        """All of them, in order."""
        return (self[number] for number in range(len(self)))


def find_waiting(keys: Sequence[str], tried: int, refused: Collection[int]) -> tuple[int, ...]:
    """Return the numbers of a batch's messages, among its first `tried`, that wait behind one of their key that failed.

    `keys` are those of all its messages, in order; `refused` the numbers of those that failed alone, fast to look up.
    """
    first: dict[str, int] = {}
    for number in sorted(refused):
        first.setdefault(keys[number], number)
    return tuple([n for n in range(tried) if n > first.get(keys[n], n) and n not in refused]) if first else ()


def take_part(batch: Batch, places: Places, begin: int, end: int, without: Collection[int] = ()) -> Batch:
    """Return the messages of a batch, of a range or held ones, from number `begin` to before `end`.

    `places` are those of all its messages, in order; `without` are numbers of messages that are not handled now.

    Raises:
        ValueError: the part has no message, so it has no place to end at.

    """
    if end <= begin:
        msg = f"a part from message {begin} to before {end} has none"
        raise ValueError(msg)
    numbers = [number for number in range(begin, end) if number not in without]
    messages = tuple(batch.messages[number] for number in numbers) if batch.messages else ()
    if batch.held:
        held = tuple(batch.held[number] for number in numbers)
        return replace(batch, held=held, messages=messages, matched_count=len(held), places=None)
    after = batch.after if begin == 0 else _reach(batch, places, begin)
    examined = batch.examined if end == len(places) else _reach(batch, places, end)
    only = tuple(places[number].checkpoint for number in numbers) if len(numbers) <= SMALL else ()
    skipped = (places[number].checkpoint for number in range(begin, end) if number in without)
    return replace(
        batch, after=after, examined=examined, messages=messages, matched_count=len(numbers),
        excluded=(*_between(batch, places, begin, end), *skipped), full=batch.full or end < len(places),
        only=only, places=None,
    )  # fmt: skip


def _reach(batch: Batch, places: Places, end: int) -> Checkpoint:
    """Return the checkpoint after so many messages, more than none and not all of them."""
    last = places[end - 1].checkpoint
    snapshot_range = batch.examined.snapshot_range
    if snapshot_range is None:
        return last
    before = batch.after.snapshot_range or SnapshotRange()
    same = before.is_open and before.upper == snapshot_range.end
    lower = before.lower if same else before.end
    examined = end + len(_between(batch, places, 0, end))
    return Checkpoint(
        0, batch.after.position + examined, SnapshotRange(lower, snapshot_range.end, last.position, snapshot_range.plan)
    )  # fmt: skip


def _between(batch: Batch, places: Places, begin: int, end: int) -> tuple[Checkpoint, ...]:
    """Return what was excluded already and lies between messages; behind the last one, too."""
    first = _order(batch, places[begin - 1].checkpoint) if begin else None
    last = _order(batch, places[end - 1].checkpoint) if end < len(places) else None
    return tuple(
        each for each in batch.excluded
        if (first is None or _order(batch, each) > first) and (last is None or _order(batch, each) <= last)
    )  # fmt: skip


def _order(batch: Batch, pair: Checkpoint) -> tuple[int, int]:
    """Return what sorts messages as the batch's cursor reads them."""
    return (0, pair.position) if batch.examined.snapshot_range is not None else (pair.transaction_id, pair.position)
