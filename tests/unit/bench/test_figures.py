"""A failed run counts nowhere, ratios say how many times better ours is, and a busy machine is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.tools.bench.figures import (
    Figure,
    Result,
    Turn,
    calculate_percentile,
    calculate_ratio,
    calculate_spread,
    find_unsteady,
    take_out_drift,
)  # fmt: skip
from tests.tools.bench.machine import Load, Others, count_rounds, decide_report, decide_start

RATE = Figure("messages/s")
DELAY = Figure("p50 ms", higher_is_better=False)


def make_result(*rates: float, name: str = "ours", ours: bool = True, failure: str = "") -> Result:
    turns = [Turn({"messages/s": rate}, {"worker": rate / 10}, failure) for rate in rates]
    return Result(name, ours, "", turns)


def test_a_failed_run_has_no_number_and_no_cpu() -> None:
    result = make_result(10, 20)
    result.turns.append(Turn({"messages/s": 1000.0}, {"worker": 1000.0}, "3 lost"))
    assert result.numbers("messages/s") == [10, 20]
    assert result.cpu() == {"worker": 1.5}
    assert result.failures() == ["run 3: 3 lost"]


@pytest.mark.parametrize(
    ("numbers", "spread"),
    [
        pytest.param([], 0.0, id="none"),
        pytest.param([5.0], 0.0, id="one"),
        pytest.param([0.0, 0.0], 0.0, id="nothing"),
        pytest.param([90.0, 100.0, 115.0], 0.125, id="three"),
        pytest.param([100.0, 100.0, 100.0, 100.0, 10.0], 0.0, id="one odd run of five"),
        pytest.param([100.0, 100.0, 100.0, 60.0, 60.0], 0.4, id="two odd runs of five"),
    ],
)
def test_spread_is_the_middle_half_as_a_part_of_the_median(numbers, spread) -> None:
    assert calculate_spread(numbers) == pytest.approx(spread)


@pytest.mark.parametrize(
    ("figure", "ours", "theirs", "ratio"),
    [
        pytest.param(RATE, [20.0, 30.0, 25.0], [10.0, 10.0, 10.0], 2.5, id="twice and a half as many"),
        pytest.param(RATE, [20.0, 30.0, 10.0], [10.0, 15.0, 5.0], 2.0, id="within each round"),
        pytest.param(RATE, [20.0, 30.0], [10.0], 2.0, id="in rounds that both have"),
        pytest.param(DELAY, [2.0], [10.0], 5.0, id="a fifth of the time is five times better"),
        pytest.param(RATE, [], [10.0], None, id="ours failed"),
        pytest.param(RATE, [10.0], [0.0], None, id="theirs is nothing"),
    ],
)
def test_ratio_says_how_many_times_better_ours_is(figure, ours, theirs, ratio) -> None:
    our, their = (Result("", True, "", [Turn({figure.name: each}) for each in numbers]) for numbers in (ours, theirs))
    assert calculate_ratio(our, their, figure) == ratio


def test_what_makes_every_candidate_slower_is_taken_out() -> None:
    results = [make_result(100, 50, 80), make_result(400, 200, 320, name="peer")]
    assert take_out_drift(results, RATE) == [pytest.approx([80] * 3), pytest.approx([320] * 3)]
    assert decide_report([], results, [RATE]) == []
    results[1].turns[1] = Turn({"messages/s": 200.0}, failure="3 lost")
    assert take_out_drift(results, RATE) == [pytest.approx([90] * 2), pytest.approx([360] * 2)]
    assert take_out_drift(results[:1], RATE) == [[100, 50, 80]]
    assert take_out_drift([make_result(), *results], RATE) == [[], [], []]


def test_one_odd_program_makes_no_other_look_odd() -> None:
    steady = [make_result(*[100.0 + number] * 4, name=f"peer {number}") for number in range(3)]
    odd = make_result(100, 300, 100, 300, name="odd", ours=False)
    assert list(find_unsteady([*steady, odd], RATE)) == ["odd"]
    assert find_unsteady([*steady, odd], replace(RATE, steady=False)) == {}


def test_where_nothing_is_compared_with_ours_each_line_must_be_steady() -> None:
    lines = [make_result(*[100.0 + number] * 4, name=f"line {number}", ours=False) for number in range(3)]
    assert decide_report([], lines, [RATE]) == []
    (reason,) = decide_report([], [*lines, make_result(100, 300, 100, 300, name="odd", ours=False)], [RATE])
    assert reason.startswith("odd: messages/s")


def test_a_program_whose_runs_lie_far_apart_is_compared_by_its_best_run() -> None:
    ours, odd = make_result(600, 600, 600, 600), make_result(100, 300, 100, 300, name="odd", ours=False)
    assert calculate_ratio(ours, odd, RATE, to_best=True) == 2.0
    assert decide_report([], [ours, odd], [RATE]) != [], "beside it alone it cannot be told which of the two is odd"
    assert (
        decide_report(
            [], [ours, make_result(*[50.0] * 4, name="peer"), make_result(*[9.0] * 4, name="other"), odd], [RATE]
        )
        == []
    )


def test_a_percentile_is_one_of_the_numbers() -> None:
    numbers = [float(n) for n in range(100, 0, -1)]
    assert (calculate_percentile(numbers, 0.5), calculate_percentile(numbers, 0.99)) == (51.0, 100.0)
    assert calculate_percentile([7.0], 0.99) == 7.0


@pytest.mark.parametrize(
    ("others", "said"),
    [
        (Others(0.05, 0.01), []),
        (Others(0.4, 0.0), ["other programs used 40% of the processors"]),
        (Others(0.0, 0.1), ["the machine below took 10% of the processors' time"]),
        (Others(0.4, 0.1), ["other programs", "the machine below"]),
    ],
)
def test_a_busy_machine_is_refused_before_the_first_run(others, said) -> None:
    reasons = decide_start(others)
    assert len(reasons) == len(said)
    assert all(text in reason for text, reason in zip(said, reasons, strict=True))


def test_the_median_of_the_runs_decides_whether_the_machine_was_busy() -> None:
    quiet, busy = Others(0.0, 0.0), Others(0.9, 0.9)
    assert decide_report([quiet, quiet, busy], [make_result(10, 10)], [RATE]) == []
    assert len(decide_report([quiet, busy, busy], [make_result(10, 10)], [RATE])) == 2
    assert decide_report([], [], [RATE]) == []


def test_runs_that_lie_too_far_apart_are_refused() -> None:
    steady = [make_result(100, 100, 100, name=f"peer {number}") for number in range(9)]
    reasons = decide_report([], [make_result(100, 140, 110), *steady], [RATE])
    reason = (
        "ours: messages/s, without what the round did to the others, differed by 18.2% in the middle half of the runs"
    )
    assert reasons == [f"{reason}, allowed are 15%"]


def test_what_others_used_is_what_is_left_of_the_processors() -> None:
    before = Load(busy=10, stolen=1, total=100, own=4)
    assert before.until(Load(busy=16, stolen=2, total=110, own=8)) == Others(foreign=0.2, stolen=0.1)
    assert before.until(before) == Others(0.0, 0.0)


@pytest.mark.parametrize(
    ("rates", "rounds"),
    [
        pytest.param([100.0] * 6, 3, id="as many as wanted where the runs agree"),
        pytest.param([60.0, 100.0, 140.0, 100.0, 100.0, 100.0], 5, id="more until they agree"),
        pytest.param([60.0, 100.0, 140.0, 60.0, 140.0, 60.0], 6, id="never more than twice as many"),
    ],
)
def test_a_case_whose_runs_lie_too_far_apart_gets_more_of_them(rates, rounds) -> None:
    steady, measured = make_result(*[50.0] * 6), make_result()
    taken = []
    for number in count_rounds(3, [steady, measured], [RATE]):
        measured.turns.append(Turn({"messages/s": rates[number]}))
        taken.append(number)
    assert taken == list(range(rounds))
