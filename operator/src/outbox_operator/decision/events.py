"""PURE: builds the Kubernetes Events of what changed between the former status and the new one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outbox_core.plain import plain_count
from outbox_operator.api.reasons import ConditionType, Reason
from outbox_operator.decision.conditions import NOT_ITS_OWN, describe_foreign, shorten
from outbox_operator.decision.hand_over import HandOverStep
from outbox_operator.decision.ownership import OwnershipState

if TYPE_CHECKING:
    from outbox_core.report import Conflict
    from outbox_operator.api.status import ProcessorStatus
    from outbox_operator.decision.merge import Facts

MAX_NOTE = 1024
"""What the API server takes as an Event's message."""


@dataclass(frozen=True, slots=True)
class Event:
    """A Kubernetes Event: Normal, or Warning."""

    reason: str
    message: str
    warning: bool = False


def build_events(facts: Facts, status: ProcessorStatus) -> tuple[Event, ...]:
    """Compare the former status with the new one."""
    previous = facts.observed.previous
    found = [
        *_ownership(facts, previous),
        *_conflicts(facts, previous),
        *_readiness(previous, status),
        *_unreachable(previous, status),
    ]
    before, after = previous.hand_over, status.hand_over
    if after is not None and after.step == HandOverStep.DONE and (before is None or before.step != HandOverStep.DONE):
        found.append(Event("HandedOver", f"the claim was given to {after.to}"))
    if status.start_from_used is False and previous.start_from_used is None:
        found.append(Event("StartFromNotUsed", "a checkpoint was stored already: spec.startFrom was not used"))
    if facts.decision_error is not None and not _is_said(previous, facts.decision_error):
        found.append(Event("AnnotationInvalid", facts.decision_error, warning=True))
    foreign = describe_foreign(facts.observed.foreign)
    if foreign and not _is_said(previous, NOT_ITS_OWN):
        found.append(Event("ForeignPod", foreign, warning=True))
    return tuple(Event(one.reason, shorten(one.message, MAX_NOTE), warning=one.warning) for one in found)


def _is_said(previous: ProcessorStatus, error: str) -> bool:
    return any(error in condition.message for condition in previous.conditions)


def _ownership(facts: Facts, previous: ProcessorStatus) -> list[Event]:
    before, after = previous.ownership, facts.ownership
    if before.state == after.state:
        return []
    who = after.holder or "another resource"
    processor_id = facts.observed.processor.processor_id
    if after.state == OwnershipState.REFUSED:
        return [Event("OwnershipRefused", f"{who} owns processorId {processor_id!r}: workers stop", warning=True)]
    if after.state == OwnershipState.GRANTED:
        return [Event("OwnershipGranted", f"this resource owns processorId {processor_id!r}")]
    return []


def _conflicts(facts: Facts, previous: ProcessorStatus) -> list[Event]:
    found: list[Event] = []
    before, after = previous.conflicts, facts.conflicts
    if after.last is not None and (before.last is None or before.last.id < after.last.id):
        found.append(_conflict(facts, after.last))
    if after.unowned_calls > before.unowned_calls:
        calls = plain_count(after.unowned_calls - before.unowned_calls, "call")
        message = (
            f"{calls} of store_processor_checkpoint without ownership refused "
            f"({after.unowned_calls} in all): a script or program that is not this processor"
        )
        found.append(Event("UnownedCallerRefused", message, warning=True))
    if before.open is not None and after.open is None:
        found.append(Event("ConflictResolved", f"conflict {before.open.id} is resolved; processing goes on"))
    return found


def _conflict(facts: Facts, conflict: Conflict) -> Event:
    pairs = f"expected {conflict.expected or '(none)'}, stored {conflict.stored or '(no row)'}"
    told = f"conflict {conflict.id}: pod {conflict.pod} was told {conflict.code}, {pairs}; its batch was rolled back"
    if conflict.code != 4:
        return Event("CheckpointConflict", told, warning=True)
    holder = conflict.holder
    if holder is not None and holder.uid != facts.observed.processor.uid:
        return Event("CheckpointConflict", f"{told}: {holder} is the owner now", warning=True)
    successor = f" to pod {conflict.holder_pod}" if conflict.holder_pod else ""
    return Event("OwnershipMoved", f"{told}: ownership moved{successor} within this resource")


def _readiness(previous: ProcessorStatus, status: ProcessorStatus) -> list[Event]:
    before = next((c for c in previous.conditions if c.type == ConditionType.READY), None)
    now = {c.type: c for c in status.conditions}
    after, stalled = now[ConditionType.READY], now[ConditionType.STALLED].status == "True"
    if before is not None and (before.status, before.reason) == (after.status, after.reason):
        return []
    if after.status == "True":
        return [Event(after.reason, after.message or "ready")]
    trouble = stalled or status.phase in ("Unavailable", "Retrying")
    if now[ConditionType.RECONCILING].status == "True" and not trouble:
        return [] if before is None else [Event(after.reason, after.message)]
    return [Event(after.reason, after.message, warning=trouble)]


def _unreachable(previous: ProcessorStatus, status: ProcessorStatus) -> list[Event]:
    """A pod is not heard while others are: Ready does not say it."""
    reason = Reason.WORKER_UNREACHABLE
    said = {c.type: c for c in status.conditions if c.reason == reason}
    told = any(c.reason == reason for c in previous.conditions)
    workers = said.get(ConditionType.WORKERS_AVAILABLE)
    if workers is None or told or ConditionType.READY in said:
        return []
    return [Event(reason, workers.message, warning=True)]
