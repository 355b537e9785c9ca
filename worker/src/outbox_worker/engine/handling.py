"""The steps about a batch in hand, fresh or of held messages: handled, or of those that fail, and acknowledged.

A batch that was refused as a whole (or others were lately) is handled in parts under savepoints, in one transaction
with what becomes of the messages that failed alone and with the checkpoint. Where effects and checkpoint are not one
transaction (AtLeastOnce), the checkpoint follows. It decides nothing: `outbox_core.processor.isolation`, `part` and
`failing` do.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Final, TypeVar

from outbox_core.errors import MessagesFailedError, OutboxError, TransientError
from outbox_core.message import Held
from outbox_core.part import Place, find_waiting, take_part
from outbox_core.processor import failing, outcomes
from outbox_core.processor.failing import HELD_CRASHES, Failure, build_poison_error
from outbox_core.processor.isolation import Search, search_failed
from outbox_core.processor.state import batch_of, lease_of
from outbox_core.report import Reason
from outbox_core.spec import Blocks, Guarantee
from outbox_worker.engine.pipeline import Pipeline
from outbox_worker.postgres.errors import DatabaseError
from outbox_worker.postgres.transactions.savepoints import isolate, within
from outbox_worker.postgres.transactions.transaction import Reached, StoreRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outbox_core.message import Batch
    from outbox_core.part import Places
    from outbox_core.ports import Feed, Settle
    from outbox_core.processor.state import ProcessorState
    from outbox_core.spec import Delivery
    from outbox_worker.engine.effects import Effects
    from outbox_worker.engine.steps import StepContext
    from outbox_worker.feeds.cursor import CheckpointSettling
    from outbox_worker.feeds.held import HeldFeed
    from outbox_worker.postgres.connection import Connection
    from outbox_worker.postgres.transactions.savepoints import Isolated
    from outbox_worker.postgres.transactions.transaction import Transaction, TransactionRunner

    Finish = Callable[[Connection], outcomes.StepOutcome | None]

_Keyed = TypeVar("_Keyed", Place, Held)
FRESH_SECONDS: Final = 0.5
"""Then what was found is committed, and the rest is another batch: nothing waits longer for what fails."""
HELD_SECONDS: Final = 0.3
"""The same for messages that are tried again, which take a turn of the fresh ones' time."""
_SHARE: Final = 4
"""Of delivery.timeout, which bounds all of it, this part at most."""


