"""What watches and listings have seen: resources and everything labelled as ours, in memory. No decisions, no I/O.

Filled by a listing of each kind (`informer.py`) and kept by Kopf's watches (`handlers.py`); a watch that missed
something costs a delay, not a state that stays wrong.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from outbox_operator.api.naming import PROCESSOR_LABEL, SHARED_PREFIX, SLOT_ANNOTATION
from outbox_operator.api.resources import KIND
from outbox_operator.cluster.kube import Where, version_of, where

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator

    from outbox_operator.watch.workqueue import Key

OWNED_KINDS: Final = (
    "Deployment",
    "StatefulSet",
    "PodDisruptionBudget",
    "ConfigMap",
    "Service",
    "ServiceAccount",
    "RoleBinding",
)
"""Kinds that are rendered and restored."""
REMEMBERED: Final = 5000
"""How many deletions are remembered."""
METADATA_ONLY: Final = frozenset({"ConfigMap", "Service", "ServiceAccount", "RoleBinding", "ReplicaSet"})
"""Kinds of which only the metadata is listed and kept: whose they are, and whether they changed."""
WATCHED_KINDS: Final = (KIND, *OWNED_KINDS, "ReplicaSet", "Job", "Pod")

Body = dict[str, Any]


def key_of(body: Body) -> Key:
    """Say which resource an object is about: itself, or the one its label names, or those that share pods."""
    meta = body["metadata"]
    if body["kind"] == KIND:
        return meta["namespace"], meta["name"]
    return meta["namespace"], meta.get("labels", {}).get(PROCESSOR_LABEL, "")


def is_shared(body: Body) -> bool:
    """Tell whether an object is one that resources share."""
    return key_of(body)[1].startswith(SHARED_PREFIX)


@dataclass(frozen=True, slots=True)
class Listing:
    """Everything of ours of one kind in a namespace (empty: in all), as it was at one resourceVersion."""

    kind: str
    namespace: str
    bodies: list[Body]
    version: int


class _Index(StrEnum):
    """By what objects are found beside their names."""

    CHILD = "child"
    """Of all but resources: by the key of the resource, or of the group, that their label names."""
    SHARED_POD = "shared pod"
    """By namespace."""
    SLOT = "slot"
    """Workloads whose pods an upgrade of the operator replaces (`slots.py`), by the key of their resource."""
    PROCESSOR_ID = "processor id"
    GROUP = "group"
    """Resources, by the key of the objects that they share."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """An object as JSON, which takes a quarter of the memory, beside what is looked at without parsing it.

    Pods stay as they are: all of them are looked through every two seconds.
    """

    uid: str
    version: int
    key: Key
    found_by: tuple[tuple[_Index, Hashable], ...]
    content: bytes | Body

    @classmethod
    def of(cls, body: Body) -> _Kept:
        content = body if body["kind"] == "Pod" else json.dumps(body, separators=(",", ":")).encode()
        return cls(body["metadata"]["uid"], version_of(body), key_of(body), tuple(_find_by(body)), content)

    @property
    def body(self) -> Body:
        """The object; of what is not a pod the caller's own copy."""
        if isinstance(self.content, dict):
            return self.content
        found: Body = json.loads(self.content)
        return found


def _find_by(body: Body) -> Iterator[tuple[_Index, Hashable]]:
    """List by what an object is found."""
    if body["kind"] == KIND:
        yield _Index.PROCESSOR_ID, processor_id_of(body)
        if (group := group_of(body)) is not None:
            yield _Index.GROUP, group
        return
    yield _Index.CHILD, key_of(body)
    if body["kind"] == "Pod" and is_shared(body):
        yield _Index.SHARED_POD, body["metadata"]["namespace"]
    if body["kind"] in ("Deployment", "StatefulSet") and SLOT_ANNOTATION in (body["metadata"].get("annotations") or {}):
        yield _Index.SLOT, key_of(body)


