"""Consumers that compete, as real processes: killed, frozen, stopped; over the outbox and over a queue."""

from __future__ import annotations

import json
import signal
import time
from datetime import timedelta

import pytest

from outbox_core.processor.claimed_batch import ClaimedBatch
from outbox_core.report import ExitCode
from tests.support.database.consuming import taker
from tests.support.servers.postgres import wait_until
from tests.support.worker import GATED_HANDLER, PYTHON_HANDLER, PYTHON_TARGET, SQL_TARGET, HandlerGate, build_config

LEASE = 2.0
RECOVERY = LEASE + 5.0

PICKY_HANDLER = (
    PYTHON_HANDLER
    + """
    if any(m.json().get("bad") for m in batch):
        raise RuntimeError("this one is not to be handled")
"""
)
DEADLY_HANDLER = (
    PYTHON_HANDLER
    + """
    import signal
    if any(m.json().get("bad") for m in batch):
        os.kill(os.getpid(), signal.SIGKILL)
"""
)


def competing(outbox, target=PYTHON_TARGET, queue=None, **fields):
    over = {"leaseDuration": "2s"} | ({"queue": queue} if queue else {}) | fields.pop("over", {})
    delivery = {"mode": "Competing", "competing": over, "batchSize": 20, "leaseDuration": "15s"}
    return build_config(outbox.database, target, delivery=delivery | fields.pop("delivery", {}), **fields)


def start(outbox, workers, pod, handler=PYTHON_HANDLER, **fields):
    return workers.start(competing(outbox, **fields), outbox.database.uri(), handler=handler, pod=pod)


def make_queue(outbox, name="jobs"):
    outbox.connection.execute("SELECT outbox.create_queue(%s)", (name,))


def put(outbox, count, start=0, **columns):
    """Messages n of a queue, in one transaction."""
    names = "".join(f", {name}" for name in columns)
    values = "".join(f", %({name})s" for name in columns)
    outbox.connection.execute(
        f"INSERT INTO outbox.queue_jobs (message_id, message_type, data{names}) "
        f"SELECT 'message-' || n, 't', jsonb_build_object('total', n){values} "
        "FROM generate_series(%(first)s::int, %(last)s::int) AS n",
        columns | {"first": start + 1, "last": start + count},
    )


def put_bad(outbox, table, number):
    outbox.connection.execute(
        f"INSERT INTO outbox.{table} (message_id, message_type, data) VALUES (%s, 't', %s)",
        (f"message-{number}", json.dumps({"total": number, "bad": True})),
    )


def ids(first, last):
    return sorted(f"message-{n}" for n in range(first, last + 1))


def wait_each_once(outbox, expected, seconds=30.0):
    wait_until(lambda: len(outbox.handled()) >= len(expected), f"{len(expected)} messages handled", seconds)
    assert sorted(outbox.handled()) == expected


def batches(outbox):
    return outbox.connection.execute(
        "SELECT owner, pod, attempt, messages FROM outbox.competing_batches ORDER BY id"
    ).fetchall()


def pods(outbox):
    return {row[0] for row in outbox.connection.execute("SELECT DISTINCT pod FROM handled").fetchall()}


@pytest.mark.parametrize(
    ("queue", "target", "guarantee"),
    [
        pytest.param(None, SQL_TARGET, "Transactional", id="outbox-sql"),
        pytest.param(None, PYTHON_TARGET, "AtLeastOnce", id="outbox-python"),
        pytest.param("jobs", SQL_TARGET, "AtLeastOnce", id="queue-sql"),
        pytest.param("jobs", PYTHON_TARGET, "Transactional", id="queue-python"),
    ],
)
def test_one_consumer_handles_everything_once_and_first_in_first_out(outbox, workers, queue, target, guarantee):
    make_queue(outbox)
    produce = (lambda count, start=0: put(outbox, count, start)) if queue else (
        lambda count, start=0: outbox.produce(count, start=start)
    )  # fmt: skip
    produce(300)
    worker = start(outbox, workers, "pod-a", target=target, queue=queue, delivery={"guarantee": guarantee})
    wait_each_once(outbox, ids(1, 300))
    produce(100, 300)
    wait_each_once(outbox, ids(1, 400))

    assert [name.removeprefix("message-") for name in outbox.handled()] == [str(n) for n in range(1, 401)]
    report = worker.wait_for(
        "it is idle", lambda r: r.reason == "Idle" and r.lag and r.lag.messages == 0 and r.unfinished.consumers
    )
    assert (report.state, report.handled, report.unfinished.consumers) == ("Active", 400, 1)
    assert batches(outbox) == []


