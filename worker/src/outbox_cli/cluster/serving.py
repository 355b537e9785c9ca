"""Which operator serves a namespace, told from the operators' Deployments: no other object says it.

A resource that no operator serves gets no status and no Event: nothing in its own namespace tells a person why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from outbox_cli.errors import CommandError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from outbox_cli.cluster.client import Cluster

SELECTOR: Final = "app.kubernetes.io/component=operator"
"""Label that the chart gives the operator's Deployment, under every release name."""
_WATCHED: Final = "OUTBOX_WATCH_NAMESPACES"
_RELEASE: Final = "app.kubernetes.io/instance"


@dataclass(frozen=True, slots=True)
class Operator:
    """One release of the operator, as its Deployment says.

    Attributes:
        watched: namespaces that it serves; empty: all.
        ready: pods that are ready.
        release: what Helm calls it; None: its Deployment has no label that says so.

    """

    namespace: str
    name: str
    watched: tuple[str, ...]
    ready: int
    release: str | None = None

    def serves(self, namespace: str) -> bool:
        """Tell whether it looks at resources of the namespace."""
        return not self.watched or namespace in self.watched


def fetch_operators(cluster: Cluster) -> list[Operator] | None:
    """Fetch every operator of the cluster; None where that cannot be known, or may not."""
    try:
        return parse_operators(cluster.list_deployments(SELECTOR))
    except CommandError:  # away; or forbidden: to list Deployments of all namespaces is a right of administrators
        return None


def parse_operators(deployments: Iterable[dict[str, Any]]) -> list[Operator]:
    """Read the Deployments that are operators of ours: the chart tells each what it serves by a variable."""
    found = []
    for body in deployments:
        containers = body["spec"]["template"]["spec"]["containers"]
        variables = {item["name"]: item.get("value") or "" for one in containers for item in one.get("env") or ()}
        if _WATCHED in variables:
            watched = tuple(name.strip() for name in variables[_WATCHED].split(",") if name.strip())
            ready = (body.get("status") or {}).get("readyReplicas") or 0
            metadata = body["metadata"]
            release = (metadata.get("labels") or {}).get(_RELEASE)
            found.append(Operator(metadata["namespace"], metadata["name"], watched, ready, release))
    return found


def serving(operators: list[Operator] | None, namespace: str) -> list[str] | None:
    """Name the operators that serve a namespace; None where that is not known."""
    if operators is None:
        return None
    return [f"{each.namespace}/{each.name}" for each in operators if each.serves(namespace)]


def decide_service(operators: list[Operator] | None, namespace: str, *, looked_at: bool) -> str | None:
    """Say what is wrong with how a namespace is served, and what to do; None: nothing is.

    `looked_at`: each resource of the namespace has a status about its present spec.
    """
    if operators is None:
        return None if looked_at else _UNKNOWN.format(namespace=namespace)
    if not operators:
        return _GONE if looked_at else _NONE
    found = [each for each in operators if each.serves(namespace)]
    match found:
        case []:
            return _unserved(operators, namespace)
        case [one]:
            return None if one.ready else _not_ready(one, namespace)
        case _:
            names = " and ".join(f"{each.namespace}/{each.name}" for each in found)
            return (
                f"the operators {names} both serve namespace {namespace}: take it out of watchNamespaces of all but one"
            )


_NONE: Final = (
    "no operator is installed in this cluster, so nothing happens to resources and their status stays as it is: "
    "helm install outbox-operator charts/outbox-operator (docs/install.md)"
)
_GONE: Final = (
    f"an operator has looked at them, and no Deployment has its label {SELECTOR} now: if it was uninstalled, nothing "
    "happens to resources and their status stays as it is (docs/install.md)"
)
_UNKNOWN: Final = (
    "no operator has looked at it yet. Perhaps none serves namespace {namespace}; you may not list Deployments of all "
    f"namespaces, so ask an administrator: kubectl get deployments -A -l {SELECTOR}"
)


def _not_ready(one: Operator, namespace: str) -> str:
    return (
        f"the operator {one.namespace}/{one.name} serves namespace {namespace} and is not ready, so status stays as it "
        f"is: kubectl -n {one.namespace} get pods; kubectl -n {one.namespace} logs deploy/{one.name}"
    )


def _unserved(operators: list[Operator], namespace: str) -> str:
    first = operators[0]
    served = "; ".join(f"{each.namespace}/{each.name} serves {', '.join(each.watched)}" for each in operators)
    wanted = ",".join((*first.watched, namespace))
    return (
        f"no operator serves namespace {namespace}: its resources get no status, no Event and no pods ({served}). "
        f"Apply them to a namespace that is served, or add this one: helm -n {first.namespace} upgrade "
        f"{first.release or 'RELEASE'} charts/outbox-operator --reset-then-reuse-values "
        f"--set 'watchNamespaces={{{wanted}}}'"
    )
