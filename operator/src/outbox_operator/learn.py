"""PURE: what the workers' reports add to what status already says. Nothing heard changes nothing.

The operator never opens the database; this is all it ever learns. A report is believed for what its state can know: a
process that has not reached the database says nothing about claim and conflicts. Times: `now` is the operator's clock
and only paces tries; who owns what is the database's word, carried in the reports.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from outbox_core.checkpoint import parse_checkpoint
from outbox_core.config import Resolution, ResolutionAction
from outbox_core.plain import plain_checkpoints
from outbox_core.report import ExitCode, RebuildState, WorkerState
from outbox_operator.naming import child_name, label_decision
from outbox_operator.observed import OWNING_STATES, UNINFORMED_STATES, Role
from outbox_operator.resources import ACCEPT_ANNOTATION, REWIND_ANNOTATION
from outbox_operator.status import FailuresStatus, OwnershipStatus, OwnerStatus, PartitionStatus

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from outbox_core.report import (
        BoundStatus,
        CheckpointView,
        Conflict,
        ConflictSummary,
        DivisionView,
        Lag,
        RebuildView,
        Report,
        ResourceRef,
    )
    from outbox_operator.observed import JobView, Observed, PodView

FIRST_TRY: Final = timedelta(seconds=10)
LONGEST_TRY: Final = timedelta(minutes=5)
LONGEST_ASKING: Final = timedelta(seconds=20)
"""Between tries that nobody has answered yet: nothing says that the claim is another's."""
QUICK_TRY: Final = timedelta(seconds=3)
"""Least time between two tries when the owner is known to be gone."""


class OwnershipState:
    """Values of status.ownership.state."""

    UNKNOWN: Final = "Unknown"
    GRANTED: Final = "Granted"
    TRYING: Final = "Trying"
    """A known duplicate: the database is asked before anything runs. What is known of others is a hint, no more."""
    REFUSED: Final = "Refused"
    HANDED_OVER: Final = "HandedOver"


def lead_report(observed: Observed) -> Report | None:
    """Pick the report that speaks for the processor: a lease holder's, else the newest that knows something.

    Of several owners (modes Partitioned and Competing) the one that most needs attention speaks.
    """
    held = [report for report in observed.reports if report.lease is not None and report.lease.held]
    held.sort(key=lambda report: _TELLING.get(report.state, len(_TELLING)))
    informed = [report for report in observed.reports if report.state is not WorkerState.STARTING]
    for candidates in (held, informed, list(observed.reports)):
        if candidates:
            return candidates[0]
    return None


_TELLING: Final = {
    state: place
    for place, state in enumerate(
        (WorkerState.BLOCKED, WorkerState.STOPPED, WorkerState.RETRYING, WorkerState.UNAVAILABLE, WorkerState.ACTIVE)
    )
}


def learn_partitions(observed: Observed) -> list[PartitionStatus]:
    """Say who owns which partition; without news, the last known values stay."""
    report = lead_report(observed)
    if report is None or not report.leases:
        return observed.previous.partitions
    owners = {lease.partition: lease for lease in report.leases}
    pairs = {view.partition: view.pair for view in report.checkpoints}
    return [
        PartitionStatus(
            partition=number,
            pod=owners[number].pod if number in owners else None,
            epoch=(owners[number].epoch if number in owners else None) or 0,
            pair=pairs.get(number),
        )
        for number in sorted({*owners, *pairs})
    ]


def learn_division(observed: Observed) -> DivisionView | None:
    """Say into how many partitions the processor is divided; without news, the last known value stays."""
    report = lead_report(observed)
    return observed.previous.division if report is None or report.division is None else report.division


def describe_division(observed: Observed) -> str:
    """Say what keeps the number of partitions from being what the spec asks for; empty: it is as asked."""
    divided = observed.processor.spec.delivery.partitions
    seen = learn_division(observed)
    if divided is None or seen is None:
        return ""
    if seen.message:
        return seen.message
    if seen.count == divided.count:
        return ""
    return f"{seen.count} partitions shall become {divided.count}; no worker has drawn the stop line yet"


def learn_owner(observed: Observed) -> OwnerStatus | None:
    """Say which pod holds the lease, as one of our processes knows it; nothing while no process answers."""
    report = lead_report(observed)
    if report is None or report.lease is None or not report.lease.pod:
        return None
    pods = {lease.pod for lease in report.leases if lease.pod}
    count = len(pods) if report.unfinished is None else report.unfinished.consumers
    if count > 1:
        return OwnerStatus(pod=f"{count} pods")
    return OwnerStatus(pod=report.lease.pod, epoch=report.lease.epoch or 0)


def learn_checkpoint(observed: Observed) -> CheckpointView | None:
    """Say how far was examined; without news, the last known value stays."""
    report = lead_report(observed)
    if report is None or not report.checkpoints:
        return observed.previous.checkpoint
    view = min(report.checkpoints, key=lambda each: parse_checkpoint(each.pair))
    return view.model_copy(update={"text": plain_checkpoints(view.pair)})