@pytest.mark.parametrize("queue", [None, "jobs"], ids=["outbox", "queue"])
def test_what_a_killed_consumer_had_is_handled_by_another_within_the_lease_and_five_seconds(outbox, workers, queue):
    make_queue(outbox)
    first = start(outbox, workers, "pod-a", handler=GATED_HANDLER, queue=queue)
    first.wait_state("Active")
    gate = HandlerGate(first.directory)
    gate.close()
    put(outbox, 60) if queue else outbox.produce(60)
    gate.wait_entered()
    start(outbox, workers, "pod-b", queue=queue).wait_state("Active")
    wait_until(lambda: len(outbox.handled()) == 40, "the second consumer handles what is left")

    first.kill()
    killed = time.monotonic()
    wait_each_once(outbox, ids(1, 60))
    assert time.monotonic() - killed < RECOVERY
    assert pods(outbox) == {"pod-b"}


@pytest.mark.parametrize("queue", [None, "jobs"], ids=["outbox", "queue"])
def test_a_consumer_frozen_past_its_lease_commits_nothing_of_what_was_taken_over(outbox, workers, queue):
    make_queue(outbox)
    first = start(outbox, workers, "pod-a", handler=GATED_HANDLER, queue=queue)
    first.wait_state("Active")
    gate = HandlerGate(first.directory)
    gate.close()
    put(outbox, 20) if queue else outbox.produce(20)
    gate.wait_entered()
    first.send(signal.SIGSTOP)
    start(outbox, workers, "pod-b", queue=queue)
    wait_each_once(outbox, ids(1, 20))
    assert pods(outbox) == {"pod-b"}

    gate.open()
    first.send(signal.SIGCONT)
    put(outbox, 60, 20) if queue else outbox.produce(60, start=20)
    wait_each_once(outbox, ids(1, 80))
    first.wait_for("it goes on", lambda r: r.state == "Active")
    assert sorted(outbox.handled()) == ids(1, 80)


def test_a_batch_that_was_taken_without_an_answer_is_handled_after_its_lease(outbox, workers):
    """It is in the name of a consumer that lives, and does not know of it."""
    first = start(outbox, workers, "pod-a", handler=GATED_HANDLER)
    first.wait_state("Active")
    gate = HandlerGate(first.directory)
    gate.close()
    outbox.produce(60)
    gate.wait_entered()
    ((owner, uid),) = outbox.connection.execute(
        "SELECT b.owner, c.uid FROM outbox.competing_batches b JOIN outbox.processor_claims c USING (processor_id)"
    ).fetchall()
    lost = taker(owner, timedelta(seconds=LEASE), limit=20, uid=uid).claim_next(outbox.connection)
    assert isinstance(lost, ClaimedBatch)
    gate.open()
    wait_each_once(outbox, ids(1, 60), RECOVERY)


def test_asked_to_stop_a_consumer_hands_back_at_once_and_uses_no_attempt(outbox, workers):
    first = start(
        outbox, workers, "pod-a", handler=GATED_HANDLER, over={"leaseDuration": "10m"}, delivery={"timeout": "1s"}
    )
    first.wait_state("Active")
    gate = HandlerGate(first.directory)
    gate.close()
    outbox.produce(20)
    gate.wait_entered()
    second = start(outbox, workers, "pod-b", over={"leaseDuration": "10m"})
    second.wait_state("Active")
    asked = time.monotonic()
    assert first.terminate() == ExitCode.DONE
    wait_each_once(outbox, ids(1, 20))
    assert time.monotonic() - asked < 5.0
    assert pods(outbox) == {"pod-b"}
    assert second.wait_for("it has looked", lambda r: r.unfinished and r.unfinished.batches == 0).attempt == 0


def test_three_consumers_share_and_each_message_is_handled_once(outbox, workers):
    make_queue(outbox)
    put(outbox, 1500)
    consumers = [start(outbox, workers, f"pod-{name}", queue="jobs") for name in "abc"]
    count = 1500

    def takes_part(report):
        """There is always something to take: who begins first may take all that there is."""
        nonlocal count
        put(outbox, 10, count)
        count += 10
        return report.handled > 0

    for worker in consumers:
        worker.wait_for("it takes part", takes_part)
    wait_each_once(outbox, ids(1, count))
    assert pods(outbox) == {"pod-a", "pod-b", "pod-c"}


