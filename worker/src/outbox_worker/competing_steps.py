"""What a consumer in mode Competing does, one step at a time; `outbox_core.competing` decides."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from typing_extensions import override

from outbox_core import happening as h
from outbox_core.competing import (
    Completed,
    Deferred,
    Joined,
    Lost,
    NothingTaken,
    Sifted,
    Taken,
)
from outbox_core.errors import ConfigurationError, MessagesFailedError, OutboxError, TransientError
from outbox_core.ports import SearchTarget
from outbox_core.report import Reason
from outbox_core.spec import Guarantee, SchemaManagement
from outbox_core.state import ProcessorState, Step
from outbox_core.turns import Turn, decide_turn
from outbox_core.work import Action, Piece, Verdict
from outbox_worker.company import NOTICED_SECONDS
from outbox_worker.logs import get_logger
from outbox_worker.postgres import competing as calls
from outbox_worker.postgres import partitions
from outbox_worker.postgres.giving_up import FoundMessage
from outbox_worker.postgres.window import Stretch
from outbox_worker.shutdown import Interrupted
from outbox_worker.sifting import Sifting, most_at_once, tell
from outbox_worker.steps import Steps

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import psycopg

    from outbox_core.checkpoint import Checkpoint
    from outbox_core.competing import CompetingHappening, ConsumerState
    from outbox_core.message import Message
    from outbox_core.ports import BrokerTarget, TransactionTarget
    from outbox_core.stopping import Named
    from outbox_core.work import Work
    from outbox_worker.company import Company
    from outbox_worker.steps import Parts
    from outbox_worker.transaction import Transaction

LOOK_SECONDS: Final = 0.5
"""Between two looks for what others left: batches handed back, lapsed, or to be tried again; and delayed messages."""
PROMOTED_AGAIN: Final = 100
"""Messages of a queue that failed before and are handed out again at once: so few delay others by little."""
Answer = TypeVar("Answer")
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
        self._next_look = dict.fromkeys(Turn, 0.0)
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
        # What comes before the first batch, and a person's decision, is every worker's; no lease, no checkpoint.
        told = ProcessorState(state.step, state.due, stopped=state.stopped)
        return cast("CompetingHappening", self._actions[state.step](told))

    @override
    def _prepare(self, state: ProcessorState) -> h.Happening:
        prepared = super()._prepare(state)
        self._taker.server_run = self._runner.server_run
        return prepared

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
        gate, size = self._parts.gate, self._parts.config.delivery.batch_limit
        work, promoted = state.work, 0
        if work is None:
            found, promoted = self._find(Turn.FRESH if gate.prefers_fresh else decide_turn(state.turns))
            if isinstance(found, NothingTaken):
                return replace(found, promoted=promoted)
            work = found
        most = gate.limit(size, retried=work.again)
        if state.limit is not None:
            most = min(most, state.limit)
        if (block := self._block_of(work, state)) is not None:
            most = min(most, most_at_once(block))
        piece = self._read(work, most)
        if piece.matched:
            return Taken(piece, promoted)
        # The rows were deleted meanwhile, or a filter was changed: nothing is left to do.
        done = self._taker.complete(self._connection(), work, piece.examined, 0)
        return NothingTaken(moved=True, promoted=promoted) if done else Lost()

    def _find(self, turn: Turn) -> tuple[Work | NothingTaken, int]:
        """Find a batch of the one kind or else of the other; with how many messages of a queue were promoted."""
        promoted = 0
        if turn is Turn.AGAIN:
            again, promoted = self._find_again()
            if again is not None:
                return again, 0
        found = self._find_fresh()
        if turn is Turn.AGAIN or not isinstance(found, NothingTaken) or found.contended or found.moved:
            return found, promoted
        again, promoted = self._find_again()
        if again is not None:
            return again, 0
        return (self._find_fresh(), promoted) if promoted else (found, 0)

    def _find_fresh(self) -> Work | NothingTaken:
        connection = self._connection()
        most = self._parts.gate.limit(self._parts.config.delivery.batch_limit)
        if time.monotonic() >= self._next_look[Turn.FRESH]:
            work = self._taker.take_left(connection, Turn.FRESH, most)
            if work is not None:
                return work
            self._next_look[Turn.FRESH] = time.monotonic() + LOOK_SECONDS
        return self._taker.cut(connection, most)

    def _find_again(self) -> tuple[Work | None, int]:
        """Take messages that failed before; those of a queue come with its others from now on."""
        if time.monotonic() < self._next_look[Turn.AGAIN]:
            return None, 0
        connection = self._connection()
        most = self._parts.gate.limit(self._parts.config.delivery.batch_limit, retried=True)
        if self._taker.reader.is_queue:
            work, promoted = None, self._taker.promote_failed(connection, min(most, PROMOTED_AGAIN))
        else:
            work, promoted = self._taker.take_left(connection, Turn.AGAIN, most), 0
        if work is None and not promoted:
            self._next_look[Turn.AGAIN] = time.monotonic() + LOOK_SECONDS
        return work, promoted

    def _block_of(self, work: Work, state: ConsumerState) -> int | None:
        """Return how many messages at once are tried within a transaction; None: all of a piece, without savepoints."""
        if not self._parts.transactional_target:
            return None
        return 1 if work.again else state.block

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
        transactional = self._parts.config.guarantee is Guarantee.TRANSACTIONAL
        if self.sifts(state):
            if not transactional and not self._taker.renew(self._connection(), work):
                return Lost()
            return self._isolate_piece(state, self._block_of(work, state) or 1, complete=transactional)
        if transactional:
            return self._run(work, piece, complete=True)
        # What is handed over cannot be recalled: only for a batch that is ours, and for as long as that lasts.
        if not self._taker.renew(self._connection(), work):
            return Lost()
        if self._parts.transactional_target:
            happened = self._run(work, piece, complete=False)
            return h.Delivered(happened.count) if isinstance(happened, Completed) else happened
        return self._hand_to_broker(state)

    def _hand_to_broker(self, state: ConsumerState) -> CompetingHappening:
        """Hand the piece to a broker; what that names as failed leaves the batch with the piece's completion."""
        work, piece = _in_hand(state)
        target = cast("BrokerTarget", self._parts.target)
        try:
            count = self._parts.shutdown.limited(self._timeout, lambda: target.deliver(piece, work.attempt))
        except Interrupted as err:
            raise err.as_error("handing the batch over") from err
        except MessagesFailedError as err:
            sifted = self._sifting(state, piece.messages).sort_named(err)
            tell(sifted)
            return replace(sifted, settled=False, named=self._named_stop(sifted))
        return h.Delivered(count)

    def _run(self, work: Work, piece: Piece, *, complete: bool) -> CompetingHappening:
        """Effects, and with `complete` the batch's completion: both or neither."""
        connection = self._connection()

        def effects(transaction: Transaction) -> int:
            count = self._limited(transaction, lambda: self._hand_over(transaction, piece))
            if complete and not self._taker.complete(connection, work, piece.examined, piece.matched_count):
                raise BatchLostError("the batch is another consumer's by now")
            return count

        return self._commit(work, effects)

    def sifts(self, state: ConsumerState) -> bool:
        """Say whether the piece in hand is handled in parts, within one transaction."""
        work, piece = _in_hand(state)
        block = self._block_of(work, state)
        return block is not None and (work.again or block < piece.matched_count)

    def _isolate_piece(self, state: ConsumerState, block: int, *, complete: bool) -> CompetingHappening:
        """Handle what can be; what fails alone leaves the batch, in the same transaction if that completes it too."""
        work, piece = _in_hand(state)
        connection, stretch = self._connection(), Stretch.of(work, upto=piece.examined)
        messages = piece.messages or self._taker.reader.fetch(connection, stretch)
        if not messages:
            # The rows were deleted meanwhile.
            return self._complete_piece(work, piece)
        sifting = self._sifting(state, messages)
        found: list[Sifted] = []

        def effects(transaction: Transaction) -> int:
            target = self._parts.target
            unmarked = replace(transaction, mark=None)
            find = None
            if isinstance(target, SearchTarget):
                pairs = [message.checkpoint for message in messages]
                find = target.open_search(transaction, piece, pairs, None, sifting.seconds)
            # One bound for all parts: a step must not take longer than the loop says of it.
            sifted = self._limited(
                transaction,
                lambda: sifting.run(connection, lambda part: self._hand_over(unmarked, part), block, find),
            )
            found.append(sifted)
            if complete and not self._settle(work, sifted):
                raise BatchLostError("the batch is another consumer's by now")
            return sifted.handled

        happened = self._commit(work, effects)
        if not isinstance(happened, Completed):
            return happened
        tell(found[0])
        return replace(found[0], settled=complete, named=self._named_stop(found[0]))

    def _sifting(self, state: ConsumerState, messages: tuple[Message, ...]) -> Sifting:
        """Make what judges these messages, the first ones of the piece in hand."""
        work, piece = _in_hand(state)
        before = self._failed_before(work, Stretch.of(work, upto=piece.examined, limit=len(messages)))
        return Sifting(piece, work, messages, before, self._parts.config.delivery, self._random, state.given_up)

    def _settle(self, work: Work, sifted: Sifted) -> bool:
        if sifted.upto is None:
            return True
        return self._taker.defer(self._connection(), work, sifted.upto, sifted.behind, sifted.refusals)

    def _hand_over(self, transaction: Transaction, piece: Piece) -> int:
        return cast("TransactionTarget", self._parts.target).handle(transaction, piece)

    def _limited(self, transaction: Transaction, act: Callable[[], Answer]) -> Answer:
        self._parts.ownership.enter(transaction.connection)
        try:
            return self._parts.shutdown.limited(self._timeout, act)
        except Interrupted as err:
            raise err.as_error("the batch") from err
        finally:
            self._parts.ownership.leave()

    def _commit(self, work: Work, effects: Callable[[Transaction], int]) -> CompetingHappening:
        lease = h.HeldLease(self._parts.key.partition, work.id, self._parts.token)
        happened = self._runner.run(self._connection(), lease, None, effects)
        if isinstance(happened, h.Stored):
            return Completed(happened.count)
        if isinstance(happened, h.Failed) and isinstance(happened.error, BatchLostError):
            return Lost()
        return cast("CompetingHappening", happened)

    def _complete(self, state: ConsumerState) -> CompetingHappening:
        work, piece = _in_hand(state)
        if state.sifted is None:
            return self._complete_piece(work, piece)
        return replace(state.sifted, settled=True) if self._settle(work, state.sifted) else Lost()

    def _complete_piece(self, work: Work, piece: Piece) -> CompetingHappening:
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
        message, left = messages[0], self._sifting(state, messages).refuse(0, state.failure)
        if left.verdict.action is Action.STOP:
            return Deferred(left.verdict, named=self._named_message(message))
        if not self._taker.defer(connection, work, message.checkpoint, 1, [left]):
            return Lost()
        tell(Sifted(1, message.checkpoint, (left,), 1))
        return Deferred(left.verdict, message.checkpoint)

    def _named_stop(self, sifted: Sifted) -> Named | None:
        return None if sifted.stop is None else self._named_message(sifted.stop.message)

    def _named_message(self, message: Message) -> Named:
        key = message.message_id if message.partition_key is None else message.partition_key
        return self._named(FoundMessage(message.checkpoint, message.message_id, message.message_type, key))

    def _failed_before(self, work: Work, stretch: Stretch) -> Mapping[Checkpoint, int]:
        """Return how often messages failed before; of those that are left out: never."""
        if self._taker.reader.is_queue:
            return self._taker.reader.fetch_attempts(self._connection(), stretch)
        return dict(work.listed)


def _in_hand(state: ConsumerState) -> tuple[Work, Piece]:
    if state.work is None or state.piece is None:
        raise TransientError("no batch is in hand", reason=Reason.INTERNAL_ERROR)
    return state.work, state.piece


def _piece(work: Work, examined: Any, messages: tuple[Message, ...], count: int) -> Piece:
    return Piece(work.after, examined, messages, count, full=True, matched_count=count, work=replace(work))
