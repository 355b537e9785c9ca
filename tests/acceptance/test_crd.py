"""What the API server takes and refuses, and with which words: a table of manifests, on the real API server."""

from __future__ import annotations

import copy
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from outbox_operator import crd
from outbox_operator.resources import parse_processor
from tests.chart.chart import tool
from tests.support.cluster import ApiError, kubeconfig, namespaces

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.cluster import Cluster

pytestmark = pytest.mark.cluster

Body = dict[str, Any]
SOURCE = {"connection": {"secretRef": {"name": "db"}}}
SQL = {"sql": {"statement": "INSERT INTO seen SELECT position FROM batch"}}
RABBITMQ = {"rabbitmq": {"connection": {"secretRef": {"name": "broker"}}, "exchange": "orders"}}
APART = {"sql": {**SQL["sql"], "connection": {"secretRef": {"name": "reporting"}}}}
REBUILD = {"processorId": "orders-v1", "swapStatement": "SELECT 1"}
PARQUET = {"parquet": {"path": "/data/orders"}}
VOLUMES = [{"name": "data", "claimName": "orders", "mountPath": "/data"}]
LONG = "a" * 53
PARTITIONED = {"mode": "Partitioned", "partitions": {}}
MAPPED = {**SOURCE, "table": {"schemaName": "app", "name": "outbox"}}


def worker(**spec: Any) -> Body:
    """A valid worker, with `spec` over it; a value of None removes the field."""
    merged = {"source": SOURCE, "target": SQL, **spec}
    return {key: value for key, value in merged.items() if value is not None}


def spark(**spec: Any) -> Body:
    return worker(engine="Spark", **{"spark": {}, **spec})


VALID = [
    pytest.param(worker(), id="the least worker"),
    pytest.param(worker(target={"python": {"module": "orders", "configMapRef": {"name": "code"}}}), id="python"),
    pytest.param(worker(target=RABBITMQ), id="rabbitmq"),
    pytest.param(worker(target={"log": {}}), id="log"),
    pytest.param(worker(target=RABBITMQ, delivery={"guarantee": "AtLeastOnce"}), id="rabbitmq at least once"),
    pytest.param(worker(delivery={"checkpoint": "BeforeHandling"}), id="checkpoint first"),
    pytest.param(worker(delivery={"leaseDuration": "1m30s", "batchSize": 100_000}), id="bounds of delivery"),
    pytest.param(worker(worker={"replicas": 0}), id="no replicas"),
    pytest.param(worker(target=APART), id="into another database"),
    pytest.param(worker(startFrom={"type": "Processor", "processorId": "first"}), id="from another's checkpoint"),
    pytest.param(worker(rebuildOf=REBUILD), id="a rebuild"),
    pytest.param(worker(rebuildOf=REBUILD, delivery=PARTITIONED), id="a divided rebuild"),
    pytest.param(worker(delivery=PARTITIONED), id="partitioned"),
    pytest.param(
        worker(delivery={**PARTITIONED, "partitions": {"count": 64, "key": {"data": ["order", "id"]}}}),
        id="partitioned by a path",
    ),
    pytest.param(worker(worker={"resources": {"limits": {"cpu": 1, "memory": "1Gi"}}}), id="quantities of both kinds"),
    pytest.param(
        worker(worker={"podTemplate": {"spec": {"nodeSelector": {"disk": "ssd"}}}}), id="pod template overlay"
    ),
    pytest.param(worker(startFrom={"type": "Position", "position": 815}), id="start at a position"),
    pytest.param(worker(startFrom={"type": "Timestamp", "timestamp": "2026-01-01T00:00:00Z"}), id="start at a time"),
    pytest.param(worker(processorId="shop/orders:v2"), id="a processorId"),
    pytest.param(worker(handOverTo={"namespace": "other", "name": "orders"}), id="hand over"),
    pytest.param(
        worker(source={**SOURCE, "table": {"schemaName": "app", "name": "outbox", "columns": {"messageId": "id"}}}),
        id="a mapped table",
    ),
    pytest.param(worker(source={**SOURCE, "publications": ["a", "b"], "messageTypes": ["X"]}), id="filters"),
    pytest.param(spark(), id="the least Spark"),
    pytest.param(spark(target=PARQUET, spark={"volumes": VOLUMES}), id="Parquet on a volume"),
    pytest.param(
        spark(target=PARQUET, spark={"volumes": [{**VOLUMES[0], "mountPath": "/data/"}]}),
        id="Parquet on a volume's path/",
    ),
    pytest.param(
        spark(target={"parquet": {"path": "/data"}}, spark={"volumes": VOLUMES}), id="Parquet on the volume itself"
    ),
    pytest.param(spark(target=None, spark={"application": {"module": "orders"}}), id="an application"),
    pytest.param(spark(spark={"application": {"module": "orders"}}), id="an application that transforms"),
    pytest.param(spark(spark={"executor": {"instances": 3, "memory": "2g"}, "config": {"a": "b"}}), id="executors"),
]

