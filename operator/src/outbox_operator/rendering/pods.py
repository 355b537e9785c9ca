"""PURE: the pod templates of worker, Spark driver, executors and short-lived jobs.

Every pod meets the Pod Security Standard `restricted`. Connections are Secrets mounted as files; the operator never
reads one. Pods that answer at /status get their resource's key the same way. Only a Spark driver gets an API token,
for its executors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
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
    shared_name,
)
from outbox_operator.api.observed import Role
from outbox_operator.api.overlay import merge, placement_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import PurePath

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
DRIVER_PORT: Final = 7078
BLOCK_MANAGER_PORT: Final = 7079
UI_PORT: Final = 4040

DEFAULT_RESOURCES: Final[dict[Role, dict[str, Any]]] = {
    Role.WORKER: {"requests": {"cpu": "50m", "memory": "96Mi"}, "limits": {"memory": "512Mi"}},
    Role.DRIVER: {"requests": {"cpu": "250m", "memory": "1Gi"}, "limits": {"memory": "2Gi"}},
    Role.CLAIM: {"requests": {"cpu": "200m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
}


_SECURITY: Final = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
"""Of every container."""


@dataclass(frozen=True, slots=True)
class Mounts:
    """The volumes of a pod, and where its container has them."""

    volumes: list[dict[str, Any]] = field(default_factory=list)
    mounts: list[dict[str, Any]] = field(default_factory=list)

    def add(self, name: str, path: PurePath | str, source: dict[str, Any], **mount: Any) -> None:
        """Add a volume of a `source`, mounted at a path."""
        self.volumes.append({"name": name, **source})
        self.mount(name, path, **mount)

    def mount(self, name: str, path: PurePath | str, **mount: Any) -> None:
        """Mount a volume at another path too."""
        self.mounts.append({"name": name, "mountPath": str(path), **mount})

    def add_secret(self, name: str, path: PurePath, secret: str, **source: Any) -> None:
        """Add a Secret, which the pod's user may read."""
        self.add(name, path, {"secret": {"secretName": secret, "defaultMode": 0o440, **source}}, readOnly=True)

    def add_config(self, source: dict[str, Any]) -> None:
        """Add processor.json."""
        self.add("config", CONFIG_PATH, source, subPath=CONFIG_KEY, readOnly=True)

    def add_scratch(self) -> None:
        """Add a place to write to: the rest of the file system is read-only."""
        self.add("tmp", "/tmp", {"emptyDir": {}})  # noqa: S108

    def add_connections(self, secrets: dict[str, str]) -> None:
        """Add the Secret of each connection."""
        for role, secret in secrets.items():
            self.add_secret(f"{role}-connection", CONNECTIONS_PATH / role, secret)

    def add_code(self, processor: Processor) -> None:
        """Add the user's Python files, and what Spark's pods share."""
        config_map, spark = _handler_config_map(processor), processor.spec.spark
        if config_map is not None:
            self.add("handler", HANDLER_PATH, {"configMap": {"name": config_map}}, readOnly=True)
        for volume in spark.volumes if spark is not None else ():
            self.add(volume.name, volume.mount_path, {"persistentVolumeClaim": {"claimName": volume.claim_name}})


def _field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _probe(path: str, **limits: int) -> dict[str, Any]:
    return {"httpGet": {"path": path, "port": "http"}, **limits}


def _mount_all(processor: Processor) -> Mounts:
    """Mount what a worker or driver needs: its configuration, connections and the user's code."""
    mounts = Mounts()
    mounts.add_config({"configMap": {"name": config_name(processor.name)}})
    mounts.add_scratch()
    mounts.add_connections(secrets_of(processor))
    mounts.add_code(processor)
    return mounts


def secrets_of(processor: Processor) -> dict[str, str]:
    """Name the Secret of each connection."""
    secrets = {"source": processor.spec.source.connection.secret_ref.name}
    target = processor.spec.target
    if target is not None and target.connection is not None:
        secrets["target"] = target.connection.secret_ref.name
    return secrets


def _handler_config_map(processor: Processor) -> str | None:
    """Name the ConfigMap with the user's Python files."""
    spec = processor.spec
    if spec.target is not None and spec.target.config_map is not None:
        return spec.target.config_map.name
    application = spec.spark.application if spec.spark is not None else None
    return application.config_map_ref.name if application is not None and application.config_map_ref else None


def build_pod(name: str, images: Images, container: dict[str, Any], mounts: Mounts, role: Role) -> dict[str, Any]:
    """Build what all pods have; `name` is the value of their label."""
    ids = {} if images.user is None else dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), images.user)
    return {
        "metadata": {"labels": labels_of(name, role)},
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": {
                "runAsNonRoot": True,
                **ids,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [{**container, "securityContext": _SECURITY, "volumeMounts": mounts.mounts}],
            "volumes": mounts.volumes,
        },
    }


