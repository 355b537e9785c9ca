"""PURE: whose turn it is: fresh messages, or messages that failed before and are due for another attempt.

Messages that fail come again and again; were they always first, a few of them would take all the time there is. So
time is shared: after each turn of theirs fresh messages have `FRESH_SHARE` times as long, as long as there are any.
They never have two turns in a row then, however long a turn of the fresh ones was. Where one kind has nothing to do,
the other goes on.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from outbox_core.breaker import Phase

FRESH_SHARE: Final = 9.0
"""How much longer than messages that failed before fresh ones are worked on, while both are there."""
LONGEST_OWED: Final = 60.0
"""Seconds. One attempt that ran into a long time-out must not put off all others for hours."""


class Turn(StrEnum):
    """What is taken next."""

    FRESH = "Fresh"
    AGAIN = "Again"


def decide_turn(owed: float, breaker: Phase = Phase.CLOSED) -> Turn:
    """Say what is looked for next; where that is fresh messages and there are none, nothing is owed to them any more.

    While the target's breaker is not closed, a due retry waits until the outbox was looked at and has nothing fresh.
    """
    return Turn.FRESH if owed > 0 or breaker is not Phase.CLOSED else Turn.AGAIN


def decide_after_turn(owed: float, turn: Turn, seconds: float) -> float:
    """Something was found, and it took so many seconds to handle it, with or without success."""
    if turn is Turn.FRESH:
        return max(0.0, owed - seconds)
    return min(LONGEST_OWED, owed + FRESH_SHARE * seconds)
