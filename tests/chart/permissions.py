"""Every call that the operator makes to the Kubernetes API, and calls that it must never be able to make.

The chart's rules are compared with this table both ways: nothing is missing and nothing is left over.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

OWN = "outbox-operator.dev"
APPS = "apps"
BATCH = "batch"
POLICY = "policy"
RBAC = "rbac.authorization.k8s.io"
LEASES = "coordination.k8s.io"


@dataclass(frozen=True, slots=True, order=True)
class Call:
    """One verb on one resource (`resource/subresource`), of any name or of one.

    `remark` says what the call is for; it takes no part in comparisons.
    """

    group: str
    resource: str
    verb: str
    name: str = ""
    remark: str = field(default="", compare=False)


def _calls(group: str, resources: str, verbs: str, *, name: str = "", remark: str) -> set[Call]:
    return {Call(group, resource, verb, name, remark) for resource, verb in product(resources.split(), verbs.split())}


WATCHED = "list watch"
APPLIED = "get list watch create patch delete"
"""Looked at before it is applied; server-side apply of what is not there yet needs create beside patch."""


def served_calls(driver_role: str) -> set[Call]:
    """Calls in every namespace that is served."""
    return (
        _calls(OWN, "outboxprocessors", WATCHED, remark="the informer")
        | _calls(OWN, "outboxprocessors", "get", remark="whether a claim's holder is gone for certain")
        | _calls(OWN, "outboxprocessors", "patch", remark="takes a decided accept or rewind annotation off")
        | _calls(OWN, "outboxprocessors/status", "patch", remark="the one status write")
        | _calls("", "pods", WATCHED, remark="addresses, exit codes, termination messages")
        | _calls("", "services configmaps serviceaccounts", APPLIED, remark="configuration; Spark's driver")
        | _calls("", "secrets", "create", remark="the key of a resource's pods, never looked at")
        | _calls("", "events", "create patch", remark="what happened, for people")
        | _calls("", "events", "list", remark="why a pod does not start")
        | _calls(APPS, "deployments statefulsets", APPLIED, remark="workers and Spark drivers")
        | _calls(APPS, "replicasets", WATCHED, remark="the link between a pod and its Deployment")
        | _calls(BATCH, "jobs", "list watch create patch delete", remark="tries a claim, releases one later")
        | _calls(POLICY, "poddisruptionbudgets", APPLIED, remark="drains take one replica at a time")
        | _calls(RBAC, "rolebindings", APPLIED, remark="a driver's service account to the driver role")
        | _calls(RBAC, "clusterroles", "bind", name=driver_role, remark="and to no other role")
    )


def leader_calls(lease: str) -> set[Call]:
    """Calls in the release's own namespace."""
    return _calls(LEASES, "leases", "create", remark="the first pod ever") | _calls(
        LEASES, "leases", "get update", name=lease, remark="leader election"
    )


def key_calls(name: str) -> set[Call]:
    """Calls in the release's own namespace: its key, and the token that reads workers' metrics."""
    return {
        call
        for secret in (f"{name}-key", f"{name}-metrics-token")
        for call in _calls("", "secrets", "get update", name=secret, remark="made empty by the chart, filled once")
    }


CLUSTER_ID = Call("", "namespaces", "get", "kube-system", "its uid is the default cluster id")

FORBIDDEN = frozenset(
    _calls("", "secrets", "get list watch update patch delete deletecollection", remark="mounted, never read")
    | _calls("", "events", "delete deletecollection", remark="others' words")
    | _calls("", "pods", "get create update patch delete deletecollection", remark="only controllers make pods")
    | _calls("", "pods/exec pods/attach pods/portforward pods/ephemeralcontainers", "create", remark="a way into pods")
    | _calls("", "pods/log pods/proxy", "get", remark="payloads may be in there")
    | _calls("", "pods/eviction serviceaccounts/token", "create", remark="a token of any account")
    | _calls("", "serviceaccounts", "impersonate", remark="any account's rights")
    | _calls("", "users groups", "impersonate", remark="anybody's rights")
    | _calls("", "namespaces", "list watch create update patch delete", remark="scanning is off")
    | _calls("", "namespaces", "get", name="default", remark="only kube-system, only cluster-wide")
    | _calls("", "nodes persistentvolumes", "get list watch", remark="not its business")
    | _calls("", "persistentvolumeclaims", "create update patch delete", remark="the StatefulSet's")
    | _calls(OWN, "outboxprocessors", "create update delete deletecollection", remark="the user's")
    | _calls(OWN, "outboxprocessors/finalizers", "update", remark="blocks nobody's deletion")
    | _calls(OWN, "outboxprocessors/status", "update", remark="a merge by field owner only")
    | _calls(APPS, "daemonsets replicasets", "create patch delete", remark="makes none")
    | _calls(APPS, "deployments statefulsets", "deletecollection update", remark="one at a time")
    | _calls(RBAC, "roles clusterroles", "create update patch delete escalate", remark="makes no role")
    | _calls(RBAC, "clusterroles", "bind", remark="any role")
    | _calls(RBAC, "clusterroles", "bind", name="cluster-admin", remark="everything")
    | _calls(RBAC, "clusterrolebindings", "get list create patch", remark="rights stay in a namespace")
    | _calls(RBAC, "roles", "bind", remark="only the driver role")
    | _calls("apiextensions.k8s.io", "customresourcedefinitions", "get list watch patch", remark="Helm's")
    | _calls("admissionregistration.k8s.io", "validatingwebhookconfigurations", "get create patch", remark="no webhook")
    | _calls(LEASES, "leases", "list watch patch delete", remark="one by name")
    | _calls(LEASES, "leases", "update", name="another", remark="one by name")
)
"""In a served namespace, cluster-wide or not."""


def calls_of(rules: Iterable[dict[str, Any]]) -> Iterator[Call]:
    """Every call that RBAC rules allow, one by one, as often as they allow it."""
    for rule in rules:
        names = rule.get("resourceNames") or [""]
        for group, resource, verb, name in product(rule["apiGroups"], rule["resources"], rule["verbs"], names):
            yield Call(group, resource, verb, name)