def _container(name: str, image: str, asked: ResourceRequirements | None, role: Role, **env: str) -> dict[str, Any]:
    return {
        "name": name,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "env": [
            _field("POD_NAME", "metadata.name"),
            _field("POD_UID", "metadata.uid"),
            _field("POD_NAMESPACE", "metadata.namespace"),
            _field("POD_IP", "status.podIP"),
            *({"name": name, "value": value} for name, value in env.items()),
        ],
        "resources": DEFAULT_RESOURCES[role] if asked is None else asked.model_dump(by_alias=True, exclude_none=True),
        "terminationMessagePath": TERMINATION_LOG,
        "terminationMessagePolicy": "File",
    }


def _build_runner(
    name: str, images: Images, container: dict[str, Any], mounts: Mounts, role: Role, *, secret: str, patience: int = 6
) -> dict[str, Any]:
    """Build a pod that handles messages and answers questions; `secret` has the key that they are signed with.

    Liveness must outlast a process that is frozen past its lease: the fence handles that, not a restart.
    """
    mounts.add_secret(KEY_VOLUME, KEY_PATH.parent, secret)
    served = {
        "env": [*container["env"], {"name": "OUTBOX_METRICS_TOKEN_SHA256", "value": images.keys.metrics_hash}],
        "ports": [{"name": "http", "containerPort": STATUS_PORT}, *container.get("ports", ())],
        "readinessProbe": _probe("/readyz", periodSeconds=2, timeoutSeconds=2, failureThreshold=2),
        "livenessProbe": _probe("/livez", periodSeconds=10, timeoutSeconds=5, failureThreshold=patience),
    }
    return build_pod(name, images, container | served, mounts, role)


def build_worker_pod(processor: Processor, images: Images) -> dict[str, Any]:
    """Build the worker's pod template."""
    worker = processor.spec.worker
    grace = worker.termination_grace_period_seconds
    image = worker.image or images.worker
    container = _container(WORKER_CONTAINER, image, worker.resources, Role.WORKER, OUTBOX_GRACE_SECONDS=str(grace))
    key = images.keys.secret_name(processor.name, processor.uid)
    template = _build_runner(processor.name, images, container, _mount_all(processor), Role.WORKER, secret=key)
    template["spec"] |= {
        "terminationGracePeriodSeconds": grace,
        "topologySpreadConstraints": _spread(selector_of(processor.name, Role.WORKER)),
    }
    return _overlaid(template, worker.pod_template, processor, Role.WORKER)


def build_shared_pod(namespace: str, label: str, secrets: Sequence[str], images: Images) -> dict[str, Any]:
    """Build the pod template of several resources, labelled so; `secrets` are those of all their connections.

    A Secret that is missing keeps nothing from starting: the processor that needs it says so.
    """
    mounts = Mounts()
    mounts.add("processors", PROCESSORS_PATH, {"configMap": {"name": shared_name(label)}}, readOnly=True)
    mounts.add_scratch()
    for number, secret in enumerate(secrets):
        mounts.add_secret(f"connection-{number}", CONNECTIONS_PATH / secret, secret, optional=True)
    container = _container(WORKER_CONTAINER, images.worker, None, Role.WORKER)
    container["args"] = ["--processors", str(PROCESSORS_PATH)]
    key = images.keys.secret_name(shared_name(label), shared_id(namespace, label))
    template = _build_runner(label, images, container, mounts, Role.WORKER, secret=key)
    template["spec"]["topologySpreadConstraints"] = _spread(selector_of(label, Role.WORKER))
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
    mounts = _mount_all(processor)
    mounts.mount("config", EXECUTOR_PATH, subPath=EXECUTOR_KEY, readOnly=True)
    if not spark.shares(spark.query_checkpoint_path):
        # The database is the authority: a lost query checkpoint costs a plan, not a message.
        mounts.add("query-checkpoint", spark.query_checkpoint_path, {"emptyDir": {}})
    container = _container(DRIVER_CONTAINER, spark.image or images.spark, spark.driver.resources, Role.DRIVER)
    ports = {"driver": DRIVER_PORT, "blockmanager": BLOCK_MANAGER_PORT, "ui": UI_PORT}
    container["ports"] = [{"name": name, "containerPort": port} for name, port in ports.items()]
    key = images.keys.secret_name(processor.name, processor.uid)
    template = _build_runner(processor.name, images, container, mounts, Role.DRIVER, secret=key, patience=12)
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

    The pod carries its `config`, processor.json, itself.
    """
    mounts = Mounts()
    carried = {"path": CONFIG_KEY, "fieldRef": {"fieldPath": f"metadata.annotations['{CONFIG_ANNOTATION}']"}}
    mounts.add_config({"downwardAPI": {"items": [carried]}})
    mounts.add_scratch()
    mounts.add_connections(secrets_of(processor))
    container = _container(WORKER_CONTAINER, processor.spec.worker.image or images.worker, None, Role.CLAIM)
    container["args"] = arguments
    template = build_pod(processor.name, images, container, mounts, role)
    template["metadata"]["annotations"] = {CONFIG_ANNOTATION: config}
    template["spec"] |= {"restartPolicy": "Never", "terminationGracePeriodSeconds": 5}
    spark = processor.spec.spark
    overlay = spark.driver.pod_template if spark is not None else processor.spec.worker.pod_template
    return _overlaid(template, placement_of(overlay), processor, role)
