"""This version beside the former one, whose code is run: operator with worker, in both directions, and the CRD of each.

The former version is taken out of git; a clone without its commit skips these tests and says so.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from outbox_core.config import ProcessorConfig
from outbox_operator.apply import dump_status
from outbox_operator.decide import decide
from outbox_operator.manifests import build_config, format_config
from outbox_operator.observe import read_status
from outbox_operator.podstate import parse_report
from outbox_operator.settings import Images
from tests.support.cluster import ROOT
from tests.unit.operator.building import NOW, build_observed, build_pod, build_processor, build_report

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FORMER = "359bb4339ba21c4393974c683565b1a48e9090e6"
"""The version before this one: the commit that landed on main last when this version was begun. Raise it with each."""

APART = {"sql": {"statement": "SELECT 1", "connection": {"secretRef": {"name": "reporting"}}}}
SPECS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "partitioned": {"delivery": {"mode": "Partitioned", "partitions": {"count": 4}}, "worker": {"replicas": 2}},
    "competing": {"delivery": {"mode": "Competing", "whenExhausted": "DeadLetter"}},
    "by pairs": {"source": {"connection": {"secretRef": {"name": "db"}}, "cursor": "TransactionOrder"}},
    "a broker": {"target": {"rabbitmq": {"connection": {"secretRef": {"name": "broker"}}}}},
    "another database": {"target": APART},
    "Spark": {"engine": "Spark", "spark": {"executor": {"instances": 2}}},
}

OPERATOR = """
import json, sys
from outbox_operator.manifests import build_config
from outbox_operator.resources import Processor, ProcessorSpec
from outbox_operator.settings import Images
from outbox_operator import manifests
given = json.load(sys.stdin)
said = {}
for name, spec in given.items():
    processor = Processor(namespace="shop", name="orders", uid="uid-1", generation=3, cluster="here",
                          annotations={}, spec=ProcessorSpec.model_validate(spec))
    said[name] = manifests.format_config(build_config(processor, Images()))
print(json.dumps(said))
"""
WORKER = """
import json, sys
from outbox_core.config import ProcessorConfig
given = json.load(sys.stdin)
print(json.dumps({name: ProcessorConfig.model_validate_json(text).model_dump(mode="json", by_alias=True)
                  for name, text in given.items()}))
"""
REPORT = """
import sys
from outbox_operator.podstate import parse_report
report = parse_report(sys.stdin.read())
print(report.model_dump_json(by_alias=True))
"""
STATUS = """
import json, sys
from outbox_operator.apply import dump_status
from outbox_operator.observe import read_status
print(json.dumps(dump_status(read_status({"status": json.load(sys.stdin)}))))
"""


@pytest.fixture(scope="module")
def former(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The former version's files."""
    folder = tmp_path_factory.mktemp("former")
    archive = subprocess.run(
        ["git", "archive", FORMER, "operator/src", "worker/src", "crds"], cwd=ROOT, capture_output=True, check=False
    )
    if archive.returncode:
        pytest.skip(f"this clone has no commit {FORMER}: git fetch --unshallow")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="module")
def run(former: Path) -> Callable[[str, str], str]:
    """Run a program with the former version's code."""

    def call(program: str, given: str) -> str:
        path = f"{former}/operator/src:{former}/worker/src"
        done = subprocess.run(
            [sys.executable, "-c", program],
            check=False,
            input=given,
            capture_output=True,
            text=True,
            env={"PYTHONPATH": path},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return call


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Everything in a document that is set, by its path."""
    if isinstance(value, dict):
        return {place: leaf for key, each in value.items() for place, leaf in leaves(each, f"{path}.{key}").items()}
    return {} if value is None else {path: value}


def differing(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    """What both say, and not the same."""
    return {place for place in one.keys() & other.keys() if one[place] != other[place]}


def told(spec: dict[str, Any]) -> str:
    return format_config(build_config(build_processor(**spec), Images()))


def test_the_former_worker_reads_what_this_operator_tells_it(run: Callable[[str, str], str]):
    given = {name: told(spec) for name, spec in SPECS.items()}
    read = json.loads(run(WORKER, json.dumps(given)))
    for name, text in given.items():
        mine = ProcessorConfig.model_validate_json(text).model_dump(mode="json", by_alias=True)
        understood, meant = leaves(read[name]), leaves(mine)
        assert leaves(json.loads(text)).items() <= understood.items(), name
        assert differing(understood, meant) == set(), f"{name}: a default has changed"


def test_this_worker_reads_what_the_former_operator_tells_it(run: Callable[[str, str], str]):
    specs = {
        name: build_processor(**spec).spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        for name, spec in SPECS.items()
    }
    given = json.loads(run(OPERATOR, json.dumps(specs)))
    for name, text in given.items():
        read = ProcessorConfig.model_validate_json(text).model_dump(mode="json", by_alias=True)
        assert leaves(json.loads(text)).items() <= leaves(read).items(), name
        meant = ProcessorConfig.model_validate_json(told(SPECS[name])).model_dump(mode="json", by_alias=True)
        assert differing(leaves(read), leaves(meant)) == set(), f"{name}: a default has changed"


def test_operators_read_the_reports_of_either_worker(run: Callable[[str, str], str]):
    text = build_report().model_dump_json(by_alias=True)
    answered = run(REPORT, text)
    read = parse_report(answered)
    assert read is not None
    assert (read.state, read.reason, read.resource) == (
        build_report().state,
        build_report().reason,
        build_report().resource,
    )


def test_operators_read_the_status_of_either(run: Callable[[str, str], str]):
    status = decide(build_observed(build_pod("orders-0", build_report())), NOW).status
    kept = read_status({"status": json.loads(run(STATUS, json.dumps(dump_status(status))))})
    assert (kept.conditions, kept.ownership) == (status.conditions, status.ownership)
    assert kept.checkpoint is not None
    assert kept.checkpoint.pair == "815:42"


def properties(schema: dict[str, Any], path: str = "") -> dict[str, dict[str, Any]]:
    """Every field of a schema, by its path."""
    found = {}
    for name, each in schema.get("properties", {}).items():
        found[f"{path}.{name}"] = each
        found |= properties(each, f"{path}.{name}")
    items = schema.get("items")
    return found | (properties(items, f"{path}[]") if isinstance(items, dict) else {})


def read_crd(root: Path) -> dict[str, dict[str, Any]]:
    crd = yaml.safe_load((root / "crds" / "outbox-operator.dev_outboxprocessors.yaml").read_text())
    return properties(crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"])


def test_the_crd_only_adds(former: Path):
    before, now = read_crd(former), read_crd(ROOT)
    assert before.keys() <= now.keys()
    assert {place: each.get("type") for place, each in before.items()} == {
        place: now[place].get("type") for place in before
    }


def test_no_default_of_the_crd_changes(former: Path):
    """One may go: what was stored with it keeps it, and the former version has it too."""
    before, now = read_crd(former), read_crd(ROOT)
    values = {place: each["default"] for place, each in now.items() if not isinstance(each.get("default", {}), dict)}
    assert len(values) > 20
    assert differing(values, {place: each["default"] for place, each in before.items() if "default" in each}) == set()
