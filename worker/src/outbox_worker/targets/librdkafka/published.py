"""PURE: what a transaction writes down about itself: which messages are published and perhaps not stored yet.

There are two kinds of records for a partition of a processor: of fresh messages, and of held ones, which are published
out of order. A fresh message is named until the row's checkpoint has passed it: the row is the authority for what was
examined. No checkpoint tells when a held message is settled, so the latest of them are named; and, as an owner begins,
the fresh ones that the row has not passed then: this owner may hold them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self
from zlib import crc32

from outbox_core.progress.checkpoint import Checkpoint
from outbox_core.progress.coverage import has_examined

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from outbox_core.message import Batch, Message

MOST_HELD: Final = 2000
"""Held messages that are named: twice those that are tried at once, and those that are not settled come again first."""
_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Unit:
    """A partition of a processor of one database: what one producer publishes.

    Attributes:
        database: uuid of the checkpoint's database.
        partition: 0 where the processor is not partitioned.

    """

    database: str
    processor_id: str
    partition: int

    @property
    def transactional_id(self) -> str:
        """What shuts a former producer out: the brokers know one of this name."""
        return f"outbox/{self.processor_id}/{self.database}/{self.partition}"

    def key(self, *, held: bool) -> bytes:
        """Return the key of its records."""
        return f"{self.transactional_id}{'/held' if held else ''}".encode()


@dataclass(frozen=True, slots=True)
class Record:
    """The record of one transaction.

    Attributes:
        epoch: of the owner that published.
        moved: number of the last act by which a person had moved the checkpoint then.
        after: where the batch was read from, for people.
        examined: the checkpoint that is stored next, for people.
        names: of the messages that are published and perhaps not stored.
        held: it is about held messages.
        other: offset of the last record of the other kind; None: there is none.

    """

    epoch: int
    moved: int
    after: str
    examined: str
    names: tuple[str, ...] = ()
    held: bool = False
    other: int | None = None

    def encode(self) -> bytes:
        """Write it as JSON."""
        fields: dict[str, Any] = {
            "version": _VERSION, "epoch": self.epoch, "moved": self.moved, "after": self.after,
            "examined": self.examined, "held": self.held, "other": self.other, "published": self.names,
        }  # fmt: skip
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, value: bytes) -> Self:
        """Read it.

        Raises:
            ValueError: it is not of this version.

        """
        found = json.loads(value)
        if not isinstance(found, dict) or found.get("version") != _VERSION:
            msg = "it is not a record of this version of the worker"
            raise ValueError(msg)
        return cls(
            found["epoch"], found["moved"], found["after"], found["examined"], tuple(found["published"]),
            held=found["held"], other=found["other"],
        )  # fmt: skip


@dataclass(slots=True)
class Published:
    """What a unit has published and perhaps not stored, as its last records say.

    Attributes:
        fresh: names of fresh messages and their places.
        held: names of held messages, the oldest first.
        offsets: of the last record of each kind, by whether it is about held ones.

    """

    fresh: dict[str, Checkpoint] = field(default_factory=dict)
    held: dict[str, None] = field(default_factory=dict)
    offsets: dict[bool, int] = field(default_factory=dict)

    @classmethod
    def of(cls, found: Iterable[tuple[int, Record]], moved: int) -> Self:
        """Take over the records that were found, but for what was published before a person moved the checkpoint."""
        made = cls()
        for offset, record in found:
            made.offsets[record.held] = offset
            names = record.names if record.moved >= moved else ()
            if record.held:
                made.held = dict.fromkeys(names)
            else:
                made.fresh = {name: parse_place(name) for name in names}
        return made

    def left_of(self, batch: Batch) -> list[Message]:
        """Return the messages of a batch that are not published yet."""
        if not self.fresh and not self.held:
            return list(batch)
        return [each for each in batch if (name := name_of(each)) not in self.fresh and name not in self.held]

    def unstored(self, checkpoint: Checkpoint) -> dict[str, Checkpoint]:
        """Return the fresh messages that the row's checkpoint has not passed."""
        return {name: place for name, place in self.fresh.items() if not has_examined(checkpoint, place)}

    def find_excluded(self, checkpoint: Checkpoint, handled: Collection[str]) -> list[str]:
        """Return the names of fresh messages that the row has passed and that are not handled: they may be held."""
        names = self.fresh.keys() - handled - self.held.keys()
        return [name for name, place in self.fresh.items() if name in names and has_examined(checkpoint, place)]

    def as_held(self) -> dict[str, None]:
        """Return the names of held messages, and behind them those of fresh ones, which the next owner may hold.

        It does so where a person had a message of their key tried again since: the row then passes what is not stored.
        """
        older = [name for name in self.held if name not in self.fresh]
        return dict.fromkeys((*older[-MOST_HELD:], *self.fresh))

    def with_batch(self, batch: Batch, messages: Iterable[Message]) -> Published:
        """Return what is published once these messages of a batch are."""
        if batch.held:
            held = self.held | dict.fromkeys(map(name_of, messages))
            latest = list(held)[-MOST_HELD:]
            return Published(self.fresh, dict.fromkeys(latest), dict(self.offsets))
        fresh = self.unstored(batch.after) | {name_of(each): each.checkpoint for each in messages}
        return Published(fresh, self.held, dict(self.offsets))

    def as_record(self, batch: Batch, epoch: int, moved: int) -> Record:
        """Return the record of the transaction that publishes a batch."""
        held = bool(batch.held)
        names: Collection[str] = self.held if held else self.fresh
        return Record(
            epoch, moved, str(batch.after), str(batch.examined), tuple(names), held, self.offsets.get(not held)
        )  # fmt: skip


def name_of(message: Message) -> str:
    """Name a message: its place, and a check of what it is. A database that was set back may use a place again."""
    return f"{message.pair}:{crc32(message.identity.encode()):08x}"


def parse_place(name: str) -> Checkpoint:
    """Read the place of a named message.

    Raises:
        ValueError: it is no name.

    """
    transaction_id, position, _ = name.split(":")
    return Checkpoint(int(transaction_id), int(position))
