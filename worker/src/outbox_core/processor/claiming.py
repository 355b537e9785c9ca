"""PURE: the next step after the claim was asked for, in every mode."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from outbox_core import retry
from outbox_core.processor.state import Step
from outbox_core.report import Reason, WorkerState

if TYPE_CHECKING:
    from outbox_core.processor import outcomes
    from outbox_core.processor.state import ProcessorState


def decide_after_claim(
    state: ProcessorState, without: ProcessorState, answer: outcomes.ClaimAnswered, now: float, chance: float
) -> ProcessorState:
    """Go on, or ask again later with what is only true for who has the claim forgotten (`without`)."""
    if answer.granted:
        return replace(state, step=Step.REVIEW, due=now)
    failures = state.failures + 1
    return replace(
        without, step=Step.CLAIM, due=now + retry.claim_backoff(failures, chance), failures=failures,
        state=WorkerState.CLAIM_REFUSED, reason=Reason.CLAIM_HELD,
        message=f"{answer.holder} owns this processorId; delete that resource, hand the claim over, or choose another "
        "processorId",
    )  # fmt: skip
