"""What a rebuild's reports say in status: the condition Swapped, and what became of the processor that was replaced."""

from __future__ import annotations

import pytest

from outbox_core.report import Reason, RebuildState, RebuildView, WorkerState
from outbox_operator.decision.decide import decide
from tests.unit.operator.building import (
    GRANTED,
    NOW,
    build_observed,
    build_pod,
    build_processor,
    build_report,
    condition,
    ready,
)

PROCESSOR = build_processor(rebuildOf={"processorId": "v1", "swapStatement": "SELECT 1"})


def view(state, **fields):
    return RebuildView(of="v1", state=state, **fields)


def decided(*views, previous=GRANTED, processor=PROCESSOR):
    pods = [
        build_pod(f"orders-{number}", build_report(rebuild=each, pod=f"orders-{number}"))
        for number, each in enumerate(views)
    ]
    return decide(build_observed(*pods, previous=previous, processor=processor), NOW)


@pytest.mark.parametrize("state", [each for each in RebuildState if each is not RebuildState.SWAPPED])
def test_until_the_swap_the_condition_is_false_with_the_state_as_reason(state):
    decision = decided(view(state, behind=7, at_least=True, message="why"))
    assert condition(decision, "Swapped") == ("False", state.value)
    found = next(c for c in decision.status.conditions if c.type == "Swapped")
    assert found.message == "processor 'v1'; 7 or more behind it: why"
    assert decision.status.rebuild == RebuildView(of="v1", state=state, behind=7, at_least=True, message="why")
    assert ready(decision) == ("True", "Running")


def test_after_the_swap_it_is_true_also_when_a_standby_reports_the_state_before():
    decision = decided(view(RebuildState.CATCHING_UP), view(RebuildState.SWAPPED, message="swapped at noon"))
    assert condition(decision, "Swapped") == ("True", "Swapped")


def test_without_news_the_last_word_stays():
    before = GRANTED.model_copy(update={"rebuild": RebuildView(of="v1", state="Swapped")})
    assert condition(decided(None, previous=before), "Swapped") == ("True", "Swapped")
    assert condition(decided(None), "Swapped") == ("Unknown", "NotObserved")


def test_a_rebuild_of_another_processor_begins_anew():
    before = GRANTED.model_copy(update={"rebuild": RebuildView(of="v0", state="Swapped")})
    assert condition(decided(None, previous=before), "Swapped") == ("Unknown", "NotObserved")


def test_without_a_rebuild_there_is_no_such_condition():
    decision = decided(None, processor=build_processor())
    assert "Swapped" not in {c.type for c in decision.status.conditions}


def test_what_was_replaced_is_stalled_and_says_so():
    report = build_report(WorkerState.UNAVAILABLE, Reason.SUPERSEDED, message="processor 'v2' replaced this one")
    decision = decide(build_observed(build_pod(report=report), previous=GRANTED), NOW)
    assert ready(decision) == ("False", "Superseded")
    assert condition(decision, "Stalled") == ("True", "Superseded")