def learn_failures(observed: Observed) -> FailuresStatus | None:
    """What failing messages did, as the leading report has it; nothing that changes with every attempt."""
    report = lead_report(observed)
    if report is None:
        return observed.previous.failures
    circuits = [each.circuit for each in observed.reports if each.circuit is not None]
    circuit = next((circuit for circuit in circuits if circuit != "Closed"), circuits[0] if circuits else "")
    failures = FailuresStatus.model_validate(report.failures, from_attributes=True)
    return failures.model_copy(update={"circuit": circuit})


def learn_lag(observed: Observed) -> Lag | None:
    """Say what waits; without news, the last known value stays."""
    report = lead_report(observed)
    if report is None or report.lag is None:
        return observed.previous.lag
    return report.lag.model_copy(update={"seconds": round(report.lag.seconds, 1), "text": format_lag(report.lag)})


def format_lag(lag: Lag) -> str:
    """Write the lag in short: `0`, `1200 (8s)`, `>=100000 (340s)`."""
    if lag.messages == 0:
        return "0"
    return f"{'>=' if lag.at_least else ''}{lag.messages} ({round(lag.seconds)}s)"


def learn_bound(observed: Observed) -> BoundStatus | None:
    """Say up to where can be read while that is held back; else it moves with every transaction of the server."""
    report = lead_report(observed)
    if report is None or report.bound is None:
        return observed.previous.bound
    bound = report.bound
    return bound.model_copy(update={"age_seconds": round(bound.age_seconds, 1)}) if bound.stalled else None


def learn_rebuild(observed: Observed) -> RebuildView | None:
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


def learn_conflicts(observed: Observed, resolution: Resolution | None) -> ConflictSummary:
    """Merge the counters that the processes read from the database.

    An open conflict is believed of whoever reports it, and closed only when a process says that none is open which has
    seen this one recorded, or was started with a person's decision about it: a standby that has not looked again must
    not reopen the road.
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
            "open": _learn_open(observed, resolution),
            "strangers": max([previous.strangers, *(each.strangers for each in informed)]),
        }
    )


def _learn_open(observed: Observed, resolution: Resolution | None) -> Conflict | None:
    previous = observed.previous.conflicts.open
    live = [report for report in observed.reports if report.state not in UNINFORMED_STATES]
    reported = [r.conflicts.open for r in live if r.conflicts.open is not None]
    if reported:
        return max(reported, key=lambda conflict: conflict.id)
    if previous is not None:
        decided = resolution is not None and resolution.conflict_id == previous.id
        # Decided in the database itself: whoever has seen it recorded, and sees none open, saw it closed.
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


@dataclass(frozen=True, slots=True)
class Decided:
    """A person's annotation, read."""

    annotation: str
    resolution: Resolution | None
    error: str | None


def read_resolution(annotations: Mapping[str, str], conflict: int | None = None) -> Decided | None:
    """Read the annotation that decides an open conflict; None when there is none.

    Of two the one about `conflict`, the open one: what is left of a former decision hides no new one. Two about it, or
    an unreadable one, are an error for a person to see, and decide nothing.
    """
    kinds = ((ACCEPT_ANNOTATION, ResolutionAction.ACCEPT), (REWIND_ANNOTATION, ResolutionAction.REWIND))
    found = [_read(name, action, annotations[name]) for name, action in kinds if name in annotations]
    about = [one for one in found if one.resolution is not None and one.resolution.conflict_id == conflict]
    if len(about) > 1:
        names = " and ".join(one.annotation for one in about)
        return Decided(about[0].annotation, None, f"{names} both decide conflict {conflict}: remove one of them")
    readable = [one for one in found if one.resolution is not None]
    return next(iter((*about, *readable, *found)), None)


def _read(annotation: str, action: ResolutionAction, text: str) -> Decided:
    number, _, pair = text.partition("=")
    try:
        resolution = Resolution(
            conflict_id=int(number), action=action, pair=str(parse_checkpoint(pair)), decided_by=annotation
        )
    except ValueError:
        error = f"{annotation}: {text[:100]!r} must be CONFLICT=TRANSACTION_ID:POSITION, for example 7=815:42"
        return Decided(annotation, None, error)
    return Decided(annotation, resolution, None)


def learn_ownership(observed: Observed, now: datetime) -> OwnershipStatus:
    """Say whether the claim is ours, and when it is tried again while it is not."""
    previous = observed.previous.ownership
    if observed.processor.spec.hand_over_to is None and previous.state == OwnershipState.HANDED_OVER:
        previous = previous.model_copy(update={"state": OwnershipState.REFUSED, "attempts": 0, "next_try": now})
    heard = _hear_workers(observed)
    if heard is None and (tried := _finished_try(observed, previous)) is not None:
        return _after_try(observed, previous, tried, now)
    if heard is None:
        return _hurry(observed, _heed_siblings(observed, previous, now), now)
    granted, holder = heard
    if granted and previous.state != OwnershipState.REFUSED:
        return OwnershipStatus(state=OwnershipState.GRANTED, tries=previous.tries)
    if previous.state == OwnershipState.REFUSED:
        # Workers are being stopped. One that says it owns has not noticed yet: only a try finds that the claim is ours.
        return _hurry(observed, previous.model_copy(update={"holder": holder or previous.holder}), now)
    return OwnershipStatus(
        state=OwnershipState.REFUSED, holder=holder, tries=previous.tries, last_try=now, next_try=now + FIRST_TRY
    )


