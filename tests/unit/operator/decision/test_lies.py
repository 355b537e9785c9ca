"""A pod says what its code makes of it: what status cannot hold is no report, and the rest is written."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outbox_operator.api.status import ProcessorStatus
from outbox_operator.decision.decide import decide
from outbox_operator.reconcile.apply import dump_status
from outbox_operator.reconcile.podstate import parse_report
from tests.unit.operator.building import NOW, build_conflict, build_observed, build_pod, build_report

LARGE = 2**63
INFINITE = float("inf")
CONFLICT = json.loads(build_conflict(2).model_dump_json(by_alias=True))
PAIR = "815:42"


def said(**fields: Any) -> str:
    """A report with other fields; numbers that are none are written as Python and JavaScript write them."""
    return json.dumps(json.loads(build_report().model_dump_json(by_alias=True)) | fields)


LIES: dict[str, dict[str, Any]] = {
    "an endless lag": {"lag": {"messages": 1, "seconds": INFINITE}},
    "a lag that is no number": {"lag": {"messages": 1, "seconds": float("nan")}},
    "a lag with 300 digits": {"lag": {"messages": 1, "seconds": 1e300}},
    "more messages than 64 bits count": {"lag": {"messages": LARGE, "seconds": 1}},
    "an endless stall": {"highWaterMark": {"transactionId": "1", "ageSeconds": INFINITE}},
    "a time before all clocks": {"time": "0001-01-01T00:00:00+14:00"},
    "a time after all clocks": {"time": "9999-12-31T23:59:59-14:00"},
    "a checkpoint's time": {"checkpoints": [{"pair": PAIR, "storedAt": "0001-01-01T00:00:00+14:00"}]},
    "a conflict's time": {"conflicts": {"count": 1, "open": CONFLICT | {"time": "0001-01-01T00:00:00+14:00"}}},
    "a conflict's number": {"conflicts": {"count": 1, "open": CONFLICT | {"id": LARGE}}},
    "a count by code": {"conflicts": {"count": 1, "byCode": {"2": LARGE}}},
    "an epoch": {"lease": {"epoch": LARGE, "pod": "orders-0", "held": True}},
    "a negative number": {"failures": {"held": -LARGE - 1}},
    "a partition that none has": {"leases": [{"partition": 64, "pod": "orders-0", "epoch": 1}]},
    "a checkpoint of such a one": {"checkpoints": [{"pair": PAIR, "partition": -1}]},
    "many keys": {"failures": {"held": 17, "blockedKeys": [{"key": "k", "messageId": "m", "attempts": 1}] * 17}},
    "a long word": {"circuit": "x" * 33},
    "executors": {"executors": LARGE},
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_what_no_status_can_hold_is_no_report(lie: dict[str, Any]):
    assert parse_report(said(**lie)) is None


def test_lists_in_lists_are_no_report():
    assert parse_report(said().removesuffix("}") + ', "later": ' + "[" * 50_000 + "]" * 50_000 + "}") is None


EDGES: dict[str, dict[str, Any]] = {
    "nothing special": {},
    "figures": {
        "lag": {"messages": LARGE - 1, "atLeast": True, "seconds": 1e12},
        "highWaterMark": {"transactionId": "1" * 999, "ageSeconds": 1e12, "holder": "h" * 9999},
        "failures": {"held": -LARGE, "blockedKeys": [{"key": "k", "messageId": "m", "attempts": 1}] * 16},
        "executors": LARGE - 1,
        "circuit": "x" * 32,
    },
    "times": {"time": "1970-01-01T00:00:00+14:00", "checkpoints": [{"pair": PAIR, "storedAt": "9998-12-31T23:59:59Z"}]},
    "partitions": {
        "leases": [{"partition": number, "pod": "p" * 999, "epoch": LARGE - 1} for number in range(64)] * 5,
        "checkpoints": [{"partition": number, "pair": PAIR} for number in range(64)] * 5,
    },
    "words": {"state": "Retrying", "reason": "HandlerFailed", "message": "\u0000\u202e" * 9999, "advice": "a" * 9999},
    "conflicts": {"conflicts": {"count": LARGE - 1, "byCode": {"k" * 999: 1}, "open": CONFLICT | {"code": 99}}},
}


@pytest.mark.parametrize("edge", EDGES.values(), ids=EDGES)
def test_what_is_taken_can_be_written(edge: dict[str, Any]):
    report = parse_report(said(**edge))
    assert report is not None
    written = dump_status(decide(build_observed(build_pod(report=report)), NOW).status)
    ProcessorStatus.model_validate_json(json.dumps(written, allow_nan=False))
