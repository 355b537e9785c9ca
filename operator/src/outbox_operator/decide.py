"""PURE: what shall be done, from what was observed. Start here.

`decide` learns from the workers' reports, asks the policies what holds (`policies.py`), and answers with one value: the
status to write, how many pods, which short-lived jobs, and what happened for people to read. It is total and
level-triggered: nothing is remembered between two calls that is not in the cluster, so an operator killed anywhere goes
on where it was.

Unknown is never zero: a pod that does not answer scales nothing down.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from outbox_core.report import ResourceRef
from outbox_core.spec import Engine
from outbox_operator.answers import build_answers
from outbox_operator.conditions import Reason, answered
from outbox_operator.hand_over import HandOverStep, hand_over_job_name, learn_hand_over
from outbox_operator.happenings import Happening, tell
from outbox_operator.learn import (
    Decided,
    OwnershipState,
    claim_job_name,
    lead_report,
    learn_bound,
    learn_checkpoint,
    learn_conflicts,
    learn_division,
    learn_failures,
    learn_lag,
    learn_owner,
    learn_ownership,
    learn_partitions,
    learn_rebuild,
    read_resolution,
)
from outbox_operator.naming import label_decision
from outbox_operator.observed import Observed, Role
from outbox_operator.policies import judge, wanted_replicas
from outbox_operator.rollout import Rollout, as_in_force, decide_rollout, settle
from outbox_operator.status import OwnershipStatus, ProcessorStatus
from outbox_operator.verdict import Knowledge, Verdict

if TYPE_CHECKING:
    from datetime import datetime

    from outbox_core.config import Resolution
    from outbox_core.report import Conflict

LOOK_AGAIN: Final = timedelta(seconds=2)
"""While something is in flight."""
SOONEST: Final = timedelta(seconds=0.2)
"""Before a try of the claim that is about to be due."""
PART: Final = 4
"""What is in flight for long is looked at after this part of that time: changes are told, only time itself is not."""
REST: Final = timedelta(minutes=10)
"""While nothing is: for what nobody thought of."""


@dataclass(frozen=True, slots=True)
class JobPlan:
    """A short-lived job that shall run now."""

    name: str
    role: Role


@dataclass(frozen=True, slots=True)
class Decision:
    """What shall be so.

    Attributes:
        status: written once, and only when it differs.
        replicas: pods that handle messages.
        rollout: the pod template that the workload has, and whether its pods are replaced within the budget.
        resolution: a person's decision that workers shall carry out.
        sweep_uids: claims of resources that are known to be gone.
        keep_claim: pods that are told so before they are taken away.
        start_jobs: short-lived jobs.
        finished_jobs: jobs whose result is in the status: to be deleted.
        remove_annotations: of the resource, because what they asked is done.
        happenings: Kubernetes Events.
        look_again: when to decide again if nothing is heard before.

    """

    status: ProcessorStatus
    replicas: int
    verdict: Verdict
    rollout: Rollout = field(default_factory=Rollout)
    resolution: Resolution | None = None
    sweep_uids: tuple[str, ...] = ()
    keep_claim: tuple[str, ...] = ()
    start_jobs: tuple[JobPlan, ...] = ()
    finished_jobs: tuple[str, ...] = ()
    remove_annotations: tuple[str, ...] = ()
    happenings: tuple[Happening, ...] = ()
    look_again: timedelta = field(default=REST)


def decide(observed: Observed, now: datetime) -> Decision:
    """Decide what shall be so."""
    known = learn(observed, now)
    rollout = decide_rollout(observed, label_decision(known.resolution))
    known = replace(known, observed=as_in_force(observed, rollout), waits=rollout.waits)
    verdict = judge(known)
    replicas = 0 if verdict.halts else wanted_replicas(observed)
    status = build_status(known, verdict, replicas, now)
    jobs = start_jobs(known, verdict, now)
    return Decision(
        status=status,
        replicas=replicas,
        verdict=verdict,
        rollout=settle(rollout, known.observed, verdict, replicas),
        resolution=known.resolution,
        sweep_uids=_sweep(known),
        keep_claim=keep_claim(known, replicas),
        start_jobs=jobs,
        finished_jobs=_finished_jobs(known, jobs),
        remove_annotations=_done_annotations(known),
        happenings=tell(known, status),
        look_again=look_again(known, status, now),
    )


def learn(observed: Observed, now: datetime) -> Knowledge:
    """Add what was heard to what status says."""
    before = observed.previous.conflicts.open
    decided = read_resolution(observed.processor.annotations, before.id if before is not None else None)
    resolution = decided.resolution if decided is not None else None
    conflicts = learn_conflicts(observed, resolution)
    hand_over = learn_hand_over(observed, now)
    ownership = learn_ownership(observed, now)
    spec = observed.processor.spec
    if spec.hand_over_to is not None and hand_over is not None and hand_over.step == HandOverStep.DONE:
        target = spec.hand_over_to
        holder = ResourceRef(
            cluster=target.cluster or observed.processor.cluster, namespace=target.namespace, name=target.name
        )
        ownership = OwnershipStatus(
            state=OwnershipState.HANDED_OVER, holder=holder, tries=ownership.tries, last_try=hand_over.time
        )
    open_now = conflicts.open
    applies = resolution is not None and open_now is not None and resolution.conflict_id == open_now.id
    return Knowledge(
        observed=observed,
        conflicts=conflicts,
        ownership=ownership,
        hand_over=hand_over,
        decided=decided,
        resolution=resolution if applies else None,
        decision_error=_decision_error(decided, open_now),
        lead=lead_report(observed),
        rebuild=learn_rebuild(observed),
    )


def _decision_error(decided: Decided | None, conflict: Conflict | None) -> str | None:
    if decided is None or conflict is None:
        return None
    if decided.resolution is not None and decided.resolution.conflict_id != conflict.id:
        return f"{decided.annotation} is about conflict {decided.resolution.conflict_id}, open is {conflict.id}"
    return decided.error


def build_status(known: Knowledge, verdict: Verdict, replicas: int, now: datetime) -> ProcessorStatus:
    """Build the whole status."""
    observed = known.observed
    lead = known.lead
    answers = build_answers(known, verdict, replicas)
    previous = observed.previous
    running = [pod for pod in observed.runners if pod.phase == "Running"]
    return ProcessorStatus(
        observed_generation=observed.processor.generation,
        phase=verdict.phase,
        mode=observed.processor.spec.delivery.mode,
        conditions=answered(previous.conditions, answers, generation=observed.processor.generation, now=now),
        owner=learn_owner(observed),
        ownership=known.ownership,
        checkpoint=learn_checkpoint(observed),
        partitions=learn_partitions(observed),
        division=learn_division(observed),
        lag=learn_lag(observed),
        bound=learn_bound(observed),
        conflicts=known.conflicts,
        failures=learn_failures(observed),
        hand_over=known.hand_over,
        rebuild=known.rebuild,
        replicas=len(running),
        ready_replicas=sum(pod.ready for pod in running),
        executors=lead.executors if lead is not None else None,
        selector=f"outbox-operator.dev/processor={observed.processor.name},outbox-operator.dev/role="
        + (Role.WORKER if observed.processor.spec.engine is Engine.WORKER else Role.DRIVER),
        applied_hash=previous.applied_hash,
        workload_hash=observed.intent_hash,
        start_from_used=lead.start_from_used
        if lead is not None and lead.start_from_used is not None
        else previous.start_from_used,
        reported_at=lead.time if lead is not None else previous.reported_at,
    )


_ASKING: Final = frozenset({OwnershipState.REFUSED, OwnershipState.TRYING})
_NOT_ASKING: Final = frozenset({Reason.SUSPENDED, Reason.STOPPING, Reason.HANDING_OVER, Reason.HAND_OVER_FAILED})


def start_jobs(known: Knowledge, verdict: Verdict, now: datetime) -> tuple[JobPlan, ...]:
    """Say which short-lived jobs shall run: a try of the claim, or the transfer of a hand-over."""
    observed = known.observed
    name = observed.processor.name
    if observed.runners:
        return ()
    if known.ownership.state in _ASKING and verdict.reason not in _NOT_ASKING:
        due = known.ownership.next_try is None or known.ownership.next_try <= now
        return (JobPlan(claim_job_name(name, known.ownership.tries), Role.CLAIM),) if due else ()
    if verdict.reason == Reason.HANDING_OVER:
        return (JobPlan(hand_over_job_name(observed.processor), Role.HAND_OVER),)
    return ()


def _finished_jobs(known: Knowledge, wanted: tuple[JobPlan, ...]) -> tuple[str, ...]:
    """Jobs whose result status has already: a result just learned is written first, the job deleted next time."""
    keep = {job.name for job in wanted}
    name = known.observed.processor.name
    keep.add(claim_job_name(name, known.observed.previous.ownership.tries))
    if known.hand_over is not None and known.hand_over.step != HandOverStep.DONE:
        keep.add(hand_over_job_name(known.observed.processor))
    return tuple(job.name for job in known.observed.jobs if job.finished and job.name not in keep)


def _sweep(known: Knowledge) -> tuple[str, ...]:
    holder = known.ownership.holder
    return (holder.uid,) if known.observed.holder_gone and holder is not None and holder.uid else ()


def keep_claim(known: Knowledge, replicas: int) -> tuple[str, ...]:
    """Name the pods that are about to be taken away although the resource stays."""
    observed = known.observed
    if known.ownership.state == OwnershipState.REFUSED:
        return ()
    going = [pod for pod in observed.runners if not pod.deleting and pod.ip is not None]
    if replicas == 0:
        return tuple(pod.name for pod in going)
    return tuple(pod.name for pod in going if pod.intent_hash != observed.intent_hash)


def _done_annotations(known: Knowledge) -> tuple[str, ...]:
    """Annotations whose conflict is closed: it was open before, and no process that looked finds it open."""
    decided: Decided | None = known.decided
    before = known.observed.previous.conflicts.open
    if decided is None or decided.resolution is None or known.conflicts.open is not None:
        return ()
    closed = before is not None and before.id == decided.resolution.conflict_id
    stale = before is None and bool(known.observed.reports)
    return (decided.annotation,) if closed or stale else ()


def look_again(known: Knowledge, status: ProcessorStatus, now: datetime) -> timedelta:
    """Say when to decide again if nothing is heard before."""
    waits = [REST]
    since = [c.last_transition_time for c in status.conditions if c.type == "Reconciling" and c.status == "True"]
    since += [known.observed.unsettled] if known.observed.unsettled is not None else []
    waits += [max((now - each) / PART, LOOK_AGAIN) for each in since]
    next_try = known.ownership.next_try
    if next_try is not None and known.ownership.state in _ASKING:
        # One that is due runs now: its job and pod are watched.
        waits.append(max(next_try - now, SOONEST) if next_try > now else LOOK_AGAIN)
    return min(waits)
