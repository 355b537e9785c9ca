"""podTemplates that are allowed, and those that are refused with the words for each field: for operator and API server.

A template here is that of a worker whose resource names the Secrets `db` (source) and `broker` (target).
"""

from __future__ import annotations

import random
from functools import reduce
from typing import TYPE_CHECKING, Any, cast

import pytest

from outbox_operator.api.overlay import merge
from tests.support.manifests import APART, RABBITMQ, spark, worker

if TYPE_CHECKING:
    from collections.abc import Iterator

Body = dict[str, Any]
PLACE = "spec.worker.podTemplate"
RESTRICTED: Body = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
NEEDS_SECURITY = "is missing, set securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}"
APPARMOR = "container.apparmor.security.beta.kubernetes.io"
NO_SECRET = "must be a Secret that this resource names as a connection (secretRef)"


def pod(**spec: Any) -> Body:
    return {"spec": spec}


def own(**fields: Any) -> Body:
    """An overlay of the operator's own container."""
    return pod(containers=[{"name": "worker", **fields}])


def beside(**fields: Any) -> Body:
    """An overlay with a container beside it."""
    return pod(containers=[{"name": "proxy", "image": "proxy:1", "securityContext": RESTRICTED, **fields}])


def volume(**source: Any) -> Body:
    return pod(volumes=[{"name": "extra", **source}])


def asking(template: Any) -> Body:
    """The spec of a worker with this podTemplate."""
    return worker(target=RABBITMQ, worker={"podTemplate": template})


