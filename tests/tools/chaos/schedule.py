"""PURE: which fault strikes when, drawn from a seed.

Each case has a lane of its own, and so has what all cases share (the servers). In a lane one fault follows another; two
lanes overlap as they will. A lane's kinds are dealt like cards, so that none comes a third time before each came once
in a run that is long enough. A lane depends on the seed, its name and its kinds alone: to run one case again, its
faults stay. Kafka has one kind less where a case writes to it in transactions.

The schedule names no process: a victim is `choice`, a share of those that live when it strikes, the owner more often.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from random import Random
from typing import TYPE_CHECKING, Any, Final

from tests.tools.chaos.cases import LEASE_SECONDS, Target

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.tools.chaos.cases import Case
    from tests.tools.chaos.faults import Struck

FIRST: Final = 4.0
"""Seconds until the first fault."""
LAST: Final = 10.0
"""No fault in the last so many seconds, so that each recovery can be seen."""
LEFT_OUT: Final = 0.1
"""Of the faults: more than these may not be left out, or the run says too little."""


class Kind(StrEnum):
    """What is done."""

    KILL = "kill a worker"
    KILL_IN_BATCH = "kill in mid-batch"
    FREEZE = "freeze a worker"
    FREEZE_IN_BATCH = "freeze in mid-batch"
    SLOW = "slow handler"
    TERMINATE = "terminate backends"
    CUT = "cut connections"
    SILENCE = "silent network"
    DELAY = "slow network"
    TEAR = "tear connections"
    CLOCK = "step a clock"
    SCALE = "scale"
    DIVIDE = "change partitions"
    DIVIDE_FROZEN = "change partitions, one frozen"
    POSTGRES = "crash PostgreSQL"
    BACKEND = "kill a backend"
    REPORTING = "crash the target's"
    DISK = "fill the disk"
    BROKER = "crash the broker"
    KAFKA = "freeze Kafka"
    KAFKA_CRASH = "crash Kafka"


AT_ONCE: Final = frozenset({
    Kind.KILL, Kind.KILL_IN_BATCH, Kind.FREEZE, Kind.FREEZE_IN_BATCH, Kind.TERMINATE, Kind.CLOCK, Kind.SCALE,
    Kind.DIVIDE, Kind.DIVIDE_FROZEN,
})  # fmt: skip
"""Recovery counts from the blow itself, because others can go on at once; for all others from the fault's end."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One line of the schedule.

    Attributes:
        at: seconds after the producers' start.
        case: whom it strikes; empty: all, by a server that they share.
        seconds: how long it lasts.
        choice: which victim, 0 to 1.
        amount: how much, in the kind's own unit: replicas, seconds of a clock's step, milliseconds, bytes, seconds
            until the restart, or which other number of partitions (a share, as `choice`).
        target: of two connections the one to the target (a broker, another database) instead of the messages'.

    """

    at: float
    kind: Kind
    case: str
    seconds: float
    choice: float
    amount: float
    target: bool = False

    @property
    def lane(self) -> str:
        """Whose faults follow each other: those of a case, or of a server."""
        return self.case or _SERVERS[self.kind]

    @property
    def ends(self) -> float:
        """When it is over, by the schedule."""
        return self.at + self.seconds


_OF_A_CASE: Final = (
    Kind.KILL, Kind.KILL_IN_BATCH, Kind.FREEZE, Kind.FREEZE_IN_BATCH, Kind.FREEZE_IN_BATCH, Kind.SLOW, Kind.TERMINATE,
    Kind.CUT, Kind.SILENCE, Kind.DELAY, Kind.TEAR, Kind.CLOCK, Kind.SCALE, Kind.SCALE,
)  # fmt: skip
_CHANGES: Final = (Kind.DIVIDE, Kind.DIVIDE_FROZEN)
_SERVERS: Final = {
    Kind.POSTGRES: "source", Kind.BACKEND: "source", Kind.DISK: "source", Kind.BROKER: "broker",
    Kind.REPORTING: "reporting", Kind.KAFKA: "kafka", Kind.KAFKA_CRASH: "kafka",
}  # fmt: skip
"""Each server has a lane of its own."""
_OF_A_DATABASE: Final = (18.0, 32.0)
_OF_A_BROKER: Final = (30.0, 50.0)
"""Seconds between two faults of a server, at least and at most. Beside seven cases a broker needs 15 to 50 to start:
with less between them it would hardly be up, and its starts would keep the processors from the workers."""


def strikes(fault: Fault, case: Case) -> bool:
    """Whether a fault is one for this case: its own, or that of a server that it needs."""
    if fault.case:
        return fault.case == case.name
    return _needs(case, _SERVERS[fault.kind])


def _is_bearable(kind: Kind, cases: Sequence[Case]) -> bool:
    """Say whether every case can bear it: a Kafka that is killed can leave a transaction without an end."""
    return kind is not Kind.KAFKA_CRASH or not any(case.target is Target.KAFKA and case.once for case in cases)


def _needs(case: Case, server: str) -> bool:
    return {
        "source": True,
        "broker": case.target in (Target.RABBITMQ, Target.STREAM),
        "kafka": case.target is Target.KAFKA,
        "reporting": case.apart,
    }[server]


def build_schedule(seed: int, seconds: float, cases: Sequence[Case]) -> list[Fault]:
    """Draw the faults of a run, in order of time."""
    lanes = []
    for server in dict.fromkeys(_SERVERS.values()):
        if any(_needs(case, server) for case in cases):
            kinds = [kind for kind, whose in _SERVERS.items() if whose == server and _is_bearable(kind, cases)]
            pause = _OF_A_BROKER if server in ("broker", "kafka") else _OF_A_DATABASE
            lanes.append(_build_lane(Random(f"{seed}/{server}"), seconds, kinds, pause, None))
    for case in cases:
        kinds = [*_OF_A_CASE, *(_CHANGES if case.changes else ())]
        lanes.append(_build_lane(Random(f"{seed}/{case.name}"), seconds, kinds, (3.5, 9.0), case))
    return sorted((fault for lane in lanes for fault in lane), key=lambda fault: (fault.at, fault.lane))


def _build_lane(
    random: Random, seconds: float, kinds: Sequence[Kind], pause: tuple[float, float], case: Case | None
) -> list[Fault]:
    lane: list[Fault] = []
    deck: list[Kind] = []
    at = FIRST + random.uniform(0, pause[0])
    while True:
        if not deck:
            deck = random.sample(kinds, len(kinds))
        fault = _draw(random, round(at, 3), deck.pop(), case)
        if fault.ends > seconds - LAST:
            return lane
        lane.append(fault)
        at = fault.ends + random.uniform(*pause)


def _draw(random: Random, at: float, kind: Kind, case: Case | None) -> Fault:
    # Drawn for every kind alike, so that a change to one leaves the others of a seed as they are.
    choice, share, size, target = (random.random() for _ in range(4))
    frozen = LEASE_SECONDS * (1.2 + share)
    seconds, amount = {
        Kind.KILL: (0.0, 0.5 + 2.5 * size),
        Kind.KILL_IN_BATCH: (0.0, 0.5 + 2.5 * size),
        Kind.FREEZE: (frozen, 0.0),
        Kind.FREEZE_IN_BATCH: (frozen, 0.0),
        Kind.SLOW: (LEASE_SECONDS * (0.8 + 1.2 * share), 0.0),
        Kind.TERMINATE: (0.0, 0.0),
        Kind.CUT: (0.2 + 1.8 * LEASE_SECONDS * share, 0.0),
        Kind.SILENCE: (0.5 + 1.8 * LEASE_SECONDS * share, 0.0),
        Kind.DELAY: (3.0 + 3.0 * share, 20 + 380 * size),
        Kind.TEAR: (2.0 + 2.0 * share, 500 + 20_000 * size * size),
        Kind.CLOCK: (0.0, (1 if size < 0.5 else -1) * 10 ** (1 + 5 * share)),
        Kind.SCALE: (0.0, 1 + int(4 * size)),
        Kind.DIVIDE: (0.0, size),
        Kind.DIVIDE_FROZEN: (frozen, size),
        Kind.POSTGRES: (0.5 + 3.5 * share, 0.0),
        Kind.BACKEND: (0.0, 0.0),
        Kind.REPORTING: (0.5 + 3.5 * share, 0.0),
        Kind.DISK: (2.0 + 4.0 * share, 200_000 * size),
        Kind.BROKER: (0.5 + 2.5 * share, 0.0),
        Kind.KAFKA: (1.0 + 5.0 * share, 0.0),
        Kind.KAFKA_CRASH: (0.5 + 2.5 * share, 0.0),
    }[kind]
    at_target = kind in (Kind.CUT, Kind.SILENCE, Kind.DELAY, Kind.TEAR) and target < 0.5
    return Fault(
        at=at,
        kind=kind,
        case="" if case is None else case.name,
        seconds=round(seconds, 3),
        choice=round(choice, 6),
        amount=round(amount, 3),
        target=at_target and case is not None and case.has_target_connection,
    )


def find_not_struck(schedule: Sequence[Fault], struck: Sequence[Struck]) -> list[str]:
    """Name what a run did not try: then it says nothing about that."""
    seen = {one.fault.kind for one in struck}
    missing = [f"{kind}: it was scheduled, and never struck" for kind in Kind if kind in _kinds(schedule) - seen]
    left_out = len(schedule) - len(struck)
    if left_out > LEFT_OUT * len(schedule):
        missing.append(f"{left_out} of {len(schedule)} faults were left out: this machine is too slow for them")
    frozen = Kind.FREEZE_IN_BATCH
    if frozen in seen and not any(one.expired for one in struck if one.fault.kind is frozen):
        missing.append(f"{frozen}: none lost its lease in its batch; choose more seconds, or another seed")
    return missing


def _kinds(schedule: Sequence[Fault]) -> set[Kind]:
    return {fault.kind for fault in schedule}


def as_json(seed: int, seconds: float, cases: Sequence[Case], schedule: Sequence[Fault]) -> dict[str, Any]:
    """Return the schedule as it is written into its file."""
    return {
        "seed": seed,
        "seconds": seconds,
        "cases": [case.name for case in cases],
        "faults": [asdict(fault) for fault in schedule],
    }
