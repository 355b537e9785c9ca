"""What a release consists of, for a matrix of values."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import yaml

from outbox_cli.cluster.serving import SELECTOR, parse_operators
from outbox_operator.api.admission import build_policies
from outbox_operator.settings import read_settings
from tests.chart.chart import (
    CHART,
    DIGEST,
    FULL_NAME,
    MATRIX,
    NAMESPACE,
    NAMESPACED,
    ROOT,
    Values,
    environment,
    helm,
    of_kind,
    render,
    template,
    the,
    with_images,
)

POLICIES = {"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}
CLUSTER_SCOPED = {"ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition", *POLICIES}
ROLE = f"{NAMESPACE}:{FULL_NAME}:spark-driver"
CRD = "outboxprocessors.outbox-operator.dev"

every_case = pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX)


def _pod_specs(values: Values) -> list[dict[str, Any]]:
    manifests = render(values)
    return [
        the(manifests, "Deployment")["spec"]["template"]["spec"],
        *(pod["spec"] for pod in of_kind(manifests, "Pod")),
    ]


@every_case
def test_every_object_is_labelled_placed_and_there_once(values: Values):
    manifests = render(values)
    keys = Counter((m["kind"], m["metadata"].get("namespace"), m["metadata"]["name"]) for m in manifests)
    assert [key for key, times in keys.items() if times > 1] == []
    for manifest in manifests:
        metadata = manifest["metadata"]
        assert metadata["labels"]["app.kubernetes.io/instance"] == "outbox", metadata["name"]
        assert ("namespace" in metadata) == (manifest["kind"] not in CLUSTER_SCOPED), metadata["name"]


@every_case
def test_no_yaml_key_is_written_twice(values: Values):
    class Strict(yaml.CSafeLoader):
        """Refuses what the API server's strict decoding refuses."""

    def mapping(loader: yaml.CSafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"{keys} at {node.start_mark}"
        return yaml.CSafeLoader.construct_mapping(loader, node, deep=True)

    Strict.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    assert list(yaml.load_all(template(values).stdout, Loader=Strict)) != []


@every_case
def test_pods_meet_the_restricted_standard(values: Values):
    for spec in _pod_specs(values):
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert {"hostNetwork", "hostPID", "hostIPC"} & spec.keys() == set()
        assert {kind for volume in spec.get("volumes", []) for kind in volume} <= {"name", "emptyDir"}
        for container in spec["containers"]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
            assert "memory" in container["resources"]["limits"]


@every_case
def test_only_the_operators_pod_gets_a_token(values: Values):
    manifests = render(values)
    assert the(manifests, "Deployment")["spec"]["template"]["spec"]["automountServiceAccountToken"] is True
    others = [*of_kind(manifests, "ServiceAccount"), *(pod["spec"] for pod in of_kind(manifests, "Pod"))]
    assert [other["automountServiceAccountToken"] for other in others] == [False] * len(others)


@every_case
def test_selectors_find_the_operators_pods_and_nothing_of_the_test(values: Values):
    manifests = render(values)
    name = the(manifests, "Deployment")["metadata"]["name"]
    labels = the(manifests, "Deployment")["spec"]["template"]["metadata"]["labels"].items()
    test_labels = [pod["metadata"]["labels"].items() for pod in of_kind(manifests, "Pod")]
    selectors = [the(manifests, "Deployment")["spec"]["selector"]["matchLabels"]]
    selectors += [service["spec"]["selector"] for service in of_kind(manifests, "Service")]
    selectors += [budget["spec"]["selector"]["matchLabels"] for budget in of_kind(manifests, "PodDisruptionBudget")]
    policies = [each for each in of_kind(manifests, "NetworkPolicy") if each["metadata"]["name"] == name]
    selectors += [policy["spec"]["podSelector"]["matchLabels"] for policy in policies]
    for selector in selectors:
        assert selector.items() <= labels
        assert not any(selector.items() <= other for other in test_labels)


@pytest.mark.parametrize(
    ("case", "images"),
    [
        ("defaults", [f"registry.internal:5000/outbox/outbox-{name}:dev" for name in ("operator", "worker", "spark")]),
        (
            "images by digest",
            [
                f"registry.internal:5000/outbox/outbox-operator@{DIGEST}",
                f"registry.internal:5000/outbox/outbox-worker@{DIGEST}",
                "elsewhere.internal/team/spark:4.3",
            ],
        ),
        ("images without registry", ["outbox-operator:dev", "outbox-worker:dev", "outbox-spark:dev"]),
    ],
)
def test_images(case: str, images: list[str]):
    manifests = render(MATRIX[case])
    operator = the(manifests, "Deployment")["spec"]["template"]["spec"]["containers"][0]["image"]
    variables = environment(manifests)
    assert [operator, variables["OUTBOX_WORKER_IMAGE"], variables["OUTBOX_SPARK_IMAGE"]] == images


def test_operator_is_told_what_it_serves():
    assert environment(render(MATRIX["defaults"]))["OUTBOX_WATCH_NAMESPACES"] == ""
    told = environment(render(MATRIX["namespaced"]))
    assert told["OUTBOX_WATCH_NAMESPACES"] == "chart-render-a,chart-render-b"
    assert told["OUTBOX_CLUSTER_ID"] == "east"


@every_case
def test_operator_binds_the_role_that_it_is_told_of(values: Values):
    manifests = render(values)
    told = environment(manifests)["OUTBOX_SPARK_DRIVER_ROLE"]
    made = [
        m["metadata"]["name"]
        for m in of_kind(manifests, "ClusterRole")
        if m["metadata"]["name"].endswith(":spark-driver")
    ]
    assert made in ([told], []), "made under another name"
    assert bool(made) == values.get("spark", {}).get("driverRole", {}).get("create", True)


def test_an_annotation_of_the_pods_that_the_chart_writes_too_is_there_once():
    name = "kubectl.kubernetes.io/default-container"
    done = template({"podAnnotations": {name: "sidecar"}})
    assert (done.stdout.count(name), f"{name}: sidecar" in done.stdout) == (1, True)
    assert the(render({}), "Deployment")["spec"]["template"]["metadata"]["annotations"] == {name: "operator"}


def test_two_replicas_are_spread_and_kept_through_drains():
    alone, two = render(MATRIX["one replica"]), render(MATRIX["defaults"])
    assert the(two, "Deployment")["spec"]["replicas"] == 2
    assert of_kind(alone, "PodDisruptionBudget") == []
    assert "topologySpreadConstraints" not in the(alone, "Deployment")["spec"]["template"]["spec"]
    assert the(two, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1
    spread = the(two, "Deployment")["spec"]["template"]["spec"]["topologySpreadConstraints"]
    assert [constraint["topologyKey"] for constraint in spread] == [
        "kubernetes.io/hostname",
        "topology.kubernetes.io/zone",
    ]
    assert of_kind(render(MATRIX["two replicas without budget"]), "PodDisruptionBudget") == []


def test_probes_ask_the_operators_own_server():
    container = the(render({}), "Deployment")["spec"]["template"]["spec"]["containers"][0]
    assert container["ports"] == [{"name": "http", "containerPort": 8081}]
    asked = {probe: container[f"{probe}Probe"]["httpGet"] for probe in ("startup", "liveness", "readiness")}
    assert asked == {
        "startup": {"path": "/livez", "port": "http"},
        "liveness": {"path": "/livez", "port": "http"},
        "readiness": {"path": "/readyz", "port": "http"},
    }


def test_monitor_and_policy_say_what_was_asked():
    manifests = render(MATRIX["everything watched"])
    monitor = the(manifests, "ServiceMonitor")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["spec"]["endpoints"] == [
        {"port": "http", "path": "/metrics", "honorLabels": True, "interval": "15s"}
    ]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= the(manifests, "Service")["metadata"]["labels"].items()
    (policy,) = [each["spec"] for each in of_kind(manifests, "NetworkPolicy") if each["metadata"]["name"] == FULL_NAME]
    assert policy["ingress"][0]["from"][1:] == MATRIX["everything watched"]["networkPolicy"]["metricsFrom"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert sorted(port["port"] for rule in policy["egress"] for port in rule["ports"]) == [53, 53, 6443, 8080]


def test_the_operators_egress_stays_open_unless_asked():
    policy = the(render({}), "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    assert "egress" not in policy
    assert "from" not in policy["ingress"][0]


def test_nothing_optional_leaves_a_deployment_and_room_for_its_keys():
    assert sorted(m["kind"] for m in render(MATRIX["nothing optional"])) == ["Deployment", "Secret", "Secret"]


def test_names_of_cluster_scoped_objects_carry_the_namespace():
    scoped = [m for m in render({}) if m["kind"] in CLUSTER_SCOPED and m["metadata"]["name"] != CRD]
    assert {m["kind"] for m in scoped} == CLUSTER_SCOPED - {"CustomResourceDefinition"}
    for manifest in scoped:
        name = manifest["metadata"]["name"]
        if manifest["kind"] in POLICIES:  # whose names may hold no colon
            assert name.endswith(f".{FULL_NAME}.{NAMESPACE}")
        else:
            assert name.startswith(f"{NAMESPACE}:{FULL_NAME}")


def test_policies_are_bound_to_what_is_served_unless_anything_is_allowed():
    everywhere, some = (of_kind(render(values), "ValidatingAdmissionPolicyBinding") for values in ({}, NAMESPACED))
    policies = {
        policy["metadata"]["name"]: policy["spec"] for policy in of_kind(render({}), "ValidatingAdmissionPolicy")
    }
    assert {name.partition(".")[0]: spec for name, spec in policies.items()} == build_policies()
    names = list(policies)
    assert [binding["spec"] for binding in everywhere] == [
        {"policyName": name, "validationActions": ["Deny"]} for name in names
    ]
    (expression,) = some[0]["spec"]["matchResources"]["namespaceSelector"]["matchExpressions"]
    assert expression["values"] == NAMESPACED["watchNamespaces"]
    lax = render(MATRIX["any podTemplate"])
    assert not any(of_kind(lax, kind) for kind in POLICIES)
    told = [environment(manifests)["OUTBOX_UNRESTRICTED_POD_TEMPLATES"] for manifests in (render({}), lax)]
    assert told == ["false", "true"]


@pytest.mark.parametrize(("user", "told"), [(1_000_680_000, "1000680000"), (None, ""), (65532, "65532")])
def test_the_operator_is_told_which_user_pods_have(user: int | None, told: str):
    values: Values = {"podTemplates": {"runAsUser": user}}
    assert environment(render(values))["OUTBOX_RUN_AS_USER"] == told
    settings = read_settings([], {"OUTBOX_RUN_AS_USER": told})
    assert settings.images.user == user


def test_the_operator_is_told_how_many_processors_an_upgrade_replaces_at_a_time():
    three = MATRIX["an upgrade of three processors at a time"]
    told = [environment(render(values))["OUTBOX_ROLLOUT_MAX_CONCURRENT"] for values in ({}, three)]
    assert told == ["10%", "3"]


def test_crd_is_the_canonical_one_and_kept():
    canonical = yaml.load((ROOT / "crds" / "outbox-operator.dev_outboxprocessors.yaml").read_text(), yaml.CSafeLoader)
    shipped = the(render({}), "CustomResourceDefinition")
    assert shipped["spec"] == canonical["spec"]
    assert shipped["metadata"]["name"] == canonical["metadata"]["name"]
    assert shipped["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    unkept = the(render(MATRIX["CRD not kept"]), "CustomResourceDefinition")
    assert "helm.sh/resource-policy" not in unkept["metadata"]["annotations"]


def test_keys_are_rendered_empty_and_kept_when_the_release_is_uninstalled():
    keys = of_kind(render({}), "Secret")
    assert [key["metadata"]["name"] for key in keys] == [f"{FULL_NAME}-key", f"{FULL_NAME}-metrics-token"]
    assert [key.get("data") for key in keys] == [None, None]
    assert [key["metadata"]["annotations"]["helm.sh/resource-policy"] for key in keys] == ["keep", "keep"]


def test_charts_files_are_the_canonical_crds_byte_for_byte():
    canonical = {path.name: path.read_bytes() for path in (ROOT / "crds").glob("*.yaml")}
    copies = {path.name: path.read_bytes() for path in (CHART / "files" / "crds").glob("*.yaml")}
    assert canonical
    assert copies == canonical, "run make crds"
    # Helm installs what is in a folder `crds` once and never upgrades it; and it would collide with the template.
    assert not (CHART / "crds").exists()


@pytest.mark.parametrize(("values", "watched"), [(NAMESPACED, tuple(NAMESPACED["watchNamespaces"])), ({}, ())])
def test_the_charts_deployment_says_what_its_operator_serves(values: Values, watched: tuple[str, ...]):
    deployment = the(render(values), "Deployment")
    label, _, value = SELECTOR.partition("=")
    assert deployment["metadata"]["labels"][label] == value
    (found,) = parse_operators([deployment | {"status": {"readyReplicas": 2}}])
    assert (found.namespace, found.name) == (deployment["metadata"]["namespace"], deployment["metadata"]["name"])
    assert (found.watched, found.ready) == (watched, 2)


@pytest.mark.parametrize(
    ("release", "named"),
    [
        ("shop", "shop-outbox-operator"),
        ("shop.outbox", "shop-outbox-outbox-operator-#"),
        ("2nd", "r2nd-outbox-operator-#"),
        ("2.outbox-operator", "r2-outbox-operator-#"),
        ("a" * 31, f"{'a' * 31}-outbox-operator"),
        ("a" * 53, f"{'a' * 38}-#"),
        (f"{'a' * 37}.b", f"{'a' * 37}-#"),
    ],
)
def test_names_are_dns_labels_and_of_one_release_alone(release: str, named: str):
    """Helm takes names with dots and a leading digit; a Service's is a label that begins with a letter (RFC 1035)."""
    done = helm("template", release, str(CHART), "--kube-version", "1.34.4", values=with_images({}))
    assert done.returncode == 0, done.stderr
    manifests = [manifest for manifest in yaml.load_all(done.stdout, yaml.CSafeLoader) if manifest]
    assert re.fullmatch(named.replace("#", "[0-9a-f]{8}"), the(manifests, "Deployment")["metadata"]["name"])
    service = the(manifests, "Service")["metadata"]["name"]
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", service)


def test_releases_of_like_names_have_objects_of_names_of_their_own():
    """Where Helm itself does not install (`helm template`, Argo CD), one would take the other's objects over."""
    releases = ["a.b", "a-b", "2nd", "r2nd", f"{'a' * 50}b", f"{'a' * 50}c"]
    told = []
    for release in releases:
        done = helm("template", release, str(CHART), "--kube-version", "1.34.4", values=with_images({}))
        manifests = [manifest for manifest in yaml.load_all(done.stdout, yaml.CSafeLoader) if manifest]
        told.append(the(manifests, "Deployment")["metadata"]["name"])
    assert len(set(told)) == len(releases)


def test_the_role_of_spark_drivers_stays_where_they_do():
    """Else drivers that run on after `helm uninstall` could make no executor any more."""
    cases: tuple[Values, ...] = ({}, MATRIX["CRD not kept"])
    notes = [the(render(values), "ClusterRole", ROLE)["metadata"].get("annotations") for values in cases]
    assert notes == [{"helm.sh/resource-policy": "keep"}, None]
