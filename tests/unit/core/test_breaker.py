"""The circuit breaker is for targets: what opens it, what its probe is, and what it never takes for an outage."""

from __future__ import annotations

from datetime import timedelta

import pytest

from outbox_core.breaker import (
    PATIENCE,
    PAUSE,
    QUIET,
    Breaker,
    Phase,
    decide_admission,
    decide_after_fault,
    decide_after_messages,
    decide_after_retry,
    decide_after_success,
    decide_shown_phase,
)
from outbox_core.spec import CircuitBreaker

SETTINGS = CircuitBreaker(failures=3, open_for=timedelta(seconds=10), probes=1)
DEFAULTS = CircuitBreaker()
LONGEST = 60.0


def failed(*keys, breaker=None, now=0.0, more=True, settings=SETTINGS):
    return decide_after_messages(breaker or Breaker(), settings, keys, now, more=more)


def faulty(times, *, breaker=None, now=0.0, settings=SETTINGS):
    breaker = breaker or Breaker()
    for _ in range(times):
        breaker = decide_after_fault(breaker, settings, now)
    return breaker


class TestTarget:
    def test_its_faults_in_a_row_open(self):
        assert faulty(2).phase is Phase.CLOSED
        assert faulty(3).phase is Phase.OPEN

    def test_what_is_handled_between_them_begins_the_row_anew(self):
        assert faulty(2, breaker=decide_after_success(faulty(2), SETTINGS)).phase is Phase.CLOSED

    def test_it_waits_then_probes_with_one_message_then_closes(self):
        opened = faulty(3, now=100.0)
        assert decide_admission(opened, 104.0) == (opened, 6.0)
        probing, wait = decide_admission(opened, 110.0)
        assert (probing.phase, wait, probing.limit(1000, retried=False)) == (Phase.HALF_OPEN, 0.0, 1)
        assert decide_after_success(probing, SETTINGS) == Breaker()

    def test_as_many_probes_as_asked_must_be_handled(self):
        twice = SETTINGS.model_copy(update={"probes": 2})
        probing, _ = decide_admission(faulty(3), 10.0)
        once = decide_after_success(probing, twice)
        assert once.phase is Phase.HALF_OPEN
        assert decide_after_success(once, twice) == Breaker()

    def test_a_bad_probe_doubles_the_wait_up_to_eight_times(self):
        breaker, waits = faulty(3), []
        for _ in range(6):
            probing, _ = decide_admission(breaker, breaker.until)
            now = breaker.until
            breaker = decide_after_fault(probing, SETTINGS, now)
            waits.append(breaker.until - now)
        assert waits == [20.0, 40.0, 80.0, 80.0, 80.0, 80.0]

    def test_what_was_begun_before_it_opened_changes_nothing(self):
        opened = faulty(3)
        assert faulty(1, breaker=opened, now=5.0) == opened
        assert failed("a", breaker=opened, now=5.0) == opened

    def test_time_outs_open_it_however_long_each_takes(self):
        breaker = Breaker()
        for number in range(DEFAULTS.failures):
            assert breaker.phase is Phase.CLOSED
            breaker = faulty(1, breaker=breaker, now=number * 62.0, settings=DEFAULTS)
        assert breaker.phase is Phase.OPEN


