"""The chart as tests see it: where it is, the matrix of values it is tried with, and Helm.

Helm is the one that `tests/tools/cluster/setup.sh` built; nothing here needs a cluster.
"""

from __future__ import annotations

import json
import os
import subprocess
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from tests.support.cache import find_cached

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "outbox-operator"

RELEASE = "outbox"
NAMESPACE = "chart-render"
SERVED = ("chart-render-a", "chart-render-b")
"""Namespaces of the matrix's namespaced releases."""

FULL_NAME = "outbox-outbox-operator"
DIGEST = "sha256:" + "ab" * 32

Manifest = dict[str, Any]
Values = dict[str, Any]

IMAGES: Values = {"image": {"registry": "registry.internal:5000/outbox", "tag": "dev"}}
"""What a release cannot do without; under the values of every test that says nothing of images."""

NAMESPACED: Values = {"watchNamespaces": list(SERVED), "clusterId": "east"}
MATRIX: dict[str, Values] = {
    "defaults": {},
    "namespaced": NAMESPACED,
    "namespaced, one namespace": {"watchNamespaces": [SERVED[0]], "clusterId": "east"},
    "cluster-wide with a name": {"clusterId": "east"},
    "one replica": {"replicas": 1},
    "two replicas without budget": {"podDisruptionBudget": {"enabled": False}},
    "no replica": {"replicas": 0},
    "images by digest": {
        "image": {"registry": "registry.internal:5000/outbox", "digest": DIGEST},
        "worker": {"image": {"digest": DIGEST}},
        "spark": {"image": {"registry": "elsewhere.internal", "repository": "team/spark", "tag": "4.3"}},
    },
    "images without registry": {
        "image": {"registry": "", "tag": "dev", "pullPolicy": "Never", "pullSecrets": ["pull"]}
    },
    "everything watched": {
        "metrics": {
            "service": {"port": 9090, "annotations": {"example.com/scrape": "yes"}},
            "serviceMonitor": {"enabled": True, "interval": "15s", "labels": {"release": "prometheus"}},
        },
        "monitoring": {
            "podMonitor": {"enabled": True, "interval": "15s", "labels": {"release": "prometheus"}},
            "rules": {"enabled": True, "labels": {"release": "prometheus"}, "disabled": ["OutboxProcessorLagging"]},
            "dashboard": {"enabled": True, "annotations": {"grafana_folder": "Shop"}},
            "runbookUrl": "https://wiki.example.com/outbox/runbook",
        },
        "networkPolicy": {
            "namespaces": list(SERVED),
            "egress": True,
            "apiServerPorts": [6443],
            "metricsFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
        },
    },
    "nothing optional": {
        "crds": {"install": False},
        "rbac": {"create": False, "aggregate": False},
        "serviceAccount": {"create": False, "name": "mine"},
        "spark": {"driverRole": {"create": False, "name": "our-spark-drivers"}},
        "podTemplates": {"admissionPolicies": False},
        "podDisruptionBudget": {"enabled": False},
        "worker": {"podDisruptionBudget": {"enabled": False}},
        "networkPolicy": {"enabled": False},
        "metrics": {"service": {"enabled": False}},
    },
    "watched in two namespaces": {
        **NAMESPACED,
        "monitoring": {"podMonitor": {"enabled": True}, "rules": {"enabled": True}, "dashboard": {"enabled": True}},
    },
    "CRD not kept": {"crds": {"keep": False}},
    "any podTemplate": {"podTemplates": {"unrestricted": True}},
    "an upgrade of three processors at a time": {"rollout": {"maxConcurrent": 3}},
    "scheduling": {
        "fullnameOverride": "obp",
        "serviceAccount": {"annotations": {"example.com/role": "outbox"}},
        "podAnnotations": {"example.com/note": "a: b"},
        "podLabels": {"team": "shop"},
        "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy.example.com:3128"}],
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "tolerations": [{"key": "dedicated", "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
        "topologySpreadConstraints": [
            {"maxSkew": 2, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
        ],
        "priorityClassName": "system-cluster-critical",
    },
    "a dependency of another chart": {"global": {"anything": True}, "nameOverride": "processors"},
}


def tool(name: str) -> Path:
    """A program that `tests/tools/cluster/setup.sh` put into the cache."""
    return find_cached("cluster", "bin", name)


def helm(
    *arguments: str, values: Values | None = None, kubeconfig: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Helm; `values` go in by standard input, as YAML that is JSON."""
    command = [str(tool("helm")), *arguments]
    if values is not None:
        command += ["--values", "-"]
    environment = {**os.environ, "KUBECONFIG": str(kubeconfig or os.devnull)}
    text = None if values is None else json.dumps(values)
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False, env=environment)


def template(values: Values, namespace: str = NAMESPACE) -> subprocess.CompletedProcess[str]:
    """`helm template` as for the real cluster's version, with images."""
    return template_bare(with_images(values), namespace)


def template_bare(values: Values, namespace: str = NAMESPACE) -> subprocess.CompletedProcess[str]:
    """`helm template` of these values and no others."""
    arguments = ("template", RELEASE, str(CHART), "--namespace", namespace, "--kube-version", "1.34.4")
    return helm(*arguments, values=values)


def with_images(values: Values) -> Values:
    """The values, with images where they name none."""
    return {**values, "image": {**IMAGES["image"], **values.get("image", {})}}


@lru_cache
def _rendered(values: str, namespace: str) -> str:
    done = template(json.loads(values), namespace)
    assert done.returncode == 0, done.stderr
    return done.stdout


def render(values: Values, namespace: str = NAMESPACE) -> list[Manifest]:
    """What a release of these values consists of, `helm test` pods included."""
    rendered = _rendered(json.dumps(values), namespace)
    return [manifest for manifest in yaml.load_all(rendered, yaml.CSafeLoader) if manifest]


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def the(manifests: list[Manifest], kind: str, name: str | None = None) -> Manifest:
    """The only one of its kind (and name)."""
    found = [m for m in of_kind(manifests, kind) if name is None or m["metadata"]["name"] == name]
    assert len(found) == 1, f"{len(found)} objects {kind} {name or ''}"
    return found[0]


def environment(manifests: list[Manifest]) -> dict[str, str]:
    """The plain environment variables of the operator's container."""
    container = the(manifests, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    return {item["name"]: item["value"] for item in container["env"] if "value" in item}