def _hear_workers(observed: Observed) -> tuple[bool, ResourceRef | None] | None:
    """What running workers say about the claim: (ours, holder); None when none knows."""
    for report in observed.reports:
        said = _claim_in(report, observed.processor.uid)
        if said is not None:
            return said
    return None


def _claim_in(report: Report, uid: str) -> tuple[bool, ResourceRef | None] | None:
    if report.state is WorkerState.CLAIM_REFUSED:
        return False, report.claim_holder
    if report.state in OWNING_STATES:
        return True, None
    if report.claim_holder is not None and report.claim_holder.uid == uid:
        return True, None
    return None


def _heed_siblings(observed: Observed, previous: OwnershipStatus, now: datetime) -> OwnershipStatus:
    """A new resource whose processorId an older one of this cluster owns starts with a try, not with workers.

    It may be another database, and both are right: the try says so. When no such resource is left, nothing is asked.
    """
    rivals = any(s.granted and s.created <= observed.created for s in observed.siblings)
    if previous.state == OwnershipState.TRYING and not rivals:
        # Another number: what became of the try that may be under way does not matter any more.
        return previous.model_copy(
            update={"state": OwnershipState.UNKNOWN, "next_try": None, "tries": previous.tries + 1, "problem": None}
        )
    if previous.state != OwnershipState.UNKNOWN or observed.runners or not rivals:
        return previous
    return previous.model_copy(update={"state": OwnershipState.TRYING, "next_try": now})


def _hurry(observed: Observed, ownership: OwnershipStatus, now: datetime) -> OwnershipStatus:
    """Bring the next try forward when the holder is known to be gone, or has handed over to us."""
    if ownership.state != OwnershipState.REFUSED:
        return ownership
    last = ownership.last_try
    given = [s.handed_over_at for s in observed.siblings if s.handed_over_to == str(_place(observed))]
    offered = any(at is not None and (last is None or last <= at) for at in given)
    if not (observed.holder_gone or offered):
        return ownership
    soonest = now if last is None else max(now, last + QUICK_TRY)
    planned = ownership.next_try
    return ownership.model_copy(update={"next_try": soonest if planned is None else min(planned, soonest)})


def _place(observed: Observed) -> str:
    processor = observed.processor
    return f"{processor.cluster}/{processor.namespace}/{processor.name}"


def claim_job_name(name: str, tries: int) -> str:
    """Name the job of one try; the number, never used again, keeps two tries apart."""
    return child_name(name, f"claim-{tries}")


def _finished_try(observed: Observed, previous: OwnershipStatus) -> tuple[JobView, PodView | None] | None:
    name = claim_job_name(observed.processor.name, previous.tries)
    job = next((job for job in observed.jobs if job.name == name and job.finished), None)
    if job is None or previous.state not in (OwnershipState.REFUSED, OwnershipState.TRYING):
        return None
    pod = next((pod for pod in observed.pods if pod.role is Role.CLAIM and pod.job == name), None)
    return job, pod


def _after_try(
    observed: Observed, previous: OwnershipStatus, tried: tuple[JobView, PodView | None], now: datetime
) -> OwnershipStatus:
    job, pod = tried
    if job.succeeded:
        return OwnershipStatus(state=OwnershipState.GRANTED, tries=previous.tries + 1, last_try=now)
    holder, state = previous.holder, previous.state
    if pod is not None and pod.exit_code == ExitCode.CLAIM_HELD and pod.last_words is not None:
        holder, state = pod.last_words.claim_holder or holder, OwnershipState.REFUSED
    words = pod.last_words if pod is not None else None
    unasked = words if words is not None and words.state is WorkerState.UNAVAILABLE else None
    attempts = previous.attempts + 1
    wait = next_try_after(attempts, observed.processor.uid)
    if state == OwnershipState.TRYING:
        wait = min(wait, LONGEST_ASKING)
    return OwnershipStatus(
        state=state,
        holder=holder,
        attempts=attempts,
        tries=previous.tries + 1,
        last_try=now,
        next_try=now + wait,
        problem=unasked.reason if unasked is not None else None,
        problem_message=unasked.message if unasked is not None else None,
    )


def next_try_after(attempts: int, uid: str) -> timedelta:
    """Wait between tries: 10 s doubled up to 5 min, spread by up to a tenth so that many do not try in step."""
    doublings: int = 1 << min(max(attempts - 1, 0), 10)
    return min(FIRST_TRY * doublings, LONGEST_TRY) * (1 + (sum(uid.encode()) % 100) / 1000)
