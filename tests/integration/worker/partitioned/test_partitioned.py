"""A divided processor, with real processes and signals: keys in order, partitions shared, each move fenced."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from outbox_core.partition import partition_of
from outbox_core.report import ExitCode
from outbox_core.spec import PartitionKey
from outbox_worker.engine.partition_steps import PASSING_SECONDS
from outbox_worker.postgres.reading.slots import can_read_by_slot
from tests.support.divided import (
    COUNT,
    KEYS,
    assert_each_once_and_in_order,
    divided,
    owners,
    produce,
    start,
    wait_count,
    wait_shared,
)
from tests.support.nightly import at_night
from tests.support.servers.postgres import build_source, wait_until
from tests.support.worker import (
    GATED_HANDLER,
    PICKY_HANDLER,
    PYTHON_HANDLER,
    PYTHON_TARGET,
    SQL_TARGET,
    HandlerGate,
    build_config,
)

LEASE = 2.0


@pytest.mark.parametrize("target", [SQL_TARGET, PYTHON_TARGET], ids=["sql", "python"])
@pytest.mark.parametrize("guarantee", ["Transactional", "AtLeastOnce"])
def test_one_process_handles_all_partitions(outbox, workers, target, guarantee):
    produce(outbox, 500)
    worker = start(outbox, workers, "pod-a", target=target, delivery={"guarantee": guarantee})
    wait_count(outbox, 500)
    produce(outbox, 100, start=500)
    wait_count(outbox, 600)
    assert_each_once_and_in_order(outbox, 600)
    report = worker.wait_for("it is idle and has looked", lambda r: r.reason == "Idle" and len(r.leases) == COUNT)
    assert (report.state, report.handled, report.conflicts.count) == ("Active", 600, 0)
    assert [view.partition for view in report.checkpoints] == list(range(COUNT))
    assert report.lease is not None
    assert report.lease.held


@pytest.mark.parametrize("cursor", ["TransactionOrder", *at_night("Snapshot")])
def test_an_idle_partition_passes_no_message_that_may_still_be_committed(outbox, workers, cursor):
    """It does not read while messages of others come, and says of those that it has examined them."""
    start(outbox, workers, "pod-a", delivery={"pollInterval": "100ms"}, source={"cursor": cursor})
    produce(outbox, KEYS)
    wait_count(outbox, KEYS)
    others = [n for n in range(KEYS) if partition_of(f"key-{n}", COUNT) != partition_of("key-0", COUNT)]
    early = outbox.database.direct(autocommit=False)
    insert = (
        "INSERT INTO outbox.messages (partition_key, message_id, message_type, data) "
        "VALUES ('key-' || %s::int, 'message-' || %s::int, 'OrderPlaced', jsonb_build_object('total', %s::int))"
    )
    early.execute(insert, (0, KEYS, KEYS))
    until, count = time.monotonic() + 2 * PASSING_SECONDS, KEYS + 1
    while time.monotonic() < until:
        outbox.connection.execute(insert, (others[count % len(others)], count, count))
        count += 1
        time.sleep(0.05)
    early.commit()
    wait_count(outbox, count)
    totals = outbox.connection.execute("SELECT total FROM handled ORDER BY total").fetchall()
    assert [total for (total,) in totals] == list(range(count))


def test_of_two_replicas_that_race_for_the_index_neither_fails_nor_advises_it_for_good(outbox, workers):
    produce(outbox, 500)
    pods = [start(outbox, workers, f"pod-{name}") for name in "abc"]
    wait_count(outbox, 500)
    wait_shared(outbox, 2, 2, 2)
    for worker in pods:
        worker.wait_for("nothing is advised", lambda r: r.advice is None, 20)
        assert "deadlock" not in worker.log()


def test_messages_are_handled_while_the_index_is_being_built(outbox, workers):
    """A build waits for every transaction that writes into the outbox, and takes as long as the outbox is large."""
    producer = outbox.database.direct(autocommit=False)
    producer.execute("LOCK TABLE outbox.messages IN ROW EXCLUSIVE MODE")
    worker = start(outbox, workers, "pod-a")
    wait_until(lambda: is_being_built(outbox), "it is being built")
    produce(outbox, 200)
    wait_count(outbox, 200)
    assert is_being_built(outbox)

    assert worker.terminate() == ExitCode.DONE
    wait_until(lambda: not is_being_built(outbox), "the build ended with its process")
    producer.rollback()
    start(outbox, workers, "pod-b")
    wait_until(lambda: can_read_by_slot(outbox.connection, build_source(), PartitionKey()), "it is built anew", 20)


def is_being_built(outbox):
    return outbox.connection.execute("SELECT count(*) FROM pg_stat_progress_create_index").fetchone() == (1,)


def test_an_index_that_a_person_creates_is_seen(outbox, workers):
    worker = start(outbox, workers, "pod-a", source={"schema": "Verify"})
    report = worker.wait_for("it advises", lambda r: r.advice is not None and r.state == "Active")
    outbox.connection.execute(report.advice[report.advice.index("CREATE INDEX") :])
    report = worker.wait_for("it sees the index", lambda r: r.advice is None, 20)
    assert report.state == "Active"


def test_three_share_and_when_one_is_killed_the_others_go_on(outbox, workers):
    pods = [start(outbox, workers, f"pod-{name}") for name in "abc"]
    wait_shared(outbox, 2, 2, 2)
    produce(outbox, 400)
    wait_count(outbox, 400)
    victim = next(worker for worker in pods if worker.report().lease.pod == "pod-b")

    victim.kill()
    killed = time.monotonic()
    wait_shared(outbox, 3, 3)
    assert time.monotonic() - killed < LEASE + 1.0

    produce(outbox, 400, start=400)
    wait_count(outbox, 800)
    assert_each_once_and_in_order(outbox, 800)
    assert "pod-b" not in owners(outbox).values()


def test_who_is_asked_to_stop_hands_over_at_once(outbox, workers):
    first, _ = (start(outbox, workers, f"pod-{name}") for name in "ab")
    wait_shared(outbox, 3, 3)
    assert first.terminate() == ExitCode.DONE
    ended = time.monotonic()
    wait_shared(outbox, 6)
    assert time.monotonic() - ended < LEASE
    assert outbox.connection.execute("SELECT count(*) FROM outbox.processor_members").fetchone() == (1,)


def test_order_per_key_holds_while_partitions_move(outbox, workers):
    """Replicas come, leave and are killed while messages keep coming."""
    done = threading.Event()
    produced = 0

    def keep_producing():
        nonlocal produced
        with outbox.database.direct() as connection:
            while not done.is_set():
                connection.execute(
                    "INSERT INTO outbox.messages (partition_key, message_id, message_type, data) "
                    "SELECT 'key-' || n %% %s, 'message-' || n, 't', jsonb_build_object('total', n) "
                    "FROM generate_series(%s::int, %s::int) AS n",
                    (KEYS, produced, produced + 9),
                )
                produced += 10
                done.wait(0.03)  # few enough for a busy machine to keep up with

    producer = threading.Thread(target=keep_producing)
    producer.start()
    try:
        first = start(outbox, workers, "pod-a")
        wait_shared(outbox, 6)
        second = start(outbox, workers, "pod-b")
        wait_shared(outbox, 3, 3)
        start(outbox, workers, "pod-c")
        wait_shared(outbox, 2, 2, 2)
        second.kill()
        wait_shared(outbox, 3, 3)
        start(outbox, workers, "pod-d")
        wait_shared(outbox, 2, 2, 2)
        assert first.terminate() == ExitCode.DONE
        wait_shared(outbox, 3, 3)
    finally:
        done.set()
        producer.join()
    wait_count(outbox, produced, 60)
    assert_each_once_and_in_order(outbox, produced)


def test_a_lease_whose_answer_was_lost_is_let_go(outbox, workers):
    """The database has it as this process's; the process does not know, and shall not own the partition."""
    for name in "ab":
        start(outbox, workers, f"pod-{name}")
    wait_shared(outbox, 3, 3)
    last, owner = COUNT - 1, owners(outbox)[COUNT - 1]
    outbox.connection.execute(
        "UPDATE outbox.processor_leases l SET epoch = l.epoch + 1, token = o.token, pod = o.pod "
        "FROM outbox.processor_leases o WHERE l.partition = %s AND o.partition = "
        "(SELECT min(partition) FROM outbox.processor_leases WHERE pod <> %s)",
        (last, owner),
    )
    wait_until(lambda: owners(outbox).get(last) == owner, "it is its owner's again")
    wait_shared(outbox, 3, 3)
    produce(outbox, 60)
    wait_count(outbox, 60)
    assert_each_once_and_in_order(outbox, 60)


