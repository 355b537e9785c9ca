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
    assert f"name: {read_manifest([path]).processor.name}" in path.read_text()


def test_two_processors_are_too_many():
    with pytest.raises(CommandError, match="hold 2 objects of kind"):
        read_manifest(EXAMPLES[:2])


def test_a_list_and_other_objects_are_looked_through(tmp_path):
    body = yaml.safe_load(write(tmp_path, {"target": {"log": {}}}).read_text())
    code = {"kind": "ConfigMap", "metadata": {"name": "code"}, "data": {"a.py": "1"}}
    file = tmp_path / "list.yaml"
    file.write_text(yaml.safe_dump_all([{"kind": "List", "items": [body]}, code, None]))
    found = read_manifest([file])
    assert found.config_maps == {"code": {"a.py": "1"}}
    assert (found.processor.namespace, found.processor.processor_id) == ("default", "orders")


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        pytest.param({}, "set one of target.sql", id="no target"),
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
        read_manifest([write(tmp_path, spec)])


@pytest.mark.parametrize(
    ("body", "said"),
    [
        pytest.param({"metadata": "x"}, 'metadata: must be of type object, not "x"', id="metadata is text"),
        pytest.param({"metadata": ["x"]}, "metadata: must be of type object", id="metadata is a list"),
        pytest.param({"metadata": None}, r"metadata\.name: Required value: set it", id="no metadata"),
        pytest.param({"metadata": {"name": 5}}, r"metadata\.name: must be of type string", id="number for a name"),
        pytest.param({"metadata": {"name": "Orders"}}, r"metadata\.name must be lower-case letters", id="capitals"),
        pytest.param(
            {"metadata": {"name": "a", "namespace": "Bad Name"}}, r'metadata\.namespace: "Bad Name" should match',
            id="a wrong namespace",
        ),
        pytest.param({"metadata": {"name": "a", "namespace": 5}}, r"metadata\.namespace: must be", id="number for it"),
        pytest.param({"spec": "x"}, "spec: must be of type object", id="a text for a spec"),
        pytest.param({"spec": None}, "spec: Required value", id="no spec"),
    ],
)  # fmt: skip
def test_wrong_metadata_is_a_sentence(tmp_path, body, said):
    file = write(tmp_path, {"target": {"log": {}}})
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | body))
    with pytest.raises(CommandError, match=said):
        read_manifest([file])


@pytest.mark.parametrize(
    ("other", "said"),
    [
        pytest.param({"kind": "ConfigMap", "metadata": "x"}, "a ConfigMap needs metadata.name", id="no name"),
        pytest.param({"kind": "ConfigMap", "metadata": {"name": "a"}, "data": {"a": 1}}, "a text for", id="a number"),
        pytest.param({"kind": "ConfigMap", "metadata": {"name": "a"}, "data": ["a"]}, "a text for each", id="a list"),
        pytest.param({"kind": "List", "items": ["x", 1]}, "hold 2 objects of kind", id="a list of no objects"),
        pytest.param({"kind": "List", "items": "x"}, "hold 2 objects of kind", id="no list"),
    ],
)  # fmt: skip
def test_what_comes_beside_a_processor_is_looked_at_too(tmp_path, other, said):
    file = write(tmp_path, {"target": {"log": {}}})
    bodies = [yaml.safe_load(file.read_text()), other]
    if other["kind"] == "List":
        bodies.append(bodies[0])  # so that it is refused for what is known to be there
    file.write_text(yaml.safe_dump_all(bodies))
    with pytest.raises(CommandError, match=said):
        read_manifest([file])


def test_what_is_no_manifest_is_said(tmp_path):
    good: dict[str, Any] = {"target": {"log": {}}}
    with pytest.raises(CommandError, match="apiVersion is v2"):
        read_manifest([write(tmp_path, good, apiVersion="v2")])
    with pytest.raises(CommandError, match=r"metadata\.name: Required value: set it"):
        read_manifest([write(tmp_path, good, metadata={})])
    with pytest.raises(CommandError, match="cannot read"):
        read_manifest([tmp_path / "absent"])
    (tmp_path / "bad").write_text("a: [")
    with pytest.raises(CommandError, match="is not YAML"):
        read_manifest([tmp_path / "bad"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param(
            "kind: Outboxprocessor\n", "of kind OutboxProcessor: found Outboxprocessor; name", id="wrong case"
        ),
        pytest.param(
            "kind: Secret\n---\nkind: ConfigMap\nmetadata: {name: a}\n", "found ConfigMap, Secret;", id="others"
        ),
        pytest.param("# a comment\n", "found nothing;", id="nothing"),
        pytest.param("spec:\n  a: 1\n  b: 2\n  a: 3\n", r"the key a a second time(.|\n)*line 4", id="a key twice"),
        pytest.param("[" * 5000, "it is nested too deep", id="nested too deep"),
    ],
)
def test_a_file_without_a_processor_says_what_is_in_it(tmp_path, text, said):
    (tmp_path / "file.yaml").write_text(text)
    with pytest.raises(CommandError, match=said):
        read_manifest([tmp_path / "file.yaml"])


def test_a_key_of_an_alias_may_be_given_anew(tmp_path):
    file = write(tmp_path, {"target": {"log": {}}})
    file.write_text(file.read_text() + "x: &x {a: 1}\ny: &y {<<: *x, a: 2}\nz: {<<: [*x, *y], a: 3}\n")
    with pytest.raises(CommandError, match='unknown field "x"'):
        read_manifest([file])
