"""A checkpoint that was edited by hand, and nobody recorded it: whoever loads it next blocks until a person decides."""

from __future__ import annotations

import json
import signal

import pytest

from outbox_core.partition import partition_of
from tests.support.servers.postgres import wait_until
from tests.support.worker import GATED_HANDLER, PYTHON_TARGET, SQL_TARGET, HandlerGate, build_config

SNAPSHOT = {"cursor": "Snapshot"}
PARTITIONED = {"mode": "Partitioned", "partitions": {"count": 2}}
AHEAD = "last_processed_position = last_processed_position + 5"


def build(outbox, target=PYTHON_TARGET, **fields):
    return build_config(outbox.database, target, **fields)


def first_run(outbox, workers, *, in_order=True, **fields):
    """Ten messages are handled, and the worker is killed."""
    ids = outbox.produce(10)
    worker = workers.start(build(outbox, SQL_TARGET, **fields), outbox.database.uri())
    if in_order:
        outbox.wait_handled(ids)
    else:
        wait_until(lambda: outbox.count() == len(ids), "all are handled")
    worker.kill()
    return ids


def edit(outbox, change):
    outbox.connection.execute(f"UPDATE outbox.processor_checkpoints SET {change}")


def decide(outbox, workers, worker, action, pair):
    """As the operator would after a person decided: the same worker again, with the decision."""
    conflict = worker.report().conflicts.open
    assert conflict is not None
    worker.post_intent("KeepClaim")
    assert worker.terminate() == 0
    config = json.loads((worker.directory / "processor.json").read_text())
    config["resolution"] = {"conflictId": conflict.id, "action": action, "pair": pair, "decidedBy": "somebody"}
    (worker.directory / "processor.json").write_text(json.dumps(config))
    return workers.launch(worker.directory)


def test_edited_while_nobody_runs(outbox, workers):
    ids = first_run(outbox, workers)
    kept = outbox.stored()
    edit(outbox, "last_processed_position = 1")
    more = outbox.produce(3, start=10)

    worker = workers.start(build(outbox, SQL_TARGET), outbox.database.uri())

    report = worker.wait_state("Blocked", "CheckpointOlder")
    assert report.conflicts.open is not None
    assert (report.conflicts.open.code, report.conflicts.open.expected, report.conflicts.open.stored) == (
        3, kept, outbox.stored(),
    )  # fmt: skip
    assert outbox.handled() == ids
    decide(outbox, workers, worker, "Rewind", kept)
    outbox.wait_handled(ids + more)


def test_a_row_that_is_gone_does_not_start_from_the_beginning(outbox, workers):
    ids = first_run(outbox, workers)
    kept = outbox.stored()
    outbox.connection.execute("DELETE FROM outbox.processor_checkpoints")

    worker = workers.start(build(outbox, SQL_TARGET), outbox.database.uri())

    report = worker.wait_state("Blocked", "CheckpointOlder")
    assert "accept" not in report.message
    assert outbox.handled() == ids
    worker = decide(outbox, workers, worker, "Rewind", kept)
    worker.wait_state("Active", "Idle")
    assert outbox.handled() == ids


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"source": SNAPSHOT}, id="Snapshot"),
        pytest.param({"source": {"cursor": None}}, id="no cursor named"),
        pytest.param({"source": SNAPSHOT, "delivery": PARTITIONED}, id="Partitioned"),
        pytest.param({"source": {"cursor": None}, "delivery": PARTITIONED}, id="Partitioned, no cursor named"),
    ],
)
def test_a_snapshot_range_that_is_gone_is_rewound_to_a_position(outbox, workers, fields):
    """The counter went with the row while nothing ran: the conflict says all the same which cursor it was."""
    ids = first_run(outbox, workers, in_order="delivery" not in fields, **fields)
    outbox.connection.execute("DELETE FROM outbox.processor_checkpoints WHERE partition = 0")
    worker = workers.start(build(outbox, SQL_TARGET, **fields), outbox.database.uri())
    worker.wait_for("it is seen", lambda report: report.conflicts.open is not None)
    (first,) = outbox.connection.execute(
        "SELECT position FROM outbox.messages WHERE message_id = %s", (ids[7],)
    ).fetchone()

    decide(outbox, workers, worker, "Rewind", f"0:{first}")

    more = outbox.produce(3, start=10)
    again = [each for each in ids[7:] if "delivery" not in fields or partition_of(f"order-{int(each[8:]) % 7}", 2) == 0]
    wait_until(lambda: outbox.count() >= len(ids + again + more), "it goes on")
    assert sorted(outbox.handled()) == sorted(ids + again + more)


