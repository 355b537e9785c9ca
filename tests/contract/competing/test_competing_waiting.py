"""Mode Competing in the database: messages that wait for their time, or for a person, and who goes first."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from math import inf

import pytest

from outbox_core.errors import HandlerError
from outbox_core.processor.claimed_batch import ClaimedBatch, RefusalAction, RefusalDecision
from outbox_core.processor.outcomes import NothingTaken
from outbox_worker.postgres.admin import dead_letters
from outbox_worker.postgres.feeds import competing
from outbox_worker.postgres.progress import checkpoints
from outbox_worker.postgres.reading import dispatch_reader
from outbox_worker.postgres.reading.read_range import ReadRange
from tests.support.database.consuming import (
    JOBS,
    KEY,
    OVER,
    SETTINGS,
    claim,
    count,
    cut,
    defer,
    drain,
    find,
    join,
    left,
    maintain,
    positions,
    produce,
    put,
    taker,
)
from tests.support.servers.postgres import build_source

LOCKED = "SELECT xmax, ctid FROM outbox.competing_processors"
REFUSED = HandlerError("no\0", classes=("ValueError", "Exception"))


@pytest.fixture
def connection(each_database):
    connection = each_database.connect()
    claim(connection)
    return connection


def make_due(connection):
    connection.execute("UPDATE outbox.competing_retries SET due_at = clock_timestamp()")


def fail_first(connection, by, claimed, decision):
    """The first message of the batch fails alone; return it."""
    message = by.reader.fetch(connection, ReadRange.of(claimed, limit=1))[0]
    assert defer(connection, by, claimed, message, decision, REFUSED, OVER)
    return message


def redrive(connection, *ids):
    return dead_letters.decide_dead(connection, KEY, ids, drop=False, reason="mended", decided_by="a person")


def dead(connection):
    return dead_letters.list_dead(connection, "outbox", dead_letters.Filter(processor_id="orders"), limit=100)


def stored(connection, settings=SETTINGS):
    maintain(connection, settings)
    found = checkpoints.load(connection, KEY)
    assert found is not None
    return found.pair


def test_a_delayed_message_is_not_in_its_batch_and_nobody_waits_for_it(connection):
    join(connection)
    first = produce(connection, 3)
    delayed = produce(connection, 2, deliver_after="1 hour")
    others = produce(connection, 3, deliver_after="-1 hour")
    by = taker()
    claimed = cut(connection, by)
    assert (positions(connection, by, claimed), claimed.count) == ([*first, *others], 6)
    relation = by.reader.relation(ReadRange.of(claimed)).as_string(connection)
    assert connection.execute(f"SELECT array_agg(position) FROM ({relation}) AS b").fetchone() == ([*first, *others],)
    examined = by.reader.examine(connection, ReadRange.of(claimed), 4)
    assert examined is not None
    assert (examined.matched, examined.upto.position) == (4, others[0]), "a piece of it leaves them out too"
    assert by.complete(connection, claimed, claimed.upto, claimed.count)
    assert drain(connection, by) == []
    make_due(connection)
    assert drain(connection, by) == delayed
    assert (count(connection, "competing_retries"), count(connection, "competing_copies")) == (0, 0)


def test_a_batch_needs_as_many_statements_whatever_is_delayed(connection, tmp_path):
    """Counted where they leave: by libpq's own trace."""

    def statements_for(delayed):
        produce(connection, 400 - delayed)
        produce(connection, delayed, deliver_after="1 hour")
        by = taker(limit=500)
        found: ClaimedBatch | NothingTaken = NothingTaken()
        while isinstance(found, NothingTaken):
            with (tmp_path / "trace").open("wb+") as trace:
                connection.pgconn.trace(trace.fileno())
                found = by.claim_next(connection)
                connection.pgconn.untrace()
        assert found.count == 400 - delayed
        sent = [line for line in (tmp_path / "trace").read_text().splitlines() if "\tF\t" in line]
        return sum(line.split("\t")[3].startswith(("Query", "Parse")) for line in sent)

    join(connection)
    assert drain(connection, taker()) == []
    plain = statements_for(0)
    assert 0 < plain <= 5
    assert statements_for(300) == plain


def produce_large(connection, count, size, deliver_after):
    """Store messages with so many bytes that no compression saves."""
    rows = connection.execute(
        "INSERT INTO outbox.messages (message_type, data, deliver_after) SELECT 't', d.data, now() + %s::interval "
        "FROM (SELECT jsonb_agg(md5(i::text)) AS data FROM generate_series(1, %s / 32) AS i) AS d, "
        "generate_series(1, %s) RETURNING position",
        (deliver_after, size, count),
    ).fetchall()
    return [row[0] for row in rows]


