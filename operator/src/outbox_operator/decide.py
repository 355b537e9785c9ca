"""PURE: what shall be done, from what was observed. Start here.

`decide` learns from the workers' reports, asks an ordered tuple of policies what holds (the first that has something to
say wins), and answers with one value: the status to write, how many pods, which short-lived jobs, and what happened for
people to read. It is total and level-triggered: nothing is remembered between two calls that is not in the cluster, so
an operator killed anywhere goes on where it was.

Unknown is never zero: a pod that does not answer scales nothing down.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from outbox_core.report import Reason as WorkerReason
from outbox_core.report import WorkerState
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
    learn_lag,
    learn_owner,
    learn_ownership,
    read_resolution,
)
from outbox_operator.observed import Observed, Role
from outbox_operator.status import OwnerRef, OwnershipStatus, Phase, ProcessorStatus
from outbox_operator.verdict import Knowledge, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from outbox_core.config import Resolution
    from outbox_operator.status import ConflictStatus

LOOK_AGAIN: Final = timedelta(seconds=2)
"""While something is in flight."""
REST: Final = timedelta(seconds=10)
"""While nothing is."""


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
        replicas: pods that handle messages; None: leave the workload as it is.
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
    replicas: int | None
    verdict: Verdict
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
    verdict = judge(known)
    replicas = 0 if verdict.halts else wanted_replicas(observed)
    status = build_status(known, verdict, replicas, now)
    jobs = start_jobs(known, verdict, now)
    return Decision(
        status=status,
        replicas=replicas,
        verdict=verdict,
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
    decided = read_resolution(observed.processor.annotations)
    resolution = decided.resolution if decided is not None else None
    conflicts = learn_conflicts(observed, resolution)
    hand_over = learn_hand_over(observed, now)
    ownership = learn_ownership(observed, now)
    spec = observed.processor.spec
    if spec.hand_over_to is not None and hand_over is not None and hand_over.step == HandOverStep.DONE:
        target = spec.hand_over_to
        holder = OwnerRef(
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
    )


def _decision_error(decided: Decided | None, conflict: ConflictStatus | None) -> str | None:
    if decided is None or conflict is None:
        return None
    if decided.resolution is not None and decided.resolution.conflict_id != conflict.id:
        return f"{decided.annotation} is about conflict {decided.resolution.conflict_id}, open is {conflict.id}"
    return decided.error


def wanted_replicas(observed: Observed) -> int:
    """How many pods the spec asks for."""
    spec = observed.processor.spec
    return spec.worker.replicas if spec.engine is Engine.WORKER else 1


# --- policies: what holds, most important first -----------------------------------------------------------------------


def _obstructed(known: Knowledge) -> Verdict | None:
    obstacle = known.observed.obstacle
    if obstacle is None:
        return None
    asks = known.ownership.state == OwnershipState.TRYING
    return Verdict(Phase.INVALID, obstacle.reason, obstacle.message, stalled=True, halts=asks)


def _handing_over(known: Knowledge) -> Verdict | None:
    progress = known.hand_over
    if known.observed.processor.spec.hand_over_to is None or progress is None:
        return None
    if progress.step == HandOverStep.DONE:
        message = f"the claim was given to {progress.to}; remove spec.handOverTo to ask for it again"
        return Verdict(Phase.HANDED_OVER, Reason.HANDED_OVER, message, as_asked=True)
    if progress.step == HandOverStep.FAILED:
        return Verdict(Phase.HANDING_OVER, Reason.HAND_OVER_FAILED, progress.message, stalled=True)
    return Verdict(Phase.HANDING_OVER, Reason.HANDING_OVER, f"giving the claim to {progress.to}")


def _suspended(known: Knowledge) -> Verdict | None:
    if not known.observed.processor.spec.suspend:
        return None
    if known.observed.runners:
        return Verdict(Phase.SUSPENDED, Reason.STOPPING, "pods are finishing or rolling back their batch")
    message = "suspended by spec.suspend; checkpoint and claim are kept"
    return Verdict(Phase.SUSPENDED, Reason.SUSPENDED, message, as_asked=True)


def _conflict_open(known: Knowledge) -> Verdict | None:
    conflict = known.conflicts.open
    if conflict is None or known.resolution is not None:
        return None
    reason = Reason.CHECKPOINT_AHEAD if conflict.code == 2 else Reason.CHECKPOINT_OLDER
    message = describe_open(known)
    return Verdict(Phase.BLOCKED, reason, message, stalled=True)


def describe_open(known: Knowledge) -> str:
    """Say what was changed and how a person decides."""
    conflict = known.conflicts.open
    if conflict is None:
        return ""
    name = known.observed.processor.name
    what = "further ahead than" if conflict.code == 2 else "older than"
    accept = (
        f"accept the stored pair with: kubectl annotate obp {name} "
        f"outbox-operator.dev/accept-checkpoint='{conflict.id}={conflict.stored}'; or "
        if conflict.stored
        else ""
    )
    error = f" ({known.decision_error})" if known.decision_error else ""
    return (
        f"conflict {conflict.id}: the stored checkpoint {conflict.stored or '(no row)'} is {what} "
        f"{conflict.expected or '(none)'}, which the owner expected: somebody else changed it. Nothing is handled "
        f"until a person decides: {accept}go on from another pair with: kubectl annotate obp {name} "
        f"outbox-operator.dev/rewind-checkpoint='{conflict.id}={conflict.expected or 'TRANSACTION_ID:POSITION'}'{error}"
    )


def _owned_elsewhere(known: Knowledge) -> Verdict | None:
    if known.ownership.state != OwnershipState.REFUSED:
        return None
    return Verdict(Phase.WAITING, Reason.CLAIM_HELD, describe_holder(known), stalled=True)


def _trying(known: Knowledge) -> Verdict | None:
    if known.ownership.state != OwnershipState.TRYING:
        return None
    pods = [pod for pod in known.observed.pods if pod.role is Role.CLAIM]
    problem = next((pod.problem for pod in pods if pod.problem is not None), None)
    if problem is not None:
        return Verdict(Phase.UNAVAILABLE, problem.reason, problem.message)
    ownership = known.ownership
    if ownership.problem is not None:
        return Verdict(Phase.UNAVAILABLE, ownership.problem, ownership.problem_message or "")
    others = ", ".join(f"{sibling.namespace}/{sibling.name}" for sibling in known.observed.siblings)
    message = f"{others} asks for the same processorId: the database is asked whose it is before workers start"
    return Verdict(Phase.STARTING, Reason.CLAIMING, message)


def describe_holder(known: Knowledge) -> str:
    """Say who owns the processorId and what to do."""
    holder = known.ownership.holder
    who = f"{holder.cluster}/{holder.namespace}/{holder.name}" if holder is not None else "another resource"
    return (
        f"processorId {known.observed.processor.processor_id!r} is owned by {who}; this resource handles nothing and "
        f"takes over when the owner goes. Delete or hand over that one, or create this one with another processorId"
    )


def _scaled_to_zero(known: Knowledge) -> Verdict | None:
    if wanted_replicas(known.observed) > 0:
        return None
    if known.observed.runners:
        return Verdict(Phase.SUSPENDED, Reason.STOPPING, "pods are finishing or rolling back their batch")
    message = "spec.worker.replicas is 0; checkpoint and claim are kept"
    return Verdict(Phase.SUSPENDED, Reason.SCALED_TO_ZERO, message, as_asked=True)


def _resolving(known: Knowledge) -> Verdict | None:
    if known.resolution is None:
        return None
    lead = known.lead
    if lead is not None and lead.state is WorkerState.BLOCKED:
        # It was started with the decision and could not carry it out; its message says why.
        return Verdict(Phase.BLOCKED, lead.reason, lead.message, stalled=True, halts=False)
    message = f"a person decided conflict {known.resolution.conflict_id}: a worker carries it out"
    return Verdict(Phase.STARTING, Reason.RESOLVING, message, halts=False)


def _rolling_out(known: Knowledge) -> Verdict | None:
    observed = known.observed
    old = [pod for pod in observed.runners if pod.intent_hash != observed.intent_hash]
    lead = known.lead
    current = lead is not None and any(pod.name == lead.pod and pod not in old for pod in observed.runners)
    if not old or current:
        return None
    return Verdict(Phase.STARTING, Reason.ROLLING_OUT, "pods of the former spec are being replaced", halts=False)


def _pods_missing(known: Knowledge) -> Verdict | None:
    observed = known.observed
    if known.lead is not None:
        return None
    problems = [pod.problem for pod in observed.runners if pod.problem is not None and not pod.deleting]
    if not problems and observed.workload is not None and observed.workload.problem is not None:
        problems = [observed.workload.problem]
    if problems:
        return Verdict(Phase.UNAVAILABLE, problems[0].reason, problems[0].message, halts=False)
    silent = [pod for pod in observed.runners if pod.phase == "Running" and pod.report is not None]
    if silent:
        message = f"pod {silent[0].name} does not answer at /status any more; its last words stay in status"
        return Verdict(Phase.UNAVAILABLE, Reason.WORKER_UNREACHABLE, message, halts=False, unknown=True)
    message = "waiting for the first pod's report" if observed.runners else "waiting for the first pod"
    return Verdict(Phase.STARTING, Reason.STARTING, message, halts=False)


_PHASES: Final = {
    WorkerState.STARTING: Phase.STARTING,
    WorkerState.STANDBY: Phase.STARTING,
    WorkerState.DRAINING: Phase.STARTING,
    WorkerState.RETRYING: Phase.RETRYING,
    WorkerState.STOPPED: Phase.STOPPED,
    WorkerState.UNAVAILABLE: Phase.UNAVAILABLE,
    WorkerState.BLOCKED: Phase.BLOCKED,
    WorkerState.CLAIM_REFUSED: Phase.WAITING,
}


def _worker_says(known: Knowledge) -> Verdict | None:
    lead = known.lead
    if lead is None or lead.state is WorkerState.ACTIVE:
        return None
    reason: str = lead.reason
    message = lead.message or f"worker {lead.pod} is {lead.state}"
    if lead.state is WorkerState.STANDBY:
        reason = Reason.STARTING
        message = f"no pod holds the lease that answers; {lead.pod} stands by and takes over when it lapses"
    if lead.attempt and lead.state is WorkerState.RETRYING:
        message = f"attempt {lead.attempt}: {message}"
    return Verdict(_PHASES[lead.state], reason, message, halts=False, stalled=lead.state is WorkerState.STOPPED)


def _running(known: Knowledge) -> Verdict:
    lead = known.lead
    idle = lead is not None and lead.reason is WorkerReason.IDLE
    message = "nothing waits to be handled" if idle else "messages are being handled"
    return Verdict(Phase.RUNNING, Reason.RUNNING, message, as_asked=True, halts=False)


POLICIES: Final[tuple[Callable[[Knowledge], Verdict | None], ...]] = (
    _handing_over,  # asked for: first status, then the pods, then the claim
    _suspended,  # asked for, works in every state below
    _conflict_open,  # nobody processes until a person has decided
    _owned_elsewhere,  # a duplicate runs nothing
    _obstructed,  # an owned object cannot be made
    _trying,  # perhaps a duplicate: it asks first
    _scaled_to_zero,
    _resolving,
    _rolling_out,
    _pods_missing,  # no process answers: the pods' own words
    _worker_says,  # the process answers, and is not active
)


def judge(known: Knowledge) -> Verdict:
    """Ask the policies in order; the first that has something to say wins."""
    return next((verdict for policy in POLICIES if (verdict := policy(known)) is not None), _running(known))


# --- what follows -----------------------------------------------------------------------------------------------------


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
        lag=learn_lag(observed),
        bound=learn_bound(observed),
        conflicts=known.conflicts,
        hand_over=known.hand_over,
        replicas=len(running),
        ready_replicas=sum(pod.ready for pod in running),
        executors=lead.executors if lead is not None else None,
        selector=f"outbox-operator.dev/processor={observed.processor.name},outbox-operator.dev/role="
        + (Role.WORKER if observed.processor.spec.engine is Engine.WORKER else Role.DRIVER),
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
    if any(c.type == "Reconciling" and c.status == "True" for c in status.conditions):
        waits.append(LOOK_AGAIN)
    next_try = known.ownership.next_try
    if next_try is not None and known.ownership.state in _ASKING:
        waits.append(max(next_try - now, timedelta(seconds=0.2)))
    return min(waits)
