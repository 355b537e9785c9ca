"""What a consumer in mode Competing does, one step at a time; `outbox_core.processor.competing` decides."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from outbox_core.errors import MessagesFailedError, TransientError
from outbox_core.part import Places
from outbox_core.processor import outcomes
from outbox_core.processor.claimed_batch import Chunk, RefusalAction, RefusalDecision
from outbox_core.processor.outcomes import Completed, Deferred, Joined, Lost, NothingTaken, Sifted, Taken
from outbox_core.processor.state import Step
from outbox_core.processor.turns import Turn, decide_turn
from outbox_core.report import Reason
from outbox_core.spec import Guarantee, SchemaManagement
from outbox_worker.competing.consumer import NOTICED_SECONDS
from outbox_worker.competing.sifting import Sifting, most_at_once, tell
from outbox_worker.engine.effects import Effects
from outbox_worker.logs import get_logger
from outbox_worker.postgres.feeds import competing as calls
from outbox_worker.postgres.feeds.holding import FoundMessage
from outbox_worker.postgres.reading.read_range import ReadRange

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from outbox_core.message import Message
    from outbox_core.processor.claimed_batch import ClaimedBatch
    from outbox_core.processor.outcomes import Outcome
    from outbox_core.processor.state import ProcessorState
    from outbox_core.processor.stopping import Named
    from outbox_core.progress.checkpoint import Checkpoint
    from outbox_worker.competing.consumer import ThisConsumer
    from outbox_worker.engine.steps import StepContext
    from outbox_worker.engine.stopped_steps import StoppedSteps
    from outbox_worker.postgres.connection import Connection
    from outbox_worker.postgres.transactions.transaction import Transaction, TransactionRunner

LOOK_SECONDS: Final = 0.5
"""Between two looks for what others left: batches handed back, lapsed, or to be tried again; and delayed messages."""
PROMOTED_AGAIN: Final = 100
"""Messages of a queue that failed before and are handed out again at once: so few delay others by little."""
_LOST: Final = outcomes.OwnershipLost("the batch is another consumer's by now")
_log = get_logger("outbox.worker")


class CompetingSteps:
    """The steps of one consumer. Preparing, claiming and reviewing are those of every worker."""

    def __init__(
        self, context: StepContext, runner: TransactionRunner, stopped: StoppedSteps, consumer: ThisConsumer
    ) -> None:
        self._context = context
        self._target = context.databases.target
        self._size = context.config.delivery.batch_limit
        self._transactional = context.config.guarantee is Guarantee.TRANSACTIONAL
        self._runner = runner
        self._effects = Effects(context)
        self._stopped = stopped
        self._consumer = consumer
        self._taker = consumer.taker
        if context.target.needs_payload:
            self._taker.reader.ahead = context.databases.ahead
        self._arrived = False
        self._random = random.SystemRandom()
        self._next_look = dict.fromkeys(Turn, 0.0)

    @property
    def actions(self) -> dict[Step, Callable[[ProcessorState], Outcome]]:
        """Each step of a consumer, and what does it."""
        return {
            Step.LOAD: self._join,
            Step.FETCH: self._take,
            Step.HANDLE: self._handle_chunk,
            Step.STORE: self._complete,
            Step.DEFER: self._defer,
            Step.RELEASE: self._release,
        }

    def _join(self, _state: ProcessorState) -> Outcome:
        context, source, settings = self._context, self._context.config.source, self._consumer.settings
        connection = self._target.connection()
        self._taker.server_run = self._runner.server_run
        if settings.queue is not None:
            manage = source.schema_ is SchemaManagement.MANAGE
            calls.ensure_queue(connection, source.schema_name, settings.queue, create=manage)
        start = context.config.start_from
        begun = calls.join(connection, context.key, self._consumer.identity, source, settings, start)
        if begun is None:
            return outcomes.OwnershipLost("the claim went before this consumer joined")
        # What an earlier connection took and may or may not have finished: the database knows, we do not.
        returned = self._taker.hand_back(connection)
        self._arrive(connection)
        _log.info("joined", extra={"startFromUsed": begun, "handedBack": returned, "queue": settings.queue})
        return Joined(begun)

    def _arrive(self, connection: Connection) -> None:
        """Share the rate with who is there already, once they can know of it."""
        if self._arrived or self._context.config.delivery.rate_limit is None:
            return
        # Before they are counted: of two that come at the same time at least the second sees both.
        self._consumer.renew_membership(connection)
        consumers = calls.count_unfinished(connection, self._context.key).consumers
        self._consumer.note_count(consumers)
        if consumers > 1:
            self._context.throttle.arrive(self._consumer.share(), NOTICED_SECONDS, time.monotonic())
        self._arrived = True

    def _release(self, _state: ProcessorState) -> Outcome:
        """Let others have what is in hand: it is handed back as it is, no attempt of any message is used."""
        self._taker.hand_back(self._target.connection())
        return outcomes.HandedBack()

    def _take(self, state: ProcessorState) -> Outcome:
        throttle, claimed, promoted = self._context.throttle, state.claimed, 0
        most = throttle.limit(self._size)
        if claimed is None:
            turn = decide_turn(state.owed, throttle.breaker.phase)
            found, promoted = self._find(turn, most, settled=state.is_settled)
            if isinstance(found, NothingTaken):
                self._taker.reader.forget_ahead()
                return self._say_when(found, promoted) if state.is_settled else replace(found, promoted=promoted)
            claimed = found
        if claimed.again:
            most = throttle.limit(self._size, retried=True)
        if state.limit is not None:
            most = min(most, state.limit)
        if (block := self._block_of(claimed, state)) is not None:
            most = min(most, most_at_once(block))
        chunk = self._read(claimed, most)
        if chunk.matched_count:
            return Taken(chunk, promoted)
        # The rows were deleted meanwhile, or a filter was changed: nothing is left to do.
        done = self._taker.complete(self._target.connection(), claimed, chunk.examined, 0)
        return NothingTaken(moved=True, promoted=promoted) if done else Lost()

    def _say_when(self, found: NothingTaken, promoted: int) -> NothingTaken:
        """Add when a look is worth while again, where this one saw all there is."""
        if promoted or found.contended or found.moved:
            return replace(found, promoted=promoted)
        return replace(found, next_due=self._taker.find_next_due(self._target.connection()))

    def _find(self, turn: Turn, most: int, *, settled: bool) -> tuple[ClaimedBatch | NothingTaken, int]:
        """Find a batch of the one kind or else of the other; with how many messages of a queue were promoted.

        `most`: so many fresh ones; `settled`: most likely there is none.
        """
        promoted = 0
        if turn is Turn.AGAIN:
            again, promoted = self._find_again()
            if again is not None:
                return again, 0
        found = self._find_fresh(most, settled=settled)
        if turn is Turn.AGAIN or not isinstance(found, NothingTaken) or found.contended or found.moved:
            return found, promoted
        again, promoted = self._find_again()
        if again is not None:
            return again, 0
        return (self._find_fresh(most, settled=False), promoted) if promoted else (found, 0)

    def _find_fresh(self, most: int, *, settled: bool) -> ClaimedBatch | NothingTaken:
        connection = self._target.connection()
        if time.monotonic() >= self._next_look[Turn.FRESH]:
            claimed = self._taker.take_left(connection, Turn.FRESH, most)
            if claimed is not None:
                return claimed
            self._next_look[Turn.FRESH] = time.monotonic() + LOOK_SECONDS
        if settled and not self._taker.is_any_left(connection):
            return NothingTaken()
        return self._taker.claim_next(connection, most)

    def _find_again(self) -> tuple[ClaimedBatch | None, int]:
        """Take messages that failed before; those of a queue come with its others from now on."""
        if time.monotonic() < self._next_look[Turn.AGAIN]:
            return None, 0
        connection = self._target.connection()
        most = self._context.throttle.limit(self._size, retried=True)
        if self._taker.reader.is_queue:
            claimed, promoted = None, self._taker.promote(connection, min(most, PROMOTED_AGAIN), failed=True)
        else:
            claimed, promoted = self._taker.take_left(connection, Turn.AGAIN, most), 0
        if claimed is None and not promoted:
            self._next_look[Turn.AGAIN] = time.monotonic() + LOOK_SECONDS
        return claimed, promoted

    def _block_of(self, claimed: ClaimedBatch, state: ProcessorState) -> int | None:
        """Return how many messages at once are tried within a transaction; None: all of a chunk, without savepoints."""
        if not self._effects.are_inside:
            return None
        return 1 if claimed.again else state.block

    def _read(self, claimed: ClaimedBatch, limit: int) -> Chunk:
        reader = self._taker.reader
        least = limit if claimed.chunk is None else min(limit, claimed.chunk)
        if not self._context.target.needs_payload:
            if 0 < claimed.count <= least:
                return _chunk(claimed, claimed.upto, (), claimed.count)
            examined = reader.examine(self._target.connection(), ReadRange.of(claimed), least)
            if examined is None or examined.matched < least:
                return _chunk(claimed, claimed.upto, (), 0 if examined is None else examined.matched)
            return _chunk(claimed, examined.upto, (), examined.matched)
        page = reader.fetch_page(self._target.connection(), ReadRange.page_of(claimed, least))
        messages = page.messages
        return _chunk(claimed, messages[-1].checkpoint if page.is_full else claimed.upto, messages, len(messages))

    def _handle_chunk(self, state: ProcessorState) -> Outcome:
        chunk = _in_hand(state)
        claimed, block = chunk.claimed, self._block_of(chunk.claimed, state)
        # What is handed over cannot be recalled: only for a batch that is ours, and for as long as that lasts.
        if not self._transactional and not self._taker.renew(self._target.connection(), claimed):
            return Lost()
        if block is not None and (claimed.again or block < chunk.matched_count):
            return self._isolate_chunk(state, block)
        if not self._effects.are_inside:
            return self._hand_to_broker(state)
        outcome = self._run(chunk)
        if isinstance(outcome, Completed) and not self._transactional:
            return outcomes.Delivered(outcome.count)
        return outcome

    def _hand_to_broker(self, state: ProcessorState) -> Outcome:
        """Hand the chunk to a broker; what that names as failed leaves the batch with the chunk's completion."""
        chunk = _in_hand(state)
        try:
            count = self._effects.deliver(chunk, chunk.claimed.attempt)
        except MessagesFailedError as err:
            sifted = self._sifting(state, chunk, chunk.messages).sort_named(err)
            tell(sifted)
            return replace(sifted, settled=False, named=self._named_stop(sifted))
        return outcomes.Delivered(count)

    def _run(self, chunk: Chunk) -> Completed | Lost | outcomes.Failed:
        """Effects, and with Transactional the batch's completion: both or neither."""

        def finish(connection: Connection) -> outcomes.OwnershipLost | None:
            done = not self._transactional or self._taker.complete(
                connection, chunk.claimed, chunk.examined, chunk.matched_count
            )
            return None if done else _LOST

        return self._commit(chunk.claimed, partial(self._effects.handle, chunk), finish)

    def _isolate_chunk(self, state: ProcessorState, block: int) -> Outcome:
        """Handle what can be; what fails alone leaves the batch, in the same transaction if that completes it too."""
        chunk = _in_hand(state)
        claimed, connection, messages = chunk.claimed, self._target.connection(), chunk.messages
        if not messages:
            stretch = ReadRange.of(claimed, upto=chunk.examined, limit=chunk.matched_count + 1)
            page = self._taker.reader.fetch_page(connection, stretch)
            messages = page.messages
            if page.is_full:
                chunk = replace(chunk, examined=messages[-1].checkpoint, matched_count=len(messages))
        if not messages:
            # The rows were deleted meanwhile.
            return self._complete_chunk(chunk)
        sifting = self._sifting(state, chunk, messages)
        found: list[Sifted] = []

        def effects(transaction: Transaction) -> int:
            target, unmarked = self._effects.inside, replace(transaction, mark=None)
            places = Places().of_messages(messages)
            find = self._effects.open_search(transaction, chunk, places, sifting.seconds, blocks=False)
            # One bound for all parts: a step must not take longer than the loop says of it.
            sifted = self._effects.limited(
                connection, lambda: sifting.run(connection, lambda part: target.handle(unmarked, part), block, find)
            )
            found.append(sifted)
            return sifted.handled

        def finish(_: Connection) -> outcomes.OwnershipLost | None:
            return None if not self._transactional or self._settle(claimed, found[0]) else _LOST

        outcome = self._commit(claimed, effects, finish)
        if not isinstance(outcome, Completed):
            return outcome
        self._effects.spend(found[0].behind)
        tell(found[0])
        return replace(found[0], settled=self._transactional, named=self._named_stop(found[0]))

    def _sifting(self, state: ProcessorState, chunk: Chunk, messages: tuple[Message, ...]) -> Sifting:
        stretch = ReadRange.of(chunk.claimed, upto=chunk.examined, limit=len(messages))
        before = self._failed_before(chunk.claimed, stretch)
        return Sifting(chunk, messages, before, self._context.config.delivery, self._random, state.given_up)

    def _settle(self, claimed: ClaimedBatch, sifted: Sifted) -> bool:
        if sifted.upto is None:
            return True
        return self._taker.defer(self._target.connection(), claimed, sifted.upto, sifted.behind, sifted.refusals)

    def _commit(
        self,
        claimed: ClaimedBatch,
        effects: Callable[[Transaction], int],
        finish: Callable[[Connection], outcomes.OwnershipLost | None],
    ) -> Completed | Lost | outcomes.Failed:
        """Run the transaction; where `finish` finds the batch to be another consumer's, its effects are undone."""
        if claimed.attempt > 1:
            self._end_stuck_attempts(claimed)
        match self._runner.run(self._target.connection(), claimed.id, None, effects, finish):
            case outcomes.Stored() as stored:
                return Completed(stored.count)
            case outcomes.Failed() as failed:
                return failed
            case _:  # what `finish` says: there is no checkpoint that could be refused or in doubt
                return Lost()

    def _end_stuck_attempts(self, claimed: ClaimedBatch) -> None:
        """Let no frozen consumer keep locked what this attempt writes too: else it would wait, and count as failed."""
        stuck = self._taker.end_stuck_attempts(self._target.connection(), claimed)
        if stuck.ended:
            _log.warning("ended transactions of a former consumer that were stuck", extra={"count": stuck.ended})
        if stuck.left:
            _log.warning("a former consumer's transaction may be stuck", extra={"detail": stuck.left})

    def _complete(self, state: ProcessorState) -> Outcome:
        chunk = _in_hand(state)
        if state.sifted is None:
            return self._complete_chunk(chunk)
        return replace(state.sifted, settled=True) if self._settle(chunk.claimed, state.sifted) else Lost()

    def _complete_chunk(self, chunk: Chunk) -> Outcome:
        done = self._taker.complete(self._target.connection(), chunk.claimed, chunk.examined, chunk.matched_count)
        return Completed(chunk.matched_count) if done else Lost()

    def _defer(self, state: ProcessorState) -> Outcome:
        chunk = _in_hand(state)
        if state.failure is None:
            raise TransientError("no failure to defer a message for", reason=Reason.INTERNAL_ERROR)
        claimed, connection = chunk.claimed, self._target.connection()
        stretch = ReadRange.of(claimed, upto=chunk.examined, limit=1)
        messages = chunk.messages[:1] or self._taker.reader.fetch(connection, stretch)
        if not messages:
            # The row was deleted meanwhile: nothing is left to try again.
            done = self._taker.complete(connection, claimed, chunk.examined, 0)
            return Deferred(RefusalDecision(RefusalAction.SKIP, 0), chunk.examined) if done else Lost()
        message, left = messages[0], self._sifting(state, chunk, messages).refuse(0, state.failure)
        if left.decision.action is RefusalAction.STOP:
            return Deferred(left.decision, named=self._named_message(message))
        if not self._taker.defer(connection, claimed, message.checkpoint, 1, [left]):
            return Lost()
        tell(Sifted(1, message.checkpoint, (left,), 1))
        return Deferred(left.decision, message.checkpoint)

    def _named_stop(self, sifted: Sifted) -> Named | None:
        return None if sifted.stop is None else self._named_message(sifted.stop.message)

    def _named_message(self, message: Message) -> Named:
        key = message.message_id if message.partition_key is None else message.partition_key
        return self._stopped.name(FoundMessage(message.checkpoint, message.message_id, message.message_type, key))

    def _failed_before(self, claimed: ClaimedBatch, stretch: ReadRange) -> Mapping[Checkpoint, int]:
        """Return how often messages failed before; of those that are left out: never."""
        if self._taker.reader.is_queue:
            return self._taker.reader.fetch_attempts(self._target.connection(), stretch)
        return dict(claimed.listed)


def _in_hand(state: ProcessorState) -> Chunk:
    if not isinstance(state.batch, Chunk):
        raise TransientError("no batch is in hand", reason=Reason.INTERNAL_ERROR)
    return state.batch


def _chunk(claimed: ClaimedBatch, examined: Checkpoint, messages: tuple[Message, ...], count: int) -> Chunk:
    return Chunk(claimed.after, examined, messages, count, full=True, matched_count=count, claimed=claimed)
