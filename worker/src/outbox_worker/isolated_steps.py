"""The step that finds the messages of a batch that fail, lets the others through and holds those, at once.

Mixed into the steps of a partition by `outbox_worker.steps`. The batch, fresh or of held messages, was refused as a
whole (or others were lately); now it is handled in parts under savepoints, in one transaction with what becomes of the
messages that failed alone and with the checkpoint. Where effects and checkpoint are not one transaction (AtLeastOnce),
the checkpoint follows. It decides nothing: `outbox_core.isolation`, `part` and `failing` do.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from typing_extensions import override

from outbox_core import failing, outcomes
from outbox_core.errors import TransientError
from outbox_core.failing import Failure
from outbox_core.isolation import Search, search_failed
from outbox_core.message import Held
from outbox_core.part import Place, Sorted, sort_tried, take_part
from outbox_core.ports import SearchTarget
from outbox_core.report import Reason
from outbox_core.spec import Blocks, Guarantee
from outbox_worker.held_steps import HeldSteps, lease_of
from outbox_worker.isolation import isolate
from outbox_worker.postgres import holding
from outbox_worker.shutdown import Interrupted
from outbox_worker.transaction import Reached

if TYPE_CHECKING:
    from collections.abc import Sequence

    import psycopg

    from outbox_core.errors import MessagesFailedError, OutboxError
    from outbox_core.message import Batch
    from outbox_core.ports import TransactionTarget
    from outbox_core.spec import Delivery
    from outbox_core.state import ProcessorState
    from outbox_worker.isolation import Isolated
    from outbox_worker.transaction import Transaction

FRESH_SECONDS: Final = 0.5
"""Then what was found is committed, and the rest is another batch: nothing waits longer for what fails."""
HELD_SECONDS: Final = 0.3
"""The same for messages that are tried again, which take a turn of the fresh ones' time."""
_SHARE: Final = 4
"""Of delivery.timeout, which bounds all of it, this part at most."""
_Keyed = TypeVar("_Keyed", Place, Held)


class _Parts:
    """The parts of one batch: what is tried, and what came of it."""

    def __init__(self, batch: Batch, places: tuple[Place, ...], *, blocks: bool) -> None:
        self.batch = batch
        self.places = places
        self.sorted = Sorted((), ())
        self.refused: dict[int, OutboxError] = {}
        self.tried = 0
        self.next_block = 1
        self._blocks = blocks
        self._keys = tuple(each.key for each in places)
        self._blocked: set[str] = set()
        self._noted = 0

    @property
    def blocking_keys(self) -> tuple[str, ...] | None:
        """The keys of all messages, where later ones of a key wait behind one that failed."""
        return self._keys if self._blocks else None

    def waiting(self, begin: int, end: int) -> frozenset[int]:
        """Return which of these wait behind one of their key that failed."""
        if not self._blocked:
            return frozenset()
        return frozenset(number for number in range(begin, end) if self._keys[number] in self._blocked)

    def note(self, found: Isolated) -> None:
        """Remember which keys are blocked by now."""
        if self._blocks:
            self._blocked.update(self._keys[each.index] for each in found.refused[self._noted :])
            self._noted = len(found.refused)

    def end(self, found: Isolated) -> None:
        """Keep what came of it."""
        self.refused = {each.index: each.error for each in found.refused}
        self.tried, self.next_block = found.at, found.next_block
        self.sorted = sort_tried(self._keys, found.at, self.refused, blocks=self._blocks)

    def failures(self, delivery: Delivery) -> tuple[Failure, ...]:
        """Say what becomes of each message that failed."""
        messages = self.batch.held or self.places
        return _failures([(messages[number], error) for number, error in sorted(self.refused.items())], delivery)

    def done(self) -> Batch:
        """Return the part of the batch that was tried; what waits behind a message that failed is excluded."""
        return take_part(self.batch, self.places, 0, self.tried, {*self.sorted.waiting})


