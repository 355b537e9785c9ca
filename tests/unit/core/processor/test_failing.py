"""What becomes of a failing message, by class of error and by the resource's words; the rate."""

from __future__ import annotations

import math

import pytest

from outbox_core import rate
from outbox_core.errors import HandlerError, TransientError
from outbox_core.processor.failing import (
    CRASHES_BEFORE_SEARCH,
    POISON_CRASHES,
    Action,
    PoisonSearch,
    decide_end,
    decide_failure,
    decide_held_failure,
)
from outbox_core.report import Reason
from outbox_core.retry import LONGEST_ASKED, ErrorKind, classify_error, decide_retry
from outbox_core.spec import Blocks, Delivery, Mode, Partitions, RateLimit, Retry, WhenExhausted

BAD = HandlerError("no", classes=("orders.InvalidOrder", "InvalidOrder", "ValueError"))
UNROUTABLE = TransientError("no queue", reason=Reason.MESSAGE_UNROUTABLE)
DOWN = TransientError("gone", reason=Reason.DATABASE_UNAVAILABLE)


@pytest.mark.parametrize(
    ("error", "lists", "kind"),
    [
        pytest.param(BAD, {}, ErrorKind.ATTEMPT, id="the handler's errors count"),
        pytest.param(BAD, {"never": ["ValueError"]}, ErrorKind.HOPELESS, id="a base class names it too"),
        pytest.param(BAD, {"forever": ["orders.InvalidOrder"]}, ErrorKind.OUTSIDE, id="no message's fault"),
        pytest.param(
            BAD, {"never": ["ValueError"], "forever": ["ValueError"]}, ErrorKind.HOPELESS, id="never is first"
        ),
        pytest.param(BAD, {"never": ["Value"]}, ErrorKind.ATTEMPT, id="a part of a name is no name"),
        pytest.param(UNROUTABLE, {}, ErrorKind.OUTSIDE, id="the target's faults do not count"),
        pytest.param(
            UNROUTABLE, {"counted": ["MessageUnroutable"]}, ErrorKind.ATTEMPT, id="unless the resource says so"
        ),
        pytest.param(DOWN, {"never": ["DatabaseUnavailable"]}, ErrorKind.OUTSIDE, id="the database is nobody's choice"),
    ],
)
def test_class_of_an_error(error, lists, kind):
    assert classify_error(error, Retry(**lists)) is kind


@pytest.mark.parametrize(
    ("asked", "wait"), [(None, 2.0), (0.5, 2.0), (30.0, 30.0), (1e9, LONGEST_ASKED)], ids=["no", "less", "more", "ages"]
)
def test_whoever_failed_may_ask_for_a_longer_wait(asked, wait):
    assert decide_retry(2, Retry(jitter=0), 0.5, HandlerError("busy", retry_after=asked)) == wait


@pytest.mark.parametrize(
    ("mode", "blocks", "when", "action", "waits", "blocking"),
    [
        pytest.param("Ordered", None, "Stop", None, None, None, id="ordered: everything stops"),
        pytest.param("Ordered", None, "DeadLetter", "DeadLetter", None, False, id="ordered: dead, and on it goes"),
        pytest.param("Ordered", "Key", "Stop", "Hold", None, True, id="by key: it waits for a person, and its key"),
        pytest.param("Partitioned", None, "DeadLetter", "DeadLetter", None, True, id="its key waits behind it"),
        pytest.param("Partitioned", "Nothing", "DeadLetter", "DeadLetter", None, False, id="nothing waits"),
        pytest.param("Partitioned", None, "Skip", "Skip", None, True, id="skipped"),
    ],
)
def test_when_attempts_ran_out(mode, blocks, when, action, waits, blocking):
    delivery = Delivery(
        mode=Mode(mode),
        partitions=Partitions() if mode == "Partitioned" else None,
        blocks=Blocks(blocks) if blocks else None,
        when_exhausted=WhenExhausted(when),
    )
    decision = decide_end(BAD, 10, delivery)
    if action is None:
        assert decision is None
        return
    assert decision is not None
    assert (decision.action, decision.wait, decision.blocks) == (Action(action), waits, blocking)
    assert (decision.attempts, decision.error_class) == (10, "orders.InvalidOrder")


