"""PURE: what shall be done, from what was observed. Start here.

`decide` merges the workers' reports into what status says (`merge.py`), evaluates the policies (`policies.py`), and
returns one value: the status to write, how many pods, which short-lived jobs, which Events. It is total and
level-triggered: nothing is remembered between two calls that is not in the cluster, so an operator killed anywhere goes
on where it was.

Unknown is never zero: a pod that does not answer scales nothing down.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

from outbox_core.spec import Engine
from outbox_operator.api.naming import label_decision, pods_label, selector_of
from outbox_operator.api.observed import Observed, Role
from outbox_operator.api.reasons import Reason
from outbox_operator.api.status import ProcessorStatus
from outbox_operator.decision.conditions import build_conditions, update_conditions
from outbox_operator.decision.events import Event, build_events
from outbox_operator.decision.hand_over import HandOverStep, hand_over_job_name
from outbox_operator.decision.merge import Facts, merge_figures, merge_owner, merge_reports
from outbox_operator.decision.ownership import OwnershipState, claim_job_name
from outbox_operator.decision.policies import PolicyResult, evaluate_policies, wanted_replicas
from outbox_operator.decision.rollout import Rollout, as_in_force, decide_rollout, settle

if TYPE_CHECKING:
    from outbox_core.config import Resolution
    from outbox_operator.api.resources import Processor

LOOK_AGAIN: Final = timedelta(seconds=2)
"""While something is in flight."""
SOONEST: Final = timedelta(seconds=0.2)
"""Before a try of the claim that is about to be due."""
PART: Final = 4
"""What is in flight for long is looked at after this part of that time: changes are told, only time itself is not."""
REST: Final = timedelta(minutes=10)
"""While nothing is: in case a change was missed."""


@dataclass(frozen=True, slots=True)
class JobPlan:
    """A short-lived job that shall run now."""

    name: str
    role: Role


@dataclass(frozen=True, slots=True)
class Decision:
    """What shall be so."""

    status: ProcessorStatus
    """Written once, and only when it differs."""
    replicas: int
    """Pods that handle messages."""
    result: PolicyResult
    rollout: Rollout
    """The pod template that the workload has, and whether its pods are replaced within the budget."""
    resolution: Resolution | None
    """A person's decision that workers shall carry out."""
    decision_label: str
    """Its hash, or that of the former one, which stays on the pods: to forget it is no reason to replace them."""
    sweep_uids: tuple[str, ...]
    """Claims of resources that are known to be gone."""
    keep_claim: tuple[str, ...]
    """Pods that are told so before they are taken away."""
    start_jobs: tuple[JobPlan, ...]
    finished_jobs: tuple[str, ...]
    """Jobs whose result is in the status: to be deleted."""
    remove_annotations: tuple[str, ...]
    """Of the resource, because what they asked is done."""
    events: tuple[Event, ...]
    look_again: timedelta
    """When to decide again if nothing is heard before."""


def decide(observed: Observed, now: datetime) -> Decision:
    """Decide what shall be so."""
    facts = merge_reports(observed, now)
    decision_label = label_decision(facts.resolution)
    rollout = decide_rollout(observed, decision_label)
    facts = replace(facts, observed=as_in_force(observed, rollout), waits=rollout.waits)
    result = evaluate_policies(facts)
    replicas = 0 if result.stops_workers else wanted_replicas(observed)
    status = build_status(facts, result, replicas, now)
    jobs = start_jobs(facts, result, now)
    return Decision(
        status=status,
        replicas=replicas,
        result=result,
        rollout=settle(rollout, facts.observed, result, replicas),
        resolution=facts.resolution,
        decision_label=decision_label or (observed.workload.decision if observed.workload is not None else ""),
        sweep_uids=_sweep(facts),
        keep_claim=keep_claim(facts, replicas),
        start_jobs=jobs,
        finished_jobs=_finished_jobs(facts, jobs),
        remove_annotations=_done_annotations(facts),
        events=build_events(facts, status),
        look_again=look_again(facts, status, jobs, now),
    )


