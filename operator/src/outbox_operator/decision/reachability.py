"""PURE: why a running pod is unreachable, when people read so, and what they can do about it.

The kubelet's probes come from the pod's node, which no NetworkPolicy keeps out: a pod can be ready and out of reach.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Final

from outbox_core.report import STATUS_PORT
from outbox_operator.api.status import conditions_of

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


_ALLOW: Final = (
    "allow ingress to TCP port {port} of the pods of namespace {namespace} from namespace {operator} "
    "(docs/security.md, Who may reach whom)"
)
_EXCLUDE: Final = (
    "Where a service mesh or another container takes port {port}, exclude that port "
    "(docs/security.md, Who may reach whom)"
)
_REMEDIES: Final = {
    Cause.NO_CONNECTION: f"Where a NetworkPolicy or a firewall is between them, {_ALLOW}",
    Cause.NO_ANSWER: "See its log, and whether its node is overloaded",
    Cause.REFUSED: (f"See whether its image serves that port; where a NetworkPolicy rejects the connection, {_ALLOW}"),
    Cause.CLOSED: _EXCLUDE,
    Cause.NO_WORKER: _EXCLUDE,
    Cause.OTHER_KEY: (
        "See that no other operator serves namespace {namespace} (kubectl outbox status). Then delete Secret {secret} "
        "and this pod: both are made again"
    ),
    Cause.OTHER: f"See that its node is reached from the operator's; where a NetworkPolicy is between them, {_ALLOW}",
}


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
    meta = pod["metadata"]
    remedy = _REMEDIES[unreachable.cause].format(
        port=STATUS_PORT, namespace=meta["namespace"], operator=operator, secret=secret
    )
    return (
        f"pod {meta['name']} runs, and the operator does not hear it at {address_of(pod)}: "
        f"{unreachable.words}. {remedy}"
    )


def address_of(pod: Body) -> str:
    """Write host and port of a pod's status server."""
    ip = pod["status"]["podIP"]
    return f"{f'[{ip}]' if ':' in ip else ip}:{STATUS_PORT}"


def is_overdue(pod: Body, now: datetime) -> bool:
    """Tell whether a running pod that was never heard had the time to be."""
    ready = conditions_of(pod).get("Ready", {})
    if ready.get("status") == "True" and "lastTransitionTime" in ready:
        return now - datetime.fromisoformat(ready["lastTransitionTime"]) > READY_FOR
    running = [each.get("state", {}).get("running", {}) for each in pod["status"].get("containerStatuses") or ()]
    started = [datetime.fromisoformat(each["startedAt"]) for each in running if "startedAt" in each]
    return bool(started) and now - max(started) > STARTED_FOR