class Handling:
    """Handles the batch in hand, or passes it, and has it acknowledged."""

    def __init__(
        self,
        context: StepContext,
        runner: TransactionRunner,
        effects: Effects,
        feed: Feed,
        fresh: CheckpointSettling,
        held: HeldFeed,
    ) -> None:
        self._target = context.databases.target
        self._runner = runner
        self._effects = effects
        self._feed = feed
        self._fresh = fresh
        self._held = held
        self._pipeline = Pipeline(context, effects, feed, fresh)
        self._isolates = context.isolates
        self._delivery = context.config.delivery
        # A target outside may be transactional too: by itself, so that the checkpoint follows it all the same.
        self._transactional = context.config.guarantee is Guarantee.TRANSACTIONAL and effects.are_inside
        self._part_seconds = self._delivery.timeout.total_seconds() / _SHARE

    def handle(self, state: ProcessorState) -> outcomes.StepOutcome:
        """Transactional: handle and store in one transaction. AtLeastOnce: check the lease and deliver."""
        batch = batch_of(state)
        if state.poison_search is None:
            return self._noted(self._attempt(state, batch))
        if (told := self._fresh.mark_in_flight(state, batch)) is not None:
            return told
        return self._noted(self._answered(state, lambda: self._attempt(state, batch)))

    def _noted(self, outcome: outcomes.StepOutcome) -> outcomes.StepOutcome:
        if isinstance(outcome, outcomes.Stored):
            self._feed.note_stored(outcome.pair)
        return outcome

    def _attempt(self, state: ProcessorState, batch: Batch) -> outcomes.StepOutcome:
        if self._transactional:
            request = self._fresh.request(state, batch)
            return self._in_transaction(request.lease, request, batch, self._keeper(state))
        try:
            return self._deliver(state, batch)
        except MessagesFailedError as err:
            return self._sort_named(state, batch, err)

    def _answered(
        self, state: ProcessorState, attempt: Callable[[], outcomes.StepOutcome], *, goes_on: bool = False
    ) -> outcomes.StepOutcome:
        """Attempt what was written down before; when it fails, write down that this process did not die of it.

        `goes_on`: the very same messages are tried again at once, so they stay written down.
        """
        try:
            outcome = attempt()
        except (OutboxError, DatabaseError):
            self._fresh.clear_in_flight(state)
            raise
        if isinstance(outcome, outcomes.Failed):
            if goes_on and failing.is_refusal(outcome.error, self._delivery.retry):
                return outcome
            self._fresh.clear_in_flight(state)
        return outcome

    def _in_transaction(
        self, lease: outcomes.HeldLease, request: StoreRequest | None, batch: Batch, finish: Finish | None = None
    ) -> outcomes.StepOutcome:
        effects = partial(self._effects.handle, batch)
        return self._runner.run(self._target.connection(), lease.epoch, request, effects, finish)

    def _deliver(self, state: ProcessorState, batch: Batch) -> outcomes.StepOutcome:
        """AtLeastOnce: the lease is checked right before, because what is handed over cannot be recalled."""
        lease = lease_of(state)
        if self._effects.are_remembered:  # with this batch, and no longer with those whose checkpoints are stored
            self._runner.flush_log(self._target.connection())
        under_way = state.begun and self._effects.is_under_way(batch)
        if not under_way and (told := self._fresh.find_loss(state, batch)) is not None:
            return told
        if not self._effects.are_inside:
            # Where the target lost what it had begun, it lost all behind it too: those come one by one, in their order.
            if batch.held or (state.begun and not under_way):
                return outcomes.Delivered(self._effects.deliver(batch, lease.epoch))
            return self._pipeline.deliver(state, batch)
        outcome = self._in_transaction(lease, None, batch)
        return outcomes.Delivered(outcome.count) if isinstance(outcome, outcomes.Stored) else outcome

    def _keeper(self, state: ProcessorState) -> Finish | None:
        """Return what holds a batch's messages in the transaction that passes them; None: there are none."""
        batch, decision, failed = state.batch, state.decision, state.failed
        if batch is None or not (batch.excluded or decision or failed):
            return None
        if decision is not None:
            places = self._held.places(batch) if batch.held else self._fresh.places(batch)
            failed = tuple(Failure(each.checkpoint, decision, each.key) for each in places)
        settle = self._fresh.settle_with(state, batch, (*batch.excluded, *(each.checkpoint for each in failed)))
        return lambda connection: settle(connection, batch, failed)

    def store(self, state: ProcessorState) -> outcomes.StepOutcome:
        """Store a checkpoint alone, in its own transaction."""
        delivered = state.batch if state.delivered else None
        new = state.cursor if delivered is None else delivered.examined
        if new is None:
            raise TransientError("nothing to store", reason=Reason.INTERNAL_ERROR)
        outcome = self._store(state, StoreRequest(lease_of(state), state.stored, new))
        if isinstance(outcome, outcomes.Stored) and delivered is not None:
            return replace(outcome, count=delivered.matched_count)
        return outcome

    def hold_batch(self, state: ProcessorState) -> outcomes.StepOutcome:
        """Pass the batch without handling it."""
        return self._store(state, self._fresh.request(state, batch_of(state)))

    def _store(self, state: ProcessorState, request: StoreRequest) -> outcomes.StepOutcome:
        return self._runner.run(self._target.connection(), request.lease.epoch, request, None, self._keeper(state))

    def confirm(self, state: ProcessorState) -> outcomes.StepOutcome:
        """Find out about a transaction whose connection broke."""
        return self._noted(self._fresh.confirm(state))

    def handle_held(self, state: ProcessorState) -> outcomes.StepOutcome:
        """Handle held messages, each of them written down before."""
        batch = batch_of(state)
        if batch.held[0].crash_count >= HELD_CRASHES:
            return outcomes.Failed(build_poison_error(batch.held[0].crash_count))
        goes_on = self._isolates and len(batch.held) > 1
        return self._answered(state, lambda: self._attempt_held(state, batch), goes_on=goes_on)

    def _attempt_held(self, state: ProcessorState, batch: Batch) -> outcomes.StepOutcome:
        lease, settle = lease_of(state), self._held.settle_with(state, batch)
        if self._transactional:
            outcome = self._in_transaction(lease, None, batch, lambda connection: settle(connection, batch, ()))
        else:
            try:
                outcome = self._deliver(state, batch)
            except MessagesFailedError as err:
                return self._sort_named_held(lease, batch, settle, err)
            if isinstance(outcome, outcomes.Rejected):
                return outcomes.OwnershipLost("the lease went before held messages were handed over")
            if isinstance(outcome, outcomes.Delivered):
                outcome = self._settle_alone(lease, settle, batch, ())
        return outcomes.HeldHandled(len(batch.held)) if isinstance(outcome, outcomes.Stored) else outcome

    def _settle_alone(
        self, lease: outcomes.HeldLease, settle: Settle, done: Batch, failed: tuple[Failure, ...]
    ) -> outcomes.StepOutcome:
        """Settle held messages in a transaction of their own, once their effects are done."""
        connection = self._target.connection()
        return self._runner.run(connection, lease.epoch, None, None, lambda on: settle(on, done, failed))

    def fail_held(self, state: ProcessorState) -> outcomes.StepOutcome:
        """Write down what becomes of the held message that failed alone."""
        batch, decision = batch_of(state), state.decision
        if decision is None:
            raise TransientError("nothing is decided about a held message", reason=Reason.INTERNAL_ERROR)
        return self._held.fail(state, (Failure(batch.held[0].checkpoint, decision),))

    def isolate(self, state: ProcessorState) -> outcomes.StepOutcome:
        """Find the messages of a batch that fail, let the others through and hold those, at once."""
        batch = batch_of(state)
        self._effects.spend(batch.matched_count)
        if batch.held:
            return self._answered(state, lambda: self._isolate_held(state, batch))
        return self._isolate_fresh(state, batch)

    def _isolate_fresh(self, state: ProcessorState, batch: Batch) -> outcomes.StepOutcome:
        lease, one = lease_of(state), self._transactional
        parts = _Parts(batch, self._fresh.places(batch), self._delivery, blocks=self._delivery.blocking is Blocks.KEY)
        everything = chain(batch.excluded, (place.checkpoint for place in parts.places))
        settle = self._fresh.settle_with(state, batch, everything)
        request = replace(self._fresh.request(state, batch), first=False) if one else None

        def effects(transaction: Transaction) -> Reached:
            self._try_parts(transaction, parts, state.block, FRESH_SECONDS)
            return Reached(replace(request, new=parts.done().examined) if request else None, parts.handled)

        if not one and (told := self._fresh.find_loss(state, batch)) is not None:
            return told
        keep: Finish | None = (lambda connection: settle(connection, parts.done(), parts.failed)) if one else None
        outcome = self._runner.run(self._target.connection(), lease.epoch, request, effects, keep)
        if not isinstance(outcome, outcomes.Stored):
            return outcome
        done = replace(parts.done(), matched_count=parts.handled)
        return outcomes.Isolated(done, parts.failed, parts.handled, parts.next_block, stored=one)

    def _isolate_held(self, state: ProcessorState, batch: Batch) -> outcomes.StepOutcome:
        lease, connection = lease_of(state), self._target.connection()
        blocks = self._delivery.blocking is not Blocks.NOTHING
        parts = _Parts(batch, self._held.places(batch), self._delivery, blocks=blocks)
        settle = self._held.settle_with(state, batch)

        def effects(transaction: Transaction) -> int:
            self._try_parts(transaction, parts, state.held_block, HELD_SECONDS)
            return parts.handled

        if self._transactional:
            outcome = self._runner.run(
                connection, lease.epoch, None, effects, lambda on: settle(on, parts.done(), parts.failed)
            )
        elif self._fresh.find_loss(state, batch) is not None:
            return outcomes.OwnershipLost("the lease went before held messages were handed over")
        else:
            outcome = self._runner.run(connection, lease.epoch, None, effects)
            if isinstance(outcome, outcomes.Stored):
                outcome = self._settle_alone(lease, settle, parts.done(), parts.failed)
        if not isinstance(outcome, outcomes.Stored):
            return outcome
        more = parts.tried < len(parts.places)
        return outcomes.HeldSorted(parts.handled, parts.failed, parts.next_block, more=more)

    def _sort_named(self, state: ProcessorState, batch: Batch, error: MessagesFailedError) -> outcomes.StepOutcome:
        """The target took all of a fresh batch but what it names: that is held with the checkpoint, which passes all.

        Also what it took behind a message of the same key that failed: nothing takes that back.

        Raises:
            MessagesFailedError: where what fails is not to be passed.

        """
        delivery = self._delivery
        passes = delivery.blocking is not Blocks.PARTITION and state.poison_search is None
        if not (passes and failing.are_refusals(error, delivery.retry)):
            raise error
        places = [place for place in self._fresh.places(batch) if place.checkpoint in error.failed]
        named = _find_blamed(places, delivery.blocking)
        alone = frozenset(named)
        behind = tuple(place.checkpoint for place in places if place not in alone)
        failed = _decide_failures([(place, error.failed[place.checkpoint]) for place in named], delivery)
        count = batch.matched_count - len(places)
        done = replace(batch, matched_count=count, excluded=(*batch.excluded, *behind))
        return outcomes.Isolated(done, failed, count, delivery.batch_limit, stored=False)

    def _sort_named_held(
        self, lease: outcomes.HeldLease, batch: Batch, settle: Settle, error: MessagesFailedError
    ) -> outcomes.StepOutcome:
        """The same for held messages: those taken are settled, and those named wait again, in one transaction."""
        if not failing.are_refusals(error, self._delivery.retry):
            raise error
        handled = tuple(each for each in batch.held if each.checkpoint not in error.failed)
        refused = [each for each in batch.held if each.checkpoint in error.failed]
        named = _find_blamed(refused, self._delivery.blocking)
        failed = _decide_failures([(each, error.failed[each.checkpoint]) for each in named], self._delivery)
        outcome = self._settle_alone(lease, settle, replace(batch, held=handled), failed)
        if not isinstance(outcome, outcomes.Stored):
            return outcome
        return outcomes.HeldSorted(len(handled), failed, self._delivery.batch_limit)

    def _try_parts(self, transaction: Transaction, parts: _Parts, block: int | None, seconds: float) -> None:
        """Handle the batch in parts; what no message is to blame for is raised.

        `block`: most messages to try at once at first, as the last batches taught; None: all of it failed.
        """
        target, settings = self._effects.inside, self._delivery.retry
        unmarked = replace(transaction, mark=None)
        connection, count = transaction.connection, len(parts.places)
        first = search_failed(count) if block is None else Search(count, block)
        seconds = min(seconds, self._part_seconds)
        in_time = within(seconds)
        find_all = self._effects.open_search(transaction, parts.batch, parts.places, seconds, blocks=parts.blocks)

        def handle(begin: int, end: int) -> None:
            part = take_part(parts.batch, parts.places, begin, end, parts.find_blocked(begin, end))
            if part.matched_count:
                target.handle(unmarked, part)

        def is_enough(found: Isolated) -> bool:
            parts.note(found)
            return in_time(found)

        def run() -> Isolated:
            return isolate(
                connection, first, handle, lambda error: failing.is_refusal(error, settings), is_enough,
                None if find_all is None else lambda search, most: find_all(search, parts.find_blocked(0, count), most),
            )  # fmt: skip

        parts.end(self._effects.limited(connection, run))


