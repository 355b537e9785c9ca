"""A run is so long as was asked, unless RabbitMQ would end the connections of those that are paused meanwhile."""

from __future__ import annotations

import pytest

from tests.tools.bench.servers import HEARTBEAT
from tests.tools.bench.throughput import INSERTED, limit_seconds
from tests.tools.bench.turns import SETTLED


def test_a_run_that_is_short_enough_is_as_long_as_asked() -> None:
    assert limit_seconds(2, [20_000, 10_000], [1_000]) == 2


def pause(seconds: float, readers: list[float], copies: list[float]) -> float:
    """How long all turns and all insertions take together, and the servers to come to rest before each turn."""
    count = max(readers) * seconds
    turns = sum(count / rate for rate in readers) + seconds * len(copies) + SETTLED * (len(readers) + len(copies))
    return turns + (count + sum(rate * seconds for rate in copies)) / INSERTED


@pytest.mark.parametrize(
    ("readers", "copies"),
    [
        pytest.param([76_000, 30_000], [], id="readers only"),
        pytest.param([40_000, 5_000], [500, 20_000], id="peers with copies"),
    ],
)
def test_all_turns_of_a_long_run_fit_between_two_signs_of_life(readers, copies) -> None:
    seconds = limit_seconds(600, readers, copies)
    assert seconds < 600
    assert pause(seconds, readers, copies) == pytest.approx(HEARTBEAT * 0.75)


def test_a_slow_peer_with_copies_of_its_own_hardly_shortens_a_run() -> None:
    fast, with_slow = limit_seconds(600, [40_000], []), limit_seconds(600, [40_000], [100])
    left = HEARTBEAT * 0.75 - SETTLED
    assert fast == pytest.approx(left / 2.6)
    assert with_slow == pytest.approx((left - SETTLED) / (2.6 + 1), rel=0.01)
