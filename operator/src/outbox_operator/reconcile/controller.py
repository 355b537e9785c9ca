"""The loop: observe, decide, apply, for one resource at a time; level-triggered, so a missed event costs a delay.

Kopf's watches (`handlers.py`), listings (`informer.py`) and the pods' reports only say *that* something changed. What
did not change is not decided again but for `REST`, in turns. A process whose watches stay silent, or whose work stands
still, fails its liveness; one that cannot list is not ready.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Final

from pydantic import ValidationError

from outbox_core.plain import plain_fault
from outbox_operator import metrics
from outbox_operator.api.naming import SHARED_PREFIX
from outbox_operator.api.reasons import ConditionType, Reason
from outbox_operator.api.resources import KIND, NotAllowedError, parse_processor
from outbox_operator.api.status import Phase
from outbox_operator.cluster.event_writer import EventWriter
from outbox_operator.decision.conditions import Answer, update_conditions
from outbox_operator.decision.decide import REST, decide
from outbox_operator.reconcile.apply import Applier, ObstacleError, dump_status
from outbox_operator.reconcile.observe import Observer, read_status
from outbox_operator.reconcile.release import Releaser
from outbox_operator.reconcile.reports import Reporters
from outbox_operator.reconcile.shared import SharedPods
from outbox_operator.reconcile.slots import SlotKeeper
from outbox_operator.watch.informer import Informer
from outbox_operator.watch.store import WATCHED_KINDS, Body, Store, key_of, processor_id_of
from outbox_operator.watch.workqueue import Key, KeyedQueue

if TYPE_CHECKING:
    from outbox_operator.api.observed import Problem
    from outbox_operator.cluster.kube import Kube
    from outbox_operator.settings import Settings

FIRST_WORDS: Final = 5.0
"""How long a process that was just started waits for what the pods say; one that is slower is heard later."""
SILENT_CHECKS: Final = 3
UNREADY_AFTER: Final = 20.0
"""Seconds that a kind may not be listed: the API server may be being restarted."""
FIRST_WAIT: Final = 5.0
LONGEST_WAIT: Final = 60.0
"""Bounds of the wait after the API server refused an owned object, doubled from one to the other."""
SETTLE: Final = 1.0
"""Seconds within which changes of resources that share pods replace those once."""
WORKERS: Final = 8


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why an owned object could not be made, for which spec, and how often that was met again."""

    problem: Problem
    generation: int
    tries: int


