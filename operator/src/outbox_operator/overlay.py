"""PURE: lays a user's partial pod template over the generated one.

Objects are merged key by key; lists of things that Kubernetes itself merges by a key (containers by name, mounts by
path) are merged by it; other lists are replaced; null removes. This is strategic merge for the part of a pod that
people change, without the schema that the full algorithm needs.
"""

from __future__ import annotations

from typing import Any, Final

_KEYS: Final = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}
_ONE_OF: Final = {"volumes", "env"}
"""An item of these lists names its kind by its one other key: an overlay replaces it whole."""

PLACEMENT: Final = (
    "affinity",
    "dnsConfig",
    "dnsPolicy",
    "hostAliases",
    "imagePullSecrets",
    "nodeSelector",
    "priorityClassName",
    "runtimeClassName",
    "schedulerName",
    "tolerations",
)
"""The parts of a pod's spec that say where and how it may run, whatever it runs."""


def merge(base: Any, overlay: Any, field: str = "") -> Any:
    """Lay `overlay` over `base`; neither is changed."""
    if isinstance(base, dict) and isinstance(overlay, dict):
        merged = {key: value for key, value in base.items() if key not in overlay}
        for key, value in overlay.items():
            if value is not None:
                merged[key] = merge(base[key], value, key) if key in base else value
        return merged
    if isinstance(base, list) and isinstance(overlay, list) and field in _KEYS:
        return _merge_list(base, overlay, field)
    return overlay


def _merge_list(base: list[Any], overlay: list[Any], field: str) -> list[Any]:
    key = _KEYS[field]
    over = {item.get(key): item for item in overlay if isinstance(item, dict)}
    merged = []
    for item in base:
        other = over.pop(item.get(key), None)
        if other is None:
            merged.append(item)
        else:
            merged.append(other if field in _ONE_OF else merge(item, other))
    return merged + list(over.values())


def placement_of(overlay: dict[str, Any] | None) -> dict[str, Any]:
    """Reduce an overlay to where and how its pods may run: what a short-lived job of the resource needs of it."""
    if not overlay:
        return {}
    spec = {key: value for key, value in (overlay.get("spec") or {}).items() if key in PLACEMENT}
    meta = {k: v for k, v in (overlay.get("metadata") or {}).items() if k in ("labels", "annotations")}
    return {"metadata": meta, "spec": spec}
