"""PURE: merges what the workers report into what status says already. What no worker reports stays as it was.

The operator never opens the database: the reports are all that it knows of it. A report is believed for what its state
can know: a process that has not reached the database says nothing about claim and conflicts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from outbox_core.plain import plain_checkpoints, plain_count
from outbox_core.progress.checkpoint import parse_checkpoint
from outbox_core.report import (
    Conflict,
    ConflictSummary,
    FailureSummary,
    Lag,
    LeaseView,
    RebuildState,
    RebuildView,
    Report,
    WorkerState,
)
from outbox_operator.api.naming import label_decision
from outbox_operator.api.observed import UNINFORMED_STATES, Observed
from outbox_operator.api.resolution import Decided, read_resolution
from outbox_operator.api.status import FailuresStatus, HandOverStatus, OwnershipStatus, OwnerStatus, PartitionStatus
from outbox_operator.decision.hand_over import HandOverStep, build_hand_over
from outbox_operator.decision.ownership import OwnershipState, merge_ownership

if TYPE_CHECKING:
    from datetime import datetime

    from outbox_core.config import Resolution


@dataclass(frozen=True, slots=True)
class Facts:
    """What was observed, merged with what status says; nothing is decided yet."""

    observed: Observed
    conflicts: ConflictSummary
    ownership: OwnershipStatus
    hand_over: HandOverStatus | None
    decided: Decided | None
    """A person's annotation about a conflict, be it the open one or not."""
    lead: Report | None
    """The report that speaks for the processor."""
    failures: FailureSummary | None
    """What failing messages did, as a process has it that has looked; None: none has."""
    rebuild: RebuildView | None = None
    """How far spec.rebuildOf is."""
    waits: str = ""
    """Why pods of the former version of the operator stay for now."""

    @property
    def retries(self) -> int:
        """How many messages of mode Competing wait for another attempt or for their time."""
        unfinished = self.lead.unfinished if self.lead is not None else None
        return unfinished.retries if unfinished is not None else 0

    @property
    def resolution(self) -> Resolution | None:
        """A person's decision about the conflict that is open now."""
        found = self.decided.resolution if self.decided is not None else None
        applies = found is not None and self.conflicts.open is not None and found.conflict_id == self.conflicts.open.id
        return found if applies else None

    @property
    def decision_error(self) -> str | None:
        """Why the annotation that is there decides nothing about the conflict that is open now."""
        decided, open_now = self.decided, self.conflicts.open
        if decided is None or open_now is None:
            return None
        if decided.resolution is not None and decided.resolution.conflict_id != open_now.id:
            return f"{decided.annotation} is about conflict {decided.resolution.conflict_id}, open is {open_now.id}"
        return decided.error


def merge_reports(observed: Observed, now: datetime) -> Facts:
    """Add what was heard to what status says."""
    before = observed.previous.conflicts.open
    decided = read_resolution(observed.processor.annotations, before.id if before is not None else None)
    hand_over, ownership, lead = build_hand_over(observed, now), merge_ownership(observed, now), lead_report(observed)
    if hand_over is not None and hand_over.step == HandOverStep.DONE:
        ownership = OwnershipStatus(
            state=OwnershipState.HANDED_OVER,
            holder=observed.processor.successor,
            tries=ownership.tries,
            last_try=hand_over.time,
        )
    return Facts(
        observed=observed,
        conflicts=merge_conflicts(observed, decided.resolution if decided is not None else None),
        ownership=ownership,
        hand_over=hand_over,
        decided=decided,
        lead=lead,
        failures=_find_failures(observed, lead),
        rebuild=merge_rebuild(observed),
    )


def lead_report(observed: Observed) -> Report | None:
    """Pick the report that speaks for the processor: a lease holder's, else the newest that knows something.

    Of several owners (modes Partitioned and Competing) the one that most needs attention speaks.
    """
    held = [report for report in observed.reports if report.lease is not None and report.lease.held]
    held.sort(key=lambda report: _ATTENTION.get(report.state, len(_ATTENTION)))
    informed = [report for report in observed.reports if report.state is not WorkerState.STARTING]
    for candidates in (held, informed, list(observed.reports)):
        if candidates:
            return candidates[0]
    return None


_ATTENTION: Final = {
    state: place
    for place, state in enumerate(
        (WorkerState.BLOCKED, WorkerState.STOPPED, WorkerState.RETRYING, WorkerState.UNAVAILABLE, WorkerState.ACTIVE)
    )
}


def merge_figures(facts: Facts) -> dict[str, Any]:
    """Say which fields of status the leading report tells anew; the others keep the last known value."""
    previous, report = facts.observed.previous, facts.lead
    told: dict[str, Any] = {name: getattr(previous, name) for name in _FIGURES}
    if report is None:
        return told
    told |= {"failures": _merge_failures(facts), "reported_at": report.time}
    told |= {name: value for name in _AS_TOLD if (value := getattr(report, name)) is not None}
    if report.checkpoints:
        view = min(report.checkpoints, key=lambda each: parse_checkpoint(each.pair))
        told["checkpoint"] = view.model_copy(update={"text": plain_checkpoints(view.pair)})
    if report.leases:
        told["partitions"] = _list_partitions(report)
    if (lag := report.lag) is not None:
        told["lag"] = lag.model_copy(update={"seconds": round(lag.seconds, 1), "text": format_lag(lag)})
    if (mark := report.high_water_mark) is not None:
        # While nothing holds it back, it moves with every transaction of the server.
        age = {"age_seconds": round(mark.age_seconds, 1)}
        told["high_water_mark"] = mark.model_copy(update=age) if mark.stalled else None
    return told


