"""Mode Competing in the database: who has a batch, what a snapshot range holds, how far the checkpoint is."""

from __future__ import annotations

import pytest

from outbox_core.errors import ConfigurationError, HandlerError, TransientError
from outbox_core.processor.claimed_batch import RefusalAction, RefusalDecision
from outbox_core.processor.outcomes import NothingTaken
from outbox_core.progress.checkpoint import Checkpoint
from outbox_core.spec import StartFrom
from outbox_worker.postgres.feeds import competing
from outbox_worker.postgres.progress import checkpoints
from outbox_worker.postgres.reading.read_range import ReadRange
from tests.support.database.concurrency import background, wait_until_blocked
from tests.support.database.consuming import (
    HOUR,
    JOBS,
    KEY,
    OVER,
    claim,
    count,
    cut,
    defer,
    drain,
    find,
    join,
    left,
    look,
    maintain,
    positions,
    produce,
    put,
    taker,
)
from tests.support.servers.postgres import EVERYWHERE, build_source


@pytest.fixture
def connection(each_database):
    connection = each_database.connect()
    claim(connection)
    return connection


def test_batches_are_cut_in_order_and_do_not_overlap(connection):
    join(connection)
    expected = produce(connection, 25)
    one, two = taker("one"), taker("two")
    works = [(by, cut(connection, by)) for by in (one, two, one)]
    assert [positions(connection, by, claimed) for by, claimed in works] == [
        expected[:10],
        expected[10:20],
        expected[20:],
    ]
    assert find(connection, two) is None
    assert [claimed.count for _, claimed in works] == [10, 10, 5]


@EVERYWHERE
def test_who_commits_late_comes_in_a_later_range_and_nobody_waits_for_it(connection, each_database):
    join(connection)
    late = each_database.connect(autocommit=False)
    (early,) = produce(late, 1)
    by = taker()
    now = produce(connection, 3)
    assert drain(connection, by) == now
    more = produce(connection, 2)
    assert drain(connection, by) == more
    late.commit()
    assert drain(connection, by) == [early]
    assert drain(connection, by) == []


@EVERYWHERE
def test_what_was_rolled_back_never_comes(connection, each_database):
    join(connection)
    other = each_database.connect(autocommit=False)
    produce(other, 2)
    expected = produce(connection, 1)
    other.rollback()
    assert drain(connection, taker()) == expected


@EVERYWHERE
def test_only_one_cuts_at_a_time_and_the_other_does_not_wait(connection, each_database):
    join(connection)
    produce(connection, 3)
    holder = each_database.connect(autocommit=False)
    holder.execute("SELECT outbox.lock_dispatch_positions('orders', 'u1')")
    assert taker().claim_next(connection) == NothingTaken(contended=True)
    holder.rollback()
    assert cut(connection, taker()).count == 3


@EVERYWHERE
def test_before_a_repair_is_finished_nothing_is_handed_out(connection):
    """A consumer that looked just before it began is no member yet, and no repair sees it."""
    join(connection)
    expected = produce(connection, 12)
    old = cut(connection, taker("one", lease=OVER))
    connection.execute("UPDATE outbox.database_identity SET repair_begun_at = clock_timestamp()")
    assert taker().claim_next(connection) == NothingTaken(contended=True)
    assert look(connection, taker()) is None
    connection.execute("UPDATE outbox.database_identity SET repair_begun_at = NULL")
    assert left(connection, taker()).id == old.id
    assert positions(connection, taker(), cut(connection, taker())) == expected[10:]


@pytest.mark.parametrize("what", ["owner", "attempt"])
@EVERYWHERE
def test_completion_failure_and_heartbeat_check_owner_and_attempt(connection, what):
    join(connection)
    (position, *_) = produce(connection, 3)
    first, second = taker("one", lease=OVER), taker("two" if what == "owner" else "one")
    old = cut(connection, first)
    new = left(connection, second)
    assert (new.id, new.attempt) == (old.id, 2)

    error = HandlerError("no")
    message = first.reader.fetch(connection, ReadRange.of(old, limit=1))[0]
    assert message.checkpoint.position == position
    assert not first.complete(connection, old, old.upto, 3)
    assert not defer(connection, first, old, message, RefusalDecision(RefusalAction.SKIP, 1), error, OVER)
    assert first.renew(connection, old) == 0
    assert second.renew(connection, new) == 1
    assert second.complete(connection, new, new.upto, 3)
    assert not second.complete(connection, new, new.upto, 3)


@EVERYWHERE
def test_a_lapsed_batch_goes_to_any_other_and_a_live_one_to_nobody(connection):
    join(connection)
    produce(connection, 3)
    live = cut(connection, taker("one"))
    assert look(connection, taker("two")) is None
    assert taker("one", lease=OVER).renew(connection, live) == 1
    assert left(connection, taker("two")).id == live.id


