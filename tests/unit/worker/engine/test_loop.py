"""The loop with runners of several processors: what one that is always due leaves for the others."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from outbox_core.processor import outcomes
from outbox_core.processor.outcomes import HeldLease
from outbox_core.processor.state import Step, initial_state
from outbox_core.report import WorkerState
from outbox_worker.engine import loop
from outbox_worker.engine.loop import Loop, ProcessorRunners
from outbox_worker.observe.status import Progress
from outbox_worker.shutdown import Waker

SECONDS = 0.02
IDLE = replace(
    initial_state(0.0), step=Step.FETCH, state=WorkerState.ACTIVE, lease=HeldLease(0, 1, UUID(int=1)), due=float("inf")
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

    def find_interruption(self):
        return None

    def advance(self, outcome=None):
        if outcome is not None:
            self.heard.append(outcome)
        elif self.steps:
            time.sleep(SECONDS / 4)
            self.steps -= 1
        else:
            self.state = self.other.state = replace(self.state, step=Step.END)

    def keep_alive(self):
        self.kept_alive += 1
        if self.kept_alive == 1:
            raise ValueError("the broker confirmed what was never published")

    def close(self):
        self.closed = True

    def changed(self):
        return False


@pytest.fixture
def idle(monkeypatch):
    """One that awaits messages, beside another one that had something to do for ten ticks."""
    monkeypatch.setattr(loop, "TICK", SECONDS)
    log = QuietLog()
    waiting: Any = OneRunner(IDLE, log)
    busy: Any = OneRunner(replace(IDLE, step=Step.HANDLE, due=0.0), log, other=waiting, steps=40)
    Loop([ProcessorRunners([each]) for each in (waiting, busy)], waker=Waker(), progress=Progress()).run()
    return waiting


def test_its_target_is_kept_alive_and_made_anew_where_that_fails(idle):
    assert idle.closed
    assert 2 <= idle.kept_alive <= 15


def test_it_looks_for_messages_now_and_then_although_nothing_waits_for_the_log(idle):
    assert idle.heard
    assert {type(each) for each in idle.heard} == {outcomes.SourceMoved}
    assert len(idle.heard) <= 15
