"""A consumer that is alone reads its next batch ahead. It is claimed as any other: what was read is no claim."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from typing_extensions import override

from outbox_worker.postgres import identity
from outbox_worker.postgres.reading.ahead import ReadAhead
from outbox_worker.postgres.reading.payloads import PayloadBound
from outbox_worker.postgres.reading.read_range import ReadRange
from tests.support.database.consuming import (
    JOBS,
    SOURCE,
    claim,
    cut,
    drain,
    join,
    left,
    positions,
    produce,
    put,
    taker,
)
from tests.support.servers.postgres import EVERYWHERE, build_source

LIMIT = 10


class CountedAhead(ReadAhead):
    """Counts what was asked for."""

    asked = 0

    @override
    def send(self, *arguments, **named):
        self.asked += 1
        super().send(*arguments, **named)


class World:
    """A consumer with a backlog of five batches, of which it has taken one."""

    def __init__(self, database):
        self.connection = database.connect()
        self.direct = database.direct()
        self.opened = []
        self.ahead = CountedAhead(self._open)
        self._database = database
        claim(self.connection)

    def _open(self):
        self.opened.append(self._database.connect())
        return self.opened[-1]

    def consumer(self, owner="one", **fields):
        by = taker(owner, limit=LIMIT, **fields)
        by.server_run = identity.fetch_run(self.connection, "outbox")
        by.reader.ahead = self.ahead
        return by

    def begin(self, by, **delayed):
        join(self.connection)
        expected = produce(self.connection, 2 * LIMIT)
        expected += produce(self.connection, 3 * LIMIT, **delayed)
        first = cut(self.connection, by)
        assert read(self, by, first) == expected[:LIMIT]
        assert by.complete(self.connection, first, first.upto, first.count)
        return expected

    def empty(self):
        """Delete all, once the server has found what it was asked for: only that can still be handled."""
        time.sleep(0.2)
        self.direct.execute("DELETE FROM outbox.messages")


def read(world, by, claimed):
    """Read what is left of a batch, as the consumer's step does."""
    page = by.reader.fetch_page(world.connection, ReadRange.page_of(claimed, LIMIT))
    return [message.position for message in page.messages]


@pytest.fixture
def world(each_database):
    world = World(each_database)
    yield world
    world.ahead.close()


@pytest.fixture
def here(database):
    world = World(database)
    yield world
    world.ahead.close()


@EVERYWHERE
def test_the_next_batch_is_what_was_read_ahead_and_is_used_once(world):
    by = world.consumer()
    expected = world.begin(by)
    assert world.direct.execute("SELECT count(*) FROM outbox.competing_batches").fetchone() == (0,)
    world.empty()

    second = cut(world.connection, by)

    assert (second.count, second.attempt) == (LIMIT, 1)
    assert read(world, by, second) == expected[LIMIT : 2 * LIMIT]
    assert read(world, by, second) == []
    assert len(world.opened) == 1


@EVERYWHERE
def test_what_another_consumer_took_meanwhile_is_not_taken_again(world):
    by, other = world.consumer(), world.consumer("other")
    expected = world.begin(by)

    theirs, ours = cut(world.connection, other), cut(world.connection, by)

    assert read(world, by, ours) == expected[2 * LIMIT : 3 * LIMIT]
    assert positions(world.connection, other, theirs) == expected[LIMIT : 2 * LIMIT]


def test_who_dies_with_a_batch_read_ahead_leaves_nothing_to_be_taken_over(here):
    by, other = here.consumer(), here.consumer("other")
    expected = here.begin(by)

    assert drain(here.connection, other) == expected[LIMIT:]
    assert here.direct.execute("SELECT count(*) FROM outbox.competing_batches").fetchone() == (0,)


def test_a_part_of_it_is_read_first_and_the_rest_from_the_table(here):
    by = here.consumer()
    expected = here.begin(by)
    second = cut(here.connection, by)

    page = by.reader.fetch_page(here.connection, ReadRange.page_of(second, 4))

    assert page.is_full
    assert [each.position for each in page.messages] == expected[LIMIT : LIMIT + 4]
    rest = replace(second, after=page.messages[-1].checkpoint, count=LIMIT - 4)
    assert read(here, by, rest) == expected[LIMIT + 4 : 2 * LIMIT]