def test_before_that_it_is_held_and_tried_again():
    delivery = Delivery(mode=Mode.PARTITIONED, partitions=Partitions(), retry=Retry(jitter=0))
    decision = decide_failure(BAD, 3, delivery, 0.5)
    assert decision is not None
    assert (decision.action, decision.wait, decision.blocks) == (Action.HOLD, 4.0, True)


@pytest.mark.parametrize(
    ("blocks", "when", "attempt", "action", "wait", "blocking"),
    [
        ("Partition", "Stop", 3, "Hold", 4.0, True),
        ("Partition", "Stop", 10, "Hold", None, True),
        ("Partition", "DeadLetter", 10, "DeadLetter", None, False),
        ("Key", "Stop", 10, "Hold", None, True),
        ("Key", "DeadLetter", 10, "DeadLetter", None, True),
        ("Nothing", "Stop", 3, "Hold", 4.0, False),
    ],
)
def test_what_the_partition_has_passed_blocks_its_key_when_it_fails(blocks, when, attempt, action, wait, blocking):
    delivery = Delivery(
        mode=Mode.PARTITIONED, partitions=Partitions(), blocks=Blocks(blocks), when_exhausted=WhenExhausted(when),
        retry=Retry(jitter=0),
    )  # fmt: skip
    decision = decide_held_failure(BAD, attempt, delivery, 0.5)
    assert (decision.action, decision.wait, decision.blocks) == (Action(action), wait, blocking)


def test_what_killed_processes_is_given_up_whatever_attempts_are_left():
    delivery = Delivery(when_exhausted=WhenExhausted.DEAD_LETTER, retry=Retry(max_attempts=1000))
    decision = decide_failure(HandlerError("dead", reason=Reason.PROCESS_KILLED), 1, delivery, 0.5)
    assert decision is not None
    assert (decision.action, decision.error_class) == (Action.DEAD_LETTER, "ProcessKilled")


class TestRate:
    LIMIT = RateLimit(messages_per_second=10, burst=20)

    def test_a_burst_then_the_rate(self):
        bucket = rate.spend(rate.refill(None, self.LIMIT, 1.0, 0.0), 20)
        assert rate.seconds_until_one(bucket, self.LIMIT, 1.0) == pytest.approx(0.1)
        assert rate.refill(bucket, self.LIMIT, 1.0, 1.0).tokens == pytest.approx(10)
        assert rate.refill(bucket, self.LIMIT, 1.0, 60.0).tokens == 20

    def test_half_of_the_partitions_get_half_of_the_rate(self):
        bucket = rate.spend(rate.refill(None, self.LIMIT, 0.5, 0.0), 10)
        assert rate.refill(bucket, self.LIMIT, 0.5, 1.0).tokens == pytest.approx(5)

    def test_however_small_the_share_one_message_goes_through(self):
        assert rate.refill(None, self.LIMIT, 0.001, 0.0).tokens == 1.0


def search(killer: int, size: int) -> tuple[int, int]:
    """Deaths and trials until the killer is given up, as processor, count_crash and begin_in_flight have it."""
    crash_count, trials, start, poison_crashes = CRASHES_BEFORE_SEARCH, 0, 0, 0
    poison_search = PoisonSearch(size)
    while poison_crashes < POISON_CRASHES:
        trials += 1
        tried = poison_search.next_size
        if start <= killer < start + tried:
            crash_count, poison_crashes = crash_count + 1, poison_crashes + (tried == 1)
            poison_search = PoisonSearch(tried)
        else:
            start += tried
            poison_search = PoisonSearch(poison_search.left - tried)
    return crash_count, trials


@pytest.mark.parametrize("size", [1, 2, 3, 10, 1000])
def test_a_killer_is_found_by_halving(size):
    found = [search(killer, size) for killer in range(size)]

    assert max(crash_count for crash_count, _ in found) <= CRASHES_BEFORE_SEARCH + POISON_CRASHES + math.floor(
        math.log2(size)
    )
    assert max(trials for _, trials in found) <= 2 * math.ceil(math.log2(size)) + POISON_CRASHES