NAME = "metadata.name must be"
INVALID = [
    pytest.param(worker(target=None), "engine Worker needs a target", id="no target"),
    pytest.param(worker(target={}), "set exactly one target", id="an empty target"),
    pytest.param(worker(target={**SQL, "log": {}}), "set exactly one target", id="two targets"),
    pytest.param(worker(source=None), "spec.source: Required value", id="no source"),
    pytest.param(worker(source={"connection": {}}), "secretRef: Required value", id="no Secret"),
    pytest.param(worker(target=PARQUET), "target.parquet needs engine: Spark", id="Parquet without Spark"),
    pytest.param(worker(spark={}), "spark goes with engine Spark", id="Spark's block with a worker"),
    pytest.param(worker(engine="Flink"), 'supported values: "Worker", "Spark"', id="an unknown engine"),
    pytest.param(
        worker(target=RABBITMQ, delivery={"guarantee": "Transactional"}),
        "set delivery.guarantee: AtLeastOnce",
        id="a transactional broker",
    ),
    pytest.param(
        worker(target={"log": {}}, delivery={"guarantee": "Transactional"}),
        "set delivery.guarantee: AtLeastOnce",
        id="a transactional log",
    ),
    pytest.param(
        worker(target=RABBITMQ, delivery={"checkpoint": "BeforeHandling"}),
        "needs a target in the same transaction",
        id="checkpoint before a broker",
    ),
    pytest.param(
        worker(delivery={"checkpoint": "BeforeHandling", "guarantee": "AtLeastOnce"}),
        "checkpoint BeforeHandling needs guarantee Transactional",
        id="checkpoint first at least once",
    ),
    pytest.param(worker(delivery={"mode": "Sorted"}), 'supported values: "Ordered"', id="no mode"),
    pytest.param(
        worker(delivery={"mode": "Competing"}), "competing goes with mode Competing", id="competing by halves"
    ),
    pytest.param(
        worker(delivery={"mode": "Competing", "competing": {}, "blocks": "Key"}),
        "leave blocks out",
        id="competing for keys",
    ),
    pytest.param(
        worker(delivery={"mode": "Competing", "competing": {}, "leaseDuration": "30s"}),
        "set competing.leaseDuration",
        id="two leases",
    ),
    pytest.param(
        worker(delivery={"leaseDuration": "1s"}), "leaseDuration must be between 2s and 10m", id="a short lease"
    ),
    pytest.param(worker(delivery={"leaseDuration": "soon"}), "should match", id="no duration"),
    pytest.param(worker(delivery={"pollInterval": "1ms"}), "pollInterval must be between", id="a busy loop"),
    pytest.param(worker(delivery={"timeout": "2h"}), "timeout must be between 1s and 1h", id="a long timeout"),
    pytest.param(worker(delivery={"batchSize": 0}), "greater than or equal to 1", id="an empty batch"),
    pytest.param(worker(delivery={"mode": "Partitioned"}), "partitions goes with mode", id="undivided"),
    pytest.param(worker(delivery={"partitions": {}}), "partitions goes with mode", id="divided, yet ordered"),
    pytest.param(
        worker(delivery={"mode": "Partitioned", "partitions": {"count": 65}}), "less than or equal to 64", id="many"
    ),
    pytest.param(
        worker(delivery={"mode": "Partitioned", "partitions": {"key": {"column": "a", "data": ["b"]}}}),
        "set at most one of column, data and metadata",
        id="two keys",
    ),
    pytest.param(
        worker(delivery=PARTITIONED, worker={"replicas": 9}),
        "must not be above delivery.partitions",
        id="idle replicas",
    ),
    pytest.param(worker(delivery=PARTITIONED, source=MAPPED), "mode Partitioned needs a key", id="no key column"),
    pytest.param(spark(delivery=PARTITIONED), "engine Spark reads in parallel by itself", id="Spark partitioned"),
    pytest.param(
        worker(delivery={"retry": {"initialBackoff": "2m"}}), "retry.initialBackoff must not be longer", id="backoffs"
    ),
    pytest.param(worker(delivery={"retry": {"jitter": 2}}), "less than or equal to 1", id="jitter"),
    pytest.param(worker(delivery={"whenExhausted": "Hide"}), 'supported values: "Stop"', id="hide"),
    pytest.param(worker(delivery={"whenExhausted": "Requeue"}), "Requeue needs mode Competing", id="requeue in order"),
    pytest.param(worker(startFrom={"type": "Position"}), "position goes with type Position", id="no position"),
    pytest.param(worker(startFrom={"position": 1}), "position goes with type Position", id="a position at random"),
    pytest.param(worker(startFrom={"type": "Processor"}), "processorId goes with type Processor", id="no processor"),
    pytest.param(
        worker(startFrom={"type": "Processor", "processorId": "orders"}), "is this very processor", id="from itself"
    ),
    pytest.param(worker(rebuildOf={**REBUILD, "processorId": "orders"}), "is this very processor", id="of itself"),
    pytest.param(worker(rebuildOf=REBUILD, target=RABBITMQ), "rebuildOf needs engine Worker", id="rebuilt in a broker"),
    pytest.param(spark(target=APART), "leave target.sql.connection out", id="Spark into another database"),
    pytest.param(worker(startFrom={"type": "Timestamp"}), "timestamp goes with type Timestamp", id="no timestamp"),
    pytest.param(
        worker(startFrom={"type": "Timestamp", "timestamp": "yesterday"}), "must be of type date-time", id="a bad time"
    ),
    pytest.param(worker(worker={"replicas": -1}), "greater than or equal to 0", id="negative replicas"),
    pytest.param(worker(worker={"replicas": 101}), "less than or equal to 100", id="too many replicas"),
    pytest.param(worker(worker={"resources": {"limits": {"cpu": "much"}}}), "should match", id="no quantity"),
    pytest.param(worker(processorId="a b"), "should match", id="a processorId with a blank"),
    pytest.param(worker(processorId="a" * 129), "may not be more than 128", id="a long processorId"),
    pytest.param(worker(handOverTo={"name": "other"}), "namespace: Required value", id="hand over to nowhere"),
    pytest.param(worker(surprise=True), 'unknown field "spec.surprise"', id="an unknown field"),
    pytest.param(worker(target={"python": {"module": "orders.py; rm"}}), "should match", id="a module that is none"),
    pytest.param(worker(source={**SOURCE, "publications": ["a", "a"]}), "Duplicate value", id="a publication twice"),
    pytest.param(spark(spark=None), "engine Spark needs the block spark", id="Spark without its block"),
    pytest.param(spark(target=None), "engine Spark needs something to do", id="Spark without work"),
    pytest.param(spark(target=RABBITMQ), "engine Spark knows target.sql and target.parquet", id="Spark to a broker"),
    pytest.param(
        spark(delivery={"guarantee": "AtLeastOnce"}), "engine Spark is Transactional", id="Spark at least once"
    ),
    pytest.param(spark(worker={"replicas": 2}), "worker goes with engine Worker", id="two drivers"),
    pytest.param(spark(worker={"image": "mine"}), "worker goes with engine Worker", id="Spark with a worker image"),
    pytest.param(spark(target=PARQUET), "must lie on one of spark.volumes", id="Parquet on no volume"),
    pytest.param(
        spark(target={"parquet": {"path": "/database"}}, spark={"volumes": VOLUMES}),
        "must lie on one of spark.volumes",
        id="Parquet beside a volume",
    ),
    pytest.param(
        spark(target={"parquet": {"path": "data"}}, spark={"volumes": VOLUMES}), "should match", id="a relative path"
    ),
    pytest.param(
        spark(spark={"volumes": [*VOLUMES, {"name": "b", "claimName": "b", "mountPath": "/data"}]}),
        "two volumes have the same mountPath",
        id="two volumes at one path",
    ),
    pytest.param(spark(spark={"executor": {"memory": "2GB"}}), "should match", id="memory that Spark cannot read"),
    pytest.param(spark(spark={"executor": {"instances": 0}}), "greater than or equal to 1", id="no executor"),
]

