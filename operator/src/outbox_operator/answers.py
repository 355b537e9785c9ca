"""PURE: the answer to each condition's question, from what is known and what was decided."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from outbox_core.report import Reason as WorkerReason
from outbox_core.report import RebuildState, WorkerState
from outbox_operator.conditions import IN_FLIGHT, Answer, ConditionType, Reason
from outbox_operator.learn import OwnershipState
from outbox_operator.observed import Problem
from outbox_operator.silence import describe_silences
from outbox_operator.status import Phase

if TYPE_CHECKING:
    from outbox_core.report import RebuildView
    from outbox_operator.verdict import Knowledge, Verdict


FOREIGN_SHOWN: Final = 3
"""How many pods that are not the resource's own are named."""


def build_answers(known: Knowledge, verdict: Verdict, replicas: int) -> tuple[Answer, ...]:
    """Answer every question."""
    always = (
        _ready(verdict),
        _reconciling(known, verdict, replicas),
        _stalled(verdict),
        _ownership(known),
        _checkpoint(known),
        _source(known),
        _flow(known),
        _workers(known, verdict, replicas),
        _suspended(known, verdict),
    )
    rebuild = known.observed.processor.spec.rebuild_of
    return always if rebuild is None else (*always, _swapped(known.rebuild, rebuild.processor_id))


def _ready(verdict: Verdict) -> Answer:
    status = None if verdict.unknown else verdict.as_asked
    return Answer(ConditionType.READY, status, verdict.reason, verdict.message)


def _reconciling(known: Knowledge, verdict: Verdict, replicas: int) -> Answer:
    """Say what is under way; never beside Stalled or Ready, for kstatus takes the first of them that is true."""
    if not verdict.stalled and (moves := _find_movement(known, verdict)) is not None:
        return Answer(ConditionType.RECONCILING, True, *moves)
    if known.waits and not verdict.halts:
        return Answer(ConditionType.RECONCILING, False, Reason.WAITING_FOR_ROLLOUT, known.waits)
    if verdict.stalled:
        return Answer(ConditionType.RECONCILING, False, verdict.reason, "something must be changed first, see Stalled")
    return Answer(ConditionType.RECONCILING, False, Reason.AS_EXPECTED, f"{replicas} pods wanted")


def _find_movement(known: Knowledge, verdict: Verdict) -> tuple[str, str] | None:
    """Return reason and message of what is being carried out."""
    if verdict.reason in IN_FLIGHT:
        return verdict.reason, verdict.message
    if verdict.halts:
        return (Reason.STOPPING, "pods are finishing or rolling back their batch") if known.observed.runners else None
    if known.observed.outdated:
        return (
            Reason.ROLLING_OUT,
            f"{len(known.observed.outdated)} pods of the former spec or version are being replaced",
        )
    return (verdict.reason, "tried again by itself") if verdict.phase is Phase.UNAVAILABLE else None


def _stalled(verdict: Verdict) -> Answer:
    if verdict.stalled:
        return Answer(ConditionType.STALLED, True, verdict.reason, verdict.message)
    return Answer(ConditionType.STALLED, False, Reason.AS_EXPECTED)


def _ownership(known: Knowledge) -> Answer:
    ownership = known.ownership
    who = ownership.holder or "another resource"
    processor_id = known.observed.processor.processor_id
    if ownership.state == OwnershipState.GRANTED:
        message = f"this resource holds the claim on processorId {processor_id!r}"
        return Answer(ConditionType.OWNERSHIP_GRANTED, True, Reason.CLAIM_GRANTED, message)
    if ownership.state == OwnershipState.REFUSED:
        message = (
            f"{who} owns processorId {processor_id!r}; tried again with backoff, {ownership.attempts} tries so far"
        )
        return Answer(ConditionType.OWNERSHIP_GRANTED, False, Reason.CLAIM_HELD, message)
    if ownership.state == OwnershipState.HANDED_OVER:
        message = f"processorId {processor_id!r} was handed over to {who}"
        return Answer(ConditionType.OWNERSHIP_GRANTED, False, Reason.HANDED_OVER, message)
    if ownership.state == OwnershipState.TRYING:
        message = "another resource asks for the same processorId; the database is asked whose it is"
        return Answer(ConditionType.OWNERSHIP_GRANTED, None, Reason.CLAIMING, message)
    return Answer(ConditionType.OWNERSHIP_GRANTED, None, Reason.NOT_OBSERVED, "no worker has asked for the claim yet")


