"""Parts of a batch: each message is in one of them, for either cursor, and keys wait behind what failed."""

from __future__ import annotations

import pytest

from outbox_core.message import Batch, Held
from outbox_core.part import Place, Places, find_waiting, take_part
from outbox_core.progress.checkpoint import Checkpoint
from outbox_core.progress.snapshot_range import Plan, SnapshotRange

KEYS = ("a", "b", "a", "c", "b", "a")


def test_those_of_a_key_wait_behind_the_first_that_failed():
    assert find_waiting(KEYS, 6, {2}) == (5,)
    assert find_waiting(KEYS, 6, {0, 4}) == (2, 5)
    assert find_waiting(KEYS, 6, {0, 2, 1}) == (4, 5)
    assert find_waiting(KEYS, 5, {2}) == find_waiting(KEYS, 6, set()) == ()


def pairs(*numbers):
    return tuple(Checkpoint(700, number) for number in numbers)


def places(*numbers):
    return Places.of(Place(pair, f"k{pair.position}") for pair in pairs(*numbers))


def test_a_part_of_a_range_reaches_to_its_last_message_and_has_what_is_aside_in_between():
    batch = Batch(Checkpoint(9, 9), Checkpoint(800, 1), (), 10, full=False, matched_count=3, excluded=pairs(2, 4, 7))
    found = places(1, 3, 6)
    first = take_part(batch, found, 0, 2)
    assert (first.after, first.examined, first.matched_count) == (Checkpoint(9, 9), Checkpoint(700, 3), 2)
    assert (first.excluded, first.full) == (pairs(2), True)
    last = take_part(batch, found, 2, 3)
    assert (last.after, last.examined, last.matched_count) == (Checkpoint(700, 3), Checkpoint(800, 1), 1)
    assert (last.excluded, last.full) == (pairs(4, 7), False)
    without = take_part(batch, found, 0, 3, {1})
    assert (without.matched_count, set(without.excluded)) == (2, set(pairs(2, 3, 4, 7)))


def test_a_part_without_a_message_ends_nowhere():
    batch = Batch(Checkpoint(9, 9), Checkpoint(800, 1), (), 10, full=False, matched_count=3)
    with pytest.raises(ValueError, match="has none"):
        take_part(batch, places(1, 3, 6), 0, 0)


def test_a_part_of_a_range_is_a_page_of_it():
    lower, upper = "10:10:", "20:20:"
    snapshot_range = SnapshotRange(upper, plan=Plan.BY_POSITION)
    batch = Batch(
        Checkpoint(0, 100, SnapshotRange(lower)), Checkpoint(0, 110, snapshot_range), (), 10, full=False,
        matched_count=3,
        excluded=(Checkpoint(15, 2),),
    )  # fmt: skip
    # Read by position: transaction ids are in no order.
    found = Places(("19", "12", "11"), (1, 3, 6), ("a", "b", "c"))
    part = take_part(batch, found, 0, 2)
    assert part.examined == Checkpoint(0, 103)
    assert part.examined.snapshot_range == SnapshotRange(lower, upper, 3, Plan.BY_POSITION)
    assert part.excluded == (Checkpoint(15, 2),)
    rest = take_part(batch, found, 2, 3)
    assert (rest.after.snapshot_range, rest.examined.snapshot_range, rest.excluded) == (
        part.examined.snapshot_range,
        snapshot_range,
        (),
    )


def test_a_part_of_a_page_stays_in_its_range():
    before, after = SnapshotRange("10:10:", "20:20:", 5), SnapshotRange("10:10:", "20:20:", 9)
    batch = Batch(Checkpoint(0, 100, before), Checkpoint(0, 104, after), (), 4, full=True, matched_count=2)
    part = take_part(batch, places(6, 9), 0, 1)
    assert (part.examined, part.examined.snapshot_range) == (Checkpoint(0, 101), SnapshotRange("10:10:", "20:20:", 6))


def test_a_part_of_held_messages_names_them():
    held = tuple(Held(pair, f"k{pair.position}", str(pair.position)) for pair in pairs(1, 2, 3))
    batch = Batch(Checkpoint(1, 1), Checkpoint(1, 1), (), 3, full=True, matched_count=3, held=held)
    part = take_part(batch, places(1, 2, 3), 1, 3, {2})
    assert (part.held, part.matched_count, part.after) == (held[1:2], 1, Checkpoint(1, 1))
