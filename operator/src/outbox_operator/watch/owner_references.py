"""PURE: which resource a pod or job belongs to: the one at which its chain of owner references ends.

Labels say whose an object claims to be, and everyone who may write pods may write them. The chain (Pod, ReplicaSet,
Deployment, resource) is compared by uid, so the name of an object that was deleted and made again proves nothing.
"""

from __future__ import annotations

from typing import Any, Final

from outbox_operator.api.naming import shared_name
from outbox_operator.api.resources import KIND
from outbox_operator.watch.store import Body, Store, is_shared, key_of

LONGEST: Final = 3
"""Links from a pod of a Deployment to its resource; no chain of ours is longer."""


def controller_of(body: Body) -> dict[str, Any] | None:
    """Read the reference to what made an object and keeps it as it is."""
    references: list[dict[str, Any]] = body["metadata"].get("ownerReferences") or []
    return next((ref for ref in references if ref.get("controller")), None)


def owners_of(body: Body, store: Store) -> list[Body]:
    """List the controllers above an object, nearest first, as far as they are known."""
    found: list[Body] = []
    for _ in range(LONGEST):
        ref = controller_of(body)
        owner = None if ref is None else store.get(ref["kind"], body["metadata"]["namespace"], ref["name"])
        if ref is None or owner is None or owner["metadata"]["uid"] != ref["uid"]:
            break
        found.append(owner)
        body = owner
    return found


def is_own(body: Body, store: Store) -> bool:
    """Tell whether an object was made for the resource that its label names, or for those that share it."""
    owners = owners_of(body, store)
    if not owners or key_of(owners[-1]) != key_of(body):
        return False
    top: str = owners[-1]["kind"]
    if not is_shared(body):
        return top == KIND
    # What is shared ends at the Deployment, which several resources own.
    return (top, owners[-1]["metadata"]["name"]) == ("Deployment", shared_name(key_of(body)[1]))


def is_orphan(body: Body, resource: str, workload: str, store: Store) -> bool:
    """Tell whether an object was made by a resource or workload of this name that is gone, one of before for example.

    Kubernetes deletes it soon, because what controls it is not there. One of these that is there is in the store.
    """
    link = controller_of([body, *owners_of(body, store)][-1])
    if link is None:
        return False
    if link["kind"] == "ReplicaSet":
        return bool(link["name"].startswith(f"{workload}-"))
    return (link["kind"], link["name"]) in ((KIND, resource), ("Deployment", workload), ("StatefulSet", workload))


def may_be_of(body: Body, uid: str, store: Store) -> bool:
    """Tell whether an object may have been made for a resource that is gone or going.

    What made the object goes one after the other, so a chain that breaks off proves nothing; one that ends at another
    resource does, also at one of the same name, and so does an object that nothing made.
    """
    links = [controller_of(each) for each in (body, *owners_of(body, store))]
    resources = [link["uid"] for link in links if link is not None and link["kind"] == KIND]
    return uid in resources if resources else links[0] is not None
