"""A database in memory: messages with transaction ids, a checkpoint, a lease, held messages; and its transactions.

All of it is one thread's: a transaction happens when it commits, and nothing can come between its fence and its commit.
The feeds over it are in `memory_feeds.py`.
"""

from __future__ import annotations

import time
from bisect import bisect_right, insort
from dataclasses import dataclass, field, replace
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from outbox_core.errors import OutboxError, TransientError
from outbox_core.message import Message
from outbox_core.processor import outcomes
from outbox_core.processor.failing import Action
from outbox_core.progress.checkpoint import BEGINNING, Checkpoint, StoreAnswer
from outbox_core.report import Reason
from outbox_worker.postgres.transactions.transaction import Reached, StoreRequest, Transaction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from uuid import UUID

    from outbox_core.processor.failing import Failure

_FIRST_ID: Final = 700
_place = attrgetter("checkpoint")


class LostError(TransientError):
    """The session broke: its open transaction is rolled back, or its COMMIT got no answer."""

    reason = Reason.DATABASE_UNAVAILABLE


@dataclass(frozen=True)
class HeldRow:
    """A message that failed and is due at a time (it is the first of its key), or that waits behind one."""

    message: Message
    attempts: int = 0
    due: float = inf
    blocks: bool = True
    behind: bool = True

    @property
    def place(self) -> Checkpoint:
        """Where it is in the outbox."""
        return self.message.checkpoint

    @property
    def key(self) -> str:
        """What must be handled in order with it."""
        return key_of(self.message)


@dataclass
class MemoryDatabase:
    """What is committed, and the transactions of producers that are in progress."""

    checkpoint: Checkpoint | None = None
    lease: outcomes.HeldLease | None = None
    alive: bool = False
    """The lease is not over."""
    held: dict[Checkpoint, HeldRow] = field(default_factory=dict)
    dead: dict[Checkpoint, HeldRow] = field(default_factory=dict)
    effects: list[str] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    """Those that are committed, in order."""
    in_progress: set[int] = field(default_factory=set)
    last_id: int = _FIRST_ID
    last_position: int = 0
    clock: Callable[[], float] = time.monotonic

    def read(self, after: Checkpoint, limit: int) -> list[Message]:
        """Return messages after a checkpoint: none of a transaction in progress, and none that sorts after one."""
        high_water_mark = Checkpoint(min(self.in_progress, default=self.last_id + 1), 0)
        begin = bisect_right(self.messages, after, key=_place)
        return self.messages[begin : min(begin + limit, bisect_right(self.messages, high_water_mark, key=_place))]

    def acquire(self, token: UUID) -> outcomes.HeldLease | None:
        """Give the lease under a new epoch, unless another process has it."""
        if self.lease is not None and self.alive and self.lease.token != token:
            return None
        self.lease = outcomes.HeldLease(0, 1 if self.lease is None else self.lease.epoch + 1, token)
        self.alive = True
        return self.lease

    def is_owner(self, lease: outcomes.HeldLease) -> bool:
        """Whether the lease is the live one."""
        return self.alive and lease == self.lease

    def answer(self, request: StoreRequest) -> StoreAnswer:
        """Say what the contract answers to a request to store; it stores nothing."""
        stored, new, expected = self.checkpoint, request.new, request.expected
        if expected is not None and new <= expected:
            msg = f"a checkpoint never moves back: {new} is not after {expected}"
            raise ValueError(msg)
        if not self.is_owner(request.lease):
            return StoreAnswer.NOT_OWNER
        if stored == new:
            return StoreAnswer.IGNORED
        if stored is None:
            return StoreAnswer.STORED if expected is None else StoreAnswer.OLDER
        if stored == expected:
            return StoreAnswer.STORED
        return StoreAnswer.AHEAD if expected is None or stored > expected else StoreAnswer.OLDER

    @property
    def blocked(self) -> set[str]:
        """The keys whose later messages must wait."""
        return {row.key for row in (*self.held.values(), *self.dead.values()) if row.blocks}

    def hold(self, messages: Iterable[Message]) -> None:
        """Hold messages behind others of their keys."""
        for message in messages:
            self.held[message.checkpoint] = HeldRow(message)
        self._free_keys()

    def fail(self, message: Message, failure: Failure) -> None:
        """Write down what becomes of a message that failed."""
        decision = failure.decision
        due = inf if decision.wait is None else self.clock() + decision.wait
        row = HeldRow(message, decision.attempts, due, blocks=decision.blocks, behind=False)
        self.held.pop(row.place, None)
        if decision.action is not Action.SKIP:
            place = self.held if decision.action is Action.HOLD else self.dead
            place[row.place] = row
        self._free_keys()

    def let_go(self, places: Iterable[Checkpoint]) -> None:
        """Forget held messages: they are handled."""
        for place in places:
            del self.held[place]
        self._free_keys()

    def _free_keys(self) -> None:
        """Let the first message of each key that waits for none be due."""
        seen = {row.key for row in self.dead.values() if row.blocks}
        for row in self.rows:
            if row.behind and row.key not in seen:
                self.held[row.place] = replace(row, behind=False, due=self.clock())
            if row.blocks:
                seen.add(row.key)

    @property
    def rows(self) -> list[HeldRow]:
        """The held messages, in order."""
        return [self.held[place] for place in sorted(self.held)]


