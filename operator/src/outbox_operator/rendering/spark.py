"""PURE: what engine Spark needs besides the driver's pod: its configuration, its executors, its Service and its rights.

The driver runs in client mode in its pod (no spark-submit in between) and asks the API server for its executors. All
that Spark must know about Kubernetes is written into `spark.config` of processor.json, so the driver only adds what a
pod learns at its start: its address and its name (POD_IP, POD_NAME).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

from outbox_operator.api.naming import build_meta, build_object, child_name, driver_name, labels_of, selector_of
from outbox_operator.api.observed import Role
from outbox_operator.api.overlay import merge
from outbox_operator.rendering.pods import (
    BLOCK_MANAGER_PORT,
    DRIVER_PORT,
    EXECUTOR_CONTAINER,
    EXECUTOR_PATH,
    UI_PORT,
    Mounts,
    build_pod,
)

if TYPE_CHECKING:
    from outbox_core.spec import SparkPlan
    from outbox_operator.api.resources import Processor, Spark
    from outbox_operator.settings import Images


def build_plan(processor: Processor, spark: Spark, images: Images) -> SparkPlan:
    """Build what the driver must know; the user's own settings win where they do not break the pods' shape."""
    asked = spark.config
    executor = spark.executor
    shape = {
        "spark.master": "k8s://https://kubernetes.default.svc",
        "spark.submit.deployMode": "client",
        "spark.kubernetes.namespace": processor.namespace,
        "spark.kubernetes.container.image": spark.image or images.spark,
        "spark.kubernetes.container.image.pullPolicy": "IfNotPresent",
        "spark.kubernetes.authenticate.driver.serviceAccountName": driver_name(processor.name),
        "spark.kubernetes.executor.podNamePrefix": child_name(processor.name, "exec", 47),
        "spark.kubernetes.executor.podTemplateFile": EXECUTOR_PATH,
        "spark.kubernetes.executor.podTemplateContainerName": EXECUTOR_CONTAINER,
        "spark.executor.instances": str(executor.instances),
        "spark.executor.cores": str(executor.cores),
        "spark.executor.memory": executor.memory,
        "spark.driver.port": str(DRIVER_PORT),
        "spark.blockManager.port": str(BLOCK_MANAGER_PORT),
        "spark.driver.blockManager.port": str(BLOCK_MANAGER_PORT),
        "spark.ui.port": str(UI_PORT),
    }
    defaults = {
        "spark.kubernetes.executor.request.cores": "100m",
        "spark.executor.memoryOverhead": "384m",
        "spark.kubernetes.executor.deleteOnTermination": "true",
        "spark.driver.extraJavaOptions": "-Djava.io.tmpdir=/tmp",
        # Executors get a volume of Spark's own at this path, so it cannot be /tmp, which the template mounts.
        "spark.local.dir": "/tmp/spark",  # noqa: S108
        "spark.sql.session.timeZone": "UTC",
        # Spark would otherwise list and delete Services and claims by label, which the driver role does not allow.
        "spark.kubernetes.driver.service.deleteOnTermination": "false",
        "spark.kubernetes.driver.ownPersistentVolumeClaim": "false",
    }
    labels = {
        f"spark.kubernetes.executor.label.{key}": value
        for key, value in labels_of(processor.name, Role.EXECUTOR).items()
        if not key.startswith("app.kubernetes.io/managed-by")
    }
    return spark.plan().model_copy(update={"config": {**defaults, **asked, **shape, **labels}})


def build_executor_template(processor: Processor, spark: Spark, images: Images) -> str:
    """Build the pod template file that the driver makes executors from."""
    mounts = Mounts()
    mounts.add_scratch()
    mounts.add_connections({"source": processor.spec.source.connection.secret_ref.name})
    mounts.add_code(processor)
    template = build_object(
        "Pod", **build_pod(processor.name, images, {"name": EXECUTOR_CONTAINER}, mounts, Role.EXECUTOR)
    )
    template["spec"] |= {"restartPolicy": "Never", "terminationGracePeriodSeconds": 20}
    text: str = yaml.safe_dump(merge(template, spark.executor.pod_template or {}), sort_keys=True)
    return text


def build_rights(processor: Processor, images: Images) -> list[dict[str, Any]]:
    """Build the driver's service account, its binding to the one role that the chart made, and its Service."""
    name = driver_name(processor.name)
    meta = build_meta(processor, name)
    account = build_object("ServiceAccount", meta, automountServiceAccountToken=False)
    binding = build_object(
        "RoleBinding",
        meta,
        roleRef={"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": images.driver_role},
        subjects=[{"kind": "ServiceAccount", "name": name, "namespace": processor.namespace}],
    )
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": selector_of(processor.name, Role.DRIVER),
        "ports": [
            {"name": name, "port": port, "protocol": "TCP", "targetPort": port}
            for name, port in (("driver", DRIVER_PORT), ("blockmanager", BLOCK_MANAGER_PORT))
        ],
    }
    return [account, binding, build_object("Service", meta, spec=spec)]