@pytest.mark.parametrize("types", [[], ["t"]], ids=["every type", "one type"])
def test_of_large_delayed_messages_a_claim_copies_as_many_bytes_as_it_may_or_one(connection, monkeypatch, types):
    """They are one array, and PostgreSQL has none of 1 GB."""
    monkeypatch.setattr(dispatch_reader, "COPIED_BYTES", 20_000)
    join(connection)
    by = taker(limit=100, source=build_source(messageTypes=types))
    assert drain(connection, by) == []
    due = produce_large(connection, 1, 30_000, "-1 hour")
    for messages, size in ((18, 3_000), (2, 30_000), (1, 3_000)):
        produce_large(connection, messages, size, "1 hour")
    behind = produce(connection, 1)
    copied, taken = [0], []
    while (claimed := by.claim_next(connection)) != NothingTaken():
        copied.append(count(connection, "competing_copies"))
        taken += [] if isinstance(claimed, NothingTaken) else positions(connection, by, claimed)
    assert [now - former for former, now in pairwise(copied)] == [5, 5, 5, 3, 1, 1, 1]
    assert taken == [*due, *behind]


def test_the_checkpoint_passes_a_delayed_message_whose_row_may_then_be_deleted(connection):
    join(connection)
    delayed = produce(connection, 2, deliver_after="1 hour")
    after = produce(connection, 1)
    by = taker()
    assert drain(connection, by) == after
    produce(connection, 1)
    drain(connection, by)
    assert stored(connection).position > delayed[-1]
    assert connection.execute("DELETE FROM outbox.messages WHERE position = ANY (%s)", (delayed,)).rowcount == 2
    assert drain(connection, by) == []
    make_due(connection)
    claimed = left(connection, by)
    found = by.reader.fetch(connection, ReadRange.of(claimed))
    assert [(m.checkpoint.position, m.data) for m in found] == [(delayed[0], '{"n": 1}'), (delayed[1], '{"n": 2}')]
    # One of them fails, and its next attempt needs the copy again.
    fail_first(connection, by, claimed, RefusalDecision(RefusalAction.RETRY, 1))
    assert by.complete(connection, claimed, claimed.upto, 1)
    make_due(connection)
    assert drain(connection, by) == delayed[:1]
    assert count(connection, "competing_copies") == 0


def test_filters_hold_for_delayed_messages(connection):
    join(connection)
    produce(connection, 2, "other", deliver_after="1 hour")
    wanted = produce(connection, 1, "mine", deliver_after="1 hour")
    by = taker(source=build_source(messageTypes=["mine"]))
    assert drain(connection, by) == []
    assert count(connection, "competing_retries") == 1
    make_due(connection)
    assert drain(connection, by) == wanted


def test_a_table_without_a_column_for_delays_has_no_delayed_messages(connection):
    mapped = build_source(table={"schemaName": "outbox", "name": "messages", "columns": {}})
    join(connection, source=mapped)
    expected = produce(connection, 2, deliver_after="1 hour")
    assert drain(connection, taker(source=mapped)) == expected


def test_dead_letters_of_the_outbox_are_handed_out_again_even_if_their_rows_are_gone(connection):
    join(connection)
    produced = produce(connection, 3)
    by = taker()
    claimed = cut(connection, by)
    gone = fail_first(connection, by, claimed, RefusalDecision(RefusalAction.DEAD_LETTER, 3))
    assert by.complete(connection, claimed, claimed.upto, 2)
    (dead_letter,) = dead(connection)
    assert (dead_letter.key, dead_letter.error_class, dead_letter.attempts) == (gone.message_id, "ValueError", 3)
    assert dead_letter.error == "no\N{REPLACEMENT CHARACTER}"
    assert drain(connection, by) == []
    before = stored(connection)
    connection.execute("DELETE FROM outbox.messages")

    assert redrive(connection, dead_letter.id) == 1
    assert redrive(connection, dead_letter.id) == 0, "not twice"
    again = left(connection, by)
    assert again.listed == ((gone.checkpoint, 0),), "with a fresh count of attempts"
    assert [m.message_id for m in by.reader.fetch(connection, ReadRange.of(again))] == [gone.message_id]
    assert by.complete(connection, again, again.upto, 1)
    assert dead(connection) == []
    assert stored(connection) >= before
    acts = connection.execute("SELECT action, reason FROM outbox.audit_log").fetchall()
    assert acts == [("Redrive", "1 dead letter: mended")]
    assert produced[0] == gone.checkpoint.position


def test_what_is_handed_back_or_lapsed_of_redriven_messages_comes_again(connection):
    join(connection)
    produce(connection, 2)
    one = taker("one")
    claimed = cut(connection, one)
    fail_first(connection, one, claimed, RefusalDecision(RefusalAction.DEAD_LETTER, 1))
    assert one.complete(connection, claimed, claimed.upto, 1)
    redrive(connection, *[each.id for each in dead(connection)])
    lost = left(connection, taker("one", lease=OVER))
    two = taker("two")
    again = left(connection, two)
    assert (again.id, positions(connection, two, again)) == (lost.id, positions(connection, one, lost))
    assert not one.complete(connection, lost, lost.upto, 1)
    assert two.complete(connection, again, again.upto, 1)


def test_a_message_that_is_skipped_is_recorded_in_the_audit_log(connection):
    join(connection)
    produce(connection, 1)
    by = taker()
    message = fail_first(connection, by, cut(connection, by), RefusalDecision(RefusalAction.SKIP, 2))
    ((act, position, reason),) = connection.execute(
        "SELECT action, to_position, reason FROM outbox.audit_log"
    ).fetchall()
    assert (act, position) == ("Skip", message.checkpoint.position)
    assert "after 2 attempts: ValueError" in reason


