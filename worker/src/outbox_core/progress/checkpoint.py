"""The checkpoint: the pair (transaction_id, position) of the last message examined, and the answers to storing one.

Positions are not monotonic along the order in which messages are read, so half a pair means nothing: nothing in this
project compares a position alone. The order is the order of PostgreSQL's row comparison on (xid8, bigint).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Final

from typing_extensions import override

if TYPE_CHECKING:
    from outbox_core.progress.numbering import Numbering
    from outbox_core.progress.snapshot_range import SnapshotRange

MAX_TRANSACTION_ID: Final = 2**64 - 1
MAX_POSITION: Final = 2**63 - 1
END: Final = "end"
"""What people read and write for MAX_POSITION: everything of transaction ids up to that one."""


@dataclass(frozen=True, slots=True, order=True)
class Checkpoint:
    """A place in the outbox: everything up to and including it has been examined.

    Attributes:
        transaction_id: the 64-bit id (xid8) of the transaction that wrote the message, 0 to 2**64 - 1.
        position: the message's number from its sequence, a bigint, -2**63 to 2**63 - 1.
        snapshot_range: cursor Snapshot: what is examined. The pair is (0, counter), where the counter grows with each
            checkpoint by the messages examined. Not part of the comparison: the database compares it too.
        numbering: of a target whose receiver drops what it has: the number of the last message up to here. Not part of
            the comparison.

    """

    transaction_id: int
    position: int
    snapshot_range: SnapshotRange | None = field(default=None, compare=False)
    numbering: Numbering | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        """Refuse values that no row can have.

        Raises:
            ValueError: a part is outside its column's range.

        """
        if not 0 <= self.transaction_id <= MAX_TRANSACTION_ID:
            msg = f"transaction_id {self.transaction_id} is outside 0..{MAX_TRANSACTION_ID}"
            raise ValueError(msg)
        if not -MAX_POSITION - 1 <= self.position <= MAX_POSITION:
            msg = f"position {self.position} is outside a bigint"
            raise ValueError(msg)

    def is_same(self, other: Checkpoint) -> bool:
        """Say whether the same is examined, with either cursor."""
        return (self, self.snapshot_range) == (other, other.snapshot_range)

    @override
    def __str__(self) -> str:
        """Write the pair as `transaction_id:position`, the form used in status, logs and annotations."""
        return f"{self.transaction_id}:{self.position}"


BEGINNING: Final = Checkpoint(0, 0)
"""Before every message: transaction ids start at 3, so no row has 0."""


def parse_checkpoint(text: str) -> Checkpoint:
    """Read `transaction_id:position`; the position may be `end`.

    Raises:
        ValueError: the text is not two whole numbers with a colon between, or out of range.

    """
    transaction_id, colon, position = text.strip().partition(":")
    if position == END:
        position = str(MAX_POSITION)
    if not colon or not transaction_id.isdecimal() or not position.lstrip("-").isdecimal():
        msg = f"{text!r} is not a checkpoint; write it as transaction_id:position, for example 815:42"
        raise ValueError(msg)
    return Checkpoint(int(transaction_id), int(position))


class StoreAnswer(IntEnum):
    """What `store_processor_checkpoint` answers; the numbers are the database contract."""

    IGNORED = 0
    """The stored pair is already the new one: the batch was handled before. Roll back and go on from there."""
    STORED = 1
    """The pair is stored in this transaction."""
    AHEAD = 2
    """The stored pair is further ahead than the caller expected."""
    OLDER = 3
    """The stored pair is older than the caller expected, or gone."""
    NOT_OWNER = 4
    """The caller's epoch and token are not those of the live owner."""

    @property
    def needs_person(self) -> bool:
        """Told to the live owner, these mean that a program or a person without the lease changed the row."""
        return self in (StoreAnswer.AHEAD, StoreAnswer.OLDER)
