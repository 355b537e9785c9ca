"""What a broker took of a batch that failed is not handed over again, and what was asked for again is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outbox_core.errors import HandlerError, MessagesFailedError
from outbox_core.message import Batch, Message
from outbox_core.processor import outcomes, taken
from outbox_core.processor.lifecycle import decide_next
from outbox_core.processor.state import Step
from outbox_core.processor.taken import TakenMessages
from outbox_core.progress.checkpoint import Checkpoint
from outbox_core.report import Reason
from tests.unit.core.processor.test_competing import WORK, piece_of
from tests.unit.core.processor.test_lifecycle import NOW, POLICY, owner


def message(number, message_id=None):
    place = Checkpoint(100, number)
    return Message(place.transaction_id, place.position, message_id or f"m-{number}", "t", "p", None, "{}", None, None)


def batch(*messages, partition=0):
    return Batch(
        Checkpoint(0, 0), messages[-1].checkpoint, messages, len(messages), full=True, matched_count=len(messages),
        partition=partition,
    )  # fmt: skip


ONE, TWO, THREE = (message(number) for number in (1, 2, 3))
ALL = batch(ONE, TWO, THREE)


def test_what_was_taken_is_left_out_until_all_of_it_is_delivered():
    known = TakenMessages()
    assert known.left_of(ALL, 7) == [ONE, TWO, THREE]
    known.add(ALL, [ONE, THREE])
    assert known.left_of(ALL, 7) == [TWO]
    assert known.left_of(batch(ONE), 7) == []
    assert known.conclude(batch(ONE), [], {}) == 1
    assert known.left_of(ALL, 7) == [ONE, TWO]


def test_of_an_attempt_that_was_answered_only_what_failed_is_left():
    known = TakenMessages()
    known.left_of(ALL, 7)
    known.add(ALL, [ONE])
    wrong = HandlerError("it is wrong")
    with pytest.raises(MessagesFailedError) as caught:
        known.conclude(ALL, [TWO, THREE], {TWO.checkpoint: wrong})
    assert dict(caught.value.failed) == {TWO.checkpoint: wrong}
    assert known.left_of(ALL, 7) == [TWO]
    with pytest.raises(HandlerError) as alone:
        known.conclude(batch(TWO), [TWO], {TWO.checkpoint: wrong})
    assert alone.value is wrong
    assert known.left_of(ALL, 7) == [TWO]


@pytest.mark.parametrize(
    ("other", "epoch"),
    [
        pytest.param(ALL, 8, id="another epoch: a person may have asked for all of it again"),
        pytest.param(replace(ALL, partition=1), 7, id="another partition"),
        pytest.param(
            batch(*(message(n, f"new {n}") for n in (1, 2, 3))), 7, id="another message at the place of a lost one"
        ),
    ],
)
def test_what_may_be_another_message_is_handed_over(other, epoch):
    known = TakenMessages()
    known.left_of(ALL, 7)
    known.add(ALL, ALL)
    assert known.left_of(other, epoch) == list(other)


def test_another_message_without_an_id_at_the_place_of_a_lost_one_is_handed_over():
    """Its id is its place then, as that of the lost one was."""
    known, lost = TakenMessages(), message(1, "100:1")
    known.left_of(batch(lost), 7)
    known.add(batch(lost), [lost])
    assert known.left_of(batch(lost), 7) == []
    other = lost._replace(data='{"another": "payload"}')
    assert known.left_of(batch(other), 7) == [other]


def test_a_batch_that_a_consumer_takes_again_is_the_same_batch():
    known = TakenMessages()
    chunk = replace(piece_of(WORK, 2), messages=(ONE, TWO))
    known.left_of(chunk, 1)
    known.add(chunk, [ONE])
    assert known.left_of(chunk, 2) == [TWO]


def test_no_more_is_remembered_than_the_limit(monkeypatch):
    monkeypatch.setattr(taken, "LARGEST", 2)
    known = TakenMessages()
    known.left_of(ALL, 7)
    known.add(ALL, ALL)
    assert known.left_of(ALL, 7) == [ONE]


def named(*failed):
    return MessagesFailedError(
        {each.checkpoint: HandlerError("no queue", reason=Reason.MESSAGE_UNROUTABLE) for each in failed}
    )


def test_the_error_names_the_first_and_counts_the_others():
    assert str(named(TWO)) == "the message at 100:2 failed: no queue"
    assert str(named(TWO, THREE)) == "the message at 100:2 failed (and 1 more of the batch): no queue"
    assert named(TWO).reason is Reason.MESSAGE_UNROUTABLE


@pytest.mark.parametrize(
    ("failed", "limit"),
    [
        pytest.param((THREE,), 2, id="what comes before it goes on first"),
        pytest.param((TWO, THREE), 1, id="of several the first counts"),
        pytest.param((ONE,), 1, id="the first is tried alone"),
    ],
)
def test_named_messages_are_not_looked_for(failed, limit):
    state = decide_next(owner(step=Step.HANDLE, batch=ALL), outcomes.Failed(named(*failed)), NOW, POLICY, 0.5)
    assert (state.step, state.limit, state.attempt) == (Step.FETCH, limit, 0)
