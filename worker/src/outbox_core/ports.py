"""What the worker's loop asks of the world: the shapes that adapters fill. No adapter is imported here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outbox_core.checkpoint import Checkpoint
    from outbox_core.message import Batch


class Target(Protocol):
    """Where messages go; one instance lives as long as the process and reconnects by itself."""

    def check(self) -> None:
        """Look whether the target can work at all, before anything is owned; must be cheap to repeat.

        Raises:
            OutboxError: it cannot; the message says what to do.

        """

    def changed(self) -> bool:
        """Say whether what the target is made of (a handler's file) changed since it was last used."""

    def keep_alive(self) -> None:
        """Called every few seconds while nothing is handled: heartbeats of an idle connection."""

    def close(self) -> None:
        """Give everything back; never raises."""


class TransactionTarget(Target, Protocol):
    """A target whose effects happen in a transaction of the source database."""

    @property
    def needs_payload(self) -> bool:
        """False: the batch stays in the database and only its bounds travel."""

    def handle(self, transaction: Any, batch: Batch) -> int:
        """Apply the batch inside the open transaction, on its connection; return the messages handled.

        Raises:
            OutboxError: the batch was not applied; the caller rolls back.

        """


@runtime_checkable
class PartsTarget(TransactionTarget, Protocol):
    """A transaction target that can try several parts of a batch with one call, which is faster than one by one."""

    def open_parts(
        self, transaction: Any, batch: Batch
    ) -> Callable[[Sequence[tuple[Checkpoint, Checkpoint]]], int] | None:
        """Return what applies one part of a batch after another, each in a subtransaction, until one is refused.

        It is given, of each part, the last message before it (or the pair before all) and its own last message; it
        returns how many parts were not refused. Must be called between `SAVEPOINT outbox_part` and its release: what
        got through is kept when a later part is undone. It raises OutboxError where what happened is no message's
        fault; the caller rolls back.

        Args:
            transaction: the open one.
            batch: of which the parts are; None is returned where its parts can only be tried one by one.

        """


class BrokerTarget(Target, Protocol):
    """A target outside the database: what was handed over cannot be recalled."""

    def deliver(self, batch: Batch, epoch: int) -> int:
        """Hand the batch over and return when all of it is confirmed; return the messages handled.

        Args:
            batch: at least one message.
            epoch: of the lease under which it is delivered, for the receiver's books.

        Raises:
            OutboxError: not everything is confirmed; some of it may have been delivered.

        """
