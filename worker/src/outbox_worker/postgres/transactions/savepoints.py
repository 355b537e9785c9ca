"""Handles a batch although some of its messages fail, in one transaction: savepoints part them from the others.

What a part did is kept or undone as a whole; the transaction goes on either way. Constraints that wait for the commit
are looked at after each part, so that they refuse the part and not the commit.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import psycopg
from psycopg import pq

from outbox_core.errors import OutboxError, drop_traceback
from outbox_core.processor.isolation import Search, decide_after_part, decide_after_refusal, decide_size
from outbox_worker.postgres.errors import as_refused_commit, translate
from outbox_worker.postgres.transactions.guard import ended

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox_core.processor.isolation import Found
    from outbox_worker.postgres.connection import Connection

MOST_KEPT: Final = 60
"""Parts that one transaction keeps: PostgreSQL has room for 64 at hand, beyond that other sessions become slower."""
_BEGIN: Final = "SAVEPOINT outbox_part"
_UNDO: Final = "ROLLBACK TO SAVEPOINT outbox_part"
_KEEP: Final = (
    # Undone again, so that constraints that wait for the commit go on waiting.
    "SAVEPOINT outbox_check; SET CONSTRAINTS ALL IMMEDIATE; ROLLBACK TO SAVEPOINT outbox_check; "
    "RELEASE SAVEPOINT outbox_part; SAVEPOINT outbox_part"
)
_END: Final = "RELEASE SAVEPOINT outbox_part"
_OPEN: Final = frozenset({pq.TransactionStatus.INTRANS, pq.TransactionStatus.INERROR})


@dataclass(frozen=True, slots=True)
class Refused:
    """The message with this number in the batch, from 0, failed alone."""

    index: int
    error: OutboxError


@dataclass(frozen=True, slots=True)
class Isolated:
    """What came of it.

    Attributes:
        at: so many messages of the batch, from its first, were handled or failed alone.
        refused: those that failed alone, in order.
        next_block: most messages to try at once in what is left, or in the next batch.

    """

    at: int
    refused: tuple[Refused, ...]
    next_block: int

    @property
    def handled(self) -> int:
        """How many were handled."""
        return self.at - len(self.refused)


def isolate(
    connection: Connection,
    search: Search,
    handle: Callable[[int, int], object],
    is_refusal: Callable[[OutboxError], bool],
    is_enough: Callable[[Isolated], bool],
    find: Callable[[Search, int], Found] | None = None,
) -> Isolated:
    """Try one part after another inside the connection's open transaction, until `is_enough`, or all was tried.

    Args:
        connection: in a transaction, which goes on afterwards.
        search: where to begin.
        handle: does the messages from the one number to before the other.
        is_refusal: says whether an error may be a message's; any other ends it.
        is_enough: asked after each message that failed alone and after each part that got through.
        find: goes on with a search as far as it comes with one call, keeping at most so many parts; None: parts are
            tried here, one by one. So they are where it says that no message is to blame: the resource may say more.

    Raises:
        OutboxError: what was raised is no refusal; the caller rolls back.

    """
    found = _Progress(search)
    connection.execute(_BEGIN)
    while not found.search.is_over and found.kept < MOST_KEPT and not (found.moved and is_enough(found.so_far())):
        if find is not None:
            try:
                found.note_found(find(found.search, MOST_KEPT - found.kept), is_refusal)
                continue
            except OutboxError as err:
                _undo(connection, err, is_refusal)
                find = None
        size = decide_size(found.search)
        error = _try(connection, lambda at=found.search.at, size=size: handle(at, at + size), is_refusal)  # type: ignore[misc]
        found.note(size, error)
    connection.execute(_END)
    return found.so_far()


def within(seconds: float) -> Callable[[Isolated], bool]:
    """Stop after so many seconds from now."""
    until = time.monotonic() + seconds
    return lambda _: time.monotonic() >= until


class _Progress:
    """How far it is."""

    def __init__(self, search: Search) -> None:
        self.search = search
        self.kept = 0
        self.moved = False
        """Something was handled, or failed alone: however little time there is, the batch gets that far."""
        self._refused: list[Refused] = []

    def note(self, size: int, error: OutboxError | None) -> None:
        self.moved = self.moved or error is None or size == 1
        if error is None:
            self.kept += 1
            self.search = decide_after_part(self.search, size)
            return
        if size == 1:
            self._refused.append(Refused(self.search.at, error))
        self.search = decide_after_refusal(self.search, size, error.begun)

    def note_found(self, found: Found, is_refusal: Callable[[OutboxError], bool]) -> None:
        for number, error in found.refused:
            if not is_refusal(error):
                raise error
            self._refused.append(Refused(number, error))
        self.moved = self.moved or found.search.at > self.search.at
        self.kept += found.kept
        self.search = found.search

    def so_far(self) -> Isolated:
        return Isolated(self.search.at, tuple(self._refused), self.search.next_block)


def _try(
    connection: Connection, act: Callable[[], object], is_refusal: Callable[[OutboxError], bool]
) -> OutboxError | None:
    """Do it and keep it, or undo it and return why."""
    try:
        act()
    except OutboxError as err:
        error = err
    else:
        try:
            connection.execute(_KEEP)
        except psycopg.errors.InvalidSavepointSpecification as err:
            raise ended() from err
        except psycopg.Error as err:
            error = as_refused_commit(translate(err))
        else:
            return None
    _undo(connection, error, is_refusal)
    return drop_traceback(error)


def _undo(connection: Connection, error: OutboxError, is_refusal: Callable[[OutboxError], bool]) -> None:
    """Go back to before what was refused, or raise what is no refusal."""
    # A session that broke, or a transaction that the handler ended: there is nothing to go back to.
    if not is_refusal(error) or connection.closed or connection.pgconn.transaction_status not in _OPEN:
        raise error
    connection.execute(_UNDO)