def test_dead_letters_of_a_queue_are_stored_in_it_anew_with_their_priority_and_age(queue):
    put(queue, 1, priority=2, message_id="mine", scheduled="2020-01-01", metadata='{"a": 1}')
    by = taker(settings=JOBS)
    fail_first(queue, by, cut(queue, by), RefusalDecision(RefusalAction.DEAD_LETTER, 9))
    (dead_letter,) = dead(queue)
    assert redrive(queue, dead_letter.id) == 1
    found = queue.execute(
        "SELECT message_id, priority, scheduled < '2020-01-03', metadata, attempts, unique_key FROM outbox.queue_jobs "
        "WHERE position > %s", (dead_letter.pair.position,)
    ).fetchall()  # fmt: skip
    assert found == [("mine", 2, True, {"a": 1}, 0, None)]
    assert len(drain(queue, by)) == 1
    assert redrive(queue, dead_letter.id) == 0


def test_a_lone_urgent_message_is_the_next_batch_whatever_the_backlog(queue):
    by = taker(settings=JOBS, limit=100)
    backlog = put(queue, 5000)
    for _ in range(3):
        claimed = cut(queue, by)
        assert claimed.priority == 5
        assert by.complete(queue, claimed, claimed.upto, claimed.count)
    urgent = put(queue, 1, priority=0)
    claimed = cut(queue, by)
    assert (claimed.priority, positions(queue, by, claimed)) == (0, urgent)
    assert by.complete(queue, claimed, claimed.upto, 1)
    assert drain(queue, by) == backlog[300:]


def test_priority_is_for_a_batch_a_backlog_that_has_waited_longer_than_its_levels_goes_first(queue):
    by = taker(settings=JOBS, limit=10)
    put(queue, 20, scheduled="2020-01-01")
    put(queue, 1, priority=0)
    priorities = []
    while (claimed := find(queue, by)) is not None:
        priorities.append(claimed.priority)
        assert by.complete(queue, claimed, claimed.upto, claimed.count)
    assert priorities == [5, 5, 0]


@pytest.mark.parametrize("when", ["infinity", "-infinity", "9999-12-31", "0001-01-01 BC"])
def test_a_time_that_a_producer_said_wrongly_stops_no_queue_and_keeps_nothing_waiting(queue, when):
    by = taker(settings=JOBS, limit=10)
    urgent, others = put(queue, 1, priority=0, scheduled=when), put(queue, 3)
    claimed = cut(queue, by)
    assert positions(queue, by, claimed) == urgent
    assert by.complete(queue, claimed, claimed.upto, claimed.count)
    assert drain(queue, by) == others


def test_a_look_without_the_lock_finds_what_a_claim_would(connection):
    def looks():
        seen = by.is_any_left(connection)
        assert connection.execute(LOCKED).fetchall() == before, "the row that is locked for a claim is as it was"
        return seen

    join(connection)
    by = taker()
    assert drain(connection, by) == []
    before = connection.execute(LOCKED).fetchall()
    assert not looks()
    stored = produce(connection, 1)
    assert looks()
    assert drain(connection, by) == stored
    before = connection.execute(LOCKED).fetchall()
    assert not looks()


def test_a_look_without_the_lock_leaves_it_to_the_claim_to_say_that_nothing_is_known_of_the_processor(connection):
    by = taker()
    assert by.is_any_left(connection)
    assert by.claim_next(connection) == NothingTaken(contended=True)


def test_it_is_known_when_something_may_be_handled_though_nothing_is_written(connection):
    join(connection)
    by = taker()
    assert by.find_next_due(connection) == inf
    produce(connection, 1, deliver_after="1 hour")
    assert drain(connection, by) == []
    assert 3500 < by.find_next_due(connection) <= 3600
    produce(connection, 1)
    other = taker("two", lease=timedelta(seconds=60))
    cut(connection, other)
    assert 30 < by.find_next_due(connection) <= 60, "the other's batch may be taken over then"
    other.hand_back(connection)
    assert by.find_next_due(connection) <= 0


def test_it_is_known_when_a_delayed_message_of_a_queue_may_be_handed_out(queue):
    by = taker(settings=JOBS)
    assert by.find_next_due(queue) == inf
    put(queue, 1, deliver_after=datetime.now(UTC) + timedelta(hours=1))
    assert drain(queue, by) == []
    assert 3500 < by.find_next_due(queue) <= 3600


@pytest.mark.parametrize("version", ["15", "18"])
def test_what_waits_for_ever_in_a_queue_is_never_due(servers, version):
    """Nothing can be taken from infinity before PostgreSQL 17."""
    with servers.database(version) as database:
        connection = database.connect()
        claim(connection)
        competing.ensure_queue(connection, "outbox", "jobs", create=True)
        join(connection, JOBS)
        put(connection, 1, deliver_after="infinity")
        assert taker(settings=JOBS).find_next_due(connection) == inf
