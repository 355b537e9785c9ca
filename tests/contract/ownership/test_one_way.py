"""Acts that are written down once: a swap, the source of a checkpoint, a partition that is there."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import psycopg
import pytest

from outbox_core.processor.outcomes import HeldLease
from outbox_core.progress.checkpoint import Checkpoint
from outbox_core.report import ResourceRef
from outbox_worker.postgres import remote_target
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.ownership import leases as ownership
from outbox_worker.postgres.ownership import partitions
from outbox_worker.postgres.progress import checkpoints, conflicts, rebuilds
from outbox_worker.postgres.progress.rebuilds import SupersedeAnswer
from tests.support.database.concurrency import background, wait_until_blocked
from tests.support.servers.postgres import EVERYWHERE

HOUR = timedelta(hours=1)
BY = "partition key"
PLACE = Checkpoint(20, 5)


def resource(name):
    return ResourceRef(cluster="c", namespace="n", name=name, uid=f"uid-{name}")


def own(connection, key):
    """Claim and lease of the resource of that name."""
    assert ownership.claim(connection, key, resource(key.processor_id)).granted
    token = uuid4()
    uid = f"uid-{key.processor_id}"
    answer = ownership.acquire_lease(connection, key, claim_uid=uid, pod="pod", token=token, lease=HOUR)
    assert answer.acquired
    assert answer.epoch is not None
    return HeldLease(0, answer.epoch, token)


def put(connection, name):
    key = ProcessorKey("outbox", name)
    owner = own(connection, key)
    checkpoints.store(connection, key, owner, new=PLACE, expected=None)
    return key, owner


def supersede(connection, key, owner, of):
    seen = rebuilds.find_coverage(connection, of)
    assert seen is not None
    return rebuilds.supersede(connection, key, owner, of.processor_id, seen, decided_by="test")


def test_who_replaced_one_processor_cannot_let_it_go_by_replacing_another(each_database):
    connection = each_database.connect()
    first, _ = put(connection, "first")
    second, _ = put(connection, "second")
    new, owner = put(connection, "new")
    assert supersede(connection, new, owner, first) is SupersedeAnswer.DONE

    assert supersede(connection, new, owner, second) is SupersedeAnswer.BY_ANOTHER

    assert rebuilds.find_superseding(connection, first) == "new"
    assert rebuilds.find_superseding(connection, second) is None
    with pytest.raises(psycopg.Error, match="replaced by new"):
        connection.execute("SELECT outbox.claim_processor('first', 'c', 'n', 'first', 'uid-first', p_force => true)")


@EVERYWHERE
def test_two_processes_that_begin_at_once_are_both_told_the_source_that_one_wrote_down(each_database):
    key = ProcessorKey("outbox", "orders")
    first, second = each_database.connect(autocommit=False), each_database.connect()
    assert ownership.claim(second, key, resource("orders")).granted
    source = remote_target.SourceIdentity("1/2", "database shop", 100, 1)
    remote_target.bind(first, key, "uid-orders", source)

    with background(lambda: remote_target.bind(second, key, "uid-orders", source)) as bound:
        wait_until_blocked(each_database, bound)
        first.commit()

    assert bound.result() is None
    assert remote_target.fetch_source(second, key) == remote_target.WrittenSource("1/2", "database shop")


@pytest.mark.parametrize("pair", [Checkpoint(10, 1), Checkpoint(0, 1)])
def test_a_partition_that_is_not_there_cannot_be_moved(each_database, pair):
    connection = each_database.connect()
    key, gone = ProcessorKey("outbox", "orders"), ProcessorKey("outbox", "orders", 2)
    owner = own(connection, key)
    assert partitions.begin(connection, key, owner, count=2, by=BY, start=PLACE).begun

    with pytest.raises(psycopg.Error, match="no partition 2"):
        connection.execute(
            "SELECT outbox.rewind_processor_checkpoint('orders', 2, %s::text::xid8, %s, 'a test', 'a test')",
            (str(pair.transaction_id), pair.position),
        )

    assert checkpoints.load(connection, gone) is None
    partitions.ask(connection, key, resource("orders"), generation=1, count=4, by=BY)
    now = partitions.fetch(connection, key)
    assert now is not None
    assert now.barrier is not None
    connection.execute("UPDATE outbox.processor_leases SET expires_at = 'epoch'")
    for number in range(2):
        conflicts.rewind(
            connection, ProcessorKey("outbox", "orders", number), now.barrier, reason="a test", decided_by="a test"
        )
    assert partitions.change(connection, key, "uid-orders")
    assert partitions.fetch_count(connection, key) == 4
