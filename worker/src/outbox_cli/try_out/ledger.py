"""PURE: what was produced, compared with the lines that one processor's handling left.

The demo's ledger (`tests/tools/ledger`) shares nothing with the product on purpose; a test compares the two over random
histories.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from outbox_cli.table import format_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SAMPLES: Final = 3
"""Messages that are named for each finding; counting goes on."""
Pair = tuple[int, int]
_FAULTS: Final = ("lost", "duplicated", "out of order", "invented")
_EXPLAINED: Final = {
    "by reader": "{count} of the messages produced are yours, in no producer's commit log",
    "waiting": "{count} wait and are not lost: {stopped}",
    "passed over": "{count} were passed over by a decision of yours about its checkpoint",
    "repeated": "{count} were handled again by a decision of yours about its checkpoint",
    "invented": "{count} were handled although their transactions rolled back",
    "unknown": "{count} were handled that are not in the outbox any more: deleted since",
}
"""What the table does not say: what people did, and what came of it."""


class Order(StrEnum):
    """In which order a processor's first lines must stand."""

    ALL = "all"
    """That of the pairs (transaction id, position)."""
    KEY = "key"
    """The same within each key, for the shop's messages: a key of the shop has one producer."""
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Message:
    """A committed message; `by_reader`: it is in no producer's commit log, the reader inserted it."""

    message_id: str
    key: str | None
    pair: Pair
    by_reader: bool = False


@dataclass(frozen=True, slots=True)
class Reasons:
    """What people did to a processor, as the database recorded it.

    Attributes:
        moves: from which pair to which pair its checkpoint was moved by decision, or a single message given up; None:
            of a cursor without pairs, so anything may be passed over or repeated.
        stopped: what it waits for that only a person or another transaction can end: what it has not handled is
            waiting, not lost.

    """

    moves: tuple[tuple[Pair | None, Pair | None] | None, ...] = ()
    stopped: str | None = None

    def skips(self, pair: Pair) -> bool:
        """Say whether a decision passed over this place."""
        return any(move is None or (move[0] or (0, 0)) < pair <= (move[1] or (0, 0)) for move in self.moves)

    def repeats(self, pair: Pair) -> bool:
        """Say whether a decision went back before this place."""
        return any(move is None or (move[1] or (0, 0)) < pair <= (move[0] or (0, 0)) for move in self.moves)


@dataclass(slots=True)
class Account:
    """The result for one processor.

    Attributes:
        handled: lines that it left.
        counts: messages by what came of them: the faults, and what `_EXPLAINED` has a sentence for.
        stopped: why it does not go on.
        findings: the first of each fault, in words.

    """

    name: str
    produced: int
    order: Order
    stopped: str | None
    handled: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)

    def note(self, kind: str, text: str) -> None:
        """Count one message."""
        self.counts[kind] += 1
        if kind in _FAULTS and self.counts[kind] <= SAMPLES:
            self.findings.append(text)

    @property
    def is_exact(self) -> bool:
        """Nothing lost, doubled, reordered or invented."""
        return not any(self.counts[kind] for kind in _FAULTS)


def compare(
    name: str,
    produced: Sequence[Message],
    lines: Iterable[str],
    *,
    order: Order,
    undone: frozenset[str] | set[str] = frozenset(),
    reasons: Reasons | None = None,
) -> Account:
    """Count the lines, ids in the order in which they were written, against what was produced."""
    reasons = reasons or Reasons()
    messages = {message.message_id: message for message in produced}
    seen: Counter[str] = Counter()
    furthest: dict[str | None, Message] = {}
    account = Account(name, len(messages), order, reasons.stopped)
    account.counts["by reader"] = sum(message.by_reader for message in produced)
    for message_id in lines:
        account.handled += 1
        message = messages.get(message_id)
        if message is None:
            kind = "invented" if message_id in undone else "unknown"
            account.note(kind, f"{message_id} was handled, and its transaction was rolled back")
            continue
        seen[message_id] += 1
        if seen[message_id] > 1:
            kind = "repeated" if reasons.repeats(message.pair) else "duplicated"
            account.note(kind, f"{_describe(message)} was handled {seen[message_id]} times")
        elif order is Order.ALL or (order is Order.KEY and not message.by_reader):
            line = None if order is Order.ALL else message.key
            before = furthest.get(line, message)
            if message.pair < before.pair:
                account.note("out of order", f"{_describe(message)} was handled after {_describe(before)}")
            else:
                furthest[line] = message
    for message in produced:
        if message.message_id not in seen:
            kind = "passed over" if reasons.skips(message.pair) else "waiting" if reasons.stopped else "lost"
            account.note(kind, f"{_describe(message)} was not handled")
    return account


def format_accounts(accounts: Sequence[Account]) -> list[str]:
    """Write the ledger: a table, then a sentence for each number that needs one."""
    head = ("LEDGER", "PRODUCED", "HANDLED", "LOST", "DUPLICATED", "OUT OF ORDER")
    lines = format_rows([head, *(_format_row(account) for account in accounts)])
    for account in accounts:
        explained = (
            text.format(count=account.counts[kind], stopped=account.stopped)
            for kind, text in _EXPLAINED.items()
            if account.counts[kind]
        )
        lines += [f"{account.name}: {text}" for text in (*explained, *account.findings)]
    exact = all(account.is_exact for account in accounts)
    return [*lines, "nothing lost, nothing twice, nothing out of order" if exact else "THE LEDGER IS NOT EXACT"]


def _format_row(account: Account) -> tuple[str, ...]:
    counts = account.counts
    order = "any order" if account.order is Order.NONE else str(counts["out of order"])
    numbers = (account.produced, account.handled, counts["lost"], counts["duplicated"])
    return (account.name, *map(str, numbers), order)


def _describe(message: Message) -> str:
    who = " (yours)" if message.by_reader else ""
    return f"{message.message_id} of key {message.key} at {message.pair[0]}:{message.pair[1]}{who}"
