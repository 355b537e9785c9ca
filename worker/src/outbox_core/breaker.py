"""PURE: a circuit breaker before a target. Closed: all goes through. Open: nothing. Half open: probes, one by one.

What counts is a row of failures with nothing handled between them: of the target as a whole, or of *different*
messages. One message that fails again and again is that message's trouble, however often: it opens nothing, and as a
probe it proves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Hashable

    from outbox_core.spec import CircuitBreaker

LONGEST_DOUBLING: Final = 3
"""After so many bad probes in a row the wait does not grow any more."""


class Phase(StrEnum):
    """What the breaker lets through."""

    CLOSED = "Closed"
    OPEN = "Open"
    HALF_OPEN = "HalfOpen"


@dataclass(frozen=True, slots=True)
class Breaker:
    """The state of one breaker.

    Attributes:
        phase: what is let through.
        faults: failures of the target as a whole since something was handled.
        places: messages that failed alone since then.
        until: when an open breaker lets a probe through.
        openings: how often it opened since it was closed.
        probed: probes in a row that were handled.

    """

    phase: Phase = Phase.CLOSED
    faults: int = 0
    places: frozenset[Hashable] = field(default_factory=frozenset)
    until: float = 0.0
    openings: int = 0
    probed: int = 0


def decide_admission(breaker: Breaker, now: float) -> tuple[Breaker, float]:
    """Return the breaker at this time, and how many seconds nothing may be tried; 0: go on."""
    if breaker.phase is not Phase.OPEN:
        return breaker, 0.0
    if now < breaker.until:
        return breaker, breaker.until - now
    return replace(breaker, phase=Phase.HALF_OPEN, probed=0), 0.0


def decide_after_success(breaker: Breaker, settings: CircuitBreaker) -> Breaker:
    """Something was handled."""
    if breaker.phase is Phase.HALF_OPEN and breaker.probed + 1 < settings.probes:
        return replace(breaker, probed=breaker.probed + 1)
    return Breaker()


def decide_after_failure(breaker: Breaker, settings: CircuitBreaker, place: Hashable | None, now: float) -> Breaker:
    """Something failed: the message at `place`, alone, or (None) the target as a whole."""
    if place is not None and place in breaker.places:
        return breaker
    if place is None:
        breaker = replace(breaker, faults=breaker.faults + 1)
    else:
        breaker = replace(breaker, places=breaker.places | {place})
    failures = breaker.faults + len(breaker.places)
    if breaker.phase is Phase.CLOSED and failures < settings.failures:
        return breaker
    if breaker.phase is Phase.OPEN:
        return breaker  # begun before it opened
    wait = settings.open_for.total_seconds() * 2.0 ** min(breaker.openings, LONGEST_DOUBLING)
    return replace(breaker, phase=Phase.OPEN, until=now + wait, openings=breaker.openings + 1, probed=0)
