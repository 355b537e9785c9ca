"""Carries a decision out: status first, then Events, intents, owned objects and jobs. Safe to be cut off anywhere.

Status comes before anything destructive, so that a process killed in between finds written what it was about to do.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from outbox_core.report import Intent
from outbox_operator.api.naming import INTENT_ANNOTATION, build_object, labels_of
from outbox_operator.api.observed import Observed, PodView, Problem
from outbox_operator.api.reasons import Reason
from outbox_operator.api.resources import KIND, Processor
from outbox_operator.cluster.drift import build_removal
from outbox_operator.cluster.kube import Kube, KubeError, Where, where
from outbox_operator.decision.conditions import link_runbook
from outbox_operator.reconcile.reports import tell_intent
from outbox_operator.rendering.manifests import build_job, build_key, build_owned, hash_of
from outbox_operator.watch.owner_references import controller_of
from outbox_operator.watch.store import OWNED_KINDS, Body, Store, is_shared, key_of, slim

if TYPE_CHECKING:
    from outbox_operator.api.status import ProcessorStatus
    from outbox_operator.cluster.event_writer import EventWriter
    from outbox_operator.decision.decide import Decision
    from outbox_operator.settings import Images

log = logging.getLogger(__name__)

_GENERATIONS: Final = {"Deployment", "StatefulSet", "PodDisruptionBudget"}
"""Kinds whose status changes all the time: their generation counts changes of the spec alone."""

_REMOVAL_TRIES: Final = 5
"""The controller of a freshly edited object writes its status just then."""


class ObstacleError(Exception):
    """An owned object cannot be made; the resource's status says so, and it is tried again."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def dump_status(status: ProcessorStatus) -> dict[str, Any]:
    """Write a status as the resource has it, with times in Kubernetes' form: UTC, whole seconds."""
    text = json.dumps(status.model_dump(by_alias=True, exclude_none=True), default=_format_time)
    written: dict[str, Any] = json.loads(text)
    return written


def _format_time(value: datetime) -> str:
    return value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def is_news(before: Body | None, after: dict[str, Any]) -> bool:
    """Tell whether a status differs in more than the time of the report it is from."""
    old = {key: value for key, value in (before or {}).items() if key != "reportedAt"}
    return old != {key: value for key, value in after.items() if key != "reportedAt"}


def build_refusal(err: KubeError, names: str = "podTemplate, rights, quota") -> Problem:
    """Say what a person must do about an object that the API server refused, which `names` such things."""
    message = f"{err.message}. Correct what it names ({names}); it is tried again by itself"
    return Problem(Reason.APPLY_FAILED, message)


