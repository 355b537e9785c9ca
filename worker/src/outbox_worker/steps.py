"""Carries out one step at a time and returns its outcome. It decides nothing: `outbox_core.processor` does."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from typing_extensions import override

from outbox_core import outcomes
from outbox_core.checkpoint import StoreAnswer, parse_checkpoint
from outbox_core.errors import ConfigurationError, MessagesFailedError, TransientError
from outbox_core.report import Reason
from outbox_core.spec import CheckpointTime, Engine, Guarantee, Mode
from outbox_core.state import Step
from outbox_worker.held_steps import lease_of
from outbox_worker.isolated_steps import IsolatedSteps
from outbox_worker.logs import get_logger
from outbox_worker.partition_reader import reader_of
from outbox_worker.postgres import (
    checkpoints,
    conflicts,
    holding,
    identity,
    mappings,
    ownership,
    partitions,
    rebuilds,
    remote_target,
    starts,
)
from outbox_worker.shutdown import Interrupted
from outbox_worker.stopped_steps import StoppedSteps
from outbox_worker.transaction import StoreRequest, Transaction, TransactionRunner

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    import psycopg

    from outbox_core.checkpoint import Checkpoint
    from outbox_core.config import ProcessorConfig
    from outbox_core.message import Batch
    from outbox_core.ports import BrokerTarget, Target, TransactionTarget
    from outbox_core.report import Conflict
    from outbox_core.state import ProcessorState
    from outbox_worker.databases import Databases
    from outbox_worker.observer import Observer
    from outbox_worker.ownership import Ownership
    from outbox_worker.postgres.key import ProcessorKey
    from outbox_worker.shutdown import Shutdown
    from outbox_worker.status import ProcessStatus
    from outbox_worker.throttle import HeldWatch, Throttle

_log = get_logger("outbox.worker")
RUN_LOOK_SECONDS: Final = 1.0
"""Between two looks of an idle partition whether the server recovered from a crash."""


class StepContext(Protocol):
    """What a worker is made of; `outbox_worker.main` puts it together."""

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
    transactional_target: bool
    throttle: Throttle
    watch: HeldWatch


class Steps(IsolatedSteps, StoppedSteps):
    """One method for each step that does something."""

    def __init__(self, context: StepContext, *, take_over: bool) -> None:
        """Keep the context; `take_over` forces the first claim."""
        self._context = context
        self._force = take_over
        self._timeline: int | None = None
        self._next_run_look = 0.0
        self._prepared = (0, 0)
        self._start: Checkpoint | None = None
        self._reader = reader_of(context.config, context.key.partition)
        delivery = context.config.delivery
        self._isolates = isolates(context)
        self._lease = delivery.lease_duration
        self._timeout = delivery.timeout.total_seconds()
        self._runner = TransactionRunner(context.key, lease=self._lease.total_seconds(), timeout=self._timeout)
        self._actions = {
            Step.PREPARE: self._prepare,
            Step.CLAIM: self._claim,
            Step.REVIEW: self._review,
            Step.CHECK_TARGET: self._check_target,
            Step.ACQUIRE: self._acquire,
            Step.LOAD: self._load,
            Step.FETCH: self._fetch,
            Step.HANDLE: self._handle,
            Step.ISOLATE: self._isolate,
            Step.HOLD: self._look_for_decision,
            Step.STORE: self._store,
            Step.CONFIRM: self._confirm,
            Step.RECORD: self._record,
            Step.HOLD_BATCH: self._hold_batch,
            Step.TAKE_HELD: self._take_held,
            Step.HANDLE_HELD: self._handle_held,
            Step.FAIL_HELD: self._fail_held,
        }

    def perform(self, state: ProcessorState) -> outcomes.StepOutcome:
        """Do the state's step.

        Raises:
            OutboxError: it could not be done.

        """
        if state.step is not Step.PREPARE and self._is_unprepared(reads=state.step.needs_lease):
            return self._actions[Step.PREPARE](state)
        return self._actions[state.step](state)

    def _is_unprepared(self, *, reads: bool) -> bool:
        """Say whether a connection was opened since this partition prepared, by another one that shares it.

        It may lead to another server, and what was looked at on the one before means nothing there.
        """
        self._connection()
        if reads:
            self._source_connection()
        return self._context.databases.opened != self._prepared

    @override
    def _connection(self) -> psycopg.Connection[Any]:
        """Where claim, lease, checkpoint and effects are."""
        return self._context.databases.target.connection()

    @override
    def _source_connection(self) -> psycopg.Connection[Any]:
        """Where the messages are; mostly the same."""
        return self._context.databases.source.connection()

    def _prepare(self, state: ProcessorState) -> outcomes.StepOutcome:
        found = self._context.databases.prepare()
        self._prepared = self._context.databases.opened
        self._context.observer.start(self._reader)
        # Before anything is loaded: what is learned from here on is of this run, or is found not to be.
        run = identity.fetch_run(self._connection(), self._context.key.schema)
        known, self._runner.server_run = self._runner.server_run, run
        crashed = known not in (None, run)
        if crashed:
            self._reader.forget()
        promoted = self._find_promotion(found.timeline)
        return promoted if promoted is not None and state.lease is not None else outcomes.Prepared(crashed=crashed)

    def _find_promotion(self, timeline: int) -> outcomes.OwnershipLost | None:
        """Believe nothing that was stored on another timeline: the promoted standby may not have received all of it."""
        before, self._timeline = self._timeline, timeline
        if before in (None, timeline):
            return None
        self._reader.forget()
        self._context.ownership.drop_lease()
        return outcomes.OwnershipLost(
            f"the server was promoted (timeline {before} to {timeline}): what is stored is read again"
        )

    def _claim(self, _state: ProcessorState) -> outcomes.StepOutcome:
        context = self._context
        context.ownership.drop_lease()
        answer = ownership.claim(
            self._connection(),
            context.key,
            context.config.resource,
            force=self._force,
            sweep_uids=context.config.sweep_uids,
        )
        context.status.set_claim_holder(answer.holder)
        if answer.granted:
            self._force = False
            context.ownership.note_claim()
            mappings.note(self._connection(), context.key, context.config.resource.uid, context.config.source)
            return outcomes.ClaimAnswered(granted=True, holder=answer.holder)
        context.ownership.drop_claim()
        if self._force:
            self._end_stuck_transactions()
        if (successor := rebuilds.find_superseding(self._connection(), context.key)) is not None:
            raise ConfigurationError(
                f"processor {successor!r} replaced this one, which can never run again: delete this resource",
                reason=Reason.SUPERSEDED,
            )
        if answer.holder is None or answer.holder.uid == context.config.resource.uid:
            raise TransientError("the claim is being changed at this moment", reason=Reason.STARTING)
        return outcomes.ClaimAnswered(answer.granted, answer.holder)

    def _review(self, _state: ProcessorState) -> outcomes.StepOutcome:
        """See whether a conflict is open; carry out the person's decision, if the resource has one for it."""
        context = self._context
        connection = self._connection()
        found = conflicts.find_open(connection, context.key)
        note = ""
        if found is not None and context.config.resolution is not None:
            answer = conflicts.resolve(connection, context.key.schema, context.config.resolution)
            _log.info("a decision about a conflict", extra={"answer": answer.name, "conflict": found.id})
            note = _NOTES.get(answer, "")
            found = conflicts.find_open(connection, context.key)
        context.status.set_observed(conflicts=conflicts.summary(connection, context.key))
        if found is None:
            # Only now: a checkpoint beyond the server's transaction ids may be the conflict that a person is to rewind.
            context.databases.check_source(context.key)
        return outcomes.Reviewed(_open_conflict(found) if found else None, note)

    def _check_target(self, _state: ProcessorState) -> outcomes.StepOutcome:
        self._context.shutdown.limited(self._timeout, self._context.target.check)
        return outcomes.TargetReady()

    def _acquire(self, _state: ProcessorState) -> outcomes.StepOutcome:
        context = self._context
        answer = ownership.acquire_lease(
            self._connection(),
            context.key,
            claim_uid=context.config.resource.uid,
            pod=context.pod,
            token=context.token,
            lease=self._lease,
        )
        context.status.set_lease_pod(answer.pod)
        if not answer.acquired or answer.epoch is None:
            return outcomes.LeaseAnswered(None, answer.pod, self._end_stuck_transactions())
        lease = outcomes.HeldLease(context.key.partition, answer.epoch, context.token)
        context.ownership.note_lease(lease)
        _log.info("lease acquired", extra={"epoch": answer.epoch})
        return outcomes.LeaseAnswered(lease)

    def _end_stuck_transactions(self) -> str:
        """Let no frozen process keep what is open to us; with our own lease the heartbeat goes on with it.

        Returns what our role cannot end, for people.
        """
        stuck = ownership.end_stuck_transactions(self._connection(), self._context.key, epoch=None)
        if stuck.ended:
            _log.warning("ended transactions of a former owner's process that were stuck", extra={"count": stuck.ended})
        return stuck.left

    def _load(self, state: ProcessorState) -> outcomes.StepOutcome:
        lease = lease_of(state)
        connection = self._connection()
        self._start = None
        if self._context.databases.has_remote_target and checkpoints.load(connection, self._context.key) is None:
            # Before the transaction, which would be idle for as long as the other database looks for the start.
            self._start = remote_target.read_durably(
                self._source_connection(), lambda: self._start_pair(connection), lambda _: True
            )
        try:
            with connection.transaction():
                ownership.limit_transaction(connection, self._lease)
                found = self._ensure_start(connection, lease)
        except checkpoints.TamperedError as err:
            # The worker that was told did not record it; or no worker was there to be told.
            return outcomes.Rejected(err.edit.answer, err.edit.kept, None, err.edit.stored)
        if found is None:
            return outcomes.OwnershipLost("the lease went before the start was stored")
        _log.info("checkpoint loaded", extra={"checkpoint": str(found.pair), "startFromUsed": found.start_from_used})
        review = holding.review(
            connection, self._context.key, lease, generation=self._context.config.fingerprint, forgive=state.forgiven
        )
        if review is None:
            return outcomes.OwnershipLost("the lease went before it was seen what former owners left")
        return outcomes.Loaded(found.pair, found.start_from_used, review)

    def _ensure_start(self, connection: psycopg.Connection[Any], lease: outcomes.HeldLease) -> checkpoints.Start | None:
        context = self._context
        count = partitions.fetch_count(connection, context.key)
        if count is not None:
            raise ConfigurationError(
                f"processor {context.key.processor_id!r} is divided into {count} partitions here: one checkpoint means "
                "nothing to it. Set delivery.mode to Partitioned, or use another processorId",
                reason=Reason.PARTITIONS_DIFFER,
            )
        return checkpoints.ensure_start(
            connection, context.key, context.config.source, lambda: self._start_pair(connection),
            epoch=lease.epoch, token=lease.token,
        )  # fmt: skip

    def _start_pair(self, connection: psycopg.Connection[Any]) -> Checkpoint:
        """Compute where to start: read in the source's database, or copied from another processor."""
        config = self._context.config
        if self._start is not None:
            return self._start
        if config.start_from.processor_id is not None:
            return self._find_other(connection, config.start_from.processor_id).start
        return checkpoints.compute_start(
            self._source_connection(),
            config.source,
            config.start_from,
            remote_target=self._context.databases.has_remote_target,
        )

    def _find_other(self, connection: psycopg.Connection[Any], other_id: str) -> starts.OtherStart:
        return starts.find_other(
            connection, self._source_connection(), self._context.config.source, self._context.key, other_id
        )

    def _fetch(self, state: ProcessorState) -> outcomes.StepOutcome:
        after = state.cursor
        if after is None:
            raise TransientError("no checkpoint is loaded", reason=Reason.INTERNAL_ERROR)
        # Each read of a partition merges many index ranges: what is to be searched is read at once, not only counted.
        searched = state.block is not None and self._context.config.delivery.mode is Mode.PARTITIONED
        batch = self._sift(state, self._read_outbox(after, self._limit(state), with_messages=searched))
        if not (batch.matched or batch.excluded):
            self._look_at_run()
        return outcomes.Fetched(batch)

    def _look_at_run(self) -> None:
        """See now and then, where nothing is stored that would see it, whether what is remembered still holds.

        Raises:
            TransientError: the server recovered from a crash that a pooler hid.

        """
        if time.monotonic() < self._next_run_look:
            return
        self._next_run_look = time.monotonic() + RUN_LOOK_SECONDS
        self._check_run()

    def _check_run(self) -> None:
        if self._runner.server_run != identity.fetch_run(self._connection(), self._context.key.schema):
            raise identity.crashed()

    def _handle(self, state: ProcessorState) -> outcomes.StepOutcome:
        batch = state.batch
        if batch is None:
            raise TransientError("no batch is in hand", reason=Reason.INTERNAL_ERROR)
        if state.poison_search is None:
            return self._attempt(state, batch)
        if (told := self._mark_in_flight(state, batch)) is not None:
            return told
        return self._answered(state, lambda: self._attempt(state, batch))

    def _attempt(self, state: ProcessorState, batch: Batch) -> outcomes.StepOutcome:
        if self._context.config.guarantee is Guarantee.TRANSACTIONAL:
            request = self._request(state, batch)
            return self._in_transaction(request.lease, request, batch, self._keeper(state))
        try:
            return self._deliver(state, batch)
        except MessagesFailedError as err:
            return self._sort_named(state, batch, err)

    @override
    def _request(self, state: ProcessorState, batch: Batch) -> StoreRequest:
        first = self._context.config.delivery.checkpoint is CheckpointTime.BEFORE_HANDLING
        return StoreRequest(lease_of(state), state.stored, batch.examined, first=first)

    @override
    def _in_transaction(
        self,
        lease: outcomes.HeldLease,
        request: StoreRequest | None,
        batch: Batch,
        finish: Callable[[psycopg.Connection[Any]], outcomes.StepOutcome | None] | None = None,
    ) -> outcomes.StepOutcome:
        target = cast("TransactionTarget", self._context.target)
        connection = self._connection()

        def effects(transaction: Transaction) -> int:
            self._context.ownership.enter(connection)
            try:
                return self._context.shutdown.limited(self._timeout, lambda: target.handle(transaction, batch))
            except Interrupted as err:
                raise err.as_error("the batch") from err
            finally:
                self._context.ownership.leave()

        return self._runner.run(connection, lease, request, effects, finish)

    @override
    def _deliver(self, state: ProcessorState, batch: Batch) -> outcomes.StepOutcome:
        """AtLeastOnce: the lease is checked right before, because what is handed over cannot be recalled."""
        lease = lease_of(state)
        if (told := self._find_loss(state, batch)) is not None:
            return told
        if self._context.transactional_target:
            outcome = self._in_transaction(lease, None, batch)
            return outcomes.Delivered(outcome.count) if isinstance(outcome, outcomes.Stored) else outcome
        target = cast("BrokerTarget", self._context.target)
        try:
            return outcomes.Delivered(
                self._context.shutdown.limited(self._timeout, lambda: target.deliver(batch, lease.epoch))
            )
        except Interrupted as err:
            raise err.as_error("handing the batch over") from err

    @override
    def _find_loss(self, state: ProcessorState, batch: Batch) -> outcomes.Rejected | None:
        lease, connection = lease_of(state), self._connection()
        if ownership.keep_lease(connection, self._context.key, epoch=lease.epoch, token=lease.token, lease=self._lease):
            return None
        stored = checkpoints.load(connection, self._context.key)
        return outcomes.Rejected(StoreAnswer.NOT_OWNER, state.stored, batch.examined, stored.pair if stored else None)

    def _store(self, state: ProcessorState) -> outcomes.StepOutcome:
        new = state.batch.examined if state.delivered and state.batch else state.cursor
        if new is None:
            raise TransientError("nothing to store", reason=Reason.INTERNAL_ERROR)
        request = StoreRequest(lease_of(state), state.stored, new)
        outcome = self._runner.run(self._connection(), request.lease, request, None, self._keeper(state))
        if isinstance(outcome, outcomes.Stored) and state.delivered and state.batch:
            return outcomes.Stored(outcome.pair, state.batch.matched_count)
        return outcome

    def _confirm(self, state: ProcessorState) -> outcomes.StepOutcome:
        """Find out about a transaction whose connection broke, before anything else."""
        doubt = state.doubt
        if doubt is None:
            return outcomes.NotCommitted()
        lease = lease_of(state)
        connection = self._connection()
        if doubt.committing:
            settled = checkpoints.settle(connection, self._context.key, epoch=lease.epoch, token=lease.token)
            if not settled.owned:
                return outcomes.Rejected(StoreAnswer.NOT_OWNER, doubt.expected, doubt.new, None)
            if settled.pair == doubt.new and settled.pair.window == doubt.new.window:
                # Of a batch that was handled in part nothing says any more how much of that part failed.
                whole = state.batch is not None and doubt.new == state.batch.examined
                return outcomes.Stored(doubt.new, state.batch.matched_count if state.batch and whole else 0)
        answer = self._runner.ask(connection, StoreRequest(lease, doubt.expected, doubt.new))
        if answer is StoreAnswer.STORED:
            return outcomes.NotCommitted()
        stored = checkpoints.load(connection, self._context.key)
        return outcomes.Rejected(answer, doubt.expected, doubt.new, stored.pair if stored else None)

    def _record(self, state: ProcessorState) -> outcomes.StepOutcome:
        refused = state.refusal
        if refused is None:
            raise TransientError("no refusal to record", reason=Reason.INTERNAL_ERROR)
        context = self._context
        lease = lease_of(state)
        connection = self._connection()
        if refused.answer.needs_person:
            # A pool hides a crash and a failover: the row was not edited, the server has lost the latest commits.
            self._check_run()
            if (promoted := self._find_promotion(identity.fetch_timeline(connection, context.key.schema))) is not None:
                return promoted
        refusal = conflicts.Refusal(
            code=refused.answer,
            expected=refused.expected,
            stored=refused.stored,
            new=refused.new,
            epoch=lease.epoch,
            pod=context.pod,
            claim_uid=context.config.resource.uid,
            needs_person=refused.answer.needs_person,
        )
        number = conflicts.record_refusal(connection, context.key, refusal)
        if refused.answer.needs_person:
            # A rewind is refused while an owner is live.
            ownership.release_lease(connection, context.key, epoch=lease.epoch, token=lease.token)
        context.ownership.drop_lease()
        context.status.set_observed(conflicts=conflicts.summary(connection, context.key))
        return outcomes.Recorded(number)


_NOTES = {
    conflicts.ResolveAnswer.PAIR_DIFFERS: "the decision on the resource names another pair than the one stored now",
    conflicts.ResolveAnswer.UNKNOWN: "the decision on the resource is about another conflict",
    conflicts.ResolveAnswer.OWNER_LIVE: "the decision waits until the last owner's lease is over",
}


def _open_conflict(conflict: Conflict) -> outcomes.OpenConflict:
    return outcomes.OpenConflict(
        conflict.id,
        conflict.code,
        parse_checkpoint(conflict.expected) if conflict.expected else None,
        parse_checkpoint(conflict.stored) if conflict.stored else None,
    )


def isolates(context: StepContext) -> bool:
    """Say whether the messages of a batch that fail are found under savepoints: effects are in a database of ours."""
    return context.transactional_target and context.config.engine is Engine.WORKER
