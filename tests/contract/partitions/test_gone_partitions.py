"""A partition that is no more: no lease is granted on it, and nothing that comes late leaves something behind."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import pytest

from outbox_core.processor.outcomes import HeldLease
from outbox_core.progress.checkpoint import Checkpoint, StoreAnswer
from outbox_core.report import ResourceRef
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.ownership import leases as ownership
from outbox_worker.postgres.ownership import partitions
from outbox_worker.postgres.progress import checkpoints, conflicts
from tests.support.database.concurrency import background, wait_until_blocked
from tests.support.database.contract import NOT_OWNER, STORED, store
from tests.support.servers.postgres import POOLED, VERSIONS

KEY = ProcessorKey("outbox", "orders")
GONE = ProcessorKey("outbox", "orders", 2)
OURS = ResourceRef(cluster="c", namespace="n", name="a", uid="u1")
BY = "partition key"
pytestmark = pytest.mark.parametrize("anywhere", [*VERSIONS, POOLED], indirect=True)


def ask(connection, key):
    return ownership.acquire_lease(
        connection, key, claim_uid="u1", pod="pod", token=uuid4(), lease=timedelta(hours=1)
    )  # fmt: skip


@pytest.fixture
def connection(anywhere):
    """Three partitions."""
    connection = anywhere.connect()
    assert ownership.claim(connection, KEY, OURS).granted
    token = uuid4()
    lease = ownership.acquire_lease(
        connection, KEY, claim_uid="u1", pod="pod", token=token, lease=timedelta(hours=1)
    )  # fmt: skip
    assert lease.epoch is not None
    held = HeldLease(0, lease.epoch, token)
    begun = partitions.begin(connection, KEY, held, count=3, by=BY, start=Checkpoint(1, 0))
    assert begun.begun
    return connection


def at_barrier(connection, count, generation):
    """Ask for another number, and let all partitions be at the barrier."""
    partitions.ask(connection, KEY, OURS, generation=generation, count=count, by=BY)
    connection.execute(
        "UPDATE outbox.processor_checkpoints c SET last_processed_transaction_id = d.barrier_transaction_id, "
        "last_processed_position = d.barrier_position FROM outbox.processor_partitions d"
    )


def divide(connection, count, generation):
    at_barrier(connection, count, generation)
    assert partitions.change(connection, KEY, "u1")


def record(connection, key, epoch):
    refusal = conflicts.Refusal(
        code=StoreAnswer.OLDER, expected=Checkpoint(1, 0), stored=None, new=None, epoch=epoch, pod="pod",
        claim_uid="u1", needs_person=True,
    )  # fmt: skip
    conflicts.record_refusal(connection, key, refusal)


def test_no_lease_is_granted_on_it_and_the_answer_names_no_epoch(connection):
    assert ask(connection, GONE).acquired
    divide(connection, 2, 2)
    answer = ask(connection, GONE)
    assert (answer.acquired, answer.epoch, answer.pod) == (False, None, None)
    assert ask(connection, ProcessorKey("outbox", "orders", 1)).acquired
    divide(connection, 3, 3)
    assert ask(connection, GONE).acquired, "it is there again"


def test_no_lease_is_granted_beside_a_change_that_takes_it_away(anywhere, connection):
    at_barrier(connection, 2, 2)
    changing = anywhere.connect(autocommit=False)
    assert partitions.change(changing, KEY, "u1")
    asking = anywhere.connect()
    with background(lambda: ask(asking, GONE)) as answer:
        wait_until_blocked(anywhere, answer)
        changing.commit()
    assert not answer.result().acquired


def test_that_its_checkpoint_is_gone_is_no_edit(connection):
    divide(connection, 2, 2)
    assert checkpoints.load_untampered(connection, GONE) is None
    divide(connection, 3, 3)
    assert checkpoints.load_untampered(connection, GONE) is not None


@pytest.mark.parametrize("partition", [1, 2], ids=["that stays", "that is gone"])
def test_who_reports_after_the_change_what_it_was_told_before_opens_nothing(connection, partition):
    key = ProcessorKey("outbox", "orders", partition)
    epoch = ask(connection, key).epoch
    divide(connection, 2, 2)
    record(connection, key, epoch)
    assert conflicts.summary(connection, KEY).open is None


def test_who_reports_beside_the_change_opens_nothing(anywhere, connection):
    epoch = ask(connection, GONE).epoch
    at_barrier(connection, 2, 2)
    changing = anywhere.connect(autocommit=False)
    assert partitions.change(changing, KEY, "u1")
    reporting = anywhere.connect()
    with background(lambda: record(reporting, GONE, epoch)) as answer:
        wait_until_blocked(anywhere, answer)
        changing.commit()
    answer.result()
    assert conflicts.summary(connection, KEY).open is None


def test_a_conflict_on_it_ends_with_the_next_change(connection):
    """As former versions left them: no command could decide them."""
    divide(connection, 2, 2)
    connection.execute(
        "INSERT INTO outbox.processor_conflicts (processor_id, partition, code, pod, needs_person) "
        "VALUES ('orders', 2, 3, 'pod', true)"
    )
    divide(connection, 3, 3)
    assert conflicts.summary(connection, KEY).open is None
    assert connection.execute("SELECT resolution FROM outbox.processor_conflicts").fetchone() == ("PartitionGone",)
    assert ask(connection, GONE).acquired


def test_a_row_that_somebody_stores_for_it_is_in_no_changes_way(connection):
    divide(connection, 2, 2)
    assert store(connection, (5, 5), partition=2) == NOT_OWNER
    assert ownership.release_claim(connection, KEY, "u1")
    assert store(connection, (5, 5), partition=2) == STORED
    assert ownership.claim(connection, KEY, OURS).granted
    at_barrier(connection, 3, 3)
    division = partitions.fetch(connection, KEY)
    assert division is not None
    assert partitions.change(connection, KEY, "u1")
    assert checkpoints.load_all(connection, KEY)[2].pair == division.barrier
