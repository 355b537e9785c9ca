"""Which messages are read, and statements that differ in that alone: each is composed once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from psycopg import sql
from typing_extensions import override

from outbox_core.progress.checkpoint import BEGINNING, MAX_POSITION, Checkpoint
from outbox_core.progress.snapshot import parse_snapshot
from outbox_core.progress.snapshot_range import LOWEST_POSITION, NOTHING
from outbox_worker.postgres.call import Template, place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from outbox_core.processor.claimed_batch import ClaimedBatch
    from outbox_core.progress.snapshot import Snapshot
    from outbox_core.progress.snapshot_range import SnapshotRange

Relation: TypeAlias = sql.Composed
"""A SELECT of messages, to stand in another statement."""


def pair_place(name: str) -> sql.Composed:
    """Mark the place of a pair, `NAME_id` and `NAME_position`, as what is compared with `OutboxTable.pair`."""
    return sql.SQL("{}::xid8, {}::bigint").format(place(f"{name}_id"), place(f"{name}_position"))


AFTER: Final = pair_place("after")
UP_TO: Final = pair_place("up_to")
"""The ends of a `ReadRange`."""


class ReadRange(NamedTuple):
    """Which messages are read in the order of pairs: after a pair, up to one, at most so many.

    Attributes:
        most: it has at most so many messages, which is known before it is read, and the planner cannot tell: see
            `OutboxTable.between_ids`.
        below_high_water_mark: without `up_to`: none of a transaction that may still be open.
        snapshot_range: only those of a snapshot range.
        listed: only those at these pairs.
        excluded: positions that are left out.
        priority: of a queue's messages.
        is_short: most likely few messages are there, because the page read last was not full.

    """

    after: Checkpoint = BEGINNING
    up_to: Checkpoint | None = None
    limit: int | None = None
    most: int | None = None
    below_high_water_mark: bool = True
    snapshot_range: SnapshotRange | None = None
    listed: tuple[Checkpoint, ...] = ()
    excluded: tuple[int, ...] = ()
    priority: int = 0
    is_short: bool = False

    @classmethod
    def of(cls, claimed: ClaimedBatch, upto: Checkpoint | None = None, limit: int | None = None) -> ReadRange:
        """What is left of a claimed batch, or the beginning of that."""
        return cls(
            claimed.after, upto or claimed.upto, limit, snapshot_range=claimed.snapshot_range,
            listed=tuple(pair for pair, _ in claimed.listed), excluded=claimed.excluded, priority=claimed.priority,
        )  # fmt: skip

    @classmethod
    def page_of(cls, claimed: ClaimedBatch, most: int) -> ReadRange:
        """At most so many messages of what is left of a claimed batch.

        There is always a limit, or the planner may read all that is behind the first one and sort it. Where all are
        read it is one more than they are: a page that is not full is the last one.
        """
        return cls.of(claimed, limit=most if most < claimed.count else claimed.count + 1)

    @property
    def is_in_one_transaction(self) -> bool:
        """Whether all of it is of the transaction at whose message it begins."""
        return self.up_to is not None and self.up_to.transaction_id == self.after.transaction_id

    @property
    def limit_place(self) -> sql.Composable | None:
        """The place of `limit` or `most`, whichever is less; None: there is none."""
        return None if self.limit is None and self.most is None else sql.SQL("{}::bigint").format(place("limit"))

    @property
    def form(self) -> tuple[bool, ...]:
        """What a statement over it depends on, but for which numbers there are."""
        return self.is_in_one_transaction, self.below_high_water_mark, self.is_short

    @property
    def numbers(self) -> dict[str, int | str]:
        """What differs from batch to batch: snapshots and arrays as text."""
        found: dict[str, int | str] = {
            "after_id": self.after.transaction_id, "after_position": self.after.position, "priority": self.priority,
        }  # fmt: skip
        if self.up_to is not None:
            found |= {"up_to_id": self.up_to.transaction_id, "up_to_position": self.up_to.position}
        if limits := [each for each in (self.limit, self.most) if each is not None]:
            found["limit"] = min(limits)
        if self.excluded:
            found["excluded"] = array_text(self.excluded)
        if self.listed:
            found["listed_ids"] = array_text([pair.transaction_id for pair in self.listed])
            found["listed_positions"] = array_text([pair.position for pair in self.listed])
        return found if self.snapshot_range is None else found | self._find_ends(self.snapshot_range)

    def _find_ends(self, snapshot_range: SnapshotRange) -> dict[str, int | str]:
        """Say what was in progress for the lower snapshot and is over, and where what began later begins and ends."""
        lower, upper = snapshot_range.snapshots
        start = start_of(lower, self.after)
        found: dict[str, int | str] = {
            "start_id": start.transaction_id, "start_position": start.position, "end_id": upper.xmax
        }  # fmt: skip
        if upper.in_progress:
            found["upper"] = str(upper)
        late = [] if self.after.transaction_id >= lower.xmax else lower.ended_since(upper)
        return found | {"late": array_text(late)} if late else found


@dataclass(frozen=True, slots=True)
class Walk:
    """Which messages are read along the positions: of a snapshot range, behind a position.

    Attributes:
        lower: the range's snapshots, as text; None: it has no such end.
        upper: see `lower`.
        after: the position behind which; None: from the lowest one.
        up_to: the last position.
        size: rows of a page.
        among: only those at these positions, an array as text.

    """

    lower: str | None
    upper: str | None
    after: int | None = None
    up_to: int | None = None
    size: int | None = None
    among: str | None = None

    @property
    def form(self) -> tuple[bool, ...]:
        """What a statement over it depends on, but for which numbers there are."""
        return ()

    @property
    def numbers(self) -> dict[str, int | str]:
        """What differs from batch to batch."""
        ends = {"lower": self.lower, "upper": self.upper, "among": self.among}
        return self._bounds() | {name: value for name, value in ends.items() if value is not None}

    def _bounds(self) -> dict[str, int | str]:
        found = {"after": LOWEST_POSITION if self.after is None else self.after, "up_to": self.up_to, "size": self.size}
        return {name: value for name, value in found.items() if value is not None}


class Lookup(Walk):
    """Which messages are found by their transaction ids: of a snapshot range, as `Walk` says it.

    They are of transactions that were in progress for the lower snapshot (`late`), or of those from `low` to before
    `high`, without those that were in progress for the upper snapshot.
    """

    __slots__ = ()

    @property
    @override
    def form(self) -> tuple[bool, ...]:
        return (self.after is None,)

    @property
    @override
    def numbers(self) -> dict[str, int | str]:
        below, found = parse_snapshot(self.lower or NOTHING), self._bounds()
        above = None if self.upper is None else parse_snapshot(self.upper)
        if late := sorted(below.in_progress) if above is None else below.ended_since(above):
            found["late"] = array_text(late)
        if above is None:
            found["low"] = below.xmax
        elif above.xmax > below.xmax:
            found |= {"low": below.xmax, "high": above.xmax}
            if above.in_progress:
                found["upper"] = str(above)
        return found


class Templates:
    """Statements over ranges by name."""

    def __init__(self) -> None:
        """Begin without one."""
        self._known: dict[tuple[object, ...], Template] = {}

    def fill(
        self, name: str, wanted: ReadRange | Walk, compose: Callable[[], sql.Composable], **more: int
    ) -> sql.Composed:
        """Return the statement over this range, with `more` numbers; it is composed once for each form of a range.

        Values are literals, and it is executed without parameters: a person may have named a type `50 %`.
        """
        numbers = wanted.numbers | more
        form = (name, wanted.form, *numbers)
        if (template := self._known.get(form)) is None:
            template = self._known[form] = Template(compose())
        return template.fill(numbers)


def array_text(numbers: Iterable[int]) -> str:
    """Write an array of numbers as PostgreSQL reads it."""
    return "{" + ",".join(map(str, numbers)) + "}"


def pair_literals(pairs: Iterable[Checkpoint]) -> tuple[sql.Composable, sql.Composable]:
    """Return the arrays of transaction ids and of positions."""
    found = tuple(pairs)
    ids = sql.Literal([str(pair.transaction_id) for pair in found])
    return ids, sql.Literal([pair.position for pair in found])


def start_of(lower: Snapshot, after: Checkpoint) -> Checkpoint:
    """Return the pair after which the messages lie that the lower snapshot did not know."""
    return after if after.transaction_id >= lower.xmax else Checkpoint(lower.xmax - 1, MAX_POSITION)
