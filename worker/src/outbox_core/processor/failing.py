"""PURE: what becomes of the one message that failed alone.

Where a failing message blocks its partition it is tried again where it is, and nothing is written. Otherwise it is
*held*: the checkpoint passes it in the same transaction that holds it, and it is tried again from there. When its
attempts ran out, the resource says whether it waits for a person (held, without a next attempt), becomes a dead letter
or is skipped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from outbox_core import retry
from outbox_core.errors import HandlerError, MessagesFailedError
from outbox_core.report import Reason
from outbox_core.retry import ErrorKind
from outbox_core.spec import Blocks, WhenExhausted

if TYPE_CHECKING:
    from outbox_core.errors import OutboxError
    from outbox_core.progress.checkpoint import Checkpoint
    from outbox_core.spec import Delivery, Retry

CRASHES_BEFORE_SEARCH: Final = 2
"""Owners that died at one checkpoint before messages are tried one at a time, each written down before it is."""
POISON_CRASHES: Final = 2
"""Processes that died of a message, tried alone and written down, before it is given up."""
HELD_CRASHES: Final = 3
"""The same for a held message: the first time others may have been tried with it."""
NO_MESSAGES_FAULT: Final = frozenset({Reason.HANDLER_ENDED_TRANSACTION})
"""Faults that no message causes: looking for one would only repeat them."""
_LONGEST_ERROR: Final = 2000


class Action(StrEnum):
    """What is done with a message that failed; the words of the database's functions."""

    HOLD = "Hold"
    DEAD_LETTER = "DeadLetter"
    SKIP = "Skip"


@dataclass(frozen=True, slots=True)
class FailureDecision:
    """What becomes of a message.

    Attributes:
        attempts: failed ones, this one included.
        error_class: the most telling name of the error.
        wait: seconds until it is tried again; None: not until a person says so.
        blocks: later messages of its key wait behind it.

    """

    action: Action
    attempts: int
    error_class: str
    error: str
    wait: float | None
    blocks: bool


@dataclass(frozen=True, slots=True)
class Failure:
    """What becomes of the message at a place of the outbox."""

    checkpoint: Checkpoint
    decision: FailureDecision
    key: str = ""


@dataclass(frozen=True, slots=True)
class PoisonSearch:
    """Former owners died at this checkpoint: one of the next `left` messages may be the poison message.

    Half of them are tried at once. What gets through is trusted, and what another owner dies of is written down: either
    way a half is left.
    """

    left: int

    @property
    def next_size(self) -> int:
        """How many are tried next."""
        return max(1, self.left // 2)


def decide_failure(error: OutboxError, attempt: int, delivery: Delivery, chance: float) -> FailureDecision | None:
    """Decide about a message whose attempt number `attempt` (from 1) failed; None: it stops everything (Stop).

    Only for held messages: one that blocks its partition is held when its attempts ran out, no earlier.
    """
    delay = retry.decide_retry(attempt, delivery.retry, chance, error)
    if delay is None:
        return decide_end(error, attempt, delivery)
    return build_decision(Action.HOLD, error, attempt, blocks=delivery.blocking is Blocks.KEY, wait=delay)


def decide_passed_failure(error: OutboxError, attempt: int, delivery: Delivery, chance: float) -> FailureDecision:
    """Decide as `decide_failure` about a message that its partition passes in any case."""
    decision = decide_failure(error, attempt, delivery, chance)
    return decision or build_decision(Action.HOLD, error, attempt, blocks=True)


def decide_end(error: OutboxError, attempt: int, delivery: Delivery) -> FailureDecision | None:
    """Decide about a message whose attempts ran out; None: its partition stops at it."""
    action = Action.HOLD
    if delivery.when_exhausted in (WhenExhausted.DEAD_LETTER, WhenExhausted.SKIP):
        action = Action(delivery.when_exhausted.value)
    elif delivery.blocking is Blocks.PARTITION:
        return None
    return build_decision(action, error, attempt, blocks=delivery.blocking is Blocks.KEY)


def decide_held_failure(error: OutboxError, attempt: int, delivery: Delivery, chance: float) -> FailureDecision:
    """Decide about a held message that failed again. No partition waits for one that it has passed: its key does."""
    decision = decide_passed_failure(error, attempt, delivery, chance)
    waits = decision.action is Action.HOLD and delivery.blocking is not Blocks.NOTHING
    return replace(decision, blocks=decision.blocks or waits)


def is_of_messages(error: OutboxError, settings: Retry) -> bool:
    """Say whether messages are to blame. Where the target names which, all else goes on, with every kind of failure."""
    return isinstance(error, MessagesFailedError) or retry.classify_error(error, settings) is not ErrorKind.OUTSIDE


def are_refusals(error: MessagesFailedError, settings: Retry) -> bool:
    """Say whether each message that the target names is to blame itself."""
    return all(is_refusal(each, settings) for each in error.failed.values())


def is_refusal(error: OutboxError, settings: Retry) -> bool:
    """Say whether an error may be that of one message of several, to be found by trying fewer in the same transaction.

    Not one that ran into delivery.timeout, which bounds the transaction, nor one that ended it.
    """
    if error.reason in (Reason.HANDLER_ENDED_TRANSACTION, Reason.HANDLER_TIMEOUT):
        return False
    return retry.classify_error(error, settings) is not ErrorKind.OUTSIDE


def build_poison_error(crash_count: int) -> HandlerError:
    """Say of a message that it killed too many processes to be tried again."""
    return HandlerError(
        f"{crash_count} processes in a row died while they handled this message alone, without an error: killed for "
        "its memory, or crashed; it is not tried again until the resource or the handler is changed",
        reason=Reason.PROCESS_KILLED,
    )


def build_decision(
    action: Action, error: OutboxError, attempts: int, *, blocks: bool, wait: float | None = None
) -> FailureDecision:
    """Return the decision on a message that failed with `error`."""
    return FailureDecision(action, attempts, error.error_class, shown_error(error), wait, blocks)


def shown_error(error: OutboxError) -> str:
    """Return what is kept of an error's text."""
    return storable_text(str(error)[:_LONGEST_ERROR])


def storable_text(text: str) -> str:
    """Return a text that PostgreSQL takes: it has no NUL, and UTF-8 no lone surrogate."""
    return text.encode(errors="replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")
