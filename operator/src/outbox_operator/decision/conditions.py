"""PURE: builds the conditions: status, reason and message of each, and when one of them changes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from outbox_core.plain import plain_count
from outbox_core.report import Reason as WorkerReason
from outbox_core.report import RebuildState, RebuildView, WorkerState
from outbox_core.spec import Blocks, Mode
from outbox_operator.api.observed import Problem
from outbox_operator.api.reasons import IN_FLIGHT, ConditionType, Reason
from outbox_operator.api.status import MAX_MESSAGE, Condition, Phase
from outbox_operator.decision.ownership import OwnershipState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import datetime

    from outbox_core.report import Report
    from outbox_operator.decision.merge import Facts
    from outbox_operator.decision.policies import PolicyResult


TROUBLE: Final = {
    ConditionType.READY: ("False", "Unknown"),
    ConditionType.STALLED: ("True",),
    ConditionType.OWNERSHIP_GRANTED: ("False",),
    ConditionType.CHECKPOINT_HEALTHY: ("False",),
    ConditionType.SOURCE_CURRENT: ("False",),
    ConditionType.MESSAGES_FLOW: ("False",),
    ConditionType.WORKERS_AVAILABLE: ("False",),
}
"""The status of a condition that tells of trouble."""

FOREIGN_SHOWN: Final = 3
"""How many pods that are not the resource's own are named."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a condition shall say now; `update_conditions` decides whether that is a transition."""

    status: bool | None
    reason: str
    message: str = ""


def build_conditions(facts: Facts, result: PolicyResult, replicas: int) -> dict[ConditionType, Answer]:
    """Build every condition."""
    answers = {
        ConditionType.READY: Answer(None if result.unknown else result.ready, result.reason, result.message),
        ConditionType.RECONCILING: _reconciling(facts, result, replicas),
        ConditionType.STALLED: (
            Answer(True, result.reason, result.message) if result.stalled else Answer(False, Reason.AS_EXPECTED)
        ),
        ConditionType.OWNERSHIP_GRANTED: _ownership(facts),
        ConditionType.CHECKPOINT_HEALTHY: _checkpoint(facts),
        ConditionType.SOURCE_CURRENT: _source(facts),
        ConditionType.MESSAGES_FLOW: _flow(facts),
        ConditionType.WORKERS_AVAILABLE: _workers(facts, result, replicas),
        ConditionType.SUSPENDED: _suspended(facts, result),
    }
    if (rebuild := facts.observed.processor.spec.rebuild_of) is not None:
        answers[ConditionType.SWAPPED] = _swapped(facts.rebuild, rebuild.processor_id)
    return answers


def _reconciling(facts: Facts, result: PolicyResult, replicas: int) -> Answer:
    """Say what is under way; never beside Stalled or Ready, for kstatus takes the first of them that is true."""
    if not result.stalled and (moves := _find_movement(facts, result)) is not None:
        return Answer(True, *moves)
    if facts.waits and not result.stops_workers:
        return Answer(False, Reason.WAITING_FOR_ROLLOUT, facts.waits)
    if result.stalled:
        return Answer(False, result.reason, "something must be changed first, see Stalled")
    return Answer(False, Reason.AS_EXPECTED, f"{plain_count(replicas, 'pod')} wanted")


def _find_movement(facts: Facts, result: PolicyResult) -> tuple[str, str] | None:
    """Return reason and message of what is being carried out."""
    if result.reason in IN_FLIGHT:
        return result.reason, result.message
    if result.stops_workers:
        return (Reason.STOPPING, "pods are finishing or rolling back their batch") if facts.observed.runners else None
    if facts.observed.outdated:
        return Reason.ROLLING_OUT, facts.observed.outdated
    return (result.reason, "tried again by itself") if result.phase is Phase.UNAVAILABLE else None


def _ownership(facts: Facts) -> Answer:
    who = facts.ownership.holder or "another resource"
    what = f"processorId {facts.observed.processor.processor_id!r}"
    tries = f"tried again with backoff, {plain_count(facts.ownership.attempts, 'try', 'tries')} so far"
    same = "another resource asks for the same processorId; the database is asked whose it is"
    answers = {
        OwnershipState.GRANTED: Answer(True, Reason.CLAIM_GRANTED, f"this resource holds the claim on {what}"),
        OwnershipState.REFUSED: Answer(False, Reason.CLAIM_HELD, f"{who} owns {what}; {tries}"),
        OwnershipState.HANDED_OVER: Answer(False, Reason.HANDED_OVER, f"{what} was handed over to {who}"),
        OwnershipState.TRYING: Answer(None, Reason.CLAIMING, same),
    }
    unknown = Answer(None, Reason.NOT_OBSERVED, "no worker has asked for the claim yet")
    return answers.get(facts.ownership.state, unknown)


