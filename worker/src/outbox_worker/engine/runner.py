"""One unit's life: carry out the step that is due, let `outbox_core.processor` decide, tell status and log."""

from __future__ import annotations

import time
from math import inf
from typing import TYPE_CHECKING, Final

from outbox_core.breaker import Phase
from outbox_core.errors import OutboxError, TransientError, drop_traceback
from outbox_core.processor import outcomes
from outbox_core.processor.lifecycle import decide_next
from outbox_core.processor.state import CAN_YIELD, HANDS_OVER, NEEDS_CLAIM, NEEDS_LEASE, USES_TARGET, Policy, Step
from outbox_core.processor.turns import Turn, decide_turn
from outbox_core.progress.checkpoint import StoreAnswer
from outbox_core.report import Reason
from outbox_core.spec import Engine
from outbox_worker.logs import ABOUT, get_logger
from outbox_worker.postgres.errors import DatabaseError, translate
from outbox_worker.shutdown import Interrupted

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from outbox_core.processor.claimed_batch import Refusal
    from outbox_core.processor.failing import Failure
    from outbox_core.processor.state import ProcessorState
    from outbox_worker.engine.steps import StepContext, Steps
    from outbox_worker.ownership.heartbeat import Losses
    from outbox_worker.ownership.membership import Membership

_REPEATED: Final = (Step.PREPARE, Step.CLAIM, *CAN_YIELD)
"""Nothing is in hand, so that a step that lasts may be cut and done again. To find a start (LOAD) would never end."""
_LOOKS_AT_TARGET: Final = (Step.REVIEW, Step.CHECK_TARGET)
"""Done also while another process shall own the partition, where this one found that its target cannot work."""
_log = get_logger("outbox.worker")