def test_a_batch_that_was_handed_back_is_read_again(here):
    """It may have waited long, and a user may have deleted its rows."""
    by = here.consumer()
    here.begin(by)
    second = cut(here.connection, by)
    read(here, by, second)
    by.hand_back(here.connection)
    here.empty()
    assert read(here, by, left(here.connection, by)) == []


def test_a_large_payload_of_a_page_that_was_read_ahead_is_read_when_it_is_needed(here):
    """The first message of it is gone by then: the batch goes on behind it."""
    by = here.consumer(payloads=PayloadBound(1 << 20, LIMIT))
    join(here.connection)
    expected = produce(here.connection, 3 * LIMIT)
    large = (
        "UPDATE outbox.messages SET data = jsonb_build_object('text', repeat('x', 200000)) WHERE position = ANY (%s)"
    )
    here.direct.execute(large, (expected[LIMIT : LIMIT + 2],))
    cut(here.connection, by)
    second = cut(here.connection, by)
    here.direct.execute("DELETE FROM outbox.messages WHERE position = %s", (expected[LIMIT],))

    page = by.reader.fetch_page(here.connection, ReadRange.page_of(second, LIMIT))

    assert [each.position for each in page.messages] == expected[LIMIT + 1 : 2 * LIMIT]
    assert len(page.messages[0].data) > 200_000
    assert here.ahead.asked == 2


def test_delayed_messages_that_were_read_ahead_are_left_out(here):
    """They are in the third batch, which is read ahead with the second; what comes behind it is not read ahead."""
    by = here.consumer()
    expected = here.begin(by, deliver_after="1 hour")
    expected += produce(here.connection, 3 * LIMIT)
    assert drain(here.connection, by) == expected[LIMIT : 2 * LIMIT] + expected[5 * LIMIT :]
    assert here.direct.execute("SELECT count(*) FROM outbox.competing_retries").fetchone() == (3 * LIMIT,)
    assert here.ahead.asked == 2


def test_a_backlog_in_which_messages_were_delayed_is_not_read_ahead(here):
    """The page would be dropped each time; the next backlog is read ahead again."""
    by = here.consumer()
    here.begin(by, deliver_after="-1 hour")
    drain(here.connection, by)
    assert here.ahead.asked == 2
    by.reader.forget_ahead()
    produce(here.connection, 2 * LIMIT - 1)
    drain(here.connection, by)
    assert here.ahead.asked == 3


@pytest.mark.parametrize("why", ["others", "rate", "types", "publications", "unasked", "forgotten"])
def test_otherwise_it_is_read_when_it_was_claimed(here, why):
    source = {"types": {"messageTypes": ["t"]}, "publications": {"publications": ["default"]}}.get(why, {})
    by = here.consumer(source=build_source(**source) if source else SOURCE)
    by.is_alone = why != "others"
    if why == "unasked":
        by.server_run = None
    here.begin(by)
    if why == "forgotten":
        by.reader.forget_ahead()
    here.empty()
    second = by.claim_next(here.connection, LIMIT - 1 if why == "rate" else None)
    assert not getattr(second, "count", 0)
    assert bool(here.opened) == (why in {"rate", "forgotten"})


def test_a_range_of_which_nothing_is_left_has_no_next_page(here):
    join(here.connection)
    produce(here.connection, LIMIT - 1)
    by = here.consumer()
    assert cut(here.connection, by).count == LIMIT - 1
    assert not here.opened


def test_of_a_queue_nothing_is_read_ahead(here):
    """Its next batch may be of another priority."""
    here.direct.execute("SELECT outbox.create_queue('jobs')")
    join(here.connection, JOBS)
    put(here.connection, 3 * LIMIT)
    by = here.consumer(settings=JOBS)
    assert cut(here.connection, by).count == LIMIT
    assert not here.opened