_AS_TOLD: Final = ("partitioning", "start_from_used")
_FIGURES: Final = ("high_water_mark", "checkpoint", "failures", "lag", "partitions", "reported_at", *_AS_TOLD)


def _list_partitions(report: Report) -> list[PartitionStatus]:
    """Say who owns which partition."""
    pairs = {view.partition: view.pair for view in report.checkpoints}
    owners = {number: LeaseView() for number in pairs} | {lease.partition: lease for lease in report.leases}
    return [
        PartitionStatus(partition=number, pod=owner.pod, epoch=owner.epoch or 0, pair=pairs.get(number))
        for number, owner in sorted(owners.items())
    ]


def describe_partitioning(facts: Facts) -> str:
    """Say what keeps the number of partitions from being what the spec asks for; empty: it is as asked."""
    wanted = facts.observed.processor.spec.delivery.partitions
    told = facts.lead.partitioning if facts.lead is not None else None
    seen = told or facts.observed.previous.partitioning
    if wanted is None or seen is None:
        return ""
    if seen.message:
        return seen.message
    if seen.count == wanted.count:
        return ""
    return f"{plain_count(seen.count, 'partition')} shall become {wanted.count}; no worker has drawn the barrier yet"


def merge_owner(report: Report | None) -> OwnerStatus | None:
    """Say which pod holds the lease, as one of our processes knows it; nothing while no process answers."""
    if report is None or report.lease is None or not report.lease.pod:
        return None
    pods = {lease.pod for lease in report.leases if lease.pod}
    count = len(pods) if report.unfinished is None else report.unfinished.consumers
    if count > 1:
        return OwnerStatus(pod=f"{count} pods")
    return OwnerStatus(pod=report.lease.pod, epoch=report.lease.epoch or 0)


def _find_failures(observed: Observed, lead: Report | None) -> FailureSummary | None:
    """Pick what failing messages did: the leading report's, else that of another process; all count the same."""
    told = (report.failures for report in (lead, *observed.reports) if report is not None)
    return next((failures for failures in told if failures is not None), None)


def _merge_failures(facts: Facts) -> FailuresStatus | None:
    """What failing messages did, without what changes with every attempt; counts stay until a process has looked."""
    failures = facts.observed.previous.failures
    if facts.failures is not None:
        failures = FailuresStatus.model_validate(facts.failures, from_attributes=True)
    if failures is None:
        return None
    circuits = [each.circuit for each in facts.observed.reports if each.circuit is not None]
    circuit = next((circuit for circuit in circuits if circuit != "Closed"), circuits[0] if circuits else "")
    return failures.model_copy(update={"circuit": circuit})


def format_lag(lag: Lag) -> str:
    """Write the lag in short: `0`, `1200 (8s)`, `>=100000 (340s)`."""
    if lag.messages == 0:
        return "0"
    return f"{'>=' if lag.at_least else ''}{lag.messages} ({round(lag.seconds)}s)"


def merge_rebuild(observed: Observed) -> RebuildView | None:
    """Say how far the rebuild is; without news, the last known value stays."""
    rebuild = observed.processor.spec.rebuild_of
    if rebuild is None:
        return None
    views = [report.rebuild for report in (*observed.reports, *observed.last_words) if report.rebuild is not None]
    views = [view for view in views if view.of == rebuild.processor_id]
    if not views:
        previous = observed.previous.rebuild
        return previous if previous is not None and previous.of == rebuild.processor_id else None
    # A swap is never taken back: a standby that was the owner before it must not say otherwise.
    return next((view for view in views if view.state == RebuildState.SWAPPED), views[0])


def merge_conflicts(observed: Observed, resolution: Resolution | None) -> ConflictSummary:
    """Merge the counters that the processes read from the database.

    An open conflict is believed of each process that reports it. It is closed only by a report without an open one from
    a process that has seen this conflict recorded, or was started with a person's decision about it: a standby that has
    not looked again must not let workers start.
    """
    previous = observed.previous.conflicts
    heard = (*observed.reports, *observed.last_words)
    latest = max((report.conflicts for report in heard), key=lambda each: each.count, default=previous)
    if latest.count < previous.count:
        latest = previous
    informed = (report.conflicts for report in heard if report.state not in UNINFORMED_STATES)
    return latest.model_copy(
        update={
            "last": latest.last or previous.last,
            "open": _merge_open(observed, resolution),
            "unowned_calls": max([previous.unowned_calls, *(each.unowned_calls for each in informed)]),
        }
    )


def _merge_open(observed: Observed, resolution: Resolution | None) -> Conflict | None:
    previous = observed.previous.conflicts.open
    live = [report for report in observed.reports if report.state not in UNINFORMED_STATES]
    reported = [r.conflicts.open for r in live if r.conflicts.open is not None]
    if reported:
        return max(reported, key=lambda conflict: conflict.id)
    if previous is not None:
        decided = resolution is not None and resolution.conflict_id == previous.id
        # Decided in the database itself: a process that has seen it recorded, and sees none open, saw it closed.
        closed = any(r.conflicts.last is not None and r.conflicts.last.id >= previous.id for r in live)
        return None if closed or (decided and _is_carried_out(observed, resolution)) else previous
    last_words = [r.conflicts.open for r in observed.last_words if r.conflicts.open is not None and not live]
    return last_words[0] if last_words else None


def _is_carried_out(observed: Observed, resolution: Resolution | None) -> bool:
    """Tell whether a process that was started with the decision, and has looked since, finds nothing open any more."""
    decision = label_decision(resolution)
    return any(
        pod.report is not None and pod.report.state not in UNINFORMED_STATES and pod.report in observed.reports
        for pod in observed.runners
        if pod.decision == decision
    )
