"""The loop: observe, decide, apply, for one resource at a time; level-triggered, so a missed event costs a delay.

Kopf's watches and the pods' reports only say *that* something changed. Every `RESYNC` seconds everything is listed
again, which heals what a silent watch missed and counts it; a process whose watches stay silent fails its liveness, and
one that cannot list is not ready.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Final

from pydantic import ValidationError

from outbox_core.plain import plain_fault
from outbox_operator import metrics
from outbox_operator.apply import Applier, ObstacleError, dump_status
from outbox_operator.conditions import Answer, ConditionType, Reason, answered
from outbox_operator.decide import decide
from outbox_operator.events import EventWriter
from outbox_operator.kube import KubeError
from outbox_operator.naming import SELECTOR
from outbox_operator.observe import Observer, read_status
from outbox_operator.release import Releaser
from outbox_operator.reports import Reporters
from outbox_operator.resources import KIND, NotAllowedError, parse_processor
from outbox_operator.slots import SlotKeeper
from outbox_operator.status import Phase
from outbox_operator.store import LINKS, WATCHED_KINDS, Listing, Store, key_of, processor_id_of, slim
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
FAILED_ROUNDS: Final = 2
"""One round may meet an API server that is being restarted."""
FIRST_WAIT: Final = 5.0
LONGEST_WAIT: Final = 60.0
"""Bounds of the wait after the API server refused an owned object, doubled from one to the other."""
WORKERS: Final = 8

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why an owned object could not be made, for which spec, and how often that was met again."""

    problem: Problem
    generation: int
    tries: int


class Controller:
    """Everything that lives as long as this process is the active one."""

    def __init__(self, kube: Kube, settings: Settings, cluster: str) -> None:
        """Wire the parts."""
        self.store = Store()
        self.queue = KeyedQueue(self.reconcile, workers=WORKERS)
        self._kube = kube
        self._namespaces = settings.namespaces or ("",)
        reporters = Reporters(self.store, settings.images.keys, settings.lease_namespace, self.queue.add)
        parse = partial(parse_processor, cluster=cluster, unrestricted=settings.unrestricted)
        self._slots = SlotKeeper(self.store, settings.budget, self.queue.add)
        self._observer = Observer(kube, self.store, reporters, settings.images, cluster, parse, self._slots)
        self._applier = Applier(kube, self.store, settings.images, EventWriter(kube, settings.identity))
        self._releaser = Releaser(kube, self.store, settings.images, parse)
        self._reporters = reporters
        self._obstacles: dict[Key, Obstacle] = {}
        self._beat = time.monotonic()
        self._silent_rounds = 0
        self._failed_rounds = 0
        self._failure = "nothing was listed yet"
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

    @property
    def fault(self) -> str:
        """Why what watches miss is not found, in words; empty while it is."""
        return self._failure if not self.has_listed or self._failed_rounds >= FAILED_ROUNDS else ""

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
        self._slots.wake()

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
            observed = await self._observer.observe(body, self._obstacle_of(key, body))
        except ValidationError as err:
            await self._say_invalid(body, f"{plain_fault(err.errors()[0], 'spec')}; or upgrade the operator")
            return RESYNC
        except NotAllowedError as err:
            await self._say_invalid(body, str(err))
            return RESYNC
        decision = decide(observed, datetime.now(UTC))
        owner_changed = decision.status.ownership.state != observed.previous.ownership.state
        try:
            with self._slots.kept(key, decision.rollout):
                if not await self._applier.apply(body, observed, decision):
                    return RESYNC
        except ObstacleError as err:
            return self._meet(key, body, err.problem)
        if owner_changed:
            self._wake_siblings(body)
        # What was in the way is gone: the status just written still names it.
        return 0.0 if self._obstacles.pop(key, None) is not None else decision.look_again.total_seconds()

    def _obstacle_of(self, key: Key, body: Body) -> Problem | None:
        """What is in the way of this very spec: what was in the way of the one before says nothing of it."""
        known = self._obstacles.get(key)
        return known.problem if known is not None and known.generation == body["metadata"]["generation"] else None

    def _meet(self, key: Key, body: Body, problem: Problem) -> float:
        """Keep what is in the way; answer when to try again: at once to say it, then less and less often."""
        generation, known = body["metadata"]["generation"], self._obstacles.get(key)
        # The words may differ at each try (a quota's figures, an id): that is nothing new to hurry for.
        told = known is not None and (known.generation, known.problem.reason) == (generation, problem.reason)
        tries = known.tries + 1 if known is not None and told else 0
        self._obstacles[key] = Obstacle(problem, generation, tries)
        return min(FIRST_WAIT * (1 << min(tries - 1, 10)), LONGEST_WAIT) if tries else 0.0

    async def _say_invalid(self, body: Body, message: str) -> None:
        """Say that the spec cannot be read, or asks for what is not allowed, and leave the pods as they are."""
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
        """List everything and heal the store; False when a part could not be listed: that part stays as it was."""
        first, missed, failure = not self.has_listed, 0, ""
        for kind, namespace in product(WATCHED_KINDS, self._namespaces):
            # What the API server does not answer is not this process's fault, and a restart would not help.
            self._beat = time.monotonic()
            try:
                labels = "" if kind == KIND else SELECTOR
                bodies, version = await self._kube.list(kind, namespace, labels=labels, metadata_only=kind in LINKS)
            except KubeError as err:
                failure = f"cannot list {kind}{f' in namespace {namespace}' if namespace else ''}: {err}"
                log.warning(failure)
                continue
            listing = Listing(kind, namespace, [slim(body) for body in bodies], version)
            missed += await self._heal(listing, wait=not first)
        self._count(missed, failure)
        if failure:
            return False
        self.has_listed = True
        for body in self.store.resources():
            self.queue.add(key_of(body), 0.0 if first else random.uniform(0, GRACE))  # noqa: S311 - spreads load
        return True

    def _count(self, missed: int, failure: str) -> None:
        """Keep how a round ended."""
        self._failure = failure
        self._failed_rounds = self._failed_rounds + 1 if failure else 0
        metrics.FAILED_ROUNDS.inc(bool(failure))
        metrics.MISSED_CHANGES.inc(missed)
        if missed or not failure:
            self._silent_rounds = self._silent_rounds + 1 if missed else 0

    async def _heal(self, listing: Listing, *, wait: bool) -> int:
        """Take over what a listing shows and the watch has not delivered in time; answer how much that was."""
        if not self.store.find_newer(listing) and not self.store.find_gone(listing):
            return 0
        if wait:
            await asyncio.sleep(GRACE)
        newer, gone = self.store.find_newer(listing), self.store.find_gone(listing)
        for body in newer:
            self.seen(body, deleted=False)
        for body in gone:
            self.seen(body, deleted=True)
        if not wait or not (newer or gone):
            return 0
        log.warning("a watch missed changes", extra={"kind": listing.kind, "changed": len(newer), "gone": len(gone)})
        return len(newer) + len(gone)
