"""The steps of held messages: found in a batch, held with its checkpoint, tried again, given up.

Mixed into the steps of a partition by `outbox_worker.steps`; like those it decides nothing. What is done to held
messages is done under the partition's lease, with Transactional in the transaction of the effects.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, cast

import psycopg

from outbox_core import outcomes
from outbox_core.checkpoint import StoreAnswer
from outbox_core.errors import HandlerError, MessagesFailedError, OutboxError, TransientError
from outbox_core.failing import HELD_CRASHES, POISON_CRASHES, Failure, is_refusal
from outbox_core.message import Batch
from outbox_core.part import Place
from outbox_core.report import Reason
from outbox_core.spec import Guarantee, Mode
from outbox_worker.postgres import checkpoints, holding, remote_target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from psycopg import sql

    from outbox_core.checkpoint import Checkpoint
    from outbox_core.ports import TransactionTarget
    from outbox_core.state import ProcessorState
    from outbox_worker.postgres.messages import MessageReader
    from outbox_worker.steps import StepContext
    from outbox_worker.transaction import StoreRequest, TransactionRunner

LARGEST_HELD_BATCH: Final = 1000
"""Held messages tried at once: each is written down before."""


def lease_of(state: ProcessorState) -> outcomes.HeldLease:
    """Return the lease of a state in a step that only owners do."""
    if state.lease is None:
        raise TransientError("a step for owners without a lease", reason=Reason.INTERNAL_ERROR)
    return state.lease


class HeldSteps:
    """What `Steps` does with messages that are not handled with their batch."""

    _context: StepContext
    _reader: MessageReader
    _runner: TransactionRunner
    _isolates: bool

    def _connection(self) -> psycopg.Connection[Any]:
        raise NotImplementedError

    def _source_connection(self) -> psycopg.Connection[Any]:
        raise NotImplementedError

    def _limit(self, state: ProcessorState, *, retried: bool = False) -> int:
        """Most messages of the next batch."""
        most = self._context.config.delivery.batch_limit
        wanted = state.limit or most
        if state.poison_search is not None:
            wanted = min(wanted, state.poison_search.next_size)
        return min(wanted, self._context.throttle.limit(most, retried=retried))

    def _sift(self, state: ProcessorState, batch: Batch) -> Batch:
        """Take out of a batch what is not to be handled now. Costs nothing while nothing is held or delayed."""
        if not batch.matched or not (batch.delayed_count or state.blocking):
            return batch
        connection, delivery = self._connection(), self._context.config.delivery
        rows = self._relation(batch)
        if delivery.mode is Mode.ORDERED and batch.delayed_count:
            batch = holding.cut_at_delayed(connection, batch, rows, lambda most: self._read_outbox(batch.after, most))
            if not batch.matched or not state.blocking:
                return batch
            rows = self._relation(batch)
        places, excluded = holding.survey(connection, self._context.key, rows)
        if not excluded:
            return replace(batch, places=places)
        out = set(excluded)
        return replace(
            batch,
            messages=tuple(message for message in batch.messages if message.checkpoint not in out),
            matched_count=batch.matched_count - len(excluded),
            excluded=excluded,
            places=places,
        )

    def _read_outbox(self, after: Checkpoint, limit: int, *, with_messages: bool = False) -> Batch:
        """Read the outbox, as much of it as the target needs, or with all messages."""
        without_payload = self._context.transactional_target and not (self._needs_payload() or with_messages)
        read = self._reader.fetch_extent if without_payload else self._reader.fetch
        connection = self._source_connection()
        if not self._context.databases.has_remote_target:
            return read(connection, after, limit)

        def is_new(batch: Batch) -> bool:
            return (batch.examined, batch.examined.window) != (after, after.window)

        return remote_target.read_durably(connection, lambda: read(connection, after, limit), is_new)

    def _relation(self, batch: Batch) -> sql.Composed:
        """Return the SELECT of the batch's messages, carried to the checkpoint's database if it is another one.

        Only before some are set aside: those are not among the batch's messages any more.
        """
        if batch.messages:  # where it is known where they are, looking them up costs less than reading the range again
            return self._picked(batch, [message.checkpoint for message in batch])
        rows = self._reader.keyed_relation(batch.after, batch.examined, self._context.config.delivery.message_key)
        return holding.carry(self._source_connection(), rows) if self._context.databases.has_remote_target else rows

    def _picked(self, batch: Batch, pairs: Iterable[Checkpoint]) -> sql.Composed:
        """Return the SELECT of some of the batch's messages, carried in the same way."""
        rows = self._reader.picked_keyed_relation(
            pairs, self._context.config.delivery.message_key, by_position=batch.examined.window is not None
        )
        return holding.carry(self._source_connection(), rows) if self._context.databases.has_remote_target else rows

    def _keeper(self, state: ProcessorState) -> Callable[[psycopg.Connection[Any]], outcomes.StepOutcome | None] | None:
        """Return what holds a batch's messages in the transaction that passes them; None: there are none."""
        batch, verdict = state.batch, state.verdict
        if batch is None or not (batch.excluded or verdict or state.failed):
            return None
        lease = lease_of(state)
        failed = state.failed
        if verdict is not None:
            failed = tuple(Failure(each.checkpoint, verdict, each.key) for each in self._places(batch))
        # Here, not in the transaction, which would be idle while another database is read.
        rows = self._picked(batch, (*batch.excluded, *(each.checkpoint for each in failed)))

        def keep(connection: psycopg.Connection[Any]) -> outcomes.StepOutcome | None:
            why = holding.hold(connection, self._context.key, lease, rows, excluded=batch.excluded, failed=failed)
            return None if why is None else outcomes.OwnershipLost(why)

        return keep

    def _places(self, batch: Batch) -> tuple[Place, ...]:
        """Return where the messages of a batch are that are to be handled, with their keys, in order."""
        if batch.held:
            return tuple(Place(each.checkpoint, each.key) for each in batch.held)
        found = batch.places or holding.list_range(self._connection(), self._relation(batch), batch.excluded)
        if not batch.messages:
            return found
        keys = {each.checkpoint: each.key for each in found}
        return tuple(Place(each.checkpoint, keys.get(each.checkpoint, each.message_id)) for each in batch)

    def _hold_batch(self, state: ProcessorState) -> outcomes.StepOutcome:
        """Pass the batch without handling it."""
        batch = state.batch
        if batch is None:
            raise TransientError("no batch is in hand", reason=Reason.INTERNAL_ERROR)
        request = self._request(state, batch)
        return self._runner.run(self._connection(), request.lease, request, None, self._keeper(state))

    def _request(self, state: ProcessorState, batch: Batch) -> StoreRequest:
        raise NotImplementedError

    def _mark_in_flight(self, state: ProcessorState, batch: Batch) -> outcomes.StepOutcome | None:
        """Write messages down before they are tried; say so if one killed too many processes to be tried again."""
        lease = lease_of(state)
        connection = self._connection()
        rows = self._reader.keyed_relation(batch.after, batch.examined, self._context.config.delivery.message_key)
        last = holding.find_last(
            self._source_connection(), holding.without_excluded(rows, batch.excluded) if batch.excluded else rows
        )
        poison_crashes = holding.mark_in_flight(
            connection, self._context.key, lease, last or batch.examined,
            in_flight=batch.matched_count, generation=self._context.config.fingerprint,
        )  # fmt: skip
        if poison_crashes < 0:
            stored = checkpoints.load(self._connection(), self._context.key)
            return outcomes.Rejected(
                StoreAnswer.NOT_OWNER, state.stored, batch.examined, stored.pair if stored else None
            )
        return (
            _poison_message(poison_crashes) if poison_crashes >= POISON_CRASHES and batch.matched_count == 1 else None
        )

    def _answered(
        self, state: ProcessorState, attempt: Callable[[], outcomes.StepOutcome], *, goes_on: bool = False
    ) -> outcomes.StepOutcome:
        """Attempt what was written down before; when it fails, write down that this process did not die of it.

        `goes_on`: the very same messages are tried again at once, so they stay written down.
        """
        try:
            outcome = attempt()
        except (OutboxError, psycopg.Error):
            self._clear_in_flight(state)
            raise
        if isinstance(outcome, outcomes.Failed):
            if goes_on and is_refusal(outcome.error, self._context.config.delivery.retry):
                return outcome
            self._clear_in_flight(state)
        return outcome

    def _clear_in_flight(self, state: ProcessorState) -> None:
        """Say that the attempt was answered. Where that cannot be said, this process says so by coming again."""
        with suppress(OutboxError, psycopg.Error):
            holding.clear_in_flight(self._connection(), self._context.key, lease_of(state))

    def _take_held(self, state: ProcessorState) -> outcomes.StepOutcome:
        lease = lease_of(state)
        limit = min(
            state.held_limit or LARGEST_HELD_BATCH,
            self._limit(replace(state, poison_search=None, limit=None), retried=True),
        )
        payload = not self._context.transactional_target or self._needs_payload()
        taken = holding.take_due(
            self._connection(), self._context.key, lease, limit=min(limit, LARGEST_HELD_BATCH), payload=payload
        )
        if not taken.owned:
            return outcomes.OwnershipLost("the lease went before held messages were looked at")
        if not taken.held:
            return outcomes.HeldTaken(None, taken.next_in, taken.blocking)
        here = state.cursor or taken.held[0].checkpoint
        batch = Batch(
            here, here, taken.messages, len(taken.held), full=True, matched_count=len(taken.held),
            partition=self._context.key.partition, held=taken.held,
        )  # fmt: skip
        return outcomes.HeldTaken(batch, 0.0, blocking=True)

    def _needs_payload(self) -> bool:
        return cast("TransactionTarget", self._context.target).needs_payload

    def _handle_held(self, state: ProcessorState) -> outcomes.StepOutcome:
        batch, lease = state.batch, lease_of(state)
        if batch is None:
            raise TransientError("no batch is in hand", reason=Reason.INTERNAL_ERROR)
        if batch.held[0].crash_count >= HELD_CRASHES:
            return _poison_message(batch.held[0].crash_count)

        goes_on = self._isolates and len(batch.held) > 1
        return self._answered(state, lambda: self._attempt_held(batch, lease, state), goes_on=goes_on)

    def _attempt_held(self, batch: Batch, lease: outcomes.HeldLease, state: ProcessorState) -> outcomes.StepOutcome:
        def settle(connection: psycopg.Connection[Any]) -> outcomes.StepOutcome | None:
            count = holding.settle(connection, self._context.key, lease, batch.held)
            if count < 0:
                return outcomes.OwnershipLost(holding.NOT_OURS)
            return None if count == len(batch.held) else outcomes.HeldChanged()

        if self._context.config.guarantee is Guarantee.TRANSACTIONAL:
            outcome = self._in_transaction(lease, None, batch, settle)
        else:
            try:
                outcome = self._deliver(state, batch)
            except MessagesFailedError as err:
                return self._sort_named_held(batch, lease, err)
            if isinstance(outcome, outcomes.Rejected):
                return outcomes.OwnershipLost("the lease went before held messages were handed over")
            if isinstance(outcome, outcomes.Delivered):
                outcome = self._runner.run(self._connection(), lease, None, None, settle)
        return outcomes.HeldHandled(len(batch.held)) if isinstance(outcome, outcomes.Stored) else outcome

    def _in_transaction(
        self,
        lease: outcomes.HeldLease,
        request: StoreRequest | None,
        batch: Batch,
        finish: Callable[[psycopg.Connection[Any]], outcomes.StepOutcome | None] | None = None,
    ) -> outcomes.StepOutcome:
        raise NotImplementedError

    def _deliver(self, state: ProcessorState, batch: Batch) -> outcomes.StepOutcome:
        raise NotImplementedError

    def _sort_named_held(
        self, batch: Batch, lease: outcomes.HeldLease, error: MessagesFailedError
    ) -> outcomes.StepOutcome:
        raise NotImplementedError

    def _fail_held(self, state: ProcessorState) -> outcomes.StepOutcome:
        batch, verdict = state.batch, state.verdict
        if batch is None or verdict is None:
            raise TransientError("no held message is in hand", reason=Reason.INTERNAL_ERROR)
        failed = (Failure(batch.held[0].checkpoint, verdict),)
        answer = holding.fail(self._connection(), self._context.key, lease_of(state), failed)
        if answer < 0:
            return outcomes.OwnershipLost(holding.NOT_OURS)
        return outcomes.HeldFailed() if answer else outcomes.HeldChanged()


def _poison_message(crash_count: int) -> outcomes.Failed:
    return outcomes.Failed(
        HandlerError(
            f"{crash_count} processes in a row died while they handled this message alone, without an error: killed "
            f"for its "
            "memory, or crashed; it is not tried again until the resource or the handler is changed",
            reason=Reason.PROCESS_KILLED,
        )
    )