def _checkpoint(known: Knowledge) -> Answer:
    kind = ConditionType.CHECKPOINT_HEALTHY
    conflict = known.conflicts.open
    if conflict is not None:
        reason = Reason.CHECKPOINT_AHEAD if conflict.code == 2 else Reason.CHECKPOINT_OLDER
        message = (
            f"conflict {conflict.id}, code {conflict.code}: expected {conflict.expected or '(none)'}, stored "
            f"{conflict.stored or '(no row)'}, told to pod {conflict.pod}"
        )
        if known.resolution is not None:
            return Answer(kind, False, Reason.RESOLVING, message + "; a person decided, a worker carries it out")
        error = f" ({known.decision_error})" if known.decision_error else ""
        return Answer(kind, False, reason, f"{message}; waits for a person, see Ready{error}")
    last = known.conflicts.last
    uid = known.observed.processor.uid
    foreign = last is not None and last.code == 4 and last.holder is not None and last.holder.uid != uid
    if foreign and last is not None and known.ownership.state == OwnershipState.REFUSED:
        message = (
            f"conflict {last.id}, code 4: pod {last.pod} expected {last.expected or '(none)'}, stored is "
            f"{last.stored or '(no row)'}; the batch was rolled back: "
            f"{last.holder or 'another resource'} is the owner"
        )
        return Answer(kind, False, Reason.NOT_OWNER, message)
    if known.lead is None and known.observed.previous.checkpoint is None:
        return Answer(kind, None, Reason.NOT_OBSERVED, "no worker has read it yet")
    return Answer(kind, True, Reason.AS_EXPECTED, f"{known.conflicts.count} refusals so far")


def _source(known: Knowledge) -> Answer:
    kind = ConditionType.SOURCE_CURRENT
    if known.lead is not None and known.lead.reason is WorkerReason.DATABASE_UNAVAILABLE:
        # What was seen last may be over, or have begun, long ago.
        return Answer(kind, None, Reason.NOT_OBSERVED, "the database cannot be asked now, see Ready")
    bound = known.lead.bound if known.lead is not None else None
    if bound is None and known.lead is not None and known.lead.unfinished is not None:
        return Answer(kind, True, Reason.AS_EXPECTED, "mode Competing waits for nobody's open transaction")
    if bound is None:
        return Answer(kind, None, Reason.NOT_OBSERVED, "no worker reads now")
    if not bound.stalled:
        return Answer(kind, True, Reason.BOUND_MOVES)
    holder = bound.holder or "a transaction that no view of the server shows"
    others = f" ({bound.others} more open transactions hold it next)" if bound.others else ""
    message = (
        f"nothing at or above transaction {bound.transaction_id} can be read for {round(bound.age_seconds)} s although "
        f"messages wait: held back by {holder}{others}; {bound.remedy or 'end that transaction'}"
    )
    return Answer(kind, False, Reason.BOUND_STALLED, message)


def _flow(known: Knowledge) -> Answer:
    """Say what failing messages keep others waiting; those that wait for a person come first."""
    kind = ConditionType.MESSAGES_FLOW
    if known.lead is None:
        return Answer(kind, None, Reason.NOT_OBSERVED, "no worker has looked")
    failures = known.lead.failures
    dead = f"{failures.dead_letters}{' or more' if failures.at_least else ''} dead letters"
    working = (report for report in known.observed.reports if report.state is not WorkerState.STANDBY)
    circuits = {report.circuit for report in working if report.circuit is not None}
    if "Open" in circuits:
        message = "the target fails message after message: it is spared for a while, then it is tried again"
        return Answer(kind, False, Reason.CIRCUIT_OPEN, message)
    if failures.blocked_keys:
        keys = ", ".join(
            f"{blocked.key!r} behind {blocked.message_id!r} ({blocked.error_class or 'not tried yet'}, "
            f"{'waits for a person' if blocked.next_attempt_at is None else 'tried again'})"
            for blocked in failures.blocked_keys
        )
        message = (
            f"keys that wait: {keys}; {failures.held} messages held, {dead}. Mend the cause; what waits for a person: "
            "outbox held list, outbox dead-letters list, outbox redrive"
        )
        return Answer(kind, False, Reason.KEY_BLOCKED, message)
    if failures.dead_letters:
        message = f"{dead} wait for a person: outbox dead-letters list, then redrive or drop them"
        return Answer(kind, False, Reason.DEAD_LETTERS, message)
    if circuits == {"HalfOpen"}:
        # Open again after every bad probe: until a good one the condition does not turn to and fro.
        message = "the next message is tried alone: it shows whether the target is back"
        return Answer(kind, False, Reason.CIRCUIT_OPEN, message)
    return Answer(kind, True, Reason.AS_EXPECTED, f"{failures.held} messages held")