def _checkpoint(facts: Facts) -> Answer:
    conflict = facts.conflicts.open
    if conflict is not None:
        reason = Reason.CHECKPOINT_AHEAD if conflict.code == 2 else Reason.CHECKPOINT_OLDER
        message = (
            f"conflict {conflict.id}, code {conflict.code}: expected {conflict.expected or '(none)'}, stored "
            f"{conflict.stored or '(no row)'}, told to pod {conflict.pod}"
        )
        if facts.resolution is not None:
            return Answer(False, Reason.RESOLVING, message + "; a person decided, a worker carries it out")
        error = f" ({facts.decision_error})" if facts.decision_error else ""
        return Answer(False, reason, f"{message}; waits for a person, see Ready{error}")
    last = facts.conflicts.last
    holder = last.holder if last is not None and last.code == 4 else None
    is_foreign = holder is not None and holder.uid != facts.observed.processor.uid
    if is_foreign and last is not None and facts.ownership.state == OwnershipState.REFUSED:
        message = (
            f"conflict {last.id}, code 4: pod {last.pod} expected {last.expected or '(none)'}, stored is "
            f"{last.stored or '(no row)'}; the batch was rolled back: {last.holder} is the owner"
        )
        return Answer(False, Reason.NOT_OWNER, message)
    if facts.lead is None and facts.observed.previous.checkpoint is None:
        return Answer(None, Reason.NOT_OBSERVED, "no worker has read it yet")
    return Answer(True, Reason.AS_EXPECTED, f"{plain_count(facts.conflicts.count, 'refusal')} so far")


def _source(facts: Facts) -> Answer:
    if facts.lead is not None and facts.lead.reason is WorkerReason.DATABASE_UNAVAILABLE:
        # What was seen last may be over, or have begun, long ago.
        return Answer(None, Reason.NOT_OBSERVED, "the database cannot be asked now, see Ready")
    mark = facts.lead.high_water_mark if facts.lead is not None else None
    if mark is None and facts.lead is not None and facts.lead.unfinished is not None:
        return Answer(True, Reason.AS_EXPECTED, "mode Competing waits for no open transaction")
    if mark is None:
        return Answer(None, Reason.NOT_OBSERVED, "no worker reads now")
    if not mark.stalled:
        return Answer(True, Reason.HIGH_WATER_MARK_MOVES)
    holder = mark.holder or "a transaction that no view of the server shows"
    more = plain_count(mark.others, "more open transaction holds", "more open transactions hold")
    others = f" ({more} it next)" if mark.others else ""
    message = (
        f"nothing at or above transaction {mark.transaction_id} can be read for {round(mark.age_seconds)} s although "
        f"messages wait: held back by {holder}{others}; {mark.remedy or 'end that transaction'}"
    )
    return Answer(False, Reason.HIGH_WATER_MARK_STALLED, message)


def _flow(facts: Facts) -> Answer:
    """Say what failing messages keep others waiting; those that wait for a person come first."""
    working = [report for report in facts.observed.reports if report.state is not WorkerState.STANDBY]
    circuits = {report.circuit for report in working if report.circuit is not None}
    if (halt := _find_halt(facts, working, circuits)) is not None:
        return halt
    failures = facts.failures
    if failures is None:
        return Answer(None, Reason.NOT_OBSERVED, "no worker has looked")
    held = f"{plain_count(failures.held, 'message')} held"
    letters = plain_count(failures.dead_letters, "dead letter")
    dead = f"{failures.dead_letters} or more dead letters" if failures.at_least else letters
    if failures.blocked_keys:
        keys = ", ".join(
            f"{blocked.key!r} behind {blocked.message_id!r} ({blocked.error_class or 'not tried yet'}, "
            f"{'waits for a person' if blocked.next_attempt_at is None else 'tried again'})"
            for blocked in failures.blocked_keys
        )
        message = (
            f"keys that wait: {keys}; {held}, {dead}. Remove the cause; what waits for a "
            "person: outbox held list, outbox dead-letters list, outbox redrive"
        )
        return Answer(False, Reason.KEY_BLOCKED, message)
    if failures.dead_letters:
        message = f"{dead}, to be decided by a person: outbox dead-letters list, then redrive or drop them"
        return Answer(False, Reason.DEAD_LETTERS, message)
    if circuits == {"HalfOpen"}:
        # Open again after every bad probe: until a good one the condition does not turn to and fro.
        message = "the next message is tried alone: it shows whether the target is back"
        return Answer(False, Reason.CIRCUIT_OPEN, message)
    wait = plain_count(facts.retries, "waits", "wait")
    later = f"; {wait} for another attempt or for a later time" if facts.retries else ""
    return Answer(True, Reason.AS_EXPECTED, f"{held}{later}")