@dataclass(frozen=True, slots=True)
class Applier:
    """Carries decisions out, one resource at a time, with the help of these."""

    _kube: Kube
    _store: Store
    _images: Images
    _events: EventWriter

    async def apply(self, body: Body, observed: Observed, decision: Decision) -> bool:
        """Carry a decision out; False when the resource is gone.

        Raises:
            ObstacleError: an owned object cannot be made as things are.
            KubeError: the API server cannot be asked; try again.

        """
        processor = observed.processor
        if not await self.write_status(body, dump_status(decision.status)):
            return False
        for event in decision.events:
            await self._events.write(processor, event)
        if decision.keep_claim:
            await self._tell(processor, decision.keep_claim)
        try:
            await self._apply_owned(body, observed, decision)
            await self._apply_jobs(processor, decision)
        except KubeError as err:
            if not err.refused:
                raise
            raise ObstacleError(build_refusal(err)) from err
        if decision.remove_annotations:
            nothing = dict.fromkeys(decision.remove_annotations)
            place = Where(KIND, processor.namespace, processor.name)
            await self._kube.patch(place, {"metadata": {"uid": processor.uid, "annotations": nothing}})
        return True

    async def write_status(self, body: Body, status: dict[str, Any]) -> bool:
        """Write the status if it is news; False when the resource is gone."""
        status = {**status, "conditions": link_runbook(status["conditions"], self._images.runbook)}
        if not is_news(body.get("status"), status):
            return True
        meta = {name: body["metadata"][name] for name in ("name", "namespace", "uid")}
        written = await self._kube.apply_status(build_object(KIND, meta, status=status))
        if written is not None:
            self._store.put(slim({"kind": KIND, **written}))
        return written is not None

    async def _tell(self, processor: Processor, names: tuple[str, ...]) -> None:
        """Tell pods of its own; those that it shares are told when they are replaced (`shared.py`)."""
        pods = [self._store.get("Pod", processor.namespace, name) for name in names]
        own = [pod for pod in pods if pod is not None and not is_shared(pod)]
        await tell_intent(own, Intent.KEEP_CLAIM, self._images.keys.of(processor.uid))

    async def _make_key(self, observed: Observed, decision: Decision) -> None:
        """Make the Secret with the key where new pods will want it, or some miss it; one that is there stays."""
        processor = observed.processor
        if processor.spec.worker.shared is not None:
            return
        stays = decision.rollout.template is not None
        known = stays or (observed.workload is not None and observed.workload.intent_hash == observed.intent_hash)
        # A pod that cannot mount it stays pending.
        if not known or any(is_starting(pod) for pod in observed.runners):
            await self._kube.create(build_key(processor, self._images.keys))

    async def _apply_owned(self, body: Body, observed: Observed, decision: Decision) -> None:
        """Apply what is not as it was left, by the hash in the status, and leave the hash of it there."""
        processor = observed.processor
        await self._make_key(observed, decision)
        manifests = build_owned(
            processor,
            self._images,
            decision.replicas,
            decision.resolution,
            decision.sweep_uids,
            decision_label=decision.decision_label,
            rollout=decision.rollout,
        )
        wanted = {where(manifest) for manifest in manifests}
        for child in self._store.children((processor.namespace, processor.name), *OWNED_KINDS):
            if where(child) not in wanted and _owned_by(child, processor.uid) and not _moves(observed, decision):
                await self._kube.delete(where(child))
        live = [self._store.get(*place) for place in map(where, manifests)]
        found = hash_objects(manifests, live, processor.uid)
        if found and found == observed.previous.applied_hash:
            return
        # The hash is of what each apply returned: an edit that came after it differs from that, and is found next time.
        left: list[Body | None] = []
        for manifest in manifests:
            is_free = await self._is_free(processor, where(manifest))
            applied = await self._apply(manifest) if is_free else None
            if applied is None:
                return  # it was changed at each try, or a namesake's is going: the next round goes on
            left.append(applied)
        status = decision.status.model_copy(update={"applied_hash": hash_objects(manifests, left, processor.uid)})
        latest = self._store.resource(key_of(body)) or body
        # Another resource of this name may be there by now.
        if latest["metadata"]["uid"] == processor.uid:
            await self.write_status(latest, dump_status(status))

    async def _apply_jobs(self, processor: Processor, decision: Decision) -> None:
        for job in decision.start_jobs:
            place = Where("Job", processor.namespace, job.name)
            if self._store.get(*place) is None:
                await self._kube.create(build_job(processor, self._images, job.name, job.role, decision.sweep_uids))
            else:
                await self._is_free(processor, place)
        for name in decision.finished_jobs:
            await self._kube.delete(Where("Job", processor.namespace, name))

    async def apply_shared(self, manifest: dict[str, Any]) -> Body | None:
        """Apply an object that resources share; None when it was changed at each try: the next round goes on.

        Raises:
            ObstacleError: an object of this name is there that is none of ours.

        """
        place = where(manifest)
        found = await self._find(place)
        if found is not None and not _has(found, "labels", manifest["metadata"]["labels"]):
            message = f"{place.kind} {place.name!r} exists and is not worker.shared's: delete it, or share another name"
            raise ObstacleError(Problem(Reason.NAME_TAKEN, message))
        return await self._apply(manifest)

    async def _apply(self, manifest: dict[str, Any]) -> Body | None:
        """Apply, and take foreign fields out; None when the object was changed in between each time."""
        place, kind = where(manifest), {"kind": manifest["kind"]}
        for _ in range(_REMOVAL_TRIES):
            applied = kind | await self._kube.apply(manifest)
            left: dict[str, Any] | None = applied
            if removal := build_removal(applied):
                log.info("foreign fields removed", extra={"object": f"{place.kind}/{place.name}", "patch": removal[1:]})
                left = await self._remove(place, removal)
            if left is not None:
                body = slim(kind | left)
                self._store.put(body)
                return body
        return None

    async def _remove(self, place: Where, removal: list[dict[str, Any]]) -> dict[str, Any] | None:
        """Take foreign fields out; None when the object has changed meanwhile (its status, perhaps)."""
        try:
            return await self._kube.patch(place, removal)
        except KubeError as err:
            if err.status in (409, 422):
                return None
            raise

    async def _find(self, place: Where) -> Body | None:
        """Look an object up where it may not carry our labels, so that no watch has told of it."""
        return self._store.get(*place) or await self._kube.get(place)

    async def _is_free(self, processor: Processor, place: Where) -> bool:
        """Never take over an object that is another's; False: its owner is gone, and it goes by itself.

        Raises:
            ObstacleError: a person must make room.

        """
        found = await self._find(place)
        if found is None or _owned_by(found, processor.uid) or _is_orphan(found, processor):
            return True
        if _is_left_over(found, processor):
            return False
        message = f"{place.kind} {place.name!r} exists and is not this resource's: delete it, or rename this resource"
        raise ObstacleError(Problem(Reason.NAME_TAKEN, message))


