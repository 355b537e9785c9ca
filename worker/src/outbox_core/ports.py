"""What the worker's loop asks of the world: the shapes that adapters fill. No adapter is imported here.

Two ports. Towards the database: a `Feed` finds batches, a `Settling` acknowledges them (the fence is there and nowhere
else), an `OwnedUnit` says how a mode owns what it reads. Towards the outside: a `Target` takes what batches hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from outbox_core.message import Batch
    from outbox_core.part import Places
    from outbox_core.processor.failing import Failure
    from outbox_core.processor.isolation import Found, Search
    from outbox_core.processor.outcomes import HeldLease, StepOutcome
    from outbox_core.processor.state import ProcessorState
    from outbox_core.progress.checkpoint import Checkpoint

    Settle = Callable[[Any, Batch, tuple[Failure, ...]], StepOutcome | None]
    """Called last in the open transaction, with its connection, the part of the batch that was tried and the messages
    that failed. None: acknowledged. Else the transaction is rolled back, and this is the outcome."""
    GoOn = Callable[[Search, Collection[int], int], Found]
    """Goes on with a search: it tries part after part, each in a subtransaction.

    It is given how far the search is, the numbers of messages that wait behind one of their key, and how many parts may
    be kept at most. Must be called between `SAVEPOINT outbox_part` and its release: what got through is kept when a
    later part is undone. It raises OutboxError where what happened is no message's fault."""


class Supply(Protocol):
    """What is told to that which finds batches, before it is asked for any. What inherits from it needs none of it."""

    def check(self) -> None:
        """Look, before anything is connected, whether it can work at all.

        Raises:
            ConfigurationError: it cannot.

        """
        return  # without a statement it would count as abstract

    def note_crash(self) -> None:
        """Called when connected to a server that recovered from a crash: what was prepared before means nothing."""
        return

    def await_ready(self) -> None:
        """Wait, before the lease is asked for, until batches can be prepared.

        Raises:
            OutboxError: they cannot.

        """
        return


class Feed(Supply, Protocol):
    """One supply of batches of one owned unit. It reads, and stores nothing."""

    def fetch(self, state: ProcessorState) -> StepOutcome:
        """Find the next batch after the state's cursor; `Fetched`, or what is in its way.

        Raises:
            OutboxError: it could not be read.

        """

    def note_stored(self, stored: Checkpoint) -> None:
        """Called when a batch of this supply was handled and its checkpoint is committed."""
        del stored


class Settling(Protocol):
    """Acknowledges the batches of one supply, in transactions of the checkpoint's database."""

    def request(self, state: ProcessorState, batch: Batch) -> Any | None:
        """Return the checkpoint to store with the batch, and under which lease; None: the supply has none."""

    def settle_with(self, state: ProcessorState, batch: Batch, pairs: Iterable[Checkpoint]) -> Settle:
        """Return what settles the batch in the transaction of its effects; called before that begins.

        `pairs` are those of its messages that may have to be held.
        """

    def places(self, batch: Batch) -> Places:
        """Return where the messages of the batch are that are to be handled, with their keys, in order."""


class OwnedUnit(Protocol):
    """How a mode owns what it reads, beyond claim and lease. What inherits from it is all of a processor."""

    def after_claim(self, connection: Any) -> None:
        """Called when the claim was granted.

        Raises:
            ConfigurationError: the processor is not as the resource asks for.

        """
        del connection

    def check_mode(self, connection: Any) -> None:
        """Look, before anything is owned, whether what is stored is of this mode and key; must be cheap to repeat.

        Raises:
            ConfigurationError: `PartitionsDiffer`: it is not.

        """
        del connection

    def after_refusal(self, connection: Any) -> StepOutcome | None:
        """Say what the refusal of the lease means; None: another process has it."""
        del connection
        return None

    def is_stored(self, connection: Any) -> bool:
        """Say whether anything is stored, or was by the contract's functions, from which an owner would go on.

        Raises:
            OutboxError: it was changed or deleted past the contract.

        """
        del connection
        return True

    def before_load(self, connection: Any) -> None:
        """Look, before that transaction, for what takes long to find."""
        del connection

    def load(self, connection: Any, lease: HeldLease) -> Any | None:
        """Return what is stored, in the open transaction; the first owner writes down where to start.

        Raises:
            OutboxError: what is stored is not what the resource asks for.

        """

    def after_load(self) -> StepOutcome | None:
        """Say what was learned while loading; None: nothing."""
        return None