@pytest.mark.parametrize("queue", [None, "jobs"], ids=["outbox", "queue"])
def test_the_message_that_fails_is_found_tried_again_and_becomes_a_dead_letter(outbox, workers, queue):
    make_queue(outbox)
    table = "queue_jobs" if queue else "messages"
    produce = (lambda count, start=0: put(outbox, count, start)) if queue else (
        lambda count, start=0: outbox.produce(count, start=start)
    )  # fmt: skip
    produce(13)
    put_bad(outbox, table, 14)
    produce(16, 14)
    retry = {"maxAttempts": 3, "initialBackoff": "50ms", "maxBackoff": "100ms"}
    worker = start(
        outbox, workers, "pod-a", handler=PICKY_HANDLER, queue=queue,
        delivery={"retry": retry, "whenExhausted": "DeadLetter"},
    )  # fmt: skip

    def dead():
        query = "SELECT message_id, attempts, error_class, error FROM outbox.dead_letters"
        return outbox.connection.execute(query).fetchall()

    wait_until(lambda: dead() != [], "it is a dead letter")
    ((message_id, attempts, error_class, error),) = dead()
    assert (message_id, attempts, error_class) == ("message-14", 3, "RuntimeError")
    assert "not to be handled" in error
    wait_each_once(outbox, sorted({*ids(1, 30)} - {"message-14"}))
    worker.wait_for("nothing is left", lambda r: r.lag and r.lag.messages == 0 and r.state == "Active")
    assert batches(outbox) == []


def test_a_message_that_kills_its_process_is_found_and_counted_across_restarts(outbox, workers):
    outbox.produce(5)
    put_bad(outbox, "messages", 6)
    outbox.produce(2, start=6)
    delivery = {"retry": {"maxAttempts": 2, "initialBackoff": "50ms"}, "whenExhausted": "DeadLetter"}
    config = competing(outbox, delivery=delivery)
    home = workers.prepare(config, outbox.database.uri(), handler=DEADLY_HANDLER)

    def count():
        return outbox.connection.execute("SELECT count(*) FROM outbox.dead_letters").fetchone()[0]

    starts = 0
    while not count():
        assert starts < 12
        worker = workers.launch(home)
        starts += 1
        wait_until(lambda: worker.process.poll() is not None or count(), "it dies, or has counted")  # noqa: B023
    wait_each_once(outbox, sorted({*ids(1, 8)} - {"message-6"}))


def test_a_queue_has_delays_unique_keys_and_priorities_that_age(outbox, workers):
    make_queue(outbox)
    put(outbox, 1, 0, unique_key="same")
    put(outbox, 1, 1, unique_key="same")  # swallowed: the first is pending
    put(outbox, 1, 2, priority=0)
    put(outbox, 1, 3, priority=8)
    outbox.connection.execute(
        "INSERT INTO outbox.queue_jobs (message_id, message_type, data, priority, scheduled) "
        "VALUES ('message-5', 't', '{\"total\": 5}', 9, clock_timestamp() - interval '1 hour')"
    )
    start(outbox, workers, "pod-a", queue="jobs", delivery={"batchSize": 1})
    wait_until(lambda: len(outbox.handled()) == 4, "what is due is handled")
    # One hour of waiting is worth 60 levels: the oldest goes before what is more urgent.
    assert outbox.handled() == ["message-5", "message-3", "message-1", "message-4"]
    outbox.connection.execute(
        "INSERT INTO outbox.queue_jobs (message_id, message_type, data, deliver_after) "
        "VALUES ('message-6', 't', '{\"total\": 6}', clock_timestamp() + interval '3 seconds')"
    )
    stored = time.monotonic()
    put(outbox, 1, 6, unique_key="same")  # taken already: stored
    wait_until(lambda: len(outbox.handled()) == 6, "the delayed one is handled too")
    assert time.monotonic() - stored > 2.5
    assert outbox.handled()[4:] == ["message-7", "message-6"]


