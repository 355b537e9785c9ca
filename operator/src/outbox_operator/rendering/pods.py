"""PURE: the pod templates of worker, Spark driver, executors and short-lived jobs.

Every pod meets the Pod Security Standard `restricted`. Connections are Secrets mounted as files; the operator never
reads one. Pods that answer at /status get their resource's key the same way. Only a Spark driver gets an API token,
for its executors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from outbox_core.config import CONFIG_PATH, CONNECTIONS_PATH, HANDLER_PATH, KEY_PATH, PROCESSORS_PATH
from outbox_core.report import STATUS_PORT, TERMINATION_LOG
from outbox_operator.api.naming import (
    CONFIG_ANNOTATION,
    config_name,
    driver_name,
    labels_of,
    selector_of,
    shared_id,
    shared_label,
    shared_name,
)
from outbox_operator.api.observed import Role
from outbox_operator.api.overlay import merge, placement_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox_operator.api.keys import Keys
    from outbox_operator.api.resources import Processor, ResourceRequirements
    from outbox_operator.settings import Images

CONFIG_KEY: Final = CONFIG_PATH.name
EXECUTOR_KEY: Final = "executor.yaml"
EXECUTOR_PATH: Final = f"/etc/outbox/spark/{EXECUTOR_KEY}"
WORKER_CONTAINER: Final = "worker"
DRIVER_CONTAINER: Final = "driver"
DRIVER_GRACE: Final = 60
"""Seconds that a driver may take to end."""
KEY_VOLUME: Final = "operator-key"
EXECUTOR_CONTAINER: Final = "executor"
_CONFIG_MOUNT: Final = {"name": "config", "mountPath": str(CONFIG_PATH), "subPath": CONFIG_KEY, "readOnly": True}
DRIVER_PORT: Final = 7078
BLOCK_MANAGER_PORT: Final = 7079
UI_PORT: Final = 4040

DEFAULT_RESOURCES: Final[dict[Role, dict[str, Any]]] = {
    Role.WORKER: {"requests": {"cpu": "50m", "memory": "96Mi"}, "limits": {"memory": "512Mi"}},
    Role.DRIVER: {"requests": {"cpu": "250m", "memory": "1Gi"}, "limits": {"memory": "2Gi"}},
    Role.CLAIM: {"requests": {"cpu": "200m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
}


def pod_security(user: int | None) -> dict[str, Any]:
    """Build the pod's security context; without a `user` the cluster assigns one."""
    ids = {} if user is None else dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), user)
    return {
        "runAsNonRoot": True,
        **ids,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security() -> dict[str, Any]:
    """Build a container's security context."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _environment() -> list[dict[str, Any]]:
    return [
        _field("POD_NAME", "metadata.name"),
        _field("POD_UID", "metadata.uid"),
        _field("POD_NAMESPACE", "metadata.namespace"),
        _field("POD_IP", "status.podIP"),
    ]


def _probes(*, patience: int) -> dict[str, Any]:
    """Liveness must outlast a process that is frozen past its lease: the fence handles that, not a restart."""
    return {
        "readinessProbe": {
            "httpGet": {"path": "/readyz", "port": "http"},
            "periodSeconds": 2,
            "timeoutSeconds": 2,
            "failureThreshold": 2,
        },
        "livenessProbe": {
            "httpGet": {"path": "/livez", "port": "http"},
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": patience,
        },
    }


def _mounts(processor: Processor) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Build volumes and mounts of the configuration, and of all that the user's code needs."""
    volumes, mounts = build_mounts(processor, secrets_of(processor))
    volumes.insert(0, {"name": "config", "configMap": {"name": config_name(processor.name)}})
    mounts.insert(0, _CONFIG_MOUNT)
    return volumes, mounts


def secrets_of(processor: Processor) -> dict[str, str]:
    """Name the Secret of each connection."""
    secrets = {"source": processor.spec.source.connection.secret_ref.name}
    target = processor.spec.target
    if target is not None and target.connection is not None:
        secrets["target"] = target.connection.secret_ref.name
    return secrets


def build_mounts(processor: Processor, secrets: dict[str, str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Build volumes and mounts of connections, scratch space, the user's Python files and what Spark's pods share."""
    volumes, mounts = build_connections(secrets)
    config_map, spark = handler_config_map(processor), processor.spec.spark
    if config_map is not None:
        volumes.append({"name": "handler", "configMap": {"name": config_map}})
        mounts.append({"name": "handler", "mountPath": str(HANDLER_PATH), "readOnly": True})
    for volume in spark.volumes if spark is not None else ():
        volumes.append({"name": volume.name, "persistentVolumeClaim": {"claimName": volume.claim_name}})
        mounts.append({"name": volume.name, "mountPath": volume.mount_path})
    return volumes, mounts


def build_connections(secrets: dict[str, str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Build volumes and mounts of scratch space and of the Secret of each connection."""
    volumes: list[dict[str, Any]] = [{"name": "tmp", "emptyDir": {}}]
    mounts: list[dict[str, Any]] = [{"name": "tmp", "mountPath": "/tmp"}]  # noqa: S108
    for role, secret in secrets.items():
        volumes.append({"name": f"{role}-connection", "secret": {"secretName": secret, "defaultMode": 0o440}})
        mounts.append({"name": f"{role}-connection", "mountPath": str(CONNECTIONS_PATH / role), "readOnly": True})
    return volumes, mounts


def _with_key(pod: dict[str, Any], secret: str, keys: Keys) -> dict[str, Any]:
    """Give a pod what it needs to know the operator and Prometheus by; `secret` has its key."""
    (container,) = pod["spec"]["containers"]
    mounted = {"secretName": secret, "defaultMode": 0o440}
    pod["spec"]["volumes"].append({"name": KEY_VOLUME, "secret": mounted})
    container["volumeMounts"].append({"name": KEY_VOLUME, "mountPath": str(KEY_PATH.parent), "readOnly": True})
    container["env"].append({"name": "OUTBOX_METRICS_TOKEN_SHA256", "value": keys.metrics_hash})
    return pod


def handler_config_map(processor: Processor) -> str | None:
    """Name the ConfigMap with the user's Python files."""
    spec = processor.spec
    if spec.target is not None and spec.target.config_map is not None:
        return spec.target.config_map.name
    application = spec.spark.application if spec.spark is not None else None
    return application.config_map_ref.name if application is not None and application.config_map_ref else None


def _resources(asked: ResourceRequirements | None, role: Role) -> dict[str, Any]:
    if asked is None:
        return DEFAULT_RESOURCES[role]
    return asked.model_dump(by_alias=True, exclude_none=True)


def build_pod(
    name: str, images: Images, container: dict[str, Any], volumes: list[dict[str, Any]], role: Role
) -> dict[str, Any]:
    """Build what all pods have; `name` is the value of their label."""
    return {
        "metadata": {"labels": labels_of(name, role)},
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": pod_security(images.user),
            "containers": [container],
            "volumes": volumes,
        },
    }


def _container(name: str, image: str, mounts: list[dict[str, Any]], resources: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "env": _environment(),
        "resources": resources,
        "securityContext": container_security(),
        "terminationMessagePath": TERMINATION_LOG,
        "terminationMessagePolicy": "File",
        "volumeMounts": mounts,
    }


def build_worker_pod(processor: Processor, images: Images) -> dict[str, Any]:
    """Build the worker's pod template."""
    worker = processor.spec.worker
    volumes, mounts = _mounts(processor)
    container = _container(
        WORKER_CONTAINER, worker.image or images.worker, mounts, _resources(worker.resources, Role.WORKER)
    )
    container |= {"ports": [{"name": "http", "containerPort": STATUS_PORT}], **_probes(patience=6)}
    container["env"].append({"name": "OUTBOX_GRACE_SECONDS", "value": str(worker.termination_grace_period_seconds)})
    key = images.keys.secret_name(processor.name, processor.uid)
    template = _with_key(build_pod(processor.name, images, container, volumes, Role.WORKER), key, images.keys)
    template["spec"] |= {
        "terminationGracePeriodSeconds": worker.termination_grace_period_seconds,
        "topologySpreadConstraints": _spread(selector_of(processor.name, Role.WORKER)),
    }
    return _overlaid(template, worker.pod_template, processor, Role.WORKER)


def build_shared_pod(namespace: str, group: str, secrets: Sequence[str], images: Images) -> dict[str, Any]:
    """Build the pod template of several resources; `secrets` are those of all their connections.

    A Secret that is missing keeps nothing from starting: the processor that needs it says so.
    """
    name = shared_label(group)
    volumes: list[dict[str, Any]] = [
        {"name": "processors", "configMap": {"name": shared_name(group)}},
        {"name": "tmp", "emptyDir": {}},
    ]
    mounts: list[dict[str, Any]] = [
        {"name": "processors", "mountPath": str(PROCESSORS_PATH), "readOnly": True},
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108
    ]
    for number, secret in enumerate(secrets):
        source = {"secretName": secret, "defaultMode": 0o440, "optional": True}
        volumes.append({"name": f"connection-{number}", "secret": source})
        mounts.append({"name": f"connection-{number}", "mountPath": str(CONNECTIONS_PATH / secret), "readOnly": True})
    container = _container(WORKER_CONTAINER, images.worker, mounts, DEFAULT_RESOURCES[Role.WORKER])
    container |= {"ports": [{"name": "http", "containerPort": STATUS_PORT}], **_probes(patience=6)}
    container["args"] = ["--processors", str(PROCESSORS_PATH)]
    key = images.keys.secret_name(shared_name(group), shared_id(namespace, group))
    template = _with_key(build_pod(name, images, container, volumes, Role.WORKER), key, images.keys)
    template["spec"]["topologySpreadConstraints"] = _spread(selector_of(name, Role.WORKER))
    return template


def _spread(selector: dict[str, str]) -> list[dict[str, Any]]:
    """Keep replicas apart where there is a choice; with one replica too, so that scaling replaces no pod."""
    return [
        {
            "maxSkew": 1,
            "topologyKey": key,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": selector},
        }
        for key in ("kubernetes.io/hostname", "topology.kubernetes.io/zone")
    ]


def _overlaid(
    template: dict[str, Any], overlay: dict[str, Any] | None, processor: Processor, role: Role
) -> dict[str, Any]:
    """Lay the user's overlay over the template; the labels that the operator finds its pods by stay."""
    merged: dict[str, Any] = merge(template, overlay or {})
    merged["metadata"]["labels"] = {**merged["metadata"].get("labels", {}), **labels_of(processor.name, role)}
    return merged


def build_driver_pod(processor: Processor, images: Images) -> dict[str, Any]:
    """Build the Spark driver's pod template.

    Raises:
        ValueError: the resource has no block `spark`; the CRD's rules refuse that.

    """
    spark = processor.spec.spark
    if spark is None:
        raise ValueError("engine Spark without spark")
    volumes, mounts = _mounts(processor)
    mounts.append({"name": "config", "mountPath": EXECUTOR_PATH, "subPath": EXECUTOR_KEY, "readOnly": True})
    if not spark.shares(spark.query_checkpoint_path):
        # The database is the authority: a lost query checkpoint costs a plan, not a message.
        volumes.append({"name": "query-checkpoint", "emptyDir": {}})
        mounts.append({"name": "query-checkpoint", "mountPath": spark.query_checkpoint_path})
    container = _container(
        DRIVER_CONTAINER, spark.image or images.spark, mounts, _resources(spark.driver.resources, Role.DRIVER)
    )
    container |= {
        "ports": [
            {"name": "http", "containerPort": STATUS_PORT},
            {"name": "driver", "containerPort": DRIVER_PORT},
            {"name": "blockmanager", "containerPort": BLOCK_MANAGER_PORT},
            {"name": "ui", "containerPort": UI_PORT},
        ],
        **_probes(patience=12),
    }
    key = images.keys.secret_name(processor.name, processor.uid)
    template = _with_key(build_pod(processor.name, images, container, volumes, Role.DRIVER), key, images.keys)
    template["spec"] |= {
        "serviceAccountName": driver_name(processor.name),
        "automountServiceAccountToken": True,
        "terminationGracePeriodSeconds": DRIVER_GRACE,
    }
    return _overlaid(template, spark.driver.pod_template, processor, Role.DRIVER)


def build_job_pod(
    processor: Processor, images: Images, role: Role, arguments: list[str], config: str
) -> dict[str, Any]:
    """Build the pod of a short-lived job of the worker image; also for a Spark processor.

    Args:
        processor: the resource.
        images: for what names none.
        role: what the job is for.
        arguments: of the worker.
        config: processor.json, which the pod carries itself.

    """
    volumes, mounts = build_connections(secrets_of(processor))
    carried = {"path": CONFIG_KEY, "fieldRef": {"fieldPath": f"metadata.annotations['{CONFIG_ANNOTATION}']"}}
    volumes.insert(0, {"name": "config", "downwardAPI": {"items": [carried]}})
    mounts.insert(0, _CONFIG_MOUNT)
    image = processor.spec.worker.image or images.worker
    container = _container(WORKER_CONTAINER, image, mounts, DEFAULT_RESOURCES[Role.CLAIM])
    container["args"] = arguments
    template = build_pod(processor.name, images, container, volumes, role)
    template["metadata"]["annotations"] = {CONFIG_ANNOTATION: config}
    template["spec"] |= {"restartPolicy": "Never", "terminationGracePeriodSeconds": 5}
    spark = processor.spec.spark
    overlay = spark.driver.pod_template if spark is not None else processor.spec.worker.pod_template
    return _overlaid(template, placement_of(overlay), processor, role)
