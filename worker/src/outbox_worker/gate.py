"""Before the target: its circuit breaker and the processor's rate, one for a process; and what the heartbeat saw.

Decisions are outbox_core's.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from outbox_core import happening as h
from outbox_core import rate, retry
from outbox_core.breaker import Breaker, Phase, decide_admission, decide_after_failure, decide_after_success
from outbox_core.errors import HandlerError
from outbox_core.report import Reason

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from outbox_core.errors import OutboxError
    from outbox_core.message import Batch
    from outbox_core.spec import Delivery
    from outbox_worker.postgres.holding import Seen

_ROUNDING = 0.001


class HeldWatch:
    """What the heartbeat last saw of held messages; each lane takes each look once."""

    def __init__(self) -> None:
        """Nothing was seen."""
        self._lock = threading.Lock()
        self._seen: dict[int, Seen] = {}

    def note(self, seen: Mapping[int, Seen]) -> None:
        """Take what was seen, by partition."""
        with self._lock:
            self._seen = dict(seen)

    def take(self, partition: int) -> Seen | None:
        """Return what was seen of a partition since it was last asked for."""
        with self._lock:
            return self._seen.pop(partition, None)


class Gate:
    """What one process may hand to its target."""

    def __init__(self, delivery: Delivery) -> None:
        """Begin closed, with a full bucket."""
        self._delivery = delivery
        self._breaker = Breaker()
        self._bucket: rate.Bucket | None = None
        self.share = 1.0
        """Of the processor's rate, this process's: that of the partitions it owns, or one of all consumers."""

    @property
    def phase(self) -> Phase:
        """What the breaker lets through, for people."""
        return self._breaker.phase

    def find_obstacle(self, now: float) -> h.Throttled | None:
        """Say whether nothing may be handed over now, and for how long."""
        self._breaker, wait = decide_admission(self._breaker, now)
        if wait > 0:
            return h.Throttled(
                wait, Reason.CIRCUIT_OPEN,
                f"the target failed {self._delivery.circuit_breaker.failures} times in a row: nothing is tried for "
                f"{wait:.0f} s, then one message is",
            )  # fmt: skip
        limit = self._delivery.rate_limit
        if limit is not None:
            self._bucket = rate.refill(self._bucket, limit, self.share, now)
            wait = rate.seconds_until_one(self._bucket, limit, self.share)
            if wait > 0:
                return h.Throttled(wait + _ROUNDING, Reason.RUNNING, "")
        return None

    def arrive(self, share: float, wait: float, now: float) -> None:
        """Begin with an empty bucket, that has a message in it after `wait`: others use all of the rate until then."""
        limit = self._delivery.rate_limit
        if limit is not None:
            self.share = share
            self._bucket = rate.Bucket(1.0 - wait * limit.messages_per_second * share, now)

    def limit(self, most: int) -> int:
        """Return how many messages the next batch may have."""
        if self._breaker.phase is Phase.HALF_OPEN:
            return 1
        return most if self._bucket is None else max(1, min(most, int(self._bucket.tokens)))

    def begin(self, messages: int) -> None:
        """So many messages are handed over now."""
        if self._bucket is not None:
            self._bucket = rate.spend(self._bucket, messages)

    def succeed(self) -> None:
        """The target took them."""
        self._breaker = decide_after_success(self._breaker, self._delivery.circuit_breaker)

    def fail(self, error: OutboxError, batch: Batch, now: float) -> None:
        """The target, or a message, failed; several messages together prove nothing yet."""
        place: Hashable | None = None
        if retry.classify_error(error, self._delivery.retry) is retry.ErrorKind.OUTSIDE:
            if error.reason is not Reason.TARGET_UNAVAILABLE and not isinstance(error, HandlerError):
                return
        elif batch.matched_count > 1:
            return
        else:
            place = batch.held[0].checkpoint if batch.held else batch.examined
        self._breaker = decide_after_failure(self._breaker, self._delivery.circuit_breaker, place, now)
