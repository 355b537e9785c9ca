"""The number of partitions changes at a barrier, with real processes: nothing skipped, repeated or out of order."""

from __future__ import annotations

import pytest

from outbox_core.partition import partition_of
from tests.support.divided import (
    KEYS,
    assert_each_once_and_in_order,
    divided,
    produce,
    start,
    wait_count,
    wait_shared,
)
from tests.support.servers.postgres import wait_until
from tests.support.worker import PICKY_HANDLER, PYTHON_TARGET, SQL_TARGET

SNAPSHOT = {"cursor": "Snapshot"}


def counts(outbox):
    """How many partitions there are, and how many there shall be."""
    row = outbox.connection.execute("SELECT partition_count, next_count FROM outbox.processor_partitions").fetchone()
    return None if row is None else tuple(row)


def wait_divided(outbox, count, seconds=30.0):
    wait_until(lambda: counts(outbox) == (count, None), f"{count} partitions", seconds)


@pytest.fixture(params=["TransactionOrder", "Snapshot"])
def source(request):
    """Of either cursor."""
    return {"cursor": request.param}


@pytest.mark.parametrize(
    ("target", "before", "after"), [(SQL_TARGET, 3, 5), (PYTHON_TARGET, 5, 2)], ids=["more", "fewer"]
)
def test_a_process_of_the_new_spec_changes_it_and_one_of_the_old_goes_along(
    outbox, workers, source, target, before, after
):
    produce(outbox, 300)
    old = start(outbox, workers, "pod-old", target=target, count=before, source=source)
    wait_count(outbox, 300)
    new = start(outbox, workers, "pod-new", target=target, count=after, generation=2, source=source)
    wait_divided(outbox, after)
    produce(outbox, 300, start=300)
    wait_count(outbox, 600)
    wait_shared(outbox, after // 2, after - after // 2)
    assert_each_once_and_in_order(outbox, 600)
    for worker in (old, new):
        report = worker.wait_for("it says so", lambda r: r.partitioning is not None and r.partitioning.count == after)
        assert (report.conflicts.count, len(report.checkpoints)) == (0, after)


def is_changing(text):
    return lambda report: report.partitioning is not None and text in report.partitioning.message


def line(outbox):
    row = outbox.connection.execute(
        "SELECT barrier_transaction_id::text, barrier_position FROM outbox.processor_partitions"
    ).fetchone()
    return None if row is None or row[0] is None else (row[0], row[1])


def at_barrier(outbox):
    """Partitions whose checkpoint is at the barrier."""
    rows = outbox.connection.execute(
        "SELECT c.partition "
        "FROM outbox.processor_checkpoints c JOIN outbox.processor_partitions d USING (processor_id) "
        "WHERE (c.last_processed_transaction_id, c.last_processed_position) "
        "= (d.barrier_transaction_id, d.barrier_position) "
        "OR c.lower_snapshot::text = d.barrier_snapshot::text AND c.upper_snapshot IS NULL ORDER BY 1"
    ).fetchall()
    return [row[0] for row in rows]


def test_a_message_that_fails_stops_the_change_and_is_named(outbox, workers, source):
    config = divided(outbox, count=3, source=source)
    config["delivery"]["blocks"] = "Partition"
    home = workers.prepare(config, outbox.database.uri(), handler=PICKY_HANDLER)
    (home / "bad").write_text("key-7")
    old = workers.launch(home, pod="pod-old")
    produce(outbox, 100)
    stopped = partition_of("key-7", 3)
    good = [n for n in range(100) if n < 7 or partition_of(f"key-{n % KEYS}", 3) != stopped]
    wait_count(outbox, len(good))
    config = divided(outbox, count=4, generation=2, source=source)
    config["delivery"]["blocks"] = "Partition"
    other = workers.prepare(config, outbox.database.uri(), handler=PICKY_HANDLER)
    (other / "bad").write_text("key-7")
    new = workers.launch(other, pod="pod-new")

    waiting = f"partition {stopped}: message 'message-7' of key 'key-7'"
    said = f"changing partitions 3 -> 4: 2 of 3 at the barrier, waiting for {waiting}"
    for worker in (old, new):
        worker.wait_for("it names the message", is_changing(said))
    produce(outbox, 100, start=100)
    wait_until(lambda: len(at_barrier(outbox)) == 2, "the others wait at the barrier")
    assert (len(outbox.handled()), counts(outbox)) == (len(good), (3, 4)), "nothing beyond the barrier is handled"

    for each in (home, other):
        (each / "bad").unlink()
        (each / "handler/orders.py").write_text(PICKY_HANDLER + "\n")
    wait_divided(outbox, 4)
    wait_count(outbox, 200)
    assert_each_once_and_in_order(outbox, 200)


def test_what_is_in_flight_when_the_line_is_drawn_is_handled_before_the_change(outbox, workers):
    start(outbox, workers, "pod-old", count=3)
    produce(outbox, 50)
    wait_count(outbox, 50)
    writer = outbox.database.direct(autocommit=False)
    writer.execute(
        "INSERT INTO outbox.messages (partition_key, message_id, message_type, data) "
        "VALUES ('key-10', 'message-50', 't', '{\"total\": 50}')"
    )
    new = start(outbox, workers, "pod-new", count=5, generation=2)
    new.wait_for("it says why it waits", is_changing("a transaction that began before the barrier was drawn"))
    assert (counts(outbox), at_barrier(outbox)) == ((3, 5), [])
    writer.commit()
    wait_divided(outbox, 5)
    assert len(outbox.handled()) == 51, "under the former number"
    produce(outbox, 49, start=51)
    wait_count(outbox, 100)
    assert_each_once_and_in_order(outbox, 100)


def test_nobody_waits_for_what_is_in_flight_where_checkpoints_are_ranges(outbox, workers):
    """It belongs behind the barrier.

    Partitions that have had nothing to do for a while are stored at it all the same.
    """
    stranger = outbox.database.server.connect("postgres", autocommit=False)
    stranger.execute("SELECT pg_current_xact_id()")
    start(outbox, workers, "pod-old", count=3, source=SNAPSHOT)
    produce(outbox, 1)
    wait_count(outbox, 1)
    writer = outbox.database.direct(autocommit=False)
    writer.execute(
        "INSERT INTO outbox.messages (partition_key, message_id, message_type, data) "
        "VALUES ('key-1', 'message-1', 't', '{\"total\": 1}')"
    )
    start(outbox, workers, "pod-new", count=5, generation=2, source=SNAPSHOT)
    wait_divided(outbox, 5)
    rows = outbox.connection.execute(
        "SELECT DISTINCT last_processed_position, lower_snapshot::text, range_position "
        "FROM outbox.processor_checkpoints"
    ).fetchall()
    assert len(rows) == 1, "all start at the barrier"
    writer.commit()
    produce(outbox, 98, start=2)
    wait_count(outbox, 100)
    assert_each_once_and_in_order(outbox, 100)
    stranger.close()


def test_a_conflict_stops_the_change_and_a_range_beyond_the_line_moves_it(outbox, workers):
    produce(outbox, 100)
    old = start(outbox, workers, "pod-old", count=3, source=SNAPSHOT)
    wait_count(outbox, 100)
    outbox.connection.execute(
        "UPDATE outbox.processor_checkpoints SET last_processed_position = last_processed_position - 1 "
        "WHERE partition = 1"
    )
    produce(outbox, 100, start=100)
    old.wait_state("Blocked", "CheckpointOlder")
    new = start(outbox, workers, "pod-new", count=2, generation=2, source=SNAPSHOT)
    new.wait_for("it names the conflict", is_changing("partition 1: conflict 1 waits for a person"))
    wait_until(lambda: at_barrier(outbox) == [0, 2], "the others wait at the barrier")
    produce(outbox, 10, start=200)
    assert outbox.connection.execute(
        "SELECT outbox.rewind_processor_range('orders', 1, pg_current_snapshot(), NULL, NULL, 'skip', 'a person')"
    ).fetchone() == (1,)
    assert outbox.connection.execute(
        "SELECT outbox.resolve_conflict(1, 'Accept', '0', (SELECT last_processed_position "
        "FROM outbox.processor_checkpoints WHERE partition = 1), 'a person')"
    ).fetchone() == (1,)
    wait_divided(outbox, 2)
    rows = outbox.connection.execute(
        "SELECT pg_visible_in_snapshot((SELECT max(transaction_id) FROM outbox.messages), lower_snapshot) "
        "FROM outbox.processor_checkpoints"
    ).fetchall()
    assert rows == [(True,), (True,)], "all went on to the barrier that was drawn again"
    skipped = [n for n in range(100, 210) if partition_of(f"key-{n % KEYS}", 3) == 1]
    handled = sorted(row[0] for row in outbox.connection.execute("SELECT total FROM handled").fetchall())
    assert handled == sorted(set(range(210)) - set(skipped))


def test_it_is_taken_back_before_it_is_done(outbox, workers):
    writer = outbox.database.direct(autocommit=False)
    start(outbox, workers, "pod-a", count=3)
    wait_shared(outbox, 3)
    writer.execute("SELECT pg_current_xact_id()")
    second = start(outbox, workers, "pod-b", count=5, generation=2)
    wait_until(lambda: counts(outbox) == (3, 5), "the barrier is drawn")
    second.kill()
    third = start(outbox, workers, "pod-c", count=3, generation=3)
    wait_until(lambda: counts(outbox) == (3, None), "it is taken back")
    writer.commit()
    produce(outbox, 200)
    wait_count(outbox, 200)
    start(outbox, workers, "pod-d", count=2, generation=4)
    third.wait_for("and another change is made", lambda r: r.partitioning is not None and r.partitioning.count == 2)
    assert_each_once_and_in_order(outbox, 200)


def test_who_was_started_from_an_older_text_of_the_resource_changes_nothing(outbox, workers):
    first = start(outbox, workers, "pod-a", count=4, generation=7)
    wait_shared(outbox, 4)
    late = start(outbox, workers, "pod-b", count=2, generation=6)
    wait_shared(outbox, 2, 2)
    produce(outbox, 100)
    wait_count(outbox, 100)
    assert counts(outbox) == (4, None)
    for worker in (first, late):
        worker.wait_for("it has looked at the partitions", lambda report: report.partitioning is not None)
        assert worker.report().partitioning.count == 4
    assert_each_once_and_in_order(outbox, 100)


def test_two_changes_at_once_are_one(outbox, workers):
    writer = outbox.database.direct(autocommit=False)
    start(outbox, workers, "pod-a", count=3)
    wait_shared(outbox, 3)
    writer.execute("SELECT pg_current_xact_id()")
    start(outbox, workers, "pod-b", count=5, generation=2)
    wait_until(lambda: counts(outbox) == (3, 5), "the barrier is drawn")
    drawn = line(outbox)
    start(outbox, workers, "pod-c", count=6, generation=3)
    wait_until(lambda: counts(outbox) == (3, 6), "to another number")
    assert line(outbox) == drawn, "the same line"
    writer.commit()
    wait_divided(outbox, 6)
    wait_shared(outbox, 2, 2, 2)
    produce(outbox, 200)
    wait_count(outbox, 200)
    assert_each_once_and_in_order(outbox, 200)


def test_all_killed_at_the_line_the_next_process_makes_the_change(outbox, workers, source):
    """A message that failed and is held keeps all of them at the barrier."""
    produce(outbox, 60)
    workers_of_old = [start(outbox, workers, f"pod-{name}", count=3, source=source) for name in "ab"]
    wait_count(outbox, 60)
    outbox.connection.execute(
        "INSERT INTO outbox.held_messages "
        "(processor_id, partition, key, place, transaction_id, position, message_id, message_type, data, blocks, "
        "behind, attempts, error_class, error, next_attempt_at) VALUES "
        "('orders', 1, 'key-1', 1, '1', 1, 'message-x', 'T', '{}', true, false, 3, 'Permanent', 'no', 'infinity'), "
        "('orders', 2, 'key-2', 2, '1', 2, 'message-y', 'T', '{}', false, false, 0, NULL, NULL, "
        "clock_timestamp() + interval '1 hour')"
    )
    last = start(outbox, workers, "pod-c", count=8, generation=2, source=source)
    last.wait_for(
        "it names the held message",
        is_changing("3 of 3 at the barrier, waiting for partition 1: message 'message-x' of key 'key-1', which failed"),
    )
    for worker in (*workers_of_old, last):
        worker.kill()
    outbox.connection.execute("DELETE FROM outbox.held_messages WHERE message_id = 'message-x'")
    assert counts(outbox) == (3, 8)

    start(outbox, workers, "pod-d", count=8, generation=2, source=source)
    wait_divided(outbox, 8)
    moved = outbox.connection.execute("SELECT partition FROM outbox.held_messages").fetchall()
    assert moved == [(partition_of("key-2", 8),)], "what waits for its time goes where its key goes"
    produce(outbox, 100, start=60)
    wait_count(outbox, 160)
    assert_each_once_and_in_order(outbox, 160)
    (act,) = outbox.connection.execute("SELECT action, reason, decided_by FROM outbox.audit_log").fetchall()
    assert (act[0], act[2]) == ("ChangePartitions", "test/shop/orders, generation 2")
    assert act[1].removesuffix(f" (after the snapshot {act[1].rsplit(' ', 1)[1]}") == "3 partitions became 8"


def test_a_conflict_stops_the_change_and_what_a_person_decides_beyond_the_line_moves_it(outbox, workers):
    produce(outbox, 100)
    old = start(outbox, workers, "pod-old", count=3)
    wait_count(outbox, 100)
    outbox.connection.execute(
        "UPDATE outbox.processor_checkpoints SET last_processed_position = last_processed_position - 1 "
        "WHERE partition = 1"
    )
    produce(outbox, 100, start=100)
    report = old.wait_state("Blocked", "CheckpointOlder")
    assert report.conflicts.open is not None
    new = start(outbox, workers, "pod-new", count=2, generation=2)
    new.wait_for("it names the conflict", is_changing("partition 1: conflict 1 waits for a person"))
    drawn = line(outbox)
    assert drawn is not None
    produce(outbox, 10, start=200)
    answer = outbox.connection.execute(
        "SELECT outbox.resolve_conflict(1, 'Rewind', (SELECT max(transaction_id) FROM outbox.messages), 9, 'a person')"
    ).fetchone()
    assert answer == (1,)
    wait_divided(outbox, 2)
    rows = outbox.connection.execute(
        "SELECT last_processed_transaction_id > %s::text::xid8 FROM outbox.processor_checkpoints", (drawn[0],)
    ).fetchall()
    assert rows == [(True,), (True,)], "all went on to the barrier that was drawn again"
