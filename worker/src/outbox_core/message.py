"""A message as read from the outbox, and a batch of them with how far was examined."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from outbox_core.progress.checkpoint import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    from outbox_core.part import Places


class Message(NamedTuple):
    """One row of the outbox; `data` and `metadata` are JSON text: parse only where it is needed.

    A named tuple of the row as it is read, because one is made of each row: a frozen dataclass takes five times as long
    to make, and a checkpoint in it as long again.

    A mapped table may have null in `message_type`, `publication_id`, `data` (a tombstone) and `scheduled`: None here.
    The product's own table has none there. `message_id` is never None: where the row has none, it is its place.
    """

    transaction_id: int
    position: int
    message_id: str
    message_type: str | None
    publication_id: str | None
    partition_key: str | None
    data: str | None
    metadata: str | None
    scheduled: datetime | None
    deliver_after: datetime | None = None

    @property
    def checkpoint(self) -> Checkpoint:
        """The message's place; made anew each time, so a loop over many messages asks for it only where it must."""
        return Checkpoint(self.transaction_id, self.position)

    @property
    def pair(self) -> str:
        """The same as text, `transaction_id:position`."""
        return f"{self.transaction_id}:{self.position}"

    @property
    def identity(self) -> str:
        """What tells it from another message that a database which was set back has at its place.

        That is its id; of a row that has none, all that the row says.
        """
        if self.message_id != self.pair:
            return self.message_id
        said = (self.message_type, self.publication_id, self.partition_key, self.data, self.metadata)
        return json.dumps([self.message_id, *said, str(self.scheduled)])

    def json(self) -> Any:
        """Parse the payload; None also for a message that has none.

        Raises:
            ValueError: an outbox with a text column held something that is not JSON.

        """
        return None if self.data is None else json.loads(self.data)


@dataclass(frozen=True, slots=True)
class Held:
    """A held message, tried again now: its failed attempts, and the processes that died of it."""

    checkpoint: Checkpoint
    key: str
    message_id: str
    attempts: int = 0
    crash_count: int = 0


@dataclass(frozen=True, slots=True)
class Delayed:
    """A message that may not be handled yet."""

    checkpoint: Checkpoint
    message_id: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Batch:
    """Messages after one checkpoint, in cursor order.

    Attributes:
        after: the checkpoint the reading started from.
        examined: the last pair looked at, matching or not; equals `after` when nothing was there.
        messages: those that the processor's filters let through; may be empty though rows were examined.
        examined_count: rows looked at.
        full: more rows are probably waiting, so read again without waiting.
        matched_count: rows that the filters let through; more than `messages` has where only the extent was asked for.
        partition: which one it is of; 0 where the processor is not partitioned.
        delayed_count: of the matched ones, those with a time before which they are not to be handled, past or not.
        excluded: those in the range that are not to be handled now; not among `messages`, not in `matched_count`.
        waits_for: mode Ordered: what comes next is delayed, and all waits for it.
        held: these very messages are tried again, none of a range.
        only: a small part of another batch: its messages, which are found faster one by one than as a range.
        places: where the messages are that are to be handled now, and their keys; None where that was not asked.
        positions: among which those of its messages are, as an array of the server, where that makes them found faster.
        saw_all: no transaction was in progress as it was read: nothing that was committed by then was not visible yet.

    """

    after: Checkpoint
    examined: Checkpoint
    messages: tuple[Message, ...]
    examined_count: int
    full: bool
    matched_count: int = 0
    partition: int = 0
    delayed_count: int = 0
    excluded: tuple[Checkpoint, ...] = ()
    waits_for: Delayed | None = None
    held: tuple[Held, ...] = ()
    only: tuple[Checkpoint, ...] = ()
    places: Places | None = None
    positions: str | None = None
    saw_all: bool = False

    @classmethod
    def of(
        cls, after: Checkpoint, examined: Checkpoint, messages: tuple[Message, ...], *, full: bool, partition: int
    ) -> Batch:
        """Return the batch that has these messages, where no row was looked at besides them."""
        count, delayed = len(messages), sum(message.deliver_after is not None for message in messages)
        return cls(
            after, examined, messages, count, full=full, matched_count=count, partition=partition,
            delayed_count=delayed,
        )  # fmt: skip

    @property
    def is_retried(self) -> bool:
        """These messages failed before, or waited behind one that did."""
        return bool(self.held)

    def __iter__(self) -> Iterator[Message]:
        """The messages, in cursor order."""
        return iter(self.messages)

    def __len__(self) -> int:
        """How many messages there are."""
        return len(self.messages)

    def __bool__(self) -> bool:
        """True even without messages: a batch is a range that was examined."""
        return True
