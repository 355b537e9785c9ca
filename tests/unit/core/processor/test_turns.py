"""Fresh messages and messages that failed before share the time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_core.breaker import Phase
from outbox_core.processor.turns import (
    FRESH_SHARE,
    LONGEST_OWED,
    Turn,
    decide_after_turn,
    decide_turn,
)

SECONDS = st.floats(0.001, 2.0)


def test_what_failed_is_tried_again_first_and_then_fresh_messages_have_their_share():
    owed = 0.0
    assert decide_turn(owed) is Turn.AGAIN
    owed = decide_after_turn(owed, Turn.AGAIN, 0.5)
    for _ in range(int(FRESH_SHARE * 5)):
        assert decide_turn(owed) is Turn.FRESH
        owed = decide_after_turn(owed, Turn.FRESH, 0.1)
    assert owed == pytest.approx(0.0, abs=1e-9)


def test_a_long_turn_of_fresh_messages_gives_the_others_one_turn_and_no_more():
    owed = decide_after_turn(1.0, Turn.FRESH, 100.0)
    assert decide_turn(owed) is Turn.AGAIN
    assert decide_turn(decide_after_turn(owed, Turn.AGAIN, 0.01)) is Turn.FRESH


@pytest.mark.parametrize("phase", [Phase.OPEN, Phase.HALF_OPEN])
def test_while_the_breaker_is_not_closed_what_failed_waits_until_nothing_fresh_is_found(phase):
    assert decide_turn(0.0, phase) is Turn.FRESH


def test_a_turn_that_ran_into_a_time_out_is_not_made_up_for_in_hours():
    assert decide_after_turn(0.0, Turn.AGAIN, 3600.0) == LONGEST_OWED


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=20, max_size=200))
def test_starve_no_kind_with_both_there_failed_messages_have_at_most_their_share_and_never_two_turns_in_a_row(costs):
    """Whatever each turn costs."""
    owed, spent, before = 0.0, {Turn.FRESH: 0.0, Turn.AGAIN: 0.0}, Turn.FRESH
    longest = max(again for again, _ in costs)
    for again, fresh in costs:
        turn = decide_turn(owed)
        assert (before, turn) != (Turn.AGAIN, Turn.AGAIN)
        seconds = again if turn is Turn.AGAIN else fresh
        owed, before = decide_after_turn(owed, turn, seconds), turn
        spent[turn] += seconds
    assert spent[Turn.AGAIN] <= spent[Turn.FRESH] / FRESH_SHARE + longest + 1e-6
    assert spent[Turn.AGAIN] > 0
