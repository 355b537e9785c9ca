"""Carries out one step at a time and returns its outcome: which collaborator does which step. It decides nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outbox_core.ports import InTransaction
from outbox_core.processor import outcomes
from outbox_core.processor.state import Step
from outbox_core.progress.numbering import number_batch
from outbox_core.spec import Engine

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from uuid import UUID

    from outbox_core.config import ProcessorConfig
    from outbox_core.ports import Feed, Target
    from outbox_core.processor.state import ProcessorState
    from outbox_worker.databases import Databases
    from outbox_worker.engine.handling import Handling
    from outbox_worker.engine.owner_steps import OwnerSteps
    from outbox_worker.engine.stopped_steps import StoppedSteps
    from outbox_worker.engine.throttle import Throttle
    from outbox_worker.feeds.held import HeldFeed
    from outbox_worker.observe.observer import Observer
    from outbox_worker.observe.status import ProcessStatus
    from outbox_worker.ownership.heartbeat import Ownership
    from outbox_worker.postgres.key import ProcessorKey
    from outbox_worker.shutdown import Shutdown

    Action = Callable[[ProcessorState], outcomes.Outcome]


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

    @property
    def transactional_target(self) -> bool:
        """Effects are in a transaction of the checkpoint's database."""
        return isinstance(self.target, InTransaction)

    @property
    def isolates(self) -> bool:
        """The messages of a batch that fail are found under savepoints: effects are in a database of ours."""
        return self.transactional_target and self.config.engine is Engine.WORKER


class Steps:
    """Each step, and what does it. Those of every worker are the same in all modes; a mode adds its own."""

    def __init__(
        self,
        owner: OwnerSteps,
        stopped: StoppedSteps,
        actions: Mapping[Step, Action],
        share: Callable[[], float] = lambda: 1.0,
    ) -> None:
        """Keep what does the steps of one unit; `actions` are the mode's own.

        `share` tells, of this unit's part of the processor's rate, what this process may use.
        """
        self._owner = owner
        self.name_failed = stopped.name_failed
        """Says which message failed alone, where one did."""
        self.share = share
        self._actions: dict[Step, Action] = {
            Step.PREPARE: owner.prepare,
            Step.CLAIM: owner.claim,
            Step.REVIEW: owner.review,
            Step.CHECK_TARGET: owner.check_target,
            Step.HOLD: stopped.look_for_decision,
            **actions,
        }

    def perform(self, state: ProcessorState) -> outcomes.Outcome:
        """Do the state's step.

        Raises:
            OutboxError: it could not be done.

        """
        step = state.step
        if step is not Step.PREPARE and self._owner.is_unprepared(step):
            step = Step.PREPARE
        return self._actions[step](state)


def steps_of_an_owner(
    context: StepContext, owner: OwnerSteps, feed: Feed, handling: Handling, held: HeldFeed
) -> dict[Step, Action]:
    """Return the steps of a unit that is owned by a lease and read after its checkpoint."""

    def fetch(state: ProcessorState) -> outcomes.StepOutcome:
        """Find the next batch; the last one before the worker stops is handled with it."""
        fetched = feed.fetch(state)
        if not isinstance(fetched, outcomes.Fetched):
            return fetched
        if fetched.batch.after.numbering is not None:
            fetched = replace(fetched, batch=number_batch(fetched.batch, state.stored))
        if fetched.is_last:
            handled = handling.handle(state._replace(batch=fetched.batch))
            if isinstance(handled, outcomes.Stored):
                context.status.add_batch(handled.count)
            return handled
        return fetched

    return {
        Step.ACQUIRE: owner.acquire,
        Step.LOAD: owner.load,
        Step.FETCH: fetch,
        Step.HANDLE: handling.handle,
        Step.ISOLATE: handling.isolate,
        Step.STORE: handling.store,
        Step.CONFIRM: handling.confirm,
        Step.RECORD: owner.record,
        Step.RELEASE: owner.release,
        Step.HOLD_BATCH: handling.hold_batch,
        Step.TAKE_HELD: held.fetch,
        Step.HANDLE_HELD: handling.handle_held,
        Step.FAIL_HELD: handling.fail_held,
    }
