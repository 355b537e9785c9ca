"""A replica that cannot handle anything takes no share: the others keep all partitions until it can."""

from __future__ import annotations

import pytest

from tests.support.divided import COUNT, assert_each_once_and_in_order, owners, produce, start, wait_count, wait_shared
from tests.support.servers.postgres import wait_until
from tests.support.worker import PYTHON_HANDLER, PYTHON_TARGET, build_config

BROKEN = "def handle(batch, connection)\n    this is no Python\n"


def test_a_replica_whose_handler_cannot_be_loaded_takes_no_share_until_it_can(outbox, workers):
    """As in a rollout of a broken handler, where pods of before go on and the new one never becomes ready."""
    healthy = start(outbox, workers, "pod-a", target=PYTHON_TARGET)
    produce(outbox, 100)
    wait_count(outbox, 100)
    wait_shared(outbox, COUNT)
    config = build_config(
        outbox.database, PYTHON_TARGET, delivery={"mode": "Partitioned", "partitions": {"count": COUNT}}
    )
    broken = workers.start(config, outbox.database.uri(), handler=BROKEN, pod="pod-b")
    broken.wait_for("it says what is wrong", lambda r: r.state not in ("Active", "Starting", "Standby"))
    for number in range(1, 6):
        produce(outbox, 100, start=number * 100)
        wait_count(outbox, (number + 1) * 100, 10)
    healthy.wait_for("it has all partitions", lambda r: sum(lease.held for lease in r.leases) == COUNT)

    (broken.directory / "handler/orders.py").write_text(PYTHON_HANDLER)
    wait_shared(outbox, COUNT // 2, COUNT // 2)
    produce(outbox, 100, start=600)
    wait_count(outbox, 700)
    assert_each_once_and_in_order(outbox, 700)


REFUSED = {
    "mode Competing": {"mode": "Competing", "competing": {}},
    "mode Ordered": {},
    "another key": {"mode": "Partitioned", "partitions": {"count": COUNT, "key": {"data": ["total"]}}},
}


@pytest.mark.parametrize("delivery", REFUSED.values(), ids=REFUSED)
def test_a_process_that_is_refused_takes_no_share(outbox, workers, delivery):
    start(outbox, workers, "pod-a")
    produce(outbox, 100)
    wait_count(outbox, 100)
    source = {"cursor": None} if "competing" in delivery else {}
    config = build_config(outbox.database, {"log": {}}, delivery=delivery, source=source, generation=2)
    refused = workers.start(config, outbox.database.uri(), pod="pod-b")
    refused.wait_for("it is refused", lambda r: r.reason == "PartitionsDiffer")
    for number in range(1, 6):
        produce(outbox, 100, start=number * 100)
        wait_count(outbox, (number + 1) * 100, 10)
    assert_each_once_and_in_order(outbox, 600)


def test_a_process_that_is_refused_after_it_got_leases_gives_them_back(outbox, workers):
    """Two begin at once: what the other one stored is seen only when this one would store its own."""
    with outbox.database.direct(autocommit=False) as other:
        other.execute("LOCK outbox.processor_partitions IN EXCLUSIVE MODE")
        refused = start(outbox, workers, "pod-b")
        waiting = (
            "SELECT count(*) > 0 FROM pg_locks WHERE NOT granted AND relation = 'outbox.processor_partitions'::regclass"
        )
        wait_until(lambda: outbox.connection.execute(waiting).fetchone() == (True,), "it has a lease and would begin")
        other.execute(
            "INSERT INTO outbox.processor_partitions (processor_id, partition_count, key) VALUES ('orders', %s, 'd')",
            (COUNT,),
        )
        other.commit()
    refused.wait_for("it is refused", lambda r: r.reason == "PartitionsDiffer")
    wait_until(lambda: not owners(outbox), "its leases are free")
    assert refused.report().reason == "PartitionsDiffer"
