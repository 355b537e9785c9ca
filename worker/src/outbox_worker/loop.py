"""The loop: wait until the step is due, carry it out, let `outbox_core.processor` decide, tell the board."""

from __future__ import annotations

import random
import time
from math import inf, isinf
from typing import TYPE_CHECKING, Final

import psycopg

from outbox_core import happening as h
from outbox_core.errors import OutboxError
from outbox_core.processor import Policy, ProcessorState, Step, decide_next
from outbox_core.report import Reason
from outbox_worker.logs import get_logger
from outbox_worker.postgres.errors import translate
from outbox_worker.shutdown import Interrupted

if TYPE_CHECKING:
    from outbox_worker.shutdown import Shutdown, Wakeup
    from outbox_worker.status import Progress
    from outbox_worker.steps import Parts, Steps
    from outbox_worker.telemetry import Telemetry

TICK: Final = 1.0
"""Seconds between two looks around while waiting: heartbeats of the broker, a changed handler."""
_SLACK: Final = 120.0
"""Beyond delivery.timeout, for connecting, storing and rolling back."""
_LONG: Final = 3600.0
"""For migrations, and for finding a start in a large outbox."""
_LONG_STEPS: Final = frozenset({Step.PREPARE, Step.LOAD})
_log = get_logger("outbox.worker")


class Loop:
    """Runs one processor until the state machine says END."""

    def __init__(self, parts: Parts, steps: Steps, *, wakeup: Wakeup, progress: Progress, telemetry: Telemetry) -> None:
        """Keep the parts."""
        self._parts = parts
        self._steps = steps
        self._wakeup = wakeup
        self._progress = progress
        self._telemetry = telemetry
        self._policy = Policy(parts.config.delivery, parts.config.guarantee)
        self._longest = parts.config.delivery.timeout.total_seconds() + _SLACK
        self._random = random.SystemRandom()
        self._batch_began = self._next_tick = 0.0

    def run(self, state: ProcessorState) -> ProcessorState:
        """Run from `state` to the end; return the last state."""
        while not state.step.is_terminal:
            self._parts.board.set_state(state)
            happened = self._wait(state) or self._perform(state)
            self._count(state, happened)
            after = decide_next(state, happened, time.monotonic(), self._policy, self._random.random())
            self._tell(state, after, happened)
            state = after
        self._parts.board.set_state(state)
        return state

    def _wait(self, state: ProcessorState) -> h.Happening | None:
        """Wait until the step is due; return what made waiting, or the step, pointless."""
        while True:
            self._progress.expect("loop", within=_LONG if state.step in _LONG_STEPS else self._longest)
            if interruption := self._interruption(state):
                return interruption
            left = state.due - time.monotonic()
            if left <= 0:
                return None
            self._wakeup.wait(TICK if isinf(left) else min(left, TICK))
            if self._tick():
                return h.TargetChanged()

    def _tick(self) -> bool:
        """Once a second: let the target keep its connection alive; say whether it changed."""
        now = time.monotonic()
        if now < self._next_tick:
            return False
        self._next_tick = now + TICK
        self._parts.target.keep_alive()
        return self._parts.target.changed()

    def _interruption(self, state: ProcessorState) -> h.Happening | None:
        shutdown: Shutdown = self._parts.shutdown
        if shutdown.requested and not state.is_last_work:
            return h.StopRequested()
        ownership = self._parts.ownership
        if state.step.needs_claim and (why := ownership.claim_lost):
            return h.OwnershipLost(why)
        if state.step.needs_lease and (why := ownership.lease_lost):
            return h.OwnershipLost(why)
        return None

    def _perform(self, state: ProcessorState) -> h.Happening:
        if state.step is Step.HANDLE:
            self._batch_began = time.monotonic()
        try:
            # Whatever the step waits for, a locked table or a server that is gone, it ends with the grace period.
            return self._parts.shutdown.limited(inf, lambda: self._steps.perform(state))
        except OutboxError as err:
            error = err
        except psycopg.Error as err:
            error = translate(err)
        except Interrupted as err:
            self._parts.session.discard()  # in the middle of whatever it was
            error = err.as_error("the step")
        except Exception as err:  # noqa: BLE001 - reported in status and tried again, like any other fault
            _log.exception("a fault of the worker itself", extra={"step": state.step.value})
            self._parts.session.discard()
            error = OutboxError(f"a fault of the worker itself: {err!r}", reason=Reason.INTERNAL_ERROR)
        return h.Failed(error)

    def _count(self, state: ProcessorState, happened: h.Happening) -> None:
        board = self._parts.board
        match happened:
            case h.Stored() if state.batch is not None:
                board.add_batch(happened.count)
                self._telemetry.observe_batch(time.monotonic() - self._batch_began, stored=True)
            case h.Refused():
                board.add_refusal(int(happened.answer))
            case h.Failed() | h.Unsure():
                board.set_error(happened.error.detail or str(happened.error))
                if state.batch is not None:
                    self._telemetry.observe_batch(time.monotonic() - self._batch_began, stored=False)
            case _:
                pass

    def _tell(self, before: ProcessorState, after: ProcessorState, happened: h.Happening) -> None:
        """Log what a person would want to read later: changes, refusals, failures. Not every batch."""
        if isinstance(happened, h.Refused):
            _log.warning(
                "store_processor_checkpoint refused",
                extra={
                    "code": int(happened.answer),
                    "expected": str(happened.expected),
                    "stored": str(happened.stored),
                    "new": str(happened.new),
                },
            )
        elif isinstance(happened, h.Failed | h.Unsure):
            _log.warning(
                "failed",
                extra={
                    "step": before.step.value,
                    "reason": happened.error.reason.value,
                    "error": str(happened.error),
                    "detail": happened.error.detail,
                    "attempt": after.attempt,
                    "retryInSeconds": round(max(0.0, after.due - time.monotonic()), 3),
                },
            )
        if (before.state, before.message) != (after.state, after.message):
            _log.info(
                "state",
                extra={"state": after.state.value, "reason": after.reason.value, "why": after.message or None},
            )
