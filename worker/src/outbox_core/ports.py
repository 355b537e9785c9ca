"""What the worker's loop asks of the world: the shapes that adapters fill. No adapter is imported here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from outbox_core.checkpoint import Checkpoint
    from outbox_core.isolation import Found, Search
    from outbox_core.message import Batch


class Target(Protocol):
    """Where messages go; one instance lives as long as the process and reconnects by itself.

    A target that inherits from it has nothing that changes and nothing open, unless it says so.
    """

    def check(self) -> None:
        """Look whether the target can work at all, before anything is owned; must be cheap to repeat.

        Raises:
            OutboxError: it cannot; the message says what to do.

        """

    def changed(self) -> bool:
        """Say whether what the target is made of (a handler's file) changed since it was last used."""
        return False

    def keep_alive(self) -> None:
        """Called every few seconds while nothing is handled: heartbeats of an idle connection."""
        return  # without a statement it would count as abstract

    def close(self) -> None:
        """Give everything back; never raises."""
        return


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
class SearchTarget(TransactionTarget, Protocol):
    """A transaction target that finds the messages of a batch that fail with one call, not part by part."""

    def open_search(
        self, transaction: Any, batch: Batch, pairs: Sequence[Checkpoint], keys: Sequence[str] | None, seconds: float
    ) -> Callable[[Search, Collection[int], int], Found] | None:
        """Return what goes on with a search: it tries part after part, each in a subtransaction.

        It is given how far the search is, the numbers of messages that wait behind one of their key, and how many parts
        may be kept at most. Must be called between `SAVEPOINT outbox_part` and its release: what got through is kept
        when a later part is undone. It raises OutboxError where what happened is no message's fault.

        Args:
            transaction: the open one.
            batch: that is searched.
            pairs: of its messages, in order.
            keys: of its messages, where later ones of a key wait behind one that failed; None: none wait.
            seconds: so long one call goes on, or until one message is behind.

        Returns:
            None: parts of this batch can only be tried one by one.

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
