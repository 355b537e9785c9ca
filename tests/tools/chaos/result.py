"""PURE: the result of a run in numbers. Runs of several rounds are added up; `summary` prints it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.tools.chaos.schedule import Kind, strikes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.tools.chaos.faults import Struck
    from tests.tools.chaos.recovery import Recovery
    from tests.tools.chaos.verdict import Verdict


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One case; `doubled_allowed` where a broker cannot take part, `reordered` None where no order is promised."""

    mode: str
    target: str
    produced: int
    handled: int
    lost: int
    doubled: int
    doubled_allowed: bool
    reordered: int | None
    moved_back: int
    faults: int
    seconds: tuple[float, ...]


@dataclass(slots=True)
class KindResult:
    """One kind of fault: how often it struck, how often nobody was hurt or several faults met, and the recoveries."""

    struck: int = 0
    idle: int = 0
    overlapped: int = 0
    seconds: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Result:
    """A run, or several."""

    cases: list[CaseResult] = field(default_factory=list)
    kinds: dict[str, KindResult] = field(default_factory=dict)
    frozen: int = 0
    expired: int = 0
    overtaken: int = 0
    overlooked: list[str] = field(default_factory=list)
    violations: dict[str, list[str]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    @property
    def status(self) -> int:
        """Return the exit code: 0 every promise was kept, 1 one was broken or overlooked, 2 too little was seen."""
        if self.overlooked or any(self.violations.values()):
            return 1
        return 2 if self.missing else 0


def build_result(
    verdicts: Sequence[Verdict], struck: Sequence[Struck], recoveries: Sequence[Recovery], *, overtaken: int,
    overlooked: Sequence[str], missing: Sequence[str] = (),
) -> Result:  # fmt: skip
    """Put the result of one run together."""
    frozen = [one for one in struck if one.fault.kind is Kind.FREEZE_IN_BATCH and not one.harmless]
    kinds: dict[str, KindResult] = {}
    for one in struck:
        kind = kinds.setdefault(one.fault.kind, KindResult())
        kind.struck += 1
        kind.idle += one.harmless
    for recovery in recoveries:
        kind = kinds[recovery.kind]
        kind.overlapped += recovery.overlapped
        kind.seconds += [] if recovery.seconds is None else [recovery.seconds]
    return Result(
        cases=[_build_case(verdict, struck, recoveries) for verdict in verdicts],
        kinds=kinds,
        frozen=len(frozen),
        expired=sum(one.expired for one in frozen),
        overtaken=overtaken,
        overlooked=list(overlooked),
        violations={verdict.case.name: list(verdict.violations) for verdict in verdicts},
        missing=list(missing),
    )


def _build_case(verdict: Verdict, struck: Sequence[Struck], recoveries: Sequence[Recovery]) -> CaseResult:
    case, account = verdict.case, verdict.account
    return CaseResult(
        mode=case.mode,
        target=case.target,
        produced=account.produced,
        handled=account.handled,
        lost=account.lost,
        doubled=account.duplicated,
        doubled_allowed=not case.exact,
        reordered=account.out_of_order,
        moved_back=verdict.moved_back,
        faults=sum(strikes(one.fault, case) for one in struck),
        seconds=tuple(each.seconds for each in recoveries if each.case == case.name and each.seconds is not None),
    )


def add_up(results: Iterable[Result]) -> Result:
    """Return one result for all rounds."""
    total = Result()
    for result in results:
        total.cases += result.cases
        total.frozen += result.frozen
        total.expired += result.expired
        total.overtaken += result.overtaken
        total.overlooked += result.overlooked
        total.violations |= result.violations
        total.missing += result.missing
        for name, found in result.kinds.items():
            kind = total.kinds.setdefault(name, KindResult())
            kind.struck += found.struck
            kind.idle += found.idle
            kind.overlapped += found.overlapped
            kind.seconds += found.seconds
    return total


def from_json(found: dict[str, Any]) -> Result:
    """Read a round's result, which was written as `asdict` has it."""
    cases = [CaseResult(**case | {"seconds": tuple(case["seconds"])}) for case in found["cases"]]
    kinds = {name: KindResult(**kind) for name, kind in found["kinds"].items()}
    return Result(**found | {"cases": cases, "kinds": kinds})
