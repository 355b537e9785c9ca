"""PURE: what a case measured, and the numbers that the report shows of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median, quantiles

SPREAD = 0.15
"""Most that the middle half of one candidate's runs may differ, as a part of their median."""


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
        return [turn.values[figure] for turn in self.turns if figure in turn.values and not turn.failure]

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


def calculate_ratio(ours: list[float], theirs: list[float], figure: Figure) -> float | None:
    """Return how many times better our median is; None where one of them has no number, or nothing to compare."""
    if not ours or not theirs or not median(ours) or not median(theirs):
        return None
    ratio = median(ours) / median(theirs)
    return ratio if figure.higher_is_better else 1 / ratio


def calculate_percentile(numbers: list[float], share: float) -> float:
    """Return the number below which this share of them lies (nearest rank)."""
    ordered = sorted(numbers)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
