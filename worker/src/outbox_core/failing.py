"""PURE: what becomes of the one message that failed alone.

Where a failing message blocks its partition it is tried again where it is, and nothing is written. Otherwise it is *set
aside*: the checkpoint passes it in the same transaction that holds it, and it is tried again from there. When its
attempts ran out, the resource says whether it waits for a person (held, without a next attempt), becomes a dead letter
or is skipped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from outbox_core import retry
from outbox_core.report import Reason
from outbox_core.spec import Blocks, WhenExhausted

if TYPE_CHECKING:
    from outbox_core.errors import OutboxError
    from outbox_core.spec import Delivery

SUSPICIOUS_DEATHS: Final = 2
"""Owners that died at one checkpoint before messages are tried one at a time, each written down before it is."""
KILLS: Final = 2
"""Processes that died of a message, tried alone and written down, before it is given up."""
HELD_DEATHS: Final = 3
"""The same for a held message: the first time others may have been tried with it."""
_LONGEST_ERROR: Final = 2000


class Action(StrEnum):
    """What is done with a message that failed; the words of the database's functions."""

    HOLD = "Hold"
    DEAD_LETTER = "DeadLetter"
    SKIP = "Skip"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of a message.

    Attributes:
        action: held, dead or skipped.
        attempts: failed ones, this one included.
        error_class: the most telling name of the error.
        error: what people read.
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
class Suspicion:
    """Former owners died at this checkpoint: `left` messages from here on are under suspicion.

    Half of them are tried at once.
    What gets through is trusted, and what another owner dies of is written down: either way a half is left.
    """

    left: int

    @property
    def next_size(self) -> int:
        """How many are tried next."""
        return max(1, self.left // 2)


def decide_verdict(error: OutboxError, attempt: int, delivery: Delivery, chance: float) -> Verdict | None:
    """Decide about a message whose attempt number `attempt` (from 1) failed; None: it stops everything (Stop).

    Only for what is set aside: a message that blocks its partition is set aside when its attempts ran out, no earlier.
    """
    decision = retry.decide_retry(attempt, delivery.retry, chance, error)
    if is_given_up(error) or decision.stop:
        return decide_end(error, attempt, delivery)
    return _verdict(Action.HOLD, error, attempt, delivery, wait=decision.delay)


def decide_end(error: OutboxError, attempt: int, delivery: Delivery) -> Verdict | None:
    """Decide about a message whose attempts ran out; None: its partition stops at it."""
    match delivery.when_exhausted:
        case WhenExhausted.DEAD_LETTER:
            return _verdict(Action.DEAD_LETTER, error, attempt, delivery)
        case WhenExhausted.SKIP:
            return _verdict(Action.SKIP, error, attempt, delivery)
        case _:
            if delivery.blocking is Blocks.PARTITION:
                return None
            return _verdict(Action.HOLD, error, attempt, delivery)


def decide_held_verdict(error: OutboxError, attempt: int, delivery: Delivery, chance: float) -> Verdict:
    """Decide about a held message that failed again. No partition waits for one that it has passed: its key does."""
    verdict = decide_verdict(error, attempt, delivery, chance)
    if verdict is None:
        verdict = Verdict(Action.HOLD, attempt, error.error_class, shown_error(error), None, blocks=True)
    waits = verdict.action is Action.HOLD and delivery.blocking is not Blocks.NOTHING
    return replace(verdict, blocks=verdict.blocks or waits)


def is_given_up(error: OutboxError) -> bool:
    """Say whether a message is not to be tried again, whatever attempts are left: it killed too many processes."""
    return error.reason is Reason.PROCESS_KILLED


def _verdict(
    action: Action, error: OutboxError, attempt: int, delivery: Delivery, *, wait: float | None = None
) -> Verdict:
    blocks = delivery.blocking is Blocks.KEY
    return Verdict(action, attempt, error.error_class, shown_error(error), wait, blocks=blocks)


def shown_error(error: OutboxError) -> str:
    """PostgreSQL's text has no NUL."""
    return str(error).replace("\0", "\N{REPLACEMENT CHARACTER}")[:_LONGEST_ERROR]
