"""PURE: how long to wait before trying again, and when to stop trying.

Random numbers are passed in, so a decision can be tabulated. Units are seconds.
"""

from __future__ import annotations

from enum import Enum
from math import inf
from typing import TYPE_CHECKING, Final

from outbox_core.errors import HandlerError
from outbox_core.report import Reason

if TYPE_CHECKING:
    from outbox_core.errors import OutboxError
    from outbox_core.spec import Retry

INFRASTRUCTURE_CEILING: Final = 15.0
"""Longest wait for a database or broker that cannot be reached: once it is back, work goes on within this time."""

CLAIM_CEILING: Final = 10.0
"""Longest wait between two requests for a claim that another resource holds."""

LONGEST_ASKED: Final = 86_400.0
"""Longest wait that an error can ask for (retry after): a day."""

_OF_THE_TARGET: Final = frozenset({Reason.TARGET_UNAVAILABLE, Reason.MESSAGE_UNROUTABLE, Reason.STATEMENT_FAILED})
"""Faults of the target, and deadlocks: the owner stays owner. A resource may count them as attempts."""

_FIRST_IDLE_WAIT: Final = 0.01
_FIRST_WAKE_WAIT: Final = 0.0001
_DOUBLED: Final = 10
"""Looks in vain until waits stop doubling, at a tenth of a second; from then on each is a tenth longer."""
_LONGEST_WAKE_WAIT: Final = 0.5
"""A server that writes for others all the time is asked twice a second."""
_LARGEST_EXPONENT: Final = 30
"""2**30 initial waits is longer than any ceiling; larger exponents would overflow a float."""


class ErrorKind(Enum):
    """What a failure means for the attempts of a message."""

    ATTEMPT = "counts as an attempt"
    HOPELESS = "no other attempt can succeed"
    OUTSIDE = "no message's fault: tried again without end"


def classify_error(error: OutboxError, retry: Retry) -> ErrorKind:
    """Say what a failure of handling means: by the resource's lists of classes first, else by who failed."""
    named = {*error.classes, error.reason.value}
    if is_of_target(error):
        if named.intersection(retry.never):
            return ErrorKind.HOPELESS
        if named.intersection(retry.forever):
            return ErrorKind.OUTSIDE
        if named.intersection(retry.counted):
            return ErrorKind.ATTEMPT
    return ErrorKind.ATTEMPT if isinstance(error, HandlerError) else ErrorKind.OUTSIDE


def is_of_target(error: OutboxError) -> bool:
    """Say whether the handler or the target failed, in place of what is between it and the messages."""
    return isinstance(error, HandlerError) or error.reason in _OF_THE_TARGET


def backoff(failures: int, *, initial: float, ceiling: float, jitter: float, chance: float) -> float:
    """Seconds to wait after so many failures in a row, from 1: they double from `initial` to `ceiling`.

    Then the share `jitter` of it, 0 to 1, is random (`chance`, 0 to 1): the result lies between `(1 - jitter) * wait`
    and `wait`, so the ceiling holds.
    """
    exponent = min(max(failures, 1) - 1, _LARGEST_EXPONENT)
    wait = min(initial * 2.0**exponent, ceiling)
    return wait * (1.0 - jitter * chance)


def decide_retry(attempt: int, retry: Retry, chance: float, error: OutboxError) -> float | None:
    """Decide after how many seconds a message is tried again whose attempt number `attempt` (from 1) just failed.

    Who failed may ask for a longer wait than the backoff; it is given, up to `LONGEST_ASKED`. None: it is not tried
    again. Its attempts ran out, the error is hopeless, or the message killed too many processes.
    """
    hopeless = error.reason is Reason.PROCESS_KILLED or classify_error(error, retry) is ErrorKind.HOPELESS
    if hopeless or attempt >= retry.max_attempts:
        return None
    return _wait(attempt, retry, chance, error)


def asked_wait(error: OutboxError | None) -> float:
    """Seconds to wait that who failed asked for, up to `LONGEST_ASKED`."""
    return 0.0 if error is None else min(error.retry_after or 0.0, LONGEST_ASKED)


def infrastructure_backoff(failures: int, retry: Retry, chance: float, error: OutboxError | None = None) -> float:
    """Seconds to wait for something outside that is down or not set up yet; tried again without end.

    As with `decide_retry` it may ask for a longer wait.
    """
    return _wait(failures, retry, chance, error, INFRASTRUCTURE_CEILING)


def _wait(failures: int, retry: Retry, chance: float, error: OutboxError | None, longest: float = inf) -> float:
    """Seconds to wait as the resource says, at most `longest`; or as long as who failed asks for."""
    initial, ceiling = (min(each.total_seconds(), longest) for each in (retry.initial_backoff, retry.max_backoff))
    wait = backoff(failures, initial=initial, ceiling=ceiling, jitter=retry.jitter, chance=chance)
    return max(wait, asked_wait(error))


def claim_backoff(refusals: int, chance: float) -> float:
    """Seconds until a claim that another resource holds is asked for again."""
    return backoff(refusals, initial=1.0, ceiling=CLAIM_CEILING, jitter=0.2, chance=chance)


def wake_wait(useless: int) -> float:
    """Seconds until a look because the server wrote something, after `useless` such looks in a row in vain.

    Where messages come several times a second a look is made at once: by the time that the server is asked, the commit
    is visible. The longer none came the rarer they are, and the fewer looks are worth it.
    """
    if not useless:
        return 0.0
    doubled, longer = min(useless, _DOUBLED), min(max(0, useless - _DOUBLED), _LARGEST_EXPONENT)
    return min(_FIRST_WAKE_WAIT * 2.0**doubled * 1.1**longer, _LONGEST_WAKE_WAIT)


def idle_wait(idle_looks: int, poll_interval: float) -> float:
    """Seconds until the next look after `idle_looks` looks in a row that found nothing new.

    Short after work was found (an outbox that trickles is followed closely), doubling to the poll interval.
    """
    return min(_FIRST_IDLE_WAIT * 2.0 ** min(idle_looks, _LARGEST_EXPONENT), poll_interval)