ALLOWED = [
    pytest.param({}, id="nothing"),
    pytest.param(
        {"metadata": {"labels": {"team": "shop"}, "annotations": {"sidecar.istio.io/inject": "false"}}},
        id="labels and annotations",
    ),
    pytest.param(
        pod(
            affinity={"nodeAffinity": {}},
            nodeSelector={"disk": "ssd"},
            schedulerName="default-scheduler",
            tolerations=[{"key": "dedicated", "operator": "Exists"}],
            topologySpreadConstraints=[
                {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {}}
            ],
        ),
        id="scheduling",
    ),
    pytest.param(pod(priorityClassName="batch"), id="a priority class"),
    pytest.param(
        pod(
            dnsPolicy="ClusterFirst",
            dnsConfig={"options": [{"name": "ndots", "value": "2"}]},
            hostAliases=[{"ip": "10.0.0.9", "hostnames": ["db"]}],
        ),
        id="names of other hosts",
    ),
    pytest.param(pod(imagePullSecrets=[{"name": "registry"}]), id="a Secret for the kubelet alone"),
    pytest.param(own(resources={"limits": {"memory": "1Gi"}}), id="resources"),
    pytest.param(own(resources=None), id="resources taken out"),
    pytest.param(
        own(
            env=[
                {"name": "A", "value": "b"},
                {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
                {"name": "C", "valueFrom": {"resourceFieldRef": {"resource": "limits.memory"}}},
                {"name": "D", "valueFrom": {"configMapKeyRef": {"name": "any", "key": "k"}}},
                {"name": "E", "valueFrom": {"secretKeyRef": {"name": "db", "key": "host"}}},
            ],
            envFrom=[
                {"prefix": "X_", "configMapRef": {"name": "any"}},
                {"secretRef": {"name": "broker", "optional": True}},
            ],
        ),
        id="environment",
    ),
    pytest.param(
        {
            "spec": {
                "containers": [{"name": "worker", "volumeMounts": [{"name": "extra", "mountPath": "/extra"}]}],
                "volumes": [
                    {"name": "extra", "configMap": {"name": "any"}},
                    {"name": "scratch", "emptyDir": {"sizeLimit": "1Gi"}},
                    {"name": "self", "downwardAPI": {"items": []}},
                    {"name": "secret", "secret": {"secretName": "broker", "defaultMode": 0o440}},
                    {
                        "name": "both",
                        "projected": {
                            "sources": [
                                {"configMap": {"name": "any"}},
                                {"secret": {"name": "db"}},
                                {"downwardAPI": {"items": []}},
                            ]
                        },
                    },
                ],
            }
        },
        id="volumes",
    ),
    pytest.param(
        beside(
            args=["--listen"],
            command=["/proxy"],
            lifecycle={"preStop": {"exec": {"command": ["/stop"]}}},
            livenessProbe={"httpGet": {"path": "/", "port": 9000}, "periodSeconds": 5},
            ports=[{"name": "proxy", "containerPort": 9000, "protocol": "TCP"}],
            resources={"requests": {"cpu": "10m"}},
            securityContext={**RESTRICTED, "readOnlyRootFilesystem": True, "runAsUser": 1000, "runAsNonRoot": True},
        ),
        id="a container beside it",
    ),
    pytest.param(
        pod(
            initContainers=[
                {"name": "proxy", "image": "proxy:1", "restartPolicy": "Always", "securityContext": RESTRICTED}
            ]
        ),
        id="a sidecar",
    ),
    pytest.param(
        pod(securityContext={"runAsUser": None, "runAsGroup": 0, "fsGroup": None, "runAsNonRoot": True}),
        id="a user that the platform chooses",
    ),
    pytest.param(
        own(securityContext={"readOnlyRootFilesystem": False, "capabilities": {"add": ["NET_BIND_SERVICE"]}}),
        id="what restricted leaves open",
    ),
]

REFUSED = [
    pytest.param(pod(hostPID=True), ["spec.hostPID: is not allowed, remove it"], id="the node's processes"),
    pytest.param(pod(hostNetwork=True), ["spec.hostNetwork: is not allowed, remove it"], id="the node's network"),
    pytest.param(pod(hostIPC=False), ["spec.hostIPC: is not allowed, remove it"], id="the node's memory, even false"),
    pytest.param(pod(hostUsers=True), ["spec.hostUsers: is not allowed, remove it"], id="a later field"),
    pytest.param(
        pod(serviceAccountName="admin", automountServiceAccountToken=True),
        [
            "spec.automountServiceAccountToken: is not allowed, remove it",
            "spec.serviceAccountName: is not allowed, remove it",
        ],
        id="another service account",
    ),
    pytest.param(
        pod(serviceAccount="admin"), ["spec.serviceAccount: is not allowed, remove it"], id="its former field"
    ),
    pytest.param(
        pod(nodeName="control-plane"),
        ["spec.nodeName: is not allowed, use nodeSelector or affinity"],
        id="past the scheduler",
    ),
    pytest.param(
        pod(runtimeClassName="bare"), ["spec.runtimeClassName: is not allowed, remove it"], id="another runtime"
    ),
    pytest.param(
        pod(priorityClassName="system-node-critical"),
        ["spec.priorityClassName: must be a class of your own, not one of the cluster's (system-…)"],
        id="before the cluster's own pods",
    ),
    pytest.param(
        pod(ephemeralContainers=[]), ["spec.ephemeralContainers: is not allowed, remove it"], id="ephemeral containers"
    ),
    pytest.param(
        pod(shareProcessNamespace=True),
        ["spec.shareProcessNamespace: is not allowed, remove it"],
        id="each other's processes",
    ),
    pytest.param(pod(nodeSelektor={}), ["spec.nodeSelektor: is not allowed, remove it"], id="a typing error"),
    pytest.param(pod(containers={}), ["spec.containers: must be a list"], id="an object for a list"),
    pytest.param(
        {"metadata": {"finalizers": ["x/y"], "labels": {"outbox-operator.dev/role": "driver"}}},
        [
            "metadata.finalizers: is not allowed, remove it",
            "metadata.labels[outbox-operator.dev/role]: belongs to the operator, remove it",
        ],
        id="pods that cannot go, under another name",
    ),
    pytest.param(
        {"metadata": {"annotations": {f"{APPARMOR}/worker": "unconfined"}}},
        [f"metadata.annotations[{APPARMOR}/worker]: changes the pod's isolation, remove it"],
        id="an annotation that takes AppArmor away",
    ),
    pytest.param(
        {"metadata": {"annotations": {"seccomp.security.alpha.kubernetes.io/pod": "unconfined"}}},
        [
            "metadata.annotations[seccomp.security.alpha.kubernetes.io/pod]: changes the pod's isolation, remove it",
        ],
        id="an annotation that took seccomp away",
    ),
    pytest.param(
        {"metadata": {"annotations": {"kubernetes.io/config.mirror": "x", "kubernetes.io/config.source": "api"}}},
        [
            "metadata.annotations[kubernetes.io/config.mirror]: is the kubelet's for pods of its own, remove it",
            "metadata.annotations[kubernetes.io/config.source]: is the kubelet's for pods of its own, remove it",
        ],
        id="the mark of a static pod",
    ),
    pytest.param(
        pod(resourceClaims=[{"name": "gpu"}]),
        ["spec.resourceClaims: is not allowed, remove it"],
        id="a device",
    ),
    pytest.param({"kind": "Pod"}, ["kind: is not allowed, remove it"], id="a whole object"),
    pytest.param(
        own(securityContext={"privileged": True}),
        ["spec.containers[worker].securityContext.privileged: must be false"],
        id="privileged",
    ),
    pytest.param(
        own(
            securityContext={
                "allowPrivilegeEscalation": None,
                "capabilities": {"drop": [], "add": ["SYS_ADMIN"]},
                "procMount": "Unmasked",
                "runAsNonRoot": False,
                "runAsUser": 0,
                "seccompProfile": {"type": "Unconfined"},
                "seLinuxOptions": {"type": "spc_t"},
            }
        ),
        [
            "spec.containers[worker].securityContext.allowPrivilegeEscalation: must be false",
            "spec.containers[worker].securityContext.capabilities.add[]: must be NET_BIND_SERVICE",
            "spec.containers[worker].securityContext.capabilities.drop: must hold ALL",
            "spec.containers[worker].securityContext.procMount: must be Default",
            "spec.containers[worker].securityContext.runAsNonRoot: must be true",
            "spec.containers[worker].securityContext.runAsUser: must be above 0: 0 is root",
            "spec.containers[worker].securityContext.seLinuxOptions: is not allowed, remove it",
            "spec.containers[worker].securityContext.seccompProfile.type: must be RuntimeDefault",
        ],
        id="every way out of restricted",
    ),
    pytest.param(
        own(securityContext=None),
        ["spec.containers[worker].securityContext: must be an object"],
        id="the security context taken out",
    ),
    pytest.param(
        pod(securityContext={"runAsNonRoot": None, "runAsUser": False, "sysctls": [], "windowsOptions": {}}),
        [
            "spec.securityContext.runAsNonRoot: must be true",
            "spec.securityContext.runAsUser: must be above 0: 0 is root",
            "spec.securityContext.sysctls: is not allowed, remove it",
            "spec.securityContext.windowsOptions: is not allowed, remove it",
        ],
        id="the pod's security context",
    ),
    pytest.param(
        own(image="mine:1", command=["sh"], args=["-c"], lifecycle={}, ports=[], stdin=True),
        [
            "spec.containers[worker].args: is not allowed, remove it",
            "spec.containers[worker].command: is not allowed, remove it",
            "spec.containers[worker].image: is not allowed, set spec.worker.image or spec.spark.image",
            "spec.containers[worker].lifecycle: is not allowed, remove it",
            "spec.containers[worker].ports: is not allowed, remove it",
            "spec.containers[worker].stdin: is not allowed, remove it",
        ],
        id="another program in the operator's container",
    ),
    pytest.param(
        pod(containers=[{"name": "proxy", "image": "proxy:1"}]),
        [f"spec.containers[proxy].securityContext: {NEEDS_SECURITY}"],
        id="a container that says nothing of its rights",
    ),
    pytest.param(
        pod(initContainers=[{"name": "worker", "image": "x", "securityContext": {"capabilities": {}}}]),
        [
            "spec.initContainers[worker].securityContext.allowPrivilegeEscalation: is missing, set it to false",
            "spec.initContainers[worker].securityContext.capabilities.drop: is missing, set drop: [ALL]",
        ],
        id="an init container under the operator's name",
    ),
    pytest.param(
        beside(
            ports=[{"containerPort": 80, "hostPort": 80}],
            livenessProbe={"httpGet": {"host": "169.254.169.254", "port": 80}},
            lifecycle={"postStart": {"tcpSocket": {"host": "10.0.0.1", "port": 22}}},
            volumeMounts=[{"name": "tmp", "mountPath": "/a", "mountPropagation": "Bidirectional"}],
            volumeDevices=[],
        ),
        [
            "spec.containers[proxy].lifecycle.postStart.tcpSocket.host: is not allowed, remove it",
            "spec.containers[proxy].livenessProbe.httpGet.host: is not allowed, remove it",
            "spec.containers[proxy].ports[].hostPort: is not allowed, remove it",
            "spec.containers[proxy].volumeDevices: is not allowed, remove it",
            "spec.containers[proxy].volumeMounts[tmp].mountPropagation: is not allowed, remove it",
        ],
        id="what a container may reach of the node",
    ),
    pytest.param(
        volume(hostPath={"path": "/"}),
        ["spec.volumes[extra].hostPath: is not allowed, remove it"],
        id="the node's files",
    ),
    pytest.param(
        volume(configMap={"name": "any"}, hostPath={"path": "/"}),
        ["spec.volumes[extra].hostPath: is not allowed, remove it"],
        id="the node's files behind a ConfigMap",
    ),
    pytest.param(
        volume(persistentVolumeClaim={"claimName": "c"}),
        ["spec.volumes[extra].persistentVolumeClaim: is not allowed, name the claim in spec.spark.volumes"],
        id="a claim",
    ),
    pytest.param(volume(csi={}), ["spec.volumes[extra].csi: is not allowed, remove it"], id="a CSI volume"),
    pytest.param(volume(ephemeral={}), ["spec.volumes[extra].ephemeral: is not allowed, remove it"], id="ephemeral"),
    pytest.param(
        volume(secret={"secretName": "foreign"}),
        [f"spec.volumes[extra].secret.secretName: {NO_SECRET}"],
        id="a foreign Secret as a volume",
    ),
    pytest.param(
        volume(
            projected={
                "sources": [
                    {"secret": {"name": "foreign"}},
                    {"serviceAccountToken": {"path": "token"}},
                    {"clusterTrustBundle": {"path": "ca"}},
                ]
            }
        ),
        [
            f"spec.volumes[extra].projected.sources[].secret.name: {NO_SECRET}",
            "spec.volumes[extra].projected.sources[].serviceAccountToken: is not allowed, remove it",
            "spec.volumes[extra].projected.sources[].clusterTrustBundle: is not allowed, remove it",
        ],
        id="a foreign Secret and a token, projected",
    ),
    pytest.param(
        own(env=[{"name": "A", "valueFrom": {"secretKeyRef": {"name": "foreign", "key": "k"}}}]),
        [f"spec.containers[worker].env[A].valueFrom.secretKeyRef.name: {NO_SECRET}"],
        id="a foreign Secret as a variable",
    ),
    pytest.param(
        beside(envFrom=[{"secretRef": {"name": "foreign"}}], env=[{"name": "A", "valueFrom": {"fileKeyRef": {}}}]),
        [
            "spec.containers[proxy].env[A].valueFrom.fileKeyRef: is not allowed, remove it",
            f"spec.containers[proxy].envFrom[].secretRef.name: {NO_SECRET}",
        ],
        id="a foreign Secret as all variables of a sidecar",
    ),
]

ELSEWHERE = [
    pytest.param(
        spark(spark={"driver": {"podTemplate": pod(hostPID=True)}}),
        ["spec.spark.driver.podTemplate.spec.hostPID: is not allowed, remove it"],
        id="the driver's",
    ),
    pytest.param(
        spark(spark={"executor": {"podTemplate": pod(containers=[{"name": "executor", "stdin": True}])}}),
        ["spec.spark.executor.podTemplate.spec.containers[executor].stdin: is not allowed, remove it"],
        id="the executors'",
    ),
    pytest.param(
        spark(spark={"executor": {"podTemplate": pod(containers=[{"name": "worker"}])}}),
        [f"spec.spark.executor.podTemplate.spec.containers[worker].securityContext: {NEEDS_SECURITY}"],
        id="another engine's container in the executors",
    ),
    pytest.param(
        spark(
            spark={
                "config": {
                    "spark.kubernetes.executor.volumes.hostPath.root.mount.path": "/node",
                    "spark.kubernetes.executor.secrets.foreign": "/foreign",
                    "spark.kubernetes.executor.request.cores": "250m",
                    "spark.sql.shuffle.partitions": "4",
                }
            }
        ),
        [
            f"spec.spark.config[{key}]: is the operator's, remove it: spark.executor.podTemplate shapes executors"
            for key in (
                "spark.kubernetes.executor.secrets.foreign",
                "spark.kubernetes.executor.volumes.hostPath.root.mount.path",
            )
        ],
        id="Spark's own settings",
    ),
    pytest.param(
        worker(
            target=APART, worker={"podTemplate": own(envFrom=[{"secretRef": {"name": n}} for n in ("db", "reporting")])}
        ),
        [],
        id="the Secret of another database",
    ),
    pytest.param(
        worker(
            target={"python": {"module": "orders", "connection": {"secretRef": {"name": "reporting"}}}},
            worker={"podTemplate": own(envFrom=[{"secretRef": {"name": n}} for n in ("reporting", "broker")])},
        ),
        [f"{PLACE}.spec.containers[worker].envFrom[].secretRef.name: {NO_SECRET}"],
        id="the Secret of a handler's database, and another",
    ),
]


def cases() -> list[Any]:
    """Every spec of the tables with its violations."""
    taken = [pytest.param(asking(case.values[0]), [], id=case.id) for case in ALLOWED]
    refused = [
        pytest.param(
            asking(case.values[0]), [f"{PLACE}.{said}" for said in cast("list[str]", case.values[1])], id=case.id
        )
        for case in REFUSED
    ]
    return [*taken, *refused, *ELSEWHERE]


def combined(seed: int, count: int) -> Iterator[Body]:
    """Specs whose podTemplate is laid together of some of the tables, drawn at random; in a third parts are junk."""
    draw = random.Random(seed)
    allowed, refused = ([cast("Body", case.values[0]) for case in table] for table in (ALLOWED, REFUSED))
    for _ in range(count):
        parts = draw.sample(allowed, 3) + draw.sample(refused, draw.choice((0, 0, 1, 2)))
        draw.shuffle(parts)
        template: Body = reduce(merge, parts, {})
        yield asking(template if draw.random() < 0.67 else {key: _spoilt(draw, part) for key, part in template.items()})


_JUNK: tuple[Any, ...] = (
    None,
    1,
    0,
    1.5,
    True,
    False,
    "",
    "x",
    [],
    {},
    [1],
    [{}],
    [[]],
    ["ALL"],
    {"a": 1},
    [{"name": "worker"}],
)


def _spoilt(draw: random.Random, value: Any) -> Any:
    """The same with something else in some places."""
    if draw.random() < 0.1:
        return draw.choice(_JUNK)
    if isinstance(value, dict):
        return {key: _spoilt(draw, child) for key, child in value.items()}
    return [_spoilt(draw, child) for child in value] if isinstance(value, list) else value
