"""Every reason, phase and Event that a person can meet is explained."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from outbox_core.report import Reason as WorkerReason
from outbox_core.report import RebuildState
from outbox_operator import happenings
from outbox_operator.conditions import ConditionType
from outbox_operator.conditions import Reason as OperatorReason
from outbox_operator.status import Phase

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "conflicts.md").read_text()
WORDS = {word.value for kind in (WorkerReason, RebuildState, OperatorReason, ConditionType, Phase) for word in kind}
EVENTS = set(re.findall(r'Happening\(\s*"(\w+)"', Path(happenings.__file__).read_text()))


@pytest.mark.parametrize("word", sorted(WORDS | EVENTS))
def test_word_stands_in_the_catalogue(word: str) -> None:
    assert f"`{word}`" in PAGE


def test_the_catalogue_explains_nothing_that_is_not_there() -> None:
    explained = re.findall(r"^\| ((?:`[A-Z]\w+`(?:, )?)+) \|", PAGE, re.MULTILINE)
    assert {word for row in explained for word in re.findall(r"\w+", row)} <= WORDS | EVENTS
