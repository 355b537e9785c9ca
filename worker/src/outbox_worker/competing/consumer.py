"""A consumer in mode Competing: its context, its runner for the loop, its heartbeat and its observer."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override

from outbox_core.errors import ConfigurationError, OutboxError
from outbox_core.processor import outcomes
from outbox_core.processor.competing import ConsumerState, decide_consumer
from outbox_core.processor.outcomes import Completed, Lost, Sifted
from outbox_core.processor.state import Policy, ProcessorState, Step
from outbox_core.report import CheckpointView, Reason, WorkerState
from outbox_worker.competing.consumer_count import ConsumerCount
from outbox_worker.competing.steps import CompetingSteps
from outbox_worker.engine.run_step import run_step
from outbox_worker.logs import get_logger
from outbox_worker.observe.observer import Observer
from outbox_worker.ownership.heartbeat import Heartbeat
from outbox_worker.postgres.errors import DatabaseError
from outbox_worker.postgres.feeds import competing as calls
from outbox_worker.postgres.feeds import holding
from outbox_worker.postgres.ownership import partitions
from outbox_worker.postgres.progress import checkpoints, conflicts
from outbox_worker.postgres.reading.range_reader import DispatchReader
from outbox_worker.shutdown import Interrupted

if TYPE_CHECKING:
    from random import Random
    from uuid import UUID

    from outbox_core.config import ProcessorConfig
    from outbox_core.processor.outcomes import ConsumerOutcome
    from outbox_core.spec import Competing
    from outbox_worker.engine.steps import StepContext
    from outbox_worker.observe.status import ProcessStatus
    from outbox_worker.observe.telemetry import Telemetry
    from outbox_worker.postgres.connection import Connection
    from outbox_worker.postgres.key import ProcessorKey

_log = get_logger("outbox.worker")
_BEFORE_BATCHES: Final = frozenset({Step.PREPARE, Step.CLAIM})
_AT_WORK: Final = frozenset({WorkerState.ACTIVE, WorkerState.RETRYING, WorkerState.STOPPED, WorkerState.DRAINING})


def settings_of(config: ProcessorConfig) -> Competing:
    """Return what mode Competing is told.

    Raises:
        ConfigurationError: nothing.

    """
    if config.delivery.competing is None:
        raise ConfigurationError("delivery.mode Competing needs delivery.competing")
    return config.delivery.competing


def lease_as_asked(config: ProcessorConfig) -> ProcessorConfig:
    """Let batches in this mode be leased for `competing.leaseDuration`; other modes stay as they are."""
    if config.delivery.competing is None:
        return config
    leased = {"lease_duration": config.delivery.competing.lease_duration}
    return config.model_copy(update={"delivery": config.delivery.model_copy(update=leased)})


@dataclass(frozen=True, slots=True)
class BuiltConsumer:
    """One process that takes batches: who it is, and what takes them."""

    consumer: calls.Consumer
    taker: calls.BatchTaker


def build_consumer(context: StepContext, pod_uid: str) -> BuiltConsumer:
    """Name this process: a pod's uid alone would not tell two processes of one container apart."""
    config = context.config
    settings = settings_of(config)
    consumer = calls.Consumer(f"{pod_uid}/{context.token}", context.pod, config.resource.uid, settings.lease_duration)
    taker = calls.BatchTaker(context.key, consumer, config.source, settings, config.delivery.batch_limit)
    return BuiltConsumer(consumer, taker)


def build_runner(
    context: StepContext, built: BuiltConsumer, *, take_over: bool, telemetry: Telemetry, chance: Random
) -> ConsumerRunner:
    """Build the one runner of the loop."""
    consumer_count = (
        context.observer.consumer_count if isinstance(context.observer, CompetingObserver) else ConsumerCount()
    )
    steps = CompetingSteps(
        context, take_over=take_over, taker=built.taker, consumer=built.consumer, consumer_count=consumer_count
    )
    return ConsumerRunner(context, steps, telemetry=telemetry, chance=chance)