class AnyTarget(Protocol):
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


@runtime_checkable
class InTransaction(AnyTarget, Protocol):
    """A target whose effects happen in a transaction of the checkpoint's database."""

    needs_payload: bool
    """False: the batch stays in the database and only its bounds travel."""

    def handle(self, transaction: Any, batch: Batch) -> int:
        """Apply the batch inside the open transaction, on its connection; return the messages handled.

        Raises:
            OutboxError: the batch was not applied; the caller rolls back.

        """


@runtime_checkable
class SearchTarget(InTransaction, Protocol):
    """A transaction target that finds the messages of a batch that fail with one call, not part by part."""

    def open_search(
        self, transaction: Any, batch: Batch, places: Places, seconds: float, *, blocks: bool
    ) -> GoOn | None:
        """Return what goes on with a search of this batch; None: its parts can only be tried one by one.

        `places` are those of its messages, in order. One call goes on for so many seconds, or until one message is
        behind. `blocks`: later messages of a key wait behind one that failed.
        """


@dataclass(frozen=True, slots=True)
class OwnerStart:
    """What a target with transactions of its own must know when an owner starts.

    Attributes:
        database: uuid of the checkpoint's database: two of them may have a processor of the same name.
        partition: that is owned; 0 where the processor is not partitioned.
        epoch: of the lease: a later owner has a higher one.
        checkpoint: that the row has; None: there is no row yet, so nothing was handled under it.
        moved: number of the last audit log entry by which a user moved the checkpoint, 0: none; the latest is highest.

    """

    database: str
    partition: int
    epoch: int
    checkpoint: Checkpoint | None
    moved: int = 0


@runtime_checkable
class OutsideTransaction(AnyTarget, Protocol):
    """A target outside the database: what was handed over cannot be recalled."""

    needs_payload: bool = True
    """The receiver cannot read the database."""
    has_own_transactions: bool = False
    """True: `begin_owner` is called for each owner, before anything is delivered or passed under its epoch."""

    def shut_out(self, database: str, partition: int, epoch: int) -> float:
        """Begin, or go on, to shut former owners of a partition out, and do not wait for it.

        So several partitions do it at the same time, and `begin_owner` has less to wait for. Return after how many
        seconds to call again; 0: it is done. `database` is the uuid of the checkpoint's database.

        Raises:
            OutboxError: it cannot be done.

        """
        del database, partition, epoch
        return 0.0

    def begin_owner(self, start: OwnerStart) -> None:
        """Shut former owners of the partition out, and learn what they delivered without storing it.

        Raises:
            OutboxError: that is not known yet; nothing may be handled before it is.

        """
        del start

    def deliver(self, batch: Batch, epoch: int) -> int:
        """Hand the batch over and return when all of it is confirmed; return the messages handled.

        It has at least one message. `epoch` is that of the lease under which it is delivered, for the receiver's books.

        Raises:
            MessagesFailedError: the receiver took all messages of the batch but those named.
            HandlerError: the only message of the batch failed.
            OutboxError: not everything is confirmed; some of it may have been delivered.

        """


@runtime_checkable
class PipelinedTarget(OutsideTransaction, Protocol):
    """A target outside the database that takes more batches before the first one is stored."""

    most_under_way: int
    """Batches of a partition that it may have begun to take and that are not stored."""
    awaits_confirms: bool
    """It begins with a batch only when the one before is confirmed: no message may overtake one that is refused."""

    def begin(self, batch: Batch, epoch: int) -> None:
        """Begin to take a batch, without waiting for what becomes of it.

        `deliver` of the same batch comes later, in the order in which they were begun, unless one of them failed: what
        was begun and is not delivered is forgotten, but for what the receiver took of it.

        Raises:
            OutboxError: the receiver cannot be reached, or says that it takes nothing. Nothing begun is known any more.

        """

    def is_under_way(self, batch: Batch) -> bool:
        """Say whether a batch that was begun still is: a fault at another partition's batch ends those of all."""


Target = InTransaction | OutsideTransaction
