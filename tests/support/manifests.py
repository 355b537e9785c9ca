"""Manifests that the CRD takes, and those that it refuses with a rule: for the API server and for `-f` alike."""

from __future__ import annotations

import random
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import pytest

from outbox_operator import crd

if TYPE_CHECKING:
    from collections.abc import Iterator

Body = dict[str, Any]
SOURCE: Body = {"connection": {"secretRef": {"name": "db"}}}
SQL: Body = {"sql": {"statement": "INSERT INTO seen SELECT position FROM batch"}}
HTTP = {"http": {"url": "https://shop.test/events", "connection": {"secretRef": {"name": "receiver"}}}}
KAFKA = {"kafka": {"connection": {"secretRef": {"name": "kafka"}}, "topic": "shop.{messageType}"}}
RABBITMQ = {"rabbitmq": {"connection": {"secretRef": {"name": "broker"}}, "exchange": "orders"}}
STREAM = {"rabbitmqStream": {"connection": {"secretRef": {"name": "broker"}}, "stream": "orders"}}
IN_ORDER: Body = {**SOURCE, "cursor": "TransactionOrder"}
APART = {"sql": {**SQL["sql"], "connection": {"secretRef": {"name": "reporting"}}}}
REBUILD = {"processorId": "orders-v1", "swapStatement": "SELECT 1"}
PARQUET = {"parquet": {"path": "/data/orders"}}
VOLUMES = [{"name": "data", "claimName": "orders", "mountPath": "/data"}]
LONG = "a" * 53
COMPETING = {"mode": "Competing", "competing": {}}
KEYED = {"blocks": "Key", "whenExhausted": "DeadLetter"}
PARTITIONED = {"mode": "Partitioned", "partitions": {}}
MAPPED: Body = {**SOURCE, "table": {"schemaName": "app", "name": "outbox"}}


def manifest(namespace: str, spec: Body, name: str = "orders") -> Body:
    meta = {"name": name, "namespace": namespace}
    return {"apiVersion": "outbox-operator.dev/v1alpha1", "kind": "OutboxProcessor", "metadata": meta, "spec": spec}


def worker(**spec: Any) -> Body:
    """A valid worker, with `spec` over it; a value of None removes the field."""
    merged = {"source": SOURCE, "target": SQL, **spec}
    return {key: value for key, value in merged.items() if value is not None}


def spark(**spec: Any) -> Body:
    return worker(engine="Spark", **{"spark": {}, **spec})