def hand_back(context: StepContext, built: BuiltConsumer) -> None:
    """Give back what is unfinished, so that others go on with it at once; what cannot be lapses by itself."""
    try:
        context.shutdown.last(lambda: _hand_back(context, built.taker))
    except (OutboxError, DatabaseError, Interrupted) as err:
        _log.warning("could not hand batches back; they lapse by themselves", extra={"error": str(err)})


def _hand_back(context: StepContext, taker: calls.BatchTaker) -> None:
    if not context.ownership.claimed:
        return
    connection = context.databases.target.connection()
    returned = taker.hand_back(connection)
    partitions.end_membership(connection, context.key, context.token)
    _log.info("handed back", extra={"batches": returned})


class ConsumerRunner:
    """The one runner of a consumer's loop."""

    def __init__(self, context: StepContext, steps: CompetingSteps, *, telemetry: Telemetry, chance: Random) -> None:
        """Begin."""
        self.context = context
        self.state = ConsumerState(Step.PREPARE, time.monotonic())
        self._steps = steps
        self._telemetry = telemetry
        self._random = chance
        self._policy = Policy(context.config.delivery, context.config.guarantee, isolates=context.transactional_target)
        self._chunk_began = 0.0
        self._shown = self._show(self.state)

    @property
    def owns(self) -> bool:
        """Always: what it takes is its own."""
        return True

    @property
    def share(self) -> float:
        """Of the processor's rate, one of as many equal parts as consumers live."""
        return self._steps.share

    @property
    def is_obsolete(self) -> bool:
        """Never: what consumers share is not partitioned."""
        return False

    def find_interruption(self) -> outcomes.StopRequested | outcomes.OwnershipLost | None:
        """Say what makes waiting, or the step, pointless."""
        if self.context.shutdown.requested and not self.state.is_last_work:
            return outcomes.StopRequested()
        if self.state.step not in _BEFORE_BATCHES and (why := self.context.ownership.claim_lost):
            return outcomes.OwnershipLost(why)
        return None

    def advance(self, outcome: Any = None) -> None:
        """Do the step, unless there is an `outcome` already, and decide what comes next."""
        before = self.state
        found: ConsumerOutcome | None = outcome
        if found is None and before.step.uses_target:
            found = self.context.throttle.find_obstacle(time.monotonic())
        if found is None:
            found = self._perform(before)
        self._count(before, found)
        self.state = decide_consumer(before, found, time.monotonic(), self._policy, self._random.random())
        self._steps.tell_in_hand(self.state.claimed)
        before_shown, self._shown = self._shown, self.context.throttle.shown(self._show(self.state))
        self._tell(before, found, before_shown)
        self.context.status.set_state(self._shown)

    def _perform(self, state: ConsumerState) -> ConsumerOutcome:
        if state.step is Step.HANDLE and state.chunk is not None:
            self._chunk_began = time.monotonic()
            if not self._steps.sifts(state):
                self.context.throttle.begin(state.chunk.matched_count)
        return run_step(self.context, lambda: self._steps.carry_out(state), {"step": state.step.value})

    def _count(self, state: ConsumerState, outcome: ConsumerOutcome) -> None:
        status = self.context.status
        match outcome:
            case Completed():
                status.add_batch(outcome.count)
                self.context.throttle.succeed()
                self._telemetry.observe_batch(time.monotonic() - self._chunk_began, stored=True)
            case Sifted() if outcome.settled:
                self._count_sifted(state, outcome)
            case Lost():
                status.add_refusal(4)
            case outcomes.Failed():
                status.set_error(outcome.error.detail or str(outcome.error))
                if state.chunk is not None:
                    self._telemetry.observe_batch(time.monotonic() - self._chunk_began, stored=False)
                    if state.step is Step.HANDLE:
                        self.context.throttle.fail(outcome.error, state.chunk, time.monotonic())
            case _:
                pass

    def _count_sifted(self, state: ConsumerState, sifted: Sifted) -> None:
        status, throttle, chunk = self.context.status, self.context.throttle, state.chunk
        if self._steps.sifts(state):
            throttle.begin(sifted.behind)
        if sifted.handled:
            status.add_batch(sifted.handled)
            throttle.succeed(sifted.handled)
        elif chunk is not None and sifted.refusals:
            keys = [each.message.partition_key or each.message.message_id for each in sifted.refusals]
            throttle.fail_messages(keys, time.monotonic(), more=chunk.full, retried=chunk.is_retried)
        if sifted.refusals:
            error = sifted.refusals[-1].error
            status.set_error(error.detail or str(error))
        self._telemetry.observe_batch(time.monotonic() - self._chunk_began, stored=True)

    def _show(self, state: ConsumerState) -> ProcessorState:
        """What status and metrics read of any worker; to them every consumer at work is an owner."""
        at_work = state.state in _AT_WORK
        return ProcessorState(
            step=state.step, due=state.due, state=state.state, reason=state.reason, message=state.message,
            lease=outcomes.HeldLease(0, 0, self.context.token) if at_work else None, attempt=state.attempt,
            failures=state.failures, start_from_used=state.start_from_used,
        )  # fmt: skip

    def _tell(self, before: ConsumerState, outcome: ConsumerOutcome, shown: ProcessorState) -> None:
        after = self.state
        if isinstance(outcome, Lost):
            _log.warning("batch lost", extra={"batch": before.claimed.id if before.claimed else None})
        elif isinstance(outcome, outcomes.Failed):
            _log.warning(
                "failed",
                extra={"step": before.step.value, "reason": outcome.error.reason.value, "error": str(outcome.error),
                       "detail": outcome.error.detail, "chunk": before.chunk.matched_count if before.chunk else None,
                       "retryInSeconds": round(max(0.0, after.due - time.monotonic()), 3)},
            )  # fmt: skip
        told = self._shown
        if (shown.state, shown.message) != (told.state, told.message):
            _log.info(
                "state", extra={"state": told.state.value, "reason": told.reason.value, "why": told.message or None}
            )


