"""The loop: whichever lane is due does its step; nothing due, wait. It decides nothing.

One thread does all steps, so a user's handler is never called twice at the same time in one process. The lane that has
been due longest goes first: a busy partition cannot starve the others.
"""

from __future__ import annotations

import time
from math import isinf
from typing import TYPE_CHECKING, Final

from outbox_core import happening as h
from outbox_core.state import Step
from outbox_worker.status import Activity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox_worker.competing import ConsumerLane
    from outbox_worker.lane import Lane
    from outbox_worker.shutdown import Wakeup
    from outbox_worker.status import Progress

TICK: Final = 1.0
"""Seconds between two looks around while waiting: heartbeats of the broker, a changed handler."""
_SLACK: Final = 120.0
"""Beyond delivery.timeout, for connecting, storing and rolling back."""
_LONG: Final = 3600.0
"""For migrations, and for finding a start in a large outbox."""
_LONG_STEPS: Final = frozenset({Step.PREPARE, Step.LOAD})


class Loop:
    """Runs the lanes of one processor until each has come to its END."""

    def __init__(self, lanes: Sequence[Lane | ConsumerLane], *, wakeup: Wakeup, progress: Progress) -> None:
        """Keep the lanes, at least one; they share target and delivery."""
        self._lanes = lanes
        self._target = lanes[0].parts.target
        self._gate = lanes[0].parts.gate
        self._wakeup = wakeup
        self._progress = progress
        self._longest = lanes[0].parts.config.delivery.timeout.total_seconds() + _SLACK
        self._next_tick = 0.0
        self._activity = Activity(lanes[0].parts.board)

    def run(self) -> None:
        """Run to the end; or until all lanes are obsolete, because the number of partitions changed."""
        while live := [lane for lane in self._lanes if not lane.state.step.is_terminal]:
            if all(lane.is_obsolete for lane in live):
                return
            self._activity.look()
            if self._interrupt(live):
                continue
            self._share(live)
            lane = min(live, key=lambda each: each.state.due)
            self._progress.expect("loop", within=_LONG if lane.state.step in _LONG_STEPS else self._longest)
            left = lane.state.due - time.monotonic()
            if left <= 0:
                lane.advance()
                continue
            self._wakeup.wait(TICK if isinf(left) else min(left, TICK))
            if self._tick():
                for each in live:
                    each.advance(h.TargetChanged())
        self._activity.tell()

    def _share(self, live: Sequence[Lane | ConsumerLane]) -> None:
        """Of the processor's rate this process uses the share that its partitions, or it itself, are of all."""
        self._gate.share = sum(lane.share for lane in live) / len(self._lanes)

    @staticmethod
    def _interrupt(live: Sequence[Lane | ConsumerLane]) -> bool:
        """Tell each lane what makes its waiting pointless; say whether there was anything."""
        found = [(lane, happened) for lane in live if (happened := lane.find_interruption()) is not None]
        for lane, happened in found:
            lane.advance(happened)
        return bool(found)

    def _tick(self) -> bool:
        """Once a second: let the target keep its connection alive; say whether it changed."""
        now = time.monotonic()
        if now < self._next_tick:
            return False
        self._next_tick = now + TICK
        self._target.keep_alive()
        return self._target.changed()
