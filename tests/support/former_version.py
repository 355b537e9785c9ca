"""Records what a version says and how it reads it: operator to worker, worker to operator, status and CRD.

`python -m tests.support.former_version COMMIT` with that commit's code first in PYTHONPATH writes the recording that
`tests/unit/operator/test_former_version.py` compares this version with. Only what both versions have is used here:

    git worktree add /tmp/former COMMIT
    PYTHONPATH=/tmp/former/operator/src:/tmp/former/worker/src .venv/bin/python -m tests.support.former_version COMMIT \
        > tests/unit/operator/former_version.json
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from outbox_core.config import ProcessorConfig
from outbox_core.report import Report
from outbox_operator.api.observed import Observed, PodView, Role
from outbox_operator.api.resources import Processor, ProcessorSpec
from outbox_operator.crd import build_crd
from outbox_operator.decision.decide import decide
from outbox_operator.reconcile.apply import dump_status
from outbox_operator.rendering.manifests import build_config, format_config
from outbox_operator.settings import Images

if TYPE_CHECKING:
    from pydantic import BaseModel

NOW: Final = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
REMOTE: Final = {"sql": {"statement": "SELECT 1", "connection": {"secretRef": {"name": "reporting"}}}}
REBUILD: Final = {"processorId": "v1", "swapStatement": "SELECT 1"}
SPECS: Final[dict[str, dict[str, Any]]] = {
    "defaults": {},
    "partitioned": {"delivery": {"mode": "Partitioned", "partitions": {"count": 4}}, "worker": {"replicas": 2}},
    "competing": {"delivery": {"mode": "Competing", "whenExhausted": "DeadLetter"}},
    "by pairs": {"source": {"connection": {"secretRef": {"name": "db"}}, "cursor": "TransactionOrder"}},
    "a broker": {"target": {"rabbitmq": {"connection": {"secretRef": {"name": "broker"}}}}},
    "another database": {"target": REMOTE},
    "a rebuild": {"processorId": "v2", "rebuildOf": REBUILD},
    "Spark": {"engine": "Spark", "spark": {"executor": {"instances": 2}}},
}
OTHER: Final = {"cluster": "here", "namespace": "elsewhere", "name": "orders", "uid": "uid-2"}
CONFLICT: Final = {
    "id": 7,
    "code": 4,
    "partition": 1,
    "expected": "815:42",
    "stored": "815:60",
    "new": "815:50",
    "epoch": 4,
    "pod": "orders-0",
    "time": "2026-01-01T12:00:00.123456Z",
    "holder": OTHER,
    "holderPod": "orders-1",
    "needsPerson": True,
}
LEASE: Final = {"partition": 0, "epoch": 4, "pod": "orders-0", "held": True, "expiresAt": "2026-01-01T12:00:15.500000Z"}
HIGH_WATER_MARK: Final = {
    "transactionId": "900",
    "ageSeconds": 95.25,
    "holder": "prepared transaction 'stuck'",
    "heldBy": {"kind": "prepared", "prepared": "stuck", "ageSeconds": 99.5},
    "others": 2,
    "remedy": "end it",
}
BLOCKED: Final = [
    {
        "key": "7",
        "partition": 1,
        "messageId": "m",
        "attempts": 2,
        "errorClass": "ValueError",
        "nextAttemptAt": "2026-01-01T12:00:01Z",
        "deadLetter": False,
    },
    {"key": "8", "messageId": "n", "attempts": 1, "deadLetter": True},
]
REPORT: Final[dict[str, Any]] = {
    "processorId": "orders",
    "resource": {"cluster": "here", "namespace": "shop", "name": "orders", "uid": "uid-1"},
    "generation": 3,
    "pod": "orders-0",
    "podUid": "pod-uid",
    "instance": "i",
    "time": "2026-01-01T12:00:00.500000Z",
    "state": "Active",
    "reason": "Running",
    "message": "handles messages",
    "claimHolder": OTHER,
    "lease": LEASE,
    "leases": [LEASE, {"partition": 1, "epoch": 5, "pod": "orders-1"}],
    "partitioning": {"count": 2, "nextCount": 4, "atBarrier": 1, "message": "partition 1 is awaited"},
    "checkpoints": [
        {"partition": 0, "pair": "815:42", "storedAt": "2026-01-01T12:00:00.123456Z"},
        {"partition": 1, "pair": "816:9223372036854775807"},
    ],
    "lag": {"messages": 7, "atLeast": True, "seconds": 12.3456},
    "highWaterMark": HIGH_WATER_MARK,
    "handled": 3,
    "batches": 2,
    "attempt": 1,
    "startFromUsed": False,
    "lastError": "ValueError",
    "conflicts": {"count": 2, "byCode": {"4": 2}, "last": CONFLICT, "open": CONFLICT, "unownedCalls": 3},
    "failures": {"held": 5, "deadLetters": 6, "atLeast": True, "blockedKeys": BLOCKED},
    "circuit": "HalfOpen",
    "executors": 2,
    "unfinished": {
        "messages": 5,
        "batches": 1,
        "free": 1,
        "retries": 2,
        "consumers": 2,
        "oldestSeconds": 1.5,
    },
    "advice": "create the index",
    "rebuild": {"of": "v1", "state": "SwapHeld", "behind": 3, "atLeast": True, "message": "hold is set"},
}


def build_processor(**spec: Any) -> Processor:
    """Build the resource with a spec."""
    body = {"source": {"connection": {"secretRef": {"name": "db"}}}, "target": {"sql": {"statement": "SELECT 1"}}}
    read = ProcessorSpec.model_validate(body | spec)
    return Processor(
        namespace="shop", name="orders", uid="uid-1", generation=3, cluster="here", annotations={}, spec=read
    )


def read_config(told: dict[str, Any]) -> dict[str, Any]:
    """Read a configuration as a worker does, with all defaults."""
    return _dump(ProcessorConfig.model_validate_json(json.dumps(told)))


def build_status(spec: dict[str, Any], report: Report) -> dict[str, Any]:
    """Build the status that follows from a report."""
    pod = PodView("orders-0", Role.WORKER, "10.0.0.1", "Running", ready=True, report=report, reachable=True)
    return dump_status(decide(Observed(processor=build_processor(**spec), created=NOW, pods=(pod,)), NOW).status)


def list_fields(schema: dict[str, Any], path: str = "") -> dict[str, dict[str, Any]]:
    """List type and default of every field of a schema, by its path."""
    found: dict[str, dict[str, Any]] = {}
    for name, each in schema.get("properties", {}).items():
        found[f"{path}.{name}"] = {key: each[key] for key in ("type", "default") if key in each}
        found |= list_fields(each, f"{path}.{name}")
    items = schema.get("items")
    return found | (list_fields(items, f"{path}[]") if isinstance(items, dict) else {})


def record() -> dict[str, Any]:
    """Record the version whose code is imported."""
    configs = {name: build_config(build_processor(**spec), Images()) for name, spec in SPECS.items()}
    report = Report.model_validate_json(json.dumps(REPORT))
    return {
        "config": {name: json.loads(format_config(config)) for name, config in configs.items()},
        "config without defaults": {name: _dump(config, exclude_defaults=True) for name, config in configs.items()},
        "config as read": {name: read_config(_dump(config, exclude_defaults=True)) for name, config in configs.items()},
        "report": _dump(report),
        "status": {name: build_status(SPECS[name], report) for name in ("partitioned", "a rebuild")},
        "crd": list_fields(build_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]),
    }


def _dump(model: BaseModel, *, exclude_defaults: bool = False) -> dict[str, Any]:
    return model.model_dump(mode="json", by_alias=True, exclude_defaults=exclude_defaults)


if __name__ == "__main__":
    sys.stdout.write(json.dumps({"commit": sys.argv[1], **record()}, indent=1, sort_keys=True) + "\n")