def _find_halt(facts: Facts, working: Iterable[Report], circuits: set[str]) -> Answer | None:
    """Say why all messages wait: the target is spared, or the mode lets nothing pass the message in hand."""
    if "Open" in circuits:
        message = "the target fails message after message: it is spared for a while, then it is tried again"
        return Answer(False, Reason.CIRCUIT_OPEN, message)
    delivery = facts.observed.processor.spec.delivery
    in_line = delivery.mode is not Mode.COMPETING and delivery.blocking is Blocks.PARTITION
    for report in working:
        if report.state is WorkerState.STOPPED or (report.state is WorkerState.RETRYING and in_line):
            return Answer(False, report.reason, "later messages wait for the one in hand, see Ready")
    return None


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


def _workers(facts: Facts, result: PolicyResult, replicas: int) -> Answer:
    answer, foreign = _available(facts, result, replicas), describe_foreign(facts.observed.foreign)
    return replace(answer, message=f"{answer.message}; {foreign}") if foreign else answer


def _available(facts: Facts, result: PolicyResult, replicas: int) -> Answer:
    observed = facts.observed
    if replicas == 0 and facts.ownership.state == OwnershipState.TRYING and result.phase is Phase.UNAVAILABLE:
        return Answer(False, result.reason, result.message)
    if replicas == 0:
        return Answer(None, Reason.NO_WORKERS, "no pods are wanted")
    problem = observed.problem
    if problem is None and observed.unreachable:
        problem = Problem(Reason.WORKER_UNREACHABLE, observed.unreachable)
    if problem is not None:
        return Answer(False, problem.reason, problem.message)
    ready = sum(pod.ready and not pod.deleting for pod in observed.runners)
    if ready >= replicas:
        return Answer(True, Reason.AS_EXPECTED, f"pods ready: {ready} of {replicas}")
    lead = facts.lead
    if lead is not None and lead.state not in (WorkerState.ACTIVE, WorkerState.STANDBY):
        return Answer(False, lead.reason, lead.message or f"pod {lead.pod} is {lead.state}")
    reason = result.reason if result.reason in IN_FLIGHT else Reason.STARTING
    return Answer(False, reason, f"pods ready: {ready} of {replicas}")


def _suspended(facts: Facts, result: PolicyResult) -> Answer:
    if facts.observed.processor.spec.suspend:
        gone = not facts.observed.runners
        return Answer(gone, Reason.SUSPENDED if gone else Reason.STOPPING, "asked by spec.suspend")
    if result.phase is Phase.BLOCKED and result.stops_workers:
        return Answer(True, Reason.CONFLICT_OPEN, "a conflict waits for a person")
    return Answer(False, Reason.NOT_SUSPENDED)


def _swapped(rebuild: RebuildView | None, of: str) -> Answer:
    if rebuild is None:
        return Answer(None, Reason.NOT_OBSERVED, f"no worker has compared itself with processor {of!r} yet")
    if rebuild.state == RebuildState.SWAPPED:
        return Answer(True, rebuild.state, f"replaced processor {of!r}: {rebuild.message}")
    behind = "" if rebuild.behind is None else f"; {rebuild.behind}{' or more' if rebuild.at_least else ''} behind it"
    return Answer(False, rebuild.state, f"processor {of!r}{behind}: {rebuild.message}".rstrip(": "))


def update_conditions(
    previous: Iterable[Condition], answers: Mapping[ConditionType, Answer], *, generation: int, now: datetime
) -> list[Condition]:
    """Turn answers into conditions: the transition time moves only when the status does.

    Conditions of other types, which another program has set, are not in the result.
    """
    before = {condition.type: condition for condition in previous}
    result = []
    for kind, answer in answers.items():
        status = {True: "True", False: "False", None: "Unknown"}[answer.status]
        old = before.get(kind)
        unchanged = old is not None and old.status == status
        result.append(
            Condition(
                type=kind,
                status=status,
                reason=answer.reason,
                message=shorten(answer.message),
                last_transition_time=old.last_transition_time if old is not None and unchanged else now,
                observed_generation=generation,
            )
        )
    return result


def link_runbook(conditions: list[dict[str, Any]], runbook: str) -> list[dict[str, Any]]:
    """End the message of each condition that tells of trouble with the runbook's section about its reason."""
    linked = []
    for each in conditions:
        message, link = each["message"], f"see {runbook}#{each['reason'].lower()}"
        if each["status"] in TROUBLE.get(each["type"], ()) and each["reason"] not in IN_FLIGHT:
            message = f"{shorten(message, MAX_MESSAGE - len(link) - 2)}; {link}" if message else link
        linked.append({**each, "message": message})
    return linked


def shorten(text: str, limit: int = MAX_MESSAGE) -> str:
    """Cut a message to what the schema takes."""
    return text if len(text) <= limit else text[: limit - 1] + "…"
