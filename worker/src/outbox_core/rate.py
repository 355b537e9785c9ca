"""PURE: a token bucket: at most so many messages a second, so many at once after a pause.

The rate is the processor's; a process that owns a share of the partitions uses that share of the rate.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outbox_core.spec import RateLimit


@dataclass(frozen=True, slots=True)
class Bucket:
    """Messages that may be handled now, as of the time `at`; below 0 after more were handled than there were."""

    tokens: float
    at: float


def refill(bucket: Bucket | None, limit: RateLimit, share: float, now: float) -> Bucket:
    """Return the bucket at this time; None: a full one. It holds at least 1, or nothing would ever be handled."""
    burst = max(1.0, share * (limit.burst or ceil(limit.messages_per_second)))
    if bucket is None:
        return Bucket(burst, now)
    gained = max(0.0, now - bucket.at) * limit.messages_per_second * share
    return Bucket(min(burst, bucket.tokens + gained), now)


def spend(bucket: Bucket, messages: int) -> Bucket:
    """Return the bucket after so many messages."""
    return Bucket(bucket.tokens - messages, bucket.at)


def seconds_until_one(bucket: Bucket, limit: RateLimit, share: float) -> float:
    """Return how long it takes until one message may be handled."""
    if bucket.tokens >= 1.0:
        return 0.0
    return (1.0 - bucket.tokens) / max(limit.messages_per_second * share, 1e-9)
