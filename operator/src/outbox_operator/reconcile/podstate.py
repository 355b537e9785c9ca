"""PURE: reads pods, workloads and jobs as the API server has them into the views that decisions rest on."""

from __future__ import annotations

import json
import re
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from outbox_core.report import Report
from outbox_operator.api.naming import DECISION_LABEL, RENDERED_ANNOTATION, ROLE_LABEL, SLOT_ANNOTATION, TEMPLATE_LABEL
from outbox_operator.api.observed import JobView, PodView, Problem, Role, WorkloadView
from outbox_operator.api.reasons import Reason
from outbox_operator.api.status import conditions_of, true_conditions
from outbox_operator.rendering.pods import DRIVER_CONTAINER, WORKER_CONTAINER

if TYPE_CHECKING:
    from collections.abc import Sequence

_OURS: Final = {WORKER_CONTAINER, DRIVER_CONTAINER}
_NOT_MADE: Final = {"ContainerCreating", "PodInitializing"}
_IMAGE_REASONS: Final = {"ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull"}
_NOT_CREATED: Final = {"CreateContainerConfigError", "CreateContainerError"}
_MISSING: Final = re.compile(r'(secret|configmap) "([^"]+)" not found')
_MISSED: Final = {
    "secret": ("Secret", Reason.CONNECTION_SECRET_INVALID),
    "configmap": ("ConfigMap", Reason.CONFIG_MAP_MISSING),
}
FORGIVEN: Final = timedelta(minutes=10)
"""After so long a run the kubelet forgets earlier ends (Kubernetes, Pod Lifecycle: how Pods handle problems)."""
_YEARS: Final = range(1970, 9999)
"""Years of times that have a form in every time zone."""
_LARGEST_FIGURE: Final = 1e12
"""Above each real number that a worker reports: seconds."""
_PARTITIONS: Final = range(64)
_LONGEST_LIST: Final = 16
_LONGEST_WORD: Final = 32


def parse_reports(text: str) -> list[Report] | None:
    """Read the answer of a pod: a report, or of a shared one a list, of which those count that can be read."""
    if not text.lstrip().startswith("["):
        report = parse_report(text)
        return None if report is None else [report]
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return [report for each in found if (report := parse_report(json.dumps(each))) is not None]


def parse_report(text: str | None) -> Report | None:
    """Read a report; None when the text is none, which is what a crash leaves, or has what no status can hold."""
    try:
        report = Report.model_validate_json(text or "")
    except ValidationError:
        return None
    return report if _fits_status(report) else None


def _fits_status(report: Report) -> bool:
    """Tell whether status can hold all of a report.

    The image is the user's, and may say anything. A status that the API server refuses would keep the resource from
    being decided, and with it every change of its spec.
    """
    numbers = {*(lease.partition for lease in report.leases), *(each.partition for each in report.checkpoints)}
    return (
        all(number in _PARTITIONS for number in numbers)
        and (report.failures is None or len(report.failures.blocked_keys) <= _LONGEST_LIST)
        and len(report.circuit or "") <= _LONGEST_WORD
        and _is_bounded(report.model_dump())
    )


def _is_bounded(value: Any) -> bool:
    """Tell whether each number fits 64 bits, or is finite, and each time has a form in UTC."""
    if isinstance(value, dict):
        return all(_is_bounded(each) for each in value.values())
    if isinstance(value, list):
        return all(_is_bounded(each) for each in value)
    if isinstance(value, int):
        return -(2**63) <= value < 2**63
    if isinstance(value, float):
        return abs(value) <= _LARGEST_FIGURE
    return not isinstance(value, datetime) or value.year in _YEARS


def role_of(body: dict[str, Any]) -> Role | None:
    """Read the role label; None for a pod that is not ours."""
    try:
        return Role(body["metadata"].get("labels", {}).get(ROLE_LABEL, ""))
    except ValueError:
        return None


def view_pod(body: dict[str, Any], role: Role, notes: Sequence[str], now: datetime) -> PodView:
    """Build the view of a pod that was not asked yet; `notes` are the messages of its warning Events."""
    meta, status = body["metadata"], body.get("status") or {}
    ends = (_end_of(each) for each in status.get("containerStatuses") or () if each.get("name") in _OURS)
    ended = next((end for end in ends if end is not None), {})
    return PodView(
        name=meta["name"],
        role=role,
        ip=status.get("podIP"),
        phase=status.get("phase", "Pending"),
        ready="Ready" in true_conditions(body),
        deleting="deletionTimestamp" in meta,
        intent_hash=meta.get("labels", {}).get(TEMPLATE_LABEL, ""),
        decision=meta.get("labels", {}).get(DECISION_LABEL, ""),
        job=meta.get("labels", {}).get("batch.kubernetes.io/job-name", ""),
        problem=find_problem(body, notes, now),
        last_words=parse_report(ended.get("message")),
        exit_code=ended.get("exitCode"),
    )


