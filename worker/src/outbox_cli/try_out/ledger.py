"""PURE: what was produced, compared with the lines that one processor's handling left.

The demo's ledger (`tests/tools/ledger`) shares nothing with the product on purpose; a test compares the two over random
histories.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SAMPLES: Final = 3
"""Messages that are named for each finding; counting goes on."""
Pair = tuple[int, int]
_FAULTS: Final = ("lost", "duplicated", "out of order", "invented")


class Order(StrEnum):
    """In which order a processor's first lines must stand."""

    ALL = "all"
    """That of the pairs (transaction id, position)."""
    KEY = "key"
    """The same within each key, for the shop's messages: a key of the shop has one producer."""
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Message:
    """A committed message.

    Attributes:
        by_reader: it is in no producer's commit log; the reader inserted it.

    """

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


@dataclass(frozen=True, slots=True)
class Account:
    """The result for one processor.

    Attributes:
        lost: committed, not handled, and nothing says why.
        duplicated: lines beyond the first of a message that no decision explains.
        out_of_order: first lines that stand after one that should come later; None where there is no order.
        invented: lines of messages that were rolled back.
        waiting: not handled because the processor is stopped.
        passed_over: not handled because a person moved the checkpoint forward.
        repeated: further lines because a person moved it back.
        by_reader: of those produced.
        stopped: why it does not go on.
        unknown: lines of messages that are neither in a commit log nor in the table: the reader deleted them.

    """

    name: str
    produced: int
    handled: int
    lost: int = 0
    duplicated: int = 0
    out_of_order: int | None = None
    invented: int = 0
    waiting: int = 0
    passed_over: int = 0
    repeated: int = 0
    unknown: int = 0
    by_reader: int = 0
    stopped: str | None = None
    findings: tuple[str, ...] = ()

    @property
    def is_exact(self) -> bool:
        """Nothing lost, doubled, reordered or invented."""
        return not (self.lost or self.duplicated or self.out_of_order or self.invented)


@dataclass(slots=True)
class _Findings:
    texts: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def note(self, kind: str, text: str) -> None:
        self.counts[kind] += 1
        if kind in _FAULTS and self.counts[kind] <= SAMPLES:
            self.texts.append(text)


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
    found = _Findings()
    total = 0
    for message_id in lines:
        total += 1
        message = messages.get(message_id)
        if message is None:
            kind = "invented" if message_id in undone else "unknown"
            found.note(kind, f"{message_id} was handled, and {_NOT_COMMITTED[kind]}")
            continue
        seen[message_id] += 1
        if seen[message_id] > 1:
            kind = "repeated" if reasons.repeats(message.pair) else "duplicated"
            found.note(kind, f"{_describe(message)} was handled {seen[message_id]} times")
        elif order is Order.ALL or (order is Order.KEY and not message.by_reader):
            line = None if order is Order.ALL else message.key
            before = furthest.get(line, message)
            if message.pair < before.pair:
                found.note("out of order", f"{_describe(message)} was handled after {_describe(before)}")
            else:
                furthest[line] = message
    for message in produced:
        if message.message_id not in seen:
            kind = "passed over" if reasons.skips(message.pair) else "waiting" if reasons.stopped else "lost"
            found.note(kind, f"{_describe(message)} was not handled")
    counts = found.counts
    return Account(
        name, len(messages), total, counts["lost"], counts["duplicated"],
        None if order is Order.NONE else counts["out of order"], counts["invented"], counts["waiting"],
        counts["passed over"], counts["repeated"], counts["unknown"],
        sum(message.by_reader for message in produced), reasons.stopped, tuple(found.texts),
    )  # fmt: skip


def format_accounts(accounts: Sequence[Account]) -> list[str]:
    """Write the ledger: a table, then a sentence for each number that needs one."""
    head = ("LEDGER", "PRODUCED", "HANDLED", "LOST", "DUPLICATED", "OUT OF ORDER")
    rows = [head, *(_format_row(account) for account in accounts)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for account in accounts:
        lines += [f"{account.name}: {text}" for text in (*_explain(account), *account.findings)]
    exact = all(account.is_exact for account in accounts)
    return [*lines, "nothing lost, nothing twice, nothing out of order" if exact else "THE LEDGER IS NOT EXACT"]


def _format_row(account: Account) -> tuple[str, ...]:
    order = "any order" if account.out_of_order is None else str(account.out_of_order)
    numbers = (account.produced, account.handled, account.lost, account.duplicated)
    return (account.name, *map(str, numbers), order)


def _explain(account: Account) -> list[str]:
    """Say what the table does not: what people did, and what came of it."""
    return [
        text
        for count, text in (
            (account.by_reader, f"{account.by_reader} of the messages produced are yours, in no producer's commit log"),
            (account.waiting, f"{account.waiting} wait and are not lost: {account.stopped}"),
            (
                account.passed_over,
                f"{account.passed_over} were passed over by a decision of yours about its checkpoint",
            ),
            (account.repeated, f"{account.repeated} were handled again by a decision of yours about its checkpoint"),
            (account.invented, f"{account.invented} were handled although their transactions rolled back"),
            (account.unknown, f"{account.unknown} were handled that are not in the outbox any more: deleted since"),
        )
        if count
    ]


_NOT_COMMITTED: Final = {
    "invented": "its transaction was rolled back",
    "unknown": "is neither in a commit log nor in outbox.messages any more",
}


def _describe(message: Message) -> str:
    who = " (yours)" if message.by_reader else ""
    return f"{message.message_id} of key {message.key} at {message.pair[0]}:{message.pair[1]}{who}"
