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
_ONE_OF: Final = {"volumes", "env", "topologySpreadConstraints"}
"""An overlay replaces an item of these lists whole: half a volume and half another one make none that works."""

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
"""The parts of a pod's spec that say where and how it may run, not what it runs."""


def check_overlay(overlay: dict[str, Any]) -> dict[str, Any]:
    """Check the shape that merging relies on; what the fields mean is the API server's to judge.

    Raises:
        ValueError: an object is none, or an item of a list that is merged by a key lacks it.

    """
    metadata = overlay.get("metadata", {})
    objects = {"metadata": metadata, "spec": overlay.get("spec", {})}
    if isinstance(metadata, dict):
        objects |= {f"metadata.{name}": metadata.get(name, {}) for name in ("labels", "annotations")}
    wrong = [place for place, value in objects.items() if not isinstance(value, dict)]
    if wrong:
        raise ValueError(f"{wrong[0]} must be an object")
    _check_lists(overlay, "")
    return overlay


def _check_lists(node: Any, path: str) -> None:
    if not isinstance(node, dict):
        return
    for field, value in node.items():
        here = f"{path}.{field}" if path else field
        for index, item in enumerate(value if isinstance(value, list) else ()):
            key = _KEYS.get(field)
            if key is not None and not (isinstance(item, dict) and isinstance(item.get(key), str | int)):
                raise ValueError(f"{here}[{index}] must be an object with {key!r}")
            _check_lists(item, f"{here}[{index}]")
        _check_lists(value, here)


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
