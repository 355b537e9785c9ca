"""What every scene of the demo has at hand, and how it tells its part: did, was told, the resource says."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tests.tools.demo.place import NAMESPACE
from tests.tools.demo.waiting import PATIENCE, DemoError, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.tools.demo.cluster import Cluster, Processor
    from tests.tools.demo.database import Database
    from tests.tools.demo.place import Place
    from tests.tools.demo.progress import Progress

GRACE_PERIOD: Final = 30.0
SHOWN_WITHIN: Final = 10.0
"""Seconds in which conditions and Events must tell what happened."""
Found = TypeVar("Found")


@dataclass
class Demo:
    """Everything that is up.

    Attributes:
        database: the shop's database, for its administrator.
        application: the same for the shop and its processors, whose role owns their schemas and nothing else.
        measured: what the verdict prints beside the ledger: a name and a figure.

    """

    place: Place
    cluster: Cluster
    database: Database
    application: Database
    progress: Progress
    measured: list[tuple[str, str]] = field(default_factory=list)


class Scene:
    """One scene about one processor."""

    def __init__(self, demo: Demo, title: str, name: str, namespace: str = NAMESPACE) -> None:
        """Announce the scene, and remember which Events and conflicts were there before."""
        self.demo, self.title, self.name, self.namespace = demo, title, name, namespace
        self._seen = {(event["uid"], event["count"]) for event in demo.cluster.events(name, namespace)}
        self._acted = time.monotonic()

    def did(self, text: str) -> None:
        """Tell what was done; the ten seconds begin."""
        self.demo.progress.say(f"does: {text}", self.title)
        self.mark()

    def mark(self) -> None:
        """Let the ten seconds begin now: what was done takes its effect at this moment."""
        self._acted = time.monotonic()

    def told(self, text: str) -> None:
        """Tell what the answer was."""
        self.demo.progress.say(f"told: {text}", self.title)

    def told_answer(self, conflict: dict[str, Any]) -> None:
        """Tell a code that a checkpoint's storing was answered, with its pairs."""
        pairs = ", ".join(f"{name} {conflict[name]}" for name in ("expected", "stored", "new"))
        self.told(f"{conflict['code']} ({pairs})")

    def note(self, text: str) -> None:
        """Tell anything else."""
        self.demo.progress.say(text, self.title)

    def resource(self) -> Processor:
        """Read the resource."""
        return self.demo.cluster.processor(self.name, self.namespace)

    def count_answers(self, code: int) -> int:
        """Count in status how often a checkpoint's storing was answered with a code."""
        return int(self.resource().conflicts.get("byCode", {}).get(str(code), 0))

    def expect(self, what: str, look: Callable[[], Found | None], *, within: float | None = None) -> Found:
        """Wait until it is so, at most ten seconds after the deed, or so long from now; print how long after the deed.

        Raises:
            DemoError: it is not so in time.

        """
        since = time.monotonic() - self._acted
        allowed = within if within is not None else max(0.0, SHOWN_WITHIN - since / PATIENCE)
        found, _ = wait_for(f"{self.title}: {what}", look, within=allowed)
        self.note(f"shows: {what} [{time.monotonic() - self._acted:.1f} s after]")
        return found

    def expect_condition(self, kind: str, status: str, *words: str, within: float | None = None) -> Processor:
        """Wait for a condition whose message has all the words; print it."""

        def look() -> Processor | None:
            resource = self.resource()
            condition = resource.condition(kind)
            text = f"{condition.get('reason', '')} {condition.get('message', '')}"
            fits = condition.get("status") == status and all(word in text for word in words)
            return resource if fits else None

        resource = self.expect(
            f"{kind}={status}" + (f" naming {', '.join(words)}" if words else ""), look, within=within
        )
        self.note(f"says:  {resource.describe(kind)}")
        return resource

    def expect_event(self, *words: str, within: float | None = None) -> dict[str, str]:
        """Wait for an Event that was not there when the scene began and has all the words; print it."""

        def look() -> dict[str, str] | None:
            for event in self.demo.cluster.events(self.name, self.namespace):
                text = f"{event['reason']} {event['note']}"
                if (event["uid"], event["count"]) not in self._seen and all(word in text for word in words):
                    return event
            return None

        event = self.expect(f"an Event with {', '.join(words)}", look, within=within)
        self.note(f"Event: {event['type']} {event['reason']}: {event['note']}")
        return event

    def expect_no_pods(self, within: float | None = None) -> None:
        """Wait until the resource's workers are scaled to zero, and until the last pod has gone in its grace period."""
        cluster = self.demo.cluster
        path = f"/apis/apps/v1/namespaces/{self.namespace}/deployments/{self.name}-worker"

        def replicas() -> int:
            return int(((cluster.get(path) or {}).get("spec") or {}).get("replicas", 0))

        self.expect("its workers are scaled to zero", lambda: replicas() == 0, within=within)
        self.expect("no pod is left", lambda: not cluster.pods(self.name, self.namespace), within=GRACE_PERIOD)

    def require(self, what: str, true: object) -> None:
        """State a fact that must hold now.

        Raises:
            DemoError: it does not.

        """
        if not true:
            raise DemoError(f"{self.title}: this must be so and is not: {what}")
        self.note(f"shows: {what}")
