"""PURE: what waits for a person: a message at which a partition stopped, and a checkpoint that was refused.

A partition that stopped keeps its lease and looks whether the person recorded that it goes on without the message
(`outbox dead-letters add`). Then the message is tried once more, alone, and if it fails it becomes a dead letter. The
person names the message by its place, so nothing else is passed, with either cursor. A consumer in mode Competing says
the same, and asks for the same decision (`outbox_core.processor.competing`).

A refused checkpoint (another code of `store_processor_checkpoint` than 1) is recorded, and a person decides where one
must.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Final

from outbox_core.plain import plain_count
from outbox_core.processor import outcomes
from outbox_core.processor.failing import Action, build_decision
from outbox_core.processor.state import Step, Stopped, without_ownership
from outbox_core.progress.checkpoint import StoreAnswer
from outbox_core.report import Reason, WorkerState

if TYPE_CHECKING:
    from outbox_core.errors import OutboxError
    from outbox_core.message import Batch
    from outbox_core.processor.failing import FailureDecision
    from outbox_core.processor.state import ProcessorState

DECISION_POLL: Final = 2.0
"""Seconds between two looks whether a person has decided."""
NAMING_POLL: Final = 10.0
"""Seconds between two attempts to find out which message it is; each may take a second of the loop's time."""
REFUSED_WAIT: Final = 0.5
"""After a 4, before ownership is asked for again."""
GIVEN_UP: Final = "a person lets the rest go on without the message at which it stopped: it is tried once more"


@dataclass(frozen=True, slots=True)
class Named:
    """The message that failed alone, as a person knows it, and the command that lets the others go on without it."""

    place: str
    text: str
    remedy: str


def stop(state: ProcessorState, failed: outcomes.Failed, batch: Batch | None, now: float) -> ProcessorState:
    """Attempts ran out: handle nothing more."""
    alone = batch if batch is not None and batch.matched_count == 1 else None
    place = "" if alone is None else f" at the message up to {alone.examined}"
    stopped = build_stopped(state.attempt, failed.error, failed.message, place)
    unnamed = alone if failed.message is None else None
    return hold(state._replace(batch=None), replace(stopped, pair=state.stored, unnamed=unnamed), now)


def build_stopped(attempts: int, error: OutboxError, named: Named | None, place: str = "") -> Stopped:
    """Say at which message it stopped, or at least at which `place`, and what a person can do."""
    where = f" at {named.text}" if named is not None else place
    message = (
        f"gave up after {plain_count(attempts, 'attempt')}{where} ({error.reason}): {error}; "
        "correct the cause, then change the resource or its ConfigMap, or restart the worker"
    )
    stopped = Stopped(None, message)
    return stopped if named is None else _with_remedy(stopped, named)


def _with_remedy(stopped: Stopped, named: Named) -> Stopped:
    """Tell the command that lets the others go on without the message, and wait for it."""
    message = f"{stopped.message}; or let the rest go on without this message: {named.remedy}"
    return replace(stopped, place=named.place, message=message, unnamed=None)


def next_look(stopped: Stopped | None, now: float) -> float:
    """Say when to look whether a person has decided; about a message that is not known there is nothing to decide."""
    if stopped is None or (stopped.place is None and stopped.unnamed is None):
        return inf
    return now + (NAMING_POLL if stopped.place is None else DECISION_POLL)


def resume(state: ProcessorState, stopped: Stopped, now: float) -> ProcessorState:
    """Loaded again, by the same process: it is still stopped, unless another owner has moved the checkpoint."""
    if stopped.pair == state.stored:
        return hold(state, stopped, now)
    return state._replace(
        step=Step.FETCH, attempt=0, stopped=None, state=WorkerState.ACTIVE, reason=Reason.RUNNING, message=""
    )  # fmt: skip


def hold(state: ProcessorState, stopped: Stopped, now: float) -> ProcessorState:
    """Handle nothing, and look whether a person has decided."""
    return state._replace(
        step=Step.HOLD, due=next_look(stopped, now), stopped=stopped, state=WorkerState.STOPPED,
        reason=Reason.ATTEMPTS_EXHAUSTED, message=stopped.message,
    )  # fmt: skip


def decide_after_look(state: ProcessorState, decision: outcomes.Decision, now: float) -> ProcessorState:
    """A person decided, or has not yet; or only now is it known which message it is."""
    if decision.named is not None and state.stopped is not None:
        known = replace(state.stopped, message=f"{state.stopped.message}; it is {decision.named.text}")
        return hold(state, _with_remedy(known, decision.named), now)
    if not decision.given_up or state.stopped is None:
        return state._replace(due=next_look(state.stopped, now))
    again = state._replace(
        step=Step.FETCH, due=now, stopped=None, given_up=state.stopped.place, state=WorkerState.RETRYING,
        message=GIVEN_UP,
    )  # fmt: skip
    if state.claimed is not None:
        return again  # with the message first in what is left of the batch
    # Anything behind the checkpoint: the limit is for one batch.
    return again._replace(attempt=0, limit=1, search_end=state.stored, cursor=state.stored)


def decide_given_up(state: ProcessorState, failed: outcomes.Failed) -> FailureDecision | None:
    """Say what becomes of a message that fails after a person gave it up; None: it is another message."""
    if failed.message is None or state.given_up != failed.message.place:
        return None
    return build_decision(Action.DEAD_LETTER, failed.error, max(1, state.attempt), blocks=False)


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
        due=now + DECISION_POLL,
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
