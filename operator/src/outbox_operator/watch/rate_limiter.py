"""PURE: how often news of a resource may wake the operator: a few times at once, then in even steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

BURST: Final = 10
"""Wakes without a wait: more than a start, a takeover or a roll-out of some pods needs."""
STEP: Final = 10.0
"""Seconds between two wakes of a resource whose workers never stop telling news; it is looked at as often anyway."""


@dataclass(slots=True)
class RateLimiter:
    """The wakes of one resource; times are seconds of a clock that only goes forward."""

    due: float = float("-inf")
    """When it is woken, or was last."""
    earned: float = float("-inf")
    """When all wakes that were asked for were due, had each waited for its step."""

    def wait(self, now: float) -> float:
        """Say in how many seconds news of now may wake; what waits already wakes for this news too."""
        if self.due <= now:
            self.earned = max(self.earned, now)
            self.due = max(now, self.earned - (BURST - 1) * STEP)
            self.earned += STEP
        return self.due - now
