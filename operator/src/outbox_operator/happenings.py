"""PURE: what happened between the former status and the new one, told as Kubernetes Events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outbox_operator.answers import NOT_ITS_OWN, describe_foreign
from outbox_operator.conditions import ConditionType, Reason, shorten
from outbox_operator.hand_over import HandOverStep
from outbox_operator.learn import OwnershipState

if TYPE_CHECKING:
    from outbox_core.report import Conflict
    from outbox_operator.status import ProcessorStatus
    from outbox_operator.verdict import Knowledge

MAX_NOTE = 1024
"""What the API server takes as an Event's message."""


@dataclass(frozen=True, slots=True)
class Happening:
    """One Event: normal, or a warning."""

    reason: str
    message: str
    warning: bool = False


def tell(known: Knowledge, status: ProcessorStatus) -> tuple[Happening, ...]:
    """Compare the former status with the new one."""
    previous = known.observed.previous
    found = [
        *_ownership(known, previous),
        *_conflicts(known, previous),
        *_readiness(previous, status),
        *_unheard(previous, status),
        *_hand_over(previous, status),
    ]
    if status.start_from_used is False and previous.start_from_used is None:
        found.append(Happening("StartFromNotUsed", "a checkpoint was stored already: spec.startFrom was not used"))
    if known.decision_error is not None and not _told(previous, known.decision_error):
        found.append(Happening("AnnotationInvalid", known.decision_error, warning=True))
    foreign = describe_foreign(known.observed.foreign)
    if foreign and not _told(previous, NOT_ITS_OWN):
        found.append(Happening("ForeignPod", foreign, warning=True))
    return tuple(Happening(one.reason, shorten(one.message, MAX_NOTE), warning=one.warning) for one in found)


def _told(previous: ProcessorStatus, error: str) -> bool:
    return any(error in condition.message for condition in previous.conditions)


def _ownership(known: Knowledge, previous: ProcessorStatus) -> list[Happening]:
    before, after = previous.ownership, known.ownership
    if before.state == after.state:
        return []
    who = after.holder or "another resource"
    processor_id = known.observed.processor.processor_id
    if after.state == OwnershipState.REFUSED:
        return [Happening("OwnershipRefused", f"{who} owns processorId {processor_id!r}: workers stop", warning=True)]
    if after.state == OwnershipState.GRANTED:
        return [Happening("OwnershipGranted", f"this resource owns processorId {processor_id!r}")]
    return []


def _conflicts(known: Knowledge, previous: ProcessorStatus) -> list[Happening]:
    found: list[Happening] = []
    before, after = previous.conflicts, known.conflicts
    if after.last is not None and (before.last is None or before.last.id < after.last.id):
        found.append(_conflict(known, after.last))
    if after.strangers > before.strangers:
        message = (
            f"{after.strangers - before.strangers} calls of store_processor_checkpoint without ownership were refused "
            f"({after.strangers} in all): a script or program that is not this processor"
        )
        found.append(Happening("StrangerRefused", message, warning=True))
    if before.open is not None and after.open is None:
        found.append(Happening("ConflictResolved", f"conflict {before.open.id} is resolved; processing goes on"))
    return found


def _conflict(known: Knowledge, conflict: Conflict) -> Happening:
    pairs = f"expected {conflict.expected or '(none)'}, stored {conflict.stored or '(no row)'}"
    told = f"conflict {conflict.id}: pod {conflict.pod} was told {conflict.code}, {pairs}; its batch was rolled back"
    if conflict.code != 4:
        return Happening("CheckpointConflict", told, warning=True)
    holder = conflict.holder
    if holder is not None and holder.uid != known.observed.processor.uid:
        message = f"{told}: {holder} is the owner now"
        return Happening("CheckpointConflict", message, warning=True)
    successor = f" to pod {conflict.holder_pod}" if conflict.holder_pod else ""
    return Happening("OwnershipMoved", f"{told}: ownership moved{successor} within this resource")


def _readiness(previous: ProcessorStatus, status: ProcessorStatus) -> list[Happening]:
    before = next((c for c in previous.conditions if c.type == ConditionType.READY), None)
    after = next(c for c in status.conditions if c.type == ConditionType.READY)
    if before is not None and (before.status, before.reason) == (after.status, after.reason):
        return []
    if after.status == "True":
        return [Happening(after.reason, after.message or "ready")]
    stalled = any(c.type == ConditionType.STALLED and c.status == "True" for c in status.conditions)
    in_flight = any(c.type == ConditionType.RECONCILING and c.status == "True" for c in status.conditions)
    trouble = stalled or status.phase in ("Unavailable", "Retrying")
    if in_flight and not trouble:
        return [] if before is None else [Happening(after.reason, after.message)]
    return [Happening(after.reason, after.message, warning=trouble)]


def _unheard(previous: ProcessorStatus, status: ProcessorStatus) -> list[Happening]:
    """A pod is not heard while others are: Ready does not say it."""
    reason = Reason.WORKER_UNREACHABLE
    said = {c.type: c for c in status.conditions if c.reason == reason}
    told = any(c.reason == reason for c in previous.conditions)
    workers = said.get(ConditionType.WORKERS_AVAILABLE)
    if workers is None or told or ConditionType.READY in said:
        return []
    return [Happening(reason, workers.message, warning=True)]


def _hand_over(previous: ProcessorStatus, status: ProcessorStatus) -> list[Happening]:
    if status.hand_over is None or (
        previous.hand_over is not None and previous.hand_over.step == status.hand_over.step
    ):
        return []
    if status.hand_over.step == HandOverStep.DONE:
        return [Happening("HandedOver", f"the claim was given to {status.hand_over.to}")]
    return []