def test_an_edited_range_although_its_counter_is_the_same(outbox, workers):
    ids = first_run(outbox, workers, source=SNAPSHOT)
    edit(outbox, "lower_snapshot = NULL")

    worker = workers.start(build(outbox, SQL_TARGET, source=SNAPSHOT), outbox.database.uri())

    report = worker.wait_state("Blocked", "CheckpointAhead")
    assert report.conflicts.open is not None
    assert outbox.handled() == ids
    decide(outbox, workers, worker, "Accept", report.conflicts.open.stored)
    outbox.wait_handled(ids + ids)  # nothing is examined, said the edit


def test_an_edited_partition_blocks_and_the_others_go_on(outbox, workers):
    config = build(outbox, SQL_TARGET, delivery=PARTITIONED)
    ids = outbox.produce(20)
    worker = workers.start(config, outbox.database.uri())
    wait_until(lambda: sorted(outbox.handled()) == sorted(ids), "all are handled")
    worker.kill()
    edit(outbox, AHEAD + " WHERE partition = 1")

    worker = workers.start(config, outbox.database.uri())

    report = worker.wait_for("it is seen", lambda r: r.conflicts.open is not None)
    assert (report.conflicts.open.partition, report.conflicts.open.code) == (1, 2)
    worker.wait_for("the other partition has an owner", lambda _: owned(outbox) == [0])


def owned(outbox):
    rows = outbox.connection.execute(
        "SELECT partition FROM outbox.processor_leases WHERE expires_at > clock_timestamp() ORDER BY 1"
    ).fetchall()
    return [partition for (partition,) in rows]


@pytest.fixture
def told(outbox, workers):
    """An owner that was told 2 and waits to record it, for another session locks the table."""
    outbox.produce(10)
    config = build(outbox, delivery={"leaseDuration": "2s"})
    home = workers.prepare(config, outbox.database.uri(), handler=GATED_HANDLER)
    gate = HandlerGate(home)
    gate.close()
    worker = workers.launch(home)
    gate.wait_entered()
    edit(outbox, AHEAD)
    lock = outbox.database.direct(autocommit=False)
    lock.execute("LOCK TABLE outbox.processor_conflicts IN SHARE ROW EXCLUSIVE MODE")
    gate.open()
    wait_until(lambda: recording(outbox), "the refusal is being recorded")
    yield worker, lock
    lock.close()


def recording(outbox):
    return outbox.connection.execute(
        "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%record_refusal%'"
    ).fetchone()


def end_recording(outbox, lock):
    (pid,) = recording(outbox)
    outbox.connection.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,))
    lock.rollback()


def test_told_2_and_killed_before_it_is_recorded(outbox, workers, told):
    worker, lock = told
    worker.kill()
    end_recording(outbox, lock)

    second = workers.start(build(outbox, SQL_TARGET), outbox.database.uri())

    report = second.wait_state("Blocked", "CheckpointAhead")
    assert report.conflicts.open is not None
    assert (report.conflicts.open.expected, report.conflicts.open.stored) == ("0:0", "0:5")
    assert outbox.handled() == []


def test_told_2_and_frozen_before_it_is_recorded(outbox, workers, told):
    worker, lock = told
    worker.send(signal.SIGSTOP)
    end_recording(outbox, lock)
    second = workers.start(build(outbox, SQL_TARGET), outbox.database.uri())
    report = second.wait_state("Blocked", "CheckpointAhead")
    assert outbox.handled() == []
    second = decide(outbox, workers, second, "Rewind", report.conflicts.open.expected)
    ids = [f"message-{n}" for n in range(1, 11)]
    outbox.wait_handled(ids)

    worker.send(signal.SIGCONT)

    second.wait_for("the first one has recorded it, too", lambda r: r.conflicts.count == 2)
    assert second.report().conflicts.open is None, "what was decided is not asked again"
    more = outbox.produce(3, start=10)
    outbox.wait_handled(ids + more)
