"""PURE: the values between the merged reports and the decision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outbox_core.config import Resolution
    from outbox_core.report import ConflictSummary, FailureSummary, RebuildView, Report
    from outbox_operator.api.observed import Observed
    from outbox_operator.api.resolution import Decided
    from outbox_operator.api.status import HandOverStatus, OwnershipStatus, Phase


@dataclass(frozen=True, slots=True)
class Facts:
    """What was observed, merged with what status says; nothing is decided yet."""

    observed: Observed
    conflicts: ConflictSummary
    ownership: OwnershipStatus
    hand_over: HandOverStatus | None
    decided: Decided | None
    resolution: Resolution | None
    """A person's decision about the conflict that is open now."""
    decision_error: str | None
    """Why the annotation that is there decides nothing about the conflict that is open now."""
    lead: Report | None
    """The report that speaks for the processor."""
    failures: FailureSummary | None
    """What failing messages did, as a process has it that has looked; None: none has."""
    rebuild: RebuildView | None = None
    """How far spec.rebuildOf is."""
    waits: str = ""
    """Why pods of the former version of the operator stay for now."""


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """What one policy says of the resource, in one word for people and one for machines.

    Attributes:
        ready: what the spec asks for is so, hence Ready.
        stalled: a person or another resource must change something.
        stops_workers: no pod may handle messages.
        unknown: nothing contradicts readiness, and nothing shows it.

    """

    phase: Phase
    reason: str
    message: str
    ready: bool = False
    stalled: bool = False
    stops_workers: bool = True
    unknown: bool = False
