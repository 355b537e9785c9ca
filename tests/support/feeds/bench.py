"""What the contract suite of feeds asks of a database; the author of another database fills it and runs the suite.

A bench has one processor that is not partitioned, of cursor TransactionOrder, with at most `LIMIT` messages a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from outbox_core.ports import Feed, Settling
from outbox_core.processor.state import ProcessorState, Step, lease_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox_core.message import Batch
    from outbox_core.ports import OwnedUnit
    from outbox_core.processor.failing import Failure
    from outbox_core.processor.outcomes import HeldLease, StepOutcome
    from outbox_core.progress.checkpoint import Checkpoint

LIMIT: Final = 10


class Producer(Protocol):
    """One transaction of an application."""

    def insert(self, *names: str, key: str | None = None) -> None:
        """Store messages with these ids, of one key."""

    def commit(self) -> None:
        """Make them visible."""

    def roll_back(self) -> None:
        """Undo them; their positions stay unused."""


class FreshSettling(Settling, Protocol):
    """What the engine asks of the settling of fresh batches besides."""

    def find_loss(self, state: ProcessorState, batch: Batch) -> StepOutcome | None:
        """Say that the lease went, right before a batch is handed over that cannot be recalled."""

    def confirm(self, state: ProcessorState) -> StepOutcome:
        """Find out what became of the transaction in the state's doubt."""


class HeldMessages(Feed, Settling, Protocol):
    """Held messages are found and acknowledged by one object; there is no checkpoint to store with them."""

    def fail(self, state: ProcessorState, failed: tuple[Failure, ...]) -> StepOutcome:
        """Write down what becomes of one that failed alone."""


@dataclass
class Owner:
    """What one process uses that has the lease, and what it knows: the state after the step LOAD."""

    state: ProcessorState
    feed: Feed
    settling: FreshSettling
    held: HeldMessages
    unit: OwnedUnit

    def go_on(self, examined: Checkpoint) -> None:
        """Know that a batch was stored."""
        self.state = self.state._replace(stored=examined, cursor=examined)


class Bench(Protocol):
    """A database with one outbox and one processor."""

    def begin(self) -> Producer:
        """Begin a producer's transaction; it takes its transaction id with its first message."""

    def own(self, *, loads: bool = True) -> Owner:
        """Take the lease as a new process, from its holder if there is one; as a rule load what is stored."""

    def end_lease(self) -> None:
        """Let the lease be over by the database's clock; no process has asked for it yet."""

    def load(self, owner: Owner) -> Checkpoint | None:
        """Load under the owner's lease, in a transaction, as `OwnedUnit.load` says; None: the lease is not its own."""

    def handle(self, owner: Owner, batch: Batch, failed: tuple[Failure, ...] = ()) -> StepOutcome:
        """Handle and acknowledge a batch, fresh or of held messages, in one transaction.

        There is an effect for each message that is not in `failed`.
        """

    def overwrite(self, pair: Checkpoint | None) -> None:
        """Change the stored checkpoint as a program does that has no lease; None deletes it."""

    def stored(self) -> Checkpoint | None:
        """Return the stored checkpoint."""

    def effects(self) -> list[str]:
        """Return the ids of the messages whose effects are committed, in order."""


def loaded(lease: HeldLease, pair: Checkpoint) -> ProcessorState:
    """Return the state of an owner that has just loaded its checkpoint."""
    return ProcessorState(Step.FETCH, 0.0, lease=lease, stored=pair, cursor=pair)


def handle_with(
    run: Callable[..., StepOutcome],
    owner: Owner,
    batch: Batch,
    failed: tuple[Failure, ...],
    write: Callable[[Any, str], None],
) -> StepOutcome:
    """Handle and acknowledge a batch as the engine does.

    Args:
        run: a transaction: it is given the epoch, what to store, what makes the effects, and what comes last.
        owner: whose state names the lease.
        batch: fresh, or of held messages.
        failed: what becomes of those that failed.
        write: makes a message's effect on the transaction's connection.

    """
    settling = owner.held if batch.held else owner.settling
    out = {each.checkpoint for each in failed}
    request = settling.request(owner.state, batch)
    settle = settling.settle_with(owner.state, batch, (*batch.excluded, *out))

    def make_effects(transaction: Any) -> int:
        handled = [message.message_id for message in batch if message.checkpoint not in out]
        for name in handled:
            write(transaction.connection, name)
        return len(handled)

    return run(lease_of(owner.state).epoch, request, make_effects, lambda connection: settle(connection, batch, failed))
