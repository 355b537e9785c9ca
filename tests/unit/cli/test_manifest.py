"""Manifests: what `kubectl apply` takes is read, what the API server would refuse is refused with the same words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from outbox_cli.errors import CommandError
from outbox_cli.manifest import read_manifest

ROOT = Path(__file__).resolve().parents[3]
KIND = "\nkind: OutboxProcessor"
EXAMPLES = sorted(path for path in (ROOT / "examples").rglob("*.yaml") if KIND in path.read_text())


def write(tmp_path, spec, **body):
    whole = {
        "apiVersion": "outbox-operator.dev/v1alpha1",
        "kind": "OutboxProcessor",
        "metadata": {"name": "orders"},
        "spec": {"source": {"connection": {"secretRef": {"name": "db"}}}, **spec},
        **body,
    }
    file = tmp_path / "orders.yaml"
    file.write_text(yaml.safe_dump(whole))
    return file


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_example_is_read(path):
    assert path.read_text().count(KIND) == 1
    assert read_manifest([path], cluster="c", uid="u").processor.uid == "u"


def test_two_processors_are_too_many():
    with pytest.raises(CommandError, match="hold 2 objects of kind"):
        read_manifest(EXAMPLES[:2], cluster="c", uid="u")


def test_a_list_and_other_objects_are_looked_through(tmp_path):
    body = yaml.safe_load(write(tmp_path, {"target": {"log": {}}}).read_text())
    code = {"kind": "ConfigMap", "metadata": {"name": "code"}, "data": {"a.py": "1"}}
    file = tmp_path / "list.yaml"
    file.write_text(yaml.safe_dump_all([{"kind": "List", "items": [body]}, code, None]))
    found = read_manifest([file], cluster="c", uid="u")
    assert found.config_maps == {"code": {"a.py": "1"}}
    assert (found.processor.namespace, found.processor.processor_id) == ("default", "orders")


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        pytest.param({}, "set exactly one target", id="no target"),
        pytest.param({"target": {"log": {}, "sql": {"statement": "x"}}}, "set exactly one target", id="two targets"),
        pytest.param({"target": {"parquet": {"path": "/a"}}}, "needs engine: Spark", id="a target of Spark's"),
        pytest.param({"target": {"log": {}}, "startFrom": {"position": 1}}, "position goes with", id="half a start"),
        pytest.param({"target": {"log": {}}, "startFrom": {"type": "Timestamp"}}, "timestamp goes with", id="no time"),
        pytest.param({"target": {"log": {}}, "delivery": {"guarantee": "Transactional"}}, "AtLeastOnce", id="a log"),
        pytest.param({"target": {"log": {}}, "delivery": {"leaseDuration": "1s"}}, "leaseDuration must", id="lease"),
        pytest.param({"target": {"log": {}}, "delivery": {"pollInterval": "1ms"}}, "pollInterval must", id="poll"),
        pytest.param({"target": {"log": {}}, "delivery": {"timeout": "2h"}}, "timeout must", id="timeout"),
        pytest.param({"target": {"log": {"payload": 7}}}, "spec.target.log.payload", id="a wrong type"),
        pytest.param({"target": {"log": {}}, "speed": 1}, "spec.speed", id="an unknown field"),
    ],
)
def test_a_wrong_spec_is_refused_with_its_field(tmp_path, spec, said):
    with pytest.raises(CommandError, match=said):
        read_manifest([write(tmp_path, spec)], cluster="c", uid="u")


def test_what_is_no_manifest_is_said(tmp_path):
    good: dict[str, Any] = {"target": {"log": {}}}
    with pytest.raises(CommandError, match="apiVersion is v2"):
        read_manifest([write(tmp_path, good, apiVersion="v2")], cluster="c", uid="u")
    with pytest.raises(CommandError, match=r"metadata\.name is missing"):
        read_manifest([write(tmp_path, good, metadata={})], cluster="c", uid="u")
    with pytest.raises(CommandError, match="cannot read"):
        read_manifest([tmp_path / "absent"], cluster="c", uid="u")
    (tmp_path / "bad").write_text("a: [")
    with pytest.raises(CommandError, match="is not YAML"):
        read_manifest([tmp_path / "bad"], cluster="c", uid="u")
