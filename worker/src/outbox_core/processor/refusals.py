"""PURE: what follows when a checkpoint was refused: it is recorded, and a person decides where one must.

The part of `outbox_core.processor.lifecycle` that is about the codes of `store_processor_checkpoint`.
"""

from __future__ import annotations

from typing import Final

from outbox_core.processor import outcomes
from outbox_core.processor.state import ProcessorState, Step, without_ownership
from outbox_core.progress.checkpoint import StoreAnswer
from outbox_core.report import Reason, WorkerState

BLOCKED_POLL: Final = 2.0
"""Between two looks whether a person has decided about a conflict."""
REFUSED_WAIT: Final = 0.5
"""After a 4, before ownership is asked for again."""


def after_review(state: ProcessorState, review: outcomes.Reviewed, now: float) -> ProcessorState:
    """Go on to the target, or wait for a person where a conflict is open."""
    if review.open is None:
        return state._replace(step=Step.CHECK_TARGET, due=now)
    return _blocked(state, review.open, now, review.note)


def _blocked(state: ProcessorState, conflict: outcomes.OpenConflict, now: float, note: str = "") -> ProcessorState:
    ahead = conflict.code == StoreAnswer.AHEAD
    word = "ahead of" if ahead else "older than"
    stored = str(conflict.stored) if conflict.stored else "no checkpoint"
    decision = (
        f'accept it with the annotation outbox-operator.dev/accept-checkpoint: "{conflict.id}={stored}", or rewind'
        if conflict.stored
        else "rewind"
    )
    message = (
        f"conflict {conflict.id}: a program or person without the lease changed the checkpoint; stored is {stored}, "
        f"{word} the "
        f"expected {conflict.expected or 'one, which is gone'}; {decision} with outbox-operator.dev/rewind-checkpoint: "
        f'"{conflict.id}=<transaction_id>:<position>" (cursor Snapshot: 0:<first position to handle again>)'
    )
    return without_ownership(state)._replace(
        step=Step.REVIEW,
        due=now + BLOCKED_POLL,
        state=WorkerState.BLOCKED,
        reason=Reason.CHECKPOINT_AHEAD if ahead else Reason.CHECKPOINT_OLDER,
        message=f"{message}; {note}" if note else message,
    )


def after_refusal(state: ProcessorState, refused: outcomes.Rejected, now: float) -> ProcessorState:
    """Go on from the stored pair where the batch was handled before; else record what was answered."""
    if refused.answer is StoreAnswer.IGNORED:
        # The batch was handled before: skip to the stored pair.
        return state._replace(
            step=Step.FETCH, due=now, stored=refused.new, cursor=refused.new, batch=None, delivered=False,
            doubt=None, attempt=0, failures=0, unstored_rows=0, decision=None,
        )  # fmt: skip
    if refused.answer is StoreAnswer.NOT_OWNER and state.doubt is not None and state.doubt.committing:
        # It may have been committed before ownership went: that is no conflict, and must not be reported as one.
        return without_ownership(state)._replace(
            step=Step.CLAIM, due=now, state=WorkerState.STARTING, reason=Reason.LEASE_LOST,
            message="ownership went while a commit's outcome was unknown; the stored checkpoint tells",
        )  # fmt: skip
    return state._replace(step=Step.RECORD, due=now, refusal=refused, doubt=None)


def after_record(state: ProcessorState, recorded: outcomes.Recorded, now: float) -> ProcessorState:
    """Wait for a person, or ask for ownership again."""
    refusal = state.refusal
    if refusal is not None and refusal.answer.needs_person:
        conflict = outcomes.OpenConflict(recorded.conflict_id, int(refusal.answer), refusal.expected, refusal.stored)
        return _blocked(state, conflict, now)
    pair = f"batch up to {refusal.new} " if refusal else "batch "
    return without_ownership(state)._replace(
        step=Step.CLAIM, due=now + REFUSED_WAIT, state=WorkerState.STARTING,
        reason=Reason.NOT_OWNER,
        message=f"conflict {recorded.conflict_id}: {pair}was refused with 4 and rolled back, another one owns the "
        "processor now; asking for ownership again",
    )  # fmt: skip
