"""PURE: the ledger's self-test. Plant one loss, one duplicate and one swap, and see whether each is found.

It runs at the end of every demo over a copy of what was really read, and says no if the ledger overlooks or invents
anything: a ledger that finds nothing is worth something only if it would have found something.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tests.tools.ledger.account import Account, Order, compare, compare_sums
from tests.tools.ledger.history import find_double_owners, find_moves_back, find_stale_effects

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from random import Random

    from tests.tools.ledger.account import Handled
    from tests.tools.ledger.commitlog import Committed
    from tests.tools.ledger.history import Effect, Held, Stored


def plant_loss(handled: Sequence[Handled], random: Random) -> list[Handled]:
    """Take one message's every trace away."""
    victim = random.choice(handled)
    return [trace for trace in handled if (trace.key, trace.sequence) != (victim.key, victim.sequence)]


def plant_duplicate(handled: Sequence[Handled], random: Random) -> list[Handled]:
    """Let one message stand once more, at the end."""
    return [*handled, random.choice(handled)]


def plant_swap(handled: Sequence[Handled], random: Random, *, within_key: bool = False) -> list[Handled]:
    """Exchange two neighbours, both of them first traces that follow each other in the promised order."""
    spoiled = list(handled)
    seen: set[tuple[str, int]] = set()
    firsts = []
    for number, trace in enumerate(spoiled):
        if (trace.key, trace.sequence) not in seen:
            firsts.append(number)
            seen.add((trace.key, trace.sequence))
    neighbours = list(pairwise(firsts))
    if within_key:
        lines: dict[str, list[int]] = {}
        for number in firsts:
            lines.setdefault(spoiled[number].key, []).append(number)
        neighbours = [both for line in lines.values() for both in pairwise(line)]
    one, other = random.choice(neighbours)
    spoiled[one], spoiled[other] = spoiled[other], spoiled[one]
    return spoiled


def plant_foreign(handled: Sequence[Handled], random: Random) -> list[Handled]:
    """Add a message that no producer committed."""
    return [*handled, replace(random.choice(handled), key="never-committed", sequence=1)]


def check_list(
    produced: Sequence[Committed],
    handled: Sequence[Handled],
    random: Random,
    *,
    order: Order = Order.TOTAL,
) -> list[str]:
    """Plant each fault into a copy of one target's traces; return what the ledger failed to find (empty: all found)."""
    clean = compare("clean", produced, handled, order=order)
    cases: dict[str, tuple[Callable[..., list[Handled]], dict[str, int]]] = {
        "loss": (plant_loss, {"lost": 1}),
        "duplicate": (plant_duplicate, {"duplicated": 1}),
        "message never committed": (plant_foreign, {"foreign": 1}),
    }
    if order is not Order.NONE:
        cases["swap"] = (partial(plant_swap, within_key=order is not Order.TOTAL), {"out_of_order": 1})
    failures = []
    for name, (spoil, more) in cases.items():
        found = compare(name, produced, spoil(handled, random), order=order)
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


def plant_moved_back(samples: Sequence[Stored], random: Random) -> list[Stored]:
    """Let one checkpoint fall below one that was seen before it: half of a pair higher does not make it higher."""
    at = random.randrange(len(samples))
    first, *rest = samples[at].place
    lower = replace(samples[at], place=(first - 1, *(number + 1 for number in rest)))
    return [*samples[: at + 1], lower, *samples[at + 1 :]]


def plant_second_owner(samples: Sequence[Held], random: Random) -> list[Held]:
    """Let one epoch be somebody else's too."""
    at = random.randrange(len(samples))
    return [*samples[: at + 1], replace(samples[at], owner="an intruder"), *samples[at + 1 :]]


def plant_stale_effect(effects: Sequence[Effect], random: Random) -> list[Effect]:
    """Let a former owner commit once more, after everybody else."""
    one = random.choice(effects)
    last = max(effect.at for effect in effects)
    newer = replace(one, at=last + 1, epoch=(one.epoch or 0) + 1_000_000)
    return [*effects, newer, replace(one, at=last + 2)]


def plant_thief(effects: Sequence[Effect], random: Random) -> list[Effect]:
    """Let somebody handle what another holds."""
    at = random.randrange(len(effects))
    return [*effects[:at], replace(effects[at], handler="a thief"), *effects[at + 1 :]]


def check_history(
    stored: Sequence[Stored], held: Sequence[Held], effects: Sequence[Effect], random: Random
) -> list[str]:
    """Plant each fault into a copy of one processor's history; return what was not found. What is empty is left out."""
    failures = []
    if stored and len(find_moves_back(plant_moved_back(stored, random))) <= len(find_moves_back(stored)):
        failures.append("planted a checkpoint that moved back: not found")
    if held and len(find_double_owners(plant_second_owner(held, random))) <= len(find_double_owners(held)):
        failures.append("planted an epoch with two owners: not found")
    for name, spoil in (("an effect of a former owner", plant_stale_effect), ("a thief's effect", plant_thief)):
        if effects and len(find_stale_effects(spoil(effects, random))) <= len(find_stale_effects(effects)):
            failures.append(f"planted {name}: not found")
    return failures
