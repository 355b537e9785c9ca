"""A consumer in mode Competing: its parts put together, its lane for the loop, its heartbeat and its observer."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import sql
from typing_extensions import override

from outbox_core import happening as h
from outbox_core.competing import Completed, ConsumerState, Lost, Sifted, decide_consumer
from outbox_core.errors import ConfigurationError, OutboxError
from outbox_core.report import CheckpointView, Reason, WorkerState
from outbox_core.state import Policy, ProcessorState, Step
from outbox_worker.attempt import attempt
from outbox_worker.company import Company
from outbox_worker.competing_steps import CompetingSteps
from outbox_worker.logs import get_logger
from outbox_worker.observer import Observer
from outbox_worker.ownership import Heartbeat
from outbox_worker.postgres import checkpoints, conflicts, holding, partitions
from outbox_worker.postgres import competing as calls
from outbox_worker.postgres.window import Stretch, WindowReader
from outbox_worker.shutdown import Interrupted

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random
    from uuid import UUID

    from outbox_core.competing import CompetingHappening
    from outbox_core.config import ProcessorConfig
    from outbox_core.message import Batch
    from outbox_core.spec import Competing
    from outbox_worker.postgres.key import ProcessorKey
    from outbox_worker.status import StatusBoard
    from outbox_worker.steps import Parts
    from outbox_worker.telemetry import Telemetry

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
    """Let whatever is leased in this mode be leased for `competing.leaseDuration`; other modes stay as they are."""
    if config.delivery.competing is None:
        return config
    leased = {"lease_duration": config.delivery.competing.lease_duration}
    return config.model_copy(update={"delivery": config.delivery.model_copy(update=leased)})


def build_relation(
    config: ProcessorConfig,
) -> Callable[[Batch, bool | None], sql.Composed | None]:
    """Give the SELECT of a piece's messages for the target sql; or of those that $1 and $2 name, near or not."""
    reader = WindowReader(config.source, settings_of(config), config.processor_id)

    def relation(batch: Batch, near: bool | None) -> sql.Composed | None:
        work = getattr(batch, "work", None)
        if work is None:
            raise OutboxError("a batch that nobody took", reason=Reason.INTERNAL_ERROR)
        if near is not None:
            return reader.picked_relation(work, sql.SQL("$1"), sql.SQL("$2"), near=near)
        return reader.relation(Stretch.of(work, upto=batch.examined))

    return relation


@dataclass(frozen=True, slots=True)
class BuiltConsumer:
    """One process that takes batches: who it is, and what takes them."""

    consumer: calls.Consumer
    taker: calls.BatchTaker


def build_consumer(parts: Parts, pod_uid: str) -> BuiltConsumer:
    """Name this process: a pod's uid alone would not tell two processes of one container apart."""
    config = parts.config
    settings = settings_of(config)
    consumer = calls.Consumer(f"{pod_uid}/{parts.token}", parts.pod, config.resource.uid, settings.lease_duration)
    taker = calls.BatchTaker(parts.key, consumer, config.source, settings, config.delivery.batch_limit)
    return BuiltConsumer(consumer, taker)


def build_lane(
    parts: Parts, built: BuiltConsumer, *, take_over: bool, telemetry: Telemetry, chance: Random
) -> ConsumerLane:
    """Build the one lane of the loop."""
    company = parts.observer.company if isinstance(parts.observer, CompetingObserver) else Company()
    steps = CompetingSteps(parts, take_over=take_over, taker=built.taker, consumer=built.consumer, company=company)
    return ConsumerLane(parts, steps, telemetry=telemetry, chance=chance)


def hand_back(parts: Parts, built: BuiltConsumer) -> None:
    """Give back what is unfinished, so that others go on with it at once; what cannot be lapses by itself."""
    try:
        parts.shutdown.last(lambda: _hand_back(parts, built.taker))
    except (OutboxError, psycopg.Error, Interrupted) as err:
        _log.warning("could not hand batches back; they lapse by themselves", extra={"error": str(err)})


def _hand_back(parts: Parts, taker: calls.BatchTaker) -> None:
    if not parts.ownership.claimed:
        return
    connection = parts.databases.home.connection()
    returned = taker.hand_back(connection)
    partitions.end_membership(connection, parts.key, parts.token)
    _log.info("handed back", extra={"batches": returned})


