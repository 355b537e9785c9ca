from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_core.progress.checkpoint import (
    BEGINNING,
    MAX_POSITION,
    MAX_TRANSACTION_ID,
    Checkpoint,
    StoreAnswer,
    parse_checkpoint,
)
from outbox_core.progress.snapshot_range import SnapshotRange

checkpoints = st.builds(
    Checkpoint,
    st.integers(min_value=0, max_value=MAX_TRANSACTION_ID),
    st.integers(min_value=-MAX_POSITION - 1, max_value=MAX_POSITION),
)


@given(checkpoints)
def test_parse_reads_what_str_writes(checkpoint: Checkpoint) -> None:
    assert parse_checkpoint(str(checkpoint)) == checkpoint


@given(checkpoints, checkpoints)
def test_order_is_that_of_the_pair(one: Checkpoint, other: Checkpoint) -> None:
    expected = (one.transaction_id, one.position) < (other.transaction_id, other.position)
    assert (one < other) is expected


def test_a_higher_position_in_an_older_transaction_is_behind() -> None:
    assert Checkpoint(10, 99) < Checkpoint(11, 1)


def test_the_beginning_lies_before_the_first_row_a_database_can_have() -> None:
    assert Checkpoint(3, 1) > BEGINNING


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="nothing"),
        pytest.param("815", id="half a pair"),
        pytest.param("815:", id="no position"),
        pytest.param(":42", id="no transaction id"),
        pytest.param("a:1", id="not a number"),
        pytest.param("1:2:3", id="three parts"),
        pytest.param("-1:2", id="negative transaction id"),
        pytest.param("1:--2", id="two signs"),
        pytest.param("18446744073709551616:0", id="transaction id above xid8"),
        pytest.param("1:9223372036854775808", id="position above bigint"),
    ],
)
def test_what_is_no_checkpoint_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_checkpoint(text)


@pytest.mark.parametrize("ends", [("", None), (None, ""), ("5:9", None), (None, "5:x:")])
def test_a_snapshot_range_whose_end_is_no_snapshot_is_refused(ends: tuple[str | None, str | None]) -> None:
    with pytest.raises(ValueError, match="is not a snapshot"):
        SnapshotRange(*ends)


@pytest.mark.parametrize("answer", list(StoreAnswer))
def test_a_checkpoint_that_was_edited_needs_a_person(answer: StoreAnswer) -> None:
    assert answer.needs_person is (answer in (2, 3))


def test_codes_are_those_of_the_contract() -> None:
    assert {a.name: a.value for a in StoreAnswer} == {
        "IGNORED": 0,
        "STORED": 1,
        "AHEAD": 2,
        "OLDER": 3,
        "NOT_OWNER": 4,
    }
