"""A replica that sleeps through a change of the number of partitions: what it still believes does no harm."""

from __future__ import annotations

import signal
import time

import pytest

from tests.support.divided import assert_each_once_and_in_order, divided, produce, start, wait_count, wait_shared
from tests.support.servers.postgres import wait_until
from tests.support.worker import PYTHON_HANDLER, HandlerGate

SLOW_IMPORT = (
    """
import pathlib, time
while pathlib.Path("hold").exists():
    pathlib.Path("entered").touch()
    time.sleep(0.01)
"""
    + PYTHON_HANDLER
)
"""The handler; importing it, which comes before any lease is asked for, lasts while the file `hold` is there."""
GONE = 5
"""A partition of seven that is none of five."""


def wait_free(outbox, *partitions):
    def free():
        rows = outbox.connection.execute(
            "SELECT partition FROM outbox.processor_leases WHERE token IS NULL ORDER BY 1"
        ).fetchall()
        return [row[0] for row in rows] == list(partitions)

    wait_until(free, f"partitions {partitions} are free")


def freeze_before_it_asks(_outbox, worker, gate):
    worker.send(signal.SIGSTOP)
    gate.open()


def freeze_before_it_hears(outbox, worker, gate):
    """The lease is granted while the process that asked for it sleeps."""
    holder = outbox.database.direct(autocommit=False)
    holder.execute("SELECT 1 FROM outbox.processor_leases WHERE partition = %s FOR UPDATE", (GONE,))
    gate.open()
    asking = (
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%acquire_lease%' "
        "AND datname = current_database()"
    )
    wait_until(lambda: outbox.connection.execute(asking).fetchone() == (1,), "it asks")
    worker.send(signal.SIGSTOP)
    holder.rollback()


@pytest.mark.parametrize(
    ("freeze", "cursor"),
    [
        pytest.param(freeze_before_it_asks, "TransactionOrder", id="it asked-TransactionOrder"),
        pytest.param(freeze_before_it_asks, "Snapshot", id="it asked-Snapshot", marks=pytest.mark.nightly),
        pytest.param(
            freeze_before_it_hears,
            "TransactionOrder",
            id="it heard the answer-TransactionOrder",
            marks=pytest.mark.nightly,
        ),
        pytest.param(freeze_before_it_hears, "Snapshot", id="it heard the answer-Snapshot"),
    ],
)
def test_a_replica_that_was_frozen_before_leaves_nothing_on_a_partition_that_is_gone(outbox, workers, cursor, freeze):
    fields = {"source": {"cursor": cursor}}
    produce(outbox, 100)
    start(outbox, workers, "pod-a", count=7, **fields)
    wait_count(outbox, 100)
    home = workers.prepare(divided(outbox, count=7, **fields), outbox.database.uri(), handler=SLOW_IMPORT)
    gate = HandlerGate(home)
    gate.close()
    frozen = workers.launch(home, pod="pod-b")
    gate.wait_entered()
    wait_free(outbox, 4, GONE, 6)
    freeze(outbox, frozen, gate)
    start(outbox, workers, "pod-c", count=5, generation=2, **fields)
    wait_until(
        lambda: outbox.connection.execute("SELECT partition_count FROM outbox.processor_partitions").fetchone() == (5,),
        "5 partitions", 30,
    )  # fmt: skip

    # Its heartbeat, which would see the new number, comes second.
    members = outbox.database.direct(autocommit=False)
    members.execute("LOCK TABLE outbox.processor_members IN ACCESS EXCLUSIVE MODE")
    frozen.send(signal.SIGCONT)
    deadline = time.monotonic() + 1.5
    while time.monotonic() < deadline and "goes on with the new number" not in frozen.log():
        time.sleep(0.02)
    members.rollback()
    wait_until(lambda: "goes on with the new number" in frozen.log(), "it begins anew")
    wait_shared(outbox, 1, 2, 2)

    start(outbox, workers, "pod-d", count=7, generation=3, **fields)
    produce(outbox, 100, start=100)
    wait_count(outbox, 200)
    wait_until(
        lambda: outbox.connection.execute("SELECT partition_count FROM outbox.processor_partitions").fetchone() == (7,),
        "7 partitions again", 30,
    )  # fmt: skip
    produce(outbox, 100, start=200)
    wait_count(outbox, 300)
    assert_each_once_and_in_order(outbox, 300)
    told = outbox.connection.execute("SELECT count(*) FROM outbox.processor_conflicts WHERE code <> 4").fetchone()
    assert told == (0,)
