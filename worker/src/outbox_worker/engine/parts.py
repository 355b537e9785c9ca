"""A batch of which some messages fail: the parts that are tried, what came of each, and what becomes of the messages.

It decides nothing: `outbox_core.processor.isolation`, `part` and `failing` do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from outbox_core.message import Held
from outbox_core.part import Place, Places, find_waiting, take_part
from outbox_core.processor import failing
from outbox_core.processor.failing import Failure
from outbox_core.spec import Blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox_core.errors import OutboxError
    from outbox_core.message import Batch
    from outbox_core.spec import Delivery
    from outbox_worker.postgres.transactions.savepoints import Isolated

_Keyed = TypeVar("_Keyed", Place, Held)


class Parts:
    """The parts of one batch: what is tried, and what came of it."""

    def __init__(self, batch: Batch, places: Places, *, blocks: bool) -> None:
        self.batch = batch
        self.places = places
        self.refused: dict[int, OutboxError] = {}
        self.tried = self.handled = 0
        self.next_block = 1
        self.blocks = blocks
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
        self.refused = {each.index: each.error for each in found.refused}
        self.tried, self.next_block = found.at, found.next_block
        self._waiting = find_waiting(self._keys, found.at, self.refused) if self.blocks else ()
        self.handled = found.at - len(self.refused) - len(self._waiting)

    def failures(self, delivery: Delivery) -> tuple[Failure, ...]:
        """Say what becomes of each message that failed."""
        messages = self.batch.held or self.places
        return decide_failures([(messages[number], error) for number, error in sorted(self.refused.items())], delivery)

    def done(self) -> Batch:
        """Return the part of the batch that was tried; what waits behind a message that failed is excluded."""
        return take_part(self.batch, self.places, 0, self.tried, {*self._waiting})


def decide_failures(failed: Sequence[tuple[Place | Held, OutboxError]], delivery: Delivery) -> tuple[Failure, ...]:
    """Say what becomes of messages that failed; the random shares of their waits are spread evenly."""

    def decide(message: Place | Held, error: OutboxError, chance: float) -> failing.FailureDecision:
        if isinstance(message, Held):
            return failing.decide_held_failure(error, message.attempts + 1, delivery, chance)
        return failing.decide_passed_failure(error, 1, delivery, chance)

    return tuple(
        Failure(message.checkpoint, decide(message, error, (order + 0.5) / len(failed)), message.key)
        for order, (message, error) in enumerate(failed)
    )


def find_blamed(named: Sequence[_Keyed], blocks: Blocks) -> list[_Keyed]:
    """Return which of the named messages failed: of a key that blocks the first; others wait behind it, untried."""
    first = {each.key: each for each in reversed(named)}
    return [each for each in named if blocks is Blocks.NOTHING or first[each.key] is each]