def _moves(observed: Observed, decision: Decision) -> bool:
    """Tell whether pods that a resource shall share are not made for it yet: until then it keeps its own."""
    made = observed.workload is not None and observed.workload.intent_hash == observed.intent_hash
    return observed.processor.spec.worker.shared is not None and decision.replicas > 0 and not made


def is_starting(pod: PodView) -> bool:
    """Tell whether a pod has a node and may wait for its Secret."""
    unscheduled = pod.problem is not None and pod.problem.reason == Reason.UNSCHEDULABLE
    return pod.phase == "Pending" and not unscheduled


def _has(body: Body, part: str, wanted: dict[str, str]) -> bool:
    """Tell whether an object has these labels, or annotations, among others."""
    return wanted.items() <= (body["metadata"].get(part) or {}).items()


def _owned_by(body: Body, uid: str) -> bool:
    return any(ref["uid"] == uid for ref in body["metadata"].get("ownerReferences") or ())


def _is_orphan(body: Body, processor: Processor) -> bool:
    """Tell whether an object is one that we made for a resource of this name, and that nothing controls any more.

    Kubernetes' controllers adopt such objects too (Garbage Collection: owners and dependents).
    """
    ours = _has(body, "labels", labels_of(processor.name))
    return ours and controller_of(body) is None and INTENT_ANNOTATION in (body["metadata"].get("annotations") or {})


def _is_left_over(body: Body, processor: Processor) -> bool:
    """Tell whether a deleted resource of this name controls it: the garbage collector has yet to come to it."""
    ref = controller_of(body)
    return ref is not None and (ref["kind"], ref["name"]) == (KIND, processor.name)


def hash_objects(manifests: list[dict[str, Any]], bodies: list[Body | None], owner: str = "") -> str:
    """Hash what shall be and what is; empty where something is missing, not labelled and annotated so, or another's."""
    marks: list[tuple[str, ...]] = []
    for manifest, body in zip(manifests, bodies, strict=True):
        place, meta = where(manifest), manifest["metadata"]
        # A change of labels and annotations changes no generation.
        if body is None or not all(_has(body, part, meta[part]) for part in ("labels", "annotations")):
            return ""
        if owner and not _owned_by(body, owner):
            return ""
        live = body["metadata"]
        version = live.get("generation") if place.kind in _GENERATIONS else live["resourceVersion"]
        marks.append((place.kind, place.name, meta["annotations"][INTENT_ANNOTATION], live["uid"], str(version)))
    return hash_of(marks)
