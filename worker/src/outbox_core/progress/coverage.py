"""PURE: what a checkpoint of either cursor says is examined, so that two processors can be compared.

A pair (x, p) and a snapshot range say the same kind of thing: which messages are examined. The pair says *every
transaction below x, and of x what lies up to p*: that is the range from `x:x:` to `x+1:x+1:` at position p. The other
way round only a lower end can be said, because a range also holds transactions above others that are still open.

Snapshots have a greatest common part and a smallest cover, and both are snapshots again: what all of some processors
have examined, and what a new one has to examine to have all that an old one has, are checkpoints like any other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING

from outbox_core.progress.checkpoint import MAX_POSITION, Checkpoint
from outbox_core.progress.snapshot import Snapshot, parse_snapshot
from outbox_core.progress.snapshot_range import NOTHING, Plan, SnapshotRange

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True, slots=True)
class CatchUpPlan:
    """How to get from one checkpoint to another: ranges that can be read one by one, none where nothing lies between.

    Attributes:
        goal: where it ends; of a snapshot range the counter is not decided yet.
        ranges: from, to; of snapshot ranges each lies within one.

    """

    goal: Checkpoint
    ranges: tuple[tuple[Checkpoint, Checkpoint], ...]


def as_snapshot_range(checkpoint: Checkpoint) -> SnapshotRange:
    """Say what is examined as a snapshot range; a pair's transaction must be settled, as that of a read one is."""
    if checkpoint.snapshot_range is not None:
        return checkpoint.snapshot_range
    x = checkpoint.transaction_id
    return SnapshotRange() if x == 0 else SnapshotRange(f"{x}:{x}:", f"{x + 1}:{x + 1}:", checkpoint.position)


def has_examined(checkpoint: Checkpoint, place: Checkpoint) -> bool:
    """Say whether the message at a place is examined at a checkpoint of either cursor."""
    snapshot_range = checkpoint.snapshot_range
    if snapshot_range is None:
        return place <= checkpoint
    lower, upper = snapshot_range.snapshots
    seen = (
        upper.sees(place.transaction_id)
        and snapshot_range.position is not None
        and place.position <= snapshot_range.position
    )
    return seen or lower.sees(place.transaction_id)


def meet(one: str | None, other: str | None) -> str | None:
    """Return the snapshot that sees what both see."""
    a, b = _parse(one), _parse(other)
    end = min(a.xmax, b.xmax)
    return _format(end, a.in_progress | b.in_progress)


def join(one: str | None, other: str | None) -> str | None:
    """Return the snapshot that sees what either sees."""
    a, b = _parse(one), _parse(other)
    unseen = {each for each in a.in_progress | b.in_progress if not a.sees(each) and not b.sees(each)}
    return _format(max(a.xmax, b.xmax), unseen)


def covers(one: str | None, other: str | None) -> bool:
    """Say whether one snapshot sees everything that the other sees."""
    return _parse(one).covers(_parse(other))


def cut(now: str, newest: int | None, lower: str | None) -> str:
    """Return as much of a snapshot as a reader needs that kept `lower` and sees no message of an id above `newest`.

    A server that crashes may hand out again the ids of transactions that wrote none, or
    rolled back, for messages that are to come: where the checkpoint survives in another server, it must not know them.
    """
    snapshot = parse_snapshot(now)
    end = max(1, 0 if newest is None else newest + 1, _parse(lower).xmax)
    return _format(min(end, snapshot.xmax), snapshot.in_progress) or now


def find_common(checkpoints: Iterable[Checkpoint]) -> SnapshotRange:
    """Return the snapshot range that says what all of them have examined, and nothing else."""
    ranges = [as_snapshot_range(each) for each in checkpoints]
    lower = reduce(meet, (each.lower for each in ranges))
    positions = [each.position for each in ranges if each.position is not None]
    end = reduce(meet, (each.end for each in ranges))
    return SnapshotRange(lower, end, min(positions)) if positions and end not in (None, lower) else SnapshotRange(lower)


def decide_catch_up(mine: Checkpoint, theirs: Sequence[Checkpoint]) -> CatchUpPlan:
    """Decide how far one has to go to have examined all that the others have, and not much more.

    A pair's goal may lie above the high-water mark if one of the others is a snapshot range: it has to be waited for.
    """
    if mine.snapshot_range is None:
        goal = max([mine, *map(_pair_behind, theirs)])
        return CatchUpPlan(goal, ((mine, goal),) if goal > mine else ())
    snapshot_range = reduce(_reach, map(as_snapshot_range, theirs), mine.snapshot_range)
    return CatchUpPlan(
        Checkpoint(0, mine.position, snapshot_range), tuple(_ranges(mine.snapshot_range, snapshot_range))
    )


def _pair_behind(checkpoint: Checkpoint) -> Checkpoint:
    """Return a pair up to which all that is examined lies."""
    if checkpoint.snapshot_range is None:
        return checkpoint
    return Checkpoint(
        max(_parse(checkpoint.snapshot_range.end).xmax - 1, 0), MAX_POSITION if checkpoint.snapshot_range.end else 0
    )


def _reach(mine: SnapshotRange, theirs: SnapshotRange) -> SnapshotRange:
    """Go forward to where everything is examined that `theirs` has examined."""
    if covers(mine.lower, theirs.end):
        return mine
    if theirs.position is not None and covers(mine.lower, theirs.lower):
        if mine.position is None:
            return SnapshotRange(mine.lower, join(mine.lower, theirs.upper), theirs.position)
        if covers(mine.upper, theirs.upper):
            return replace(mine, position=max(mine.position, theirs.position))
    return SnapshotRange(join(mine.end, theirs.end))


def _ranges(after: SnapshotRange, goal: SnapshotRange) -> Iterable[tuple[Checkpoint, Checkpoint]]:
    """Cut the way where a range ends; where one is open, its rest lies together along the positions."""
    if after.upper is not None and goal.end != after.upper:
        yield _places(after, SnapshotRange(after.upper))
        after = SnapshotRange(after.upper)
    if goal != after:
        yield _places(after, goal)


def _places(after: SnapshotRange, goal: SnapshotRange) -> tuple[Checkpoint, Checkpoint]:
    plan = Plan.BY_POSITION if after.is_open or after.lower is None else Plan.BY_TRANSACTION
    return Checkpoint(0, 1, after), Checkpoint(0, 2, replace(goal, plan=plan))


def _parse(text: str | None) -> Snapshot:
    return parse_snapshot(text or NOTHING)


def _format(end: int, in_progress: Iterable[int]) -> str | None:
    listed = sorted(each for each in in_progress if each < end)
    if end == 0:
        return None
    return f"{listed[0] if listed else end}:{end}:{','.join(map(str, listed))}"
