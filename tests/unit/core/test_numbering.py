"""Numbers of messages: none is given twice, none comes after a higher one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_core.config import ProcessorConfig
from outbox_core.message import Batch, Held, Message
from outbox_core.progress.checkpoint import BEGINNING, Checkpoint
from outbox_core.progress.numbering import Numbering, describe_mapping, is_numbered, list_numbers, number_batch
from tests.support.worker import build_config

START = replace(BEGINNING, numbering=Numbering("s", 0))


def message(position):
    return Message(7, position, f"m-{position}", None, None, None, None, None, None)


def read(after, positions, excluded=(), stored=None):
    messages = tuple(message(each) for each in positions if each not in excluded)
    out = tuple(Checkpoint(7, each) for each in sorted(excluded))
    found = Batch(
        after, Checkpoint(7, positions[-1]), messages, len(positions), full=True,
        matched_count=len(messages), excluded=out,
    )  # fmt: skip
    return number_batch(found, stored or after)


def test_messages_are_counted_from_the_stored_number():
    first = read(START, [2, 5, 9])
    assert list_numbers(first) == [1, 2, 3]
    assert list_numbers(read(first.examined, [11, 12])) == [4, 5]


def test_behind_what_is_excluded_there_are_none_and_it_counts():
    found = read(START, [1, 2, 3, 4], excluded={2})
    assert list_numbers(found) == [1, None, None]
    assert found.examined.numbering == Numbering("s", 4)


def test_held_messages_have_none():
    found = replace(read(START, [1, 2]), held=(Held(Checkpoint(7, 1), "k", "m-1"),))
    assert list_numbers(found) == [None, None]


def test_a_batch_behind_one_that_is_confirmed_as_a_whole_goes_on_with_its_numbers():
    first = read(START, [1, 2])
    assert is_numbered(first)
    assert list_numbers(read(first.examined, [3], stored=first.examined)) == [3]


@pytest.mark.parametrize(
    "first",
    [
        read(START, [1, 2], excluded={1}), read(START, [1], stored=BEGINNING),
        replace(read(START, [1]), held=(Held(Checkpoint(7, 1), "k", "m-1"),)),
    ],
    ids=["one is left out", "another one is in flight", "held ones"],
)  # fmt: skip
def test_behind_one_that_is_not_sent_with_its_numbers_none_begins(first):
    assert not is_numbered(first)


def test_a_target_without_numbers_needs_none():
    assert is_numbered(read(BEGINNING, [1, 2], excluded={1}))


def test_while_another_batch_is_in_flight_there_are_none():
    first = read(START, [1, 2])
    second = read(first.examined, [3], stored=START)
    assert list_numbers(second) == [None]
    assert second.examined.numbering == Numbering("s", 3)


def test_an_empty_look_keeps_the_number_and_what_comes_after_it_has_numbers():
    first = read(START, [1, 2])
    looked = number_batch(Batch(first.examined, Checkpoint(9, 0), (), 50, full=False), first.examined)
    assert looked.examined.numbering == Numbering("s", 2)
    assert list_numbers(read(replace(looked.examined), [12], stored=first.examined)) == [3]


def test_without_a_number_to_begin_with_there_are_none():
    found = read(BEGINNING, [1])
    assert (list_numbers(found), found.examined.numbering) == ([None], None)


@given(st.integers(1, 30), st.randoms(use_true_random=False))
def test_however_it_is_cut_and_whatever_is_excluded_no_message_loses_its_place(count, random):
    """Of attempts that may die before they store: what was sent with a number left room for all before it."""
    after, left = START, list(range(1, count + 1))
    for _ in range(100):
        size = random.randint(1, len(left))
        excluded = {each for each in left[:size] if random.random() < 0.2}
        found = read(after, left[:size], excluded)
        sent = zip(found, list_numbers(found), strict=True)
        numbers = {each.checkpoint.position: number for each, number in sent if number is not None}
        assert all(position == number for position, number in numbers.items())
        skipped = [position for position in left[:size] if position not in numbers]
        assert max(numbers, default=0) < min(skipped, default=count + 1)
        if random.random() < 0.5:  # stored: what was excluded is held, and passed for good
            after, left = found.examined, left[size:]
        if not left:
            break


def config(**fields):
    target = {"rabbitmqStream": {"connection": {"secretRef": {"name": "b"}}, "stream": fields.pop("stream", "s")}}
    return ProcessorConfig.model_validate(build_config(None, target, **fields))


def test_the_mapping_is_what_decides_which_messages_are_counted_and_where_they_go():
    partitioned = {"mode": "Partitioned", "partitions": {"count": 2}}
    others = [
        config(), config(stream="t"), config(source={"messageTypes": ["A"]}), config(source={"publications": ["A"]}),
        config(source={"table": {"schemaName": "app", "name": "outbox"}}), config(delivery=partitioned),
        config(delivery={"mode": "Partitioned", "partitions": {"count": 3}}),
    ]  # fmt: skip
    assert len({describe_mapping(each) for each in others}) == len(others)
    same = [config(generation=2), config(delivery={"batchSize": 5}), config(source={"schema": "Verify"})]
    assert {describe_mapping(each) for each in same} == {describe_mapping(config())}