BAD_NAMES = [
    pytest.param(LONG, "metadata.name must not be longer than 52 characters", id="a long name"),
    pytest.param("a.b", "letters, digits and dashes", id="a name with a dot"),
    pytest.param("1a", "starting with a letter", id="a name with a digit in front"),
]

CHANGES = [
    pytest.param({"processorId": "other"}, "processorId cannot be changed", id="processorId set later"),
    pytest.param({"processorId": "orders"}, None, id="processorId said, unchanged"),
    pytest.param(
        {"engine": "Spark", "spark": {}}, "engine can be changed only while suspended", id="engine while running"
    ),
    pytest.param(
        {"engine": "Spark", "spark": {}, "suspend": True},
        "engine can be changed only while suspended",
        id="engine and suspend at once",
    ),
    pytest.param({"suspend": True}, None, id="suspend"),
    pytest.param({"target": APART}, "target connection cannot be added or taken away", id="into another database"),
    pytest.param({"rebuildOf": REBUILD}, None, id="a rebuild"),
    pytest.param({"source": {**SOURCE, "schemaName": "b"}}, "source.schemaName cannot be changed", id="schemaName"),
    pytest.param({"source": {"connection": {"secretRef": {"name": "new"}}}}, None, id="another Secret"),
    pytest.param({"target": {"sql": None, "log": {}}}, None, id="another target"),
]


@pytest.fixture(scope="module")
def namespace(cluster: Cluster) -> Iterator[str]:
    with namespaces(cluster, "crd") as (name,):
        yield name


def manifest(namespace: str, spec: Body, name: str = "orders") -> Body:
    meta = {"name": name, "namespace": namespace}
    return {"apiVersion": "outbox-operator.dev/v1alpha1", "kind": "OutboxProcessor", "metadata": meta, "spec": spec}


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


@pytest.mark.parametrize(("name", "words"), BAD_NAMES)
def test_a_name_that_its_pods_could_not_have_is_refused(cluster: Cluster, namespace: str, name: str, words: str):
    with pytest.raises(ApiError) as refusal:
        cluster.create(manifest(namespace, worker(), name), dry_run=True)
    assert words in refusal.value.message


@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_a_change_is_taken_or_refused_with_the_remedy(
    cluster: Cluster, namespace: str, change: Body, words: str | None
):
    cluster.create(manifest(namespace, worker()))
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