class _Parts:
    """The parts of one batch: what is tried, and what came of it."""

    def __init__(self, batch: Batch, places: Places, delivery: Delivery, *, blocks: bool) -> None:
        self.batch = batch
        self.places = places
        self.failed: tuple[Failure, ...] = ()
        """The messages that failed alone, and what becomes of them."""
        self.tried = self.handled = 0
        self.next_block = 1
        self.blocks = blocks
        self._delivery = delivery
        self._keys = places.keys
        self._blocked: set[str] = set()
        self._noted = 0
        self._waiting: tuple[int, ...] = ()

    def find_blocked(self, begin: int, end: int) -> frozenset[int]:
        """Return which of these wait behind one of their key that failed."""
        if not self._blocked:
            return frozenset()
        return frozenset(number for number in range(begin, end) if self._keys[number] in self._blocked)

    def note(self, found: Isolated) -> None:
        """Remember which keys are blocked by now."""
        if self.blocks:
            self._blocked.update(self._keys[each.index] for each in found.refused[self._noted :])
            self._noted = len(found.refused)

    def end(self, found: Isolated) -> None:
        """Keep what came of it."""
        refused = {each.index: each.error for each in found.refused}
        self.tried, self.next_block = found.at, found.next_block
        self._waiting = find_waiting(self._keys, found.at, refused) if self.blocks else ()
        self.handled = found.at - len(refused) - len(self._waiting)
        messages = self.batch.held or self.places
        failed = [(messages[number], error) for number, error in sorted(refused.items())]
        self.failed = _decide_failures(failed, self._delivery)

    def done(self) -> Batch:
        """Return the part of the batch that was tried; what waits behind a message that failed is excluded."""
        return take_part(self.batch, self.places, 0, self.tried, {*self._waiting})


def _decide_failures(failed: Sequence[tuple[Place | Held, OutboxError]], delivery: Delivery) -> tuple[Failure, ...]:
    """Say what becomes of messages that failed; the random shares of their waits are spread evenly."""

    def decide(message: Place | Held, error: OutboxError, chance: float) -> failing.FailureDecision:
        if isinstance(message, Held):
            return failing.decide_held_failure(error, message.attempts + 1, delivery, chance)
        return failing.decide_passed_failure(error, 1, delivery, chance)

    return tuple(
        Failure(message.checkpoint, decide(message, error, (order + 0.5) / len(failed)), message.key)
        for order, (message, error) in enumerate(failed)
    )


def _find_blamed(named: Sequence[_Keyed], blocks: Blocks) -> list[_Keyed]:
    """Return which of the named messages failed: of a key that blocks the first; others wait behind it, untried."""
    first = {each.key: each for each in reversed(named)}
    return [each for each in named if blocks is Blocks.NOTHING or first[each.key] is each]
