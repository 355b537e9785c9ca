"""The cursor Snapshot under any interleaving of real transactions: nothing lost or twice, no stall, keys in order.

Each example plays producers, strangers and a reader statement by statement. `OUTBOX_INTERLEAVINGS` says how many are
tried; a failing one is shrunk and printed, and `--hypothesis-seed` repeats a run.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg import sql
from typing_extensions import override

from outbox_core.partition import slots_of
from outbox_core.progress.checkpoint import MAX_POSITION, Checkpoint
from outbox_core.progress.snapshot_range import SnapshotRange
from outbox_core.spec import PartitionKey
from outbox_worker.postgres.reading.messages import MessageReader
from outbox_worker.postgres.reading.range_reader import SnapshotReader
from outbox_worker.postgres.reading.range_scan import Limits, RangeScan
from outbox_worker.postgres.reading.shared_look import PartitionLook, SharedLook
from outbox_worker.postgres.reading.slots import ensure_slot_index
from outbox_worker.postgres.reading.snapshots import fetch_snapshot
from outbox_worker.postgres.reading.table import OutboxTable
from tests.support.database.interleaving import Processor, World, merge
from tests.support.servers.postgres import build_source

EXAMPLES = int(os.environ.get("OUTBOX_INTERLEAVINGS", "100"))
PARTS = 32
TABLE = OutboxTable.of(build_source())

who = st.integers(0, 3)
inserting = st.tuples(st.just("insert"), who, st.integers(0, 2), st.integers(1, 4))
committing = st.tuples(st.just("commit"), who)
paging = st.tuples(st.just("page"), st.integers(1, 3))
anything = st.one_of(
    st.tuples(st.sampled_from(["touch", "savepoint", "rollback to", "rollback"]), who),
    st.tuples(st.sampled_from(["prepare", "commit prepared", "rollback prepared", "stranger"]), who),
    st.tuples(st.sampled_from(["read", "drain"]), st.integers(1, 4)),
    st.tuples(st.just("crash"), who),
)
histories = st.lists(st.one_of(inserting, committing, paging, anything), min_size=20, max_size=80)
limits = st.sampled_from([Limits(), Limits(small=2, ahead=4), Limits(small=1, ahead=1), Limits(small=1, ahead=100)])


def play(world, processors, history):
    """Do what the history says; check after each step that nothing is handled twice or out of order.

    Return what was handled in the end, by key.
    """
    acts = {
        "insert": world.insert,
        "touch": world.touch,
        "savepoint": world.savepoint,
        "rollback to": world.roll_back_to_savepoint,
        "commit": lambda number: world.end(number, commit=True),
        "rollback": lambda number: world.end(number, commit=False),
        "prepare": world.prepare,
        "commit prepared": lambda _: world.end_first_prepared(commit=True),
        "rollback prepared": lambda _: world.end_first_prepared(commit=False),
        "stranger": lambda _: world.toggle_stranger(),
    }
    for name, *arguments in history:
        if name in acts:
            acts[name](*arguments)
            continue
        for processor in processors:
            if name == "read":
                processor.read(arguments[0])
            elif name == "page":
                processor.read(arguments[0])
                processor.store()
            elif name == "crash":
                processor.restart()
            else:
                processor.drain(arguments[0])
            processor.check(world.committed, whole=name == "drain")
    for processor in processors:
        processor.drain(3)
        processor.check(world.committed, whole=True)
    return merge(processors)


@pytest.fixture(scope="module")
def world(servers):
    """One world for all examples: each starts where the one before left the outbox."""
    with servers.database() as database:
        ensure_slot_index(database.direct(), build_source(), PartitionKey())
        playing = World(database)
        yield playing
        playing.close()


def run(world, history, build):
    """Play a history, with every reader that `build` makes for a start; return what they handled, by key."""
    return play(world, build(world.reset()), history)


EXPLORING = settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True, database=None
)


@EXPLORING
@given(history=histories, limits=limits)
def test_nothing_is_lost_repeated_or_out_of_order(world, history, limits):
    scan = RangeScan(TABLE)
    handled = run(
        world, history, lambda start: [Processor(world.reader, lambda: SnapshotReader(scan, 0, limits), start)]
    )
    assert handled == world.committed


@pytest.mark.parametrize("together", [False, True], ids=["each looks", "one looks for all"])
@settings(EXPLORING, max_examples=max(1, EXAMPLES // 3))
@given(history=histories, limits=limits)
def test_partitions_share_the_messages_and_keep_each_keys_order(world, history, limits, together):
    shared = SharedLook() if together else None
    slots = dict(world.reader.execute("SELECT key, outbox.hash_slot(key) FROM keys").fetchall())

    def build(start):
        return [
            PartOf(
                world.reader,
                number,
                limits,
                start,
                {key for key, slot in slots.items() if slot % PARTS == number},
                shared,
            )
            for number in sorted({slot % PARTS for slot in slots.values()})
        ]

    assert run(world, history, build) == world.committed


class PartOf(Processor):
    """One partition of many: it is to handle the messages of its keys only."""

    def __init__(self, connection, number, limits, start, keys, shared):
        look = None if shared is None else PartitionLook(shared, number, PARTS)
        scan = RangeScan(TABLE, slot=TABLE.slot(PartitionKey(), "outbox"), slots=tuple(slots_of(number, PARTS)))
        super().__init__(connection, lambda: SnapshotReader(scan, number, limits, look=look), start)
        self.keys = keys

    @override
    def check(self, committed, *, whole):
        assert set(self.by_key) <= self.keys
        super().check({key: names for key, names in committed.items() if key in self.keys}, whole=whole)


@settings(EXPLORING, max_examples=max(1, EXAMPLES // 3))
@given(history=histories, limits=limits, typed=st.integers(1, 5))
def test_filters_let_through_what_they_shall(world, history, limits, typed):
    source = build_source(cursor="Snapshot", publications=["eu"], messageTypes=["t0", "t2"])
    types = sql.Literal(source.message_types)
    scan = RangeScan(TABLE, types, ("eu",))
    bounds = replace(limits, typed=typed)

    def is_assigned(name):
        number = int(name.removeprefix("m"))
        return number % 2 == 0 and number % 3 in (0, 2)

    handled = run(
        world,
        history,
        lambda start: [
            Processor(world.reader, lambda: SnapshotReader(scan, 0, bounds), start, is_assigned=is_assigned)
        ],
    )
    wanted = {key: [name for name in names if is_assigned(name)] for key, names in world.committed.items()}
    assert handled == {key: names for key, names in wanted.items() if names}


def test_the_last_page_of_an_older_range_says_that_more_may_be_there(world):
    start, reader = world.reset(), SnapshotReader(RangeScan(TABLE))
    world.insert(0, 0, 3)
    world.end(0, commit=True)

    first = reader.fetch(world.reader, start, 2)
    world.insert(0, 0, 1)
    world.end(0, commit=True)
    last = reader.fetch(world.reader, first.examined, 2)
    newer = reader.fetch(world.reader, last.examined, 2)

    assert [(len(batch.messages), batch.full) for batch in (first, last, newer)] == [(2, True), (1, True), (1, False)]


class Meddled:
    """A connection on which somebody does something after each statement."""

    def __init__(self, connection, act):
        self._connection, self._act = connection, act

    def execute(self, *arguments):
        answer = self._connection.execute(*arguments)
        self._act()
        return answer


@pytest.mark.parametrize("types", [None, sql.Literal(["t0", "t1", "t2"])], ids=["all types", "some types"])
@pytest.mark.parametrize("act", ["delete", "commit"])
def test_what_others_delete_or_commit_between_two_statements_moves_no_page(world, types, act):
    """A page that holds few of many rows says how far it looked: of the very rows that it looked at."""
    start = world.reset()
    world.insert(0, 0, 20)
    world.end(0, commit=True)
    world.insert(1, 1, 8)  # in flight, between what the page reads and what it does not
    world.insert(2, 0, 20)
    world.end(2, commit=True)
    deleting = world.database.direct()

    def meddle():
        if act == "delete":
            deleting.execute(
                "DELETE FROM outbox.messages WHERE publication_id = 'us' AND position <= "
                "(SELECT min(position) + 14 FROM outbox.messages WHERE transaction_id >= %s::text::xid8)",
                (start.snapshot_range.end.split(":")[0],),
            )
        else:
            world.end(1, commit=True)

    scan = RangeScan(TABLE, types, ("eu",))
    reader = SnapshotReader(scan, 0, Limits(small=1, ahead=12, typed=10))
    after, handled = Checkpoint(0, 1, SnapshotRange(None, fetch_snapshot(world.reader), 1)), []
    eu = {name for name, publication in world.published.items() if publication == "eu"}
    committed = [name for name in world.committed["k0"] if name in eu]
    meddled: Any = Meddled(world.reader, meddle)
    for _ in range(10_000):  # rows of earlier examples come first
        batch = reader.fetch(meddled, after, 10)
        if not batch.matched_count and not batch.full:
            break
        handled += [message.message_id for message in batch.messages]
        after = batch.examined

    assert len(handled) == len(set(handled))
    assert [name for name in handled if name in committed] == committed


class Forgetful(SnapshotReader):
    """The fault that the stored upper snapshot prevents: each page is read up to now."""

    @override
    def fetch(self, connection, after, limit):
        snapshot_range = after.snapshot_range
        if snapshot_range.is_open:
            now = SnapshotRange(snapshot_range.lower, fetch_snapshot(connection), snapshot_range.position)
            after = Checkpoint(0, after.position, now)
        return super().fetch(connection, after, limit)


LATE_COMMIT = [
    ("insert", 0, 0, 1),  # position 1, stays open
    ("insert", 1, 1, 3),
    ("commit", 1),
    ("page", 2),
    ("commit", 0),  # behind the page
    ("drain", 2),
]


def test_a_page_read_up_to_now_would_lose_what_commits_behind_it(world):
    scan = RangeScan(TABLE)
    run(world, LATE_COMMIT, lambda start: [Processor(world.reader, lambda: SnapshotReader(scan), start)])

    with pytest.raises(AssertionError, match="lost or stalled"):
        run(world, LATE_COMMIT, lambda start: [Processor(world.reader, lambda: Forgetful(scan), start)])


OVERTAKEN = [
    ("touch", 0),  # takes its id early
    ("insert", 1, 0, 1),
    ("commit", 1),
    ("insert", 0, 0, 1),  # the same key, later
    ("commit", 0),
    ("drain", 3),
]
HELD = [("stranger", 0), ("insert", 0, 0, 1), ("commit", 0), ("drain", 3)]


@pytest.mark.parametrize(("history", "fault"), [(OVERTAKEN, "commit order"), (HELD, "lost or stalled")])
def test_where_the_pair_cursor_inverts_a_key_or_stalls_the_snapshot_does_not(world, history, fault):
    def build(cursor):
        def start(here):
            bound = world.reader.execute("SELECT pg_snapshot_xmax(pg_current_snapshot())::text").fetchone()
            pair = Checkpoint(int(bound[0]) - 1, MAX_POSITION)
            first = here if cursor == "Snapshot" else pair
            return [Processor(world.reader, lambda: MessageReader(build_source(cursor=cursor)), first)]

        return start

    run(world, history, build("Snapshot"))
    with pytest.raises(AssertionError, match=fault):
        run(world, history, build("TransactionOrder"))
