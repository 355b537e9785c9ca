"""Values: what the schema refuses, what the templates refuse, and that schema, file and README say the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from tests.chart import chart, readme
from tests.chart.chart import CHART, MATRIX, Values, render, the

VALUES = (CHART / "values.yaml").read_text()
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())


@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX)
def test_lint_finds_nothing(values: Values):
    done = chart.helm("lint", "--strict", str(CHART), "--kube-version", "1.34.4", values=chart.with_images(values))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout


REFUSED = [
    pytest.param({"replica": 2}, "'replica' not allowed", id="a misspelt value"),
    pytest.param({"image": {"name": "x"}}, "'name' not allowed", id="an unknown field of the image"),
    pytest.param({"worker": {"replicas": 2}}, "'replicas' not allowed", id="a field that the resource has"),
    pytest.param({"metrics": {"podMonitor": {}}}, "'podMonitor' not allowed", id="an unknown kind of monitor"),
    pytest.param(
        {"monitoring": {"rules": {"disabled": ["Lag"]}}}, "/monitoring/rules/disabled/0", id="no alert of ours"
    ),
    pytest.param({"monitoring": {"runbookUrl": "docs"}}, "/monitoring/runbookUrl", id="a runbook without an address"),
    pytest.param({"livenessProbe": {"httpGet": {}}}, "'httpGet' not allowed", id="a probe of one's own"),
    pytest.param({"resources": {"cpu": "1"}}, "'cpu' not allowed", id="a quantity in the wrong place"),
    pytest.param({"replicas": "two"}, "/replicas", id="replicas as a word"),
    pytest.param({"replicas": -1}, "/replicas", id="replicas below zero"),
    pytest.param({"replicas": 6}, "/replicas", id="more replicas than one Lease makes sense of"),
    pytest.param({"watchNamespaces": "shop"}, "/watchNamespaces", id="a namespace that is no list"),
    pytest.param({"watchNamespaces": ["Shop"]}, "/watchNamespaces/0", id="a namespace that cannot be"),
    pytest.param({"watchNamespaces": ["a,b"]}, "/watchNamespaces/0", id="two namespaces in one"),
    pytest.param({"watchNamespaces": ["a", "a"]}, "/watchNamespaces", id="a namespace twice"),
    pytest.param({"clusterId": "eu/west"}, "/clusterId", id="a slash in the cluster's name"),
    pytest.param({"image": {"registry": "https://example.com"}}, "/image/registry", id="a registry with a scheme"),
    pytest.param({"image": {"repository": ""}}, "/image/repository", id="no repository"),
    pytest.param({"image": {"tag": "a b"}}, "/image/tag", id="a tag with a space"),
    pytest.param({"image": {"tag": 1.0}}, "/image/tag", id="a tag that YAML reads as a number"),
    pytest.param({"image": {"digest": "sha256:123"}}, "/image/digest", id="a digest cut short"),
    pytest.param({"image": {"pullPolicy": "Sometimes"}}, "/image/pullPolicy", id="an unknown pull policy"),
    pytest.param({"logLevel": "info"}, "/logLevel", id="a log level in small letters"),
    pytest.param({"crds": {"install": "yes"}}, "/crds/install", id="a switch as a word"),
    pytest.param({"rollout": {"maxConcurrent": "0%"}}, "/rollout/maxConcurrent", id="a budget of nothing by share"),
    pytest.param({"rollout": {"maxConcurrent": -1}}, "/rollout/maxConcurrent", id="a budget below zero"),
    pytest.param({"metrics": {"service": {"port": 70000}}}, "/metrics/service/port", id="a port that cannot be"),
    pytest.param({"networkPolicy": {"namespaces": ["Shop"]}}, "/networkPolicy/namespaces/0", id="a policy nowhere"),
    pytest.param({"networkPolicy": {"apiServerPorts": []}}, "/networkPolicy/apiServerPorts", id="no way to the API"),
    pytest.param({"extraEnv": [{"value": "x"}]}, "/extraEnv/0", id="a variable without a name"),
    pytest.param({"extraEnv": [{"name": "POD_NAME", "value": "x"}]}, "/extraEnv/0/name", id="a variable of ours"),
    pytest.param({"podTemplates": {"runAsUser": 0}}, "/podTemplates/runAsUser", id="root"),
    pytest.param({"podLabels": {"a": 1}}, "/podLabels/a", id="a label that is a number"),
    pytest.param({"podLabels": {"app.kubernetes.io/name": "x"}}, "app.kubernetes.io/name", id="a label of the chart's"),
    pytest.param(
        {"monitoring": {"rules": {"labels": {"app.kubernetes.io/instance": "prometheus"}}}},
        "app.kubernetes.io/instance",
        id="a label of the chart's, of a monitor",
    ),
]


@pytest.mark.parametrize(("values", "named"), REFUSED)
def test_schema_refuses(values: Values, named: str):
    done = chart.template(values)
    assert done.returncode != 0
    assert "don't meet the specifications of the schema" in done.stderr
    assert named in done.stderr


WITHOUT_IMAGES = [
    pytest.param({}, "image.registry is not set", id="nothing said of images"),
    pytest.param({"image": {"tag": "dev"}}, "image.registry is not set", id="a tag alone"),
    pytest.param({"image": {"registry": "localhost"}}, "image.tag is not set", id="a registry alone"),
    pytest.param(
        {"image": {"registry": "localhost", "digest": chart.DIGEST}},
        "image.tag is not set (nor the digest of outbox-worker)",
        id="the digest of one image of three",
    ),
    pytest.param(
        {"image": {"registry": "registry.example.com/outbox", "tag": "dev"}},
        "registry.example.com/outbox, a name for examples",
        id="a registry out of the documents",
    ),
    pytest.param(
        {**chart.IMAGES, "spark": {"image": {"registry": "example.org:5000"}}}, "a name for examples", id="one of three"
    ),
]


@pytest.mark.parametrize(("values", "said"), WITHOUT_IMAGES)
def test_a_release_that_could_not_pull_its_images_is_refused_with_what_to_set(values: Values, said: str):
    done = chart.template_bare(values)
    assert done.returncode != 0
    for words in (said, "make push TO=", "make up images", "--set image.registry=localhost --set image.tag=dev"):
        assert words in done.stderr


WITH_IMAGES = [
    pytest.param({"image": {"registry": "localhost", "tag": "dev"}}, id="the local cluster's"),
    pytest.param({"image": {"pullPolicy": "Never", "tag": "dev"}}, id="loaded into the nodes"),
    pytest.param({"image": {"registry": "registry.mycompany.net/outbox", "tag": "dev"}}, id="pushed to a registry"),
    pytest.param(
        {
            "image": {"repository": "team/operator", "tag": "1"},
            "worker": {"image": {"repository": "team/worker"}},
            "spark": {"image": {"repository": "team/spark"}},
        },
        id="whole paths as repositories",
    ),
]


@pytest.mark.parametrize("values", WITH_IMAGES)
def test_a_release_that_names_its_images_is_taken(values: Values):
    done = chart.template_bare(values)
    assert done.returncode == 0, done.stderr


def test_the_makefile_knows_the_verbs_that_the_chart_names():
    makefile = (chart.ROOT / "Makefile").read_text()
    assert all(f"\n{verb}: ##" in makefile for verb in ("up", "images", "push"))


def test_namespaced_release_needs_the_clusters_name():
    done = chart.template({"watchNamespaces": ["shop"]})
    assert done.returncode != 0
    assert "clusterId is required when watchNamespaces is set" in done.stderr


def test_service_monitor_needs_the_service():
    done = chart.template({"metrics": {"service": {"enabled": False}, "serviceMonitor": {"enabled": True}}})
    assert done.returncode != 0
    assert "metrics.serviceMonitor.enabled needs metrics.service.enabled" in done.stderr


def test_an_alert_that_is_left_out_must_be_one():
    rules = {"enabled": True, "disabled": ["OutboxCircuitOpen", "OutboxLagging"]}
    done = chart.template({"monitoring": {"rules": rules}})
    assert done.returncode != 0
    assert "monitoring.rules.disabled names OutboxLagging: files/alerts.yaml has no such alert" in done.stderr


def test_a_foreign_service_account_must_be_named():
    done = chart.template({"serviceAccount": {"create": False}})
    assert done.returncode != 0
    assert "name an existing one in serviceAccount.name" in done.stderr


def test_old_kubernetes_is_refused():
    done = chart.helm("template", "x", str(CHART), "--kube-version", "1.30.9", values={})
    assert done.returncode != 0
    assert "requires kubeVersion: >=1.31.0-0" in done.stderr


def _schema_at(path: str) -> dict[str, Any]:
    node = SCHEMA
    for key in path.split("."):
        if "properties" not in node:
            return node  # an object of Kubernetes, or a map
        node = node["properties"][key]
        if "$ref" in node:
            node = SCHEMA["$defs"][node["$ref"].rpartition("/")[2]]
    return node


def test_schema_knows_every_value():
    assert all(_schema_at(path) for path in readme.leaves(yaml.safe_load(VALUES)))


def test_the_labels_that_are_refused_are_the_charts_own():
    own = {*the(render({}), "Deployment")["metadata"]["labels"]}
    assert {*SCHEMA["$defs"]["labels"]["propertyNames"]["not"]["enum"]} == own


def test_the_variables_that_are_refused_are_the_charts_own():
    """Of two of a name Kubernetes takes the last, and server-side apply refuses the Deployment."""
    container = the(render(MATRIX["everything watched"]), "Deployment")["spec"]["template"]["spec"]["containers"][0]
    refused = SCHEMA["properties"]["extraEnv"]["items"]["properties"]["name"]["not"]["enum"]
    assert {*refused} == {each["name"] for each in container["env"]}


def test_every_object_of_ours_is_closed():
    def open_objects(node: Any, path: str) -> list[str]:
        if not isinstance(node, dict):
            return []
        found = [path] if "properties" in node and node.get("additionalProperties") is not False else []
        return found + [name for key, inner in node.items() for name in open_objects(inner, f"{path}/{key}")]

    # A topology spread constraint is Kubernetes' own; the API server validates it.
    assert open_objects(SCHEMA, "") == []


def test_every_value_is_explained():
    explained = readme.documented(VALUES)
    without = [
        leaf
        for leaf in readme.leaves(yaml.safe_load(VALUES))
        if not any(leaf == path or leaf.startswith(f"{path}.") for path in explained)
    ]
    assert without == []


def test_readme_has_the_table_of_values():
    text = (CHART / "README.md").read_text()
    assert text == readme.with_table(text), "run python -m tests.chart.readme"
