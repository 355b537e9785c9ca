"""PURE: finds what another client added to an object of ours, as the API server's `managedFields` tell it.

Server-side apply restores every field that we set. A field that we do not set and another client added (an environment
variable, a key in a ConfigMap) stays theirs; this says which those are, as a JSON patch that takes them out. Never a
comparison of live with rendered: defaulted fields would never be equal.
"""

from __future__ import annotations

import json
from typing import Any, Final

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
_LEFT_ALONE: Final = (("spec", "template", "metadata"),)
"""`kubectl rollout restart` writes here, and is welcome."""


def build_removal(live: dict[str, Any]) -> list[dict[str, Any]]:
    """Build the JSON patch that takes foreign fields out of a live object; empty when there are none."""
    foreign, own = _owned_paths(live)
    found = [path for path in foreign if path not in own and path[0] in _OURS.get(live.get("kind", ""), ())]
    found = [path for path in found if not any(path[: len(left)] == left for left in _LEFT_ALONE)]
    outermost = [path for path in found if not any(path[:n] in found for n in range(1, len(path)))]
    pointers = [pointer for path in outermost if (pointer := _pointer(live, path)) is not None]
    removals = [{"op": "remove", "path": pointer} for pointer in _deepest_last_index_first(pointers)]
    if not removals:
        return []
    version = live["metadata"]["resourceVersion"]
    return [{"op": "test", "path": "/metadata/resourceVersion", "value": version}, *removals]


Path = tuple[str, ...]


def _owned_paths(live: dict[str, Any]) -> tuple[set[Path], set[Path]]:
    foreign: set[Path] = set()
    own: set[Path] = set()
    for entry in live["metadata"].get("managedFields") or ():
        if entry.get("subresource") or entry["manager"] in _OTHERS:
            continue
        mine = entry["manager"] == FIELD_MANAGER
        _collect(entry.get("fieldsV1") or {}, (), own if mine else foreign, inner=mine)
    return foreign, own


def _collect(fields: dict[str, Any], prefix: Path, into: set[Path], *, inner: bool) -> None:
    """Collect owned paths: for a foreign manager leaves and whole items, for ours every path on the way too."""
    for key, below in fields.items():
        if key == ".":
            into.add(prefix)
            continue
        name = key.removeprefix("f:")
        path = (*prefix, name)
        if not below or inner:
            into.add(path)
        if below:
            _collect(below, path, into, inner=inner)


def _pointer(live: dict[str, Any], path: Path) -> str | None:
    """Find the path in the live object; None when it is not there (any more)."""
    node: Any = live
    parts: list[str] = []
    for step in path:
        if step.startswith(("k:", "v:")):
            index = _find(node, step)
            if index is None:
                return None
            parts.append(str(index))
            node = node[index]
        elif isinstance(node, dict) and step in node:
            parts.append(step.replace("~", "~0").replace("/", "~1"))
            node = node[step]
        else:
            return None
    return "/" + "/".join(parts)


def _find(items: Any, step: str) -> int | None:
    if not isinstance(items, list):
        return None
    wanted = json.loads(step[2:])
    for index, item in enumerate(items):
        if step.startswith("v:") and item == wanted:
            return index
        if step.startswith("k:") and isinstance(item, dict) and all(item.get(k) == v for k, v in wanted.items()):
            return index
    return None


def _deepest_last_index_first(pointers: list[str]) -> list[str]:
    """Order removals so that none moves another's index."""
    return sorted(
        set(pointers),
        key=lambda p: [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in p.split("/")],
        reverse=True,
    )
