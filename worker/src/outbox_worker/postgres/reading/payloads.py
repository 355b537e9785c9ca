"""Bounds a batch by the bytes of its payloads as well as by its messages.

A page is read with its small payloads only: in the place of a large one the server returns an empty text, which is no
JSON, and does not even read what is stored out of line. Large ones are read afterwards, each by itself, and the batch
ends before the one with which it would have too many bytes: the page is read again with as many messages as fit. So no
message costs anything where all are small, and a process never has more than a batch may have and one message.

Of large payloads the server returns as many as fit by the size in which they are stored, compressed or not. How many
bytes of text those become is remembered: only where that changes more is sent than is used, and it is dropped message
by message.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Final, TypeVar

from psycopg import sql

from outbox_core.errors import TransientError
from outbox_core.progress.checkpoint import Checkpoint
from outbox_core.report import Reason
from outbox_core.spec.delivery import LARGEST_BATCH
from outbox_worker.postgres.call import load
from outbox_worker.postgres.errors import translated
from outbox_worker.postgres.reading.table import as_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import LiteralString

    from outbox_core.message import Batch, Message
    from outbox_worker.postgres.connection import Connection
    from outbox_worker.postgres.feeds.holding import Taken

    Rows = Callable[[Sequence[Checkpoint]], tuple[sql.Composable, sql.Composable]]
    """The SELECT of messages with these pairs, payloads as they are stored, and what sorts them as in a batch."""
    Payload = tuple[str | None, str | None, int]
    """Data, metadata and their bytes."""

Read = TypeVar("Read", "Batch", "Taken", "Page")

ALWAYS_SMALL: Final = 2048
"""Bytes of a payload that is read with its message, however many messages a batch may have."""
WITHHELD: Final = ""
_TRIES: Final = 3
"""Reads of a page whose first message is gone when its payload is looked for."""
_UNKNOWN_EXPANSION: Final = 8.0
"""Bytes of text for each stored byte until a large payload was read: a first batch that is too small does no harm."""
_LEAST_EXPANSION: Final = 0.1
_DATA: Final = attrgetter("data")
_METADATA: Final = attrgetter("metadata")


@dataclass(frozen=True, slots=True)
class Page:
    """Messages, at most `limit`; None: all that were wanted."""

    messages: tuple[Message, ...]
    limit: int | None

    @property
    def is_full(self) -> bool:
        """Whether more may be behind the last one."""
        return self.limit is not None and len(self.messages) >= self.limit


class PayloadBound:
    """How many bytes of payloads one reader's batch may have, and what it knows of their sizes."""

    def __init__(self, most: int, batch_size: int) -> None:
        """Take the most bytes and the most messages of a batch."""
        self.most = most
        self.small = max(ALWAYS_SMALL, most // batch_size)
        """Bytes up to which a payload is read with its message."""
        self._rows: int | None = None
        self._expansion = _UNKNOWN_EXPANSION

    def limit(self, limit: int) -> int:
        """Return how many messages to look at: not many more than fitted into the last batch."""
        return limit if self._rows is None else min(limit, self._rows)

    def read(self, connection: Connection, limit: int, page: Callable[[int], Read], rows: Rows) -> Read:
        """Return a page of at most `limit` messages with their payloads, shorter where those have too many bytes.

        A message that has too many alone comes alone.

        Args:
            connection: on which large payloads are read.
            limit: most messages.
            page: reads at most so many messages from the same place, without their large payloads.
            rows: finds messages again.

        Raises:
            TransientError: the database went away, or messages vanish while they are read.

        """
        known: dict[Checkpoint, Payload] = {}
        most, tries = self.limit(limit), _TRIES
        while tries:
            found = page(most)
            messages = self._complete(connection, found.messages, rows, known)
            if len(messages) == len(found.messages):
                return found if messages is found.messages else replace(found, messages=messages)
            if messages:
                most = len(messages)
            else:
                tries -= 1
        raise TransientError("messages vanish from the outbox while they are read", reason=Reason.DATABASE_UNAVAILABLE)

    def _complete(
        self, connection: Connection, messages: tuple[Message, ...], rows: Rows, known: dict[Checkpoint, Payload]
    ) -> tuple[Message, ...]:
        """Return as many of a page's messages as have no more bytes than a batch may have, with their payloads.

        Nothing is returned where the first message is gone. `known`: payloads that were read before, and now.
        """
        withheld = WITHHELD in map(_DATA, messages) or WITHHELD in map(_METADATA, messages)
        if not withheld and len(messages) * self.small <= self.most:
            self._note(len(messages), len(messages))
            return messages
        missing = [each.checkpoint for each in messages if _is_withheld(each) and each.checkpoint not in known]
        if missing:
            self._fetch(connection, rows(missing), known)
        completed = self._fitting(messages, known)
        self._note(len(completed), len(messages))
        return completed

    def _fitting(self, messages: tuple[Message, ...], known: dict[Checkpoint, Payload]) -> tuple[Message, ...]:
        completed: list[Message] = []
        total = 0
        for each in messages:
            message, size = each, 0
            if not _is_withheld(each):
                size = _octets(each.data) + _octets(each.metadata)
            elif (payload := known.get(each.checkpoint)) is not None:
                data, metadata, size = payload
                message = each._replace(data=data, metadata=metadata)
            else:
                break
            total += size
            if completed and total > self.most:
                break
            completed.append(message)
        return tuple(completed)

    def _fetch(
        self,
        connection: Connection,
        rows: tuple[sql.Composable, sql.Composable],
        known: dict[Checkpoint, Payload],
    ) -> None:
        """Read payloads one by one, and keep as many as fit: what was stored smaller than expected is dropped."""
        relation, order = rows
        statement = load("fetch_payloads").format(rows=relation, order=order, most=int(self.most / self._expansion))
        total = stored_total = 0
        with translated():
            for t, position, data, metadata, stored in connection.cursor().stream(statement):
                size = _octets(data) + _octets(metadata)
                if not total or total + size <= self.most:
                    known[Checkpoint(int(t), position)] = (data, metadata, size)
                total, stored_total = total + size, stored_total + stored
        if stored_total:
            self._expansion = max(total / stored_total, _LEAST_EXPANSION)

    def _note(self, fitted: int, looked_at: int) -> None:
        if fitted < looked_at:
            self._rows = 2 * fitted
        elif self._rows is not None and looked_at >= self._rows:
            self._rows = 2 * looked_at if looked_at < LARGEST_BATCH else None


@cache
def shipped_columns(row: str, small: int | None) -> sql.SQL:
    """List data and metadata of a SELECT with payloads as text; those of more than `small` bytes are withheld."""
    column = "{0}" if small is None else "CASE WHEN octet_length({0}) > {1} THEN {2} ELSE {0} END AS {3}"
    listed = sql.SQL(", ").join(
        sql.SQL(column).format(
            sql.Identifier(row, name), sql.Literal(small), sql.Literal(WITHHELD), sql.Identifier(name)
        )
        for name in ("data", "metadata")
    )
    return as_text(listed)


def compose_messages(rows: sql.Composable, small: int | None, order: LiteralString) -> sql.Composed:
    """Return the statement that reads messages, payloads as text, those of more than `small` bytes withheld."""
    return load("fetch_messages").format(rows=rows, payload=shipped_columns("o", small), order=sql.SQL(order))


def _is_withheld(message: Message) -> bool:
    return WITHHELD in (message.data, message.metadata)


def _octets(text: str | None) -> int:
    if text is None:
        return 0
    return len(text) if text.isascii() else len(text.encode())
