"""A recovery counts from the blow or the fault's end, to the last partition that stood still, for one fault alone."""

from __future__ import annotations

import pytest

from tests.tools.chaos.cases import RECOVERY_SECONDS, TAKEOVER_SECONDS, Case, Target, select_cases
from tests.tools.chaos.faults import Struck
from tests.tools.chaos.recovery import Recovery, Seen, find_late, measure
from tests.tools.chaos.schedule import Fault, Kind
from tests.tools.ledger.account import Order

CASES = [Case(name, "Ordered", target, Order.TOTAL) for name, target in (("a", Target.SQL), ("b", Target.RABBITMQ))]


def make_struck(kind=Kind.KILL, case="a", began=100.0, ended=100.0, **fields) -> Struck:
    fault = Fault(at=began, kind=kind, case=case, seconds=ended - began, choice=0.5, amount=0)
    return Struck(fault, began, ended, fields.pop("counts_from", ended), **fields)


SEEN = {
    "a": Seen({0: [99.0, 101.5, 102.0], 1: [99.5, 103.0]}, changes=[98.0, 104.5]),
    "b": Seen({0: [100.5, 101.0, 140.0]}, {"x": 99.9, "y": 104.0, "z": 103.5}),
}


@pytest.mark.parametrize(
    ("partitions", "seconds"),
    [
        pytest.param((0,), 1.5, id="the victim's partition"),
        pytest.param((0, 1), 3.0, id="the last of its partitions"),
        pytest.param((), 3.0, id="all of the case's"),
        pytest.param((7,), None, id="one that never went on"),
    ],
)
def test_it_is_the_time_to_the_first_effect_of_the_last_partition(partitions, seconds) -> None:
    (recovery,) = measure([make_struck(partitions=partitions)], CASES, SEEN)
    assert recovery == Recovery(Kind.KILL, "a", seconds)


def test_a_fault_of_a_server_counts_for_each_case_from_its_end() -> None:
    crash = make_struck(Kind.POSTGRES, "", began=96.0, ended=100.0)
    assert measure([crash], CASES, SEEN) == [Recovery(Kind.POSTGRES, "a", 3.0), Recovery(Kind.POSTGRES, "b", 0.5)]


def test_the_brokers_crash_is_one_for_those_who_publish_to_it() -> None:
    crash = make_struck(Kind.BROKER, "", began=96.0, ended=100.0)
    assert measure([crash], CASES, SEEN) == [Recovery(Kind.BROKER, "b", 0.5)]
    first, _ = measure([make_struck(partitions=(1,)), crash], CASES, SEEN)
    assert first == Recovery(Kind.KILL, "a", 3.0)


def test_a_fault_before_the_recovery_makes_it_nobodys() -> None:
    one, other = make_struck(partitions=(1,)), make_struck(Kind.CUT, began=102.0, ended=102.5)
    first, second = measure([one, other], CASES, SEEN)
    assert (first.overlapped, first.seconds) == (True, None)
    assert second == Recovery(Kind.CUT, "a", None, overlapped=False), "after it partition 0 has no effect any more"


def test_a_change_of_the_number_of_partitions_that_comes_meanwhile_makes_it_nobodys() -> None:
    """Each owner stops for it, those that just took over too."""
    seen = {"a": Seen({0: [99.0, 101.5]}, changes=[101.0])}
    assert measure([make_struck(partitions=(0,))], CASES[:1], seen) == [Recovery(Kind.KILL, "a", None, overlapped=True)]
    later = {"a": Seen({0: [99.0, 101.5]}, changes=[102.0])}
    assert measure([make_struck(partitions=(0,))], CASES[:1], later) == [Recovery(Kind.KILL, "a", 1.5)]


def test_a_fault_of_another_case_or_one_that_did_nothing_takes_nothing_away() -> None:
    others = [make_struck(case="b", began=101.0, ended=101.0), make_struck(began=101.0, ended=101.0, harmless=True)]
    assert measure([make_struck(partitions=(1,)), *others], CASES, SEEN)[0].seconds == 3.0
    assert len(measure(others, CASES, SEEN)) == 1


def test_a_freeze_of_a_process_that_owned_nothing_may_be_of_the_one_that_was_to_go_on() -> None:
    freeze = make_struck(Kind.FREEZE, began=101.0, ended=102.5, harmless=True)
    assert measure([make_struck(partitions=(1,)), freeze], CASES, SEEN)[0].overlapped


@pytest.mark.parametrize(
    ("messages", "seconds"),
    [
        pytest.param(("y", "z"), 4.0, id="the last message that was in hand"),
        pytest.param(("x",), 0.0, id="one whose commit was on its way already"),
        pytest.param(("y", "lost"), None, id="one that never came"),
    ],
)
def test_what_a_consumer_had_in_hand_counts_and_nothing_else_does(messages, seconds) -> None:
    (recovery,) = measure([make_struck(case="b", messages=messages)], CASES, SEEN)
    assert recovery.seconds == seconds


def test_a_change_of_the_number_of_partitions_counts_until_the_database_has_it() -> None:
    (recovery,) = measure([make_struck(Kind.DIVIDE)], CASES, SEEN)
    assert recovery.seconds == 4.5


@pytest.mark.parametrize("kind", [Kind.KILL, Kind.KILL_IN_BATCH, Kind.FREEZE, Kind.FREEZE_IN_BATCH])
def test_a_takeover_that_lasts_too_long_is_a_violation(kind) -> None:
    (case,) = select_cases(["ordered-sql"])
    assert find_late([Recovery(kind, case.name, TAKEOVER_SECONDS)], case) == []
    (said,) = find_late([Recovery(kind, case.name, 50.0)], case)
    assert "50.0 s" in said
    assert find_late([Recovery(kind, case.name, None, overlapped=True)], case) == []


def test_a_consumer_that_is_killed_has_its_messages_handled_in_time_or_it_is_a_violation() -> None:
    competing, ordered = select_cases(["ordered-sql", "competing-sql"])[::-1]
    late, frozen = RECOVERY_SECONDS + 0.1, Recovery(Kind.FREEZE, competing.name, 99.0)
    for kind in (Kind.KILL, Kind.KILL_IN_BATCH):
        recoveries = [Recovery(kind, competing.name, late), Recovery(kind, ordered.name, late), frozen]
        assert len(find_late(recoveries, competing)) == 1
        assert find_late(recoveries, ordered) == []
        assert find_late([Recovery(kind, competing.name, RECOVERY_SECONDS), frozen], competing) == []