def test_handed_back_it_is_anybodys_at_once_and_counts_no_death(connection):
    join(connection)
    produce(connection, 3)
    one = taker("one")
    claimed = cut(connection, one)
    assert one.hand_back(connection) == 1
    again = left(connection, taker("two"))
    assert (again.id, again.attempt, again.chunk, again.crash_count) == (claimed.id, 2, None, 0)


def test_whoever_dies_over_a_batch_leaves_it_in_smaller_pieces_down_to_one_which_counts(connection):
    join(connection)
    produce(connection, 8)
    by = taker(lease=OVER)
    cut(connection, by)
    seen = [(claimed.chunk, claimed.crash_count) for claimed in (left(connection, by) for _ in range(5))]
    assert seen == [(4, 0), (2, 0), (1, 0), (1, 1), (1, 2)]


def test_the_beginning_of_a_batch_can_be_done_alone(connection):
    join(connection)
    expected = produce(connection, 10)
    one = taker("one", lease=OVER)
    claimed = cut(connection, one)
    third = one.reader.fetch(connection, ReadRange.of(claimed, limit=3))[-1]
    assert one.complete(connection, claimed, third.checkpoint, 3)
    rest = left(connection, taker("two"))
    assert rest.count == 7
    assert positions(connection, one, rest) == expected[3:]


def test_a_message_that_failed_waits_while_the_rest_goes_on(connection):
    join(connection)
    expected = produce(connection, 5)
    by = taker()
    claimed = cut(connection, by)
    first = by.reader.fetch(connection, ReadRange.of(claimed, limit=1))[0]
    assert defer(connection, by, claimed, first, RefusalDecision(RefusalAction.RETRY, 1), HandlerError("no"), HOUR)
    assert look(connection, by) is None
    connection.execute("UPDATE outbox.competing_retries SET due_at = clock_timestamp()")
    again = left(connection, by)
    assert again.listed == ((first.checkpoint, 1),)
    assert positions(connection, by, again) == expected[:1]
    assert positions(connection, by, claimed) == expected


def test_the_checkpoint_stays_before_what_is_not_done_and_never_moves_back(connection):
    join(connection)
    produce(connection, 10)
    produce(connection, 10)
    one, two = taker("one"), taker("two")
    first, second = cut(connection, one), cut(connection, two)
    pairs = []

    def advance():
        maintain(connection)
        stored = checkpoints.load(connection, KEY)
        assert stored is not None
        pairs.append(stored.pair)

    assert two.complete(connection, second, second.upto, 10)
    advance()
    assert pairs[-1] < Checkpoint(first.upto.transaction_id, 0)
    message = one.reader.fetch(connection, ReadRange.of(first, limit=1))[0]
    defer(connection, one, first, message, RefusalDecision(RefusalAction.RETRY, 1), HandlerError("no"), HOUR)
    advance()
    assert one.complete(connection, first, first.upto, 9)
    advance()
    assert pairs[-1] < message.checkpoint, "it waits for its next attempt"
    connection.execute("UPDATE outbox.competing_retries SET due_at = clock_timestamp()")
    drain(connection, one)
    produce(connection, 1)
    drain(connection, one)
    advance()
    assert pairs[-1] >= second.upto
    assert pairs == sorted(pairs)


@EVERYWHERE
def test_without_the_claim_nothing_is_taken(connection):
    join(connection)
    produce(connection, 3)
    assert join(connection, uid="u2") is None
    stranger = taker("two", uid="u2")
    assert stranger.claim_next(connection) == NothingTaken(contended=True)
    assert look(connection, stranger) is None


@EVERYWHERE
def test_a_start_at_the_end_has_what_was_in_flight(connection, each_database):
    produce(connection, 3)
    flying = each_database.connect(autocommit=False)
    (position,) = produce(flying, 1)
    assert join(connection, start_from=StartFrom(type="End"))
    flying.commit()
    new = produce(connection, 2)
    assert sorted(drain(connection, taker())) == sorted([position, *new])


def test_types_that_do_not_match_are_passed_over_without_batches(connection):
    join(connection)
    produce(connection, 30, "other")
    wanted = produce(connection, 2, "mine")
    by = taker(source=build_source(messageTypes=["mine"]))
    assert drain(connection, by) == wanted


@EVERYWHERE
def test_in_a_serializable_or_repeatable_read_transaction_a_lost_batch_is_refused_or_fails(connection, each_database):
    join(connection)
    produce(connection, 3)
    one = taker("one", lease=OVER)
    claimed = cut(connection, one)
    frozen = each_database.connect(autocommit=False)
    frozen.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    frozen.execute("SELECT count(*) FROM outbox.competing_batches")
    assert left(connection, taker("two")).attempt == 2
    with pytest.raises(TransientError, match="40001"):
        one.complete(frozen, claimed, claimed.upto, 3)


def pages(connection, table):
    """Pages of a partitioned table's children, without indexes."""
    row = connection.execute(
        "SELECT sum(pg_relation_size(i.inhrelid)) / 8192 FROM pg_inherits i WHERE i.inhparent = %s::regclass",
        (f"outbox.{table}",),
    ).fetchone()
    return int(row[0])


