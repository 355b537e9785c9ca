"""Reads the informers' store and the workers' reports into one frozen `Observed`; decides nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from pydantic import ValidationError

from outbox_operator.api.naming import TEMPLATE_LABEL, workload_name
from outbox_operator.api.observed import RUNNERS, Observed, Origin, PodView, Problem, Role, Sibling, WorkloadView
from outbox_operator.api.resources import KIND, Parse, Processor
from outbox_operator.api.status import ProcessorStatus
from outbox_operator.cluster.kube import Kube, KubeError, Where
from outbox_operator.decision.ownership import OwnershipState
from outbox_operator.reconcile.podstate import is_waiting, role_of, view_job, view_pod, view_workload
from outbox_operator.rendering.manifests import build_origin, build_template, image_of
from outbox_operator.rendering.shared import hash_member, read_parts
from outbox_operator.watch.owner_references import is_orphan, is_own, may_be_of
from outbox_operator.watch.store import Body, Store, key_of

if TYPE_CHECKING:
    from outbox_operator.reconcile.reports import Reporters
    from outbox_operator.reconcile.slots import SlotKeeper
    from outbox_operator.settings import Images
    from outbox_operator.watch.workqueue import Key

PATIENCE: Final = 1.5
"""Seconds that a pod may wait for its containers before its Events are read."""
FOREIGN_AFTER: Final = 10.0
"""Seconds after which a pod is told as foreign: a watch may bring it before the ReplicaSet that made it."""


def seconds_since(text: str) -> float:
    """Read how long ago an API server's time was, by this machine's clock."""
    return (datetime.now(UTC) - datetime.fromisoformat(text)).total_seconds()


def made_at(body: Body) -> datetime:
    """Read when an object was made."""
    return datetime.fromisoformat(body["metadata"]["creationTimestamp"])


def read_status(body: Body) -> ProcessorStatus:
    """Read the former status; one that this version cannot read counts as none."""
    try:
        return ProcessorStatus.model_validate(body.get("status") or {})
    except ValidationError:
        return ProcessorStatus()


def find_runners(store: Store, key: Key, uid: str) -> list[Body]:
    """Find the pods that may still run for a resource, also when it is gone."""
    labelled = [pod for pod in store.children(key, "Pod") if role_of(pod) in RUNNERS]
    own = [pod for pod in labelled if _lives(pod) and may_be_of(pod, uid, store)]
    return own + [pod for pod in store.shared_pods(key[0]) if _lives(pod) and _runs(pod, key[1], uid)]


def _lives(pod: Body) -> bool:
    return pod["status"].get("phase") in ("Pending", "Running")


def _runs(pod: Body, name: str, uid: str) -> bool:
    """Tell whether a shared pod was made to run a resource, among others."""
    part = read_parts(pod["metadata"]).get(name)
    return part is not None and part.uid == uid


def _view_sibling(body: Body) -> Sibling:
    meta, status = body["metadata"], read_status(body)
    state = status.ownership.state
    given = status.hand_over if state == OwnershipState.HANDED_OVER else None
    return Sibling(
        namespace=meta["namespace"],
        name=meta["name"],
        created=made_at(body),
        granted=state == OwnershipState.GRANTED,
        handed_over_to=given.to if given is not None else None,
        handed_over_at=given.time if given is not None else None,
    )


@dataclass(frozen=True, slots=True)
class Observer:
    """Observes one resource at a time, with the help of these."""

    _kube: Kube
    _store: Store
    _reporters: Reporters
    _images: Images
    _cluster: str
    _parse: Parse
    _slots: SlotKeeper

    async def observe(self, body: Body, obstacle: Problem | None) -> Observed:
        """Observe a resource.

        Raises:
            pydantic.ValidationError: its spec cannot be read.
            NotAllowedError: its spec asks for pods that are not allowed.

        """
        processor = self._parse(body)
        previous = read_status(body)
        key = key_of(body)
        labelled = [(pod, role) for pod in self._store.children(key, "Pod") if (role := role_of(pod)) is not None]
        pods = [await self._pod(pod, role, processor) for pod, role in labelled if is_own(pod, self._store)]
        # Also those that were made to run it before it moved away from them.
        shared = [pod for pod in self._store.shared_pods(processor.namespace) if is_own(pod, self._store)]
        pods += [await self._shared_pod(pod, processor) for pod in shared if _runs(pod, processor.name, processor.uid)]
        own_jobs = [job for job in self._store.children(key, "Job") if is_own(job, self._store)]
        jobs = [view_job(job) for job in own_jobs if role_of(job) is not None]
        holder_gone = await self._holder_gone(previous)
        namesakes = self._store.with_processor_id(processor.processor_id)
        siblings = tuple(_view_sibling(each) for each in namesakes if each["metadata"]["uid"] != processor.uid)
        intent_hash, origin, image = self._describe_asked(processor)
        # Nothing is awaited from here to the decision: a slot that is free now is taken by one resource.
        return Observed(
            processor=processor,
            created=made_at(body),
            previous=previous,
            workload=self._view_workload(processor),
            intent_hash=intent_hash,
            origin=origin,
            image=image,
            slots=self._slots.look(key),
            pods=tuple(pods),
            jobs=tuple(jobs),
            siblings=siblings,
            successor_missing=self._is_successor_missing(processor, siblings),
            foreign=tuple(pod["metadata"]["name"] for pod, role in labelled if self._is_foreign(pod, role, processor)),
            unsettled=max((made_at(pod) for pod, role in labelled if self._is_unsettled(pod, role)), default=None),
            holder_gone=holder_gone,
            obstacle=obstacle,
        )

    def _view_workload(self, processor: Processor) -> WorkloadView | None:
        """View the workload; one that is shared as if it were the resource's own."""
        kind = "Deployment" if processor.spec.engine == "Worker" else "StatefulSet"
        body = self._store.get(kind, processor.namespace, workload_name(processor))
        if body is None:
            return None
        view = view_workload(body)
        if processor.spec.worker.shared is None:
            return view
        part = read_parts(body["spec"]["template"]["metadata"]).get(processor.name)
        if part is None or part.uid != processor.uid:
            return replace(view, replicas=0, intent_hash="", decision="")
        return replace(view, intent_hash=part.template, decision=part.decision)

    def _describe_asked(self, processor: Processor) -> tuple[str, Origin, str]:
        """Say which pods the spec asks for: the template's hash, what it is rendered for, its image.

        What is shared has no pace of its own: its pods are replaced at once.
        """
        if processor.spec.worker.shared is not None:
            asked = hash_member(processor, self._images)
            return asked, Origin(processor.generation, asked), self._images.worker
        template = build_template(processor, self._images)
        asked = template["metadata"]["labels"][TEMPLATE_LABEL]
        return asked, build_origin(processor, self._images, template), image_of(template)

    async def _shared_pod(self, pod: Body, processor: Processor) -> PodView:
        """View a shared pod as one of the resource."""
        part = read_parts(pod["metadata"])[processor.name]
        view = await self._pod(pod, Role.WORKER, processor)
        return replace(view, intent_hash=part.template, decision=part.decision)

    async def _pod(self, pod: Body, role: Role, processor: Processor) -> PodView:
        meta = pod["metadata"]
        heard = self._reporters.heard(pod)
        waits = seconds_since(meta["creationTimestamp"]) > PATIENCE and is_waiting(pod)
        notes = await self._notes(meta["namespace"], meta["uid"]) if waits else []
        view = view_pod(pod, role, notes, datetime.now(UTC))
        return replace(
            view,
            report=heard.reports.get(processor.name),
            reachable=heard.reachable,
            unreachable_message=heard.unreachable_message,
        )

    def _is_foreign(self, pod: Body, role: Role, processor: Processor) -> bool:
        """Tell whether a pod that lives was not made for the resource; nothing owns the pod of a release job."""
        meta = pod["metadata"]
        ended = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed") or "deletionTimestamp" in meta
        young = seconds_since(meta["creationTimestamp"]) < FOREIGN_AFTER
        if ended or young or role is Role.RELEASE or is_own(pod, self._store):
            return False
        return not is_orphan(pod, processor.name, workload_name(processor), self._store)

    def _is_unsettled(self, pod: Body, role: Role) -> bool:
        """Tell whether time alone may tell more of a pod: no change is told of its Events, or of its owner."""
        young = seconds_since(pod["metadata"]["creationTimestamp"]) < FOREIGN_AFTER
        return is_waiting(pod) if is_own(pod, self._store) else young and role is not Role.RELEASE

    async def _notes(self, namespace: str, uid: str) -> list[str]:
        """Fetch the warnings about a pod, newest first; none when they may not be read."""
        try:
            fields = f"involvedObject.uid={uid},type=Warning"
            events, _ = await self._kube.list("Event", namespace, fields=fields)
        except KubeError:
            return []
        # A probe that fails is the process's matter, which speaks for itself.
        events = [event for event in events if event.get("reason") != "Unhealthy"]
        events.sort(key=lambda event: event.get("lastTimestamp") or event.get("eventTime") or "", reverse=True)
        return [event.get("message", "") for event in events]

    def _is_successor_missing(self, processor: Processor, siblings: tuple[Sibling, ...]) -> bool:
        to = processor.successor
        if to is None or to.cluster != processor.cluster or not self._store.covers(to.namespace):
            return False
        return all((each.namespace, each.name) != (to.namespace, to.name) for each in siblings)

    async def _holder_gone(self, previous: ProcessorStatus) -> bool:
        """Tell whether the claim's holder was a resource of this cluster that is certainly gone, with its pods."""
        holder = previous.ownership.holder
        if previous.ownership.state != OwnershipState.REFUSED or holder is None or holder.cluster != self._cluster:
            return False
        if not (holder.uid and holder.namespace and holder.name):
            return False
        known = self._store.get(KIND, holder.namespace, holder.name)
        if known is not None and known["metadata"]["uid"] == holder.uid:
            return False
        if find_runners(self._store, (holder.namespace, holder.name), holder.uid):
            return False
        try:
            found = await self._kube.get(Where(KIND, holder.namespace, holder.name))
        except KubeError:
            return False
        return found is None or found["metadata"]["uid"] != holder.uid