@dataclass
class MemoryProducer:
    """One transaction of an application."""

    database: MemoryDatabase
    transaction_id: int | None = None
    inserted: list[Message] = field(default_factory=list)

    def insert(self, *names: str, key: str | None = None) -> None:
        """Store messages; the first one takes the transaction id."""
        database = self.database
        if self.transaction_id is None:
            database.last_id += 1
            self.transaction_id = database.last_id
            database.in_progress.add(self.transaction_id)
        for name in names:
            database.last_position += 1
            place = Checkpoint(self.transaction_id, database.last_position)
            self.inserted.append(
                Message(place.transaction_id, place.position, name, "t", "default", key, "{}", None, None)
            )

    def commit(self) -> None:
        """Make them visible."""
        for message in self.inserted:
            insort(self.database.messages, message, key=_place)
        self.roll_back()

    def roll_back(self) -> None:
        """End the transaction."""
        self.inserted = []
        if self.transaction_id is not None:
            self.database.in_progress.discard(self.transaction_id)


class MemoryConnection:
    """A session: what its transaction does when it commits."""

    def __init__(self, database: MemoryDatabase) -> None:
        self.database = database
        self.writes: list[Callable[[], None]] = []

    def write(self, act: Callable[[], None]) -> None:
        """Do this when the transaction commits."""
        self.writes.append(act)

    def commit(self) -> None:
        """Do all of it."""
        for act in self.writes:
            act()


class MemoryRunner:
    """Runs transactions of one processor, as `TransactionRunner` does."""

    def run(
        self,
        connection: MemoryConnection,
        epoch: int,
        request: StoreRequest | None,
        effects: Callable[[Transaction], int | Reached] | None = None,
        finish: Callable[[Any], outcomes.StepOutcome | None] | None = None,
    ) -> outcomes.StepOutcome:
        """Handle, store, commit; after anything but Stored nothing is committed, but for a COMMIT without an answer."""
        del epoch
        connection.writes = []
        database, committing = connection.database, False
        try:
            handle: Any = effects or (lambda _: 0)
            count = handle(Transaction(connection, None))  # type: ignore[arg-type]  # as a target sees it
            if isinstance(count, Reached):
                request, count = count.request, count.count
            if request is not None:
                answer, new = database.answer(request), request.new
                if answer is not StoreAnswer.STORED:
                    return outcomes.Rejected(answer, request.expected, new, database.checkpoint)
                connection.write(lambda: setattr(database, "checkpoint", new))
            if finish is not None and (told := finish(connection)) is not None:
                return told
            committing = True
            self.commit(connection)
        except LostError as err:
            if request is None:
                return outcomes.Failed(err)
            return outcomes.CommitUnknown(request.expected, request.new, committing, err)
        except OutboxError as err:
            return outcomes.Failed(err)
        return outcomes.Stored(BEGINNING if request is None else request.new, count)

    def commit(self, connection: MemoryConnection) -> None:
        """Commit what the transaction wrote."""
        connection.commit()


def key_of(message: Message) -> str:
    """Return what messages have in common that must be handled in order; one without a key is its own."""
    return message.message_id if message.partition_key is None else message.partition_key
