"""One partition's life: carry out the step that is due, let `outbox_core.processor` decide, tell board and log."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from outbox_core import happening as h
from outbox_core.processor import decide_next
from outbox_core.spec import Engine
from outbox_core.state import Policy, Step
from outbox_worker.attempt import attempt
from outbox_worker.logs import get_logger
from outbox_worker.steps import isolates

if TYPE_CHECKING:
    from random import Random

    from outbox_core.state import ProcessorState
    from outbox_worker.membership import Membership
    from outbox_worker.steps import Parts, Steps
    from outbox_worker.telemetry import Telemetry

_log = get_logger("outbox.worker")
_HANDLING: Final = frozenset({Step.HANDLE, Step.HANDLE_HELD, Step.ISOLATE})


class Lane:
    """A partition in this process, owned by it or not. A processor that is not divided has one, number 0."""

    def __init__(
        self,
        parts: Parts,
        steps: Steps,
        state: ProcessorState,
        *,
        telemetry: Telemetry,
        chance: Random,
        membership: Membership | None = None,
    ) -> None:
        """Begin with `state`; `membership` says which partitions this process shall own, None: the only one."""
        self.parts = parts
        self.state = state
        self._steps = steps
        self._telemetry = telemetry
        self._random = chance
        self._membership = membership
        self._policy = Policy(
            parts.config.delivery,
            parts.config.guarantee,
            bisects=parts.config.engine is Engine.WORKER,
            isolates=isolates(parts),
        )
        self._batch_began = 0.0
        self._found_fresh = True
        """The last look at the outbox gave the target something, or there was none yet."""
        self._shown = state
        parts.board.set_state(state, parts.key.partition)

    @property
    def owns(self) -> bool:
        """The partition is this process's, as far as it knows."""
        return self.state.lease is not None

    @property
    def share(self) -> float:
        """Of this lane's part of the processor's rate, what this process uses: all of it, if it owns the partition."""
        return float(self.owns)

    @property
    def is_obsolete(self) -> bool:
        """The processor is divided otherwise now, and nothing of the partition is in hand any more."""
        return self._membership is not None and self._membership.outdated and self.state.step is Step.PARK

    def find_interruption(self) -> h.Happening | None:
        """Say what makes waiting, or the step, pointless."""
        parts, step = self.parts, self.state.step
        if parts.shutdown.requested and not self.state.is_last_work:
            return h.StopRequested()
        if step.needs_claim and (why := parts.ownership.claim_lost):
            return h.OwnershipLost(why)
        if step.needs_lease and (why := parts.ownership.lease_lost):
            return self._find_loss(why)
        if self._membership is None:
            return self._look_again()
        wanted = self._membership.wants(parts.key.partition)
        if wanted and step is Step.PARK:
            return h.Wanted()
        return h.Unwanted() if not wanted and step.can_yield else self._look_again()

    def _look_again(self) -> h.Happening | None:
        """Say whether the heartbeat saw held messages otherwise than this lane believes: a person decided."""
        seen = self.parts.watch.take(self.parts.key.partition) if self.state.step is Step.FETCH else None
        if seen is None:
            return None
        unknown = seen.due and self.state.held_due > time.monotonic() + 1.0
        return h.HeldChanged() if unknown or (self.state.blocking and not seen.blocking) else None

    def _find_loss(self, why: str) -> h.Happening:
        """Lost; or given back by the heartbeat, while another lane was busy."""
        if not self.parts.ownership.given_back:
            return h.OwnershipLost(why)
        self.parts.ownership.drop_lease()
        return h.Released()

    def advance(self, happened: h.Happening | None = None) -> None:
        """Do the step, unless something `happened` already, and decide what comes next."""
        before = self.state
        if happened is None and not self.parts.ownership.begin_step() and before.step.needs_lease:
            self.parts.ownership.drop_lease()
            happened = h.Released()
        if before.step is Step.TAKE_HELD and self.parts.gate.prefers_fresh and self._found_fresh:
            before = replace(before, step=Step.FETCH)
        if happened is None:
            blocked = self.parts.gate.find_obstacle(time.monotonic()) if before.step.uses_target else None
            happened = blocked or self._perform(before)
        if isinstance(happened, h.Fetched):
            self._found_fresh = happened.batch.matched
        self._count(before, happened)
        self.state = decide_next(before, happened, time.monotonic(), self._policy, self._random.random())
        if self.state.step.rests:
            self.parts.ownership.rest()
        before_shown, self._shown = self._shown, self.parts.gate.shown(self.state)
        self._tell(before, happened, before_shown)
        self.parts.board.set_state(self._shown, self.parts.key.partition)

    def _perform(self, state: ProcessorState) -> h.Happening:
        if state.step in _HANDLING and state.batch is not None:
            self._batch_began = time.monotonic()
            self.parts.gate.begin(state.batch.matched_count)
        happened = attempt(self.parts, lambda: self._steps.perform(state), self._names | {"step": state.step.value})
        return self._steps.name_failed(state, happened) if isinstance(happened, h.Failed) else happened

    def _count(self, state: ProcessorState, happened: h.Happening) -> None:
        board = self.parts.board
        match happened:
            case h.HeldHandled():
                board.add_batch(happened.count)
                self.parts.gate.succeed(happened.count)
            case h.Stored() if state.batch is not None:
                board.add_batch(happened.count)
                if happened.count:
                    self.parts.gate.succeed(happened.count)
                self._telemetry.observe_batch(time.monotonic() - self._batch_began, stored=True)
            case h.Isolated():
                keys = {each.key for each in happened.failed}
                self._count_some(
                    happened.count, keys, stored=happened.stored, more=happened.batch.full, retried=False
                )  # fmt: skip
            case h.HeldSorted():
                keys = {each.key for each in happened.failed}
                self._count_some(happened.handled, keys, stored=True, more=False, retried=True)
            case h.Refused():
                board.add_refusal(int(happened.answer))
            case h.Failed() | h.Unsure():
                board.set_error(happened.error.detail or str(happened.error))
                if state.batch is not None:
                    self._telemetry.observe_batch(time.monotonic() - self._batch_began, stored=False)
                    if state.step in _HANDLING:
                        self.parts.gate.fail(happened.error, state.batch, time.monotonic())
            case _:
                pass

    def _count_some(self, count: int, keys: set[str], *, stored: bool, more: bool, retried: bool) -> None:
        """Some of a batch failed: if none of it was handled, that says something of the target."""
        if stored:
            self.parts.board.add_batch(count)
        self._telemetry.observe_batch(time.monotonic() - self._batch_began, stored=count > 0)
        if count:
            self.parts.gate.succeed(count)
        elif keys:
            self.parts.gate.fail_messages(keys, time.monotonic(), more=more, retried=retried)

    def _tell(self, before: ProcessorState, happened: h.Happening, shown: ProcessorState) -> None:
        """Log what a person would want to read later: changes, refusals, failures. Not every batch."""
        after = self.state
        if isinstance(happened, h.Refused):
            _log.warning(
                "store_processor_checkpoint refused",
                extra=self._names
                | {
                    "code": int(happened.answer),
                    "expected": str(happened.expected),
                    "stored": str(happened.stored),
                    "new": str(happened.new),
                },
            )
        elif isinstance(happened, h.Failed | h.Unsure):
            _log.warning(
                "failed",
                extra=self._names
                | {
                    "step": before.step.value,
                    "reason": happened.error.reason.value,
                    "error": str(happened.error),
                    "detail": happened.error.detail,
                    "attempt": after.attempt,
                    "retryInSeconds": round(max(0.0, after.due - time.monotonic()), 3),
                },
            )
        told = self._shown
        if (shown.state, shown.message) != (told.state, told.message):
            _log.info(
                "state",
                extra=self._names
                | {"state": told.state.value, "reason": told.reason.value, "why": told.message or None},
            )

    @property
    def _names(self) -> dict[str, object]:
        return {} if self._membership is None else {"partition": self.parts.key.partition}
