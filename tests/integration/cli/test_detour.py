"""A processor stops at a message. It says which one and by which command it goes on; that command does it."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.integration.cli.conftest import Cli
from tests.support.nightly import by_day
from tests.support.servers.postgres import wait_until
from tests.support.worker import PYTHON_HANDLER, PYTHON_TARGET, SQL_TARGET, build_config

DELIVERY = {
    "blocks": "Partition", "whenExhausted": "Stop",
    "retry": {"maxAttempts": 2, "initialBackoff": "50ms", "maxBackoff": "50ms"},
}  # fmt: skip
PICKY = (
    PYTHON_HANDLER
    + """
    if any(m.message_id == "message-7" for m in batch):
        raise ValueError("not this one")
"""
)
WAITING = """\
        import pathlib, time
        pathlib.Path("at-7").touch()
        while not pathlib.Path("go").exists():
            time.sleep(0.01)
        raise"""
MODES = [
    pytest.param("Ordered", "TransactionOrder", id="Ordered"),
    pytest.param("Ordered", "Snapshot", id="Ordered, Snapshot"),
    pytest.param("Partitioned", "Snapshot", id="Partitioned, Snapshot"),
]


def settings(mode):
    return DELIVERY | ({"mode": mode} if mode == "Ordered" else {"mode": mode, "partitions": {"count": 3}})


def command_of(message):
    """What a person would copy from the message."""
    found = re.search(r"go on without this message: outbox (.*)$", message)
    assert found is not None, message
    return shlex.split(found[1])


def walk(outbox, worker, mode):
    """The processor stopped at message 7 of 20: run what it says, and see the rest go through."""
    report = worker.wait_state("Stopped", "AttemptsExhausted")
    position, transaction_id = outbox.connection.execute(
        "SELECT position, transaction_id::text FROM outbox.messages WHERE message_id = 'message-7'"
    ).fetchone()
    assert f"message 'message-7' of type 'OrderPlaced', key 'order-0', {transaction_id}:{position}" in report.message
    assert "outbox dead-letters add orders --at" in worker.log()
    done = Cli(outbox.database.files().directory).run(*command_of(report.message))
    assert done.returncode == 0, done.stderr
    worker.wait_for(
        "the rest goes through",
        lambda r: r.state == "Active" and r.failures is not None and r.failures.dead_letters == 1,
    )
    rows = outbox.connection.execute("SELECT message_id, blocks FROM outbox.dead_letters").fetchall()
    assert rows == [("message-7", False)]
    acts = outbox.connection.execute("SELECT action, reason FROM outbox.audit_log ORDER BY id").fetchall()
    assert ("GiveUp", "it stopped the processor") in acts


CASES = [pytest.param(target, *mode.values, id=f"{target}-{mode.id}") for target in ("sql", "python") for mode in MODES]


@pytest.mark.parametrize(
    ("target", "mode", "cursor"), by_day(CASES, "sql-Ordered", "python-Ordered, Snapshot", "sql-Partitioned, Snapshot")
)
def test_the_command_that_the_message_names_lets_the_rest_through(outbox, workers, mode, cursor, target):
    ids = outbox.produce(20)
    chosen = PYTHON_TARGET if target == "python" else SQL_TARGET
    if target == "sql":
        outbox.connection.execute("ALTER TABLE handled ADD CHECK (message_id <> 'message-7')")
    config = build_config(outbox.database, chosen, source={"cursor": cursor}, delivery=settings(mode))
    worker = workers.start(config, outbox.database.uri(), handler=PICKY)
    walk(outbox, worker, mode)
    wait_until(lambda: outbox.count() == 19, "the others are handled")
    more = outbox.produce(5, start=20)
    wait_until(lambda: outbox.count() == 24, "what comes later is handled")
    handled = outbox.handled()
    assert sorted(handled) == sorted(each for each in ids + more if each != "message-7")
    if mode == "Ordered":
        assert handled == [each for each in ids + more if each != "message-7"]


def test_a_message_that_could_not_be_named_is_named_once_it_can_be(outbox, workers):
    """The table is locked when the attempts run out."""
    outbox.produce(20)
    delivery = settings("Ordered") | {"batchSize": 1, "retry": {"maxAttempts": 1}}
    config = build_config(outbox.database, PYTHON_TARGET, delivery=delivery)
    home = workers.prepare(config, outbox.database.uri(), handler=PICKY.replace("        raise", WAITING))
    worker = workers.launch(home)
    wait_until((home / "at-7").exists, "it is at the message")
    with outbox.database.direct(autocommit=False) as other:
        other.execute("LOCK TABLE outbox.messages")
        (home / "go").touch()
        report = worker.wait_state("Stopped", "AttemptsExhausted")
        assert "dead-letters add" not in report.message
        other.rollback()
    worker.wait_for("it is named", lambda r: "dead-letters add" in r.message, 30)
    walk(outbox, worker, "Ordered")
    wait_until(lambda: outbox.count() == 19, "the others are handled")


@pytest.mark.parametrize(
    ("queue", "target", "batch_size", "guarantee"),
    [
        pytest.param(None, "sql", 20, "Transactional", id="outbox, found among others"),
        pytest.param(None, "python", 1, "AtLeastOnce", id="outbox, alone", marks=pytest.mark.nightly),
        pytest.param("jobs", "python", 20, "AtLeastOnce", id="queue, found among others"),
        pytest.param("jobs", "sql", 1, "Transactional", id="queue, alone", marks=pytest.mark.nightly),
    ],
)
def test_a_consumer_names_its_message_too_and_the_command_lets_it_go_on(
    outbox, workers, queue, target, batch_size, guarantee
):
    outbox.connection.execute("SELECT outbox.create_queue('jobs')")
    outbox.connection.execute("ALTER TABLE handled ADD CHECK (message_id <> 'message-7')")
    table = "queue_jobs" if queue else "messages"

    def put(first, last):
        outbox.connection.execute(
            f"INSERT INTO outbox.{table} (message_id, message_type, partition_key, data) "
            "SELECT 'message-' || n, 'OrderPlaced', 'order-' || mod(n, 4), jsonb_build_object('total', n) "
            "FROM generate_series(%s::int, %s::int) AS n",
            (first, last),
        )

    put(1, 20)
    delivery = {
        "mode": "Competing", "competing": {"queue": queue, "leaseDuration": "2s"}, "batchSize": batch_size,
        "guarantee": guarantee, "whenExhausted": "Stop", "retry": DELIVERY["retry"],
    }  # fmt: skip
    chosen = SQL_TARGET if target == "sql" else PYTHON_TARGET
    config = build_config(outbox.database, chosen, delivery=delivery)
    worker = workers.start(config, outbox.database.uri(), handler=PYTHON_HANDLER)
    report = worker.wait_state("Stopped", "AttemptsExhausted")
    assert "2 attempts at message 'message-7' of type 'OrderPlaced', key 'order-3', " in report.message
    place = re.search(r"key 'order-3', (\d+):(\d+) \(", report.message)
    assert place is not None
    assert outbox.connection.execute(
        f"SELECT message_id FROM outbox.{table} WHERE transaction_id = %s::xid8 AND position = %s", place.groups()
    ).fetchall() == [("message-7",)]
    command = command_of(report.message)
    assert command[:5] == ["dead-letters", "add", "orders", "--at", ":".join(place.groups())]
    done = Cli(outbox.database.files().directory).run(*command)
    assert done.returncode == 0, done.stderr
    worker.wait_for(
        "the rest goes through",
        lambda r: r.state == "Active" and r.failures is not None and r.failures.dead_letters == 1,
    )
    put(21, 25)
    others = sorted(f"message-{n}" for n in range(1, 26) if n != 7)
    wait_until(lambda: sorted(outbox.handled()) == others, "all others are handled, each once")
    rows = outbox.connection.execute("SELECT message_id, key FROM outbox.dead_letters").fetchall()
    assert rows == [("message-7", "order-3")]


def test_a_worker_that_is_started_anew_heeds_what_was_decided(outbox, workers):
    outbox.produce(20)
    outbox.connection.execute("ALTER TABLE handled ADD CHECK (message_id <> 'message-7')")
    config = build_config(outbox.database, SQL_TARGET, delivery=settings("Ordered"))
    worker = workers.start(config, outbox.database.uri())
    message = worker.wait_state("Stopped", "AttemptsExhausted").message
    assert worker.terminate() == 0
    cli = Cli(outbox.database.files().directory)
    assert cli.run(*command_of(message), "--dry-run").returncode == 0
    assert cli.run(*command_of(message)).returncode == 0
    workers.start(config, outbox.database.uri())
    wait_until(lambda: outbox.count() == 19, "the others are handled")


def test_what_works_by_now_is_handled_and_is_no_dead_letter(outbox, workers):
    ids = outbox.produce(20)
    outbox.connection.execute("ALTER TABLE handled ADD CONSTRAINT picky CHECK (message_id <> 'message-7')")
    worker = workers.start(
        build_config(outbox.database, SQL_TARGET, delivery=settings("Ordered")), outbox.database.uri()
    )
    message = worker.wait_state("Stopped", "AttemptsExhausted").message
    outbox.connection.execute("ALTER TABLE handled DROP CONSTRAINT picky")
    assert Cli(outbox.database.files().directory).run(*command_of(message)).returncode == 0
    outbox.wait_handled(ids)
    assert worker.report().failures.dead_letters == 0


def test_another_partition_and_another_processor_are_refused(outbox, workers):
    outbox.produce(1)
    worker = workers.start(build_config(outbox.database, SQL_TARGET), outbox.database.uri())
    worker.wait_for("it is handled", lambda r: r.handled == 1)
    cli = Cli(outbox.database.files().directory)
    where = ("--at", "815:7", "--reason", "x")
    assert cli.run("dead-letters", "add", "orders", "--partition", "5", *where).returncode == 3
    assert cli.run("dead-letters", "add", "nobody", *where).returncode == 3
    assert cli.run("dead-letters", "add", "orders", "--at", "815:7").returncode == 2


HELD_UP = """
def handle(batch, connection):
    import pathlib, time
    pathlib.Path("entered").touch()
    while not pathlib.Path("go").exists():
        time.sleep(0.01)
    raise ValueError("no")
"""


@pytest.mark.parametrize("cursor", ["TransactionOrder", "Snapshot"])
def test_a_message_that_cannot_be_named_soon_stops_its_processor_without_a_name(outbox, workers, cursor):
    outbox.produce(1)
    delivery = {"retry": {"maxAttempts": 1}, "whenExhausted": "Stop", "leaseDuration": "30s"}
    config = build_config(outbox.database, PYTHON_TARGET, delivery=delivery, source={"cursor": cursor})
    worker = workers.start(config, outbox.database.uri(), handler=HELD_UP)
    wait_until((worker.directory / "entered").exists, "the handler has the message")
    other = outbox.database.direct()
    other.execute("BEGIN; LOCK TABLE outbox.messages")
    (worker.directory / "go").touch()
    report = worker.wait_state("Stopped", "AttemptsExhausted", 10)
    assert "ValueError: no" in report.message
    other.execute("COMMIT")