class Store:
    """Objects by kind, namespace and name, with the indexes that deciding needs."""

    def __init__(self, namespaces: tuple[str, ...] = ()) -> None:
        """Start empty; objects of `namespaces` will be put in, or of all where none is named."""
        self._namespaces = namespaces
        self._objects: defaultdict[str, dict[tuple[str, str], _Kept]] = defaultdict(dict)
        self._indexes: dict[_Index, defaultdict[Any, set[Where]]] = {each: defaultdict(set) for each in _Index}
        self._gone: dict[str, int] = {}

    def covers(self, namespace: str) -> bool:
        """Tell whether a resource there would be known."""
        return not self._namespaces or namespace in self._namespaces

    def put(self, body: Body) -> set[Key]:
        """Take an object as seen; say which resources it is about, and was; none when what is known is as new."""
        if not self.is_behind(body):
            return set()
        place, kept = where(body), _Kept.of(body)
        former = self._drop(place)
        self._objects[place[0]][place[1:]] = kept
        for index, value in kept.found_by:
            self._indexes[index][value].add(place)
        return {each.key for each in (kept, former) if each is not None}

    def remove(self, body: Body) -> None:
        """Forget an object, unless another of its name is there by now."""
        place, uid = where(body), body["metadata"]["uid"]
        self._gone[uid] = max(version_of(body), self._gone.pop(uid, 0))
        if len(self._gone) > REMEMBERED:
            del self._gone[next(iter(self._gone))]
        known = self._kept(place)
        if known is not None and known.uid == uid:
            self._drop(place)

    def is_behind(self, body: Body) -> bool:
        """Tell whether an object is newer than what is known of its place: a listing may be older than a deletion."""
        known = self._kept(where(body))
        if known is not None and known.version >= version_of(body):
            return False
        return version_of(body) > self._gone.get(body["metadata"]["uid"], -1)

    def find_newer(self, listing: Listing) -> list[Body]:
        """Say which objects of a listing are newer than what is known of them."""
        return [body for body in listing.bodies if self.is_behind(body)]

    def find_gone(self, listing: Listing) -> list[Body]:
        """Say which objects a listing proves to be gone, or not ours any more: known as older than it, and not in it.

        What was created or changed after the listing is known by a greater version, and judged by the next one. Each is
        answered as a watch tells a deletion: the last state, with a version at which the object was gone for certain.
        """
        present = {body["metadata"]["uid"] for body in listing.bodies}
        gone = [
            kept.body
            for (namespace, _), kept in self._objects[listing.kind].items()
            if listing.namespace in ("", namespace) and kept.uid not in present and kept.version <= listing.version
        ]
        return [{**body, "metadata": {**body["metadata"], "resourceVersion": str(listing.version)}} for body in gone]

    def _kept(self, place: Where) -> _Kept | None:
        return self._objects[place[0]].get(place[1:])

    def _drop(self, place: Where) -> _Kept | None:
        known = self._objects[place[0]].pop(place[1:], None)
        for index, value in known.found_by if known is not None else ():
            found = self._indexes[index]
            found[value].discard(place)
            if not found[value]:
                del found[value]  # names come and go as long as the process lives
        return known

    def _places(self, index: _Index, value: Hashable) -> list[Where]:
        return sorted(self._indexes[index].get(value, ()))

    @property
    def processors(self) -> int:
        """How many processors there are: resources that ask for the same processorId are one."""
        return len(self._indexes[_Index.PROCESSOR_ID])

    @property
    def slots(self) -> set[Key]:
        """Resources whose workload says that an upgrade of the operator replaces its pods."""
        return set(self._indexes[_Index.SLOT])

    def get(self, kind: str, namespace: str, name: str) -> Body | None:
        """Look an object up."""
        kept = self._kept(Where(kind, namespace, name))
        return None if kept is None else kept.body

    def resource(self, key: Key) -> Body | None:
        """Look a resource up."""
        return self.get(KIND, *key)

    def children(self, key: Key, *kinds: str) -> list[Body]:
        """List what is labelled with a resource's name, by name."""
        return self._bodies(place for place in self._places(_Index.CHILD, key) if place[0] in kinds)

    def shared_pods(self, namespace: str) -> list[Body]:
        """List the pods of a namespace that resources share, by name."""
        return self._bodies(self._places(_Index.SHARED_POD, namespace))

    def with_processor_id(self, processor_id: str) -> list[Body]:
        """List the resources that ask for a processorId."""
        return self._bodies(self._places(_Index.PROCESSOR_ID, processor_id))

    def in_group(self, group: Key) -> list[Key]:
        """List the resources that share pods, by name."""
        return [place[1:] for place in self._places(_Index.GROUP, group)]

    def _bodies(self, places: Iterable[Where]) -> list[Body]:
        return [self._objects[kind][namespace, name].body for kind, namespace, name in places]

    def all_of(self, kind: str) -> list[Body]:
        """List a kind."""
        # Copied at once: metrics are read on a thread of their own.
        return [kept.body for kept in list(self._objects[kind].values())]


def processor_id_of(body: Body) -> str:
    """Read the processorId: the resource's name unless the spec has one."""
    return str((body.get("spec") or {}).get("processorId") or body["metadata"]["name"])


def group_of(body: Body) -> Key | None:
    """Say which pods a resource shares: the key of the objects that are made for them; None: it has its own."""
    group = ((body.get("spec") or {}).get("worker") or {}).get("shared")
    return None if group is None else (body["metadata"]["namespace"], f"{SHARED_PREFIX}{group}")


_KEPT_SPEC: Final = {
    "Deployment": ("replicas", "template"),
    "StatefulSet": ("replicas", "template"),
    "Pod": ("nodeName",),
}
_UNREAD: Final = frozenset({"managedFields", "selfLink", "generateName"})


def slim(body: Body) -> Body:
    """Keep what is read, and no more: there may be thousands. Field ownership is asked for again when it matters."""
    kind = body["kind"]
    meta = {key: value for key, value in body["metadata"].items() if key not in _UNREAD}
    if kind == KIND:
        return {**body, "metadata": meta}
    if kind == "ReplicaSet":
        meta.pop("annotations", None)
    if kind in METADATA_ONLY:
        return {"kind": kind, "metadata": meta}
    spec = {key: value for key, value in (body.get("spec") or {}).items() if key in _KEPT_SPEC.get(kind, ())}
    if "template" in spec:
        spec["template"] = {"metadata": spec["template"].get("metadata") or {}}
    return {"kind": kind, "metadata": meta, "spec": spec, "status": body.get("status") or {}}
