"""The loop: observe, decide, apply, for one resource at a time; level-triggered, so a missed event costs a delay.

Kopf's watches and the pods' reports only say *that* something changed. Every `RESYNC` seconds everything is listed
again, which heals what a silent watch missed and counts it; a process whose watches stay silent fails its liveness.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from pydantic import ValidationError

from outbox_operator import metrics
from outbox_operator.apply import Applier, ObstacleError, dump_status
from outbox_operator.conditions import Answer, ConditionType, Reason, answered
from outbox_operator.decide import decide
from outbox_operator.events import EventWriter
from outbox_operator.kube import KubeError, where
from outbox_operator.naming import SELECTOR
from outbox_operator.observe import Observer, read_status
from outbox_operator.release import Releaser
from outbox_operator.reports import Reporters
from outbox_operator.resources import KIND
from outbox_operator.status import Phase
from outbox_operator.store import WATCHED_KINDS, Store, key_of, place_of, processor_id_of, slim, version_of
from outbox_operator.workqueue import KeyedQueue

if TYPE_CHECKING:
    from outbox_operator.kube import Kube
    from outbox_operator.observed import Problem
    from outbox_operator.settings import Settings
    from outbox_operator.store import Body
    from outbox_operator.workqueue import Key

RESYNC: Final = 30.0
GRACE: Final = 5.0
"""How long a watch may take to deliver what a listing has seen."""
FIRST_WORDS: Final = 5.0
"""How long a process that was just started waits for what the pods say; one that is slower is heard later."""
SILENT_ROUNDS: Final = 3
WORKERS: Final = 8

log = logging.getLogger(__name__)


class Controller:
    """Everything that lives as long as this process is the active one."""

    def __init__(self, kube: Kube, settings: Settings, cluster: str) -> None:
        """Wire the parts."""
        self.store = Store()
        self.queue = KeyedQueue(self.reconcile, workers=WORKERS)
        self._kube = kube
        self._namespaces = settings.namespaces or ("",)
        reporters = Reporters(self.store, self.queue.add)
        self._observer = Observer(kube, self.store, reporters, settings.images, cluster)
        self._applier = Applier(kube, self.store, settings.images, EventWriter(kube, settings.identity))
        self._releaser = Releaser(kube, self.store, settings.images, cluster)
        self._reporters = reporters
        self._obstacles: dict[Key, Problem] = {}
        self._beat = time.monotonic()
        self._silent_rounds = 0
        self.has_listed = False
        """Every kind was listed once: the CRD is there, and the rights are."""

    async def run(self) -> None:
        """List everything, then work until cancelled."""
        while not await self._list_all():  # noqa: ASYNC110 - an absent API server announces nothing
            await asyncio.sleep(1)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._work())
            group.create_task(self._reporters.run())
            group.create_task(self._resync())
            group.create_task(self._releaser.run())

    async def _work(self) -> None:
        """Decide once the pods were asked: what another process heard of them is not known here."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._reporters.asked.wait(), FIRST_WORDS)
        await self.queue.run()

    @property
    def stale_seconds(self) -> float:
        """Seconds since the loop last came round; grows without bound when watches stay silent."""
        age = time.monotonic() - self._beat
        return age if self._silent_rounds < SILENT_ROUNDS else float("inf")

    def seen(self, body: Body, *, deleted: bool) -> None:
        """Take what a watch delivered."""
        key = key_of(body)
        if not key[1]:
            return
        if not deleted:
            if self.store.put(body):
                self.queue.add(key)
            return
        self.store.remove(body)
        self.queue.add(key)
        if body["kind"] == KIND:
            self._gone(body)

    def _gone(self, body: Body) -> None:
        """A resource was deleted: give its claim up, and let those try who wait for it."""
        self._obstacles.pop(key_of(body), None)
        self._releaser.release(body)
        self._wake_siblings(body)

    def _wake_siblings(self, body: Body) -> None:
        for other in self.store.with_processor_id(processor_id_of(body)):
            if other["metadata"]["uid"] != body["metadata"]["uid"]:
                self.queue.add(key_of(other))

    async def reconcile(self, key: Key) -> float | None:
        """Make one resource so; answer when to look again."""
        body = self.store.resource(key)
        metrics.QUEUE_DEPTH.set(self.queue.depth)
        if body is None:
            self.queue.forget(key)
            return None
        if "deletionTimestamp" in body["metadata"]:
            self._gone(body)
            return None
        try:
            with metrics.RECONCILE_SECONDS.time():
                return await self._reconcile(key, body)
        except Exception:
            metrics.RECONCILE_FAILURES.inc()
            raise

    async def _reconcile(self, key: Key, body: Body) -> float:
        try:
            observed = await self._observer.observe(body, self._obstacles.get(key))
        except ValidationError as err:
            await self._say_invalid(body, err)
            return RESYNC
        decision = decide(observed, datetime.now(UTC))
        owner_changed = decision.status.ownership.state != observed.previous.ownership.state
        try:
            await self._applier.apply(body, observed, decision)
        except ObstacleError as obstacle:
            known = self._obstacles.get(key) == obstacle.problem
            self._obstacles[key] = obstacle.problem
            return RESYNC / 3 if known else 0.0
        if owner_changed:
            self._wake_siblings(body)
        # What was in the way is gone: the status just written still names it.
        return 0.0 if self._obstacles.pop(key, None) is not None else decision.look_again.total_seconds()

    async def _say_invalid(self, body: Body, err: ValidationError) -> None:
        """Say that the spec cannot be read, and leave the pods as they are."""
        first = err.errors()[0]
        message = f"spec.{'.'.join(str(part) for part in first['loc'])}: {first['msg']}; or upgrade the operator"
        previous, generation = read_status(body), body["metadata"].get("generation", 0)
        answers = [
            Answer(ConditionType.READY, False, Reason.INVALID_SPEC, message),
            Answer(ConditionType.STALLED, True, Reason.INVALID_SPEC, message),
            Answer(ConditionType.RECONCILING, False, Reason.AS_EXPECTED),
        ]
        now = datetime.now(UTC)
        conditions = answered(previous.conditions, answers, generation=generation, now=now)
        update = {"phase": Phase.INVALID, "conditions": conditions, "observed_generation": generation}
        await self._applier.write_status(body, dump_status(previous.model_copy(update=update)))

    async def _resync(self) -> None:
        while True:
            await asyncio.sleep(RESYNC * random.uniform(0.8, 1.2))  # noqa: S311 - spreads load, no secret
            await self._list_all()

    async def _list_all(self) -> bool:
        """List everything and heal the store; False when the API server cannot be asked."""
        first = next(iter(self.store.resources()), None) is None
        missed = 0
        try:
            for kind in WATCHED_KINDS:
                for namespace in self._namespaces:
                    labels = "" if kind == KIND else SELECTOR
                    listed, version = await self._kube.list(kind, namespace, labels=labels)
                    missed += await self._heal(
                        kind, namespace, [slim(body) for body in listed], version, wait=not first
                    )
        except KubeError as err:
            log.warning("cannot list", extra={"error": str(err)})
            self._beat = time.monotonic()  # the API server's silence is not this process's fault
            return False
        self.has_listed = True
        metrics.MISSED_CHANGES.inc(missed)
        self._silent_rounds = self._silent_rounds + 1 if missed else 0
        self._beat = time.monotonic()
        for body in self.store.resources():
            self.queue.add(key_of(body), 0.0 if first else random.uniform(0, GRACE))  # noqa: S311 - spreads load
        return True

    async def _heal(self, kind: str, namespace: str, listed: list[Body], version: int, *, wait: bool) -> int:
        """Take over what a listing has and the watch has not delivered in time; answer how much that was."""
        behind = [body for body in listed if self.store.is_behind(body)]
        present = {body["metadata"]["uid"] for body in listed}
        lost = [
            body
            for body in self.store.all_of(kind)
            if namespace in ("", body["metadata"]["namespace"])
            and body["metadata"]["uid"] not in present
            and version_of(body) <= version
        ]
        if not behind and not lost:
            return 0
        if wait:
            await asyncio.sleep(GRACE)
        behind = [body for body in behind if self.store.is_behind(body)]
        lost = [body for body in lost if self.store.get(*place_of(body)) is body]
        for body in behind:
            self.seen(body, deleted=False)
        for body in lost:
            if await self._kube.get(where(body)) is None:
                self.seen(body, deleted=True)
        if wait and (behind or lost):
            log.warning("a watch missed changes", extra={"kind": kind, "changed": len(behind), "gone": len(lost)})
        return len(behind) + len(lost) if wait else 0