def test_a_log_and_a_queue_on_the_same_messages(outbox, workers):
    """An ordered processor and competing consumers read one outbox; no row of it is changed."""
    before = outbox.produce(200)
    rows = "SELECT position, transaction_id::text, xmin::text, ctid::text FROM outbox.messages ORDER BY position"
    untouched = outbox.connection.execute(rows).fetchall()
    outbox.connection.execute("CREATE TABLE logged (n serial, message_id text)")
    log_target = {"sql": {"statement": "INSERT INTO logged (message_id) SELECT message_id FROM batch "
                                       "ORDER BY transaction_id, position"}}  # fmt: skip
    log = build_config(outbox.database, log_target, processor_id="log", resource={"name": "log", "uid": "uid-log"})
    workers.start(log, outbox.database.uri(), pod="pod-log")
    for name in "ab":
        start(outbox, workers, f"pod-{name}")
    wait_each_once(outbox, sorted(before))

    def logged():
        return [row[0] for row in outbox.connection.execute("SELECT message_id FROM logged ORDER BY n")]

    wait_until(lambda: len(logged()) == 200, "the log is complete")
    assert logged() == before
    assert outbox.connection.execute(rows).fetchall() == untouched


@pytest.mark.parametrize(
    "mode", [{}, {"mode": "Partitioned", "partitions": {"count": 3}}], ids=["Ordered", "Partitioned"]
)
def test_a_processor_whose_batches_are_handed_out_is_not_run_in_another_mode(outbox, workers, mode):
    """Behind its checkpoint are messages that are handled, before it some that wait for their time."""
    put_bad(outbox, "messages", 1)
    outbox.produce(20, start=1)
    consumer = start(outbox, workers, "pod-a", handler=PICKY_HANDLER)
    wait_each_once(outbox, ids(2, 21))
    assert consumer.terminate() == ExitCode.DONE
    other = workers.start(
        build_config(outbox.database, PYTHON_TARGET, delivery=mode), outbox.database.uri(), handler=PYTHON_HANDLER
    )
    other.wait_state("Unavailable", "PartitionsDiffer")
    assert other.terminate() == ExitCode.DONE
    start(outbox, workers, "pod-b")
    wait_each_once(outbox, ids(1, 21))


def test_nobody_elses_open_transaction_holds_a_queue_up(outbox, workers):
    make_queue(outbox)
    with outbox.database.direct(autocommit=False) as stranger, outbox.database.direct(autocommit=False) as late:
        stranger.execute("INSERT INTO outbox.queue_jobs (message_id, message_type, data) VALUES ('message-1', 't', "
                         "'{\"total\": 1}')")  # fmt: skip
        late.execute("SELECT pg_current_xact_id()")
        start(outbox, workers, "pod-a", queue="jobs")
        put(outbox, 50, 1)
        wait_until(lambda: len(outbox.handled()) == 50, "others are handled meanwhile")
        stranger.commit()
        wait_each_once(outbox, ids(1, 51))
        late.rollback()


def test_the_checkpoint_never_passes_what_is_not_done(outbox, workers):
    first = start(outbox, workers, "pod-a", handler=GATED_HANDLER, over={"leaseDuration": "10m"})
    first.wait_state("Active")
    gate = HandlerGate(first.directory)
    gate.close()
    outbox.produce(20)
    gate.wait_entered()
    second = start(outbox, workers, "pod-b")
    second.wait_state("Active")
    outbox.produce(40, start=20)
    wait_until(lambda: len(outbox.handled()) == 40, "the others are done")
    # Both are looked at one after the other, so one may be older than the end of the second batch.
    second.wait_for(
        "one batch is open", lambda r: r.lag and r.unfinished and (r.lag.messages, r.unfinished.batches) == (20, 1)
    )
    (lowest,) = outbox.connection.execute("SELECT min(transaction_id)::text FROM outbox.messages").fetchone()
    assert int(outbox.stored().split(":")[0]) < int(lowest)
    gate.open()
    wait_each_once(outbox, ids(1, 60))
    wait_until(lambda: int(outbox.stored().split(":")[0]) > int(lowest), "the checkpoint follows")


def test_the_checkpoint_of_a_queue_passes_all_that_is_done_whatever_priorities_were_used(outbox, workers):
    """A priority that nobody uses, or not any more, holds nothing up."""
    make_queue(outbox)
    worker = start(outbox, workers, "pod-a", queue="jobs")

    def is_passed():
        (written,) = outbox.connection.execute(
            "SELECT max(transaction_id::text::bigint) FROM outbox.queue_jobs"
        ).fetchone()
        return int(outbox.stored().partition(":")[0]) >= written

    for start_at, priority in enumerate((5, 0, 5)):
        put(outbox, 30, start=30 * start_at, priority=priority)
        wait_each_once(outbox, ids(1, 30 * start_at + 30))
        wait_until(is_passed, "the checkpoint reaches the last message", 15)
        report = worker.wait_for("nothing waits", lambda r: r.lag is not None and r.lag.messages == 0)
        assert report.handled == 30 * start_at + 30
