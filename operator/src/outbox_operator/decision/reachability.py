"""PURE: why a running pod is unreachable, when people read so, and what they can do about it.

The kubelet's probes come from the pod's node, which no NetworkPolicy keeps out: a pod can be ready and out of reach.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Final

from outbox_core.report import STATUS_PORT

Body = dict[str, Any]
"""A pod as the API server has it."""

READY_FOR: Final = timedelta(seconds=10)
"""How long a pod is ready, thus serves its port, before people read that it is unreachable."""
STARTED_FOR: Final = timedelta(seconds=60)
"""The same for a pod that is not ready: its process may still be starting."""


class Cause(StrEnum):
    """How a question to a pod fails; the value is what people read first."""

    NO_CONNECTION = "no connection is made in time"
    NO_ANSWER = "it takes the connection and does not answer in time"
    REFUSED = "the connection is refused"
    CLOSED = "the connection is closed without an answer"
    NO_WORKER = "what answers there is no worker"
    OTHER_KEY = "it has another key than this operator"
    OTHER = "the connection fails"


@dataclass(frozen=True, slots=True)
class Unreachable:
    """Why a pod is not heard; `detail` is what was met, without figures that change from one question to the next."""

    cause: Cause
    detail: str = ""

    @property
    def words(self) -> str:
        """Say it without the pod."""
        return f"{self.cause} ({self.detail})" if self.detail else str(self.cause)


def describe_unreachable(unreachable: Unreachable, pod: Body, operator: str, secret: str) -> str:
    """Name the pod, its address, what was met there, and what to do.

    `operator` is the operator's namespace, `secret` the Secret that the pod has its key from.
    """
    return (
        f"pod {pod['metadata']['name']} runs, and the operator does not hear it at {address_of(pod)}: "
        f"{unreachable.words}. {_build_remedy(unreachable.cause, pod, operator, secret)}"
    )


def describe_all_unreachable(unreachable: tuple[str, ...]) -> str:
    """Say the first in full, and how many more there are."""
    return (
        f"{unreachable[0]}; {len(unreachable) - 1} more pods are not heard" if len(unreachable) > 1 else unreachable[0]
    )


def address_of(pod: Body) -> str:
    """Write host and port of a pod's status server."""
    ip = pod["status"]["podIP"]
    return f"{f'[{ip}]' if ':' in ip else ip}:{STATUS_PORT}"


def _build_remedy(cause: Cause, pod: Body, operator: str, secret: str) -> str:
    namespace = pod["metadata"]["namespace"]
    allow = (
        f"allow ingress to TCP port {STATUS_PORT} of the pods of namespace {namespace} from namespace {operator} "
        "(docs/security.md, Who may reach whom)"
    )
    match cause:
        case Cause.NO_CONNECTION:
            return f"Where a NetworkPolicy or a firewall is between them, {allow}"
        case Cause.REFUSED:
            return f"See whether its image serves that port; where a NetworkPolicy rejects the connection, {allow}"
        case Cause.CLOSED | Cause.NO_WORKER:
            return (
                f"Where a service mesh or another container takes port {STATUS_PORT}, exclude that port "
                f"(docs/security.md, Who may reach whom)"
            )
        case Cause.OTHER_KEY:
            return (
                f"See that no other operator serves namespace {namespace} (kubectl outbox status). Then delete "
                f"Secret {secret} and this pod: both are made again"
            )
        case Cause.NO_ANSWER:
            return "See its log, and whether its node is overloaded"
        case Cause.OTHER:
            return f"See that its node is reached from the operator's; where a NetworkPolicy is between them, {allow}"


def is_overdue(pod: Body, now: datetime) -> bool:
    """Tell whether a running pod that was never heard had the time to be."""
    ready = _time_ready(pod)
    if ready is not None:
        return now - ready > READY_FOR
    started = [_time(each.get("state", {}).get("running", {}).get("startedAt")) for each in _containers(pod)]
    times = [time for time in started if time is not None]
    return bool(times) and now - max(times) > STARTED_FOR


def _time_ready(pod: Body) -> datetime | None:
    for condition in pod["status"].get("conditions") or ():
        if condition["type"] == "Ready" and condition["status"] == "True":
            return _time(condition.get("lastTransitionTime"))
    return None


def _containers(pod: Body) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pod["status"].get("containerStatuses") or []
    return found


def _time(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None
