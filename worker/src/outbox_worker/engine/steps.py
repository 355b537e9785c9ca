"""Carries out one step at a time and returns its outcome: which collaborator does which step. It decides nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outbox_core.ports import InTransaction
from outbox_core.processor import outcomes
from outbox_core.processor.state import Step
from outbox_core.spec import Engine

if TYPE_CHECKING:
    from uuid import UUID

    from outbox_core.config import ProcessorConfig
    from outbox_core.ports import Feed, Target
    from outbox_core.processor.state import ProcessorState
    from outbox_worker.databases import Databases
    from outbox_worker.engine.handling import Handling
    from outbox_worker.engine.owner_steps import OwnerSteps
    from outbox_worker.engine.stopped_steps import StoppedSteps
    from outbox_worker.engine.throttle import HeldWatch, Throttle
    from outbox_worker.feeds.held import HeldFeed
    from outbox_worker.observe.observer import Observer
    from outbox_worker.observe.status import ProcessStatus
    from outbox_worker.ownership.heartbeat import Ownership
    from outbox_worker.postgres.key import ProcessorKey
    from outbox_worker.shutdown import Shutdown


@dataclass(slots=True)
class StepContext:
    """Everything that the steps of one partition use; `outbox_worker.main` puts it together."""

    config: ProcessorConfig
    key: ProcessorKey
    pod: str
    token: UUID
    databases: Databases
    ownership: Ownership
    observer: Observer
    status: ProcessStatus
    shutdown: Shutdown
    target: Target
    throttle: Throttle
    watch: HeldWatch

    @property
    def transactional_target(self) -> bool:
        """Effects are in a transaction of the checkpoint's database."""
        return isinstance(self.target, InTransaction)


class Steps:
    """Each step, and what does it."""

    def __init__(
        self,
        context: StepContext,
        owner: OwnerSteps,
        feed: Feed,
        handling: Handling,
        held: HeldFeed,
        stopped: StoppedSteps,
    ) -> None:
        """Keep the collaborators of one partition."""
        self._status = context.status
        self._owner = owner
        self._feed = feed
        self._handling = handling
        self._stopped = stopped
        self._actions = {
            Step.PREPARE: owner.prepare,
            Step.CLAIM: owner.claim,
            Step.REVIEW: owner.review,
            Step.CHECK_TARGET: owner.check_target,
            Step.ACQUIRE: owner.acquire,
            Step.LOAD: owner.load,
            Step.FETCH: self._fetch,
            Step.HANDLE: handling.handle,
            Step.ISOLATE: handling.isolate,
            Step.HOLD: stopped.look_for_decision,
            Step.STORE: handling.store,
            Step.CONFIRM: handling.confirm,
            Step.RECORD: owner.record,
            Step.RELEASE: owner.release,
            Step.HOLD_BATCH: handling.hold_batch,
            Step.TAKE_HELD: held.fetch,
            Step.HANDLE_HELD: handling.handle_held,
            Step.FAIL_HELD: handling.fail_held,
        }

    def perform(self, state: ProcessorState) -> outcomes.StepOutcome:
        """Do the state's step.

        Raises:
            OutboxError: it could not be done.

        """
        step = state.step
        if step is not Step.PREPARE and self._owner.is_unprepared(step):
            step = Step.PREPARE
        return self._actions[step](state)

    def _fetch(self, state: ProcessorState) -> outcomes.StepOutcome:
        """Find the next batch; the last one before the worker stops is handled with it."""
        fetched = self._feed.fetch(state)
        if isinstance(fetched, outcomes.Fetched) and fetched.is_last:
            handled = self._handling.handle(replace(state, batch=fetched.batch))
            if isinstance(handled, outcomes.Stored):
                self._status.add_batch(handled.count)
            return handled
        return fetched

    def name_failed(self, state: ProcessorState, failed: outcomes.Failed) -> outcomes.Failed:
        """Say which message failed alone, where one did."""
        return self._stopped.name_failed(state, failed)


def isolates(context: StepContext) -> bool:
    """Say whether the messages of a batch that fail are found under savepoints: effects are in a database of ours."""
    return context.transactional_target and context.config.engine is Engine.WORKER
