"""What a consumer in mode Competing has in hand, and what becomes of a message of it that failed. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from typing_extensions import override

from outbox_core.message import Batch

if TYPE_CHECKING:
    from outbox_core.errors import OutboxError
    from outbox_core.message import Message
    from outbox_core.progress.checkpoint import Checkpoint
    from outbox_core.progress.snapshot_range import SnapshotRange


@dataclass(frozen=True, slots=True)
class ClaimedBatch:
    """A batch in hand.

    Attributes:
        id: of the row that says whose it is.
        priority: 0 to 9; 0 over the outbox.
        attempt: number of this taking; completion is refused to every other.
        snapshot_range: where its messages are; None: they are listed.
        listed: messages that are tried again, in order of their pairs, each with its failures so far.
        after: done up to here.
        upto: the last message.
        count: messages left; 0: rows that are not among them, or none.
        chunk: most messages to handle at once, because a process died over it; None: all.
        crash_count: processes that died over its first message, once that was alone.
        excluded: positions of the range's delayed messages, which are not in it.
        again: its messages failed before.

    """

    id: int
    priority: int
    attempt: int
    snapshot_range: SnapshotRange | None
    listed: tuple[tuple[Checkpoint, int], ...]
    after: Checkpoint
    upto: Checkpoint
    count: int
    chunk: int | None = None
    crash_count: int = 0
    excluded: tuple[int, ...] = ()
    again: bool = False


@dataclass(frozen=True, slots=True)
class Chunk(Batch):
    """What of a batch is handled at once."""

    claimed: ClaimedBatch = field(kw_only=True)

    @property
    @override
    def is_retried(self) -> bool:
        return self.claimed.again


class RefusalAction(StrEnum):
    """What becomes of a message that failed alone; when its attempts ran out, in the words of `WhenExhausted`."""

    RETRY = "Retry"
    DEAD_LETTER = "DeadLetter"
    SKIP = "Skip"
    STOP = "Stop"


@dataclass(frozen=True, slots=True)
class RefusalDecision:
    """The action, after so many failures, and for RETRY how many seconds later."""

    action: RefusalAction
    attempts: int
    wait: float = 0.0


@dataclass(frozen=True, slots=True)
class Refusal:
    """A message that failed alone, why, and what becomes of it."""

    message: Message
    error: OutboxError
    decision: RefusalDecision

    @property
    def key(self) -> str:
        """What tells messages of one cause from those of another."""
        return self.message.partition_key or self.message.message_id
