"""PURE: the ledger's self-test. Plant one loss, one duplicate and one swap, and see whether each is found.

It runs at the end of every demo over a copy of what was really read, and says no if the ledger overlooks or invents
anything: a ledger that finds nothing is worth something only if it would have found something.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.ledger.account import Account, compare, compare_sums

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from random import Random

    from tests.ledger.account import Handled
    from tests.ledger.commitlog import Committed


def plant_loss(handled: Sequence[Handled], random: Random) -> list[Handled]:
    """Take one message's every trace away."""
    victim = random.choice(handled)
    return [trace for trace in handled if (trace.key, trace.sequence) != (victim.key, victim.sequence)]


def plant_duplicate(handled: Sequence[Handled], random: Random) -> list[Handled]:
    """Let one message stand once more, at the end."""
    return [*handled, random.choice(handled)]


def plant_swap(handled: Sequence[Handled], random: Random) -> list[Handled]:
    """Exchange two neighbours, both of them first traces that follow each other in the promised order."""
    spoiled = list(handled)
    seen: set[tuple[str, int]] = set()
    firsts = []
    for number, trace in enumerate(spoiled):
        if (trace.key, trace.sequence) not in seen:
            firsts.append(number)
            seen.add((trace.key, trace.sequence))
    at = random.randrange(len(firsts) - 1)
    one, other = firsts[at], firsts[at + 1]
    spoiled[one], spoiled[other] = spoiled[other], spoiled[one]
    return spoiled


def plant_foreign(handled: Sequence[Handled], random: Random) -> list[Handled]:
    """Add a message that no producer committed."""
    return [*handled, replace(random.choice(handled), key="never-committed", sequence=1)]


def check_list(
    produced: Sequence[Committed], handled: Sequence[Handled], random: Random, *, ordered: bool = True
) -> list[str]:
    """Plant each fault into a copy of one target's traces; return what the ledger failed to find (empty: all found)."""
    clean = compare("clean", produced, handled, ordered=ordered)
    cases = {
        "loss": (plant_loss, {"lost": 1}),
        "duplicate": (plant_duplicate, {"duplicated": 1}),
        "message never committed": (plant_foreign, {"foreign": 1}),
    }
    if ordered:
        cases["swap"] = (plant_swap, {"out_of_order": 1})
    failures = []
    for name, (spoil, more) in cases.items():
        found = compare(name, produced, spoil(handled, random), ordered=ordered)
        failures += _unexpected(name, clean, found, more, may_lower={"duplicated"} if name == "loss" else set())
    return failures


def check_sums(produced: Sequence[Committed], sums: Mapping[Any, tuple[int, int]], *, by: str = "minute") -> list[str]:
    """Plant a loss, a duplicate and a swap of one message for another into aggregates."""
    clean = compare_sums("clean", produced, sums, by=by)
    group = max(sums, key=lambda key: sums[key][0])
    count, cents = sums[group]
    cases = {
        "loss": ((count - 1, cents - 1), {"lost": 1}),
        "duplicate": ((count + 1, cents + 1), {"duplicated": 1}),
        "swap": ((count, cents + 1), {"lost": 1, "duplicated": 1}),
    }
    failures = []
    for name, (planted, more) in cases.items():
        found = compare_sums(name, produced, {**sums, group: planted}, by=by)
        failures += _unexpected(name, clean, found, more, may_lower=set())
    return failures


def _unexpected(
    name: str, clean: Account, found: Account, more: Mapping[str, int], *, may_lower: set[str]
) -> list[str]:
    """Compare the counts with and without the planted fault; a loss may take duplicates of its message along."""
    failures = []
    for count in ("lost", "duplicated", "out_of_order", "foreign"):
        before, after = getattr(clean, count) or 0, getattr(found, count) or 0
        wanted = before + more.get(count, 0)
        if after != wanted and not (count in may_lower and after < wanted):
            failures.append(f"planted one {name}: {count} should be {wanted}, the ledger says {after}")
    return failures
