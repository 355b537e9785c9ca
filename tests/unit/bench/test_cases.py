"""Every case can be shown: names are unique, something of ours is compared with something else."""

from __future__ import annotations

import pytest

from tests.tools.bench.__main__ import DOCS
from tests.tools.bench.cases import CASES
from tests.tools.bench.peers import minimal_publisher
from tests.tools.bench.report import PAGE
from tests.tools.ledger.account import Order


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_a_case_compares_ours_with_others_under_names_of_their_own(case) -> None:
    candidates = case.candidates()
    names = [each.name for each in candidates]
    assert len(set(names)) == len(names)
    assert {each.ours for each in candidates} == {True, False}
    assert all(each.settings for each in candidates)
    assert case.figures
    assert case.title
    assert case.about.endswith((".", "better."))


@pytest.mark.parametrize("case", [case for case in CASES.values() if "RabbitMQ" in case.servers], ids=lambda c: c.name)
def test_what_publishes_has_a_queue(case) -> None:
    assert all(each.queue is not None for each in case.candidates())


@pytest.mark.parametrize("kind", ["quorum", "classic"])
def test_the_articles_loops_have_copies_and_only_the_naive_one_an_order(kind) -> None:
    loops = [each for each in CASES[f"rabbitmq-{kind}"].candidates() if each.name.startswith("article's")]
    assert all(each.copies for each in loops)
    assert [each.order for each in loops] == [Order.TOTAL, Order.NONE]


def test_snapshot_is_compared_with_the_other_cursor_at_the_same_sizes() -> None:
    named = {each.name: each.ours for each in CASES["snapshot"].candidates()}
    assert {name.partition(", ")[2] for name, ours in named.items() if ours} == {
        name.partition(", ")[2] for name, ours in named.items() if not ours
    }


@pytest.mark.parametrize("name", CASES)
def test_the_page_has_a_place_for_a_case(name) -> None:
    page = (DOCS / PAGE).read_text()
    assert page.count(f"<!-- case {name} -->") == page.count(f"<!-- end {name} -->") == 1


def test_the_minimal_script_writes_frames_that_the_library_reads() -> None:
    minimal_publisher.check_properties()


@pytest.mark.parametrize(
    ("confirms", "low"),
    [
        pytest.param([(1, 0), (2, 0)], 2, id="one by one"),
        pytest.param([(3, 0), (1, 0), (2, 0)], 3, id="in another order"),
        pytest.param([(2, 0), (5, 1)], 5, id="several at once, over one that came before"),
        pytest.param([(5, 1), (4, 0), (6, 0)], 6, id="one of those again"),
        pytest.param([(2, 0), (3, 0)], 0, id="the first is missing"),
    ],
)
def test_confirms_count_only_without_a_gap(confirms, low) -> None:
    publisher = minimal_publisher.Confirms()
    for tag, multiple in confirms:
        publisher.take(60, 80, tag, multiple)
    assert publisher.low == low


def test_a_refused_message_is_an_error() -> None:
    with pytest.raises(ConnectionError, match=r"60\.120"):
        minimal_publisher.Confirms().take(60, 120, 1, 0)
