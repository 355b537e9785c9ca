"""When the next batch is asked for before the one in hand is handled."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outbox_core.message import Batch, Delayed
from outbox_core.processor.failing import PoisonSearch
from outbox_core.processor.state import initial_state
from outbox_core.progress.checkpoint import BEGINNING, Checkpoint
from outbox_core.progress.snapshot_range import SnapshotRange
from outbox_worker.feeds.cursor import is_backlog

END = Checkpoint(7, 3)
FULL = Batch(BEGINNING, END, (), 10, full=True, matched_count=10)
OPEN = Checkpoint(0, 10, SnapshotRange(None, "9:9:", 10))
CLOSED = Checkpoint(0, 10, SnapshotRange("9:9:"))
STATE = initial_state(0.0)


@pytest.mark.parametrize("examined", [END, OPEN], ids=["TransactionOrder", "in an open range"])
def test_behind_a_full_batch(examined):
    assert is_backlog(STATE, replace(FULL, examined=examined), 10, 10)


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param(replace(FULL, full=False), id="nothing is behind it"),
        pytest.param(replace(FULL, matched_count=0), id="nothing of it is handled"),
        pytest.param(replace(FULL, waits_for=Delayed(END, "late", 9.0)), id="it ends at a delayed message"),
        pytest.param(replace(FULL, examined=CLOSED), id="the next snapshot range is not opened yet"),
    ],
)
def test_not_behind_such_a_batch(batch):
    assert not is_backlog(STATE, batch, 10, 10)


@pytest.mark.parametrize(
    "state",
    [
        pytest.param(STATE._replace(limit=5), id="a failing message is looked for by halves"),
        pytest.param(STATE._replace(block=5), id="batches are handled in parts"),
        pytest.param(STATE._replace(poison_search=PoisonSearch(8)), id="a poison message is looked for"),
        pytest.param(STATE._replace(attempt=1), id="the batch failed before"),
        pytest.param(STATE._replace(failures=1), id="something is out of order"),
    ],
)
def test_not_while_it_depends_on_what_comes_of_this_batch(state):
    assert not is_backlog(state, FULL, 10, 10)


def test_not_where_the_rate_is_limited():
    assert not is_backlog(STATE, FULL, 9, 10)
