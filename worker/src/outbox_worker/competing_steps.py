"""What a consumer in mode Competing does, one step at a time; `outbox_core.competing` decides."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, cast

from outbox_core import happening as h
from outbox_core.competing import (
    Action,
    Completed,
    Deferred,
    Joined,
    Lost,
    NothingTaken,
    Piece,
    Taken,
    Verdict,
    Work,
    judge,
)
from outbox_core.errors import ConfigurationError, OutboxError, TransientError
from outbox_core.report import Reason
from outbox_core.spec import Guarantee, SchemaManagement
from outbox_core.state import ProcessorState, Step
from outbox_worker.company import NOTICED_SECONDS
from outbox_worker.logs import get_logger
from outbox_worker.postgres import competing as calls
from outbox_worker.postgres import partitions
from outbox_worker.postgres.window import Stretch
from outbox_worker.shutdown import Interrupted
from outbox_worker.steps import Steps

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    from outbox_core.competing import CompetingHappening, ConsumerState
    from outbox_core.message import Message
    from outbox_core.ports import BrokerTarget, TransactionTarget
    from outbox_worker.company import Company
    from outbox_worker.steps import Parts
    from outbox_worker.transaction import Transaction

LOOK_SECONDS: Final = 0.5
"""Between two looks for what others left: batches handed back, lapsed, or to be tried again; and delayed messages."""
_log = get_logger("outbox.worker")


class BatchLostError(OutboxError):
    """The batch is another consumer's by now: its effects must not be committed."""

    reason = Reason.LEASE_LOST