def _end_of(container: dict[str, Any]) -> dict[str, Any] | None:
    """Read how a container ended last; None when it has not."""
    states = (container.get(name) or {} for name in ("state", "lastState"))
    return next((state["terminated"] for state in states if "terminated" in state), None)


def is_waiting(body: dict[str, Any]) -> bool:
    """Tell whether the pod has a node and its containers are not made yet: its Events say why."""
    status = body.get("status") or {}
    if status.get("phase") != "Pending" or not body.get("spec", {}).get("nodeName"):
        return False
    # Of init containers one is made after the other, and all others after them.
    first = (status.get("initContainerStatuses") or [])[:1] or status.get("containerStatuses") or []
    waiting = {c.get("state", {}).get("waiting", {}).get("reason") for c in first}
    return not waiting or not waiting.isdisjoint(_NOT_MADE)


def find_problem(body: dict[str, Any], notes: Sequence[str], now: datetime) -> Problem | None:
    """Say why a pod does not run; None when it does, or only needs a moment."""
    status = body.get("status") or {}
    scheduled = conditions_of(body).get("PodScheduled", {})
    if scheduled.get("reason") == "Unschedulable":
        return Problem(Reason.UNSCHEDULABLE, f"no node takes the pod: {scheduled.get('message', '')}")
    for container in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        problem = _container_problem(body["metadata"], container, now)
        if problem is not None:
            return problem
    if not is_waiting(body):
        return None
    for note in notes:
        missing = _MISSING.search(note)
        if missing is not None:
            kind, reason = _MISSED[missing[1]]
            message = (
                f"{kind} {missing[2]!r} does not exist in this namespace: create it; the pod starts by itself then"
            )
            return Problem(reason, message)
    return Problem(Reason.POD_NOT_STARTED, notes[0]) if notes else None


def _container_problem(pod: dict[str, Any], container: dict[str, Any], now: datetime) -> Problem | None:
    waiting = (container.get("state") or {}).get("waiting") or {}
    reason, message = waiting.get("reason", ""), waiting.get("message", "")
    if reason in _IMAGE_REASONS:
        return Problem(Reason.IMAGE_UNAVAILABLE, f"image {container.get('image', '')!r} cannot be pulled: {message}")
    if reason in _NOT_CREATED:
        return Problem(Reason.POD_NOT_STARTED, f"{reason}: {message}")
    ended = _end_of(container) or {}
    if reason == "CrashLoopBackOff" or _ends_again(container, ended, now):
        name = container.get("name")
        who = "the container" if name in _OURS else f"container {name!r}"
        said = _last_words(ended) or (
            f"{ended.get('reason') or 'without a word'}; its log may say why: "
            f"kubectl -n {pod.get('namespace')} logs {pod['name']} -c {name} --previous"
        )
        return Problem(Reason.CRASHING, f"{who} ended with {ended.get('exitCode')}: {said}")
    return Problem(Reason.POD_NOT_STARTED, f"{reason}: {message}") if reason == "RunContainerError" else None


def _last_words(ended: dict[str, Any]) -> str:
    """Return what a container wrote for people before it ended; empty: nothing."""
    text: str = ended.get("message") or ""
    words = parse_report(text)
    return words.message if words is not None else text[:1000]


def _ends_again(container: dict[str, Any], ended: dict[str, Any], now: datetime) -> bool:
    """Tell whether a container that has waited in CrashLoopBackOff, and is not ready since, is expected to end again.

    The first restart comes without a backoff.
    """
    if container.get("ready") or container.get("restartCount", 0) < 2 or not ended.get("finishedAt"):
        return False
    return now - datetime.fromisoformat(ended["finishedAt"]) < FORGIVEN


def view_workload(body: dict[str, Any]) -> WorkloadView:
    """Build the view of a Deployment or StatefulSet."""
    spec, notes = body["spec"], body["metadata"].get("annotations") or {}
    labels = spec["template"]["metadata"].get("labels", {})
    problem = None
    if "ReplicaFailure" in true_conditions(body):
        words = conditions_of(body)["ReplicaFailure"].get("message", "")
        problem = Problem(Reason.POD_REJECTED, f"the pod is refused: {words}")
    return WorkloadView(
        replicas=spec.get("replicas", 1),
        intent_hash=labels.get(TEMPLATE_LABEL, ""),
        decision=labels.get(DECISION_LABEL, ""),
        problem=problem,
        slot=notes.get(SLOT_ANNOTATION, ""),
        rendered=notes.get(RENDERED_ANNOTATION, ""),
    )


def view_job(body: dict[str, Any]) -> JobView:
    """Build a job's view."""
    ends = true_conditions(body) & {"Complete", "Failed"}
    return JobView(name=body["metadata"]["name"], finished=bool(ends), succeeded="Complete" in ends)
