"""Every reason, phase, Event and alert that a person can meet is explained, where its message links to."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

from outbox_core.report import Reason as WorkerReason
from outbox_core.report import RebuildState
from outbox_operator.api.reasons import ConditionType
from outbox_operator.api.reasons import Reason as OperatorReason
from outbox_operator.api.status import Phase
from outbox_operator.decision import events
from outbox_operator.settings import Images

ROOT = Path(__file__).resolve().parents[3]
CATALOGUE = (ROOT / "docs" / "conflicts.md").read_text()
RUNBOOK = (ROOT / Images.runbook).read_text()
SECTIONS = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", RUNBOOK, re.MULTILINE | re.DOTALL))
ROWS = re.findall(r'^\| <a id="(\w+)"></a>`(\w+)` \| (.+) \|$', RUNBOOK, re.MULTILINE)
"""Reasons that ask for nothing: anchor, name and text."""
REASONS = {word.value for kind in (WorkerReason, RebuildState, OperatorReason) for word in kind}
ALERTS = {
    rule["alert"]: rule
    for group in yaml.safe_load((ROOT / "charts/outbox-operator/files/alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
}
EVENTS = set(re.findall(r'Event\(\s*"(\w+)"', Path(events.__file__).read_text()))


@pytest.mark.parametrize("word", sorted({word.value for kind in (ConditionType, Phase) for word in kind} | EVENTS))
def test_word_stands_in_the_catalogue(word: str) -> None:
    assert f"`{word}`" in CATALOGUE


def test_the_catalogue_explains_nothing_that_is_not_there() -> None:
    explained = re.findall(r"^\| ((?:`[A-Z]\w+`(?:, )?)+) \|", CATALOGUE, re.MULTILINE)
    assert {word for row in explained for word in re.findall(r"\w+", row)} <= {*ConditionType, *EVENTS}


def test_each_reason_and_each_alert_has_a_section_and_each_section_one_of_them() -> None:
    headings = re.findall(r"^### (\w+)$", RUNBOOK, re.MULTILINE)
    assert Counter([*headings, *(name for _, name, _ in ROWS)]) == Counter([*REASONS, *ALERTS])
    assert all(text.strip() for text in SECTIONS.values())
    assert all(anchor == name.lower() for anchor, name, _ in ROWS)


def test_links_within_the_runbook_lead_to_sections() -> None:
    anchors = {*(name.lower() for name in SECTIONS), *(anchor for anchor, _, _ in ROWS)}
    assert set(re.findall(r"\]\(#([\w-]+)\)", RUNBOOK)) <= anchors


@pytest.mark.parametrize("name", ALERTS)
def test_alert_links_to_its_section(name: str) -> None:
    assert ALERTS[name]["annotations"]["runbook_url"] == f"{Images.runbook}#{name.lower()}"
