"""PURE: numbers by which a receiver drops messages that it has already: they count messages in reading order.

A receiver that has number 7 drops whatever comes with 7 or less, and says that it has it. So one number must never be
given to two messages, also not by two processes, one of which froze: the second message would be lost. The number of a
message therefore depends on nothing but what is stored with the checkpoint and on the order of messages: the first
message after the checkpoint has the stored number plus 1, and each message that the processor's filters let through
counts, also those that are not handled now (failed before, delayed, behind one that failed).

A number counts in one space only. Whatever could give another order (`outbox.open_publisher_numbers` says what) begins
another space, with a name that was never used: messages may be repeated then, none is lost.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outbox_core.config import ProcessorConfig
    from outbox_core.message import Batch


@dataclass(frozen=True, slots=True)
class Numbering:
    """How far messages up to a checkpoint are numbered.

    Attributes:
        space: names the numbers; messages have the same ones in the same space only.
        last: number of the last message up to the checkpoint, 0 before the first.

    """

    space: str
    last: int


def number_batch(batch: Batch) -> Batch:
    """Count the messages of a batch as it was read; must be done before anything of it is handled.

    Where the checkpoint before it has no number, its end has none.
    """
    before = batch.after.numbering
    if before is None:
        return batch
    after = Numbering(before.space, before.last + batch.matched_count + len(batch.excluded))
    return replace(batch, examined=replace(batch.examined, numbering=after))


def list_numbers(batch: Batch) -> list[int] | None:
    """Return the numbers of the messages that are to be handled, in order.

    None: they have none. Held messages have none: others with higher numbers may have been handed over before them.
    """
    before = batch.after.numbering
    if before is None or batch.held:
        return None
    excluded = sorted(batch.excluded)
    return [before.last + 1 + index + bisect_left(excluded, message.checkpoint) for index, message in enumerate(batch)]


def describe_mapping(config: ProcessorConfig) -> str:
    """Return a checksum of all in the resource that decides which messages are counted, and where they are handed."""
    source = config.source.model_dump_json(exclude={"connection", "schema_"})
    partitions = config.delivery.partitions
    divided = "" if partitions is None else partitions.model_dump_json()
    target = "" if config.target is None else config.target.chosen.model_dump_json(exclude={"connection"})
    return hashlib.sha256(f"{source}\n{divided}\n{target}".encode()).hexdigest()
