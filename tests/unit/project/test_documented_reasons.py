"""Every reason that a condition can have is explained to a person."""

from __future__ import annotations

from pathlib import Path

import pytest

from outbox_core.report import Reason as WorkerReason
from outbox_operator.conditions import ConditionType
from outbox_operator.conditions import Reason as OperatorReason

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "conflicts.md").read_text()
WORDS = sorted({word.value for kind in (WorkerReason, OperatorReason, ConditionType) for word in kind})


@pytest.mark.parametrize("word", WORDS)
def test_reason_stands_in_the_catalogue(word: str) -> None:
    assert f"`{word}`" in PAGE
