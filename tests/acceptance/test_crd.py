"""What the API server takes and refuses, and with which words: the manifests of `tests/support/manifests.py`.

The same go to `-f` (`outbox_cli/admission.py`): what one of the two takes the other takes.
"""

from __future__ import annotations

import copy
import os
import random
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from outbox_cli.admission import admit
from outbox_operator import crd
from outbox_operator.api.resources import parse_processor
from tests.chart.chart import tool
from tests.support.kubernetes.cluster import ApiError, kubeconfig, namespaces
from tests.support.manifests import (
    BAD_NAMES,
    CHANGES,
    INVALID,
    VALID,
    bodies,
    generated,
    manifest,
    rule_messages,
    spark,
    worker,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.kubernetes.cluster import Cluster

pytestmark = pytest.mark.cluster

Body = dict[str, Any]


@pytest.fixture(scope="module")
def namespace(cluster: Cluster) -> Iterator[str]:
    with namespaces(cluster, "crd") as (name,):
        yield name


@pytest.mark.parametrize("spec", VALID)
def test_a_valid_manifest_is_taken_with_defaults_that_the_operator_reads(cluster: Cluster, namespace: str, spec: Body):
    stored = cluster.create(manifest(namespace, copy.deepcopy(spec)), dry_run=True)
    stored["metadata"].setdefault("uid", "dry-run")
    processor = parse_processor(stored, "here")
    assert processor.processor_id == spec.get("processorId", "orders")
    assert stored["spec"]["delivery"]["leaseDuration"], "defaults are written out"


@pytest.mark.parametrize(("spec", "words"), INVALID)
def test_an_invalid_manifest_is_refused_with_the_remedy(cluster: Cluster, namespace: str, spec: Body, words: str):
    with pytest.raises(ApiError) as refusal:
        cluster.create(manifest(namespace, copy.deepcopy(spec)), dry_run=True)
    assert words in refusal.value.message


def test_the_command_line_judges_as_the_api_server_does(cluster: Cluster, namespace: str, random_cases: int):
    named = list(bodies(namespace))
    seed = int(os.environ.get("OUTBOX_SEED", random.randrange(2**32)))
    named += [(f"seed {seed}: {spec}", manifest(namespace, spec)) for spec in generated(seed, random_cases)]
    differences = [
        f"{name}: the API server {theirs or 'takes it'}, the command line {ours or 'takes it'}"
        for name, body in named
        for theirs, ours in [(refusal_of(cluster, body), admit(body)[1])]
        if not agree(theirs, ours)
    ]
    assert differences == []


def refusal_of(cluster: Cluster, body: Body) -> str:
    """What the API server says against a manifest; empty: it takes it."""
    try:
        cluster.create(copy.deepcopy(body), dry_run=True)
    except ApiError as err:
        return err.message
    return ""


def agree(theirs: str, ours: list[str]) -> bool:
    """Whether both take the manifest, or both refuse it: where rules are broken, by the same ones."""
    if not theirs or not ours:
        return not theirs and not ours
    by_us, by_them = ({rule for rule in rule_messages() if rule in said} for said in ("; ".join(ours), theirs))
    return by_us == by_them or not by_us


@pytest.mark.parametrize(("name", "words"), BAD_NAMES)
def test_a_name_that_its_pods_could_not_have_is_refused(cluster: Cluster, namespace: str, name: str, words: str):
    with pytest.raises(ApiError) as refusal:
        cluster.create(manifest(namespace, worker(), name), dry_run=True)
    assert words in refusal.value.message


@pytest.mark.parametrize(("before", "change", "words"), CHANGES)
def test_a_change_is_taken_or_refused_with_the_remedy(
    cluster: Cluster, namespace: str, before: Body, change: Body, words: str | None
):
    cluster.create(manifest(namespace, before))
    try:
        if words is None:
            cluster.patch("OutboxProcessor", namespace, "orders", {"spec": change})
            return
        with pytest.raises(ApiError) as refusal:
            cluster.patch("OutboxProcessor", namespace, "orders", {"spec": change})
        assert words in refusal.value.message
    finally:
        cluster.delete("OutboxProcessor", namespace, "orders")


def test_the_engine_changes_while_suspended(cluster: Cluster, namespace: str):
    cluster.create(manifest(namespace, worker(suspend=True)))
    changed = cluster.patch("OutboxProcessor", namespace, "orders", {"spec": {"engine": "Spark", "spark": {}}})
    cluster.delete("OutboxProcessor", namespace, "orders")
    assert changed["spec"]["engine"] == "Spark"


def test_the_scale_subresource_scales_a_worker_and_refuses_a_second_driver(cluster: Cluster, namespace: str):
    cluster.create(manifest(namespace, worker()))
    cluster.create(manifest(namespace, spark(), "driver"))
    scaled = cluster.patch("OutboxProcessor", namespace, "orders", {"spec": {"replicas": 3}}, subresource="scale")
    with pytest.raises(ApiError) as refusal:
        cluster.patch("OutboxProcessor", namespace, "driver", {"spec": {"replicas": 2}}, subresource="scale")
    for name in ("orders", "driver"):
        cluster.delete("OutboxProcessor", namespace, name)
    assert scaled["spec"]["replicas"] == 3
    assert "has one driver" in refusal.value.message


def test_resources_are_found_by_processor_id_and_engine(cluster: Cluster, namespace: str):
    cluster.create(manifest(namespace, worker(processorId="shop"), "one"))
    cluster.create(manifest(namespace, spark(), "two"))
    by_id = cluster.items("OutboxProcessor", namespace, fields="spec.processorId=shop")
    by_engine = cluster.items("OutboxProcessor", namespace, fields="spec.engine=Spark")
    for name in ("one", "two"):
        cluster.delete("OutboxProcessor", namespace, name)
    assert [body["metadata"]["name"] for body in by_id] == ["one"]
    assert [body["metadata"]["name"] for body in by_engine] == ["two"]


def test_kubectl_shows_what_matters_and_explains_the_fields(cluster: Cluster, namespace: str):
    cluster.create(manifest(namespace, worker()))
    header, row = kubectl("get", "obp", "--namespace", namespace, "--output", "wide").splitlines()
    explained = kubectl("explain", "obp.spec.delivery")
    cluster.delete("OutboxProcessor", namespace, "orders")
    shown = ["ENGINE", "MODE", "PHASE", "OWNER", "LAG", "CONFLICTS", "AGE", "READY", "CHECKPOINT", "HELD", "DEAD"]
    assert header.split() == ["NAME", *shown]
    assert row.split()[:3] == ["orders", "Worker", "Ordered"]
    assert "How messages are handled." in explained
    assert "batchSize" in explained


def kubectl(*arguments: str) -> str:
    command = [str(tool("kubectl")), "--kubeconfig", str(kubeconfig()), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_every_field_of_the_spec_is_explained():
    schema = crd.build_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    silent = [path for path, node in _walk("spec", schema) if not node.get("description")]
    assert silent == []


def _walk(path: str, node: Body) -> Iterator[tuple[str, Body]]:
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from _walk(f"{path}.{name}", child)