class Runner:
    """A unit of this process, owned by it or not: one partition, or all of a processor that is not partitioned."""

    def __init__(
        self,
        context: StepContext,
        steps: Steps,
        state: ProcessorState,
        *,
        chance: Random,
        membership: Membership | None = None,
    ) -> None:
        """Begin with `state`; `membership` says which partitions this process shall own, None: there are none."""
        self.context = context
        self.state = state
        self._steps = steps
        self._random = chance
        self._membership = membership
        self._policy = Policy(
            context.config.delivery, bisects=context.config.engine is Engine.WORKER, isolates=context.isolates
        )
        self._names = context.status.names | ({} if membership is None else {"partition": context.key.partition})
        self._batch_began = 0.0
        self._found_fresh = True
        """The last look at the outbox gave the target something, or there was none yet."""
        self._shown = state
        context.status.watch(context.key.partition, lambda: self._shown)

    @property
    def share(self) -> float:
        """Of this unit's part of the processor's rate, what this process uses: none of it without owning it."""
        return self._steps.share() if self.state.owns else 0.0

    @property
    def backlog_place(self) -> int | None:
        """The position behind which the rest of an open snapshot range lies; None: none is read."""
        cursor = self.state.cursor
        return None if cursor is None or cursor.snapshot_range is None else cursor.snapshot_range.position

    @property
    def is_obsolete(self) -> bool:
        """The number of partitions changed, and nothing of this partition is in hand any more."""
        return self._membership is not None and self._membership.outdated and self.state.step is Step.PARK

    def find_interruption(self) -> outcomes.Outcome | None:
        """Say what makes waiting pointless."""
        return self._judge(self.context.ownership.losses)

    def _judge(self, losses: Losses) -> outcomes.Outcome | None:
        context, step = self.context, self.state.step
        if context.shutdown.requested and not self.state.is_last_work:
            return outcomes.StopRequested()
        if losses.given_back and not losses.claim and (step in NEEDS_LEASE or self.state.rests):
            context.ownership.drop_lease()
            return outcomes.Released()
        claim, lease = losses.claim if step in NEEDS_CLAIM else None, losses.lease if step in NEEDS_LEASE else None
        if why := claim or lease:
            return outcomes.OwnershipLost(why)
        if self._membership is None:
            return self._look_again()
        wanted = context.key.partition in self._membership.assigned
        if wanted and step is Step.PARK:
            return outcomes.Assigned()
        looks = step in _LOOKS_AT_TARGET and not self._membership.is_able
        return outcomes.Revoked() if step in CAN_YIELD and not (wanted or looks) else self._look_again()

    def _look_again(self) -> outcomes.Outcome | None:
        """Say whether the heartbeat saw held messages otherwise than this runner believes: a person decided."""
        if self.state.step is not Step.FETCH:
            return None
        if (seen := self.context.observer.held_seen.pop(self.context.key.partition, None)) is None:
            return None
        unknown = seen.due and self.state.held_due > time.monotonic() + 1.0
        return outcomes.HeldChanged() if unknown or (self.state.blocking and not seen.blocking) else None

    def advance(self, outcome: outcomes.Outcome | None = None) -> None:
        """Do the step, unless there is an `outcome` already or it is pointless, and decide what comes next."""
        before = ABOUT.set(self._names)  # as `about` does, which costs more: this is for each step
        try:
            self._advance(outcome)
        finally:
            ABOUT.reset(before)

    def _advance(self, outcome: outcomes.Outcome | None) -> None:
        before = self.state
        outcome = outcome or self._judge(self.context.ownership.begin_step())
        phase = self.context.throttle.breaker.phase
        if before.step is Step.TAKE_HELD and self._found_fresh and decide_turn(0.0, phase) is Turn.FRESH:
            before = before._replace(step=Step.FETCH)
        if outcome is None:
            outcome = self._find_obstacle(before.step) or self._perform(before)
        if isinstance(outcome, outcomes.Fetched):
            self._found_fresh = outcome.batch.matched_count > 0
        if before.step is Step.CHECK_TARGET:
            self._note_check(outcome)
        self._count(before, outcome)
        self.state = decide_next(before, outcome, time.monotonic(), self._policy, self._random.random())
        self.context.ownership.decided = self.state
        self._tell(before, outcome)

    def _note_check(self, outcome: outcomes.Outcome) -> None:
        """Take no share of the partitions where the target cannot work, and one again where it can."""
        if self._membership is not None and isinstance(outcome, outcomes.TargetReady | outcomes.Failed):
            self._membership.is_able = isinstance(outcome, outcomes.TargetReady)

    def _find_obstacle(self, step: Step) -> outcomes.Throttled | None:
        throttle, now = self.context.throttle, time.monotonic()
        if step in HANDS_OVER and now < throttle.paused_until:
            return throttle.find_pause(now)
        return throttle.find_obstacle(now) if step in USES_TARGET else None

    def _perform(self, state: ProcessorState) -> outcomes.Outcome:
        if state.step in HANDS_OVER and state.batch is not None:
            self._batch_began = time.monotonic()
        outcome = self._carry_out(state)
        return self._steps.name_failed(state, outcome) if isinstance(outcome, outcomes.Failed) else outcome

    def _carry_out(self, state: ProcessorState) -> outcomes.Outcome:
        context = self.context
        is_bounded = context.databases.is_shared and state.step in _REPEATED
        seconds = context.config.delivery.timeout.total_seconds() if is_bounded else inf
        try:
            # A wait in it, for a locked table or a server that is gone, ends with the grace period.
            return context.shutdown.limited(seconds, lambda: self._steps.perform(state))
        except OutboxError as err:
            error = err
        except DatabaseError as err:
            error = translate(err)
        except Interrupted as err:
            context.databases.discard()  # it may be in the middle of a statement
            error = err.as_error("the step")
            if is_bounded and not err.draining:
                told = (
                    f"the step {state.step.value!r} took longer than delivery.timeout, for which the other processors "
                    "of the process waited; it is tried again. Look for a locked table, or raise delivery.timeout"
                )
                error = TransientError(told, reason=Reason.DATABASE_UNAVAILABLE)
        except Exception as err:  # noqa: BLE001 - reported in status and tried again, like any other fault
            _log.exception("a fault of the worker itself", extra={"step": state.step.value})
            context.databases.discard()
            error = OutboxError(f"a fault of the worker itself: {err!r}", reason=Reason.INTERNAL_ERROR)
        return outcomes.Failed(drop_traceback(error))

    def _count(self, state: ProcessorState, outcome: outcomes.Outcome) -> None:
        status = self.context.status
        match outcome:
            case outcomes.HeldHandled():
                status.add_batch(outcome.count)
                self.context.throttle.succeed(outcome.count)
            case outcomes.Stored() | outcomes.Completed() if state.batch is not None:
                status.add_batch(outcome.count, time.monotonic() - self._batch_began)
                self.context.throttle.succeed(outcome.count)
            case outcomes.Isolated() as some:
                self._count_some(some.count, some.failed, more=some.batch.full, retried=False, stored=some.stored)
            case outcomes.HeldSorted() as some:
                self._count_some(some.handled, some.failed, more=False, retried=True)
            case outcomes.Sifted() as some if some.settled and state.batch is not None:
                for refused in some.refusals[-1:]:
                    status.set_error(refused.error.detail or str(refused.error))
                more, retried = state.batch.full, state.batch.is_retried
                self._count_some(some.handled, some.refusals, more=more, retried=retried)
            case outcomes.Rejected():
                status.add_refusal(int(outcome.answer))
            case outcomes.Lost():
                status.add_refusal(int(StoreAnswer.NOT_OWNER))
            case outcomes.Failed() | outcomes.CommitUnknown():
                self._count_failure(state, outcome.error)
            case _:
                pass

    def _count_failure(self, state: ProcessorState, error: OutboxError) -> None:
        self.context.status.set_error(error.detail or str(error))
        if state.batch is not None:
            self.context.status.add_seconds(time.monotonic() - self._batch_began, stored=False)
            if state.step in HANDS_OVER:
                self.context.throttle.fail(error, state.batch, time.monotonic(), again=state.attempt > 0)

    def _count_some(
        self, handled: int, failed: Sequence[Failure | Refusal], *, more: bool, retried: bool, stored: bool = True
    ) -> None:
        """Some of a batch failed: if none of it was handled, that says something of the target."""
        if stored:
            self.context.status.add_batch(handled)
        self.context.status.add_seconds(time.monotonic() - self._batch_began, stored=handled > 0)
        if handled:
            self.context.throttle.succeed(handled)
        elif failed:
            keys = {each.key for each in failed}
            self.context.throttle.fail_messages(keys, time.monotonic(), more=more, retried=retried)

    def _tell(self, before: ProcessorState, outcome: outcomes.Outcome) -> None:
        """Tell the status and the log what a person would want to read later: changes, refusals, failures. No batch."""
        after = self.state
        if isinstance(outcome, outcomes.Rejected):
            _log.warning(
                "store_processor_checkpoint refused",
                extra={
                    "code": int(outcome.answer),
                    "expected": str(outcome.expected),
                    "stored": str(outcome.stored),
                    "new": str(outcome.new),
                },
            )
        elif isinstance(outcome, outcomes.Failed | outcomes.CommitUnknown):
            _log.warning(
                "failed",
                extra={
                    "step": before.step.value,
                    "reason": outcome.error.reason.value,
                    "error": str(outcome.error),
                    "detail": outcome.error.detail,
                    "attempt": after.attempt,
                    "retryInSeconds": round(max(0.0, after.due - time.monotonic()), 3),
                },
            )
        throttle, shown = self.context.throttle, self._shown
        self._shown = told = after if throttle.breaker.phase is Phase.CLOSED else throttle.shown(after)
        if (shown.state, shown.reason, shown.message) != (told.state, told.reason, told.message):
            self.context.status.note_change(self.context.key.partition, told)
        if (shown.state, shown.message) != (told.state, told.message):
            _log.info(
                "state", extra={"state": told.state.value, "reason": told.reason.value, "why": told.message or None}
            )
