"""podTemplates that are allowed, and those that are refused with the words for each field: for operator and API server.

A template here is that of a worker whose resource names the Secrets `db` (source) and `broker` (target).
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.manifests import RABBITMQ, worker

Body = dict[str, Any]
PLACE = "spec.worker.podTemplate"
RESTRICTED: Body = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
NEEDS_SECURITY = "is missing, set securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}"
APPARMOR = "container.apparmor.security.beta.kubernetes.io"
NO_SECRET = "must be a Secret that this resource names as a connection (secretRef)"
NO_NAME = "is missing, set it to a Secret that this resource names as a connection (secretRef)"


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
        {
            "metadata": {
                "annotations": {
                    "kubernetes.io/ingress-bandwidth": "1M",
                    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
                    "kubectl.kubernetes.io/default-container": "worker",
                }
            }
        },
        id="annotations of the cluster that leave isolation as it is",
    ),
    pytest.param(
        own(
            env=[
                {"name": "A", "value": "b"},
                {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
                {"name": "C", "valueFrom": {"resourceFieldRef": {"resource": "limits.memory"}}},
                {"name": "D", "valueFrom": {"configMapKeyRef": {"name": "any", "key": "k"}}},
                {"name": "E", "valueFrom": {"secretKeyRef": {"name": "db", "key": "host"}}},
                {"name": "F", "valueFrom": {"secretKeyRef": {"name": "db", "key": "none", "optional": True}}},
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

OF_THE_POD = (
    "activeDeadlineSeconds",
    "enableServiceLinks",
    "hostname",
    "hostnameOverride",
    "os",
    "overhead",
    "preemptionPolicy",
    "priority",
    "readinessGates",
    "resourceClaims",
    "resources",
    "restartPolicy",
    "runtimeClassName",
    "schedulingGates",
    "setHostnameAsFQDN",
    "subdomain",
)
"""Fields of a pod that no other case has."""

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
        {
            "metadata": {
                "annotations": {
                    "seccomp.security.alpha.kubernetes.io/pod": "unconfined",
                    "container.seccomp.security.alpha.kubernetes.io/worker": "unconfined",
                }
            }
        },
        [
            f"metadata.annotations[{prefix}]: changes the pod's isolation, remove it"
            for prefix in (
                "container.seccomp.security.alpha.kubernetes.io/worker",
                "seccomp.security.alpha.kubernetes.io/pod",
            )
        ],
        id="annotations that took seccomp away",
    ),
    pytest.param(
        {"metadata": {"annotations": {"kubernetes.io/config.mirror": "m", "kubernetes.io/config.source": "file"}}},
        [
            f"metadata.annotations[kubernetes.io/config.{name}]: is the kubelet's for pods of its own, remove it"
            for name in ("mirror", "source")
        ],
        id="a pod of the kubelet's own",
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
    pytest.param(
        pod(**dict.fromkeys(OF_THE_POD, "x")),
        [f"spec.{name}: is not allowed, remove it" for name in OF_THE_POD],
        id="the other fields of a pod",
    ),
    pytest.param(
        own(resources={"limits": {"memory": "1Gi"}, "claims": [{"name": "device"}]}),
        ["spec.containers[worker].resources.claims: is not allowed, remove it"],
        id="a device",
    ),
    pytest.param(own(resources=[]), ["spec.containers[worker].resources: must be an object"], id="a list of resources"),
    pytest.param(
        own(
            env=[{"name": "A", "valueFrom": {"secretKeyRef": {"key": "k", "optional": True}}}],
            envFrom=[{"secretRef": {"optional": True}}],
        ),
        [
            f"spec.containers[worker].env[A].valueFrom.secretKeyRef.name: {NO_NAME}",
            f"spec.containers[worker].envFrom[].secretRef.name: {NO_NAME}",
        ],
        id="Secrets without a name as variables",
    ),
    pytest.param(
        volume(secret={"optional": True}),
        [f"spec.volumes[extra].secret.secretName: {NO_NAME}"],
        id="a Secret without a name as a volume",
    ),
    pytest.param(
        volume(projected={"sources": [{"secret": {}}, {"podCertificate": {}}]}, image={"reference": "any:1"}),
        [
            "spec.volumes[extra].image: is not allowed, remove it",
            f"spec.volumes[extra].projected.sources[].secret.name: {NO_NAME}",
            "spec.volumes[extra].projected.sources[].podCertificate: is not allowed, remove it",
        ],
        id="an image, and a Secret without a name, projected",
    ),
    pytest.param(
        beside(
            lifecycle={"preStop": {"httpGet": {"host": "10.0.0.1", "port": 80}}, "stopSignal": "SIGKILL"},
            startupProbe={"tcpSocket": {"host": "10.0.0.1", "port": 80}},
            readinessProbe={"httpGet": {"host": "localhost", "port": 80}},
            securityContext={**RESTRICTED, "appArmorProfile": {"type": "Unconfined"}, "windowsOptions": {}},
            restartPolicyRules=[],
        ),
        [
            "spec.containers[proxy].lifecycle.preStop.httpGet.host: is not allowed, remove it",
            "spec.containers[proxy].lifecycle.stopSignal: is not allowed, remove it",
            "spec.containers[proxy].readinessProbe.httpGet.host: is not allowed, remove it",
            "spec.containers[proxy].restartPolicyRules: is not allowed, remove it",
            "spec.containers[proxy].securityContext.appArmorProfile: is not allowed, remove it",
            "spec.containers[proxy].securityContext.windowsOptions: is not allowed, remove it",
            "spec.containers[proxy].startupProbe.tcpSocket.host: is not allowed, remove it",
        ],
        id="the other places of a host, and profiles as fields",
    ),
]
