"""PURE: what a podTemplate may ask for, and what a pod that a Spark driver makes may be. The table of docs/security.md.

An allow list: what is not named here is refused, also what a later Kubernetes adds. It lets through scheduling,
resources, labels, annotations, environment, containers under the Pod Security Standard `restricted`, and volumes of
ConfigMaps and of the Secrets that the resource names. The chart's `podTemplates.unrestricted` turns all of it off.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from outbox_core.spec import TARGETS
from outbox_operator.api.shapes import SECRETS, Fields, Items, Keys, Leaf, OwnOrOther, Scope, fields, only

if TYPE_CHECKING:
    from collections.abc import Mapping

CONNECTIONS: Final = ("source.connection", *(f"{kind.path}.connection" for kind in TARGETS if kind.connects))
"""Where a resource names the Secrets that its pods may have."""
TEMPLATES: Final = {
    "worker.podTemplate": "worker",
    "spark.driver.podTemplate": "driver",
    "spark.executor.podTemplate": "executor",
}
"""Where the overlays are, and the container that each of them is laid over."""
SETTINGS: Final = "spark.config"
REMEDY: Final = (
    "docs/security.md has what a podTemplate may ask for; for more, an administrator of the cluster sets "
    "podTemplates.unrestricted=true in the operator's chart"
)

_NAMED_SECRET: Final = Leaf(
    lambda value, scope: isinstance(value, str) and value in scope.secrets,
    f"{{}} in {SECRETS}",
    "must be a Secret that this resource names as a connection (secretRef)",
)
_NOT_ROOT: Final = Leaf(
    lambda value, _: value is None or (type(value) is int and value > 0),
    "({} == null || (type({}) == int && {} > 0))",
    "must be above 0: 0 is root",
)
_DROPS_ALL: Final = Leaf(
    lambda value, _: isinstance(value, list) and "ALL" in value,
    "(type({}) == list && 'ALL' in {})",
    "must hold ALL",
)
_NOT_THE_SYSTEMS: Final = Leaf(
    lambda value, _: value is None or (isinstance(value, str) and not value.startswith("system-")),
    "({} == null || (type({}) == string && !{}.startsWith('system-')))",
    "must be a class of your own, not one of the cluster's (system-…)",
)

_KEYS: Final = Keys(
    {
        "outbox-operator.dev/": "belongs to the operator, remove it",
        "container.apparmor.security.beta.kubernetes.io/": "changes the pod's isolation, remove it",
        "container.seccomp.security.alpha.kubernetes.io/": "changes the pod's isolation, remove it",
        "seccomp.security.alpha.kubernetes.io/": "changes the pod's isolation, remove it",
        "kubernetes.io/config.": "is the kubelet's for pods of its own, remove it",
    }
)
METADATA: Final = fields(labels=_KEYS, annotations=_KEYS)

_NAME_IT: Final = "set it to a Secret that this resource names as a connection (secretRef)"
_SECRET: Final = replace(fields(name=_NAMED_SECRET, key=None, optional=None), required={"name": _NAME_IT})
_ENV: Final = Items(
    fields(
        "name",
        "value",
        valueFrom=fields("configMapKeyRef", "fieldRef", "resourceFieldRef", secretKeyRef=_SECRET),
    )
)
_ENV_FROM: Final = Items(fields("prefix", "configMapRef", secretRef=_SECRET), named=False)
_MOUNTS: Final = Items(fields("name", "mountPath", "subPath", "subPathExpr", "readOnly"))

_SECCOMP: Final = fields(type=only("RuntimeDefault"))
_CAPABILITIES: Final = fields(drop=_DROPS_ALL, add=Items(only("NET_BIND_SERVICE"), named=False))
_SECURITY: Final = fields(
    allowPrivilegeEscalation=only(False),
    capabilities=_CAPABILITIES,
    privileged=only(False),
    procMount=only("Default"),
    readOnlyRootFilesystem=None,
    runAsGroup=None,
    runAsNonRoot=only(True),
    runAsUser=_NOT_ROOT,
    seccompProfile=_SECCOMP,
)
_WHOLE_SECURITY: Final = replace(
    _SECURITY,
    allowed={**_SECURITY.allowed, "capabilities": replace(_CAPABILITIES, required={"drop": "set drop: [ALL]"})},
    required={"allowPrivilegeEscalation": "set it to false", "capabilities": "set capabilities: {drop: [ALL]}"},
)
"""Of a container that is added: what the operator sets for its own, such a one says itself."""
_NEEDS_SECURITY: Final = {
    "securityContext": "set securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}"
}

_HTTP: Final = fields("path", "port", "scheme", "httpHeaders")
_TCP: Final = fields("port")
_PROBE: Final = fields(
    exec=None,
    grpc=None,
    httpGet=_HTTP,
    tcpSocket=_TCP,
    initialDelaySeconds=None,
    periodSeconds=None,
    timeoutSeconds=None,
    successThreshold=None,
    failureThreshold=None,
    terminationGracePeriodSeconds=None,
)
_HOOK: Final = fields(exec=None, httpGet=_HTTP, sleep=None, tcpSocket=_TCP)
_CALLS: Final = {
    **dict.fromkeys(("livenessProbe", "readinessProbe", "startupProbe"), _PROBE),
    "lifecycle": fields(postStart=_HOOK, preStop=_HOOK),
}
"""What the kubelet asks of a container: without `host`, or it would ask others on the node's behalf."""

