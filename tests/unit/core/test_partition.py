"""Which messages belong to which partition, and who shall own it."""

from __future__ import annotations

from uuid import UUID

import pytest

from outbox_core.partition import SLOTS, PartitionOwners, decide_assigned, partition_of, slot_of, slots_of

A, B, C = (UUID(int=n) for n in (1, 2, 3))


@pytest.mark.parametrize(
    ("key", "slot"),
    # the first byte of `printf KEY | sha256sum`, modulo 64
    [("", 0xE3 % 64), ("abc", 0xBA % 64), ("customer-7", 0xAC % 64), ("Zoë", 0xC6 % 64), ("鍵", 0x1C % 64)],
)
def test_a_keys_slot_never_changes(key, slot):
    assert slot_of(key) == slot


@pytest.mark.parametrize("count", [1, 2, 6, 63, 64])
def test_partitions_share_all_slots_among_them(count):
    seen = [slot for partition in range(count) for slot in slots_of(partition, count)]
    assert sorted(seen) == list(range(SLOTS))
    assert all(partition_of(key, count) == slot_of(key) % count for key in ("a", "b", "c"))


@pytest.mark.parametrize(("partition", "count"), [(0, 0), (0, 65), (3, 3), (-1, 3)])
def test_there_is_no_such_partition(partition, count):
    with pytest.raises(ValueError, match="no partition"):
        slots_of(partition, count)


@pytest.mark.parametrize(
    ("members", "owners", "me", "wanted"),
    [
        ([A], {}, A, {0, 1, 2, 3, 4, 5, 6, 7}),
        ([A, B], dict.fromkeys(range(8), A), A, {0, 1, 2, 3}),
        ([A, B], dict.fromkeys(range(8), A), B, set()),
        ([A, B], dict.fromkeys(range(4), A), B, {4, 5, 6, 7}),
        ([A, B, C], {}, A, {0, 1, 2}),
        ([A, B, C], {}, B, {3, 4, 5}),
        ([A, B, C], {}, C, {6, 7}),
        ([A, B], {}, C, set()),
        ([A, B], {7: C}, C, {7}),
        ([], {7: C}, C, {7}),
        ([A, B], {7: C, 0: A}, A, {0, 1, 2, 3}),
        ([B, A], {}, A, {4, 5, 6, 7}),
    ],
    ids=[
        "alone", "gives half back", "waits for it", "takes it", "oldest of three", "second", "youngest, one less",
        "not a member", "not a member, keeps", "nobody is a member", "another one is leaving", "age decides",
    ],
)  # fmt: skip
def test_who_shall_own_what(members, owners, me, wanted):
    assert decide_assigned(PartitionOwners(8, members, owners), me) == wanted


def test_more_members_than_partitions():
    assert [len(decide_assigned(PartitionOwners(2, [A, B, C], {}), member)) for member in (A, B, C)] == [1, 1, 0]