VALID = [
    pytest.param(worker(), id="the least worker"),
    pytest.param(worker(delivery={"rateLimit": {"messagesPerSecond": 1}}), id="a whole rate"),
    pytest.param(worker(delivery={"rateLimit": {"messagesPerSecond": 0.001}}), id="the lowest rate"),
    pytest.param(worker(target={"http": {"url": "https://x:65535?a=b:99999"}}), id="the highest port"),
    pytest.param(worker(target={"python": {"module": "orders", "configMapRef": {"name": "code"}}}), id="python"),
    pytest.param(worker(target=RABBITMQ), id="rabbitmq"),
    pytest.param(worker(target=KAFKA), id="kafka"),
    pytest.param(worker(target=STREAM, source=IN_ORDER), id="a stream of RabbitMQ"),
    pytest.param(worker(target=STREAM, source=IN_ORDER, delivery=PARTITIONED), id="a stream of RabbitMQ, partitioned"),
    pytest.param(
        worker(
            target={"kafka": KAFKA["kafka"] | {"checkpointTopic": "orders-checkpoints"}},
            delivery={"guarantee": "Transactional"},
        ),
        id="kafka in transactions",
    ),
    pytest.param(worker(target=HTTP), id="http"),
    pytest.param(
        worker(target={"http": {"url": "http://receiver:8080/a?b=c", "source": "shop:{partitionKey}"}}),
        id="http, no Secret",
    ),
    pytest.param(worker(target={"log": {}}), id="log"),
    pytest.param(worker(target=RABBITMQ, delivery={"guarantee": "AtLeastOnce"}), id="rabbitmq at least once"),
    pytest.param(worker(delivery={"checkpoint": "BeforeHandling"}), id="checkpoint first"),
    pytest.param(
        worker(delivery={"leaseDuration": "1m30s", "batchSize": 100_000, "batchBytes": "999Mi"}),
        id="bounds of delivery",
    ),
    pytest.param(worker(worker={"replicas": 0}), id="no replicas"),
    pytest.param(worker(target=APART), id="into another database"),
    pytest.param(worker(startFrom={"type": "Processor", "processorId": "first"}), id="from another's checkpoint"),
    pytest.param(worker(worker={"shared": "small", "replicas": 2}), id="a shared pod"),
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
    pytest.param(
        worker(worker={"shared": "small"}, delivery=PARTITIONED), "worker.shared is for small processors", id="shared"
    ),
    pytest.param(
        worker(worker={"shared": "small", "image": "mine"}), "made for several resources", id="shared, with an image"
    ),
    *(
        pytest.param(
            worker(delivery={"rateLimit": {"messagesPerSecond": rate}}),
            "messagesPerSecond must be at least 0.001",
            id=f"{rate} messages a second",
        )
        for rate in (0, -1, 0.0001)
    ),
    *(
        pytest.param(worker(target={"http": {"url": f"https://x{end}"}}), "the port must be between", id=f"URL {end}")
        for end in (":99999/y", ":65536", ":0?a=b")
    ),
    pytest.param(worker(source={**SOURCE, "schemaName": "out%box"}), "source.schemaName", id="a per cent sign"),
    *(
        pytest.param(spark(spark={"config": {"a": "b", key: "7"}}), "are written as spark.executor", id=f"config {key}")
        for key in ("spark.executor.memory", "spark.master", "spark.ui.port")
    ),
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
        worker(target=KAFKA, delivery={"guarantee": "Transactional", "mode": "Competing", "competing": {}}),
        "target.kafka with delivery.guarantee Transactional needs delivery.mode Ordered or Partitioned",
        id="transactions of consumers",
    ),
    pytest.param(worker(target=STREAM), "set source.cursor: TransactionOrder", id="a stream of RabbitMQ, no cursor"),
    pytest.param(
        worker(target=STREAM, delivery=COMPETING),
        "delivery.mode: Ordered or Partitioned",
        id="a stream of RabbitMQ, competing",
    ),
    pytest.param(worker(target={"kafka": {"topic": "orders"}}), "connection: Required value", id="no brokers"),
    pytest.param(
        worker(target={"kafka": KAFKA["kafka"] | {"topic": "shop/{messageType}"}}), "target.kafka.topic", id="no topic"
    ),
    pytest.param(
        worker(
            target={"kafka": KAFKA["kafka"] | {"topic": "orders", "checkpointTopic": "orders"}},
            delivery={"guarantee": "Transactional"},
        ),
        "checkpointTopic cannot be the topic of the messages",
        id="messages in the topic of checkpoints",
    ),
    pytest.param(
        worker(target=HTTP, delivery={"guarantee": "Transactional"}),
        "set delivery.guarantee: AtLeastOnce",
        id="a transactional receiver",
    ),
    pytest.param(spark(target=HTTP), "engine Spark knows target.sql and target.parquet", id="Spark to a receiver"),
    pytest.param(worker(target={"http": {"url": "ftp://shop.test/"}}), "target.http.url", id="no http URL"),
    pytest.param(
        worker(target={"http": {"url": "https://user:pass@shop.test/"}}),
        "target.http.url",
        id="a password in the URL",
    ),
    pytest.param(
        worker(target={"http": {"url": "https://shop.test/", "type": "{messageId}"}}),
        "target.http.type",
        id="an unknown placeholder",
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
    pytest.param(worker(delivery={"batchBytes": "9Gi"}), "should match", id="a batch of too many bytes"),
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
    pytest.param(
        spark(delivery={"whenExhausted": "Skip"}), "engine Spark stops at a micro-batch that fails", id="Spark skips"
    ),
    pytest.param(spark(source={**SOURCE, "cursor": "Snapshot"}), "a Spark offset is one pair", id="Spark by windows"),
    pytest.param(
        worker(source={**MAPPED, "table": {**MAPPED["table"], "columns": {"deliverAfter": "due"}}}),
        "delayed messages (source.table.columns.deliverAfter) need delivery.mode",
        id="delayed in order",
    ),
    pytest.param(
        worker(source=MAPPED, delivery=KEYED), "delivery.blocks: Key needs a key", id="a mapped table without a key"
    ),
    pytest.param(
        worker(delivery={"key": {"column": "customer"}}),
        "key goes with mode Ordered and blocks: Key",
        id="a key for none",
    ),
    pytest.param(
        worker(delivery={"circuitBreaker": {"openFor": "2h"}}),
        "circuitBreaker.openFor must be between 100ms and 1h",
        id="a breaker that stays open",
    ),
    pytest.param(
        worker(delivery={**COMPETING, "competing": {"queue": "mail"}}, source=MAPPED),
        "delivery.competing.queue is a table of its own",
        id="a queue and a table",
    ),
    pytest.param(
        worker(delivery=COMPETING, source={**SOURCE, "cursor": "Snapshot"}),
        "mode Competing hands out batches and has no cursor",
        id="competing with a cursor",
    ),
    pytest.param(
        worker(delivery=COMPETING, target=APART),
        "mode Competing hands out batches beside the messages",
        id="competing into another database",
    ),
    pytest.param(
        worker(delivery=COMPETING, startFrom={"type": "Processor", "processorId": "first"}),
        "mode Competing does not start from another processor's checkpoint",
        id="competing from another's checkpoint",
    ),
    pytest.param(
        worker(delivery={**COMPETING, "checkpoint": "BeforeHandling"}),
        "in mode Competing leave checkpoint out",
        id="competing with a checkpoint",
    ),
    pytest.param(
        worker(delivery={**COMPETING, "competing": {"leaseDuration": "1s"}}),
        "competing.leaseDuration must be between 2s and 1h",
        id="a batch leased too shortly",
    ),
    pytest.param(
        worker(delivery={**COMPETING, "competing": {"ageing": "500ms"}}),
        "competing.ageing must be at least 1s",
        id="a priority worth nothing",
    ),
    pytest.param(worker(delivery=None, suspend="yes"), "must be of type boolean", id="a word for a boolean"),
    pytest.param(spark(spark={"executor": {"memory": "2GB"}}), "should match", id="memory that Spark cannot read"),
    pytest.param(spark(spark={"executor": {"instances": 0}}), "greater than or equal to 1", id="no executor"),
]