class TestMessages:
    def test_one_that_fails_again_and_again_opens_nothing(self):
        breaker = Breaker()
        for _ in range(10_000):
            breaker = failed("a", breaker=breaker)
        assert breaker.phase is Phase.CLOSED

    def test_after_many_keys_only_fresh_ones_go_on_at_once_and_as_many_as_ever(self):
        breaker = failed("a", "b", "c")
        assert breaker.phase is Phase.HALF_OPEN
        assert breaker.limit(1000, retried=False) == 1000
        assert breaker.limit(1000, retried=True) == 1

    def test_where_the_outbox_has_no_more_the_next_look_is_soon(self):
        breaker = failed("a", "b", "c", more=False, now=5.0)
        assert (breaker.phase, breaker.until) == (Phase.OPEN, 5.0 + PAUSE)

    def test_the_first_that_is_handled_closes_it(self):
        assert decide_after_success(failed(*range(100)), SETTINGS) == Breaker()

    @pytest.mark.parametrize("size", [1, 10, 100, 1000])
    def test_a_row_of_a_thousand_bad_ones_never_keeps_what_is_behind_it_waiting(self, size):
        """Whatever the batches: with the defaults nothing waits while the outbox has more."""
        breaker = Breaker()
        for start in range(0, 1000, size):
            breaker = failed(*range(start, start + size), breaker=breaker, settings=DEFAULTS)
            assert decide_admission(breaker, 0.0)[1] == 0.0
            assert breaker.limit(size, retried=False) == size

    def test_so_many_that_it_must_be_an_outage_open_it_and_then_one_message_is_the_probe(self):
        breaker = failed(*range(SETTINGS.failures * PATIENCE), now=7.0)
        assert (breaker.phase, breaker.until) == (Phase.OPEN, 17.0)
        probing, _ = decide_admission(breaker, 17.0)
        assert probing.limit(1000, retried=False) == 1
        again = failed("another", breaker=probing, now=17.0)
        assert (again.phase, again.until) == (Phase.OPEN, 37.0)

    def test_those_from_before_a_quiet_time_do_not_help_to_open_it(self):
        assert failed("c", breaker=failed("a", "b"), now=QUIET + 1).phase is Phase.CLOSED


class TestRetries:
    def test_however_many_fail_again_they_open_nothing(self):
        breaker = Breaker()
        for number in range(10_000):
            breaker = decide_after_retry(breaker, float(number))
        assert breaker == Breaker()

    def test_half_open_a_bad_one_waits_for_another_look_and_doubles_nothing(self):
        probing, _ = decide_admission(failed("a", "b", "c", more=False), 10.0)
        again = decide_after_retry(probing, 10.0)
        assert (again.phase, again.until, again.openings) == (Phase.OPEN, 10.0 + PAUSE, 0)

    def test_half_open_a_good_one_shows_that_the_target_works(self):
        probing, _ = decide_admission(faulty(3), 10.0)
        assert decide_after_success(probing, SETTINGS) == Breaker()


def test_a_probe_of_a_key_that_failed_before_opens_it_again():
    opened = failed(*range(SETTINGS.failures * PATIENCE))
    assert (opened.phase, opened.openings) == (Phase.OPEN, 1)
    probing, _ = decide_admission(opened, opened.until)
    again = failed(0, breaker=probing, now=opened.until)
    assert (again.phase, again.openings) == (Phase.OPEN, 2)


class TestShown:
    """What people are told is steady: it follows neither the pauses nor the probes of an outage."""

    def test_open_from_the_first_wait_on_through_all_bad_probes_until_one_is_handled(self):
        now, breaker, shown = 5.0, failed("a", "b", "c", more=False, now=5.0), set()
        for number in range(50):
            now = breaker.until
            probing, wait = decide_admission(breaker, now)
            assert (probing.phase, wait) == (Phase.HALF_OPEN, 0.0)
            bad = (
                decide_after_retry(probing, now) if number % 2 else failed(number, breaker=probing, now=now, more=False)
            )
            shown |= {decide_shown_phase(each, now, LONGEST) for each in (breaker, probing, bad)}
            breaker = bad
        assert shown == {Phase.OPEN}
        probing, _ = decide_admission(breaker, breaker.until)
        assert decide_shown_phase(decide_after_success(probing, SETTINGS), now, LONGEST) is Phase.CLOSED

    def test_an_outage_is_open_too_while_a_message_is_its_probe(self):
        probing, _ = decide_admission(faulty(3, now=100.0), 110.0)
        assert decide_shown_phase(probing, 110.0, LONGEST) is Phase.OPEN

    def test_half_open_while_fresh_messages_go_on_and_once_the_first_of_several_probes_was_handled(self):
        assert decide_shown_phase(failed("a", "b", "c"), 0.0, LONGEST) is Phase.HALF_OPEN
        probing, _ = decide_admission(faulty(3), 10.0)
        once = decide_after_success(probing, SETTINGS.model_copy(update={"probes": 2}))
        assert decide_shown_phase(once, 10.0, LONGEST) is Phase.HALF_OPEN

    def test_half_open_where_nothing_is_left_to_probe_with(self):
        probing, _ = decide_admission(faulty(3, now=100.0), 110.0)
        assert decide_shown_phase(probing, 110.0 + LONGEST, LONGEST) is Phase.HALF_OPEN
