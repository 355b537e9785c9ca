"""PURE: a circuit breaker before a target. Closed: all goes through. Open: nothing. Half open: fresh messages only.

It is for targets. Two things open it, counted since something was last handled:

- faults of the target itself (connection, time-out, the broker): nothing is tried for `openFor`, then one message is;
- *fresh* messages of many keys that all fail. That is an outage, or only a row of bad messages with good ones behind
  it, and nothing but another fresh message tells which. So fresh ones are tried on while there are any (each uses one
  attempt at most), due retries rest meanwhile, and where the outbox is empty the next look is only `PAUSE` later. Once
  `PATIENCE` times `failures` keys failed, it is an outage: nothing is tried for `openFor`.

A message that is tried again says little: that it fails again is no news of the target, and neither counts nor opens.
Messages that failed before a quiet time do not count either. Faults always do: between two of them can be a whole
delivery.timeout.

People are told less than this: to them it is open until a message is handled, through all pauses and bad probes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable

    from outbox_core.spec import CircuitBreaker

LONGEST_DOUBLING: Final = 3
"""After so many bad probes in a row the wait does not grow any more."""
PATIENCE: Final = 200
"""Times `failures`: so many fresh keys fail in a row before it is an outage. A row of 1,000 bad messages is none."""
PAUSE: Final = 0.5
"""Seconds before the next look at an outbox whose fresh messages all failed."""
QUIET: Final = 30.0
"""Seconds without a failure after which messages that failed before do not count any more."""


class Phase(StrEnum):
    """What the breaker lets through."""

    CLOSED = "Closed"
    OPEN = "Open"
    HALF_OPEN = "HalfOpen"


@dataclass(frozen=True, slots=True)
class Breaker:
    """The state of one breaker.

    Attributes:
        faults: failures of the target as a whole since something was handled.
        keys: of fresh messages that failed since then.
        at: when a fresh message last failed.
        until: when an open breaker lets a probe through.
        openings: how often it opened for `openFor` since it was closed; 0: fresh messages are not limited.
        probed: messages in a row that were handled while it was half open.

    """

    phase: Phase = Phase.CLOSED
    faults: int = 0
    keys: frozenset[Hashable] = field(default_factory=frozenset)
    at: float = 0.0
    until: float = 0.0
    openings: int = 0
    probed: int = 0

    def limit(self, most: int, *, retried: bool) -> int:
        """Return how many messages may be tried at once: one as a probe, and no more retries than one in doubt."""
        if self.phase is Phase.CLOSED or (self.phase is Phase.HALF_OPEN and not self.openings and not retried):
            return most
        return 1


CLOSED: Final = Breaker()
"""Nothing failed since something was handled: all goes through."""


def decide_admission(breaker: Breaker, now: float) -> tuple[Breaker, float]:
    """Return the breaker at this time, and how many seconds nothing may be tried; 0: go on."""
    if breaker.phase is not Phase.OPEN:
        return breaker, 0.0
    if now < breaker.until:
        return breaker, breaker.until - now
    return replace(breaker, phase=Phase.HALF_OPEN, probed=0), 0.0


def decide_shown_phase(breaker: Breaker, now: float, longest: float) -> Phase:
    """Return what people are told: open from the first wait on, also while a message is the probe.

    Half open is what lets fresh messages through that all fail, what has handled the first of several probes, and what
    has found nothing to probe with for `longest` seconds, within which all that failed and waits is tried again.
    """
    probes = breaker.phase is Phase.HALF_OPEN and breaker.until > 0 and not breaker.probed
    return Phase.OPEN if probes and now < breaker.until + longest else breaker.phase


def decide_after_success(breaker: Breaker, settings: CircuitBreaker, messages: int = 1) -> Breaker:
    """So many messages were handled."""
    if breaker.phase is Phase.HALF_OPEN and breaker.probed + messages < settings.probes:
        return replace(breaker, probed=breaker.probed + messages)
    return CLOSED


def decide_after_fault(breaker: Breaker, settings: CircuitBreaker, now: float) -> Breaker:
    """The target failed as a whole, whichever message it was asked to take."""
    if breaker.phase is Phase.OPEN:
        return breaker  # begun before it opened
    breaker = replace(breaker, faults=breaker.faults + 1)
    is_probe = breaker.phase is Phase.HALF_OPEN and breaker.openings > 0
    return _opened(breaker, settings, now) if is_probe or breaker.faults >= settings.failures else breaker


def decide_after_messages(
    breaker: Breaker, settings: CircuitBreaker, keys: Collection[Hashable], now: float, *, more: bool
) -> Breaker:
    """Fresh messages of these keys failed, and nothing was handled with them; `more`: the outbox has more of them."""
    if breaker.phase is Phase.OPEN:
        return breaker
    new = frozenset(keys) - breaker.keys
    if not new and not breaker.openings:
        return breaker  # a key that failed before says nothing new
    is_old = now - breaker.at > QUIET and not breaker.openings
    breaker = replace(breaker, keys=new if is_old else breaker.keys | new, at=now, probed=0)
    if breaker.openings > 0 or len(breaker.keys) >= settings.failures * PATIENCE:
        return _opened(breaker, settings, now)
    if len(breaker.keys) < settings.failures and breaker.phase is Phase.CLOSED:
        return breaker
    if more:
        return replace(breaker, phase=Phase.HALF_OPEN)
    return replace(breaker, phase=Phase.OPEN, until=now + PAUSE)


def decide_after_retry(breaker: Breaker, now: float) -> Breaker:
    """Held messages failed again; half open, the next one waits for another look at the outbox."""
    if breaker.phase is not Phase.HALF_OPEN:
        return breaker
    return replace(breaker, phase=Phase.OPEN, until=now + PAUSE, probed=0)


def _opened(breaker: Breaker, settings: CircuitBreaker, now: float) -> Breaker:
    wait = settings.open_for.total_seconds() * 2.0 ** min(breaker.openings, LONGEST_DOUBLING)
    return replace(breaker, phase=Phase.OPEN, until=now + wait, openings=breaker.openings + 1, probed=0)
