"""What a change of the number of partitions says of itself."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from outbox_core.message import Message
from outbox_core.progress.barrier import (
    Obstacle,
    Partitioning,
    describe_barrier,
    describe_change,
    describe_key,
    find_waiting,
    key_of,
    parse_key,
    snapshot_barrier,
)
from outbox_core.progress.checkpoint import Checkpoint
from outbox_core.progress.snapshot import parse_snapshot
from outbox_core.progress.snapshot_range import SnapshotRange
from outbox_core.spec import PartitionKey

LINE = Checkpoint(100, 9)
CHANGE = Partitioning(8, "partition key", 4, LINE)
MARK = 50
SNAPSHOT = "40:60:40,55"
ASKED = Partitioning(3, "partition key", 5, None, MARK)
DRAWN = Partitioning(3, "partition key", 5, snapshot_barrier(SNAPSHOT), MARK)
"""The barrier of snapshot ranges: it sees the mark."""


@pytest.mark.parametrize(
    ("waiting", "obstacles", "settled", "said"),
    [
        pytest.param((), (), True, "8 of 8 at the barrier", id="all are there"),
        pytest.param(
            (3, 5), (), True, "6 of 8 at the barrier, waiting for partitions 3, 5", id="nothing known of them"
        ),
        pytest.param((3,), (), True, "7 of 8 at the barrier, waiting for partition 3", id="one"),
        pytest.param(
            (3, 5),
            (Obstacle(3, "m-7", "ann"),),
            True,
            "6 of 8 at the barrier, waiting for partition 3: message 'm-7' of key 'ann'; partition 5",
            id="a message",
        ),
        pytest.param(
            (),
            (Obstacle(3, "m-7", None, "it was refused"),),
            True,
            "8 of 8 at the barrier, waiting for partition 3: message 'm-7', which failed and is held: it was refused",
            id="a held message",
        ),
        pytest.param(
            (),
            (Obstacle(3, conflict=12),),
            True,
            "8 of 8 at the barrier, waiting for partition 3: conflict 12 waits for a person",
            id="a conflict",
        ),
        pytest.param(
            (3,),
            (),
            False,
            "7 of 8 at the barrier, waiting for partition 3; a transaction that began before the barrier was drawn and "
            "is "
            "still open",
            id="an open transaction",
        ),
        pytest.param(
            tuple(range(8)),
            tuple(Obstacle(n, f"m-{n}") for n in range(8)),
            True,
            "0 of 8 at the barrier, waiting for partition 0: message 'm-0'; partition 1: message 'm-1'; partition 2: "
            "message 'm-2'; partitions 3, 4, 5, 6, 7",
            id="many",
        ),
    ],
)
def test_a_change_says_what_it_waits_for(waiting, obstacles, settled, said):
    assert describe_change(CHANGE, waiting, obstacles, settled=settled) == f"changing partitions 8 -> 4: {said}"


def test_without_a_change_there_is_nothing_to_say():
    assert describe_change(Partitioning(8, "partition key"), (), ()) == ""
    assert find_waiting(Partitioning(8, "partition key"), {}) == ()


def test_who_is_behind_beyond_or_gone_is_waited_for():
    stored = dict.fromkeys(range(8), LINE) | {2: Checkpoint(100, 8), 4: Checkpoint(101, 0)}
    del stored[6]
    assert find_waiting(CHANGE, stored) == (2, 4, 6)


@pytest.mark.parametrize(
    "key",
    [PartitionKey(), PartitionKey(column="a b"), PartitionKey(data=["a", "b c"]), PartitionKey(metadata=["é"])],
    ids=repr,
)
def test_a_key_is_read_as_it_was_written(key):
    assert parse_key(describe_key(key)) == key


@pytest.mark.parametrize(
    ("key", "found"),
    [
        (PartitionKey(), "ann"),
        (PartitionKey(column="other"), None),
        (PartitionKey(data=["order", "id"]), "7"),
        (PartitionKey(data=["order", "none", "at all"]), None),
        (PartitionKey(data=["order", "id", "deeper"]), None),
        (PartitionKey(metadata=["tenant"]), None),
    ],
    ids=repr,
)
def test_the_key_of_a_message_for_people(key, found):
    row = (LINE.transaction_id, LINE.position, "m", "t", "default", "ann", '{"order": {"id": 7}}', None)
    message = Message(*row, datetime.now(UTC))
    assert key_of(message, key) == found


def test_a_payload_that_is_nested_too_deeply_has_no_key():
    data = f'{{"order": 7, "deep": {"[" * 10_000}{"]" * 10_000}}}'
    message = Message(1, 1, "m", "t", "default", "ann", data, None, datetime.now(UTC))
    assert key_of(message, PartitionKey(data=["order"])) is None


@pytest.mark.parametrize("digits", [4299, 4300, 4301, 9000])
def test_a_payload_that_has_an_integer_of_any_length_has_its_key(digits):
    """Without one its messages would be handed over side by side."""
    long = "7" * digits
    message = Message(1, 1, "m", "t", "default", "ann", f'{{"order": "a", "n": {long}}}', None, datetime.now(UTC))
    assert key_of(message, PartitionKey(data=["order"])) == "a"
    assert key_of(message, PartitionKey(data=["n"])) == long


def test_a_key_is_text_that_can_be_written():
    message = Message(1, 1, "m", "t", "default", "ann", r'{"order": "\ud800-\u00e9"}', None, datetime.now(UTC))
    assert key_of(message, PartitionKey(data=["order"])) == "?-é"


def snapshot_range(lower, upper=None, position=None, counter=7):
    return Checkpoint(0, counter, SnapshotRange(lower, upper, position))


@pytest.mark.parametrize(
    ("checkpoint", "at_barrier", "beyond"),
    [
        pytest.param(snapshot_range(None), False, False, id="nothing is examined"),
        pytest.param(snapshot_range("40:50:40"), False, False, id="taken before the wish was asked for"),
        pytest.param(snapshot_range("40:60:40,50,55"), False, False, id="taken while the asking transaction was open"),
        pytest.param(
            snapshot_range("40:50:40", "40:60:40,50,55", 9),
            False,
            False,
            id="inside a snapshot range that does not see it",
        ),
        pytest.param(snapshot_range("40:50:40", SNAPSHOT, 9), False, False, id="inside the last snapshot range"),
        pytest.param(snapshot_range(SNAPSHOT), True, False, id="at the barrier"),
        pytest.param(snapshot_range(SNAPSHOT, counter=999), True, False, id="at the barrier, whatever the counter"),
        pytest.param(snapshot_range("40:61:55"), False, True, id="taken later"),
        pytest.param(
            snapshot_range("40:50:40", "40:61:55", 9), False, True, id="inside a snapshot range that was opened later"
        ),
    ],
)
def test_where_a_range_lies(checkpoint, at_barrier, beyond):
    assert (DRAWN.is_at_barrier(checkpoint), DRAWN.is_beyond_barrier(checkpoint)) == (at_barrier, beyond)
    assert not ASKED.is_at_barrier(checkpoint)
    assert ASKED.is_beyond_barrier(checkpoint) is (beyond or checkpoint.snapshot_range.end == SNAPSHOT), (
        "not drawn: it may be"
    )


def test_where_a_pair_lies():
    assert [CHANGE.is_beyond_barrier(each) for each in (Checkpoint(100, 8), LINE, Checkpoint(101, 0))] == [
        False,
        False,
        True,
    ]
    assert [CHANGE.is_at_barrier(each) for each in (None, Checkpoint(100, 8), LINE)] == [False, False, True]
    assert not Partitioning(8, "partition key").is_beyond_barrier(LINE)


def test_a_line_is_another_one_by_its_mark():
    assert Partitioning(3, "partition key").has_same_barrier(None)
    assert DRAWN.has_same_barrier(Partitioning(3, "partition key", 8, snapshot_barrier(SNAPSHOT), MARK))
    for other in (None, ASKED, CHANGE, Partitioning(3, "partition key", 5, snapshot_barrier(SNAPSHOT), MARK + 1)):
        assert not DRAWN.has_same_barrier(other)
    assert (CHANGE.is_drawn, ASKED.is_drawn, DRAWN.is_drawn) == (True, False, True)


def test_all_are_waited_for_while_the_line_is_not_drawn():
    stored = dict.fromkeys(range(3), snapshot_range(SNAPSHOT))
    assert (find_waiting(ASKED, stored), find_waiting(DRAWN, stored)) == ((0, 1, 2), ())
    said = "changing partitions 3 -> 5: 0 of 3 at the barrier, waiting for partitions 0, 1, 2"
    assert describe_change(ASKED, (0, 1, 2), ()) == said


def test_a_line_is_written_for_people():
    assert [describe_barrier(each) for each in (CHANGE, ASKED, DRAWN)] == ["100:9", "", SNAPSHOT]


@pytest.mark.parametrize(
    ("later", "earlier", "covers"),
    [
        ("40:60:40,55", "40:60:40,55", True),
        ("40:60:55", "40:60:40,55", True),
        ("40:60:40,55", "40:60:55", False),
        ("40:70:40,65", "40:60:40,55", True),
        ("40:60:40", "40:70:40,65", False),
    ],
)
def test_a_later_snapshot_covers_an_earlier_one(later, earlier, covers):
    assert parse_snapshot(later).covers(parse_snapshot(earlier)) is covers
