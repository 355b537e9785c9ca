"""What a listing proves about objects that a watch has told of, or has not: by resourceVersions alone."""

from __future__ import annotations

from typing import Any

import pytest

from outbox_operator.watch.store import Listing, Store

Body = dict[str, Any]


def pod(name: str, version: int, uid: str = "", namespace: str = "shop", kind: str = "Pod") -> Body:
    labels = {"outbox-operator.dev/processor": "orders"}
    meta = {"name": name, "namespace": namespace, "uid": uid or name, "resourceVersion": str(version), "labels": labels}
    return {"kind": kind, "metadata": meta}


def seen(*bodies: Body, deleted: Body | None = None) -> Store:
    """A store to which a watch has told all of these, and then a deletion."""
    store = Store()
    for body in bodies:
        store.put(body)
    if deleted is not None:
        store.remove(deleted)
    return store


def listed(*bodies: Body, version: int = 7, namespace: str = "shop", kind: str = "Pod") -> Listing:
    return Listing(kind, namespace, list(bodies), version)


def names(bodies: list[Body]) -> list[str]:
    return [body["metadata"]["name"] for body in bodies]


GONE = [
    pytest.param(seen(pod("a", 5)), listed(), ["a"], id="known before the listing, and not in it"),
    pytest.param(seen(pod("a", 7)), listed(), ["a"], id="its last change is the listing's own version"),
    pytest.param(seen(pod("a", 8)), listed(), [], id="created after the listing"),
    pytest.param(seen(pod("a", 5), pod("a", 8)), listed(), [], id="changed after a listing that did not select it"),
    pytest.param(seen(pod("a", 5)), listed(pod("a", 5)), [], id="listed as it is known"),
    pytest.param(seen(pod("a", 8)), listed(pod("a", 5)), [], id="listed as it was"),
    pytest.param(seen(pod("a", 5, "old")), listed(pod("a", 6, "new")), ["a"], id="another of its name is there"),
    pytest.param(seen(pod("a", 5, "old"), pod("a", 9, "new")), listed(), [], id="made anew after the listing"),
    pytest.param(seen(pod("a", 5, namespace="else")), listed(), [], id="of a namespace that was not listed"),
    pytest.param(seen(pod("a", 5, namespace="else")), listed(namespace=""), ["a"], id="all namespaces were listed"),
    pytest.param(seen(pod("a", 5, kind="Job")), listed(), [], id="of a kind that was not listed"),
    pytest.param(seen(pod("a", 5)), listed(version=0), [], id="a listing without a version proves nothing"),
]


@pytest.mark.parametrize(("store", "listing", "gone"), GONE)
def test_what_is_older_than_a_listing_and_not_in_it_is_gone(store: Store, listing: Listing, gone: list[str]):
    assert names(store.find_gone(listing)) == gone


NEWER = [
    pytest.param(seen(), listed(pod("a", 5)), ["a"], id="not told of"),
    pytest.param(seen(pod("a", 5)), listed(pod("a", 6)), ["a"], id="changed"),
    pytest.param(seen(pod("a", 6)), listed(pod("a", 6)), [], id="the same"),
    pytest.param(seen(pod("a", 8)), listed(pod("a", 6)), [], id="changed after the listing"),
    pytest.param(seen(pod("a", 5), deleted=pod("a", 8)), listed(pod("a", 5)), [], id="deleted after the listing"),
    pytest.param(seen(pod("a", 8, "new")), listed(pod("a", 5, "old")), [], id="made anew after the listing"),
    pytest.param(seen(pod("a", 5, "old")), listed(pod("a", 6, "new")), ["a"], id="made anew before it"),
]


@pytest.mark.parametrize(("store", "listing", "newer"), NEWER)
def test_what_a_listing_has_newer_is_taken(store: Store, listing: Listing, newer: list[str]):
    assert names(store.find_newer(listing)) == newer


def test_what_a_listing_proved_gone_stays_gone_for_events_that_come_late():
    store = seen(pod("a", 3))
    (gone,) = store.find_gone(listed(version=7))
    store.remove(gone)
    assert not store.put(pod("a", 6)), "it was so before the listing"
    assert store.all_of("Pod") == []
    assert store.put(pod("a", 8)), "its label was taken off, and put back after the listing"
