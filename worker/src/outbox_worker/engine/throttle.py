"""Before the target: its circuit breaker and the processor's rate, one for a process. Decisions are outbox_core's."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from outbox_core import rate, retry
from outbox_core.breaker import (
    CLOSED,
    Phase,
    decide_admission,
    decide_after_fault,
    decide_after_messages,
    decide_after_retry,
    decide_after_success,
    decide_shown_phase,
)
from outbox_core.errors import HandlerError
from outbox_core.processor import outcomes
from outbox_core.report import Reason, WorkerState

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable

    from outbox_core.errors import OutboxError
    from outbox_core.message import Batch
    from outbox_core.processor.state import ProcessorState
    from outbox_core.spec import Delivery

_ROUNDING = 0.001
_LATE: Final = 5.0
"""Seconds by which an attempt may be later than `retry.maxBackoff` asks for: due messages are probes one by one."""


class Throttle:
    """What one process may hand to its target."""

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery
        self.breaker = CLOSED
        self._fault = ""
        """What the target last failed with as a whole."""
        self._bucket: rate.Bucket | None = None
        self.paused_until = 0.0
        """When a pause that the target asked for is over; in the past: there is none."""
        self.share = 1.0
        """Of the processor's rate, this process's: that of the partitions it owns, or one of all consumers."""

    @property
    def phase(self) -> Phase:
        """What the breaker lets through, for people: steady during pauses and probes."""
        longest = self._delivery.retry.max_backoff.total_seconds() + _LATE
        return decide_shown_phase(self.breaker, time.monotonic(), longest)

    def find_obstacle(self, now: float) -> outcomes.Throttled | None:
        """Say whether nothing may be read for the target now, and for how long."""
        if (pause := self.find_pause(now)) is not None:
            return pause
        if self.breaker is not CLOSED:
            self.breaker, wait = decide_admission(self.breaker, now)
            if wait > 0:
                return outcomes.Throttled(wait, Reason.CIRCUIT_OPEN, self._describe())
        limit = self._delivery.rate_limit
        if limit is not None:
            self._bucket = rate.refill(self._bucket, limit, self.share, now)
            wait = rate.seconds_until_one(self._bucket, limit, self.share)
            if wait > 0:
                return outcomes.Throttled(wait + _ROUNDING, Reason.RUNNING, "")
        return None

    def find_pause(self, now: float) -> outcomes.Throttled | None:
        """Say whether the target asked for a pause that is not over: then not even what was read is handed over."""
        if now >= self.paused_until:
            return None
        why = "the target asked for a pause: nothing is handed to it until that is over"
        return outcomes.Throttled(self.paused_until - now, Reason.TARGET_UNAVAILABLE, why)

    def shown(self, state: ProcessorState) -> ProcessorState:
        """Return what is told of a partition while the breaker is not closed.

        Between two probes, and while one fails, no more than that it waits.
        """
        waits = state.state is WorkerState.ACTIVE or (state.state is WorkerState.RETRYING and not state.failures)
        if not waits or self.phase is not Phase.OPEN:
            return state
        return state._replace(
            state=WorkerState.RETRYING, reason=Reason.CIRCUIT_OPEN, message=self._describe(), attempt=0
        )  # fmt: skip

    def _describe(self) -> str:
        """Say why it is open; of messages that failed, no more than that, for each probe may fail in another way."""
        settings = self._delivery.circuit_breaker
        by_messages = len(self.breaker.keys) > self.breaker.faults
        who = f"messages of {settings.failures} keys or more" if by_messages else "the target"
        last = "" if by_messages else f"; it last failed with: {self._fault}"
        return f"{who} failed in a row: until a message is handled one is tried only now and then{last}"

    def arrive(self, share: float, wait: float, now: float) -> None:
        """Begin with an empty bucket, that has a message in it after `wait`: others use all of the rate until then."""
        limit = self._delivery.rate_limit
        if limit is not None:
            self.share = share
            self._bucket = rate.Bucket(1.0 - wait * limit.messages_per_second * share, now)

    def limit(self, most: int, *, retried: bool = False) -> int:
        """Return how many messages the next batch may have; `retried`: one of messages that are tried again."""
        if self.breaker is not CLOSED:
            most = self.breaker.limit(most, retried=retried)
        return most if self._bucket is None else max(1, min(most, int(self._bucket.tokens)))

    def begin(self, messages: int) -> None:
        """So many messages are handed over now."""
        if self._bucket is not None:
            self._bucket = rate.spend(self._bucket, messages)

    def succeed(self, messages: int) -> None:
        """The target took so many."""
        if messages and self.breaker is not CLOSED:
            self.breaker = decide_after_success(self.breaker, self._delivery.circuit_breaker, messages)

    def fail(self, error: OutboxError, batch: Batch, now: float, *, again: bool = False) -> None:
        """The target, or a message, failed; several messages together prove nothing yet.

        `again`: the message that stops its partition failed before. Nothing behind it can be the probe in its place.
        """
        settings = self._delivery.circuit_breaker
        if retry.classify_error(error, self._delivery.retry) is retry.ErrorKind.OUTSIDE:
            if error.reason is Reason.TARGET_UNAVAILABLE or isinstance(error, HandlerError):
                self.breaker = decide_after_fault(self.breaker, settings, now)
                self._fault = str(error)
            if error.reason is Reason.TARGET_UNAVAILABLE:
                self.paused_until = max(self.paused_until, now + retry.asked_wait(error))
        elif batch.matched_count == 1:
            message = batch.messages[0] if batch.messages else None
            key: Hashable = batch.examined if message is None else message.partition_key or message.message_id
            self.fail_messages((key,), now, more=batch.full, retried=again or batch.is_retried)

    def fail_messages(self, keys: Collection[Hashable], now: float, *, more: bool, retried: bool = False) -> None:
        """Messages of these keys failed, each by itself, and none was handled with them.

        `more`: the outbox has more that was not tried yet. `retried`: they had failed before, and are tried again.
        """
        if retried:
            self.breaker = decide_after_retry(self.breaker, now)
        else:
            settings = self._delivery.circuit_breaker
            self.breaker = decide_after_messages(self.breaker, settings, keys, now, more=more)
