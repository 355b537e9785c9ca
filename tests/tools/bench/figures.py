"""PURE: what a case measured, and the numbers that the report shows of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

SPREAD = 0.15
"""Most that the middle half of one candidate's runs may differ, as a part of their median, drift taken out."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One number that a case measures in every run, for example messages a second.

    Attributes:
        steady: runs that lie far apart say that the machine was busy; not so where a figure is small or an extreme.

    """

    name: str
    higher_is_better: bool = True
    steady: bool = True


@dataclass(frozen=True, slots=True)
class Turn:
    """What one candidate did in one run.

    Attributes:
        values: the number of each figure, by the figure's name. Empty: the candidate did not finish.
        cpu: CPU time by process: microseconds a message, or what the case says.
        failure: what the ledger found wrong; empty: the target is exactly as it must be.

    """

    values: dict[str, float]
    cpu: dict[str, float] = field(default_factory=dict)
    failure: str = ""


@dataclass(slots=True)
class Result:
    """All runs of one candidate.

    Attributes:
        counted: messages were handled, so a ledger was made.

    """

    name: str
    ours: bool
    settings: str
    turns: list[Turn] = field(default_factory=list)
    peak_mb: float = 0.0
    counted: bool = True

    def numbers(self, figure: str) -> list[float]:
        """Return the figure of each run that has it; a run that failed does not count."""
        return list(self.by_round(figure).values())

    def by_round(self, figure: str) -> dict[int, float]:
        """Return the same numbers by the round, from 0, in which every candidate had a run."""
        return {
            number: turn.values[figure]
            for number, turn in enumerate(self.turns)
            if figure in turn.values and not turn.failure
        }

    def failures(self) -> list[str]:
        """Return what was wrong, by run."""
        return [f"run {number}: {turn.failure}" for number, turn in enumerate(self.turns, 1) if turn.failure]

    def cpu(self) -> dict[str, float]:
        """Return the median CPU time of each process."""
        counted = [turn.cpu for turn in self.turns if turn.cpu and not turn.failure]
        names = dict.fromkeys(name for cpu in counted for name in cpu)
        return {name: median(cpu[name] for cpu in counted if name in cpu) for name in names}


def calculate_spread(numbers: list[float]) -> float:
    """Return how far the quartiles of the numbers lie apart, as a part of their median.

    The median does not move with one odd run, so one odd run does not make it doubtful; least and most would, and the
    more runs there are, the further those lie apart.
    """
    middle = median(numbers) if numbers else 0.0
    if not middle or len(numbers) == 1:
        return 0.0
    first, _, third = quantiles(numbers, method="inclusive")
    return (third - first) / middle


def take_out_drift(results: Sequence[Result], figure: Figure) -> list[list[float]]:
    """Return each candidate's numbers, divided by how much faster or slower the others were in the same round.

    A virtual machine becomes slower and faster from minute to minute, for every program alike. That moves no ratio of
    two candidates, which is what a table is read for. What a round did to the others is the median of what it did to
    each, so one odd program moves nothing. A round in which a candidate failed does not count, nor one with a number
    that is nothing.
    """
    numbers = [each.by_round(figure.name) for each in results]
    whole = [number for number in (numbers[0] if numbers else ()) if all(each.get(number) for each in numbers)]
    if not whole:
        return [[] for _ in results]
    parts = [{number: each[number] / median(each[n] for n in whole) for number in whole} for each in numbers]
    return [
        [own[number] / median([other[number] for other in parts if other is not part] or [1.0]) for number in whole]
        for own, part in zip(numbers, parts, strict=True)
    ]


def find_unsteady(results: Sequence[Result], figure: Figure) -> dict[str, float]:
    """Return by name the spread of those candidates whose runs lie too far apart."""
    if not figure.steady:
        return {}
    spreads = [calculate_spread(numbers) for numbers in take_out_drift(results, figure)]
    return {each.name: spread for each, spread in zip(results, spreads, strict=True) if spread > SPREAD}


def calculate_ratio(ours: Result, theirs: Result, figure: Figure, *, to_best: bool = False) -> float | None:
    """Return how many times better ours is: the median of the rounds' ratios.

    None: there is no round in which both have a number, and one to divide by. With `to_best` it is our median beside
    their best run.
    """
    our, their = ours.by_round(figure.name), theirs.by_round(figure.name)
    ratios = [our[number] / their[number] for number in our if our[number] and their.get(number)]
    if not ratios:
        return None
    if to_best:
        best = max if figure.higher_is_better else min
        ratios = [median(our.values()) / best(their.values())]
    return median(ratios) if figure.higher_is_better else 1 / median(ratios)


def calculate_percentile(numbers: list[float], share: float) -> float:
    """Return the number below which this share of them lies (nearest rank)."""
    ordered = sorted(numbers)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
