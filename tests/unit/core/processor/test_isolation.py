"""Which part of a batch is tried next, so that the messages that fail are found and the others are handled."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_core.processor.isolation import (
    Search,
    decide_after_part,
    decide_after_refusal,
    decide_block,
    decide_size,
    search_failed,
)


def run(search, bad, begun=lambda *_: None):
    """Try until it is over; return what was handled, what failed alone, and the parts' sizes.

    `begun`: what a handler says of a part that fails, by the part and its first message that fails.
    """
    handled: list[int] = []
    refused: list[int] = []
    sizes: list[int] = []
    while not search.is_over:
        size = decide_size(search)
        assert 1 <= size <= search.count - search.at
        part = range(search.at, search.at + size)
        sizes.append(size)
        if bad.isdisjoint(part):
            handled += part
            search = decide_after_part(search, size)
        else:
            if size == 1:
                refused += part
            search = decide_after_refusal(search, size, begun(part, min(bad.intersection(part))))
    return handled, refused, sizes, search


@given(st.integers(1, 200).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n), st.sets(st.integers(0, n - 1)))))
def test_each_message_is_handled_or_fails_alone_once_and_in_order(case):
    count, block, bad = case
    for search in (Search(count, block), *([search_failed(count)] if bad else [])):
        handled, refused, sizes, _ = run(search, bad)
        assert handled == [n for n in range(count) if n not in bad]
        assert refused == sorted(bad)
        assert len(sizes) <= 3 * count + 20


def begun_one_by_one(part, failing):
    return failing - part.start + 1


@given(
    st.integers(1, 200).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n), st.sets(st.integers(0, n - 1)))),
    st.randoms(use_true_random=False),
)
def test_whatever_a_handler_says_that_it_had_begun_nothing_is_passed_over(case, chance):
    count, block, bad = case
    for begun in (begun_one_by_one, lambda part, _: chance.choice([None, chance.randint(1, len(part))])):
        handled, refused, sizes, _ = run(Search(count, block), bad, begun)
        assert handled == [n for n in range(count) if n not in bad]
        assert refused == sorted(bad)
        assert len(sizes) <= 3 * count + 20


def test_a_handler_that_begins_one_by_one_names_the_message_that_fails():
    handled, refused, sizes, _ = run(Search(100, 100), {40}, begun_one_by_one)
    assert (len(handled), refused) == (99, [40])
    assert sizes[:3] == [100, 40, 1], "what was before it, and it alone"


@pytest.mark.parametrize(
    ("bad", "parts"),
    [
        pytest.param({500}, 25, id="a lone one costs a few parts"),
        pytest.param(set(range(1000)), 1100, id="of a thousand in a row nearly each is tried once"),
        pytest.param(set(range(0, 1000, 2)), 1050, id="every other one"),
        pytest.param(set(range(0, 1000, 100)), 250, id="one in a hundred"),
    ],
)
def test_the_parts_that_a_batch_of_a_thousand_takes(bad, parts):
    assert len(run(search_failed(1000), bad)[2]) <= parts


def test_one_in_a_hundred_is_found_by_trying_few_of_the_others_again():
    """What is undone with a part that fails was done for nothing; a part stops at its first message that fails."""
    chance = random.Random(1)
    bad = {n for n in range(10_000) if chance.random() < 0.01}
    _, _, sizes, _ = run(Search(10_000, 64), bad)
    search, done = Search(10_000, 64), 0
    for size in sizes:
        part = range(search.at, search.at + size)
        failing = sorted(bad.intersection(part))
        done += (failing[0] - search.at + 1) if failing else size
        search = decide_after_refusal(search, size) if failing else decide_after_part(search, size)
    assert done <= 10_000 * 1.4


def test_the_size_is_remembered_for_what_comes_next():
    assert run(search_failed(1000), set(range(1000)))[3].next_block == 1
    assert run(Search(1000, 1), set())[3].next_block >= 128
    stopped = decide_after_refusal(Search(1000, 1000), 1000)
    assert stopped.next_block == 500, "stopped in the middle of looking, it goes on with the half"


@pytest.mark.parametrize("at", [0, 37, 500, 999])
def test_after_a_lone_message_that_fails_batches_are_soon_tried_as_a_whole_again(at):
    """Parts of two thirds of a batch are never two in a row: what grows them is a batch that gets through."""
    block, batches = decide_block(run(search_failed(1000), {at})[3].next_block, 1000, through=False), 0
    while block is not None:
        batches += 1
        block = decide_block(run(Search(1000, block), set())[3].next_block, 1000, through=True)
    assert batches <= 3


def test_a_message_that_gets_through_alone_the_second_time_ends_the_search_for_it():
    search = decide_after_refusal(Search(4, 2), 2)
    for _ in range(2):
        assert decide_size(search) == 1
        search = decide_after_part(search, 1)
    assert (search.failing_before, decide_size(search)) == (None, 2)
