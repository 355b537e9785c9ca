"""Builders with defaults for the operator's values."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from outbox_core.report import (
    CheckpointView,
    Conflict,
    ConflictSummary,
    LeaseView,
    Reason,
    Report,
    ResourceRef,
    WorkerState,
)
from outbox_operator.api.naming import TEMPLATE_LABEL
from outbox_operator.api.observed import Observed, PodView, Role, Sibling
from outbox_operator.api.resources import Processor, ProcessorSpec
from outbox_operator.api.status import OwnershipStatus, ProcessorStatus
from outbox_operator.rendering.manifests import build_template

if TYPE_CHECKING:
    from outbox_operator.decision.decide import Decision
    from outbox_operator.settings import Images

NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
HASH = "current"
UID = "uid-1"


def build_processor(*, annotations: dict[str, str] | None = None, name: str = "orders", **spec: Any) -> Processor:
    body = {
        "source": {"connection": {"secretRef": {"name": "db"}}},
        "target": {"sql": {"statement": "SELECT 1"}},
        **spec,
    }
    body = {key: value for key, value in body.items() if value is not None}
    return Processor(
        namespace="shop",
        name=name,
        uid=UID,
        generation=3,
        cluster="here",
        annotations=annotations or {},
        spec=ProcessorSpec.model_validate(body),
    )


def resource(name: str = "orders", uid: str = UID, namespace: str = "shop", cluster: str = "here") -> ResourceRef:
    return ResourceRef(cluster=cluster, namespace=namespace, name=name, uid=uid)


OTHER = resource("orders", "uid-2", "elsewhere")


def build_report(state: WorkerState = WorkerState.ACTIVE, reason: Reason = Reason.RUNNING, **fields: Any) -> Report:
    active = state in (WorkerState.ACTIVE, WorkerState.RETRYING)
    return Report(
        processor_id="orders",
        resource=resource(),
        generation=3,
        pod=fields.pop("pod", "orders-0"),
        pod_uid="pod-uid",
        instance="i",
        time=fields.pop("time", NOW),
        state=state,
        reason=reason,
        lease=fields.pop("lease", LeaseView(epoch=4, pod="orders-0", held=True) if active else None),
        checkpoints=[CheckpointView(pair="815:42", stored_at=NOW)],
        **fields,
    )


def build_pod(name: str = "orders-0", report: Report | None = None, **fields: Any) -> PodView:
    running = PodView(
        name=name,
        role=Role.WORKER,
        ip="10.0.0.1",
        phase="Running",
        ready=True,
        intent_hash=HASH,
        report=report,
        reachable=report is not None,
    )
    return replace(running, **fields)


def build_observed(*pods: PodView, **fields: Any) -> Observed:
    processor = fields.pop("processor", None) or build_processor()
    previous = fields.pop("previous", ProcessorStatus())
    return Observed(processor=processor, created=NOW, previous=previous, intent_hash=HASH, pods=tuple(pods), **fields)


def build_conflict(code: int, number: int = 7, **fields: Any) -> Conflict:
    person = code in (2, 3)
    return Conflict(
        id=number,
        code=code,
        expected="815:42",
        stored="815:60",
        new="815:50",
        epoch=4,
        pod="orders-0",
        time=NOW,
        needs_person=person,
        **fields,
    )


def summary_of(conflict: Conflict, *, opened: bool = False, count: int = 1, unowned_calls: int = 0) -> ConflictSummary:
    return ConflictSummary(
        count=count,
        by_code={str(conflict.code): count},
        last=conflict,
        open=conflict if opened else None,
        unowned_calls=unowned_calls,
    )


def build_sibling(*, granted: bool = True, older: bool = True, **fields: Any) -> Sibling:
    age = timedelta(hours=1 if older else -1)
    return Sibling(namespace="elsewhere", name="orders", created=NOW - age, granted=granted, **fields)


HOLDER = ResourceRef(cluster="here", namespace="elsewhere", name="orders", uid="uid-2")
REFUSED = OwnershipStatus(state="Refused", holder=HOLDER, tries=2, attempts=1, last_try=NOW, next_try=NOW)
OPEN = Conflict(
    id=7, code=2, expected="815:42", stored="815:60", new="815:50", pod="orders-0", time=NOW, needs_person=True
)
GRANTED = ProcessorStatus(ownership=OwnershipStatus(state="Granted"), checkpoint=CheckpointView(pair="815:42"))
BLOCKED = GRANTED.model_copy(update={"conflicts": ConflictSummary(count=1, last=OPEN, open=OPEN)})
WAITING = ProcessorStatus(ownership=REFUSED)
ACTIVE = build_pod(report=build_report())
ELSEWHERE: dict[str, Any] = {"handOverTo": {"namespace": "elsewhere", "name": "orders"}}


def condition(decision: Decision, kind: str) -> tuple[str, str]:
    found = next(c for c in decision.status.conditions if c.type == kind)
    return found.status, found.reason


def ready(decision: Decision) -> tuple[str, str]:
    return condition(decision, "Ready")


def template_hash(processor: Processor, images: Images) -> str:
    """Hash what a change of replaces pods."""
    return str(build_template(processor, images)["metadata"]["labels"][TEMPLATE_LABEL])
