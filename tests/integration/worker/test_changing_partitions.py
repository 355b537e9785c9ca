"""The number of partitions changes at a stop line, with real processes: nothing skipped, repeated or out of order."""

from __future__ import annotations

import pytest

from tests.support.divided import (
    assert_each_once_and_in_order,
    produce,
    start,
    wait_count,
    wait_shared,
)
from tests.support.postgres import wait_until
from tests.support.worker import PYTHON_TARGET, SQL_TARGET


def counts(outbox):
    """How many partitions there are, and how many there shall be."""
    row = outbox.connection.execute("SELECT partition_count, next_count FROM outbox.processor_partitions").fetchone()
    return None if row is None else tuple(row)


def wait_divided(outbox, count, seconds=30.0):
    wait_until(lambda: counts(outbox) == (count, None), f"{count} partitions", seconds)


@pytest.mark.parametrize("target", [SQL_TARGET, PYTHON_TARGET], ids=["sql", "python"])
@pytest.mark.parametrize(("before", "after"), [(3, 5), (5, 2)], ids=["more", "fewer"])
def test_a_process_of_the_new_spec_changes_it_and_one_of_the_old_goes_along(outbox, workers, target, before, after):
    produce(outbox, 300)
    old = start(outbox, workers, "pod-old", target=target, count=before)
    wait_count(outbox, 300)
    new = start(outbox, workers, "pod-new", target=target, count=after, generation=2)
    wait_divided(outbox, after)
    produce(outbox, 300, start=300)
    wait_count(outbox, 600)
    wait_shared(outbox, after // 2, after - after // 2)
    assert_each_once_and_in_order(outbox, 600)
    for worker in (old, new):
        report = worker.wait_for("it says so", lambda r: r.division is not None and r.division.count == after)
        assert (report.conflicts.count, len(report.checkpoints)) == (0, after)
