"""What a change of the number of partitions says of itself."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from outbox_core.checkpoint import Checkpoint
from outbox_core.message import Message
from outbox_core.spec import PartitionKey
from outbox_core.stop_line import (
    Obstacle,
    Partitioning,
    describe_change,
    describe_key,
    find_waiting,
    key_of,
    parse_key,
)

LINE = Checkpoint(100, 9)
CHANGE = Partitioning(8, "partition key", 4, LINE)


@pytest.mark.parametrize(
    ("waiting", "obstacles", "settled", "said"),
    [
        pytest.param((), (), True, "8 of 8 at the line", id="all are there"),
        pytest.param((3, 5), (), True, "6 of 8 at the line, waiting for partitions 3, 5", id="nothing known of them"),
        pytest.param((3,), (), True, "7 of 8 at the line, waiting for partition 3", id="one"),
        pytest.param(
            (3, 5), (Obstacle(3, "m-7", "ann"),), True,
            "6 of 8 at the line, waiting for partition 3: message 'm-7' of key 'ann'; partition 5", id="a message",
        ),
        pytest.param(
            (), (Obstacle(3, "m-7", None, "it was refused"),), True,
            "8 of 8 at the line, waiting for partition 3: message 'm-7', which failed and is held: it was refused",
            id="a held message",
        ),
        pytest.param(
            (), (Obstacle(3, conflict=12),), True,
            "8 of 8 at the line, waiting for partition 3: conflict 12 waits for a person", id="a conflict",
        ),
        pytest.param(
            (3,), (), False,
            "7 of 8 at the line, waiting for partition 3; a transaction that began before the line was drawn and is "
            "still open", id="an open transaction",
        ),
        pytest.param(
            tuple(range(8)), tuple(Obstacle(n, f"m-{n}") for n in range(8)), True,
            "0 of 8 at the line, waiting for partition 0: message 'm-0'; partition 1: message 'm-1'; partition 2: "
            "message 'm-2'; partitions 3, 4, 5, 6, 7", id="many",
        ),
    ],
)  # fmt: skip
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
    message = Message(LINE, "m", "t", "default", "ann", '{"order": {"id": 7}}', None, datetime.now(UTC))
    assert key_of(message, key) == found