_OWN: Final = replace(
    fields(
        "name",
        env=_ENV,
        envFrom=_ENV_FROM,
        resources=replace(fields("limits", "requests"), nullable=True),
        securityContext=_SECURITY,
        volumeMounts=_MOUNTS,
    ),
    instead={"image": "set spec.worker.image or spec.spark.image"},
)
_ADDED: Final = Fields(
    {
        **_OWN.allowed,
        **dict.fromkeys(("image", "imagePullPolicy", "command", "args", "workingDir", "restartPolicy")),
        **dict.fromkeys(("terminationMessagePath", "terminationMessagePolicy")),
        **_CALLS,
        "ports": Items(fields("name", "containerPort", "protocol"), named=False),
        "securityContext": _WHOLE_SECURITY,
    },
    required=_NEEDS_SECURITY,
)

_SOURCE: Final = fields(
    "configMap",
    "downwardAPI",
    secret=replace(fields(name=_NAMED_SECRET, items=None, optional=None), required={"name": _NAME_IT}),
)
_VOLUME: Final = replace(
    fields(
        "name",
        "configMap",
        "downwardAPI",
        "emptyDir",
        projected=fields("defaultMode", sources=Items(_SOURCE, named=False)),
        secret=replace(
            fields(secretName=_NAMED_SECRET, items=None, defaultMode=None, optional=None),
            required={"secretName": _NAME_IT},
        ),
    ),
    instead={"persistentVolumeClaim": "name the claim in spec.spark.volumes"},
)

_POD_SECURITY: Final = fields(
    "fsGroup",
    "fsGroupChangePolicy",
    "runAsGroup",
    runAsNonRoot=only(True),
    runAsUser=_NOT_ROOT,
    seccompProfile=_SECCOMP,
    supplementalGroups=None,
)

_OVERLAY_SPEC: Final = replace(
    fields(
        "affinity",
        "nodeSelector",
        "schedulerName",
        "tolerations",
        "topologySpreadConstraints",
        priorityClassName=_NOT_THE_SYSTEMS,
        dnsConfig=None,  # how the pod finds others, and no other pod
        dnsPolicy=None,
        hostAliases=None,
        imagePullSecrets=None,  # for the kubelet: no process of the pod sees them
        securityContext=_POD_SECURITY,
        containers=Items(OwnOrOther(own=_OWN, other=_ADDED)),
        initContainers=Items(_ADDED),
        volumes=Items(_VOLUME),
    ),
    instead={
        "nodeName": "use nodeSelector or affinity",
        "terminationGracePeriodSeconds": "set spec.worker.terminationGracePeriodSeconds (engine Worker)",
    },
)
OVERLAY: Final = fields(metadata=METADATA, spec=_OVERLAY_SPEC)

SPARK_CONFIG: Final = Keys(
    {"spark.kubernetes.": "is the operator's, remove it: spark.executor.podTemplate shapes executors"},
    but=(
        "spark.kubernetes.allocation.batch.",
        "spark.kubernetes.allocation.driver.",
        "spark.kubernetes.allocation.executor.",
        "spark.kubernetes.allocation.max",
        "spark.kubernetes.executor.deleteOnTermination",
        "spark.kubernetes.executor.limit.cores",
        "spark.kubernetes.executor.request.cores",
    ),
)
"""Settings of Spark would otherwise mount volumes and Secrets into executors, past the podTemplate."""


def find_all_violations(spec: Mapping[str, Any]) -> list[str]:
    """Find what a resource's spec may not ask for, in all of its podTemplates and its settings of Spark.

    A sentence each: the field's path and what to do.
    """
    connections = [_at(spec, f"{place}.secretRef.name") for place in CONNECTIONS]
    secrets = frozenset(name for name in connections if isinstance(name, str))
    found: list[str] = []
    for place, own in TEMPLATES.items():
        if (template := _at(spec, place)) is not None:
            found += OVERLAY.violations(template, f"spec.{place}", Scope(own, secrets))
    if (settings := _at(spec, SETTINGS)) is not None:
        found += SPARK_CONFIG.violations(settings, f"spec.{SETTINGS}", Scope())
    return found


def _at(node: Any, place: str) -> Any:
    """Look up a field by its path; None when it is not there."""
    for name in place.split("."):
        node = node.get(name) if isinstance(node, dict) else None
    return node


# --- pods that a Spark driver makes -----------------------------------------------------------------------------------

_PART: Final = Items(
    Fields(
        {
            **_CALLS,
            "ports": Items(Fields({"hostPort": only(0)}, closed=False), named=False),
            "securityContext": _WHOLE_SECURITY,
        },
        required=_NEEDS_SECURITY,
        closed=False,
    )
)
_ANY_SECRET: Final = fields("configMap", "downwardAPI", "secret")
_EXECUTOR_SPEC: Final = Fields(
    {
        **dict.fromkeys(("hostIPC", "hostNetwork", "hostPID"), only(False)),
        "automountServiceAccountToken": only(False),
        "containers": _PART,
        "initContainers": _PART,
        "priorityClassName": _NOT_THE_SYSTEMS,
        "securityContext": replace(
            _POD_SECURITY,
            required={
                "runAsNonRoot": "set runAsNonRoot: true",
                "seccompProfile": "set seccompProfile: {type: RuntimeDefault}",
            },
        ),
        "volumes": Items(
            fields(
                *_VOLUME.allowed,
                persistentVolumeClaim=None,
                projected=fields("defaultMode", sources=Items(_ANY_SECRET, named=False)),
            )
        ),
    },
    required={"automountServiceAccountToken": "set automountServiceAccountToken: false"},
    closed=False,
)
EXECUTOR: Final = Fields(
    {"metadata": Fields({"annotations": _KEYS}, closed=False), "spec": _EXECUTOR_SPEC}, closed=False
)
"""A pod as the API server has it, defaults filled in: restricted, without a token. Which Secrets it mounts is not
asked: who may make a pod may read every Secret of the namespace."""
