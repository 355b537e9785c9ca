"""What becomes of the messages that a broker names as failed, while it took all others of the piece."""

from __future__ import annotations

import random
from datetime import UTC, datetime

import pytest

from outbox_core.errors import HandlerError, MessagesFailedError
from outbox_core.message import Message
from outbox_core.processor.claimed_batch import Chunk, ClaimedBatch, RefusalAction
from outbox_core.progress.checkpoint import BEGINNING, Checkpoint
from outbox_core.report import Reason
from outbox_core.spec import Competing, Delivery, Mode, Retry, WhenExhausted
from outbox_worker.competing.sifting import Sifting

PAIRS = tuple(Checkpoint(10, number) for number in range(1, 9))
MESSAGES = tuple(
    Message(
        pair.transaction_id,
        pair.position,
        f"m-{pair.position}",
        "t",
        "p",
        None,
        "{}",
        None,
        datetime(2024, 6, 1, tzinfo=UTC),
    )
    for pair in PAIRS
)
END = Checkpoint(10, 100)
LOST = HandlerError("no queue", reason=Reason.MESSAGE_UNROUTABLE)


def sort(failed, *, when=WhenExhausted.DEAD_LETTER, crash_count=0, before=(), retry=None, given_up=None):
    claimed = ClaimedBatch(1, 0, 1, None, (), BEGINNING, END, len(MESSAGES), crash_count=crash_count)
    chunk = Chunk(BEGINNING, END, MESSAGES, 8, full=True, matched_count=8, claimed=claimed)
    delivery = Delivery(
        mode=Mode.COMPETING, competing=Competing(), when_exhausted=when, retry=retry or Retry(max_attempts=3)
    )
    sifting = Sifting(chunk, MESSAGES, dict(before), delivery, random.Random(1), given_up)
    return sifting.sort_named(MessagesFailedError({PAIRS[number]: LOST for number in failed}))


def actions(sifted):
    return {each.message.message_id: (each.decision.action, each.decision.attempts) for each in sifted.refusals}


def test_what_the_broker_names_leaves_the_piece_and_all_of_it_is_behind():
    sifted = sort([2, 5], before={PAIRS[5]: 2})
    assert (sifted.behind, sifted.upto, sifted.handled, sifted.stop) == (8, END, 6, None)
    assert actions(sifted) == {"m-3": (RefusalAction.RETRY, 1), "m-6": (RefusalAction.DEAD_LETTER, 3)}


def test_crashes_are_those_of_the_first_message_only():
    assert actions(sort([0, 1], crash_count=1)) == {"m-1": (RefusalAction.RETRY, 2), "m-2": (RefusalAction.RETRY, 1)}


def test_where_one_is_to_be_stopped_at_only_what_is_before_it_is_behind():
    sifted = sort([2, 5, 6], when=WhenExhausted.STOP, before={PAIRS[5]: 2})
    assert (sifted.behind, sifted.upto, actions(sifted)) == (5, PAIRS[4], {"m-3": (RefusalAction.RETRY, 1)})
    assert (sifted.stop.message.message_id, sifted.stop.decision.action) == ("m-6", RefusalAction.STOP)
    sifted = sort([0], when=WhenExhausted.STOP, before={PAIRS[0]: 2})
    assert (sifted.behind, sifted.upto, sifted.stop.message.message_id) == (0, None, "m-1")


def test_the_message_that_a_person_gave_up_is_dead_and_another_one_is_stopped_at():
    sifted = sort([2, 5], when=WhenExhausted.STOP, before={PAIRS[2]: 2, PAIRS[5]: 2}, given_up="10:3")
    assert actions(sifted) == {"m-3": (RefusalAction.DEAD_LETTER, 3)}
    assert sifted.stop.message.message_id == "m-6"


def test_what_is_no_messages_fault_is_raised():
    with pytest.raises(MessagesFailedError):
        sort([2], retry=Retry(forever=["MessageUnroutable"]))
