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
        key: what the message is about; a key belongs to one producer.
        sequence: 1, 2, 3 … within the key, without gaps.
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
        ValueError: an id or a pair stands twice, or a key's sequence is not 1, 2, 3 … in pair order.

    """
    seen: set[str] = set()
    last: dict[str, int] = {}
    before: tuple[int, int] = (0, 0)
    for message in messages:
        if message.message_id in seen or message.pair == before:
            msg = f"the commit log holds message {message.message_id} at {message.pair} twice"
            raise ValueError(msg)
        if message.sequence != last.get(message.key, 0) + 1:
            msg = f"the commit log jumps from {last.get(message.key, 0)} to {message.sequence} in {message.key}"
            raise ValueError(msg)
        seen.add(message.message_id)
        last[message.key] = message.sequence
        before = message.pair