class CompetingSteps(Steps):
    """The steps of one consumer. Preparing, claiming and reviewing are those of every worker."""

    def __init__(
        self, parts: Parts, *, take_over: bool, taker: calls.BatchTaker, consumer: calls.Consumer, company: Company
    ) -> None:
        """Keep the parts, what takes batches, and what is known of other consumers."""
        super().__init__(parts, take_over=take_over)
        settings = parts.config.delivery.competing
        if settings is None:
            raise ConfigurationError("delivery.mode Competing needs delivery.competing")
        self._competing = settings
        self._taker = taker
        self._consumer = consumer
        self._company = company
        self._arrived = False
        self._random = random.SystemRandom()
        self._next_look = 0.0
        self._work_steps: dict[Step, Callable[[ConsumerState], CompetingHappening]] = {
            Step.LOAD: self._join,
            Step.FETCH: self._take,
            Step.HANDLE: self._handle_piece,
            Step.STORE: self._complete,
            Step.DEFER: self._defer,
            Step.RELEASE: self._release,
        }

    @property
    def share(self) -> float:
        """Of the processor's rate, this consumer's."""
        return self._company.share

    def tell_in_hand(self, work: Work | None) -> None:
        """Tell the heartbeat what to renew."""
        self._taker.in_hand = work

    def carry_out(self, state: ConsumerState) -> CompetingHappening:
        """Do the state's step.

        Raises:
            OutboxError: it could not be done.

        """
        if state.step in self._work_steps:
            return self._work_steps[state.step](state)
        # What comes before the first batch is every worker's; no lease, no checkpoint, nothing in hand.
        return cast("CompetingHappening", self._actions[state.step](ProcessorState(state.step, state.due)))

    def _join(self, _state: ConsumerState) -> CompetingHappening:
        parts, source = self._parts, self._parts.config.source
        connection = self._connection()
        if self._competing.queue is not None:
            manage = source.schema_ is SchemaManagement.MANAGE
            calls.ensure_queue(connection, source.schema_name, self._competing.queue, create=manage)
        begun = calls.join(connection, parts.key, self._consumer, source, self._competing, parts.config.start_from)
        if begun is None:
            return h.OwnershipLost("the claim went before this consumer joined")
        # What an earlier connection took and may or may not have finished: the database knows, we do not.
        returned = self._taker.hand_back(connection)
        self._arrive(connection)
        _log.info("joined", extra={"startFromUsed": begun, "handedBack": returned, "queue": self._competing.queue})
        return Joined(begun)

    def _arrive(self, connection: psycopg.Connection[Any]) -> None:
        """Share the rate with who is there already, once they can know of it."""
        if self._arrived or self._parts.config.delivery.rate_limit is None:
            return
        # Before they are counted: of two that come at the same time at least the second sees both.
        partitions.renew_membership(
            connection, self._parts.key, claim_uid=self._consumer.claim_uid, pod=self._consumer.pod,
            token=self._parts.token, lease=self._consumer.lease,
        )  # fmt: skip
        consumers = calls.count_unfinished(connection, self._parts.key).consumers
        self._company.note(consumers)
        if consumers > 1:
            self._parts.gate.arrive(self.share, NOTICED_SECONDS, time.monotonic())
        self._arrived = True

    def _release(self, _state: ConsumerState) -> CompetingHappening:
        """Let others have what is in hand: it is handed back as it is, no attempt of any message is used."""
        self._taker.hand_back(self._connection())
        return h.Released()

    def _take(self, state: ConsumerState) -> CompetingHappening:
        connection = self._connection()
        work = state.work
        most = self._parts.gate.limit(self._parts.config.delivery.batch_size)
        if work is None and time.monotonic() >= self._next_look:
            work = self._taker.take_left(connection, most)
            if work is None:
                self._next_look = time.monotonic() + LOOK_SECONDS
        if work is None:
            found = self._taker.cut(connection, most)
            if isinstance(found, NothingTaken):
                return found
            work = found
        piece = self._read(work, most if state.limit is None else min(most, state.limit))
        if piece.matched:
            return Taken(piece)
        # The rows were deleted meanwhile, or a filter was changed: nothing is left to do.
        done = self._taker.complete(connection, work, piece.examined, 0)
        return NothingTaken(moved=True) if done else Lost()

    def _read(self, work: Work, limit: int) -> Piece:
        """Read what is left of the batch, or at most `limit` messages of it."""
        connection, reader = self._connection(), self._taker.reader
        least = limit if work.piece is None else min(limit, work.piece)
        most = None if least >= work.count else least
        target = self._parts.target
        if self._parts.transactional_target and not cast("TransactionTarget", target).needs_payload:
            if most is None and work.count:
                return _piece(work, work.upto, (), work.count)
            examined = reader.examine(connection, Stretch.of(work), least)
            if examined is None or examined.matched < least:
                return _piece(work, work.upto, (), 0 if examined is None else examined.matched)
            return _piece(work, examined.upto, (), examined.matched)
        messages = reader.fetch(connection, Stretch.of(work, limit=most))
        cut_short = most is not None and len(messages) == most
        return _piece(work, messages[-1].checkpoint if cut_short else work.upto, messages, len(messages))

    def _handle_piece(self, state: ConsumerState) -> CompetingHappening:
        work, piece = _in_hand(state)
        if self._parts.config.guarantee is Guarantee.TRANSACTIONAL:
            return self._in_one_transaction(work, piece)
        # What is handed over cannot be recalled: only for a batch that is ours, and for as long as that lasts.
        if not self._taker.renew(self._connection(), work):
            return Lost()
        if self._parts.transactional_target:
            happened = self._run(work, piece, complete=False)
            return h.Delivered(happened.count) if isinstance(happened, Completed) else happened
        target = cast("BrokerTarget", self._parts.target)
        try:
            count = self._parts.shutdown.limited(self._timeout, lambda: target.deliver(piece, work.attempt))
        except Interrupted as err:
            raise err.as_error("handing the batch over") from err
        return h.Delivered(count)

    def _in_one_transaction(self, work: Work, piece: Piece) -> CompetingHappening:
        return self._run(work, piece, complete=True)

    def _run(self, work: Work, piece: Piece, *, complete: bool) -> CompetingHappening:
        """Effects, and with `complete` the batch's completion: both or neither."""
        target = cast("TransactionTarget", self._parts.target)
        connection = self._connection()

        def effects(transaction: Transaction) -> int:
            self._parts.ownership.enter(connection)
            try:
                count = self._parts.shutdown.limited(self._timeout, lambda: target.handle(transaction, piece))
            except Interrupted as err:
                raise err.as_error("the batch") from err
            finally:
                self._parts.ownership.leave()
            if complete and not self._taker.complete(connection, work, piece.examined, piece.matched_count):
                raise BatchLostError("the batch is another consumer's by now")
            return count

        lease = h.HeldLease(self._parts.key.partition, work.id, self._parts.token)
        happened = self._runner.run(connection, lease, None, effects)
        if isinstance(happened, h.Stored):
            return Completed(happened.count)
        if isinstance(happened, h.Failed) and isinstance(happened.error, BatchLostError):
            return Lost()
        return cast("CompetingHappening", happened)

    def _complete(self, state: ConsumerState) -> CompetingHappening:
        work, piece = _in_hand(state)
        done = self._taker.complete(self._connection(), work, piece.examined, piece.matched_count)
        return Completed(piece.matched_count) if done else Lost()

    def _defer(self, state: ConsumerState) -> CompetingHappening:
        """Let the one message that failed leave the batch."""
        work, piece = _in_hand(state)
        if state.failure is None:
            raise TransientError("no failure to defer a message for", reason=Reason.INTERNAL_ERROR)
        connection = self._connection()
        stretch = Stretch.of(work, upto=piece.examined, limit=1)
        messages = piece.messages[:1] or self._taker.reader.fetch(connection, stretch)
        if not messages:
            # The row was deleted meanwhile: nothing is left to try again.
            done = self._taker.complete(connection, work, piece.examined, 0)
            return Deferred(Verdict(Action.SKIP, 0), piece.examined) if done else Lost()
        delivery = self._parts.config.delivery
        attempts = work.deaths + 1 + self._failed_before(work, stretch, messages[0])
        verdict = judge(attempts, state.failure, delivery.retry, delivery.when_exhausted, self._random.random())
        if verdict.action is Action.STOP:
            return Deferred(verdict)
        wait = timedelta(seconds=verdict.wait)
        if not self._taker.defer(connection, work, messages[0], verdict, state.failure, wait):
            return Lost()
        _log.warning(
            "a message left its batch",
            extra={"messageId": messages[0].message_id, "action": verdict.action.value, "attempts": attempts,
                   "error": str(state.failure)},
        )  # fmt: skip
        return Deferred(verdict, messages[0].checkpoint)

    def _failed_before(self, work: Work, stretch: Stretch, message: Message) -> int:
        if self._taker.reader.is_queue:
            return self._taker.reader.fetch_attempts(self._connection(), stretch)
        return dict(work.listed).get(message.checkpoint, 0)


def _in_hand(state: ConsumerState) -> tuple[Work, Piece]:
    if state.work is None or state.piece is None:
        raise TransientError("no batch is in hand", reason=Reason.INTERNAL_ERROR)
    return state.work, state.piece


def _piece(work: Work, examined: Any, messages: tuple[Message, ...], count: int) -> Piece:
    return Piece(work.after, examined, messages, count, full=True, matched_count=count, work=replace(work))
