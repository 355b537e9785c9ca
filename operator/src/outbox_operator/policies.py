"""PURE: what holds, most important first. An ordered tuple of policies; the first that has something to say wins.

A policy says what people read, and whether pods may handle messages. `decide.py` draws the conclusions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from outbox_core.report import Reason as WorkerReason
from outbox_core.report import WorkerState
from outbox_core.spec import Engine, Mode
from outbox_operator.conditions import Reason
from outbox_operator.hand_over import HandOverStep
from outbox_operator.learn import OwnershipState, describe_division
from outbox_operator.observed import Role
from outbox_operator.silence import describe_silences
from outbox_operator.status import Phase
from outbox_operator.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox_operator.observed import Observed
    from outbox_operator.verdict import Knowledge


def wanted_replicas(observed: Observed) -> int:
    """How many pods the spec asks for."""
    spec = observed.processor.spec
    return spec.worker.replicas if spec.engine is Engine.WORKER else 1


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
    message = _with_change(known, describe_open(known))
    # A partition that waits for a person does not stop the others.
    return Verdict(Phase.BLOCKED, reason, message, stalled=True, halts=not _is_divided(known))


def _with_change(known: Knowledge, message: str) -> str:
    """A change of the number of partitions that waits for this is said in the same breath."""
    change = describe_division(known.observed)
    return f"{message}; {change}" if change else message


def _is_divided(known: Knowledge) -> bool:
    return known.observed.processor.spec.delivery.mode is Mode.PARTITIONED


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
    what_waits = f"Nothing of partition {conflict.partition}" if _is_divided(known) else "Nothing"
    return (
        f"conflict {conflict.id}: the stored checkpoint {conflict.stored or '(no row)'} is {what} "
        f"{conflict.expected or '(none)'}, which the owner expected: somebody else changed it. {what_waits} is handled "
        f"until a person decides: {accept}go on from another pair with: kubectl annotate obp {name} "
        f"outbox-operator.dev/rewind-checkpoint='{conflict.id}={_propose_rewind(conflict.expected)}{error}"
    )


def _propose_rewind(expected: str | None) -> str:
    """Propose where to go on; a pair 0:COUNTER (cursor Snapshot) counts messages and is no place."""
    if expected is None:
        return "TRANSACTION_ID:POSITION' (cursor Snapshot: 0:POSITION)"
    if expected.startswith("0:") and expected != "0:0":
        return "0:POSITION', where POSITION is the first position to handle again"
    return f"{expected}'"


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
    who = known.ownership.holder or "another resource"
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
    return Verdict(
        Phase.STARTING, Reason.ROLLING_OUT, "pods of the former spec or version are being replaced", halts=False
    )


def _pods_missing(known: Knowledge) -> Verdict | None:
    observed = known.observed
    if known.lead is not None:
        return None
    problems = [pod.problem for pod in observed.runners if pod.problem is not None and not pod.deleting]
    if not problems and observed.workload is not None and observed.workload.problem is not None:
        problems = [observed.workload.problem]
    if problems:
        return Verdict(Phase.UNAVAILABLE, problems[0].reason, problems[0].message, halts=False)
    if silences := observed.silences:
        message = describe_silences(silences)
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
    message = _with_change(known, message)
    stalled = lead.state is WorkerState.STOPPED or lead.reason is WorkerReason.SUPERSEDED
    return Verdict(_PHASES[lead.state], reason, message, halts=False, stalled=stalled)


def _running(known: Knowledge) -> Verdict:
    lead = known.lead
    if change := describe_division(known.observed):
        return Verdict(Phase.RUNNING, Reason.CHANGING_PARTITIONS, change, halts=False)
    if old := known.observed.outdated:
        message = f"messages are being handled; {len(old)} pods of the former spec or version are being replaced"
        return Verdict(Phase.RUNNING, Reason.ROLLING_OUT, message, halts=False)
    idle = lead is not None and lead.reason is WorkerReason.IDLE
    message = "nothing waits to be handled" if idle else "messages are being handled"
    if lead is not None and lead.advice:
        message += f"; {lead.advice}"
    if ignored := known.observed.processor.ignored:
        fields = ", ".join(f"spec.{each}" for each in ignored)
        message += f"; this operator does not know {fields} and ignores it: upgrade the operator"
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
    """Ask the policies in order; the first that has something to say wins. What is in the way is said beside it."""
    verdict = next((verdict for policy in POLICIES if (verdict := policy(known)) is not None), _running(known))
    obstacle = known.observed.obstacle
    if obstacle is None or verdict.reason == obstacle.reason:
        return verdict
    return replace(verdict, message=f"{verdict.message}; {obstacle.reason}: {obstacle.message}")