class CompetingHeartbeat(Heartbeat):
    """Renews the batch that this consumer has in hand, and says that it lives.

    One in its name that it does not know, because the answer to its taking was lost, runs out and is another's.
    """

    def __init__(self, *, built: BuiltConsumer, token: UUID, **context: Any) -> None:
        """Keep what is needed beyond a heartbeat's parts."""
        super().__init__(**context)
        self._taker = built.taker
        self._consumer = built.consumer
        self._token = token

    @override
    def _renew(self, connection: Connection) -> None:
        if not self._claimed:
            return
        if (claimed := self._taker.in_hand) is not None:
            self._taker.renew(connection, claimed)
        partitions.renew_membership(
            connection, self._key, claim_uid=self._consumer.claim_uid, pod=self._consumer.pod, token=self._token,
            lease=self._lease,
        )  # fmt: skip


class CompetingObserver(Observer):
    """Sees how far everything is done, what waits, and keeps the tables small."""

    def __init__(self, key: ProcessorKey, status: ProcessStatus, *, lease: float, config: ProcessorConfig) -> None:
        """Prepare a reader of its own."""
        super().__init__(key, status, lease=lease)
        self.consumer_count = ConsumerCount()
        self._competing = settings_of(config)
        self._window_reader = DispatchReader(config.source, self._competing, key.processor_id)

    @override
    def observe(self, connection: Connection) -> None:
        """Look once; a count that takes too long is left out."""
        if not self.ready:
            return
        if emptied := calls.maintain(connection, self._key, self._competing):
            _log.debug("emptied", extra={"tables": emptied})
        with self._limited(connection):
            stored = checkpoints.load(connection, self._key)
            if stored is not None:
                view = CheckpointView(partition=0, pair=str(stored.pair), stored_at=stored.stored_at)
                self._status.set_observed(checkpoints=[view])
            unfinished = calls.count_unfinished(connection, self._key)
            failures, _ = holding.observe(connection, self._key)
            self._status.set_observed(
                conflicts=conflicts.summary(connection, self._key), unfinished=unfinished, failures=failures
            )
        self.consumer_count.note(unfinished.consumers)
        if stored is None:
            return
        try:
            with self._limited(connection):
                lag = calls.measure_lag(connection, self._key, self._window_reader)
        except OutboxError as err:
            if err.reason is not Reason.STATEMENT_FAILED:
                raise
            lag = None
        self._status.set_observed(lag=lag)