NOT_ITS_OWN: Final = "carry this resource's labels and were not made for it: they are neither asked nor believed"


def describe_foreign(names: tuple[str, ...]) -> str:
    """Name pods that only claim to be the resource's, and say what to do; empty without any."""
    if not names:
        return ""
    more = f" and {len(names) - FOREIGN_SHOWN} more" if len(names) > FOREIGN_SHOWN else ""
    return (
        f"pods {', '.join(names[:FOREIGN_SHOWN])}{more} {NOT_ITS_OWN}; "
        "delete them, or take the label outbox-operator.dev/processor off"
    )


def _workers(known: Knowledge, verdict: Verdict, replicas: int) -> Answer:
    answer = _available(known, verdict, replicas)
    foreign = describe_foreign(known.observed.foreign)
    return replace(answer, message=f"{answer.message}; {foreign}") if foreign else answer


def _available(known: Knowledge, verdict: Verdict, replicas: int) -> Answer:
    kind = ConditionType.WORKERS_AVAILABLE
    observed = known.observed
    if replicas == 0 and known.ownership.state == OwnershipState.TRYING and verdict.phase is Phase.UNAVAILABLE:
        return Answer(kind, False, verdict.reason, verdict.message)
    if replicas == 0:
        return Answer(kind, None, Reason.NO_WORKERS, "no pods are wanted")
    problems = [pod.problem for pod in observed.runners if pod.problem is not None and not pod.deleting]
    if not problems and observed.workload is not None and observed.workload.problem is not None:
        problems = [observed.workload.problem]
    if not problems and observed.silences:
        problems = [Problem(Reason.WORKER_UNREACHABLE, describe_silences(observed.silences))]
    if problems:
        return Answer(kind, False, problems[0].reason, problems[0].message)
    ready = sum(pod.ready and not pod.deleting for pod in observed.runners)
    if ready >= replicas:
        return Answer(kind, True, Reason.AS_EXPECTED, f"{ready} of {replicas} pods are ready")
    lead = known.lead
    if lead is not None and lead.state not in (WorkerState.ACTIVE, WorkerState.STANDBY):
        return Answer(kind, False, lead.reason, lead.message or f"pod {lead.pod} is {lead.state}")
    reason = verdict.reason if verdict.reason in IN_FLIGHT else Reason.STARTING
    return Answer(kind, False, reason, f"{ready} of {replicas} pods are ready")


def _suspended(known: Knowledge, verdict: Verdict) -> Answer:
    kind = ConditionType.SUSPENDED
    if known.observed.processor.spec.suspend:
        gone = not known.observed.runners
        return Answer(kind, gone, Reason.SUSPENDED if gone else Reason.STOPPING, "asked by spec.suspend")
    if verdict.phase is Phase.BLOCKED and verdict.halts:
        return Answer(kind, True, Reason.CONFLICT_OPEN, "a conflict waits for a person")
    return Answer(kind, False, Reason.NOT_SUSPENDED)


def _swapped(rebuild: RebuildView | None, of: str) -> Answer:
    kind = ConditionType.SWAPPED
    if rebuild is None:
        return Answer(kind, None, Reason.NOT_OBSERVED, f"no worker has compared itself with processor {of!r} yet")
    if rebuild.state == RebuildState.SWAPPED:
        return Answer(kind, True, rebuild.state, f"replaced processor {of!r}: {rebuild.message}")
    behind = "" if rebuild.behind is None else f"; {rebuild.behind}{' or more' if rebuild.at_least else ''} behind it"
    return Answer(kind, False, rebuild.state, f"processor {of!r}{behind}: {rebuild.message}".rstrip(": "))
