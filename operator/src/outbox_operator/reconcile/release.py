"""Gives up the claim of a deleted resource. Nothing waits for it: there is no finalizer.

Its pods are told (they are going anyway, by their owner references); a job of at most 30 s does it for pods that could
not hear, once none of them may run any more: what wants the claim would publish the same messages beside one that does.
So the pod on a lost node keeps the claim until it is deleted, as it does where a claim is swept. If the operator is
down, pods vacate the claim as they end, and a claim whose resource is gone is swept by the next resource of this
cluster that wants it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import TYPE_CHECKING, Final

from pydantic import ValidationError

from outbox_core.report import Intent
from outbox_core.spec import Engine
from outbox_operator.api.observed import Role
from outbox_operator.api.resources import NotAllowedError
from outbox_operator.cluster.kube import KubeError
from outbox_operator.decision.ownership import OwnershipState
from outbox_operator.reconcile.observe import find_runners, read_status
from outbox_operator.reconcile.podstate import view_job
from outbox_operator.reconcile.reports import tell_intent
from outbox_operator.rendering.manifests import JOB_SECONDS, build_release
from outbox_operator.rendering.pods import DRIVER_GRACE
from outbox_operator.watch.store import key_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox_operator.api.resources import Parse, Processor
    from outbox_operator.cluster.kube import Kube
    from outbox_operator.settings import Images
    from outbox_operator.watch.store import Body, Store

DRAIN_SECONDS: Final = 60.0
"""How long beyond their grace period pods may take to be gone until the log names them."""
AT_ONCE: Final = 10
"""Jobs at the same time, and deletions whose pods are told: a namespace with hundreds of resources may go."""
_NOT_OURS: Final = (OwnershipState.REFUSED, OwnershipState.HANDED_OVER)

log = logging.getLogger(__name__)


class Releaser:
    """Works off deletions, each once."""

    def __init__(self, kube: Kube, store: Store, images: Images, parse: Parse) -> None:
        """Read and write through these."""
        self._kube = kube
        self._store = store
        self._images = images
        self._parse = parse
        self._waiting: asyncio.Queue[Body] = asyncio.Queue()
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._done: dict[str, float] = {}

    def release(self, body: Body) -> None:
        """Ask for a deleted resource's claim to be given up; nothing is asked where it has none."""
        uid, state = body["metadata"]["uid"], read_status(body).ownership.state
        never_ran = state == OwnershipState.UNKNOWN and not self._pods(body)
        if uid in self._done or state in _NOT_OURS or never_ran:
            return
        self._done[uid] = time.monotonic()
        if len(self._done) > 10_000:
            self._done.pop(next(iter(self._done)))
        self._waiting.put_nowait(body)

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                body = await self._waiting.get()
                group.create_task(self._release(body))

    async def _release(self, body: Body) -> None:
        try:
            processor = self._parse(body)
            async with self._slots:
                await tell_intent(self._pods(body), Intent.RELEASE_CLAIM, self._images.keys.of(processor.uid))
            await self._drained(body, processor)
            async with self._slots:
                await self._run_job(processor)
        except (KubeError, ValidationError, NotAllowedError) as err:
            # The namespace is going too, or the spec is none to make pods of: the claim was vacated, or is swept.
            log.info("no release job", extra={"processor": body["metadata"]["name"], "error": str(err)[:300]})

    async def _drained(self, body: Body, processor: Processor) -> None:
        """Wait until no pod may run any more, however long that takes; nothing else waits for it."""
        worker = processor.spec.engine is Engine.WORKER
        grace = processor.spec.worker.termination_grace_period_seconds if worker else DRIVER_GRACE
        if await _wait(lambda: not self._pods(body), grace + DRAIN_SECONDS):
            return
        details = {"processor": processor.name, "pods": [pod["metadata"]["name"] for pod in self._pods(body)]}
        log.warning(
            "pods of a deleted resource are still there: its claim is given up when they are gone; where their node is "
            "lost for good, delete the node",
            extra={"namespace": processor.namespace, **details},
        )
        await _wait(lambda: not self._pods(body), math.inf)

    async def _run_job(self, processor: Processor) -> None:
        manifest, config_map = build_release(processor, self._images)
        job = await self._kube.create(manifest)
        if job is None:
            return
        owner = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "name": job["metadata"]["name"],
            "uid": job["metadata"]["uid"],
        }
        meta = {**config_map["metadata"], "ownerReferences": [owner]}
        await self._kube.create({**config_map, "metadata": meta})
        place = "Job", processor.namespace, job["metadata"]["name"]
        await _wait(lambda: _has_ended(self._store.get(*place)), JOB_SECONDS[Role.RELEASE])

    def _pods(self, body: Body) -> list[Body]:
        return find_runners(self._store, key_of(body), body["metadata"]["uid"])


async def _wait(done: Callable[[], bool], seconds: float) -> bool:
    """Wait for it, or so long; tell whether it came."""
    deadline = time.monotonic() + seconds
    while not (came := done()) and time.monotonic() < deadline:  # noqa: ASYNC110 - a state of the store, and rare
        await asyncio.sleep(0.5)
    return came


def _has_ended(job: Body | None) -> bool:
    """Tell whether a job is over; one that the watch has not shown yet is not."""
    return job is not None and view_job(job, Role.RELEASE).finished
