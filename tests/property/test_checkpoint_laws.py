"""Laws of the pair and of the contract's model; no server. The SQL is compared with the model in tests/contract."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outbox_core.progress.checkpoint import MAX_POSITION, MAX_TRANSACTION_ID, Checkpoint, StoreAnswer, parse_checkpoint
from tests.support.database.contract import AHEAD, ERROR, IGNORED, NOTHING, OLDER, STORED, Model

PAIRS = st.builds(
    Checkpoint,
    st.integers(0, MAX_TRANSACTION_ID) | st.integers(0, 5),
    st.integers(-MAX_POSITION - 1, MAX_POSITION) | st.integers(-2, 2),
)
TUPLES = st.tuples(st.integers(0, 4), st.integers(-1, 2))
NOBODY = (None, None)


@given(PAIRS)
def test_text_and_pair_say_the_same(pair):
    assert parse_checkpoint(str(pair)) == pair
    assert parse_checkpoint(f" {pair}\n") == pair


@given(PAIRS, PAIRS, PAIRS)
def test_the_order_is_total(a, b, c):
    assert (a < b) + (a == b) + (a > b) == 1
    assert not (a <= b <= c) or a <= c


@given(PAIRS, PAIRS)
def test_the_transaction_decides_and_then_the_position(a, b):
    if a.transaction_id != b.transaction_id:
        assert (a < b) is (a.transaction_id < b.transaction_id)
    else:
        assert (a < b) is (a.position < b.position)


@given(st.none() | TUPLES, TUPLES, st.just(NOTHING) | TUPLES)
def test_a_refusal_changes_nothing_and_a_success_stores_the_new_pair(row, new, expected):
    model = Model(row=row)

    answer = model.store(new, expected, NOBODY)

    assert answer == ERROR or answer in set(StoreAnswer)
    assert model.row == (new if answer == STORED else row)


@given(st.none() | TUPLES, TUPLES, TUPLES)
def test_told_the_stored_pair_the_next_call_succeeds(row, new, expected):
    model = Model(row=row)
    answer = model.store(new, expected, NOBODY)

    if answer in (AHEAD, OLDER) and model.row is not None and new > model.row:
        assert model.store(new, model.row, NOBODY) == STORED
    if answer in (STORED, IGNORED):
        assert model.store(new, expected, NOBODY) == IGNORED


@given(st.lists(st.tuples(TUPLES, st.just(NOTHING) | TUPLES), max_size=8))
def test_no_history_of_calls_moves_a_checkpoint_back(calls):
    model = Model()
    for new, expected in calls:
        before = model.row
        model.store(new, expected, NOBODY)
        assert before is None or (model.row is not None and model.row >= before)
