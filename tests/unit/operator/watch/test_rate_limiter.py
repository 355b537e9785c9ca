"""A report that says something else each time must not keep the operator busy."""

from __future__ import annotations

import itertools
from datetime import timedelta

import pytest

from outbox_operator.decision.decide import LOOK_AGAIN, decide
from outbox_operator.watch.rate_limiter import BURST, STEP, RateLimiter
from tests.unit.operator.building import NOW, REFUSED, WAITING, build_observed


def wakes(every: float, seconds: float) -> list[float]:
    """When a resource is woken that has news at every look."""
    pace = RateLimiter()
    looks = [number * every for number in range(int(seconds / every))]
    return sorted({round(now + pace.wait(now), 6) for now in looks})


def test_the_first_news_wake_at_once():
    pace = RateLimiter()
    assert [pace.wait(now) for now in range(BURST)] == [0.0] * BURST


@pytest.mark.parametrize("every", [0.1, 2.0, 3.7])
def test_news_without_end_wake_in_even_steps(every: float):
    woken = wakes(every, 3600.0)
    assert len(woken) <= BURST + 3600.0 / STEP
    late = [now for now in woken if now > BURST * STEP]
    assert min(after - before for before, after in itertools.pairwise(late)) >= STEP - every


def test_news_that_wait_are_not_put_off_by_later_ones():
    pace = RateLimiter()
    for _ in range(BURST):
        assert pace.wait(0.0) == 0.0
    assert [pace.wait(now) for now in (1.0, 2.0, 9.0)] == [STEP - 1.0, STEP - 2.0, STEP - 9.0]


def test_after_a_rest_news_wake_at_once_again():
    pace = RateLimiter()
    for now in range(50):
        pace.wait(float(now))
    later = 50.0 + 2 * BURST * STEP
    assert [pace.wait(later + now) for now in range(BURST)] == [0.0] * BURST


@pytest.mark.parametrize("late", [timedelta(0), timedelta(minutes=1)])
def test_a_try_of_the_claim_that_runs_is_looked_at_like_anything_in_flight(late: timedelta):
    """Its job and pod are watched; before, a try was decided about five times a second until it ended."""
    assert decide(build_observed(previous=WAITING), NOW + late).look_again == LOOK_AGAIN


def test_a_try_that_comes_is_looked_at_when_it_is_due():
    soon = WAITING.model_copy(update={"ownership": REFUSED.model_copy(update={"next_try": NOW + timedelta(seconds=1)})})
    assert decide(build_observed(previous=soon), NOW).look_again == timedelta(seconds=1)
