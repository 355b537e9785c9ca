"""PURE: renders everything that the operator makes for one resource. No clock, no cluster: the same in, the same out.

A hash of what is rendered is what tells a change from no change: live objects, which the API server fills with
defaults, are never compared with rendered ones. The template's hash, which decides whether pods are replaced, leaves
out what a running pod need not be restarted for: the generation, a person's decision about a conflict, swept claims.
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from outbox_core.config import KEY_PATH, ProcessorConfig, Resolution
from outbox_core.spec import Engine
from outbox_operator.api.naming import (
    DECISION_LABEL,
    INTENT_ANNOTATION,
    RELEASED_ANNOTATION,
    RENDERED_ANNOTATION,
    SLOT_ANNOTATION,
    TEMPLATE_LABEL,
    build_meta,
    build_object,
    child_name,
    config_name,
    driver_name,
    labels_of,
    selector_of,
    workload_name,
)
from outbox_operator.api.observed import Origin, Role
from outbox_operator.decision.rollout import Rollout, format_rendered
from outbox_operator.rendering.pods import CONFIG_KEY, EXECUTOR_KEY, build_driver_pod, build_job_pod, build_worker_pod
from outbox_operator.rendering.spark import build_executor_template, build_plan, build_rights

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox_operator.api.keys import Keys
    from outbox_operator.api.resources import Processor
    from outbox_operator.settings import Images

JOB_SECONDS: Final = {Role.CLAIM: 60, Role.HAND_OVER: 60, Role.RELEASE: 30}
"""How long a job may run before it counts as failed."""
RENDERING: Final = 1
"""Raised when pods that an earlier version rendered must be replaced although neither image nor spec changed."""


def build_config(
    processor: Processor, images: Images, resolution: Resolution | None = None, sweep_uids: Sequence[str] = ()
) -> ProcessorConfig:
    """Build what a worker or driver reads at its start."""
    spec = processor.spec
    return ProcessorConfig(
        resource=processor.ref,
        generation=processor.generation,
        processor_id=processor.processor_id,
        engine=spec.engine,
        source=spec.source,
        start_from=spec.start_from,
        delivery=spec.delivery,
        target=spec.target,
        spark=build_plan(processor, spec.spark, images) if spec.spark is not None else None,
        rebuild_of=spec.rebuild_of,
        resolution=resolution,
        sweep_uids=list(sweep_uids),
    )


def dump_config(processor: Processor, images: Images) -> dict[str, Any]:
    """Write what of the configuration replaces pods, without defaults: a field that a later version adds does not."""
    return build_config(processor, images).model_dump(mode="json", exclude={"generation"}, exclude_defaults=True)


def format_config(config: ProcessorConfig) -> str:
    """Write processor.json, without what is as it is by default: an older worker need not know such a field."""
    return config.model_dump_json(by_alias=True, exclude_defaults=True, indent=1)


def hash_of(value: Any) -> str:
    """Hash a rendered value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]


def build_template(processor: Processor, images: Images) -> dict[str, Any]:
    """Build the pod template, labelled with its hash."""
    build = build_worker_pod if processor.spec.engine is Engine.WORKER else build_driver_pod
    template = build(processor, images)
    extra = build_executor_template(processor, processor.spec.spark, images) if processor.spec.spark is not None else ""
    template["metadata"]["labels"][TEMPLATE_LABEL] = hash_of([template, dump_config(processor, images), extra])
    return template


def image_of(template: dict[str, Any]) -> str:
    """Read the image of the main container, which is the first; empty where an overlay left no list of containers."""
    containers = template["spec"].get("containers")
    return str(containers[0].get("image", "")) if isinstance(containers, list) and containers else ""


def build_origin(processor: Processor, images: Images, template: dict[str, Any]) -> Origin:
    """Say what a pod template is rendered for."""
    spec = processor.spec.model_dump(mode="json", exclude_defaults=True, exclude={"suspend", "hand_over_to"})
    worker = spec.pop("worker", {})
    worker.pop("replicas", None)
    keys = images.keys
    secret = keys.secret_name(processor.name, processor.uid)
    came = [RENDERING, image_of(template), secret, keys.metrics_hash, processor.cluster, images.user]
    return Origin(processor.generation, hash_of([spec, worker]), hash_of(came))


def build_config_map(
    processor: Processor, images: Images, resolution: Resolution | None, sweep_uids: Sequence[str]
) -> dict[str, Any]:
    """Build the ConfigMap that the pods mount."""
    data = {CONFIG_KEY: format_config(build_config(processor, images, resolution, sweep_uids))}
    if processor.spec.spark is not None:
        data[EXECUTOR_KEY] = build_executor_template(processor, processor.spec.spark, images)
    return build_object("ConfigMap", build_meta(processor, config_name(processor.name)), data=data)


def build_workload(
    processor: Processor, images: Images, replicas: int, decision_label: str = "", rollout: Rollout | None = None
) -> dict[str, Any]:
    """Build the Deployment of a worker or the StatefulSet of a driver, with the pod template that `rollout` says.

    Neither ever adds a pod before one was told to go: two of one resource would only wait for each other's lease.
    A process reads a person's decision at its start, so a corrected one replaces the pods that wait with the former.
    """
    template = build_template(processor, images)
    rollout = rollout or Rollout(build_origin(processor, images, template))
    template = rollout.template or template
    if decision_label:
        meta = template["metadata"]
        template = {**template, "metadata": {**meta, "labels": {**meta["labels"], DECISION_LABEL: decision_label}}}
    notes = {RENDERED_ANNOTATION: format_rendered(rollout.origin, template)}
    if rollout.slot:
        notes[SLOT_ANNOTATION] = rollout.slot
    meta = {**build_meta(processor, workload_name(processor)), "annotations": notes}
    if processor.spec.engine is Engine.WORKER:
        return build_deployment(meta, processor.name, replicas, template)
    spec = _build_replicas(selector_of(processor.name, Role.DRIVER), replicas, template)
    only = {"serviceName": driver_name(processor.name), "podManagementPolicy": "Parallel"}
    return build_object("StatefulSet", meta, spec=spec | only)


