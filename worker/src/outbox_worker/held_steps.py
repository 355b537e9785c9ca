"""The steps of messages that are set aside: found in a batch, held with its checkpoint, tried again, given up.

Mixed into the steps of a partition by `outbox_worker.steps`; like those it decides nothing. What is done to held
messages is done under the lane's lease, with Transactional in the transaction of the effects.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, cast

import psycopg

from outbox_core import happening as h
from outbox_core.checkpoint import StoreAnswer
from outbox_core.errors import HandlerError, OutboxError, TransientError
from outbox_core.failing import HELD_DEATHS, KILLS
from outbox_core.message import Batch
from outbox_core.report import Reason
from outbox_core.spec import Guarantee, Mode
from outbox_worker.postgres import checkpoints, holding

if TYPE_CHECKING:
    from collections.abc import Callable

    from psycopg import sql

    from outbox_core.checkpoint import Checkpoint
    from outbox_core.ports import TransactionTarget
    from outbox_core.state import ProcessorState
    from outbox_worker.postgres.messages import MessageReader
    from outbox_worker.steps import Parts
    from outbox_worker.transaction import StoreRequest, TransactionRunner

LARGEST_HELD_BATCH: Final = 1000
"""Held messages tried at once: each is written down before."""
_GONE: Final = "the lease went before what became of a held message was written down"


class HeldSteps:
    """What `Steps` does with messages that are not handled with their batch."""

    _parts: Parts
    _reader: MessageReader
    _runner: TransactionRunner

    def _connection(self) -> psycopg.Connection[Any]:
        raise NotImplementedError

    def _source_connection(self) -> psycopg.Connection[Any]:
        raise NotImplementedError

    def _lease_of(self, state: ProcessorState) -> h.HeldLease:
        if state.lease is None:
            raise TransientError("a step for owners without a lease", reason=Reason.INTERNAL_ERROR)
        return state.lease

    def _limit(self, state: ProcessorState) -> int:
        """Most messages of the next batch."""
        most = self._parts.config.delivery.batch_size
        wanted = state.limit or most
        if state.suspicion is not None:
            wanted = min(wanted, state.suspicion.next_size)
        return min(wanted, self._parts.gate.limit(most))

    def _sift(self, state: ProcessorState, batch: Batch) -> Batch:
        """Take out of a batch what is not to be handled now. Costs nothing while nothing is held or delayed."""
        if not batch.matched or not (batch.delayed_count or state.blocking):
            return batch
        connection, delivery = self._connection(), self._parts.config.delivery
        rows = self._relation(batch)
        if delivery.mode is Mode.ORDERED and batch.delayed_count:
            batch = holding.cut_at_delayed(connection, batch, rows, lambda most: self._read_outbox(batch.after, most))
            if not batch.matched or not state.blocking:
                return batch
            rows = self._relation(batch)
        aside = holding.find_aside(connection, self._parts.key, rows)
        if not aside:
            return batch
        out = set(aside)
        return replace(
            batch,
            messages=tuple(message for message in batch.messages if message.checkpoint not in out),
            matched_count=batch.matched_count - len(aside),
            aside=aside,
        )

    def _read_outbox(self, after: Checkpoint, limit: int) -> Batch:
        """Read the outbox, as much of it as the target needs."""
        if self._parts.transactional_target and not self._needs_payload():
            return self._reader.bound_of(self._source_connection(), after, limit)
        return self._reader.fetch(self._source_connection(), after, limit)

    def _relation(self, batch: Batch) -> sql.Composed:
        """Return the SELECT of the batch's messages, carried to the checkpoint's database if it is another one."""
        rows = self._reader.keyed_relation(batch.after, batch.examined, self._parts.config.delivery.message_key)
        return holding.carry(self._source_connection(), rows) if self._parts.databases.apart else rows

    def _keeper(self, state: ProcessorState) -> Callable[[psycopg.Connection[Any]], h.Happening | None] | None:
        """Return what holds a batch's messages in the transaction that passes them; None: there are none."""
        batch, verdict = state.batch, state.verdict
        if batch is None or not (batch.aside or verdict):
            return None
        lease = self._lease_of(state)
        # Here, not in the transaction, which would be idle while another database is read.
        rows = self._relation(batch)

        def keep(connection: psycopg.Connection[Any]) -> h.Happening | None:
            kept = holding.set_aside(connection, self._parts.key, lease, rows, aside=batch.aside, verdict=verdict)
            return None if kept else h.OwnershipLost(_GONE)

        return keep

    def _set_aside(self, state: ProcessorState) -> h.Happening:
        """Pass the batch without handling it."""
        batch = state.batch
        if batch is None:
            raise TransientError("no batch is in hand", reason=Reason.INTERNAL_ERROR)
        request = self._request(state, batch)
        return self._runner.run(self._connection(), request.lease, request, None, self._keeper(state))

    def _request(self, state: ProcessorState, batch: Batch) -> StoreRequest:
        raise NotImplementedError

    def _begin_suspect(self, state: ProcessorState, batch: Batch) -> h.Happening | None:
        """Write messages down before they are tried; say so if one killed too many processes to be tried again."""
        lease = self._lease_of(state)
        connection = self._connection()
        rows = self._reader.keyed_relation(batch.after, batch.examined, self._parts.config.delivery.message_key)
        last = holding.find_last(
            self._source_connection(), holding.without_aside(rows, batch.aside) if batch.aside else rows
        )
        kills = holding.begin_suspect(
            connection, self._parts.key, lease, last or batch.examined,
            suspects=batch.matched_count, generation=self._parts.config.generation,
        )  # fmt: skip
        if kills < 0:
            stored = checkpoints.load(self._connection(), self._parts.key)
            return h.Refused(StoreAnswer.NOT_OWNER, state.stored, batch.examined, stored.pair if stored else None)
        return _killer(kills) if kills >= KILLS and batch.matched_count == 1 else None

    def _answered(self, state: ProcessorState, attempt: Callable[[], h.Happening]) -> h.Happening:
        """Attempt what was written down before; when it fails, write down that this process did not die of it."""
        try:
            happened = attempt()
        except (OutboxError, psycopg.Error):
            self._end_suspect(state)
            raise
        if isinstance(happened, h.Failed):
            self._end_suspect(state)
        return happened

    def _end_suspect(self, state: ProcessorState) -> None:
        """Say that the attempt was answered. Where that cannot be said, this process says so by coming again."""
        with suppress(OutboxError, psycopg.Error):
            holding.end_suspect(self._connection(), self._parts.key, self._lease_of(state))

    def _take_held(self, state: ProcessorState) -> h.Happening:
        lease = self._lease_of(state)
        limit = min(state.held_limit or LARGEST_HELD_BATCH, self._limit(replace(state, suspicion=None, limit=None)))
        payload = not self._parts.transactional_target or self._needs_payload()
        taken = holding.take_due(
            self._connection(), self._parts.key, lease, limit=min(limit, LARGEST_HELD_BATCH), payload=payload
        )
        if not taken.owned:
            return h.OwnershipLost("the lease went before held messages were looked at")
        if not taken.held:
            return h.HeldTaken(None, taken.next_in, taken.blocking)
        here = state.cursor or taken.held[0].checkpoint
        batch = Batch(
            here, here, taken.messages, len(taken.held), full=True, matched_count=len(taken.held),
            partition=self._parts.key.partition, held=taken.held,
        )  # fmt: skip
        return h.HeldTaken(batch, 0.0, blocking=True)

    def _needs_payload(self) -> bool:
        return cast("TransactionTarget", self._parts.target).needs_payload

    def _handle_held(self, state: ProcessorState) -> h.Happening:
        batch, lease = state.batch, self._lease_of(state)
        if batch is None:
            raise TransientError("no batch is in hand", reason=Reason.INTERNAL_ERROR)
        if batch.held[0].deaths >= HELD_DEATHS:
            return _killer(batch.held[0].deaths)

        return self._answered(state, lambda: self._attempt_held(batch, lease, state))

    def _attempt_held(self, batch: Batch, lease: h.HeldLease, state: ProcessorState) -> h.Happening:
        def settle(connection: psycopg.Connection[Any]) -> h.Happening | None:
            count = holding.settle(connection, self._parts.key, lease, batch.held)
            if count < 0:
                return h.OwnershipLost(_GONE)
            return None if count == len(batch.held) else h.HeldChanged()

        if self._parts.config.guarantee is Guarantee.TRANSACTIONAL:
            happened = self._in_transaction(lease, None, batch, settle)
        else:
            happened = self._deliver(state, batch)
            if isinstance(happened, h.Refused):
                return h.OwnershipLost("the lease went before held messages were handed over")
            if isinstance(happened, h.Delivered):
                happened = self._runner.run(self._connection(), lease, None, None, settle)
        return h.HeldHandled(len(batch.held)) if isinstance(happened, h.Stored) else happened

    def _in_transaction(
        self,
        lease: h.HeldLease,
        request: StoreRequest | None,
        batch: Batch,
        finish: Callable[[psycopg.Connection[Any]], h.Happening | None] | None = None,
    ) -> h.Happening:
        raise NotImplementedError

    def _deliver(self, state: ProcessorState, batch: Batch) -> h.Happening:
        raise NotImplementedError

    def _fail_held(self, state: ProcessorState) -> h.Happening:
        batch, verdict = state.batch, state.verdict
        if batch is None or verdict is None:
            raise TransientError("no held message is in hand", reason=Reason.INTERNAL_ERROR)
        answer = holding.fail(self._connection(), self._parts.key, self._lease_of(state), batch.held[0], verdict)
        if answer < 0:
            return h.OwnershipLost(_GONE)
        return h.HeldFailed() if answer else h.HeldChanged()


def _killer(deaths: int) -> h.Failed:
    return h.Failed(
        HandlerError(
            f"{deaths} processes in a row died while they handled this message alone, without a word: killed for its "
            "memory, or crashed; it is not tried again until the resource or the handler is changed",
            reason=Reason.PROCESS_KILLED,
        )
    )