class Controller:
    """Everything that lives as long as this process is the active one."""

    def __init__(self, kube: Kube, settings: Settings, cluster: str) -> None:
        self.store = Store(settings.namespaces)
        self.queue = KeyedQueue(self.reconcile, workers=WORKERS)
        reporters = Reporters(self.store, settings.images.keys, settings.lease_namespace, self.queue.add)
        parse = partial(parse_processor, cluster=cluster, unrestricted=settings.unrestricted)
        self._slots = SlotKeeper(self.store, settings.budget, self.queue.add)
        self._observer = Observer(kube, self.store, reporters, settings.images, cluster, parse, self._slots)
        self._applier = Applier(kube, self.store, settings.images, EventWriter(kube, settings.identity))
        self._shared = SharedPods(kube, self.store, settings.images, self._applier)
        self._releaser = Releaser(kube, self.store, settings.images, parse)
        self._reporters = reporters
        self._obstacles: dict[Key, Obstacle] = {}
        self._informers = [
            Informer(kube, self.store, kind, namespace, self.seen, settings.check_seconds)
            for kind, namespace in product(WATCHED_KINDS, settings.namespaces or ("",))
        ]
        metrics.QUEUE_DEPTH.set_function(lambda: self.queue.depth)

    async def run(self) -> None:
        """Once everything was listed, work until cancelled."""
        async with asyncio.TaskGroup() as group:
            for informer in self._informers:
                group.create_task(informer.run())
            await self.listed()
            group.create_task(self._work())
            group.create_task(self._reporters.run())
            group.create_task(self._releaser.run())

    async def listed(self) -> None:
        """Wait until every kind was listed."""
        for informer in self._informers:
            await informer.listed.wait()

    async def _work(self) -> None:
        """Decide once the pods were asked: what another process heard of them is not known here."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_WORDS):
                await self._reporters.asked.wait()
        await self.queue.run()

    @property
    def stale_seconds(self) -> float:
        """For how long work, or asking pods, has stood still; without bound when watches stay silent."""
        silent = any(informer.silent >= SILENT_CHECKS for informer in self._informers)
        return float("inf") if silent else max(self.queue.stuck_seconds, self._reporters.stuck_seconds)

    @property
    def fault(self) -> str:
        """Why what is served cannot be listed, in words; empty while it can."""
        absent = [informer for informer in self._informers if not informer.listed.is_set()]
        failing = [informer for informer in self._informers if informer.failing_seconds > UNREADY_AFTER]
        said = next((informer.failure for informer in (*absent, *failing) if informer.failure), "")
        return said or ("nothing was listed yet" if absent else "")

    def seen(self, body: Body, deleted: bool) -> None:
        """Take what a watch or a listing tells."""
        key = key_of(body)
        if not key[1]:
            return
        if deleted:
            self.store.remove(body)
            self._wake(key)
            if body["kind"] == KIND:
                self._gone(body)
        elif keys := self.store.put(body):
            self._wake(*keys)
            self._releaser.take_up(body)
        if body["kind"] == "Pod" and self.store.resource(key) is None:
            self._wake_waiting(key)

    def _wake(self, *keys: Key) -> None:
        """Look at resources, or at what they share and then at each of them."""
        for key in keys:
            self.queue.add(key, SETTLE if key[1].startswith(SHARED_PREFIX) else 0.0)
            for member in self.store.in_group(key):
                self.queue.add(member)

    def _gone(self, body: Body) -> None:
        """A resource was deleted: give its claim up, and let those try who wait for it."""
        self._obstacles.pop(key_of(body), None)
        self._look_at(self._shared.note(body))
        self._releaser.release(body)
        self._wake_siblings(body)
        self._slots.wake()

    def _wake_siblings(self, body: Body) -> None:
        for other in self.store.with_processor_id(processor_id_of(body)):
            if other["metadata"]["uid"] != body["metadata"]["uid"]:
                self.queue.add(key_of(other))

    def _wake_waiting(self, gone: Key) -> None:
        """A pod of a resource that is gone has changed: look at those that wait until none of its pods is there."""
        for other in self.store.all_of(KIND):
            holder = ((other.get("status") or {}).get("ownership") or {}).get("holder") or {}
            is_its = gone[1] == holder.get("name") or gone[1].startswith(SHARED_PREFIX)
            if gone[0] == holder.get("namespace") and is_its:
                self.queue.add(key_of(other))

    async def reconcile(self, key: Key) -> float | None:
        """Make one resource so, or what several share; answer when to look again."""
        try:
            with metrics.RECONCILE_SECONDS.time():
                is_group = key[1].startswith(SHARED_PREFIX)
                return await (self._reconcile_group(key) if is_group else self._reconcile_one(key))
        except Exception:
            metrics.RECONCILE_FAILURES.inc()
            raise

    async def _reconcile_group(self, group: Key) -> float | None:
        if await self._shared.reconcile(group):
            for member in self.store.in_group(group):
                self.queue.add(member)
        return FIRST_WAIT if self._shared.is_obstructed(group) else None

    async def _reconcile_one(self, key: Key) -> float | None:
        body = self.store.resource(key)
        if body is None:
            self.queue.forget(key)
            return None
        if "deletionTimestamp" in body["metadata"]:
            self._gone(body)
            return None
        return await self._reconcile(key, body)

    async def _reconcile(self, key: Key, body: Body) -> float:
        try:
            observed = await self._observer.observe(body, self._obstacle_of(key, body))
        except ValidationError as err:
            await self._say_invalid(body, f"{plain_fault(err.errors()[0], 'spec')}; or upgrade the operator")
            return spread(REST)
        except NotAllowedError as err:
            await self._say_invalid(body, str(err))
            return spread(REST)
        decision = decide(observed, datetime.now(UTC))
        owner_changed = decision.status.ownership.state != observed.previous.ownership.state
        try:
            with self._slots.kept(key, decision.rollout):
                if not await self._applier.apply(body, observed, decision):
                    return spread(REST)
        except ObstacleError as err:
            return self._meet(key, body, err.problem)
        finally:
            self._look_at(self._shared.note(body, observed, decision))
        if owner_changed:
            self._wake_siblings(body)
        # What was in the way is gone: the status just written still names it.
        return 0.0 if self._obstacles.pop(key, None) is not None else spread(decision.look_again)

    def _look_at(self, groups: set[Key]) -> None:
        """Look at what resources share, once their other changes are told too."""
        for group in groups:
            self.queue.add(group, SETTLE)

    def _obstacle_of(self, key: Key, body: Body) -> Problem | None:
        """What is in the way of this very spec: what was in the way of the one before says nothing of it."""
        known = self._obstacles.get(key)
        own = known.problem if known is not None and known.generation == body["metadata"]["generation"] else None
        return own or self._shared.problem_of(body)

    def _meet(self, key: Key, body: Body, problem: Problem) -> float:
        """Keep what is in the way; answer when to try again: at once to say it, then less and less often."""
        generation, known = body["metadata"]["generation"], self._obstacles.get(key)
        # The words may differ at each try (a quota's figures, an id): that is nothing new to hurry for.
        told = known is not None and (known.generation, known.problem.reason) == (generation, problem.reason)
        tries = known.tries + 1 if known is not None and told else 0
        self._obstacles[key] = Obstacle(problem, generation, tries)
        return min(FIRST_WAIT * (1 << min(tries - 1, 10)), LONGEST_WAIT) if tries else 0.0

    async def _say_invalid(self, body: Body, message: str) -> None:
        """Say that the spec cannot be read, or asks for what is not allowed, and leave its own pods as they are."""
        self._look_at(self._shared.note(body))
        previous, generation = read_status(body), body["metadata"].get("generation", 0)
        answers = {
            ConditionType.READY: Answer(False, Reason.INVALID_SPEC, message),
            ConditionType.STALLED: Answer(True, Reason.INVALID_SPEC, message),
            ConditionType.RECONCILING: Answer(False, Reason.AS_EXPECTED),
        }
        now = datetime.now(UTC)
        conditions = update_conditions(previous.conditions, answers, generation=generation, now=now)
        update = {"phase": Phase.INVALID, "conditions": conditions, "observed_generation": generation}
        await self._applier.write_status(body, dump_status(previous.model_copy(update=update)))


def spread(wait: timedelta) -> float:
    """Say in how many seconds to look again: what was decided together shall not be decided together again."""
    seconds = wait.total_seconds()
    return seconds * random.uniform(0.5, 1) if wait >= REST else seconds  # noqa: S311 - spreads load, no secret
