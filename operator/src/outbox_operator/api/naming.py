"""PURE: names, labels and annotations of everything the operator makes."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final

from outbox_core.spec import Engine
from outbox_operator.api.resources import API_VERSION, GROUP, KIND, PLURAL, VERSION, Processor

if TYPE_CHECKING:
    from outbox_core.config import Resolution
    from outbox_operator.api.observed import Role

PROCESSOR_LABEL: Final = f"{GROUP}/processor"
ROLE_LABEL: Final = f"{GROUP}/role"
INTENT_ANNOTATION: Final = f"{GROUP}/intent"
"""Hash of the manifest as rendered, on every owned object."""
TEMPLATE_LABEL: Final = f"{GROUP}/template"
"""Hash of pod template and configuration, on pods: tells old pods from new ones."""
RENDERED_ANNOTATION: Final = f"{GROUP}/rendered"
"""The pod template as rendered, and what for (`rollout.py`), on workloads: a later version of the operator keeps it."""
SLOT_ANNOTATION: Final = f"{GROUP}/rollout-slot"
"""On workloads whose pods an upgrade of the operator replaces: they count against its budget until it is gone."""
RELEASED_ANNOTATION: Final = f"{GROUP}/released"
"""Uid of the deleted resource whose claim a job gives up, on the job."""
CONFIG_ANNOTATION: Final = f"{GROUP}/config"
"""processor.json of a deleted resource, on the pod that gives up its claim."""
DECISION_LABEL: Final = f"{GROUP}/decision"
"""Hash of a person's decision about a conflict, on pods that were started with it."""
MEMBERS_ANNOTATION: Final = f"{GROUP}/members"
"""On shared pods: which resources they run, each with its uid and the hashes that other pods have as labels."""
SHARED_PREFIX: Final = "shared."
"""How the label `processor` of shared objects begins: the name of a resource has no dot."""
MANAGED_BY: Final = "outbox-operator"
SELECTOR: Final = f"app.kubernetes.io/managed-by={MANAGED_BY},{PROCESSOR_LABEL}"
"""What the informers watch of other kinds."""

RESOURCES: Final = {
    "Pod": ("", "v1", "pods"),
    "Secret": ("", "v1", "secrets"),
    "Service": ("", "v1", "services"),
    "ConfigMap": ("", "v1", "configmaps"),
    "ServiceAccount": ("", "v1", "serviceaccounts"),
    "Event": ("", "v1", "events"),
    "Deployment": ("apps", "v1", "deployments"),
    "ReplicaSet": ("apps", "v1", "replicasets"),
    "StatefulSet": ("apps", "v1", "statefulsets"),
    "Job": ("batch", "v1", "jobs"),
    "PodDisruptionBudget": ("policy", "v1", "poddisruptionbudgets"),
    "RoleBinding": ("rbac.authorization.k8s.io", "v1", "rolebindings"),
    "Lease": ("coordination.k8s.io", "v1", "leases"),
    KIND: (GROUP, VERSION, PLURAL),
}
"""API group (empty: the core), version and plural of each kind that is asked for or made."""


def child_name(name: str, suffix: str, limit: int = 63) -> str:
    """Name an owned object; a name that would be too long is cut and told apart by a hash."""
    full = f"{name}-{suffix}"
    if len(full) <= limit:
        return full
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name[: limit - len(suffix) - 10].rstrip('-.')}-{digest}-{suffix}"


def workload_name(processor: Processor) -> str:
    """Name the Deployment or StatefulSet, be it the resource's own or shared."""
    if processor.spec.worker.shared is not None:
        return shared_name(pods_label(processor))
    if processor.spec.engine is Engine.WORKER:
        return child_name(processor.name, "worker")
    return driver_name(processor.name)


def pods_label(processor: Processor) -> str:
    """Label the pods that run a resource: with its name, or as what resources share."""
    group = processor.spec.worker.shared
    return processor.name if group is None else f"{SHARED_PREFIX}{group}"


def shared_name(label: str) -> str:
    """Name the Deployment that resources share, its ConfigMap and its budget."""
    return child_name(label.removeprefix(SHARED_PREFIX), "shared")


def shared_id(namespace: str, label: str) -> str:
    """Say of what the key of a shared pod is derived, where another pod's is of its resource's uid."""
    return f"{namespace}/{label}"


def driver_name(name: str) -> str:
    """Name the driver's StatefulSet, Service, service account and role binding; 52: a pod label adds a hash to it."""
    return child_name(name, "driver", 52)


def config_name(name: str) -> str:
    """Name the ConfigMap with processor.json."""
    return child_name(name, "processor")


def labels_of(name: str, role: Role | None = None) -> dict[str, str]:
    """Label an owned object."""
    labels = {
        "app.kubernetes.io/name": "outbox-processor",
        "app.kubernetes.io/instance": name,
        "app.kubernetes.io/managed-by": MANAGED_BY,
        PROCESSOR_LABEL: name,
    }
    return labels if role is None else {**labels, ROLE_LABEL: role.value}


def label_decision(resolution: Resolution | None) -> str:
    """Write a person's decision about a conflict as a label's value; empty without one."""
    if resolution is None:
        return ""
    return hashlib.sha256(resolution.model_dump_json().encode()).hexdigest()[:16]


def selector_of(name: str, role: Role) -> dict[str, str]:
    """Select the pods of a workload."""
    return {PROCESSOR_LABEL: name, ROLE_LABEL: role.value}


def build_object(kind: str, metadata: dict[str, Any], **rest: Any) -> dict[str, Any]:
    """Build an object of a kind as the API server takes it."""
    group, version, _ = RESOURCES[kind]
    return {"apiVersion": f"{group}/{version}".lstrip("/"), "kind": kind, "metadata": metadata, **rest}


def build_meta(processor: Processor, name: str) -> dict[str, Any]:
    """Build the metadata of an owned object, which goes when the resource goes, with or without the operator."""
    return {
        "name": name,
        "namespace": processor.namespace,
        "labels": labels_of(processor.name),
        "ownerReferences": [{**refer_to(processor), "controller": True, "blockOwnerDeletion": False}],
    }


def refer_to(processor: Processor) -> dict[str, Any]:
    """Refer to a resource, as its objects and Events do."""
    return {"apiVersion": API_VERSION, "kind": KIND, "name": processor.name, "uid": processor.uid}
