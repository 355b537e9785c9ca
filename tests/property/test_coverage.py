"""Checkpoints of two processors compared: what is said to be examined is, for every message that there can be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outbox_core.progress.checkpoint import BEGINNING, MAX_POSITION, Checkpoint
from outbox_core.progress.coverage import (
    as_snapshot_range,
    covers,
    cut,
    decide_catch_up,
    find_common,
    has_examined,
    join,
    meet,
)
from outbox_core.progress.snapshot import Snapshot, parse_snapshot
from outbox_core.progress.snapshot_range import SnapshotRange

IDS = range(1, 13)
POSITIONS = range(4)
MESSAGES = [(transaction_id, position) for transaction_id in IDS for position in POSITIONS]


def text_of(snapshot: Snapshot) -> str | None:
    listed = sorted(snapshot.in_progress)
    if snapshot.xmax == 0:
        return None
    return f"{listed[0] if listed else snapshot.xmax}:{snapshot.xmax}:{','.join(map(str, listed))}"


def build_snapshot(end: int, mask: int) -> Snapshot:
    return Snapshot(0, end, frozenset(each for each in range(end) if mask >> each & 1))


def snapshots():
    return st.builds(build_snapshot, st.integers(0, 12), st.integers(0, 4095))


@st.composite
def snapshot_ranges(draw):
    lower = draw(snapshots())
    if draw(st.booleans()):
        return SnapshotRange(text_of(lower))
    upper = join(text_of(lower), text_of(draw(snapshots())))
    return (
        SnapshotRange(text_of(lower))
        if upper is None
        else SnapshotRange(text_of(lower), upper, draw(st.integers(-1, 4)))
    )


pairs = st.builds(Checkpoint, st.integers(1, 11), st.integers(-1, 4)) | st.just(BEGINNING)
places = snapshot_ranges().map(lambda snapshot_range: Checkpoint(0, 7, snapshot_range)) | pairs


def sees(text: str | None, transaction_id: int) -> bool:
    return text is not None and parse_snapshot(text).sees(transaction_id)


def examined(checkpoint: Checkpoint) -> set[tuple[int, int]]:
    """The definition, message by message."""
    snapshot_range = checkpoint.snapshot_range
    if snapshot_range is None:
        return {each for each in MESSAGES if each <= (checkpoint.transaction_id, checkpoint.position)}
    found = {each for each in MESSAGES if sees(snapshot_range.lower, each[0])}
    if snapshot_range.upper is not None and snapshot_range.position is not None:
        found |= {
            each for each in MESSAGES if sees(snapshot_range.upper, each[0]) and each[1] <= snapshot_range.position
        }
    return found


def as_place(snapshot_range: SnapshotRange) -> Checkpoint:
    return Checkpoint(0, 1, snapshot_range)


@given(snapshots(), snapshots())
def test_two_snapshots_have_a_common_part_and_a_cover(one, other):
    a, b = text_of(one), text_of(other)
    for transaction_id in IDS:
        assert sees(meet(a, b), transaction_id) == (one.sees(transaction_id) and other.sees(transaction_id))
        assert sees(join(a, b), transaction_id) == (one.sees(transaction_id) or other.sees(transaction_id))
    assert covers(a, b) == all(one.sees(each) for each in range(13) if other.sees(each))


@given(pairs.filter(lambda pair: pair != BEGINNING))
def test_a_pair_is_a_range_exactly(pair):
    assert examined(as_place(as_snapshot_range(pair))) == examined(pair)


@given(st.lists(places, min_size=1, max_size=4))
def test_what_is_common_to_several_was_examined_by_each(several):
    common = examined(as_place(find_common(several)))
    assert all(common <= examined(each) for each in several)


@given(places)
def test_what_is_common_to_one_is_all_of_it(one):
    if one.snapshot_range is not None or one != BEGINNING:
        assert examined(as_place(find_common([one]))) == examined(one)


@given(st.lists(snapshot_ranges(), min_size=2, max_size=4))
def test_partitions_between_two_ranges_lose_nothing_to_their_common_one(several):
    """Where none is inside a snapshot range nothing comes again but what one of them had not examined."""
    closed = [as_place(SnapshotRange(each.lower)) for each in several]
    assert examined(as_place(find_common(closed))) == set.intersection(*map(examined, closed))


@given(places, st.lists(places, min_size=1, max_size=3))
def test_the_way_ends_where_everything_is_examined_that_the_others_have(mine, theirs):
    catch_up = decide_catch_up(mine, theirs)
    before, after = examined(mine), examined(catch_up.goal)
    assert before <= after
    assert all(examined(each) <= after for each in theirs)
    if not catch_up.ranges:
        assert before == after


@given(places, st.lists(places, min_size=1, max_size=3))
def test_the_ranges_of_a_way_hold_each_message_between_once_and_each_lies_in_one_range(mine, theirs):
    catch_up = decide_catch_up(mine, theirs)
    held: list[tuple[int, int]] = []
    at = examined(mine)
    for start, end in catch_up.ranges:
        assert examined(start) == at
        held += examined(end) - examined(start)
        at = examined(end)
        if end.snapshot_range is not None and start.snapshot_range is not None and start.snapshot_range.is_open:
            assert end.snapshot_range.end == start.snapshot_range.upper
    assert at == examined(catch_up.goal)
    assert sorted(held) == sorted(examined(catch_up.goal) - examined(mine))


@given(snapshot_ranges(), snapshot_ranges())
def test_a_range_inside_the_same_snapshots_is_met_at_its_position(one, other):
    """A rebuild beside a backlog does not have to wait until the whole backlog is read."""
    if one.is_open and other.is_open and one.position is not None and other.position is not None:
        theirs = SnapshotRange(one.lower, one.upper, other.position)
        goal = decide_catch_up(as_place(one), [as_place(theirs)]).goal
        assert examined(goal) == examined(as_place(one)) | examined(as_place(theirs))


@given(pairs, snapshot_ranges())
def test_a_pair_meets_a_range_below_its_end(mine, theirs):
    goal = decide_catch_up(mine, [as_place(theirs)]).goal
    end = 0 if theirs.end is None else parse_snapshot(theirs.end).xmax
    assert goal == mine or (goal.transaction_id, goal.position) == (end - 1, MAX_POSITION)


@given(snapshots(), snapshots(), st.none() | st.integers(1, 11))
def test_a_snapshot_that_is_cut_knows_no_id_above_the_last_message(now, kept, newest):
    lower = meet(text_of(kept), text_of(now))
    if text_of(now) is None or (newest is not None and not now.sees(newest)):
        return
    found = parse_snapshot(cut(text_of(now) or "", newest, lower))
    kept_end = 0 if lower is None else parse_snapshot(lower).xmax
    for transaction_id in IDS:
        wanted = now.sees(transaction_id) and transaction_id < max(1, (newest or 0) + 1, kept_end)
        assert found.sees(transaction_id) == wanted


@given(places)
def test_each_message_is_examined_at_a_checkpoint_or_it_is_not(checkpoint):
    found = {each for each in MESSAGES if has_examined(checkpoint, Checkpoint(*each))}
    assert found == examined(checkpoint)
