"""Makes the pods that several resources share, once each of them has said what it wants in them.

What a resource wants is decided by its own reconcile, like that of any other. It is kept in memory only: a process that
was just started leaves the pods as they are until it has decided about each resource.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from outbox_core.report import Intent
from outbox_operator.api.naming import INTENT_ANNOTATION, shared_id
from outbox_operator.cluster.kube import KubeError, where
from outbox_operator.reconcile.apply import ObstacleError, build_refusal, hash_objects
from outbox_operator.reconcile.reports import tell_intent
from outbox_operator.rendering.shared import (
    Member,
    build_shared,
    build_shared_key,
    find_misfits,
    read_parts,
    runs_what_left,
)
from outbox_operator.watch.owner_references import is_own
from outbox_operator.watch.store import OWNED_KINDS, group_of, key_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from outbox_operator.api.observed import Observed, Problem
    from outbox_operator.cluster.kube import Kube
    from outbox_operator.decision.decide import Decision
    from outbox_operator.reconcile.apply import Applier
    from outbox_operator.settings import Images
    from outbox_operator.watch.store import Body, Store
    from outbox_operator.watch.workqueue import Key


class SharedPods:
    """The groups of resources that share pods."""

    def __init__(self, kube: Kube, store: Store, images: Images, applier: Applier) -> None:
        self._kube = kube
        self._store = store
        self._images = images
        self._applier = applier
        self._wanted: dict[Key, tuple[Key, Member | None]] = {}
        """By resource: its group, and what it wants there; None: nothing that can be run."""
        self._left: dict[Key, str] = {}
        """By group: hash of its objects as they were left."""
        self._obstacles: dict[Key, Problem] = {}
        """By group: why its objects cannot be made."""
        self._misfits: dict[Key, dict[str, Problem]] = {}
        """By group: why a resource cannot run with the others, by its name."""

    def note(self, body: Body, observed: Observed | None = None, decision: Decision | None = None) -> set[Key]:
        """Take what was decided about a resource, None: nothing that can be run; return the groups that changed by it.

        One that is gone wants nothing any more; one that is being deleted is waited for by none of the others.
        """
        key, group, member = key_of(body), group_of(body), None
        if observed is not None and decision is not None:
            member = Member(
                observed.processor, decision.replicas, decision.resolution, decision.sweep_uids,
                decision.decision_label, created=observed.created,
            )  # fmt: skip
        known = self._store.resource(key)
        is_here = known is not None and known["metadata"]["uid"] == body["metadata"]["uid"]
        wanted = (group, member) if is_here and group is not None else None
        before = self._wanted.pop(key, None)
        if wanted is not None:
            self._wanted[key] = wanted
        return set() if wanted == before else {each[0] for each in (before, wanted) if each is not None}

    def problem_of(self, body: Body) -> Problem | None:
        """Say why a resource cannot run in shared pods, or why those cannot be made."""
        group = group_of(body)
        if group is None:
            return None
        return self._misfits.get(group, {}).get(body["metadata"]["name"]) or self._obstacles.get(group)

    def is_obstructed(self, group: Key) -> bool:
        """Tell whether objects of a group cannot be made as things are."""
        return group in self._obstacles

    async def reconcile(self, group: Key) -> bool:
        """Make the objects of one group so; say whether what its resources tell of that changed.

        Raises:
            KubeError: the API server cannot be asked; try again.

        """
        wanted = [self._wanted.get(key) for key in self._store.in_group(group)]
        if any(each is None or each[0] != group for each in wanted):
            return False  # that resource's turn is to come, and calls for this group
        members = [each[1] for each in wanted if each is not None and each[1] is not None]
        misfits = find_misfits(members)
        obstacle: Problem | None = None
        fitting = [replace(each, replicas=0) if each.processor.name in misfits else each for each in members]
        try:
            await self._make(group, fitting)
        except ObstacleError as err:
            obstacle = err.problem
        except KubeError as err:
            if not err.refused:
                raise
            obstacle = build_refusal(err, "rights, quota, how many resources share a name")
        before = self._obstacles.pop(group, None), self._misfits.pop(group, {})
        if obstacle is not None:
            self._obstacles[group] = obstacle
        if misfits:
            self._misfits[group] = misfits
        return (obstacle, misfits) != before

    async def _make(self, group: Key, members: list[Member]) -> None:
        pods = [
            pod
            for pod in self._store.children(group, "Pod")
            if "deletionTimestamp" not in pod["metadata"] and is_own(pod, self._store)
        ]
        manifests = build_shared(group, members, self._images, at_once=runs_what_left(pods, members))
        places = [where(manifest) for manifest in manifests]
        await self._keep_claims(group, pods, manifests[-1]["spec"]["template"]["metadata"] if manifests else {})
        for child in self._store.children(group, *OWNED_KINDS):
            if where(child) not in places and INTENT_ANNOTATION in (child["metadata"].get("annotations") or {}):
                await self._kube.delete(where(child))
        if not manifests:
            self._left.pop(group, None)
            return
        live = [self._store.get(*place) for place in places]
        found = hash_objects(manifests, live)
        if not found or found != self._left.get(group):
            live = [await self._applier.apply_shared(manifest) for manifest in manifests]
            self._left[group] = hash_objects(manifests, live)
        deployment = live[-1]
        if deployment is not None and not _is_ready(deployment):
            await self._kube.create(build_shared_key(group, deployment["metadata"]["uid"], self._images.keys))

    async def _keep_claims(self, group: Key, pods: Sequence[Body], wanted: Mapping[str, Any]) -> None:
        """Tell pods that are about to go which resources stay; of the others the claim is for the next one to take."""
        key = self._images.keys.of(shared_id(*group))
        for pod in pods:
            parts = read_parts(pod["metadata"])
            if parts != read_parts(wanted):
                stay = [name for name, part in parts.items() if self._stays((group[0], name), part.uid)]
                await tell_intent([pod], Intent.KEEP_CLAIM, key, stay)

    def _stays(self, key: Key, uid: str) -> bool:
        body = self._store.resource(key)
        return body is not None and body["metadata"]["uid"] == uid and "deletionTimestamp" not in body["metadata"]


def _is_ready(deployment: Body) -> bool:
    """Tell whether no pod may wait for its key."""
    ready: int = (deployment.get("status") or {}).get("readyReplicas", 0)
    wanted: int = deployment["spec"].get("replicas", 1)
    return ready >= wanted
