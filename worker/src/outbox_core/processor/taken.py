"""PURE: which messages a broker took of batches that failed, so that no later attempt hands them over again.

Only this process knows: after its death the batch is handed over again as a whole (AtLeastOnce).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from outbox_core.errors import MessagesFailedError
from outbox_core.processor.claimed_batch import Chunk

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from outbox_core.errors import HandlerError
    from outbox_core.message import Batch, Message
    from outbox_core.progress.checkpoint import Checkpoint

LARGEST: Final = 20_000
"""Messages of one partition that are remembered; beyond them the oldest are forgotten, and may be repeated."""


class TakenMessages:
    """Of each partition what was taken under its latest epoch, the oldest first."""

    def __init__(self) -> None:
        self._epochs: dict[int, int] = {}
        self._taken: dict[int, OrderedDict[tuple[int, int, str], None]] = {}

    def left_of(self, batch: Batch, epoch: int) -> list[Message]:
        """Return the messages of a batch that the broker has not taken yet.

        Another epoch of a partition begins with nothing: a person may have asked for its messages again (a rewind). In
        mode Competing that cannot be asked, and a batch that was handed back and taken again is the same batch.
        """
        if isinstance(batch, Chunk):
            epoch = 0
        if self._epochs.get(batch.partition) != epoch:
            self._epochs[batch.partition] = epoch
            self._taken.pop(batch.partition, None)
        taken = self._taken.get(batch.partition)
        return [message for message in batch if _name(message) not in taken] if taken else list(batch)

    def add(self, batch: Batch, messages: Iterable[Message]) -> None:
        """Remember that the broker took these messages of a batch that failed."""
        taken = self._taken.setdefault(batch.partition, OrderedDict())
        taken.update((_name(message), None) for message in messages)
        while len(taken) > LARGEST:
            taken.popitem(last=False)

    def conclude(self, batch: Batch, attempted: Iterable[Message], failed: Mapping[Checkpoint, HandlerError]) -> int:
        """End an attempt that was answered for each message; return how many the batch has, where none failed.

        Else only those that failed are tried again.
        """
        if failed:
            self.add(batch, (message for message in attempted if message.checkpoint not in failed))
            raise name_failed(batch, failed)
        if taken := self._taken.get(batch.partition):
            for message in batch:
                taken.pop(_name(message), None)
        return len(batch)


def name_failed(batch: Batch, failed: Mapping[Checkpoint, HandlerError]) -> HandlerError:
    """Return the error that names the messages of a batch that failed; of its only message its own."""
    named = {each.checkpoint: failed[each.checkpoint] for each in batch if each.checkpoint in failed}
    return MessagesFailedError(named) if len(batch) > 1 else next(iter(named.values()))


def _name(message: Message) -> tuple[int, int, str]:
    """The place and what is there: a database that was set back can give the same place to another message."""
    return message.transaction_id, message.position, message.identity
