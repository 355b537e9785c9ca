"""Whole specs with what is said against their podTemplates: those of overlays.py, others, and random ones."""

from __future__ import annotations

import random
from functools import reduce
from typing import TYPE_CHECKING, Any, cast

import pytest

from outbox_operator.api.overlay import merge
from tests.support.manifests import APART, spark, worker
from tests.support.overlays import ALLOWED, NEEDS_SECURITY, NO_SECRET, PLACE, REFUSED, Body, asking, own, pod

if TYPE_CHECKING:
    from collections.abc import Iterator

ELSEWHERE = [
    pytest.param(
        spark(spark={"driver": {"podTemplate": pod(hostPID=True)}}),
        ["spec.spark.driver.podTemplate.spec.hostPID: is not allowed, remove it"],
        id="the driver's",
    ),
    pytest.param(
        spark(spark={"executor": {"podTemplate": pod(containers=[{"name": "executor", "stdin": True}])}}),
        ["spec.spark.executor.podTemplate.spec.containers[executor].stdin: is not allowed, remove it"],
        id="the executors'",
    ),
    pytest.param(
        spark(
            spark={
                "executor": {
                    "podTemplate": {
                        "metadata": {"annotations": {"kubernetes.io/config.mirror": "m"}},
                        "spec": {
                            "runtimeClassName": "bare",
                            "containers": [
                                {
                                    "name": "executor",
                                    "lifecycle": {},
                                    "livenessProbe": {"httpGet": {"host": "10.0.0.1", "port": 80}},
                                    "resources": {"claims": []},
                                    "terminationMessagePath": "/etc/passwd",
                                    "volumeDevices": [],
                                    "volumeMounts": [
                                        {"name": "tmp", "mountPath": "/a", "mountPropagation": "HostToContainer"}
                                    ],
                                }
                            ],
                        },
                    }
                }
            }
        ),
        [
            f"spec.spark.executor.podTemplate.{said}"
            for said in (
                "metadata.annotations[kubernetes.io/config.mirror]: is the kubelet's for pods of its own, remove it",
                "spec.runtimeClassName: is not allowed, remove it",
                *(
                    f"spec.containers[executor].{name}: is not allowed, remove it"
                    for name in (
                        "lifecycle",
                        "livenessProbe",
                        "resources.claims",
                        "terminationMessagePath",
                        "volumeDevices",
                        "volumeMounts[tmp].mountPropagation",
                    )
                ),
            )
        ],
        id="what an executor's container may reach",
    ),
    pytest.param(
        spark(spark={"executor": {"podTemplate": pod(containers=[{"name": "worker"}])}}),
        [f"spec.spark.executor.podTemplate.spec.containers[worker].securityContext: {NEEDS_SECURITY}"],
        id="another engine's container in the executors",
    ),
    pytest.param(
        spark(
            spark={
                "config": {
                    "spark.kubernetes.executor.volumes.hostPath.root.mount.path": "/node",
                    "spark.kubernetes.executor.secrets.foreign": "/foreign",
                    "spark.kubernetes.executor.podTemplateFile": "/tmp/mine.yaml",
                    "spark.kubernetes.driver.podTemplateFile": "/tmp/mine.yaml",
                    "spark.kubernetes.allocation.pods.allocator": "statefulset",
                    "spark.kubernetes.allocation.batch.size": "5",
                    "spark.kubernetes.allocation.maxPendingPods": "5",
                    "spark.kubernetes.executor.request.cores": "250m",
                    "spark.sql.shuffle.partitions": "4",
                }
            }
        ),
        [
            f"spec.spark.config[{key}]: is the operator's, remove it: spark.executor.podTemplate shapes executors"
            for key in (
                "spark.kubernetes.allocation.pods.allocator",
                "spark.kubernetes.driver.podTemplateFile",
                "spark.kubernetes.executor.podTemplateFile",
                "spark.kubernetes.executor.secrets.foreign",
                "spark.kubernetes.executor.volumes.hostPath.root.mount.path",
            )
        ],
        id="Spark's own settings",
    ),
    pytest.param(
        worker(
            target=APART, worker={"podTemplate": own(envFrom=[{"secretRef": {"name": n}} for n in ("db", "reporting")])}
        ),
        [],
        id="the Secret of another database",
    ),
    pytest.param(
        worker(
            target={"python": {"module": "orders", "connection": {"secretRef": {"name": "reporting"}}}},
            worker={"podTemplate": own(envFrom=[{"secretRef": {"name": n}} for n in ("reporting", "broker")])},
        ),
        [f"{PLACE}.spec.containers[worker].envFrom[].secretRef.name: {NO_SECRET}"],
        id="the Secret of a handler's database, and another",
    ),
]


def cases() -> list[Any]:
    """Every spec of the tables with its violations."""
    taken = [pytest.param(asking(case.values[0]), [], id=case.id) for case in ALLOWED]
    refused = [
        pytest.param(
            asking(case.values[0]), [f"{PLACE}.{said}" for said in cast("list[str]", case.values[1])], id=case.id
        )
        for case in REFUSED
    ]
    return [*taken, *refused, *ELSEWHERE]


def combined(seed: int, count: int) -> Iterator[Body]:
    """Specs whose podTemplate is laid together of some of the tables, drawn at random; in a third parts are junk."""
    draw = random.Random(seed)
    allowed, refused = ([cast("Body", case.values[0]) for case in table] for table in (ALLOWED, REFUSED))
    for _ in range(count):
        parts = draw.sample(allowed, 3) + draw.sample(refused, draw.choice((0, 0, 1, 2)))
        draw.shuffle(parts)
        template: Body = reduce(merge, parts, {})
        yield asking(template if draw.random() < 0.67 else {key: _spoilt(draw, part) for key, part in template.items()})


_JUNK: tuple[Any, ...] = (
    None,
    1,
    0,
    1.5,
    True,
    False,
    "",
    "x",
    [],
    {},
    [1],
    [{}],
    [[]],
    ["ALL"],
    {"a": 1},
    [{"name": "worker"}],
)


def _spoilt(draw: random.Random, value: Any) -> Any:
    """The same with something else in some places."""
    if draw.random() < 0.1:
        return draw.choice(_JUNK)
    if isinstance(value, dict):
        return {key: _spoilt(draw, child) for key, child in value.items()}
    return [_spoilt(draw, child) for child in value] if isinstance(value, list) else value
