"""What a move of a checkpoint would mean: how many messages of which type lie between two checkpoints.

Counted page by page on the server, each page a statement of its own, so that nothing runs for long, a bound can be set,
and progress can be shown. What lies below the high-water mark is settled: the pages add up.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from psycopg import sql

from outbox_core.progress.checkpoint import Checkpoint, parse_checkpoint
from outbox_core.progress.snapshot_range import LOWEST_POSITION, SnapshotRange
from outbox_worker.postgres.call import fetch_rows, load

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox_worker.postgres.connection import Connection
    from outbox_worker.postgres.reading.messages import MessageReader

PAGE: Final = 50_000
"""Messages that one statement counts."""


@dataclass(frozen=True, slots=True)
class Count:
    """Messages by type; `at_least`: counting stopped at its cap, there are these or more."""

    by_type: dict[str, int]
    at_least: bool

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.by_type.values())


def count_between(
    connection: Connection,
    reader: MessageReader,
    after: Checkpoint,
    up_to: Checkpoint,
    *,
    cap: int,
    watch: Callable[[int], None] = lambda _: None,
) -> Count:
    """Count what matches the source's filters in (after, up_to], exactly up to `cap`; tell `watch` the sum so far.

    Of snapshot ranges at most one may lie between the two.
    """
    found: Counter[str] = Counter()
    last = up_to.snapshot_range
    if last is not None:
        if last.end is None:
            return Count({}, at_least=False)
        first = after.snapshot_range or SnapshotRange()
        snapshot_range = first if first.is_open else SnapshotRange(first.lower, last.end, LOWEST_POSITION)
        after, up_to = Checkpoint(0, 1, snapshot_range), Checkpoint(0, 2, last)
    order = ("o.transaction_id", "o.position") if last is None else ("o.position",)
    while True:
        limit = min(PAGE, cap + 1 - found.total())
        # No parameter: names of types are literals in the relation, and may have a per cent sign.
        page = load("count_types").format(
            rows=reader.batch_relation(after, up_to), limit=sql.Literal(limit), order=sql.SQL(", ".join(order)),
            backwards=sql.SQL(", ".join(f"{each} DESC" for each in order)), place=sql.SQL(" || ':' || ".join(order)),
        )  # fmt: skip
        rows = fetch_rows(connection, page)
        for message_type, count, end in rows:
            found[message_type] += count
            if after.snapshot_range is None:
                after = parse_checkpoint(end)
            else:
                after = replace(after, snapshot_range=replace(after.snapshot_range, position=end))
        watch(found.total())
        if sum(count for _, count, _ in rows) < limit:
            return Count(dict(found.most_common()), at_least=False)
        if found.total() > cap:
            return Count(dict(found.most_common()), at_least=True)