def test_what_holds_dead_rows_only_is_emptied_though_a_transaction_keeps_vacuum_out(database):
    """Pages, not seconds.

    Without rotation 2,600 batches leave 140 pages and more, and as many dispatch positions 35.
    """
    connection = database.connect()
    claim(connection)
    join(connection)
    with database.direct(autocommit=False) as old:
        old.execute("SELECT pg_current_xact_id()")
        by = taker(limit=1)
        largest = [0, 0]
        for _ in range(13):
            produce(connection, 200)
            assert len(drain(connection, by)) == 200
            maintain(connection)
            found = [pages(connection, table) for table in ("competing_batches", "competing_dispatch_positions")]
            largest = [max(pair) for pair in zip(largest, found, strict=True)]
        assert largest[0] < 90
        assert largest[1] < 24
    assert count(connection, "competing_batches") == 0
    assert drain(connection, by) == []


def test_a_child_that_ids_come_round_to_while_it_is_emptied_keeps_every_lanes_latest_row(queue):
    def dispatch_positions():
        rows = queue.execute("SELECT * FROM outbox.lock_dispatch_positions('orders', 'u1')").fetchall()
        return {row[0]: row[2:6] for row in rows}

    def rotate(looks=1):
        return [n for _ in range(looks) for n in queue.execute("SELECT outbox.rotate_competing()").fetchone()[0]]

    before = dispatch_positions()
    assert len(before) == 10
    queue.execute(
        "SELECT setval('outbox.competing_dispatch_position_ids', 2042)"
    )  # five copies fit before child 0 comes again
    assert rotate() == []
    assert dispatch_positions() == before
    queue.execute("SELECT setval('outbox.competing_dispatch_position_ids', 2 * 2048 + 600)")
    assert "competing_dispatch_positions_0" in rotate(4)
    assert dispatch_positions() == before


def test_a_child_that_another_cut_comes_round_to_while_it_is_emptied_is_kept(queue, database):
    """Between the copies and the lock: an unfinished cut of another processor has the child locked already."""
    queue.execute("SELECT setval('outbox.competing_dispatch_position_ids', 600)")
    assert queue.execute("SELECT outbox.rotate_competing()").fetchone() == ([],), "the copies are made"
    with database.direct(autocommit=False) as cutting:
        cutting.execute(
            "INSERT INTO outbox.competing_dispatch_positions (id, processor_id, priority, lower_snapshot) "
            "VALUES (2048, 'other', 0, '5:5:')"
        )
        with background(lambda: queue.execute("SELECT outbox.rotate_competing()").fetchone()) as done:
            wait_until_blocked(database, done)
            cutting.commit()
        assert done.result() == ([],)
    assert queue.execute(
        "SELECT id FROM outbox.competing_dispatch_positions WHERE processor_id = 'other'"
    ).fetchall() == [(2048,)]


def test_a_processor_with_checkpoints_of_another_mode_is_refused(connection):
    connection.execute("INSERT INTO outbox.processor_checkpoints VALUES ('orders', 0, '5', 5)")
    with pytest.raises(ConfigurationError, match="another mode"):
        join(connection)


def test_the_checkpoint_of_a_queue_waits_for_what_is_not_done_and_for_no_unused_priority(connection, each_database):
    competing.ensure_queue(connection, "outbox", "jobs", create=True)
    join(connection, JOBS)
    by = taker(settings=JOBS)

    def stored():
        maintain(connection, JOBS)
        found = checkpoints.load(connection, KEY)
        assert found is not None
        return found.pair.transaction_id

    def written():
        row = connection.execute("SELECT max(transaction_id::text::bigint) FROM outbox.queue_jobs").fetchone()
        return row[0]

    for priority in (5, 0, 5):
        put(connection, 3, priority=priority)
        drain(connection, by)
        assert stored() >= written(), "all is done"
    put(connection, 15)
    claimed = cut(connection, by)
    assert stored() < written()
    assert by.complete(connection, claimed, claimed.upto, 10)
    assert stored() == written(), "within that transaction: five of it wait"
    put(connection, 1, priority=9)
    late = written()
    put(connection, 1, priority=0)
    for _ in range(2):
        claimed = cut(connection, by)
        assert claimed.priority in {0, 5}
        assert by.complete(connection, claimed, claimed.upto, claimed.count)
    assert stored() < late, "one of priority 9 waits"
    drain(connection, by)
    assert stored() >= written()
    beside = each_database.connect()
    with beside.transaction():
        put(beside, 1, priority=3)
        put(connection, 1)
        drain(connection, by)
        uncommitted = int(beside.execute("SELECT pg_current_xact_id()::text").fetchone()[0])
        assert stored() < uncommitted, "what is not committed yet is behind it"
    assert stored() < uncommitted
    assert len(drain(connection, by)) == 1
    put(connection, 1)
    drain(connection, by)
    assert stored() >= written()
