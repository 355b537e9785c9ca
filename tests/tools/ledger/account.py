"""PURE: compare what was committed with what a target holds.

A target is either a list (SQL rows by their own serial number, a queue, Parquet rows), in which every message stands
for itself, or sums (per-minute aggregates), in which only counts and amounts are left. Order is checked where the
target has one.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tests.tools.ledger.commitlog import Committed

SAMPLES = 5
"""How many messages are named for each finding; counting goes on."""


class Order(StrEnum):
    """In which order a target's first traces must stand."""

    TOTAL = "the pair's"
    KEY = "the pair's within each key"
    COMMIT = "the commits' within each key"
    """Which is that of the sequence: who writes the next message of a key has its lock."""
    NONE = "any"


@dataclass(frozen=True, slots=True)
class Handled:
    """One trace of a message in a target, in the order in which the target took it.

    Attributes:
        message_id: the id that arrived with it.
        key: from its payload: with `sequence` it says which message it is, whatever id it carries.
        handler: who handled it, where the target shows it (a pod's name); for people.

    """

    message_id: str
    key: str
    sequence: int
    cents: int = 0
    handler: str = ""

    @classmethod
    def read(cls, message_id: str, payload: bytes, handler: str = "") -> Self:
        """Read from a message's payload which one it is."""
        order = json.loads(payload)
        return cls(message_id, order["orderKey"], order["sequence"], order["cents"], handler)


@dataclass(frozen=True, slots=True)
class Account:
    """The result for one target.

    Attributes:
        lost: committed and not in the target.
        duplicated: traces beyond the first of a message.
        out_of_order: messages whose first trace comes after one that should come later; None where there is no order.
        foreign: traces of messages that no producer committed (rolled back, or invented).
        renamed: traces whose id is not the one that the producer committed.
        findings: the first few of each, for people.

    """

    name: str
    produced: int
    handled: int
    lost: int
    duplicated: int
    out_of_order: int | None
    foreign: int = 0
    renamed: int = 0
    findings: tuple[str, ...] = ()

    def is_exact(self) -> bool:
        """Nothing lost, doubled, reordered, invented or renamed."""
        return self.is_at_least_once() and not self.duplicated

    def is_at_least_once(self) -> bool:
        """As exact, but messages may stand more than once."""
        return not (self.lost or self.out_of_order or self.foreign or self.renamed)


def compare(
    name: str,
    produced: Sequence[Committed],
    handled: Iterable[Handled],
    *,
    order: Order = Order.TOTAL,
) -> Account:
    """Count every trace in a target against the commit log (in pair order)."""
    place = {(m.key, m.sequence): number for number, m in enumerate(produced)}
    traces: Counter[int] = Counter()
    findings: list[str] = []
    duplicated = out_of_order = foreign = renamed = total = 0
    furthest: dict[str, tuple[int, int]] = {}
    for trace in handled:
        total += 1
        number = place.get((trace.key, trace.sequence))
        if number is None:
            foreign += 1
            _note(findings, foreign, f"{trace.key}#{trace.sequence} ({trace.message_id}) was never committed")
            continue
        if trace.message_id != produced[number].message_id:
            renamed += 1
            _note(findings, renamed, f"{trace.key}#{trace.sequence} came as {trace.message_id}")
        traces[number] += 1
        if traces[number] > 1:
            duplicated += 1
            _note(findings, duplicated, f"{trace.key}#{trace.sequence} stands {traces[number]} times")
        line = "" if order is Order.TOTAL else trace.key
        here = (trace.sequence if order is Order.COMMIT else number, number)
        before = furthest.get(line, here)
        if order is not Order.NONE and traces[number] == 1 and here < before:
            out_of_order += 1
            late, early = produced[number], produced[before[1]]
            _note(
                findings, out_of_order,
                f"{late.key}#{late.sequence} at {late.pair} came after {early.key}#{early.sequence} at {early.pair}",
            )  # fmt: skip
        furthest[line] = max(before, here)
    missing = [m for number, m in enumerate(produced) if number not in traces]
    findings += [f"{m.key}#{m.sequence} ({m.message_id}) at {m.pair} is lost" for m in missing[:SAMPLES]]
    return Account(
        name=name,
        produced=len(produced),
        handled=total,
        lost=len(missing),
        duplicated=duplicated,
        out_of_order=None if order is Order.NONE else out_of_order,
        foreign=foreign,
        renamed=renamed,
        findings=tuple(findings),
    )


def compare_sums(
    name: str, produced: Sequence[Committed], sums: Mapping[Any, tuple[int, int]], *, by: str = "minute"
) -> Account:
    """Count aggregates, group → (messages, cents), against the commit log; an aggregate has no order.

    `by` names what the target groups by: `minute` or `key`.

    Too few in one group and too many in another never cancel out. A right count with a wrong amount is one lost and one
    doubled: one message stands there in another's place.
    """
    group_of = attrgetter(by)
    wanted: dict[Any, tuple[int, int]] = {}
    for message in produced:
        count, cents = wanted.get(group_of(message), (0, 0))
        wanted[group_of(message)] = (count + 1, cents + message.cents)
    lost = duplicated = 0
    findings: list[str] = []
    for group in sorted(wanted.keys() | sums.keys()):
        should, is_ = wanted.get(group, (0, 0)), sums.get(group, (0, 0))
        if should == is_:
            continue
        swapped = int(should[0] == is_[0])
        lost += max(0, should[0] - is_[0]) + swapped
        duplicated += max(0, is_[0] - should[0]) + swapped
        findings.append(f"{by} {group}: {is_[0]} messages of {is_[1]} cents, should be {should[0]} of {should[1]}")
    return Account(
        name=name,
        produced=len(produced),
        handled=sum(count for count, _ in sums.values()),
        lost=lost,
        duplicated=duplicated,
        out_of_order=None,
        findings=tuple(findings[:SAMPLES]),
    )


def _note(findings: list[str], count: int, text: str) -> None:
    if count <= SAMPLES:
        findings.append(text)
