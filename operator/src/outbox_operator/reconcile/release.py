"""Gives up the claim of a deleted resource. Nothing waits for it: there is no finalizer.

Its pods are told (they are going anyway, by their owner references); a job of at most 30 s does it for pods that could
not hear. It is made at once and suspended, so that an operator that is started again knows of it, and it runs once none
of the pods may run any more: what wants the claim would publish the same messages beside one that does. So the pod on a
lost node keeps the claim until it is deleted, as it does where a claim is swept. If the operator is down, pods vacate
the claim as they end, and a claim whose resource is gone is swept by the next resource of this cluster that wants it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from pydantic import ValidationError

from outbox_core.report import Intent
from outbox_operator.api.naming import RELEASED_ANNOTATION
from outbox_operator.api.observed import Role
from outbox_operator.api.resources import KIND, NotAllowedError, Parse
from outbox_operator.cluster.kube import Kube, KubeError, Where, where
from outbox_operator.decision.ownership import OwnershipState
from outbox_operator.reconcile.observe import find_runners, read_status, seconds_since
from outbox_operator.reconcile.podstate import view_job
from outbox_operator.reconcile.reports import tell_intent
from outbox_operator.rendering.manifests import JOB_SECONDS, build_release
from outbox_operator.watch.store import Body, Store, is_shared, key_of

if TYPE_CHECKING:
    from outbox_operator.settings import Images

DRAIN_SECONDS: Final = 60.0
"""How long beyond their grace period pods may take to be gone until the log names them."""
AGAIN: Final = 5.0
"""Seconds before a call that failed is made again."""
AT_ONCE: Final = 10
"""Jobs that run at the same time, and deletions whose pods are told: a namespace with hundreds of resources may go."""
_NOT_OURS: Final = (OwnershipState.REFUSED, OwnershipState.HANDED_OVER)

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Releaser:
    """Works off deleted resources and the jobs that are made for them, each once."""

    _kube: Kube
    _store: Store
    _images: Images
    _parse: Parse
    _waiting: asyncio.Queue[Body] = field(default_factory=asyncio.Queue, init=False)
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE), init=False)
    _known: dict[str, None] = field(default_factory=dict, init=False)

    def release(self, body: Body) -> None:
        """Ask for a deleted resource's claim to be given up; nothing is asked where it has none."""
        state = read_status(body).ownership.state
        never_ran = state == OwnershipState.UNKNOWN and not self._pods(body, body["metadata"]["uid"])
        if state not in _NOT_OURS and not never_ran:
            self._ask(body)

    def take_up(self, body: Body) -> None:
        """Take up the job of a deletion, which this process made or one before it; other objects are none."""
        if body["kind"] == "Job" and _released_uid(body) and not view_job(body).finished:
            self._ask(body)

    def _ask(self, body: Body) -> None:
        uid = body["metadata"]["uid"]
        if uid in self._known:
            return
        self._known[uid] = None
        if len(self._known) > 10_000:
            self._known.pop(next(iter(self._known)))
        self._waiting.put_nowait(body)

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(self._try(await self._waiting.get()))

    async def _try(self, body: Body) -> None:
        try:
            await (self._begin(body) if body["kind"] == KIND else self._finish(body))
        except (KubeError, ValidationError, NotAllowedError) as err:
            said = {"processor": key_of(body)[1], "error": str(err)[:300]}
            if body["kind"] == KIND and (not isinstance(err, KubeError) or err.refused):
                # The namespace is going too, or the spec is none to make pods of: the claim was vacated, or is swept.
                log.info("no release job runs", extra=said)
                return
            log.warning("a release failed and is tried again", extra=said)
            await asyncio.sleep(AGAIN)
            self._waiting.put_nowait(body)

    async def _begin(self, body: Body) -> None:
        """Make the job, and tell the pods."""
        processor = self._parse(body)
        # A shared pod goes on for other resources: the job alone gives the claim up.
        pods = [pod for pod in self._pods(body, processor.uid) if not is_shared(pod)]
        key = self._images.keys.of(processor.uid)
        async with self._slots:
            job = build_release(processor, self._images)
            await asyncio.gather(tell_intent(pods, Intent.RELEASE_CLAIM, key), self._kube.create(job))

    async def _finish(self, job: Body) -> None:
        """Let the job run once no pod may run any more, however long that takes; nothing else waits for it."""
        told = False
        while pods := self._pods(job, _released_uid(job)):
            late = [pod["metadata"]["name"] for pod in pods if _is_late(pod)]
            if late and not told:
                log.warning(
                    "pods of a deleted resource are still there: its claim is given up when they are gone; where their "
                    "node is lost for good, delete the node",
                    extra={"namespace": job["metadata"]["namespace"], "processor": key_of(job)[1], "pods": late},
                )
                told = True
            await asyncio.sleep(0.5)
        place = where(job)
        async with self._slots:
            await self._kube.patch(place, {"spec": {"suspend": False}})
            deadline = time.monotonic() + JOB_SECONDS[Role.RELEASE]
            while not self._has_ended(place) and time.monotonic() < deadline:  # noqa: ASYNC110 - a state of the store
                await asyncio.sleep(0.5)

    def _has_ended(self, place: Where) -> bool:
        job = self._store.get(*place)
        return job is None or view_job(job).finished

    def _pods(self, body: Body, uid: str) -> list[Body]:
        return find_runners(self._store, key_of(body), uid)


def _released_uid(job: Body) -> str:
    """Read which deleted resource a job gives up the claim of; empty for another job."""
    return str((job["metadata"].get("annotations") or {}).get(RELEASED_ANNOTATION, ""))


def _is_late(pod: Body) -> bool:
    """Tell whether a pod should be gone: its deletion time is the end of its grace period."""
    ends = pod["metadata"].get("deletionTimestamp")
    return ends is not None and seconds_since(ends) > DRAIN_SECONDS
