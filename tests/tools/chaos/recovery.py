"""PURE: how long it took after each fault until handling went on.

From the blow (a process is killed, others can go on) or from the fault's end (the server is back) until the first
effect: of each partition that stood still, so the last of them counts. In mode Competing, where nothing else stands
still, until the last message that the victim had in hand has its effect; and where the number of partitions is
changed, until the database has it. Where another fault struck the same case before that, the time says nothing about
the first one: such a fault is counted apart.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from tests.tools.chaos.cases import RECOVERY_SECONDS, TAKEOVER_SECONDS
from tests.tools.chaos.schedule import Kind, strikes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.tools.chaos.cases import Case
    from tests.tools.chaos.faults import Struck


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
class Seen:
    """What was seen of a case; times in seconds since 1970.

    Attributes:
        effects: of each partition, when effects came, ascending.
        messages: when the first effect of each message came.
        changes: when the database had another number of partitions.

    """

    effects: Mapping[int, Sequence[float]]
    messages: Mapping[str, float] = field(default_factory=dict)
    changes: Sequence[float] = ()


def measure(struck: Sequence[Struck], cases: Sequence[Case], seen: Mapping[str, Seen]) -> list[Recovery]:
    """Measure each fault for each case that it struck."""
    found = []
    for one in struck:
        for case in cases:
            if one.harmless or not strikes(one.fault, case):
                continue
            seconds = _until_it_goes_on(one, seen[case.name])
            until = one.counts_from + (seconds or 0)
            # The number of partitions follows a change of the resource when each owner has stopped: that may be later.
            divided = one.fault.kind not in _DIVISIONS and any(
                one.counts_from < at < until for at in seen[case.name].changes
            )
            if divided or any(other is not one and _meets(other, case, one.began, until) for other in struck):
                found.append(Recovery(one.fault.kind, case.name, None, overlapped=True))
            else:
                found.append(Recovery(one.fault.kind, case.name, seconds))
    return found


_KILLS: Final = (Kind.KILL, Kind.KILL_IN_BATCH)
_DIVISIONS: Final = (Kind.DIVIDE, Kind.DIVIDE_FROZEN)
_STOPS: Final = (*_KILLS, Kind.FREEZE, Kind.FREEZE_IN_BATCH)


def find_late(recoveries: Sequence[Recovery], case: Case) -> list[str]:
    """Name each takeover that lasted too long, where no other fault struck the case meanwhile."""
    kinds, limit = (_STOPS, TAKEOVER_SECONDS) if case.fenced else (_KILLS, RECOVERY_SECONDS)
    return [
        f"{recovery.kind}: it took {recovery.seconds:.1f} s until others went on, not {limit:g} s"
        for recovery in recoveries
        if recovery.case == case.name
        and recovery.kind in kinds
        and recovery.seconds is not None
        and recovery.seconds > limit
    ]


def _meets(other: Struck, case: Case, began: float, until: float) -> bool:
    # A frozen process that owned nothing lost nothing, but it may be the one that was to go on.
    delays = not other.harmless or other.fault.kind is Kind.FREEZE
    return delays and strikes(other.fault, case) and other.began < until and other.ended > began


def _until_it_goes_on(one: Struck, seen: Seen) -> float | None:
    if one.messages:
        if not all(message in seen.messages for message in one.messages):
            return None
        return max(0.0, *(seen.messages[message] - one.counts_from for message in one.messages))
    if one.fault.kind in _DIVISIONS:
        return next((at - one.counts_from for at in seen.changes if at > one.counts_from), None)
    return _until_effect(one, seen.effects)


def _until_effect(one: Struck, effects: Mapping[int, Sequence[float]]) -> float | None:
    longest = 0.0
    for partition in one.partitions or tuple(effects):
        times = effects.get(partition, ())
        at = bisect_right(times, one.counts_from)
        if at == len(times):
            return None
        longest = max(longest, times[at] - one.counts_from)
    return longest if effects else None
