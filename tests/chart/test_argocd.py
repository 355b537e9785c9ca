"""Argo CD: the health check in a real Lua with its cases, and the examples."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lupa.lua51
import pytest
import yaml

from tests.chart.chart import CHART, ROOT, helm

ARGOCD = ROOT / "examples" / "argocd"
SCRIPT = (ARGOCD / "health" / "health.lua").read_text()
CASES: list[dict[str, Any]] = yaml.safe_load((ARGOCD / "health" / "health_test.yaml").read_text())["tests"]
CLOSED = ("string", "math", "io", "os", "debug", "coroutine", "package", "require", "dofile", "loadfile", "python")
"""What Argo CD does not open for a script from argocd-cm (gopher-lua, base and table only; lupa adds `python`)."""


def health(resource: dict[str, Any], script: str = SCRIPT) -> dict[str, str]:
    """Run the script as Argo CD does: the resource is the global `obj`, the answer what the script returns."""
    lua = lupa.lua51.LuaRuntime()
    for name in CLOSED:
        lua.globals()[name] = None
    lua.globals()["obj"] = lua.table_from(resource, recursive=True)
    return dict(lua.execute(script))


def resource_of(path: str) -> dict[str, Any]:
    resource: dict[str, Any] = yaml.safe_load((ARGOCD / "health" / path).read_text())
    return resource


@pytest.mark.parametrize("case", CASES, ids=lambda case: Path(case["inputPath"]).stem)
def test_health(case: dict[str, Any]):
    assert health(resource_of(case["inputPath"])) == case["healthStatus"]


def test_every_resource_of_the_cases_has_one():
    named = {Path(case["inputPath"]).name for case in CASES}
    assert {path.name for path in (ARGOCD / "health" / "testdata").iterdir()} == named


def test_deciding_order_is_the_documented_one():
    """Everything at once: each step taken away uncovers the next."""
    resource = resource_of("testdata/ready.yaml")
    resource["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "generation": 3}
    conditions = {condition["type"]: condition for condition in resource["status"]["conditions"]}
    conditions["Suspended"] |= {"status": "True", "reason": "Suspended"}
    conditions["Stalled"]["status"] = "True"
    answers = [health(resource)["status"]]
    del resource["metadata"]["deletionTimestamp"]
    answers.append(health(resource)["status"])
    resource["status"]["observedGeneration"] = 3
    answers.append(health(resource)["status"])
    conditions["Suspended"]["status"] = "False"
    answers.append(health(resource)["status"])
    conditions["Stalled"]["status"] = "False"
    answers.append(health(resource)["status"])
    conditions["Ready"]["status"] = "False"
    answers.append(health(resource)["status"])
    assert answers == ["Progressing", "Progressing", "Suspended", "Degraded", "Healthy", "Progressing"]


def test_snippet_holds_the_script():
    data = yaml.safe_load((ARGOCD / "argocd-cm.yaml").read_text())["data"]
    assert data == {"resource.customizations.health.outbox-operator.dev_OutboxProcessor": SCRIPT}


def test_applications_chart_takes_its_values():
    application = yaml.safe_load((ARGOCD / "application.yaml").read_text())
    source = application["spec"]["source"]
    assert (ROOT / source["path"]).resolve() == CHART
    arguments = ("template", source["helm"]["releaseName"], str(CHART), "--kube-version", "1.34.4")
    values = source["helm"]["valuesObject"]
    as_it_stands = helm(*arguments, values=values)
    assert "registry.example.com/outbox, a name for examples" in as_it_stands.stderr, "Argo CD shows what to set"
    values["image"]["registry"] = "registry.internal/outbox"
    done = helm(*arguments, values=values)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["application.yaml", "processors.yaml"])
def test_applications_name_no_cluster_and_no_real_address(name: str):
    text = (ARGOCD / name).read_text()
    application = yaml.safe_load(text)
    assert application["apiVersion"] == "argoproj.io/v1alpha1"
    assert application["spec"]["destination"]["name"] == "in-cluster"
    hosts = set(re.findall(r"(?:https?://|registry: )([^/\s]+)", text))
    assert all(host.endswith("example.com") for host in hosts), hosts
    assert application["spec"]["source"]["repoURL"].startswith("https://git.example.com/")
