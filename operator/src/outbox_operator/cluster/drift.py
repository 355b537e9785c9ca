"""PURE: finds what another client added to an object of ours, as the API server's `managedFields` tell it.

Server-side apply restores every field that we set. A field that we do not set and another client added (an environment
variable, a key in a ConfigMap) stays theirs; this says which those are, as a JSON patch that takes them out. Never a
comparison of live with rendered: defaulted fields would never be equal.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

FIELD_MANAGER: Final = "outbox-operator"
_OTHERS: Final = frozenset({"kube-controller-manager", "kube-scheduler", "before-first-apply"})
"""Cluster components that may write to our objects."""

_OURS: Final = {
    "Deployment": ("spec",),
    "StatefulSet": ("spec",),
    "PodDisruptionBudget": ("spec",),
    "Service": ("spec",),
    "ConfigMap": ("data", "binaryData"),
    "RoleBinding": ("subjects",),
    "ServiceAccount": ("automountServiceAccountToken",),
}
_LEFT_ALONE: Final = "/spec/template/metadata"
"""`kubectl rollout restart` writes here, and is welcome."""


def build_removal(live: dict[str, Any]) -> list[dict[str, Any]]:
    """Build the JSON patch that takes foreign fields out of a live object; empty when there are none."""
    entries = [entry for entry in live["metadata"].get("managedFields") or () if not entry.get("subresource")]
    ours = [entry.get("fieldsV1") or {} for entry in entries if entry["manager"] == FIELD_MANAGER]
    pointers: set[str] = set()
    for entry in entries:
        if entry["manager"] not in (FIELD_MANAGER, *_OTHERS):
            theirs = entry.get("fieldsV1") or {}
            roots = {key: theirs[key] for name in _OURS.get(live["kind"], ()) if (key := f"f:{name}") in theirs}
            pointers.update(_find_foreign(roots, ours, live, ""))
    removals = [{"op": "remove", "path": pointer} for pointer in _deepest_last_index_first(pointers)]
    if not removals:
        return []
    version = live["metadata"]["resourceVersion"]
    return [{"op": "test", "path": "/metadata/resourceVersion", "value": version}, *removals]


def _find_foreign(theirs: dict[str, Any], ours: list[dict[str, Any]], node: Any, pointer: str) -> Iterator[str]:
    """Find the outermost of their fields below `node` that are not ours, and are there (still)."""
    for key, below in theirs.items():
        step = None if key == "." else _find_step(node, key)
        if step is None:
            continue
        here = f"{pointer}/{str(step).replace('~', '~0').replace('/', '~1')}"
        shared = [fields[key] for fields in ours if key in fields]
        if here == _LEFT_ALONE:
            continue
        if not shared and (not below or "." in below):
            yield here  # set by them, not only something in it
        else:
            yield from _find_foreign(below, shared, node[step], here)


def _find_step(node: Any, key: str) -> str | int | None:
    """Find what a key of `managedFields` names in a live object: a field, or an item by its keys or its value."""
    kind, _, name = key.partition(":")
    if kind == "f":
        return name if isinstance(node, dict) and name in node else None
    if kind not in ("k", "v") or not isinstance(node, list):
        return None
    wanted = json.loads(name)
    for index, item in enumerate(node):
        if item == wanted if kind == "v" else isinstance(item, dict) and wanted.items() <= item.items():
            return index
    return None


def _deepest_last_index_first(pointers: set[str]) -> list[str]:
    """Order removals so that none moves another's index."""
    return sorted(
        pointers,
        key=lambda p: [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in p.split("/")],
        reverse=True,
    )