def build_status(facts: Facts, result: PolicyResult, replicas: int, now: datetime) -> ProcessorStatus:
    """Build the whole status."""
    observed, previous, lead = facts.observed, facts.observed.previous, facts.lead
    answers = build_conditions(facts, result, replicas)
    running = [pod for pod in observed.runners if pod.phase == "Running"]
    return ProcessorStatus(
        observed_generation=observed.processor.generation,
        phase=result.phase,
        mode=observed.processor.spec.delivery.mode,
        conditions=update_conditions(previous.conditions, answers, generation=observed.processor.generation, now=now),
        owner=merge_owner(lead),
        ownership=facts.ownership,
        conflicts=facts.conflicts,
        hand_over=facts.hand_over,
        rebuild=facts.rebuild,
        replicas=len(running),
        ready_replicas=sum(pod.ready for pod in running),
        executors=lead.executors if lead is not None else None,
        selector=_select_pods(observed.processor),
        applied_hash=previous.applied_hash,
        workload_hash=observed.intent_hash,
        **merge_figures(facts),
    )


def _select_pods(processor: Processor) -> str:
    """Select the pods that run a resource, others among them."""
    role = Role.WORKER if processor.spec.engine is Engine.WORKER else Role.DRIVER
    return ",".join(f"{label}={value}" for label, value in selector_of(pods_label(processor), role).items())


_ASKING: Final = frozenset({OwnershipState.REFUSED, OwnershipState.TRYING})
_NOT_ASKING: Final = frozenset({Reason.SUSPENDED, Reason.STOPPING, Reason.HANDING_OVER, Reason.HAND_OVER_FAILED})


def start_jobs(facts: Facts, result: PolicyResult, now: datetime) -> tuple[JobPlan, ...]:
    """Say which short-lived jobs shall run: a try of the claim, or the transfer of a hand-over."""
    observed = facts.observed
    name = observed.processor.name
    if observed.runners:
        return ()
    if facts.ownership.state in _ASKING and result.reason not in _NOT_ASKING:
        due = facts.ownership.next_try is None or facts.ownership.next_try <= now
        return (JobPlan(claim_job_name(name, facts.ownership.tries), Role.CLAIM),) if due else ()
    if result.reason == Reason.HANDING_OVER:
        return (JobPlan(hand_over_job_name(observed.processor), Role.HAND_OVER),)
    return ()


def _finished_jobs(facts: Facts, wanted: tuple[JobPlan, ...]) -> tuple[str, ...]:
    """Jobs whose result status has already: a new result is written first, the job deleted next time."""
    keep = {job.name for job in wanted}
    name = facts.observed.processor.name
    keep.add(claim_job_name(name, facts.observed.previous.ownership.tries))
    if facts.hand_over is not None and facts.hand_over.step != HandOverStep.DONE:
        keep.add(hand_over_job_name(facts.observed.processor))
    return tuple(job.name for job in facts.observed.jobs if job.finished and job.name not in keep)


def _sweep(facts: Facts) -> tuple[str, ...]:
    holder = facts.ownership.holder
    return (holder.uid,) if facts.observed.holder_gone and holder is not None and holder.uid else ()


def keep_claim(facts: Facts, replicas: int) -> tuple[str, ...]:
    """Name the pods that are about to be taken away although the resource stays."""
    observed = facts.observed
    if facts.ownership.state == OwnershipState.REFUSED:
        return ()
    going = [pod for pod in observed.runners if not pod.deleting and pod.ip is not None]
    if replicas == 0:
        return tuple(pod.name for pod in going)
    return tuple(pod.name for pod in going if pod.intent_hash != observed.intent_hash)


def _done_annotations(facts: Facts) -> tuple[str, ...]:
    """Annotations whose conflict is closed: it was open before, and no process that looked finds it open."""
    decided = facts.decided
    before = facts.observed.previous.conflicts.open
    if decided is None or decided.resolution is None or facts.conflicts.open is not None:
        return ()
    closed = before is not None and before.id == decided.resolution.conflict_id
    stale = before is None and bool(facts.observed.reports)
    return (decided.annotation,) if closed or stale else ()


def look_again(facts: Facts, status: ProcessorStatus, jobs: tuple[JobPlan, ...], now: datetime) -> timedelta:
    """Say when to decide again if nothing is heard before."""
    waits = [REST]
    since = [c.last_transition_time for c in status.conditions if c.type == "Reconciling" and c.status == "True"]
    since += [facts.observed.unsettled] if facts.observed.unsettled is not None else []
    waits += [max((now - each) / PART, LOOK_AGAIN) for each in since]
    next_try = facts.ownership.next_try
    if next_try is not None and facts.ownership.state in _ASKING:
        # One that is due runs now. Where it may not (suspended, a pod is still there) a change tells when it may.
        due = LOOK_AGAIN if jobs else REST
        waits.append(max(next_try - now, SOONEST) if next_try > now else due)
    return min(waits)
