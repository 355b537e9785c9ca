"""Rewind and skip-to where the cursor is Snapshot: by position, by time, to the beginning and the end."""

from __future__ import annotations

from collections import Counter

import pytest

from outbox_core.partition import partition_of
from outbox_core.processor.outcomes import HeldLease
from outbox_core.progress.checkpoint import Checkpoint, StoreAnswer
from outbox_core.progress.snapshot_range import SnapshotRange
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.ownership import leases as ownership
from outbox_worker.postgres.ownership import partitions
from outbox_worker.postgres.progress import checkpoints
from outbox_worker.postgres.reading.messages import MessageReader
from outbox_worker.postgres.reading.snapshots import fetch_snapshot
from tests.support.database.stored import stored_pair
from tests.support.servers.postgres import build_source

WHY = ("--yes", "--reason", "invoices were wrong")
KEY = ProcessorKey("outbox", "orders")


@pytest.fixture
def places(database, shop):
    """Three orders and two payments; the first four are handled, and one more is in flight below the last."""
    connection = database.direct()
    shop.produce(3)
    flight = database.direct(autocommit=False)
    flight.execute("INSERT INTO outbox.messages (message_type, data) VALUES ('Late', '{}')")
    shop.produce(1, "OrderPaid")
    handled = SnapshotRange(fetch_snapshot(connection))
    answer = checkpoints.store(connection, KEY, None, new=Checkpoint(0, 5, handled), expected=None)
    assert answer.name == "STORED"
    flight.commit()
    shop.produce(1, "OrderPaid")
    return [row[0] for row in connection.execute("SELECT position FROM outbox.messages ORDER BY position").fetchall()]


def waiting(database):
    """What would be handled next, by position."""
    connection, reader, found = database.connect(), MessageReader(build_source()), []
    after = stored_pair(connection, KEY)
    while (batch := reader.fetch(connection, after, 2)).matched_count:
        found += [message.checkpoint.position for message in batch.messages]
        after = batch.examined
    return found


def test_back_to_a_position(cli, database, places):
    found = cli.json("rewind", "orders", "--to-position", str(places[1]), "--dry-run")
    assert (found["messages"], found["byType"]) == (3, {"OrderPlaced": 2, "OrderPaid": 1})
    assert waiting(database) == [places[3], places[5]]

    done = cli.json("rewind", "orders", "--to-position", str(places[1]), *WHY)

    assert (done["done"], done["from"], done["to"]) == (True, "0:5", "0:6")
    assert waiting(database) == [places[1], places[2], places[4], places[3], places[5]]
    (act,) = cli.json("audit", "orders")
    assert act["reason"].startswith("rewind: invoices were wrong (snapshot range nothing .. ")


@pytest.mark.parametrize("to", [("--to-position", 1), ("--to-beginning", 0)], ids=["position", "beginning"])
def test_back_from_a_row_that_is_gone(cli, database, shop, places, to):
    """What was examined went with the row: it is taken that all was that is committed by now."""
    database.direct().execute("DELETE FROM outbox.processor_checkpoints")
    number = str(shop.refuse(Checkpoint(0, 5), None, code=StoreAnswer.OLDER))
    option, first = to
    arguments = ("rewind", "orders", option, *([str(places[first])] if first else []), "--conflict", number)

    found = cli.json(*arguments, "--dry-run")
    said = cli.run(*arguments, "--dry-run").stderr
    done = cli.json(*arguments, *WHY)

    assert (f"below position {places[first]} counts as handled" in said) is bool(first)
    for move in (found, done):
        assert (move["messages"], move["direction"]) == (len(places) - first, "back")
    assert (done["from"], done["to"]) == (None, "0:6")
    assert waiting(database) == places[first:]


def test_back_to_the_beginning(cli, database, places):
    assert cli.json("rewind", "orders", "--to-beginning", *WHY)["messages"] == 4

    assert waiting(database) == places


def test_forward_to_a_position_passes_over_what_lies_below(cli, database, places):
    found = cli.json("skip-to", "orders", "--to-position", str(places[5]), *WHY)

    assert (found["messages"], found["byType"]) == (1, {"Late": 1})
    assert waiting(database) == [places[5]]


def test_forward_to_a_position_that_was_passed_passes_over_nothing(cli, database, places):
    connection = database.direct()
    stored = stored_pair(connection, KEY)
    assert stored.snapshot_range is not None
    inside = Checkpoint(0, 6, SnapshotRange(stored.snapshot_range.lower, fetch_snapshot(connection), places[5]))
    checkpoints.store(connection, KEY, None, new=inside, expected=stored)
    later = database.direct()
    later.execute(
        "INSERT INTO outbox.messages (position, message_type, data) VALUES (%s, 'Later', '{}')", (places[0] - 1,)
    )

    assert cli.json("skip-to", "orders", "--to-position", str(places[4]), *WHY)["messages"] == 0

    assert waiting(database) == [places[0] - 1]


def test_forward_to_the_end_keeps_what_is_in_flight(cli, database, places):
    flight = database.direct(autocommit=False)
    flight.execute("INSERT INTO outbox.messages (message_type, data) VALUES ('Late', '{}')")

    assert cli.json("skip-to", "orders", "--to-end", *WHY)["messages"] == 2

    assert waiting(database) == []
    flight.commit()
    assert waiting(database) == [places[5] + 1]


def test_a_pair_means_nothing_here(cli, places):
    done = cli.run("rewind", "orders", "--to", f"7:{places[0]}", *WHY)

    assert done.returncode != 0
    assert "cursor is Snapshot" in done.stderr


def test_lag_and_status_count_ranges(cli, places):
    (lag,) = cli.json("lag", "orders")
    assert (lag["checkpoint"], lag["messages"]) == ("0:5", 2)
    assert len(places) == 6


def test_of_each_partition_its_own_messages_are_counted(cli, database, shop):
    epoch, token = shop.own(live=True)
    start = Checkpoint(0, 1, SnapshotRange(fetch_snapshot(shop.connection)))
    partitions.begin(shop.connection, KEY, HeldLease(0, epoch, token), count=3, by="partition key", start=start)
    assert ownership.release_lease(shop.connection, KEY, HeldLease(0, epoch, token))
    for number in range(7):
        shop.connection.execute(
            "INSERT INTO outbox.messages (partition_key, message_type, data) VALUES (%s, 'OrderPlaced', '{}')",
            (f"key-{number}",),
        )

    moves = cli.json("skip-to", "orders", "--to-end", "--dry-run")

    expected = Counter(partition_of(f"key-{number}", 3) for number in range(7))
    assert {move["partition"]: move["messages"] for move in moves} == expected
