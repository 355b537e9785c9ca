"""Whether the machine was quiet enough for figures to mean something. `decide_*` are pure; `Load` reads /proc/stat."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Self

from tests.tools.bench.figures import SPREAD, Figure, Result, find_unsteady
from tests.tools.bench.processes import cpu_of_tree

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FOREIGN = 0.10
"""Part of the processors that programs other than ours may use."""
STOLEN = 0.02
"""Part of the processors' time that the machine below may take away."""


@dataclass(frozen=True, slots=True)
class Others:
    """What others took of the processors in some time, as parts of it."""

    foreign: float
    stolen: float


@dataclass(frozen=True, slots=True)
class Load:
    """The processors' counters at one moment, and what our own processes used of them; seconds."""

    busy: float
    stolen: float
    total: float
    own: float

    @classmethod
    def read(cls) -> Self:
        """Read them now."""
        ticks = os.sysconf("SC_CLK_TCK")
        line = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
        times = [int(value) / ticks for value in line]
        # Without interrupts: most of them are our own packets on the loopback, and no process is charged for them.
        user, nice, system, stolen = *times[:3], times[7]
        return cls(user + nice + system, stolen, sum(times), cpu_of_tree(os.getpid()))

    def until(self, later: Load) -> Others:
        """Compare with a later moment."""
        total = later.total - self.total
        if total <= 0:
            return Others(0.0, 0.0)
        foreign = (later.busy - self.busy) - (later.own - self.own)
        return Others(max(0.0, foreign / total), (later.stolen - self.stolen) / total)


def measure_others(seconds: float = 3.0) -> Others:
    """Watch the machine while nothing of ours works."""
    before = Load.read()
    time.sleep(seconds)
    return before.until(Load.read())


def decide_start(others: Others) -> list[str]:
    """Say why a measurement must not begin; empty: it may."""
    return _judge(others, "before the first run")


def count_rounds(wanted: int, results: Sequence[Result], figures: Sequence[Figure]) -> Iterator[int]:
    """Number the rounds: as many as wanted, and up to as many again while the runs of one of ours lie too far apart.

    In each round every candidate has one run. What disturbs the machine for a minute takes the quartiles of five runs
    with it, and hardly those of ten; a machine that is never quiet stays refused.
    """
    number = 0
    while number < wanted or (number < 2 * wanted and _find_doubtful(results, figures)):
        yield number
        number += 1


def decide_report(during: Sequence[Others], results: Sequence[Result], figures: Sequence[Figure]) -> list[str]:
    """Say why the figures of a case must not be reported; empty: they may."""
    reasons = []
    if during:
        middle = Others(median(each.foreign for each in during), median(each.stolen for each in during))
        reasons = _judge(middle, "during the runs (median)")
    return reasons + _find_doubtful(results, figures)


def _find_doubtful(results: Sequence[Result], figures: Sequence[Figure]) -> list[str]:
    """Say which of ours have runs that lie too far apart; a peer's are compared by its best run.

    Where nothing is compared with ours, as in the case `growth`, each line is asked for that.
    """
    ours = {each.name for each in results if each.ours} or {each.name for each in results}
    return [
        f"{name}: {figure.name}, without what the round did to the others, differed by {spread:.1%} in the middle half "
        f"of the runs, allowed are {SPREAD:.0%}"
        for figure in figures
        for name, spread in find_unsteady(results, figure).items()
        if name in ours
    ]


def _judge(others: Others, when: str) -> list[str]:
    reasons = []
    if others.foreign > FOREIGN:
        reasons.append(f"other programs used {others.foreign:.0%} of the processors {when}, allowed are {FOREIGN:.0%}")
    if others.stolen > STOLEN:
        reasons.append(
            f"the machine below took {others.stolen:.0%} of the processors' time {when}, allowed are {STOLEN:.0%}"
        )
    return reasons
