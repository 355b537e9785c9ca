"""`outbox status` while the number of partitions changes, where checkpoints are snapshot ranges between snapshots."""

from __future__ import annotations

import pytest

from outbox_core.partition import partition_of
from outbox_core.processor.outcomes import HeldLease
from outbox_core.progress.checkpoint import Checkpoint
from outbox_core.progress.snapshot_range import SnapshotRange
from outbox_worker.postgres.ownership import partitions
from outbox_worker.postgres.reading.snapshots import fetch_snapshot

COUNT = 3


@pytest.fixture
def divided(shop):
    """Three partitions at the present, and one message of key a behind it."""
    epoch, token = shop.own(live=True)
    start = Checkpoint(0, 1, SnapshotRange(fetch_snapshot(shop.connection)))
    with shop.connection.transaction():
        partitions.begin(
            shop.connection, shop.key, HeldLease(0, epoch, token), count=COUNT, by="partition key", start=start
        )
    insert(shop)
    return shop


def insert(shop):
    shop.connection.execute("INSERT INTO outbox.messages (partition_key, message_type, data) VALUES ('a', 't', '{}')")


def ask(shop, count, generation):
    partitions.ask(shop.connection, shop.key, shop.resource, generation=generation, count=count, by="partition key")


def draw(shop):
    """Draw the barrier and return its snapshot."""
    partitions.draw(shop.connection, shop.key, shop.resource.uid)
    now = partitions.fetch(shop.connection, shop.key)
    assert now is not None
    assert now.barrier is not None
    assert now.barrier.snapshot_range is not None
    return now.barrier.snapshot_range.lower


def change_of(cli):
    found = cli.json("status", "orders")
    assert len(found) == COUNT
    return found[0]["change"]


def test_it_says_how_far_the_change_is_and_names_the_message_it_waits_for(cli, divided):
    assert change_of(cli) is None
    ask(divided, 5, 1)
    asked = change_of(cli)
    assert (asked["count"], asked["nextCount"], asked["atBarrier"]) == (3, 5, 0)
    assert asked["message"] == "changing partitions 3 -> 5: 0 of 3 at the barrier, waiting for partitions 0, 1, 2"

    line = draw(divided)
    message_id = divided.connection.execute("SELECT message_id FROM outbox.messages").fetchone()[0]
    insert(divided)  # behind the barrier: nobody waits for it
    here = partition_of("a", COUNT)
    divided.connection.execute(
        "UPDATE outbox.processor_checkpoints SET last_processed_position = 2, lower_snapshot = %s::text::pg_snapshot "
        "WHERE partition <> %s",
        (line, here),
    )

    waiting = f"partition {here}: message {message_id!r} of key 'a'"
    assert change_of(cli)["message"] == f"changing partitions 3 -> 5: 2 of 3 at the barrier, waiting for {waiting}"
    assert sum(each["lag"]["messages"] for each in cli.json("status", "orders")) == 2


def line_of(divided):
    found = partitions.fetch(divided.connection, divided.key)
    assert found is not None
    assert found.barrier is not None
    assert found.barrier.snapshot_range is not None
    return found.barrier.snapshot_range.lower


def test_the_change_is_an_act_with_the_snapshot(cli, divided):
    ask(divided, 5, 1)
    line = draw(divided)
    divided.connection.execute(
        "UPDATE outbox.processor_checkpoints SET last_processed_position = 2, lower_snapshot = %s::text::pg_snapshot",
        (line,),
    )
    assert partitions.change(divided.connection, divided.key, divided.resource.uid)
    (act,) = cli.json("audit", "orders")
    assert (act["action"], act["to"], act["reason"]) == (
        "ChangePartitions", "0:3", f"3 partitions became 5 (after the snapshot {line})",
    )  # fmt: skip
