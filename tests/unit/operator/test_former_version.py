"""This version beside the former one: operator with worker, in both directions, status and CRD.

What the former version writes, and how it reads it, is recorded in `former_version.json`
(`tests/support/former_version.py` says how), so no clone needs its commit. Record it again with each version.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from outbox_operator.reconcile.apply import dump_status
from outbox_operator.reconcile.observe import read_status
from outbox_operator.reconcile.podstate import parse_report
from tests.support.former_version import SPECS, read_config, record

FORMER: Final[dict[str, Any]] = json.loads((Path(__file__).parent / "former_version.json").read_text())


@pytest.fixture(scope="module")
def now() -> dict[str, Any]:
    """The same of this version."""
    return record()


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Everything in a document that is set, by its path."""
    if isinstance(value, dict):
        return {place: leaf for key, each in value.items() for place, leaf in leaves(each, f"{path}.{key}").items()}
    if isinstance(value, list) and any(isinstance(each, dict) for each in value):
        return leaves({str(number): each for number, each in enumerate(value)}, path)
    return {} if value is None else {path: value}


def differing(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    """What both say, and not the same."""
    return {place for place in one.keys() & other.keys() if one[place] != other[place]}


@pytest.mark.parametrize("name", SPECS)
def test_the_former_worker_reads_what_this_operator_tells_it(now: dict[str, Any], name: str):
    """What is told is what the former worker's models write of the same spec, so it reads all of it."""
    assert leaves(now["config"][name]).items() <= leaves(FORMER["config without defaults"][name]).items()
    understood, meant = leaves(FORMER["config as read"][name]), leaves(now["config as read"][name])
    assert differing(understood, meant) == set(), "a default has changed"


@pytest.mark.parametrize("name", SPECS)
def test_this_worker_reads_what_the_former_operator_tells_it(now: dict[str, Any], name: str):
    told = FORMER["config"][name]
    read = leaves(read_config(told))
    assert leaves(told).items() <= read.items()
    assert differing(read, leaves(now["config as read"][name])) == set(), "a default has changed"


def test_operators_read_the_reports_of_either_worker(now: dict[str, Any]):
    assert leaves(FORMER["report"]).items() <= leaves(now["report"]).items(), "fields are only ever added"
    read = parse_report(json.dumps(FORMER["report"]))
    assert read is not None
    assert read.model_dump(mode="json", by_alias=True) == now["report"]


@pytest.mark.parametrize("name", FORMER["status"])
def test_operators_read_the_status_of_either(now: dict[str, Any], name: str):
    former, this = leaves(FORMER["status"][name]), leaves(now["status"][name])
    assert len(former) > 60
    assert former.keys() <= this.keys()
    assert {place: type(this[place]) for place in former} == {place: type(value) for place, value in former.items()}
    kept = leaves(dump_status(read_status({"status": FORMER["status"][name]})))
    assert former.items() <= kept.items()


def test_the_crd_only_adds(now: dict[str, Any]):
    before = FORMER["crd"]
    assert before.keys() <= now["crd"].keys()
    assert {place: each.get("type") for place, each in before.items()} == {
        place: now["crd"][place].get("type") for place in before
    }


def test_no_default_of_the_crd_changes(now: dict[str, Any]):
    """One may go: what was stored with it keeps it, and the former version has it too."""
    before, after = FORMER["crd"], now["crd"]
    values = {place: each["default"] for place, each in after.items() if not isinstance(each.get("default", {}), dict)}
    assert len(values) > 20
    assert differing(values, {place: each["default"] for place, each in before.items() if "default" in each}) == set()