class ConsumerLane:
    """The one lane of a consumer's loop."""

    def __init__(self, parts: Parts, steps: CompetingSteps, *, telemetry: Telemetry, chance: Random) -> None:
        """Begin."""
        self.parts = parts
        self.state = ConsumerState(Step.PREPARE, time.monotonic())
        self._steps = steps
        self._telemetry = telemetry
        self._random = chance
        self._policy = Policy(parts.config.delivery, parts.config.guarantee, isolates=parts.transactional_target)
        self._piece_began = 0.0
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
        """Never: what consumers share is not divided."""
        return False

    def find_interruption(self) -> h.StopRequested | h.OwnershipLost | None:
        """Say what makes waiting, or the step, pointless."""
        if self.parts.shutdown.requested and not self.state.is_last_work:
            return h.StopRequested()
        if self.state.step not in _BEFORE_BATCHES and (why := self.parts.ownership.claim_lost):
            return h.OwnershipLost(why)
        return None

    def advance(self, happened: Any = None) -> None:
        """Do the step, unless something `happened` already, and decide what comes next."""
        before = self.state
        found: CompetingHappening | None = happened
        if found is None and before.step.uses_target:
            found = self.parts.gate.find_obstacle(time.monotonic())
        if found is None:
            found = self._perform(before)
        self._count(before, found)
        self.state = decide_consumer(before, found, time.monotonic(), self._policy, self._random.random())
        self._steps.tell_in_hand(self.state.work)
        before_shown, self._shown = self._shown, self.parts.gate.shown(self._show(self.state))
        self._tell(before, found, before_shown)
        self.parts.board.set_state(self._shown)

    def _perform(self, state: ConsumerState) -> CompetingHappening:
        if state.step is Step.HANDLE and state.piece is not None:
            self._piece_began = time.monotonic()
            if not self._steps.sifts(state):
                self.parts.gate.begin(state.piece.matched_count)
        return attempt(self.parts, lambda: self._steps.carry_out(state), {"step": state.step.value})

    def _count(self, state: ConsumerState, happened: CompetingHappening) -> None:
        board = self.parts.board
        match happened:
            case Completed():
                board.add_batch(happened.count)
                self.parts.gate.succeed()
                self._telemetry.observe_batch(time.monotonic() - self._piece_began, stored=True)
            case Sifted() if happened.settled:
                self._count_sifted(state, happened)
            case Lost():
                board.add_refusal(4)
            case h.Failed():
                board.set_error(happened.error.detail or str(happened.error))
                if state.piece is not None:
                    self._telemetry.observe_batch(time.monotonic() - self._piece_began, stored=False)
                    if state.step is Step.HANDLE:
                        self.parts.gate.fail(happened.error, state.piece, time.monotonic())
            case _:
                pass

    def _count_sifted(self, state: ConsumerState, sifted: Sifted) -> None:
        board, gate, piece = self.parts.board, self.parts.gate, state.piece
        if self._steps.sifts(state):
            gate.begin(sifted.behind)
        if sifted.handled:
            board.add_batch(sifted.handled)
            gate.succeed(sifted.handled)
        elif piece is not None and sifted.refusals:
            keys = [each.message.partition_key or each.message.message_id for each in sifted.refusals]
            gate.fail_messages(keys, time.monotonic(), more=piece.full, retried=piece.is_retried)
        if sifted.refusals:
            error = sifted.refusals[-1].error
            board.set_error(error.detail or str(error))
        self._telemetry.observe_batch(time.monotonic() - self._piece_began, stored=True)

    def _show(self, state: ConsumerState) -> ProcessorState:
        """What status and metrics read of any worker; to them every consumer at work is an owner."""
        at_work = state.state in _AT_WORK
        return ProcessorState(
            step=state.step, due=state.due, state=state.state, reason=state.reason, message=state.message,
            lease=h.HeldLease(0, 0, self.parts.token) if at_work else None, attempt=state.attempt,
            failures=state.failures, start_from_used=state.start_from_used,
        )  # fmt: skip

    def _tell(self, before: ConsumerState, happened: CompetingHappening, shown: ProcessorState) -> None:
        after = self.state
        if isinstance(happened, Lost):
            _log.warning("batch lost", extra={"batch": before.work.id if before.work else None})
        elif isinstance(happened, h.Failed):
            _log.warning(
                "failed",
                extra={"step": before.step.value, "reason": happened.error.reason.value, "error": str(happened.error),
                       "detail": happened.error.detail, "piece": before.piece.matched_count if before.piece else None,
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

    def __init__(self, *, built: BuiltConsumer, token: UUID, **parts: Any) -> None:
        """Keep what is needed beyond a heartbeat's parts."""
        super().__init__(**parts)
        self._taker = built.taker
        self._consumer = built.consumer
        self._token = token

    @override
    def _renew(self, connection: psycopg.Connection[Any]) -> None:
        if not self._claimed:
            return
        if (work := self._taker.in_hand) is not None:
            self._taker.renew(connection, work)
        partitions.renew_membership(
            connection, self._key, claim_uid=self._consumer.claim_uid, pod=self._consumer.pod, token=self._token,
            lease=self._lease,
        )  # fmt: skip


class CompetingObserver(Observer):
    """Sees how far everything is done, what waits, and keeps the tables small."""

    def __init__(self, key: ProcessorKey, board: StatusBoard, *, lease: float, config: ProcessorConfig) -> None:
        """Prepare a reader of its own."""
        super().__init__(key, board, lease=lease)
        self.company = Company()
        self._competing = settings_of(config)
        self._window_reader = WindowReader(config.source, self._competing, key.processor_id)

    @override
    def observe(self, connection: psycopg.Connection[Any]) -> None:
        """Look once; a count that takes too long is left out."""
        if not self.ready:
            return
        if emptied := calls.maintain(connection, self._key, self._competing):
            _log.debug("emptied", extra={"tables": emptied})
        with self._limited(connection):
            stored = checkpoints.load(connection, self._key)
            if stored is not None:
                view = CheckpointView(partition=0, pair=str(stored.pair), stored_at=stored.stored_at)
                self._board.set_observed(checkpoints=[view])
            unfinished = calls.count_unfinished(connection, self._key)
            failures, _ = holding.observe(connection, self._key)
            self._board.set_observed(
                conflicts=conflicts.summary(connection, self._key), unfinished=unfinished, failures=failures
            )
        self.company.note(unfinished.consumers)
        if stored is None:
            return
        try:
            with self._limited(connection):
                lag = calls.measure_lag(connection, self._key, self._window_reader)
        except OutboxError as err:
            if err.reason is not Reason.STATEMENT_FAILED:
                raise
            lag = None
        self._board.set_observed(lag=lag)
