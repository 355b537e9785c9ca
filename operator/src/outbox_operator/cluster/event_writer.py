"""Writes Kubernetes Events about resources; a repeated one is counted, not written again."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from outbox_operator.api.naming import MANAGED_BY, build_object, refer_to
from outbox_operator.cluster.kube import Kube, KubeError, Where

if TYPE_CHECKING:
    from outbox_operator.api.resources import Processor
    from outbox_operator.decision.events import Event

MEMORY_SECONDS: Final = 600.0
MEMORY_SIZE: Final = 2000

log = logging.getLogger(__name__)


@dataclass(slots=True)
class EventWriter:
    """Writes Events as one process; one that cannot be written is only logged."""

    _kube: Kube
    _identity: str
    _recent: dict[tuple[str, Event], tuple[str, int, float]] = field(default_factory=dict, init=False)
    """Name, count and time of those that were written last."""

    async def write(self, processor: Processor, event: Event) -> None:
        """Write one Event."""
        details = {"namespace": processor.namespace, "processor": processor.name, "reason": event.reason}
        log.log(logging.WARNING if event.warning else logging.INFO, event.message, extra=details)
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        known = self._recent.get((processor.uid, event))
        try:
            if known is not None and time.monotonic() - known[2] < MEMORY_SECONDS:
                name, count = known[0], known[1] + 1
                patch = {"count": count, "lastTimestamp": now}
                if await self._kube.patch(Where("Event", processor.namespace, name), patch) is None:
                    return
            else:
                name, count = f"{processor.name}.{time.time_ns():x}", 1
                await self._kube.create(self._event(processor, event, name, now))
        except KubeError as err:
            log.warning("Event not written", extra={**details, "error": str(err)})
            return
        if len(self._recent) >= MEMORY_SIZE:
            self._recent.clear()
        self._recent[processor.uid, event] = (name, count, time.monotonic())

    def _event(self, processor: Processor, event: Event, name: str, now: str) -> dict[str, Any]:
        return build_object(
            "Event",
            {"name": name, "namespace": processor.namespace},
            involvedObject={**refer_to(processor), "namespace": processor.namespace},
            type="Warning" if event.warning else "Normal",
            reason=event.reason,
            message=event.message,
            source={"component": MANAGED_BY, "host": self._identity},
            reportingComponent=MANAGED_BY,
            reportingInstance=self._identity,
            firstTimestamp=now,
            lastTimestamp=now,
            count=1,
        )