def test_frozen_in_the_middle_of_a_batch_it_is_told_4_for_that_partition(outbox, workers):
    home = workers.prepare(divided(outbox), outbox.database.uri(), handler=GATED_HANDLER)
    owner, gate = workers.launch(home, pod="pod-a"), HandlerGate(home)
    wait_shared(outbox, 6)
    # In the middle of one that it keeps: the highest numbers are given back.
    gate.close(next(key for n in range(KEYS) if partition_of(key := f"key-{n}", COUNT) < COUNT // 2))
    produce(outbox, 200)
    gate.wait_entered()
    second = start(outbox, workers, "pod-b", handler=GATED_HANDLER)
    wait_shared(outbox, 3, 3)
    wait_until(lambda: len(outbox.handled()) > 0, "the others go on, though their owner is in the middle of a batch")

    owner.send(signal.SIGSTOP)
    wait_shared(outbox, 6)
    wait_count(outbox, 200)
    gate.open()
    owner.send(signal.SIGCONT)
    wait_shared(outbox, 3, 3)
    assert_each_once_and_in_order(outbox, 200)
    second.wait_for("one batch was refused", lambda r: r.conflicts.by_code == {"4": 1})
    assert owner.report().state in ("Active", "Standby")


def test_an_edited_checkpoint_blocks_its_partition_only(outbox, workers):
    produce(outbox, 100)
    worker = start(outbox, workers, "pod-a")
    wait_count(outbox, 100)
    blocked = partition_of("key-7", COUNT)
    outbox.connection.execute(
        "UPDATE outbox.processor_checkpoints SET last_processed_position = last_processed_position + 1000000 "
        "WHERE partition = %s",
        (blocked,),
    )

    produce(outbox, 200, start=100)

    expected = [n for n in range(100, 300) if partition_of(f"key-{n % KEYS}", COUNT) != blocked]
    wait_count(outbox, 100 + len(expected))
    report = worker.wait_state("Blocked", "CheckpointAhead")
    assert f"partition {blocked}: " in report.message
    assert report.conflicts.open is not None
    assert (report.conflicts.open.partition, report.conflicts.open.code) == (blocked, 2)
    assert worker.get("/readyz")[0] == 200, "the others go on"
    assert len(outbox.handled()) == 100 + len(expected)
    assert len(owners(outbox)) == COUNT - 1


def test_a_failing_message_stops_its_partition_only_and_mends(outbox, workers):
    delivery = {"blocks": "Partition", "retry": {"maxAttempts": 2, "initialBackoff": "100ms"}}
    config = divided(outbox, delivery=delivery)
    home = workers.prepare(config, outbox.database.uri(), handler=PICKY_HANDLER)
    (home / "bad").write_text("key-7")
    worker = workers.launch(home, pod="pod-a")
    produce(outbox, 200)
    stopped = partition_of("key-7", COUNT)
    expected = [n for n in range(200) if n < 7 or partition_of(f"key-{n % KEYS}", COUNT) != stopped]

    wait_count(outbox, len(expected))
    report = worker.wait_state("Stopped", "AttemptsExhausted")

    assert f"partition {stopped}: gave up after 2 attempts at message 'message-7' of type" in report.message
    assert len(outbox.handled()) == len(expected)
    (home / "bad").unlink()
    (home / "handler/orders.py").write_text(PICKY_HANDLER + "\n")
    wait_count(outbox, 200)
    assert_each_once_and_in_order(outbox, 200)


def test_what_is_partitioned_otherwise_is_refused(outbox, workers):
    produce(outbox, 50)
    start(outbox, workers, "pod-a").wait_for("all is handled", lambda r: r.handled == 50)
    for worker in list(workers.started):
        worker.terminate()
    for config in (
        divided(outbox, delivery={"partitions": {"count": COUNT, "key": {"data": ["total"]}}}),
        build_config(outbox.database, SQL_TARGET),
    ):
        worker = workers.start(config, outbox.database.uri(), handler=PYTHON_HANDLER)
        report = worker.wait_state("Unavailable", "PartitionsDiffer")
        assert f"{COUNT} partitions" in report.message
        worker.terminate()
    assert len(outbox.handled()) == 50


def test_what_was_not_partitioned_is_not_partitioned_later(outbox, workers):
    ids = outbox.produce(10)
    ordered = workers.start(build_config(outbox.database, SQL_TARGET), outbox.database.uri())
    outbox.wait_handled(ids)
    ordered.terminate()
    worker = start(outbox, workers, "pod-a")
    assert "not partitioned" in worker.wait_state("Unavailable", "PartitionsDiffer").message
    assert outbox.handled() == ids


def test_start_from_the_end_loses_no_partition_what_came_since(outbox, workers):
    """A partition that is first owned by a later replica starts where all of them started."""
    produce(outbox, 100)
    first = start(outbox, workers, "pod-a", startFrom={"type": "End"})
    wait_until(
        lambda: outbox.connection.execute("SELECT count(*) FROM outbox.processor_checkpoints").fetchone() == (COUNT,),
        "all partitions have begun",
    )
    first.kill()
    produce(outbox, 100, start=100)
    start(outbox, workers, "pod-b", startFrom={"type": "End"})
    wait_count(outbox, 100)
    assert sorted(
        row[0] for row in outbox.connection.execute("SELECT total FROM handled").fetchall()
    ) == list(range(100, 200))  # fmt: skip


def test_after_a_lost_connection_every_partition_looks_which_database_it_is(outbox, workers):
    """They share the connection: what one of them opened again may lead elsewhere, here to a copy."""
    produce(outbox, 40)
    worker = start(outbox, workers, "pod-a", delivery={"pollInterval": "2s", "leaseDuration": "20s"})
    wait_count(outbox, 40)
    worker.wait_for("it is idle", lambda r: r.reason == "Idle" and len(r.leases) == COUNT)
    time.sleep(4)  # all look every two seconds, one after the other

    outbox.connection.execute("UPDATE outbox.database_identity SET system_identifier = 1")
    ended = outbox.connection.execute(
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = current_database() "
        "AND application_name = 'outbox orders pod-a'"
    ).fetchone()
    assert ended == (1,)
    produce(outbox, 40, start=40)

    worker.wait_state("Unavailable", "DatabaseCopied")
    time.sleep(4)
    assert len(outbox.handled()) == 40
    outbox.connection.execute("SELECT outbox.confirm_identity('keep')")
    wait_count(outbox, 80)
    assert_each_once_and_in_order(outbox, 80)
