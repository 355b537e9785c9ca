"""Feeds over the database in memory, and the bench on which the contract suite tries them.

They are believed because they pass what PostgreSQL's feeds pass (`tests/contract/test_feeds.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import inf
from typing import TYPE_CHECKING
from uuid import uuid4

from typing_extensions import override

from outbox_core.errors import TransientError
from outbox_core.message import Batch, Held
from outbox_core.part import Place, Places
from outbox_core.ports import Feed, OwnedUnit, Settling
from outbox_core.processor import outcomes
from outbox_core.processor.state import lease_of
from outbox_core.progress.checkpoint import BEGINNING, Checkpoint, StoreAnswer
from outbox_core.report import Reason
from outbox_worker.postgres.progress.checkpoints import Start
from outbox_worker.postgres.transactions.transaction import StoreRequest
from tests.support.feeds.bench import LIMIT, Owner, handle_with, loaded
from tests.support.feeds.memory import MemoryConnection, MemoryDatabase, MemoryProducer, MemoryRunner, key_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from outbox_core.ports import Settle
    from outbox_core.processor.failing import Failure
    from outbox_core.processor.state import ProcessorState
    from tests.support.feeds.memory import HeldRow


@dataclass
class MemoryFeed(Feed):
    """Fresh messages after the checkpoint."""

    database: MemoryDatabase
    limit: int

    @override
    def fetch(self, state: ProcessorState) -> outcomes.StepOutcome:
        """Read at most as many as the state allows; what is held, or waits behind what is held, is excluded."""
        after = state.cursor
        if after is None:
            raise TransientError("no checkpoint is loaded", reason=Reason.INTERNAL_ERROR)
        limit = min(state.limit or self.limit, self.limit)
        found = self.database.read(after, limit)
        blocked = self.database.blocked if state.blocking else set()
        messages = tuple(each for each in found if key_of(each) not in blocked)
        return outcomes.Fetched(
            Batch(
                after, found[-1].checkpoint if found else after, messages, len(found), full=len(found) == limit,
                matched_count=len(messages),
                excluded=tuple(each.checkpoint for each in found if key_of(each) in blocked),
            )
        )  # fmt: skip


@dataclass
class MemorySettling(Settling):
    """Stores the next checkpoint behind the fence, and holds what is not handled."""

    connection: MemoryConnection

    @override
    def request(self, state: ProcessorState, batch: Batch) -> StoreRequest:
        """Return what is to be stored when the batch is handled."""
        return StoreRequest(lease_of(state), state.stored, batch.examined)

    @override
    def settle_with(self, state: ProcessorState, batch: Batch, pairs: Iterable[Checkpoint]) -> Settle:
        """Return what holds messages in the transaction that passes them."""
        del pairs
        lease, database = lease_of(state), self.connection.database
        rows = {each.checkpoint: each for each in database.read(batch.after, len(database.messages))}

        def settle(
            connection: MemoryConnection, done: Batch, failed: tuple[Failure, ...]
        ) -> outcomes.StepOutcome | None:
            if not (done.excluded or failed):
                return None
            if not database.is_owner(lease):
                return outcomes.OwnershipLost("the lease went before messages were held")
            for each in failed:
                connection.write(partial(database.fail, rows[each.checkpoint], each))
            connection.write(partial(database.hold, [rows[pair] for pair in done.excluded]))
            return None

        return settle

    @override
    def places(self, batch: Batch) -> Places:
        """Return where the messages are that are to be handled, with their keys, in order."""
        return Places.of(Place(each.checkpoint, key_of(each)) for each in batch)

    def find_loss(self, state: ProcessorState, batch: Batch) -> outcomes.Rejected | None:
        """Look at the lease right before a batch is handed over that cannot be recalled."""
        database = self.connection.database
        if database.is_owner(lease_of(state)):
            return None
        return outcomes.Rejected(StoreAnswer.NOT_OWNER, state.stored, batch.examined, database.checkpoint)

    def mark_in_flight(self, state: ProcessorState, batch: Batch) -> None:
        """Write nothing down: here no process dies of a message."""

    def clear_in_flight(self, state: ProcessorState) -> None:
        """Write nothing down."""

    def confirm(self, state: ProcessorState) -> outcomes.StepOutcome:
        """Find out about a transaction whose session broke."""
        doubt, database = state.doubt, self.connection.database
        if doubt is None:
            return outcomes.NotCommitted()
        lease = lease_of(state)
        if not database.is_owner(lease):
            return outcomes.Rejected(StoreAnswer.NOT_OWNER, doubt.expected, doubt.new, None)
        if doubt.committing and database.checkpoint == doubt.new:
            return outcomes.Stored(doubt.new, state.batch.matched_count if state.batch else 0)
        answer = database.answer(StoreRequest(lease, doubt.expected, doubt.new))
        if answer is StoreAnswer.STORED:
            return outcomes.NotCommitted()
        return outcomes.Rejected(answer, doubt.expected, doubt.new, database.checkpoint)


@dataclass
class MemoryHeldFeed(Feed, Settling):
    """Held messages that are due, with those behind them where none has failed."""

    connection: MemoryConnection
    limit: int

    @override
    def fetch(self, state: ProcessorState) -> outcomes.StepOutcome:
        """Take those that are due."""
        database = self.connection.database
        if not database.is_owner(lease_of(state)):
            return outcomes.OwnershipLost("the lease went before held messages were looked at")
        limit = min(state.held_limit or self.limit, self.limit)
        taken = self._choose(limit)
        if not taken:
            due = [row.due for row in database.rows if row.due < inf]
            return outcomes.HeldTaken(None, min(due) - database.clock() if due else None, bool(database.blocked))
        here = state.cursor or taken[0].place
        held = tuple(Held(row.place, row.key, row.message.message_id, row.attempts) for row in taken)
        messages = tuple(row.message for row in taken)
        batch = Batch(here, here, messages, len(held), full=True, matched_count=len(held), held=held)
        return outcomes.HeldTaken(batch, 0.0, blocking=True)

    def _choose(self, limit: int) -> list[HeldRow]:
        rows, now = self.connection.database.rows, self.connection.database.clock()
        heads = [row for row in rows if not row.behind and row.due <= now][:limit]
        followed = {row.key for row in heads if row.blocks and not row.attempts}
        return [row for row in rows if row in heads or (row.behind and row.key in followed)][:limit]

    @override
    def request(self, state: ProcessorState, batch: Batch) -> None:
        """Store no checkpoint: it has passed them before."""

    @override
    def settle_with(self, state: ProcessorState, batch: Batch, pairs: Iterable[Checkpoint] = ()) -> Settle:
        """Return what takes out those that are handled, and writes down what becomes of those that failed."""
        lease, database = lease_of(state), self.connection.database

        def settle(
            connection: MemoryConnection, done: Batch, failed: tuple[Failure, ...]
        ) -> outcomes.StepOutcome | None:
            out = {each.checkpoint for each in failed}
            handled = [each.checkpoint for each in done.held if each.checkpoint not in out]
            if not database.is_owner(lease):
                return outcomes.OwnershipLost("the lease went before what became of held messages was written down")
            if not database.held.keys() >= {*handled, *out}:
                return outcomes.HeldChanged()
            connection.write(partial(database.let_go, handled))
            for each in failed:
                connection.write(partial(database.fail, database.held[each.checkpoint].message, each))
            return None

        return settle

    @override
    def places(self, batch: Batch) -> Places:
        """Return where the messages are, with their keys, in order."""
        return Places.of(Place(each.checkpoint, each.key) for each in batch.held)

    def fail(self, state: ProcessorState, failed: tuple[Failure, ...]) -> outcomes.StepOutcome:
        """Write down what becomes of one that failed alone."""
        self.connection.writes = []
        nothing = Batch(BEGINNING, BEGINNING, (), 0, full=False)
        told = self.settle_with(state, nothing)(self.connection, nothing, failed)
        if told is not None:
            return told
        self.connection.commit()
        return outcomes.HeldFailed()


class MemoryUnit(OwnedUnit):
    """All of a processor, which starts at the beginning of the outbox."""

    @override
    def load(self, connection: MemoryConnection, lease: outcomes.HeldLease) -> Start | None:
        """Return what is stored; the first owner stores the beginning."""
        database = connection.database
        if database.checkpoint is not None:
            return Start(database.checkpoint, start_from_used=False)
        if database.answer(StoreRequest(lease, None, BEGINNING)) is not StoreAnswer.STORED:
            return None
        connection.write(lambda: setattr(database, "checkpoint", BEGINNING))
        return Start(BEGINNING, start_from_used=True)


class MemoryBench:
    """The bench in memory."""

    def __init__(self) -> None:
        self.database = MemoryDatabase()

    def begin(self) -> MemoryProducer:
        return MemoryProducer(self.database)

    def own(self, *, loads: bool = True) -> Owner:
        self.end_lease()
        lease = self.database.acquire(uuid4())
        assert lease is not None
        connection = MemoryConnection(self.database)
        owner = Owner(
            loaded(lease, BEGINNING), MemoryFeed(self.database, LIMIT), MemorySettling(connection),
            MemoryHeldFeed(connection, LIMIT), MemoryUnit(),
        )  # fmt: skip
        if loads:
            pair = self.load(owner)
            assert pair is not None
            owner.go_on(pair)
        return owner

    def end_lease(self) -> None:
        self.database.alive = False

    def load(self, owner: Owner) -> Checkpoint | None:
        connection = MemoryConnection(self.database)
        start = owner.unit.load(connection, lease_of(owner.state))
        connection.commit()
        return None if start is None else start.pair

    def handle(self, owner: Owner, batch: Batch, failed: tuple[Failure, ...] = ()) -> outcomes.StepOutcome:
        return handle_with(partial(MemoryRunner().run, MemoryConnection(self.database)), owner, batch, failed, _write)

    def overwrite(self, pair: Checkpoint | None) -> None:
        self.database.checkpoint = pair

    def stored(self) -> Checkpoint | None:
        return self.database.checkpoint

    def effects(self) -> list[str]:
        return list(self.database.effects)


def _write(connection: MemoryConnection, name: str) -> None:
    connection.write(lambda: connection.database.effects.append(name))