BAD_NAMES = [
    pytest.param(LONG, "metadata.name must not be longer than 52 characters", id="a long name"),
    pytest.param("a.b", "letters, digits and dashes", id="a name with a dot"),
    pytest.param("1a", "starting with a letter", id="a name with a digit in front"),
]

CHANGES = [
    pytest.param(worker(), {"processorId": "other"}, "processorId cannot be changed", id="processorId set later"),
    pytest.param(worker(), {"processorId": "orders"}, None, id="processorId said, unchanged"),
    pytest.param(
        worker(),
        {"engine": "Spark", "spark": {}},
        "engine can be changed only while suspended",
        id="engine while running",
    ),
    pytest.param(
        worker(),
        {"engine": "Spark", "spark": {}, "suspend": True},
        "engine can be changed only while suspended",
        id="engine and suspend at once",
    ),
    pytest.param(worker(), {"suspend": True}, None, id="suspend"),
    pytest.param(
        worker(), {"target": APART}, "target connection cannot be added or taken away", id="into another database"
    ),
    pytest.param(worker(), {"rebuildOf": REBUILD}, None, id="a rebuild"),
    pytest.param(
        worker(), {"source": {**SOURCE, "schemaName": "b"}}, "source.schemaName cannot be changed", id="schemaName"
    ),
    pytest.param(worker(), {"source": {"connection": {"secretRef": {"name": "new"}}}}, None, id="another Secret"),
    pytest.param(worker(), {"target": {"sql": None, "log": {}}}, None, id="another target"),
    pytest.param(
        worker(source={**SOURCE, "cursor": "Snapshot"}),
        {"source": {"cursor": "TransactionOrder"}},
        "cursor cannot be changed",
        id="cursor",
    ),
    pytest.param(worker(), {"delivery": COMPETING}, "mode cannot be changed", id="mode"),
    pytest.param(
        worker(delivery=PARTITIONED),
        {"delivery": {"partitions": {"key": {"column": "customer"}}}},
        "partitions.key cannot be changed",
        id="the key of partitions",
    ),
    pytest.param(
        worker(delivery=COMPETING),
        {"delivery": {"competing": {"queue": "mail"}}},
        "competing.queue cannot be changed",
        id="queue",
    ),
]


