"""Publisher confirms, exactly: single, multiple, nacks, any order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import commands, frame

from outbox_worker.targets.amqp.connection import ConfirmTracker, read_ack


def tracker(count):
    confirms = ConfirmTracker()
    for number in range(1, count + 1):
        assert confirms.publish(1) == number
    return confirms


def answered(confirms):
    """Return up to which tag all are answered."""
    return max(tag for tag in range(confirms.last + 1) if confirms.are_answered(tag))


def test_single_and_multiple_answers_add_up():
    confirms = tracker(6)
    confirms.answer(3, multiple=False, accepted=True)
    assert answered(confirms) == 0
    confirms.answer(4, multiple=True, accepted=True)
    assert answered(confirms) == 4
    confirms.answer(6, multiple=False, accepted=False)
    assert answered(confirms) == 4
    confirms.answer(5, multiple=False, accepted=True)
    assert answered(confirms) == 6
    assert confirms.nacked == [6]
    confirms.forget_nacked(range(6))
    assert confirms.nacked == [6]
    confirms.forget_nacked([6])
    assert confirms.nacked == []


def test_zero_with_multiple_means_all():
    confirms = tracker(4)
    confirms.answer(0, multiple=True, accepted=False)
    assert answered(confirms) == 4
    assert confirms.nacked == [1, 2, 3, 4]


@pytest.mark.parametrize("tag", [0, 5])
def test_a_tag_that_was_never_given_out_is_a_fault(tag):
    with pytest.raises(ValueError, match="last one published is 4"):
        tracker(4).answer(tag, multiple=False, accepted=True)


@given(st.data())
def test_each_tag_is_answered_once_in_any_order(data):
    count = data.draw(st.integers(1, 30))
    confirms = tracker(count)
    left, refused = set(range(1, count + 1)), set()
    while left:
        tag = data.draw(st.sampled_from(sorted(left)))
        multiple, accepted = data.draw(st.booleans()), data.draw(st.booleans())
        found = {each for each in left if each <= tag} if multiple else {tag}
        confirms.answer(tag, multiple=multiple, accepted=accepted)
        left -= found
        refused |= set() if accepted else found
        assert answered(confirms) == min(left, default=count + 1) - 1
        assert all(confirms.is_accepted(each) == (each not in left | refused) for each in range(1, count + 1))
    assert set(confirms.nacked) == refused


@given(st.integers(0, 2**63 - 1), st.booleans(), st.binary(max_size=3))
def test_an_ack_is_read_as_the_library_writes_it(tag, multiple, before):
    written = frame.marshal(commands.Basic.Ack(delivery_tag=tag, multiple=multiple), 1)
    start, end = len(before), len(before) + len(written)
    assert read_ack(before + written + b"next", start, end) == (tag, multiple)


@pytest.mark.parametrize(
    "other",
    [
        frame.marshal(commands.Basic.Nack(delivery_tag=7), 1),
        frame.marshal(commands.Basic.Ack(delivery_tag=7), 2),
        frame.marshal(commands.Basic.Ack(delivery_tag=7), 1)[:-1] + b"\0",
        frame.marshal(commands.Channel.CloseOk(), 1),
    ],
    ids=["nack", "channel", "end", "method"],
)
def test_no_other_frame_is_taken_for_an_ack(other):
    assert read_ack(other, 0, len(other)) is None
