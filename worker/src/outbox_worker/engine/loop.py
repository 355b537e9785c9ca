"""The loop: the runner that is due does its step; nothing due, wait. It decides nothing.

One thread does all steps, so a user's handler is never called twice at the same time in one process. The runner that
has been due longest goes first: a busy partition cannot starve the others. Partitions that read a backlog side by side
stay together, for the look at one place of it serves them all (`outbox_worker.postgres.reading.shared_look`): the one
that is furthest behind goes first. Else those with fewer messages would get ahead, each to a place of its own.
"""

from __future__ import annotations

import time
from math import isinf
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from outbox_core.processor import outcomes
from outbox_core.processor.state import Step
from outbox_worker.logs import get_logger
from outbox_worker.observe.status import Activity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox_worker.engine.runner import Runner
    from outbox_worker.observe.status import Progress
    from outbox_worker.shutdown import Waker

TICK: Final = 1.0
"""Seconds between two looks around: heartbeats of the broker, a changed handler, what interrupts a runner."""
_SLACK: Final = 120.0
"""Beyond delivery.timeout, for connecting, storing and rolling back."""
_LONG: Final = 3600.0
"""For migrations, and for finding a start in a large outbox."""
_NEAR: Final = 100_000
"""Positions by which one partition is ahead of another one at most, where they read a backlog side by side."""
_LONG_STEPS: Final = frozenset({Step.PREPARE, Step.LOAD})
_log = get_logger("outbox.worker")


class ProcessorRunners:
    """The runners of one processor, at least one; they share target and delivery."""

    def __init__(self, runners: Sequence[Runner]) -> None:
        context = runners[0].context
        self.runners = runners
        self.is_rated = context.config.delivery.rate_limit is not None
        self.activity = Activity(context.status)
        self._throttle, self._target, self._names = context.throttle, context.target, context.status.names

    def share(self) -> None:
        """Of the processor's rate this process uses the share that its partitions, or it itself, are of all."""
        self._throttle.share = sum(runner.share for runner in self.runners) / len(self.runners)

    def tick(self) -> None:
        """Let the target keep its connection alive; where it changed, try at once what waits because of it."""
        try:
            self._target.keep_alive()
        except Exception:  # noqa: BLE001 - what a broker says that cannot be understood must not end the process
            _log.exception("a fault of the target, whose connection is made anew", extra=self._names)
            self._target.close()
        if self._target.changed():
            for each in self.runners:
                if each.state.step is not Step.END:
                    each.advance(outcomes.HandlerChanged())


class Loop:
    """Runs the runners of one processor, or of several, until each has come to its END."""

    def __init__(self, processors: Sequence[ProcessorRunners], *, waker: Waker, progress: Progress) -> None:
        """Keep the processors, at least one; they share the sessions."""
        self._processors = processors
        self._rated = [processor for processor in processors if processor.is_rated]
        self._runners = [runner for processor in processors for runner in processor.runners]
        databases = [runner.context.databases for runner in self._runners]
        self._wal = databases[0].wal
        self._arrivals = {id(each.arrivals): each.arrivals for each in databases if each.arrivals is not None}
        self._waker = waker
        self._progress = progress
        longest = max(runner.context.config.delivery.timeout.total_seconds() for runner in self._runners)
        self._longest = longest + _SLACK
        self._next_tick = self._next_look = self._promised = 0.0

    def run(self) -> None:
        """Run to the end; or until all runners are obsolete, because the number of partitions changed."""
        while live := [runner for runner in self._runners if runner.state.step is not Step.END]:
            if looks := (now := time.monotonic()) >= self._next_look:
                self._look_around(live, now)
            at_rest = self._hear(live)
            for processor in self._rated:
                processor.share()
            due, runner = min(
                ((each.state.due_at_rest if at_rest else each.state.due, each) for each in live), key=itemgetter(0)
            )
            left = due - time.monotonic()
            if left <= 0 and len(live) > 1:
                runner = _find_furthest_behind(runner, live)
            within = _LONG if runner.state.step in _LONG_STEPS else self._longest
            if looks or within != self._promised:
                self._promised = within
                self._progress.expect("loop", within=within)
            # What interrupts a runner that waits is seen before and after each wait, and once a second while another
            # one works; the one that is due looks itself.
            if (looks or left > 0) and self._interrupt(live):
                continue
            if isinf(due) and all(each.is_obsolete for each in live):
                return
            if left <= 0:
                self._advance(runner)
                continue
            self._wait(live, TICK if isinf(left) else min(left, TICK))
        for processor in self._processors:
            processor.activity.tell()

    def _look_around(self, live: Sequence[Runner], now: float) -> None:
        """After each wait, or once a second while a runner is busy: see to what nothing else sees to."""
        if self._wal is not None and self._next_look:
            self._tell_moved(live, 1)  # a second without a wait for the log
        self._next_look = now + TICK
        for processor in self._processors:
            processor.activity.look()
        if now >= self._next_tick:
            self._next_tick = now + TICK
            for processor in self._processors:
                processor.tick()

    def _advance(self, runner: Runner) -> None:
        runner.advance()
        if self._wal is not None and runner.state.batch is not None:
            self._wal.found = True

    def _wait(self, live: Sequence[Runner], seconds: float) -> None:
        """Wait so long, or until woken, or until the source wrote something that may be a message."""
        socket = None
        if self._wal is not None and self._wal.take_own():
            self._tell_moved(live, 0)
            return
        if self._wal is not None and any(each.state.awaits_messages for each in live):
            socket = self._wal.begin()
        elif self._wal is not None and not any(each.state.owns for each in live):
            self._wal.close()  # a standby needs no connection for it
        self._waker.wait(seconds, socket)
        self._next_look = 0.0

    def _hear(self, live: Sequence[Runner]) -> bool:
        """Tell those who wait that the source's server wrote something; say whether it is known to write nothing."""
        if self._wal is None:
            return False
        useless, rests = self._wal.take()
        if useless is not None:
            self._tell_moved(live, useless)
        return rests

    def _tell_moved(self, live: Sequence[Runner], useless: int) -> None:
        for arrivals in self._arrivals.values():
            arrivals.forget()
        for each in live:
            if each.state.awaits_messages:
                each.advance(outcomes.SourceMoved(useless))

    @staticmethod
    def _interrupt(live: Sequence[Runner]) -> bool:
        """Tell each runner what makes its waiting pointless; say whether there was anything."""
        found = [(runner, outcome) for runner in live if (outcome := runner.find_interruption()) is not None]
        for runner, outcome in found:
            runner.advance(outcome)
        return bool(found)


def _find_furthest_behind(runner: Runner, live: Sequence[Runner]) -> Runner:
    """Of the runners that are due and read a backlog near this one, return the one that is furthest behind."""
    place = runner.backlog_place
    if place is None:
        return runner
    now, config = time.monotonic(), runner.context.config
    near = (each for each in live if each.context.config is config and each.state.due <= now)
    places = ((each.backlog_place, each) for each in near)
    return min(((at, each) for at, each in places if at is not None and at >= place - _NEAR), key=itemgetter(0))[1]
