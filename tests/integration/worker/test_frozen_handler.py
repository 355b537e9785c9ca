"""A worker frozen where no timer of the server runs: its transaction must not keep the next owner waiting."""

from __future__ import annotations

import signal

import pytest

from tests.support.nightly import at_night, by_day
from tests.support.servers.postgres import wait_until
from tests.support.worker import PYTHON_TARGET, SQL_TARGET, HandlerGate, build_config

HOLD = """
import os, pathlib, time
POD = os.environ["POD_NAME"]
INSERT = "INSERT INTO handled (message_id, pod) VALUES (%s, %s)"
def hold():
    while pathlib.Path("hold").exists():
        pathlib.Path("entered").touch()
        time.sleep(0.01)
"""
HANDLERS = {
    "in a COPY": """
def handle(batch, connection):
    with connection.cursor() as cursor, cursor.copy("COPY handled (message_id, pod) FROM STDIN") as copy:
        for message in batch:
            copy.write_row((message.message_id, POD.ljust(20_000)))  # more than the client keeps back
        hold()
""",
    "in a pipeline": """
def handle(batch, connection):
    with connection.pipeline():
        for message in batch:
            connection.execute(INSERT, (message.message_id, POD))
        hold()
""",
    "in the middle of executemany": """
def rows(batch):
    for message in batch:
        yield message.message_id, POD
    hold()
def handle(batch, connection):
    connection.cursor().executemany(INSERT, rows(batch))
""",
    "before a result is taken": """
def handle(batch, connection):
    for message in batch:
        connection.execute(INSERT, (message.message_id, POD))
    with connection.cursor() as cursor:
        for row in cursor.stream("SELECT repeat('x', 1000) FROM generate_series(1, 100000)"):
            hold()
""",
}


def gated(outbox, workers, moment, **delivery):
    outbox.connection.execute("CREATE UNIQUE INDEX ON handled (message_id)")
    config = build_config(outbox.database, PYTHON_TARGET, delivery=delivery)
    home = workers.prepare(config, outbox.database.uri(), handler=HOLD + HANDLERS[moment])
    gate = HandlerGate(home)
    gate.close()
    return workers.launch(home, pod="pod-a"), gate


MOMENTS = [
    pytest.param(moment, checkpoint, id=f"{moment}-{checkpoint}")
    for moment in HANDLERS
    for checkpoint in ("AfterHandling", "BeforeHandling")
]


@pytest.mark.parametrize(
    ("moment", "checkpoint"),
    by_day(MOMENTS, *(f"{moment}-AfterHandling" for moment in HANDLERS), "in a COPY-BeforeHandling"),
)
def test_frozen(outbox, workers, moment, checkpoint):
    """After handling the next owner runs into the locks of the effects; before handling into the fence itself."""
    ids = outbox.produce(10)
    owner, gate = gated(outbox, workers, moment, checkpoint=checkpoint)
    gate.wait_entered()
    second = workers.start(build_config(outbox.database, SQL_TARGET), outbox.database.uri(), pod="pod-b")
    second.wait_state("Standby")

    owner.send(signal.SIGSTOP)
    outbox.wait_handled(ids, seconds=12)
    assert second.report().attempt == 0
    gate.open()
    owner.send(signal.SIGCONT)

    report = owner.wait_state("Standby", "LeaseHeld")
    assert report.conflicts.last is not None
    assert (report.conflicts.last.code, report.conflicts.last.needs_person) == (4, False)
    more = outbox.produce(5, start=10)
    wait_until(lambda: len(outbox.handled()) == 15, "the new owner goes on")
    assert outbox.handled() == ids + more


@pytest.mark.parametrize("moment", ["in a COPY", *at_night(*list(HANDLERS)[1:-1]), "before a result is taken"])
def test_busy_for_longer_than_the_lease_a_live_owner_is_left_alone(outbox, workers, moment):
    ids = outbox.produce(10)
    owner, gate = gated(outbox, workers, moment, checkpoint="BeforeHandling")
    gate.wait_entered()
    second = workers.start(build_config(outbox.database, SQL_TARGET), outbox.database.uri(), pod="pod-b")
    second.wait_state("Standby")
    renewals = "SELECT count(DISTINCT renewed_at) FROM seen"
    outbox.connection.execute("CREATE TEMPORARY TABLE seen (renewed_at timestamptz)")

    def renewed_often():
        outbox.connection.execute("INSERT INTO seen SELECT renewed_at FROM outbox.processor_leases")
        return outbox.connection.execute(renewals).fetchone()[0] > 6

    wait_until(renewed_often, "the lease was renewed for twice as long as it lasts")
    gate.open()
    outbox.wait_handled(ids)
    assert owner.report().conflicts.count == 0
    owner.wait_for("they are counted", lambda report: report.handled == 10)


@pytest.mark.parametrize("moment", HANDLERS)
def test_a_frozen_consumer_keeps_its_batch_from_no_other_one(outbox, workers, moment):
    """The messages are fine: those who take the batch over use none of their attempts."""
    delivery = {"mode": "Competing", "competing": {"leaseDuration": "2s"}, "whenExhausted": "DeadLetter"}
    ids = outbox.produce(10)
    frozen, gate = gated(outbox, workers, moment, **delivery)
    gate.wait_entered()
    config = build_config(outbox.database, SQL_TARGET, delivery=delivery)
    second = workers.start(config, outbox.database.uri(), pod="pod-b")
    second.wait_state("Active")

    frozen.send(signal.SIGSTOP)
    outbox.wait_handled(ids, seconds=12)
    failed = "SELECT (SELECT count(*) FROM outbox.competing_retries) + (SELECT count(*) FROM outbox.dead_letters)"
    assert (second.report().attempt, outbox.connection.execute(failed).fetchone()) == (0, (0,))
    gate.open()
    frozen.send(signal.SIGCONT)

    more = outbox.produce(5, start=10)
    wait_until(lambda: outbox.count() >= 15, "what comes later is handled")
    assert sorted(outbox.handled()) == sorted(ids + more)
    frozen.wait_for("it goes on", lambda report: report.state == "Active")
