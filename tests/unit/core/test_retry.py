"""Delays: bounded, growing, never negative."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_core import retry
from outbox_core.errors import HandlerError
from outbox_core.spec import Retry

CHANCES = st.floats(0, 1)


@given(st.integers(1, 10_000), st.floats(0.001, 60), st.floats(0, 1), CHANCES)
def test_a_backoff_lies_between_nothing_and_its_ceiling(failures, initial, jitter, chance):
    wait = retry.backoff(failures, initial=initial, ceiling=120, jitter=jitter, chance=chance)
    assert 0 <= wait <= 120


@given(st.integers(1, 1000), st.floats(0, 1), CHANCES)
def test_a_backoff_never_shrinks_with_more_failures(failures, jitter, chance):
    def wait(number):
        return retry.backoff(number, initial=0.5, ceiling=30, jitter=jitter, chance=chance)

    assert wait(failures + 1) >= wait(failures)


@given(st.integers(0, 10_000), st.floats(0.01, 300))
def test_an_idle_wait_stays_below_the_poll_interval(looks, interval):
    assert 0 < retry.idle_wait(looks, interval) <= interval


@given(st.integers(0, 10_000))
def test_looks_in_vain_become_rarer(useless):
    assert 0 <= retry.wake_wait(useless) < retry.wake_wait(useless + 1) <= 0.5 or retry.wake_wait(useless) == 0.5


@pytest.mark.parametrize(("seconds", "wait"), [(0.0, 0.0), (0.05, 0.0512), (0.2, 0.1126), (1.0, 0.2), (5.0, 0.5)])
def test_looks_are_rarer_the_longer_nothing_was_found(seconds, wait):
    passed, useless = 0.0, 0
    while passed < seconds:
        passed, useless = passed + retry.wake_wait(useless), useless + 1
    assert retry.wake_wait(useless) == pytest.approx(wait, rel=0.1)


@pytest.mark.parametrize(("attempt", "delay"), [(1, 1), (2, 2), (4, 8), (5, None)])
def test_attempts_run_out(attempt, delay):
    settings = Retry(max_attempts=5, initial_backoff="1s", max_backoff="8s", jitter=0)
    assert retry.decide_retry(attempt, settings, 0.3, HandlerError("no")) == delay


def test_infrastructure_and_claims_are_asked_often_enough():
    settings = Retry(initial_backoff="1s", max_backoff="10m", jitter=0)
    assert retry.infrastructure_backoff(1000, settings, 0) == retry.INFRASTRUCTURE_CEILING
    assert retry.claim_backoff(1000, 0) == retry.CLAIM_CEILING