def build_deployment(
    metadata: dict[str, Any], label: str, replicas: int, template: dict[str, Any], *, at_once: bool = False
) -> dict[str, Any]:
    """Build a Deployment of workers with this label; `at_once`: former pods end before others begin, not one by one."""
    one_by_one = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    spec = _build_replicas(selector_of(label, Role.WORKER), replicas, template)
    spec["strategy"] = {"type": "Recreate"} if at_once else one_by_one
    return build_object("Deployment", metadata, spec=spec)


def _build_replicas(selector: dict[str, str], replicas: int, template: dict[str, Any]) -> dict[str, Any]:
    return {
        "replicas": replicas,
        "revisionHistoryLimit": 2,
        "selector": {"matchLabels": selector},
        "template": template,
    }


def build_budget(metadata: dict[str, Any], label: str) -> dict[str, Any]:
    """Build what lets a drain take one replica with this label at a time; a single one is never held up by it."""
    spec = {
        "maxUnavailable": 1,
        # A pod that is not ready protects nothing.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": selector_of(label, Role.WORKER)},
    }
    return build_object("PodDisruptionBudget", metadata, spec=spec)


def build_owned(
    processor: Processor,
    images: Images,
    replicas: int,
    resolution: Resolution | None,
    sweep_uids: Sequence[str],
    *,
    decision_label: str = "",
    rollout: Rollout | None = None,
) -> list[dict[str, Any]]:
    """Build all that shall exist for a resource, in the order in which it is made."""
    if processor.spec.worker.shared is not None:
        return []  # `shared.py` makes what it shares
    if rollout is not None and rollout.template is not None:
        # A driver that is started again makes executors of its own image.
        images = replace(images, spark=image_of(rollout.template))
    owned = [build_config_map(processor, images, resolution, sweep_uids)]
    if processor.spec.spark is not None:
        owned += build_rights(processor, images)
    if images.budgets and processor.spec.engine is Engine.WORKER and processor.spec.worker.replicas > 1:
        owned.append(build_budget(build_meta(processor, workload_name(processor)), processor.name))
    owned.append(build_workload(processor, images, replicas, decision_label, rollout))
    return [stamped(manifest) for manifest in owned]


def stamped(manifest: dict[str, Any]) -> dict[str, Any]:
    """Write the manifest's own hash into it."""
    notes = {**manifest["metadata"].get("annotations", {}), INTENT_ANNOTATION: hash_of(manifest)}
    meta = {**manifest["metadata"], "annotations": notes}
    return {**manifest, "metadata": meta}


def build_key(processor: Processor, keys: Keys) -> dict[str, Any]:
    """Build the Secret with the resource's key."""
    meta = build_meta(processor, keys.secret_name(processor.name, processor.uid))
    return build_key_secret(meta, keys.of(processor.uid))


def build_key_secret(metadata: dict[str, Any], key: bytes) -> dict[str, Any]:
    """Build a Secret with a key; it is created and never changed, so that it need not be read."""
    data = {KEY_PATH.name: base64.b64encode(key).decode()}
    return build_object("Secret", metadata, type="Opaque", immutable=True, data=data)


def build_job(
    processor: Processor, images: Images, name: str, role: Role, sweep_uids: Sequence[str] = ()
) -> dict[str, Any]:
    """Build a short-lived job that tries the claim, which those of `sweep_uids` may not keep, or gives it away or up.

    Its configuration is in it: an operator that ends between two objects would leave one without, and a resource that
    is gone, or that shares its pods, has no ConfigMap.
    """
    arguments = {
        Role.CLAIM: ["--try-claim"],
        Role.HAND_OVER: ["--hand-over", str(processor.successor)],
        Role.RELEASE: ["--release-claim"],
    }
    config = build_config(processor, images, sweep_uids=sweep_uids).model_copy(update={"spark": None})
    spec = {
        "backoffLimit": 0,
        "activeDeadlineSeconds": JOB_SECONDS[role],
        "ttlSecondsAfterFinished": 300,
        "template": build_job_pod(processor, images, role, arguments[role], format_config(config)),
    }
    return build_object("Job", {**build_meta(processor, name), "labels": labels_of(processor.name, role)}, spec=spec)


def build_release(processor: Processor, images: Images) -> dict[str, Any]:
    """Build the job that gives up the claim of a deleted resource, suspended.

    Nothing owns the job, for its resource is gone; it ends by itself and is swept by its time to live.
    """
    name = child_name(processor.name, f"release-{processor.uid[:5]}")
    job = build_job(processor, images, name, Role.RELEASE)
    job["metadata"].pop("ownerReferences")
    job["metadata"]["annotations"] = {RELEASED_ANNOTATION: processor.uid}
    job["spec"] |= {"suspend": True, "ttlSecondsAfterFinished": 10}
    return job
