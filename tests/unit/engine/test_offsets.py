"""Offsets are checkpoints: their JSON, and how a range is split."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_core.progress.checkpoint import MAX_TRANSACTION_ID, Checkpoint
from outbox_spark.offsets import OffsetRange, format_offset, parse_offset, parse_range, split_range

PAIRS = st.builds(Checkpoint, st.integers(0, 50), st.integers(-5, 50))


def test_a_transaction_id_beyond_json_numbers_survives():
    pair = Checkpoint(MAX_TRANSACTION_ID, 7)
    assert format_offset(pair) == {"transaction_id": "18446744073709551615", "position": 7}
    assert parse_offset(format_offset(pair)) == pair


@pytest.mark.parametrize(
    "offset",
    [
        pytest.param({"position": 1}, id="half a pair"),
        pytest.param({"transaction_id": 815, "position": 1}, id="a number where JSON may round it"),
        pytest.param({"transaction_id": "-1", "position": 1}, id="a negative transaction id"),
        pytest.param({"transaction_id": "815", "position": "1"}, id="a position as text"),
    ],
)
def test_an_offset_of_somebody_else_is_refused(offset):
    with pytest.raises(ValueError, match="is not an outbox offset"):
        parse_offset(offset)


def test_what_is_handled_is_left_out_of_a_range():
    whole = OffsetRange(Checkpoint(5, 1), Checkpoint(9, 9))
    assert whole.after(Checkpoint(7, 3)) == OffsetRange(Checkpoint(7, 3), Checkpoint(9, 9))
    assert whole.after(Checkpoint(4, 99)) == whole
    assert whole.after(Checkpoint(9, 9)).empty
    assert whole.after(Checkpoint(10, 0)).empty


def test_how_many_messages_a_range_had_comes_with_the_offset_of_its_end():
    start, end = Checkpoint(5, 1), Checkpoint(9, 9)
    whole = parse_range(start, format_offset(end, 12))
    assert (whole, whole.count) == (OffsetRange(start, end), 12)
    assert whole.after(start).count == 12
    assert whole.after(Checkpoint(7, 3)).count is None, "of a part it is not known"
    assert parse_range(start, format_offset(end)).count is None, "as offsets were that a former version wrote"


@given(PAIRS, PAIRS, st.lists(PAIRS, max_size=8))
def test_the_pieces_cover_the_range_exactly_once(one, other, boundaries):
    whole = OffsetRange(min(one, other), max(one, other))
    pieces = split_range(whole, boundaries)
    assert bool(pieces) is not whole.empty
    assert all(not piece.empty for piece in pieces)
    assert [piece.start for piece in pieces[1:]] == [piece.end for piece in pieces[:-1]]
    if pieces:
        assert (pieces[0].start, pieces[-1].end) == (whole.start, whole.end)
