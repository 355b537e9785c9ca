"""PURE: how long it took after each fault until handling went on.

From the blow (a process is killed, others can go on) or from the fault's end (the server is back) until the first
effect: of each partition that stood still, so the last of them counts. Where another fault struck the same case before
that, the time says nothing about the first one: such a fault is counted apart.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from tests.chaos.schedule import strikes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.chaos.cases import Case
    from tests.chaos.faults import Struck
    from tests.chaos.schedule import Kind


@dataclass(frozen=True, slots=True)
class Recovery:
    """One fault and one case.

    Attributes:
        seconds: until the first effect; None: none came, or it is not this fault's alone.
        overlapped: another fault struck the case meanwhile.

    """

    kind: Kind
    case: str
    seconds: float | None
    overlapped: bool = False


@dataclass(frozen=True, slots=True)
class Times:
    """The times of several recoveries, in seconds."""

    count: int
    p50: float
    longest: float


def measure(
    struck: Sequence[Struck], cases: Sequence[Case], effects: Mapping[str, Mapping[int, Sequence[float]]]
) -> list[Recovery]:
    """Measure each fault for each case that it struck. `effects`: case, partition, times of effects, ascending."""
    found = []
    for one in struck:
        for case in cases:
            if one.harmless or not strikes(one.fault, case):
                continue
            seconds = _until_effect(one, effects[case.name])
            until = one.counts_from + (seconds or 0)
            if any(other is not one and _meets(other, case, one.began, until) for other in struck):
                found.append(Recovery(one.fault.kind, case.name, None, overlapped=True))
            else:
                found.append(Recovery(one.fault.kind, case.name, seconds))
    return found


def _meets(other: Struck, case: Case, began: float, until: float) -> bool:
    return not other.harmless and strikes(other.fault, case) and other.began < until and other.ended > began


def _until_effect(one: Struck, effects: Mapping[int, Sequence[float]]) -> float | None:
    longest = 0.0
    for partition in one.partitions or tuple(effects):
        times = effects.get(partition, ())
        at = bisect_right(times, one.counts_from)
        if at == len(times):
            return None
        longest = max(longest, times[at] - one.counts_from)
    return longest if effects else None


def summarize(recoveries: Sequence[Recovery]) -> Times | None:
    """Return the times of those that can be told."""
    seconds = sorted(recovery.seconds for recovery in recoveries if recovery.seconds is not None)
    if not seconds:
        return None
    return Times(len(seconds), median(seconds), seconds[-1])


def by_kind(recoveries: Sequence[Recovery]) -> dict[Kind, list[Recovery]]:
    """Group them."""
    groups: dict[Kind, list[Recovery]] = defaultdict(list)
    for recovery in recoveries:
        groups[recovery.kind].append(recovery)
    return dict(groups)
