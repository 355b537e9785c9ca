"""PURE: the policies, most important first; the result of the first that applies is what people read.

A policy returns what people read, and whether pods may handle messages; None: it does not apply. `decide.py` draws the
conclusions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from outbox_core.plain import plain_count
from outbox_core.report import Conflict, WorkerState
from outbox_core.report import Reason as WorkerReason
from outbox_core.spec import Engine, Mode
from outbox_operator.api.observed import Observed, Problem, Role
from outbox_operator.api.reasons import Reason
from outbox_operator.api.status import Phase
from outbox_operator.decision.hand_over import HandOverStep
from outbox_operator.decision.merge import Facts, describe_partitioning
from outbox_operator.decision.ownership import OwnershipState

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """What one policy says of the resource, in one word for people and one for machines."""

    phase: Phase
    reason: str
    message: str
    ready: bool = False
    """What the spec asks for is so, hence Ready."""
    stalled: bool = False
    """A person or another resource must change something."""
    stops_workers: bool = True
    """No pod may handle messages."""
    unknown: bool = False
    """Nothing contradicts readiness, and nothing shows it."""


def wanted_replicas(observed: Observed) -> int:
    """How many pods the spec asks for."""
    spec = observed.processor.spec
    return spec.worker.replicas if spec.engine is Engine.WORKER else 1


def _find_obstacle(facts: Facts) -> Problem | None:
    """Say what a person must do first: for the resource to hand over to, or for an owned object."""
    progress = facts.hand_over
    if progress is not None and progress.step == HandOverStep.WAITING:
        return Problem(Reason.HAND_OVER_FAILED, progress.message)
    return facts.observed.obstacle


def _obstructed(facts: Facts) -> PolicyResult | None:
    obstacle = _find_obstacle(facts)
    if obstacle is None:
        return None
    stops = facts.ownership.state in (OwnershipState.TRYING, OwnershipState.HANDED_OVER)
    return PolicyResult(Phase.INVALID, obstacle.reason, obstacle.message, stalled=True, stops_workers=stops)


def _handing_over(facts: Facts) -> PolicyResult | None:
    progress = facts.hand_over
    if progress is None or progress.step == HandOverStep.WAITING:
        return None
    if progress.step == HandOverStep.DONE:
        message = f"the claim was given to {progress.to}; remove spec.handOverTo to ask for it again"
        return PolicyResult(Phase.HANDED_OVER, Reason.HANDED_OVER, message, ready=True)
    if progress.step == HandOverStep.FAILED:
        return PolicyResult(Phase.HANDING_OVER, Reason.HAND_OVER_FAILED, progress.message, stalled=True)
    return PolicyResult(Phase.HANDING_OVER, Reason.HANDING_OVER, f"giving the claim to {progress.to}")


def _suspended(facts: Facts) -> PolicyResult | None:
    if not facts.observed.processor.spec.suspend:
        return None
    return _stopped(facts, Reason.SUSPENDED, "suspended by spec.suspend")


def _stopped(facts: Facts, reason: Reason, asked: str) -> PolicyResult:
    if facts.observed.runners:
        return PolicyResult(Phase.SUSPENDED, Reason.STOPPING, "pods are finishing or rolling back their batch")
    return PolicyResult(Phase.SUSPENDED, reason, f"{asked}; checkpoint and claim are kept", ready=True)


def _conflict_open(facts: Facts) -> PolicyResult | None:
    conflict = facts.conflicts.open
    if conflict is None or facts.resolution is not None:
        return None
    reason = Reason.CHECKPOINT_AHEAD if conflict.code == 2 else Reason.CHECKPOINT_OLDER
    message = _with_change(facts, _describe_open(facts, conflict))
    # A partition that waits for a person does not stop the others.
    return PolicyResult(Phase.BLOCKED, reason, message, stalled=True, stops_workers=not _is_partitioned(facts))


def _with_change(facts: Facts, message: str) -> str:
    """A change of the number of partitions that waits for this is said in the same breath."""
    change = describe_partitioning(facts)
    return f"{message}; {change}" if change else message


def _is_partitioned(facts: Facts) -> bool:
    return facts.observed.processor.spec.delivery.mode is Mode.PARTITIONED


def _describe_open(facts: Facts, conflict: Conflict) -> str:
    """Say what was changed and how a person decides."""
    # With the namespace: in another one the same command would decide about a conflict that no person looked at.
    annotate = f"kubectl annotate -n {facts.observed.processor.namespace} obp {facts.observed.processor.name}"
    what = "further ahead than" if conflict.code == 2 else "older than"
    accept = (
        f"accept the stored pair with: {annotate} "
        f"outbox-operator.dev/accept-checkpoint='{conflict.id}={conflict.stored}'; or "
        if conflict.stored
        else ""
    )
    error = f" ({facts.decision_error})" if facts.decision_error else ""
    what_waits = f"Nothing of partition {conflict.partition}" if _is_partitioned(facts) else "Nothing"
    return (
        f"conflict {conflict.id}: the stored checkpoint {conflict.stored or '(no row)'} is {what} "
        f"{conflict.expected or '(none)'}, which the owner expected: another writer changed it. {what_waits} is "
        f"handled until a person decides: {accept}go on from another pair with: {annotate} "
        f"outbox-operator.dev/rewind-checkpoint='{conflict.id}={_propose_rewind(conflict.expected)}{error}"
    )


def _propose_rewind(expected: str | None) -> str:
    """Propose where to go on; a pair 0:COUNTER (cursor Snapshot) counts messages and is no place."""
    if expected is None:
        return "TRANSACTION_ID:POSITION' (cursor Snapshot: 0:POSITION)"
    if expected.startswith("0:") and expected != "0:0":
        return "0:POSITION', where POSITION is the first position to handle again"
    return f"{expected}'"


def _owned_elsewhere(facts: Facts) -> PolicyResult | None:
    if facts.ownership.state != OwnershipState.REFUSED:
        return None
    who = facts.ownership.holder or "another resource"
    message = (
        f"processorId {facts.observed.processor.processor_id!r} is owned by {who}; this resource handles nothing and "
        f"takes over when the owner goes. Delete or hand over that one, or create this one with another processorId"
    )
    return PolicyResult(Phase.WAITING, Reason.CLAIM_HELD, message, stalled=True)


def _trying(facts: Facts) -> PolicyResult | None:
    if facts.ownership.state != OwnershipState.TRYING:
        return None
    pods = [pod for pod in facts.observed.pods if pod.role is Role.CLAIM]
    problem = next((pod.problem for pod in pods if pod.problem is not None), None)
    if problem is not None:
        return PolicyResult(Phase.UNAVAILABLE, problem.reason, problem.message)
    ownership = facts.ownership
    if ownership.problem is not None:
        return PolicyResult(Phase.UNAVAILABLE, ownership.problem, ownership.problem_message or "")
    others = ", ".join(f"{sibling.namespace}/{sibling.name}" for sibling in facts.observed.siblings)
    message = f"{others} asks for the same processorId: the database is asked whose it is before workers start"
    return PolicyResult(Phase.STARTING, Reason.CLAIMING, message)


def _scaled_to_zero(facts: Facts) -> PolicyResult | None:
    if wanted_replicas(facts.observed) > 0:
        return None
    return _stopped(facts, Reason.SCALED_TO_ZERO, "spec.worker.replicas is 0")


def _resolving(facts: Facts) -> PolicyResult | None:
    if facts.resolution is None:
        return None
    lead = facts.lead
    if lead is not None and lead.state is WorkerState.BLOCKED:
        # It was started with the decision and could not carry it out; its message says why.
        return PolicyResult(Phase.BLOCKED, lead.reason, lead.message, stalled=True, stops_workers=False)
    message = f"a person decided conflict {facts.resolution.conflict_id}: a worker carries it out"
    return PolicyResult(Phase.STARTING, Reason.RESOLVING, message, stops_workers=False)


def _rolling_out(facts: Facts) -> PolicyResult | None:
    observed = facts.observed
    old = [pod for pod in observed.runners if pod.intent_hash != observed.intent_hash]
    lead = facts.lead
    current = lead is not None and any(pod.name == lead.pod and pod not in old for pod in observed.runners)
    if not old or current:
        return None
    return PolicyResult(
        Phase.STARTING, Reason.ROLLING_OUT, "pods of the former spec or version are being replaced", stops_workers=False
    )


def _pods_missing(facts: Facts) -> PolicyResult | None:
    observed, lead = facts.observed, facts.lead
    # One that ends again and again gets no further than to say that it starts.
    if observed.problem is not None and (lead is None or lead.state is WorkerState.STARTING):
        return PolicyResult(Phase.UNAVAILABLE, observed.problem.reason, observed.problem.message, stops_workers=False)
    if lead is not None:
        return None
    if message := observed.unreachable:
        return PolicyResult(Phase.UNAVAILABLE, Reason.WORKER_UNREACHABLE, message, stops_workers=False, unknown=True)
    silent = [pod for pod in observed.runners if pod.reachable and pod.report is None and not pod.deleting]
    if silent:  # one that is shared, and could not read this resource's configuration
        message = f"pod {silent[0].name} says nothing of this resource: its log says why; delete it to try again"
        return PolicyResult(Phase.UNAVAILABLE, WorkerReason.INVALID_CONFIGURATION, message, stops_workers=False)
    message = "waiting for the first pod's report" if observed.runners else "waiting for the first pod"
    return PolicyResult(Phase.STARTING, Reason.STARTING, message, stops_workers=False)


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

_NEEDS_A_PERSON: Final = frozenset({WorkerReason.SUPERSEDED, WorkerReason.INVALID_CONFIGURATION})
"""Reasons of a worker that looks again by itself, and that only a person can take away."""


def _worker_says(facts: Facts) -> PolicyResult | None:
    lead = facts.lead
    if lead is None or lead.state is WorkerState.ACTIVE:
        return None
    reason: str = lead.reason
    message = lead.message or f"worker {lead.pod} is {lead.state}"
    if lead.state is WorkerState.STANDBY:
        reason = Reason.STARTING
        message = f"no pod holds the lease that answers; {lead.pod} stands by and takes over when it lapses"
    if lead.attempt and lead.state is WorkerState.RETRYING:
        message = f"attempt {lead.attempt}: {message}"
    message = _with_change(facts, message)
    stalled = lead.state is WorkerState.STOPPED or lead.reason in _NEEDS_A_PERSON
    return PolicyResult(_PHASES[lead.state], reason, message, stops_workers=False, stalled=stalled)


def _running(facts: Facts) -> PolicyResult:
    lead = facts.lead
    if change := describe_partitioning(facts):
        return PolicyResult(Phase.RUNNING, Reason.CHANGING_PARTITIONS, change, stops_workers=False)
    if facts.observed.outdated:
        message = f"messages are being handled; {facts.observed.outdated}"
        return PolicyResult(Phase.RUNNING, Reason.ROLLING_OUT, message, stops_workers=False)
    message = "messages are being handled"
    if lead is not None and lead.reason is WorkerReason.IDLE:
        later = facts.retries + (facts.failures.held if facts.failures is not None else 0)
        wait = plain_count(later, "waits", "wait")
        due_later = f"no message is due now; {wait} for another attempt, for a later time or for a person"
        message = due_later if later else "nothing waits to be handled"
    if lead is not None and lead.advice:
        message += f"; {lead.advice}"
    if ignored := facts.observed.processor.ignored:
        fields = ", ".join(f"spec.{each}" for each in ignored)
        message += f"; this operator does not know {fields} and ignores it: upgrade the operator"
    return PolicyResult(Phase.RUNNING, Reason.RUNNING, message, ready=True, stops_workers=False)


POLICIES: Final[tuple[Callable[[Facts], PolicyResult | None], ...]] = (
    _handing_over,  # asked for: first status, then the pods, then the claim
    _suspended,  # asked for, works in every state below
    _conflict_open,  # no pod handles messages until a person has decided
    _owned_elsewhere,  # a duplicate runs nothing
    _obstructed,  # an owned object cannot be made, or the resource to hand over to is not there
    _trying,  # perhaps a duplicate: it asks first
    _scaled_to_zero,
    _resolving,
    _rolling_out,
    _pods_missing,  # no process answers, or none but one that starts: the pods' own words
    _worker_says,  # the process answers, and is not active
)


def evaluate_policies(facts: Facts) -> PolicyResult:
    """Evaluate the policies in order; the first that applies wins. An obstacle is named beside it."""
    result = next((result for policy in POLICIES if (result := policy(facts)) is not None), _running(facts))
    obstacle = _find_obstacle(facts)
    if obstacle is None or result.reason == obstacle.reason:
        return result
    return replace(result, message=f"{result.message}; {obstacle.reason}: {obstacle.message}")
