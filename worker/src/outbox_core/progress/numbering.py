"""PURE: numbers by which a receiver drops messages that it has already: they count messages in reading order.

A receiver that has number 7 drops each message that comes with 7 or less, and says that it has it. So a number must
never be given to two messages, nor come after a higher one: either message would be lost, also where one was sent by a
process that froze and wakes late. From that three rules follow.

1. A number depends on nothing but what is stored with the checkpoint and on the order of messages: the first message
   after the checkpoint has the stored number plus 1, and each one that the processor's filters let through counts.
2. A number counts in one space only. What could give another order (`outbox.open_publisher_numbers` says what)
   begins another space, with a name that was never used: messages may be repeated then, none is lost.
3. Nothing is sent with a number behind a message that is not sent with its own (it failed, is delayed, or waits behind
   one that did) before a checkpoint beyond that is stored: what is excluded now can be handled by a successor. It is
   sent without a number instead, as are held messages, and may be repeated.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outbox_core.config import ProcessorConfig
    from outbox_core.message import Batch
    from outbox_core.progress.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Numbering:
    """How far messages up to a checkpoint are numbered.

    Attributes:
        space: names the numbers; messages have the same ones in the same space only.
        last: number of the last message up to the checkpoint, 0 before the first.

    """

    space: str
    last: int


def number_batch(batch: Batch, stored: Checkpoint | None) -> Batch:
    """Count the messages of a batch as it was read; must be done before anything of it is handled.

    `stored` is the checkpoint in the database, or the end of a batch that is confirmed as a whole before this one is
    begun (`is_numbered`). Where messages between it and the batch were counted, another batch is in flight, and may yet
    turn out to hold one that failed: the batch gets no numbers (rule 3).
    """
    before = batch.after.numbering
    if before is None:
        return batch
    after = Numbering(before.space, before.last + batch.matched_count + len(batch.excluded))
    numbered = replace(batch, examined=replace(batch.examined, numbering=after))
    if stored is None or stored.numbering != before:
        return replace(numbered, after=replace(batch.after, numbering=None))
    return numbered


def is_numbered(batch: Batch) -> bool:
    """Say whether each message of the batch is sent with its own number, or has none to be sent with."""
    counted = batch.examined.numbering is not None
    return not (counted and (batch.after.numbering is None or batch.excluded or batch.held))


def list_numbers(batch: Batch) -> list[int | None]:
    """Return the numbers of the messages that are to be handled, in order; None: it is sent without one (rule 3)."""
    before = batch.after.numbering
    if before is None or batch.held:
        return [None] * len(batch)
    first = min(batch.excluded, default=None)
    return [
        number if first is None or message.checkpoint < first else None
        for number, message in enumerate(batch, before.last + 1)
    ]


def describe_mapping(config: ProcessorConfig) -> str:
    """Return a checksum of all in the resource that decides which messages are counted, and where they are handed."""
    source = config.source.model_dump_json(exclude={"connection", "schema_"})
    partitions = config.delivery.partitions
    partitioning = "" if partitions is None else partitions.model_dump_json()
    target = "" if config.target is None else config.target.chosen.model_dump_json(exclude={"connection"})
    return hashlib.sha256(f"{source}\n{partitioning}\n{target}".encode()).hexdigest()
