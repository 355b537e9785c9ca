"""The producers' own account of what they committed: one JSON line for each transaction, written after its COMMIT.

A line is `{"producer": 3, "transaction": "815", "messages": [[message_id, position, key, sequence, cents, minute]]}`.
The transaction id and the positions are those that the database returned to the producer; nothing here is read from the
outbox.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Committed:
    """One message that a producer knows to be committed.

    Attributes:
        pair: (transaction_id, position), the order that the cursor TransactionOrder promises.
        key: what the message is about. It belongs to one producer, or each takes the key's lock before it writes.
        sequence: 1, 2, 3 … within the key, without gaps, in the order of the commits.
        minute: start of the minute the order was placed in, seconds since 1970.

    """

    message_id: str
    pair: tuple[int, int]
    key: str
    sequence: int
    cents: int
    minute: int
    producer: int


class CommitLog:
    """Appends committed transactions to one producer's file; each line is on the disk before `append` returns."""

    def __init__(self, path: Path, producer: int) -> None:
        self._file: IO[str] = path.open("a", encoding="utf-8")
        self._producer = producer

    def append(self, transaction_id: int, messages: Sequence[Committed]) -> None:
        """Write down one committed transaction."""
        rows = [[m.message_id, m.pair[1], m.key, m.sequence, m.cents, m.minute] for m in messages]
        line = {"producer": self._producer, "transaction": str(transaction_id), "messages": rows}
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_commit_logs(directory: Path) -> list[Committed]:
    """Read every producer's log, in the order that the cursor promises.

    Raises:
        ValueError: a log contradicts itself (a key's sequence has a gap, an id stands twice): the producers are wrong,
            so nothing could be concluded from them.

    """
    messages = sorted(
        (m for path in sorted(directory.glob("*.jsonl")) for m in _read_lines(path)), key=lambda message: message.pair
    )
    check_commit_log(messages)
    return messages


def _read_lines(path: Path) -> Iterator[Committed]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if not line.endswith("\n"):
                return  # cut off in the middle: the producer was killed, and never said that it committed
            entry = json.loads(line)
            transaction_id = int(entry["transaction"])
            for message_id, position, key, sequence, cents, minute in entry["messages"]:
                pair = (transaction_id, position)
                yield Committed(message_id, pair, key, sequence, cents, minute, entry["producer"])


def check_commit_log(messages: Iterable[Committed]) -> None:
    """Refuse a log that cannot be true; the messages come in pair order.

    Raises:
        ValueError: an id or a pair stands twice, or a key's sequence is not 1, 2, 3 …, in pair order where one producer
            wrote them all.

    """
    seen: set[str] = set()
    before: tuple[int, int] = (0, 0)
    keys: dict[str, list[Committed]] = {}
    for message in messages:
        if message.message_id in seen or message.pair == before:
            msg = f"the commit log holds message {message.message_id} at {message.pair} twice"
            raise ValueError(msg)
        seen.add(message.message_id)
        before = message.pair
        keys.setdefault(message.key, []).append(message)
    for key, of_key in keys.items():
        if len({message.producer for message in of_key}) > 1:
            of_key.sort(key=lambda message: message.sequence)
        for number, message in enumerate(of_key):
            if message.sequence != number + 1:
                msg = f"the commit log jumps from {number} to {message.sequence} in {key}"
                raise ValueError(msg)


def count_overtaken(messages: Iterable[Committed]) -> int:
    """Count messages that were committed before another one of their key although their pair is higher."""
    furthest: dict[str, int] = {}
    overtaken = 0
    for message in messages:
        overtaken += message.sequence < furthest.get(message.key, 0)
        furthest[message.key] = max(message.sequence, furthest.get(message.key, 0))
    return overtaken
