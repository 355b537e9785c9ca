"""Alerts and the dashboard ask for metrics that operator and workers serve."""

from __future__ import annotations

import json
import re
from pathlib import Path

from prometheus_client import REGISTRY

from outbox_operator import metrics
from outbox_worker.observe import telemetry

ROOT = Path(__file__).resolve().parents[3]
FILES = ROOT / "charts/outbox-operator/files"
SUFFIXES = re.compile(r"_(total|bucket|count|sum)$")


def served() -> set[str]:
    """Names of families, without the suffixes that a type adds."""
    of_operator = {family.name for family in REGISTRY.collect() if family.name.startswith("outbox_operator_")}
    of_resources = set(re.findall(r'"(outbox_processor_\w+)"', Path(metrics.__file__).read_text()))
    of_workers = set(re.findall(r'"(outbox_\w+)"', Path(telemetry.__file__).read_text()))
    return of_operator | of_resources | of_workers


def asked(text: str) -> set[str]:
    return {SUFFIXES.sub("", name) for name in re.findall(r"\boutbox_\w+", text)}


def test_alerts_ask_for_what_is_served() -> None:
    names = asked((FILES / "alerts.yaml").read_text().split("groups:")[1])
    assert len(names) > 10
    assert names <= served()


def test_the_dashboard_asks_for_what_is_served() -> None:
    panels = json.loads((FILES / "dashboard.json").read_text())["panels"]
    names = asked("\n".join(target["expr"] for panel in panels for target in panel.get("targets", ())))
    assert len(names) > 20
    assert names <= served()
