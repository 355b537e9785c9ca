"""The statement of a look by slots: its size, which is what a server's planner has to do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outbox_core.spec import PartitionKey
from outbox_worker.postgres.reading.range_scan import RangeScan
from outbox_worker.postgres.reading.read_range import Lookup
from tests.support.servers.postgres import build_source


def count_parts(slots: tuple[int | None, ...], lower: str) -> int:
    """Count how often the table is named in the statement of a look."""
    scan = RangeScan.of(build_source(cursor="Snapshot"))
    scan = replace(scan, slot=scan.table.slot(PartitionKey(), "outbox"), slots=slots)
    look = scan.news(scan.table.outline(None), Lookup(lower, None, size=101))
    return look.as_string(None).count(scan.table.identifier.as_string(None))


@pytest.mark.parametrize("slots", [(3,), tuple(range(0, 64, 8)), tuple(range(64))], ids=len)
def test_a_look_at_many_slots_is_planned_as_one_at_a_single_slot(slots):
    assert count_parts(slots, "3:3:") == 1
    assert count_parts(slots, "3:9:3,5") == 2, "and transactions that were in progress"


def test_rows_with_neither_key_nor_id_are_looked_for_by_themselves():
    assert count_parts((0, None), "3:3:") == 2
