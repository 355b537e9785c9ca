"""`outbox status` and `outbox lag` of a processor in mode Competing."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import pytest

from outbox_core.processor.claimed_batch import ClaimedBatch
from outbox_core.report import ResourceRef
from outbox_core.spec import Competing, StartFrom
from outbox_worker.postgres.feeds import competing
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.ownership import leases as ownership
from outbox_worker.postgres.ownership import partitions
from tests.support.servers.postgres import build_source

KEY = ProcessorKey("outbox", "orders")
HOUR = timedelta(hours=1)


def cut(connection, taker):
    """Take the next batch; the snapshot range that was open when the processor began is empty."""
    found = taker.claim_next(connection)
    while not isinstance(found, ClaimedBatch):
        assert found.moved
        found = taker.claim_next(connection)
    return found


@pytest.mark.parametrize("queue", [None, "jobs"], ids=["outbox", "queue"])
def test_status_and_lag_count_what_is_not_done(cli, database, queue):
    connection, settings, source = database.direct(), Competing(queue=queue), build_source()
    resource = ResourceRef(cluster="test", namespace="shop", name="orders", uid="u1")
    assert ownership.claim(connection, KEY, resource).granted
    if queue:
        competing.ensure_queue(connection, "outbox", queue, create=True)
    consumer = competing.Consumer("one", "pod-a", "u1", HOUR)
    competing.join(connection, KEY, consumer, source, settings, StartFrom())
    for _ in range(2):
        partitions.renew_membership(connection, KEY, claim_uid="u1", pod="pod-a", token=uuid4(), lease=HOUR)
    table = "queue_jobs" if queue else "messages"
    connection.execute(f"INSERT INTO outbox.{table} (message_type, data) SELECT 't', '{{}}' FROM generate_series(1, 7)")
    taker = competing.BatchTaker(KEY, consumer, source, settings, 3)
    first, _ = cut(connection, taker), cut(connection, taker)
    assert taker.complete(connection, first, first.upto, 3)

    (record,) = cli.json("status", "orders")
    assert (record["state"], record["pod"], record["queue"]) == ("Running", "2 consumers", queue)
    assert (record["unfinished"]["messages"], record["unfinished"]["batches"]) == (3, 1)
    (waiting,) = cli.json("lag", "orders")
    assert waiting["messages"] == 4, "three in hand, one not taken"
