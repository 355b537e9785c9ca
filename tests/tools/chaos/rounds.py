"""PURE: which cases run at once. More than a few at a time would measure the machine, so many cases come in rounds.

A *family* is what `make test` must have one of each: a mode, a cursor, or a place of the effects.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Final

from tests.tools.chaos.cases import Target

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.tools.chaos.cases import Case

MOST_AT_ONCE: Final = 7
"""Cases: with two or three processes each, what two cores can bear."""
SEED: Final = 316
"""Of `make test`: every kind of fault strikes its sample in 70 s, and each case is frozen in mid-batch."""
_FAMILIES: Final = (
    ("ordered-", "failing-ordered-", "shared-ordered-"), ("partitioned-", "failing-partitioned-"),
    ("snapshot-ordered-", "snapshot-partitioned-", "shared-snapshot-"),
    ("competing-", "queue-", "failing-competing-", "shared-competing-"), ("apart-",), ("stream-",), ("kafka-",),
)  # fmt: skip


def deal_rounds(seed: int, cases: Sequence[Case]) -> list[tuple[Case, ...]]:
    """Deal the cases into rounds of about the same size, so that modes and targets meet."""
    count = -(-len(cases) // MOST_AT_ONCE)
    random = Random(f"{seed}/rounds")
    by_family: list[Case] = []
    for family in _FAMILIES:
        by_family += random.sample(found := _find(family, cases), len(found))
    rounds = [tuple(by_family[number::count]) for number in range(count)]
    return [tuple(sorted(one, key=cases.index)) for one in rounds]


def draw_sample(seed: int, cases: Sequence[Case]) -> tuple[Case, ...]:
    """Draw one case of each family, one of them at least with a broker."""
    random = Random(f"{seed}/sample")
    while True:
        drawn = tuple(random.choice(_find(family, cases)) for family in _FAMILIES)
        if any(case.target is Target.RABBITMQ for case in drawn):
            return drawn


def _find(family: Sequence[str], cases: Sequence[Case]) -> list[Case]:
    return [case for case in cases if case.name.startswith(tuple(family))]