class IsolatedSteps(HeldSteps):
    """What `Steps` does with a batch of which some messages fail."""

    _timeout: float

    def _isolate(self, state: ProcessorState) -> outcomes.StepOutcome:
        batch = state.batch
        if batch is None:
            raise TransientError("no batch is in hand", reason=Reason.INTERNAL_ERROR)
        if batch.held:
            return self._answered(state, lambda: self._isolate_held(state, batch))
        return self._isolate_fresh(state, batch)

    def _isolate_fresh(self, state: ProcessorState, batch: Batch) -> outcomes.StepOutcome:
        lease, connection = lease_of(state), self._connection()
        delivery = self._context.config.delivery
        parts = _Parts(batch, self._places(batch), blocks=delivery.blocking is Blocks.KEY)
        # Here, not in the transaction, which would be idle while another database is read.
        everything = (*batch.excluded, *(place.checkpoint for place in parts.places))
        carried = self._picked(batch, everything) if self._context.databases.has_remote_target else None
        one = self._context.config.guarantee is Guarantee.TRANSACTIONAL
        request = replace(self._request(state, batch), first=False) if one else None
        failed: tuple[Failure, ...] = ()

        def effects(transaction: Transaction) -> Reached:
            nonlocal failed
            self._try_parts(transaction, parts, _search(len(parts.places), state.block), FRESH_SECONDS)
            failed = parts.failures(delivery)
            return Reached(parts.done().examined, len(parts.sorted.handled))

        def keep(connection: psycopg.Connection[Any]) -> outcomes.StepOutcome | None:
            excluded = parts.done().excluded
            if not (excluded or failed):
                return None
            rows = carried or self._picked(batch, (*excluded, *(each.checkpoint for each in failed)))
            why = holding.hold(connection, self._context.key, lease, rows, excluded=excluded, failed=failed)
            return None if why is None else outcomes.OwnershipLost(why)

        if not one and (told := self._find_loss(state, batch)) is not None:
            return told
        outcome = self._runner.run(connection, lease, request, effects, keep if one else None)
        if not isinstance(outcome, outcomes.Stored):
            return outcome
        done = parts.done()
        done = replace(done, matched_count=len(parts.sorted.handled))
        return outcomes.Isolated(done, failed, len(parts.sorted.handled), parts.next_block, stored=one)

    def _isolate_held(self, state: ProcessorState, batch: Batch) -> outcomes.StepOutcome:
        lease, connection = lease_of(state), self._connection()
        delivery = self._context.config.delivery
        parts = _Parts(batch, self._places(batch), blocks=delivery.blocking is not Blocks.NOTHING)
        failed: tuple[Failure, ...] = ()

        def effects(transaction: Transaction) -> int:
            nonlocal failed
            self._try_parts(transaction, parts, _search(len(parts.places), state.held_block), HELD_SECONDS)
            failed = parts.failures(delivery)
            return len(parts.sorted.handled)

        def settle(connection: psycopg.Connection[Any]) -> outcomes.StepOutcome | None:
            handled = [batch.held[number] for number in parts.sorted.handled]
            return self._settle_sorted(connection, lease, handled, failed)

        if self._context.config.guarantee is Guarantee.TRANSACTIONAL:
            outcome = self._runner.run(connection, lease, None, effects, settle)
        elif self._find_loss(state, batch) is not None:
            return outcomes.OwnershipLost("the lease went before held messages were handed over")
        else:
            outcome = self._runner.run(connection, lease, None, effects)
            if isinstance(outcome, outcomes.Stored):
                outcome = self._runner.run(connection, lease, None, None, settle)
        if not isinstance(outcome, outcomes.Stored):
            return outcome
        return outcomes.HeldSorted(
            len(parts.sorted.handled), failed, parts.next_block, more=parts.tried < len(parts.places)
        )

    def _sort_named(self, state: ProcessorState, batch: Batch, error: MessagesFailedError) -> outcomes.StepOutcome:
        """The target took all of a fresh batch but what it names: that is held with the checkpoint, which passes all.

        Also what it took behind a message of the same key that failed: nothing takes that back.

        Raises:
            MessagesFailedError: where what fails is not to be passed.

        """
        delivery = self._context.config.delivery
        if delivery.blocking is Blocks.PARTITION or state.poison_search is not None or not self._are_refusals(error):
            raise error
        places = [place for place in self._places(batch) if place.checkpoint in error.failed]
        named = _blamed(places, delivery.blocking)
        alone = frozenset(named)
        behind = tuple(place.checkpoint for place in places if place not in alone)
        failed = _failures([(place, error.failed[place.checkpoint]) for place in named], delivery)
        count = batch.matched_count - len(places)
        done = replace(batch, matched_count=count, excluded=(*batch.excluded, *behind))
        return outcomes.Isolated(done, failed, count, delivery.batch_limit, stored=False)

    @override
    def _sort_named_held(
        self, batch: Batch, lease: outcomes.HeldLease, error: MessagesFailedError
    ) -> outcomes.StepOutcome:
        """The same for held messages: those taken are settled, and those named wait again, in one transaction."""
        if not self._are_refusals(error):
            raise error
        delivery = self._context.config.delivery
        handled = [each for each in batch.held if each.checkpoint not in error.failed]
        named = _blamed([each for each in batch.held if each.checkpoint in error.failed], delivery.blocking)
        failed = _failures([(each, error.failed[each.checkpoint]) for each in named], delivery)

        def settle(connection: psycopg.Connection[Any]) -> outcomes.StepOutcome | None:
            return self._settle_sorted(connection, lease, handled, failed)

        outcome = self._runner.run(self._connection(), lease, None, None, settle)
        if not isinstance(outcome, outcomes.Stored):
            return outcome
        return outcomes.HeldSorted(len(handled), failed, delivery.batch_limit, more=False)

    def _are_refusals(self, error: MessagesFailedError) -> bool:
        settings = self._context.config.delivery.retry
        return all(failing.is_refusal(each, settings) for each in error.failed.values())

    def _settle_sorted(
        self,
        connection: psycopg.Connection[Any],
        lease: outcomes.HeldLease,
        handled: Sequence[Held],
        failed: tuple[Failure, ...],
    ) -> outcomes.StepOutcome | None:
        settled = holding.settle(connection, self._context.key, lease, handled)
        left = holding.fail(connection, self._context.key, lease, failed)
        if settled < 0 or left < 0:
            return outcomes.OwnershipLost(holding.NOT_OURS)
        return None if (settled, left) == (len(handled), len(failed)) else outcomes.HeldChanged()

    def _try_parts(self, transaction: Transaction, parts: _Parts, search: Search, seconds: float) -> None:
        """Handle the batch in parts; what no message is to blame for is raised."""
        target = cast("TransactionTarget", self._context.target)
        unmarked = replace(transaction, mark=None)
        connection, settings = transaction.connection, self._context.config.delivery.retry
        until = time.monotonic() + min(seconds, self._timeout / _SHARE)
        find_all, count = None, len(parts.places)
        if isinstance(target, SearchTarget):
            pairs = [place.checkpoint for place in parts.places]
            left = max(0.0, until - time.monotonic())
            find_all = target.open_search(transaction, parts.batch, pairs, parts.blocking_keys, left)

        def handle(begin: int, end: int) -> None:
            part = take_part(parts.batch, parts.places, begin, end, parts.waiting(begin, end))
            if part.matched_count:
                target.handle(unmarked, part)

        def is_enough(found: Isolated) -> bool:
            parts.note(found)
            return time.monotonic() >= until

        def run() -> Isolated:
            return isolate(
                connection, search, handle, lambda error: failing.is_refusal(error, settings), is_enough,
                None if find_all is None else lambda search, most: find_all(search, parts.waiting(0, count), most),
            )  # fmt: skip

        self._context.ownership.enter(connection)
        try:
            parts.end(self._context.shutdown.limited(self._timeout, run))
        except Interrupted as err:
            raise err.as_error("the batch") from err
        finally:
            self._context.ownership.leave()

    def _find_loss(self, state: ProcessorState, batch: Batch) -> outcomes.Rejected | None:
        raise NotImplementedError


def _failures(failed: Sequence[tuple[Place | Held, OutboxError]], delivery: Delivery) -> tuple[Failure, ...]:
    """Say what becomes of messages that failed; the random shares of their waits are spread evenly."""

    def decide(message: Place | Held, error: OutboxError, chance: float) -> failing.Verdict:
        if isinstance(message, Held):
            return failing.decide_held_verdict(error, message.attempts + 1, delivery, chance)
        return failing.decide_passed_verdict(error, 1, delivery, chance)

    return tuple(
        Failure(message.checkpoint, decide(message, error, (order + 0.5) / len(failed)), message.key)
        for order, (message, error) in enumerate(failed)
    )


def _blamed(named: Sequence[_Keyed], blocks: Blocks) -> list[_Keyed]:
    """Return which of the named messages failed: of a key that blocks the first; others wait behind it, untried."""
    first = {each.key: each for each in reversed(named)}
    return [each for each in named if blocks is Blocks.NOTHING or first[each.key] is each]


def _search(count: int, block: int | None) -> Search:
    """Begin with what the last batches taught, or with all of it having failed."""
    return search_failed(count) if block is None else Search(count, block)