def bodies(namespace: str) -> Iterator[tuple[str, Body]]:
    """Every manifest of the tables, with its name: valid, invalid, badly named."""
    for case in (*VALID, *INVALID):
        yield str(case.id), manifest(namespace, cast("Body", case.values[0]))
    for case in BAD_NAMES:
        yield str(case.id), manifest(namespace, worker(), str(case.values[0]))


_CHOICES: dict[str, list[Any]] = {
    "engine": [None, None, None, "Spark"],
    "source": [
        SOURCE,
        SOURCE,
        MAPPED,
        {**SOURCE, "cursor": "Snapshot"},
        {**MAPPED, "table": {**MAPPED["table"], "columns": {"partitionKey": "customer", "deliverAfter": "due"}}},
    ],
    "target": [SQL, SQL, APART, RABBITMQ, {"log": {}}, PARQUET, {"python": {"module": "orders"}}, None],
    "startFrom": [None, None, {"type": "End"}, {"type": "Processor", "processorId": "first"}, {"position": 1}],
    "rebuildOf": [None, None, None, REBUILD],
    "worker": [None, None, {"replicas": 2}, {"replicas": 9}],
    "spark": [None, None, {"volumes": VOLUMES}],
}
_DELIVERY: dict[str, list[Any]] = {
    "mode": [None, None, "Ordered", "Partitioned", "Competing"],
    "partitions": [None, None, {"count": 4}, {"key": {"column": "customer"}}],
    "competing": [None, None, {}, {"queue": "mail"}],
    "guarantee": [None, None, "Transactional", "AtLeastOnce"],
    "checkpoint": [None, None, None, "BeforeHandling"],
    "whenExhausted": [None, None, "DeadLetter", "Requeue", "Skip"],
    "blocks": [None, None, "Key", "Nothing", "Partition"],
    "key": [None, None, None, {"data": ["customer"]}],
    "leaseDuration": [None, None, "20s", "1s"],
    "rateLimit": [None, None, 50],
}


def generated(seed: int, count: int) -> Iterator[Body]:
    """Specs of fields drawn at random: modes, engines, cursors, guarantees, targets and failure policies combined.

    Few at random would be valid, so only some of the fields are drawn for each.
    """
    draw = random.Random(seed)
    for _ in range(count):
        chosen = {name for name in (*_CHOICES, *_DELIVERY) if draw.random() < 0.3}
        spec = {name: draw.choice(values) for name, values in _CHOICES.items() if name in chosen}
        delivery = {name: draw.choice(values) for name, values in _DELIVERY.items() if name in chosen}
        if draw.random() < 0.5:  # what goes with the mode, so that other rules are reached
            delivery |= {"Partitioned": PARTITIONED, "Competing": COMPETING}.get(str(delivery.get("mode")), {})
        yield worker(**spec, delivery={key: value for key, value in delivery.items() if value is not None})


def rules_of_the_crd() -> list[Body]:
    """Every CEL rule of the CRD."""

    def walk(node: Body) -> Iterator[Body]:
        yield from node.get("x-kubernetes-validations", ())
        for child in node.get("properties", {}).values():
            yield from walk(child)

    return list(walk(crd.build_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]))


@cache
def rule_messages() -> frozenset[str]:
    """The message of every CEL rule of the CRD."""
    return frozenset(rule["message"] for rule in rules_of_the_crd())
