"""What the documents name is there: files, links, verbs of the Makefile, fields, metrics, objects."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import REGISTRY

from outbox_core.report import WorkerState
from outbox_operator import metrics
from outbox_operator.api.naming import config_name, workload_name
from outbox_operator.api.resources import KIND, Processor, parse_processor
from outbox_operator.crd import build_crd
from outbox_worker.observe import telemetry

ROOT = Path(__file__).resolve().parents[3]
TOPS = "charts crds docs examples operator sql tests worker"
FILES = [path for top in TOPS.split() for path in (ROOT / top).rglob("*") if path.is_file()]
PATHS = sorted(str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.md"), *FILES])
FOLDERS = {str(parent) for name in PATHS for parent in Path(name).parents}
PAGES = {name: (ROOT / name).read_text() for name in PATHS if name.endswith(".md")}
EXAMPLES = {name: (ROOT / name).read_text() for name in PATHS if re.match(r"examples/orders.*\.yaml$", name)}
VALUES = yaml.safe_load((ROOT / "charts/outbox-operator/values.yaml").read_text())
SCHEMA = build_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
SPARKS_OWN = {"spark.driver.memory"}
pages = pytest.mark.parametrize("page", PAGES)


def code_in(text: str) -> list[str]:
    """Inline code, not blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def manifests_in(text: str) -> list[dict[str, Any]]:
    """Resources of ours: fenced blocks, and indented ones between a heredoc's marks."""
    blocks = re.findall(r"```yaml\n(.*?)```|<<'YAML'\n(.*?)\n *YAML\n", text, re.DOTALL)
    found = [body for fenced, typed in blocks for body in yaml.safe_load_all(fenced or typed)]
    return [body for body in found if body.get("kind") == KIND]


def processor_of(body: dict[str, Any]) -> Processor:
    known = {"namespace": "shop", "uid": "u"}
    return parse_processor({**body, "metadata": {**known, **body["metadata"]}}, "cluster")


@pages
def test_links_lead_somewhere(page: str):
    linked = [target for target in re.findall(r"\]\(([^)#\s]+)", PAGES[page]) if "://" not in target]
    missing = [target for target in linked if not (ROOT / page).parent.joinpath(target).exists()]
    assert missing == []


@pages
def test_files_that_are_named_are_there(page: str):
    named = {word for word in code_in(PAGES[page]) if re.fullmatch(r"[\w./-]+\.(py|sql|sh|lua|tpl)", word)}
    named -= {"target.sql"}  # a field
    assert {word for word in named if not any(f"/{name}".endswith(f"/{word}") for name in PATHS)} == set()


def test_the_map_from_idea_to_file_is_right():
    """A row's first path is from the root; the others are beside it."""
    rows = re.findall(r"^\| [^|]+ \| (`.*) \|$", PAGES["ARCHITECTURE.md"].split("## Map")[1], re.MULTILINE)
    assert len(rows) > 20
    for first, *others in map(code_in, rows):
        assert first.rstrip("/") in {*PATHS, *FOLDERS}
        beside = {str(Path(first).parent / other) for other in others if "/" not in other.rstrip("/")}
        from_root = {other.rstrip("/") for other in others if "/" in other.rstrip("/")}
        assert beside | from_root <= {*PATHS, *FOLDERS}


def test_architecture_tells_every_state_of_a_worker():
    told = re.findall(r"^\| `([A-Z]\w+)` \|", PAGES["ARCHITECTURE.md"], re.MULTILINE)
    assert told == [state.value for state in WorkerState]


@pages
def test_verbs_are_the_makefiles(page: str):
    verbs = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)) | {"bench"}
    assert set(re.findall(r"\bmake ([a-z]+)`", PAGES[page])) <= verbs


def has_field(schema: dict[str, Any], path: list[str]) -> bool:
    for name in path:
        schema = schema.get("items", schema)
        if "additionalProperties" in schema or schema.get("x-kubernetes-preserve-unknown-fields"):
            return True
        schema = schema.get("properties", {}).get(name, {})
    return bool(schema)


@pages
def test_fields_are_the_resources(page: str):
    tops = {"spec", "status", *SCHEMA["properties"]["spec"]["properties"]}
    words = [
        match[1] for word in code_in(PAGES[page]) if (match := re.match(r"(([a-zA-Z]+\.)+[a-zA-Z]+)(: \S+)?$", word))
    ]
    wrong = []
    for word in words:
        head, *rest = word.split(".")
        if head not in tops or rest[-1] in ("py", "yaml", "json") or word in SPARKS_OWN:
            continue
        in_resource = has_field(SCHEMA, [head, *rest] if head in ("spec", "status") else ["spec", head, *rest])
        if not in_resource and rest[0] not in (VALUES.get(head) or ()):
            wrong.append(word)
    assert wrong == []


@pytest.mark.parametrize("name", [name for name, text in PAGES.items() if manifests_in(text)])
def test_manifests_and_the_objects_made_of_them(name: str):
    made = {"configmap": set[str](), "deploy": set[str]()}
    for processor in map(processor_of, manifests_in(PAGES[name])):
        made["deploy"].add(workload_name(processor))
        made["configmap"].add(config_name(processor.name))
    for kind, found in re.findall(r"kubectl logs (deploy)/([\w-]+)", PAGES[name]):
        assert found in made[kind]


def test_worker_page_names_the_configuration_as_it_is_called():
    assert f"kubectl get configmap {config_name('NAME')} -o" in PAGES["worker/README.md"]


def test_examples_are_resources_that_the_operator_reads():
    bodies = [body for text in EXAMPLES.values() for body in yaml.safe_load_all(text) if body]
    assert len([processor_of(body) for body in bodies if body["kind"] == KIND]) == 19


def test_worker_page_names_every_metric():
    served = set(re.findall(r'"(outbox_\w+)"', Path(telemetry.__file__).read_text()))
    page = PAGES["worker/README.md"].split("## Metrics")[1].split("\n## ")[0]
    assert set(re.findall(r"`(outbox_[a-z_]+?)(?:_total)?(?:\{[\w,]+\})?`", page)) == served


def test_operator_page_names_every_metric():
    own = {family.name for family in REGISTRY.collect() if family.name.startswith("outbox_operator_")}
    source = Path(metrics.__file__).read_text()
    wanted = own | set(re.findall(r'"(outbox_processor_\w+)"', source))
    page = PAGES["operator/README.md"].split("## Metrics")[1].split("\n## ")[0]
    assert set(re.findall(r"`(outbox_[a-z_]+?)(?:_total)?(?:\{[\w,]+\})?(?: == 0)?`", page)) == wanted


def test_operator_page_names_every_module():
    modules = {
        Path(name).name for name in PATHS if re.match(r"operator/src/outbox_operator/([a-z]+/)?[a-z]\w+\.py$", name)
    }
    assert modules <= set(code_in(PAGES["operator/README.md"]))
