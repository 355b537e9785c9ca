"""The loop with several runners: what one that is always due leaves for the others, and who goes first in a backlog."""

from __future__ import annotations

import time
from datetime import timedelta
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from typing_extensions import override

from outbox_core.processor import outcomes
from outbox_core.processor.outcomes import HeldLease
from outbox_core.processor.state import Step, initial_state
from outbox_core.report import WorkerState
from outbox_worker.engine import loop
from outbox_worker.engine.loop import Loop, ProcessorRunners
from outbox_worker.observe.status import Progress
from outbox_worker.shutdown import Waker

SECONDS = 0.02
IDLE = initial_state(0.0)._replace(
    step=Step.FETCH, state=WorkerState.ACTIVE, lease=HeldLease(0, 1, UUID(int=1)), due=float("inf")
)  # fmt: skip


class QuietLog:
    """The server's log does not move."""

    def take(self):
        return None, False


class OneRunner:
    """A runner of a processor of its own; when it did so many steps, it and the other one end."""

    def __init__(self, state, log, other=None, steps=0):
        self.state, self.other, self.steps, self.heard, self.kept_alive = state, other, steps, [], 0
        self.closed = False
        delivery = SimpleNamespace(timeout=timedelta(seconds=1), rate_limit=None)
        self.context = SimpleNamespace(
            config=SimpleNamespace(delivery=delivery), databases=SimpleNamespace(wal=log, arrivals=None),
            status=SimpleNamespace(handled=0, names={}), throttle=None, target=self,
        )  # fmt: skip
        self.is_obsolete = False
        self.backlog_place = None

    def find_interruption(self):
        return None

    def advance(self, outcome=None):
        if outcome is not None:
            self.heard.append(outcome)
        elif self.steps:
            time.sleep(SECONDS / 4)
            self.steps -= 1
        else:
            self.state = self.other.state = self.state._replace(step=Step.END)

    def keep_alive(self):
        self.kept_alive += 1
        if self.kept_alive == 1:
            raise ValueError("the broker confirmed what was never published")

    def close(self):
        self.closed = True

    def changed(self):
        return False


class Partition(OneRunner):
    """A partition that is always due, and reads the backlog so many positions at a time; `at`: its places so far."""

    def __init__(self, place, stride, end, log):
        super().__init__(IDLE._replace(step=Step.HANDLE, due=0.0), log)
        self.backlog_place, self.stride, self.end, self.at = place, stride, end, []

    @override
    def advance(self, outcome=None):
        self.at.append((time.monotonic(), self.backlog_place))
        self.backlog_place += self.stride
        step = Step.END if self.backlog_place >= self.end else Step.HANDLE
        self.state = self.state._replace(due=time.monotonic(), step=step)


def read_backlog(*partitions):
    """Run the partitions of one processor to the end; return the partitions' places in the order of their turns."""
    for each in partitions:
        each.context = partitions[0].context
    Loop([ProcessorRunners(partitions)], waker=Waker(), progress=Progress()).run()
    return [place for _, place in sorted(turn for each in partitions for turn in each.at)]


@pytest.fixture
def idle(monkeypatch):
    """One that awaits messages, beside another one that had something to do for `ticks`, ten or more."""
    monkeypatch.setattr(loop, "TICK", SECONDS)
    log = QuietLog()
    waiting: Any = OneRunner(IDLE, log)
    busy: Any = OneRunner(IDLE._replace(step=Step.HANDLE, due=0.0), log, other=waiting, steps=40)
    began = time.monotonic()
    Loop([ProcessorRunners([each]) for each in (waiting, busy)], waker=Waker(), progress=Progress()).run()
    waiting.ticks = (time.monotonic() - began) / SECONDS
    return waiting


def test_its_target_is_kept_alive_and_made_anew_where_that_fails(idle):
    assert idle.closed
    assert 2 <= idle.kept_alive <= idle.ticks + 2


def test_it_looks_for_messages_now_and_then_although_nothing_waits_for_the_log(idle):
    assert idle.heard
    assert {type(each) for each in idle.heard} == {outcomes.SourceMoved}
    assert len(idle.heard) <= idle.ticks + 2


def test_partitions_that_read_a_backlog_side_by_side_stay_together():
    log = QuietLog()
    slow, fast = Partition(0, 1_000, 100_000, log), Partition(0, 4_000, 100_000, log)
    places = read_backlog(slow, fast)
    assert len(places) == 100 + 25
    assert max(earlier - later for earlier, later in pairwise(places)) <= 4_000


def test_a_partition_that_is_far_behind_takes_turns_with_those_that_are_ahead():
    log = QuietLog()
    behind, ahead = Partition(0, 1_000, 100_000, log), Partition(900_000, 1_000, 1_000_000, log)
    places = read_backlog(behind, ahead)
    assert sum(place >= 900_000 for place in places[:20]) == 10
