"""What is asked in one round trip: a small snapshot range with the snapshot that ends it, the lease, a checkpoint."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import psycopg
import pytest
from typing_extensions import override

from outbox_core.processor import outcomes
from outbox_core.progress.checkpoint import BEGINNING, Checkpoint, StoreAnswer
from outbox_core.progress.snapshot_range import SnapshotRange
from outbox_core.report import ResourceRef
from outbox_worker.postgres import identity
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.ownership import leases
from outbox_worker.postgres.ownership.leases import FRESH, LeaseLook
from outbox_worker.postgres.progress import checkpoints
from outbox_worker.postgres.reading.messages import MessageReader
from outbox_worker.postgres.reading.snapshots import FEW, fetch_snapshot
from outbox_worker.postgres.reading.wal_watch import WalWatch
from outbox_worker.postgres.transactions import transaction
from outbox_worker.postgres.transactions.transaction import StoreRequest, TransactionRunner
from outbox_worker.session import Session
from tests.support.servers.postgres import build_source, wait_until

if TYPE_CHECKING:
    from typing import Self

    from tests.support.servers.postgres import Database

KEY = ProcessorKey("outbox", "orders")
HOUR = timedelta(hours=1)


class Counting(psycopg.Connection[Any]):
    """Counts what it sends."""

    sent = 0
    last = ""

    @override
    def execute(self, *args: Any, **kwargs: Any) -> psycopg.Cursor[Any]:
        self.sent += 1
        cursor = super().execute(*args, **kwargs)
        self.last = (cursor._query.query if cursor._query else b"").decode()
        return cursor

    @classmethod
    def of(cls, database: Database) -> Self:
        return cls.connect(database.uri(), autocommit=True, prepare_threshold=None)


@pytest.fixture
def counting(database):
    with Counting.of(database) as connection:
        yield connection


def insert(connection, *names):
    for name in names:
        connection.execute(
            "INSERT INTO outbox.messages (publication_id, partition_key, message_id, message_type, data) "
            "VALUES ('shop', 'a', %s, 'OrderPlaced', '{}')",
            (name,),
        )


def ids(batch):
    return [message.message_id for message in batch.messages]


def begin_now(connection):
    return Checkpoint(0, 1, SnapshotRange(fetch_snapshot(connection)))


def own(connection):
    resource = ResourceRef(cluster="c", namespace="n", name="orders", uid="u1")
    assert leases.claim(connection, KEY, resource).granted
    answer = leases.acquire_lease(connection, KEY, claim_uid="u1", pod="pod", token=(token := uuid4()), lease=HOUR)
    assert answer.epoch is not None
    return outcomes.HeldLease(0, answer.epoch, token)


def test_a_small_range_and_its_snapshot_are_read_with_one_statement(database, counting):
    reader, start = MessageReader(build_source()), begin_now(counting)
    insert(database.direct(), "a", "b")
    before = counting.sent
    batch = reader.fetch(counting, start, 1000)
    assert (ids(batch), batch.full, counting.sent - before) == (["a", "b"], False, 1)
    assert ids(reader.fetch(counting, batch.examined, 1000)) == []
    assert counting.sent - before == 2


@pytest.mark.parametrize("read", [MessageReader.fetch, MessageReader.fetch_extent], ids=["messages", "the extent"])
def test_a_look_in_vain_says_whether_a_transaction_was_in_progress(database, read):
    connection, writer = database.direct(), database.direct(autocommit=False)
    reader, start = MessageReader(build_source()), begin_now(connection)

    def saw_all():
        return read(reader, connection, start, 1000).saw_all

    for _ in range(5):  # after some looks in vain the snapshot is asked for alone
        wait_until(saw_all, "nothing is in progress", 30.0)
        writer.execute("SELECT pg_current_xact_id()")
        assert not saw_all()
        writer.commit()
    insert(writer, "a")
    assert not saw_all()
    writer.commit()
    assert ids(reader.fetch(connection, start, 1000)) == ["a"]


def test_what_commits_late_is_of_a_later_range_and_nothing_is_read_twice(database, counting):
    reader, early, late = MessageReader(build_source()), *(database.direct(autocommit=False) for _ in range(2))
    insert(early, "early")
    start = begin_now(counting)
    insert(late, "late")
    insert(database.direct(), "now")
    first = reader.fetch(counting, start, 1000)
    assert ids(first) == ["now"]
    early.commit()
    second = reader.fetch(counting, first.examined, 1000)
    assert ids(second) == ["early"]
    late.commit()
    third = reader.fetch(counting, second.examined, 1000)
    assert ids(third) == ["late"]
    assert ids(reader.fetch(counting, third.examined, 1000)) == []


def test_a_batch_that_failed_is_read_again_as_it_was(database, counting):
    reader, start = MessageReader(build_source()), begin_now(counting)
    insert(database.direct(), "a", "b")
    assert ids(reader.fetch(counting, start, 1000)) == ["a", "b"]
    insert(database.direct(), "c")
    assert ids(reader.fetch(counting, start, 1000)) == ["a", "b"]


def test_a_row_beyond_the_servers_transactions_waits_as_before(database, counting):
    """Restored rows may have ids that this server has not reached."""
    reader, start = MessageReader(build_source()), begin_now(counting)
    other = database.direct()
    insert(other, "restored", "plain")
    other.execute("UPDATE outbox.messages SET transaction_id = '999999999' WHERE message_id = 'restored'")
    assert ids(reader.fetch(counting, start, 1000)) == ["plain"]


@pytest.mark.parametrize("limit", [1000, 7])
def test_a_range_that_is_not_small_is_read_in_pages(database, counting, limit):
    reader, after = MessageReader(build_source()), begin_now(counting)
    expected = [f"m{n}" for n in range(FEW + 1)]
    insert(database.direct(), *expected)
    found: list[str] = []
    while (batch := reader.fetch(counting, after, limit)).messages:
        found, after = found + ids(batch), batch.examined
    assert found == expected


def test_the_lease_is_asked_about_beside_a_read_and_the_answer_counts_for_a_moment(database, counting):
    lease, look = own(counting), LeaseLook(KEY, HOUR)
    reader, start = MessageReader(build_source(), lease_look=look), begin_now(counting)
    insert(database.direct(), "a")
    look.ask(lease)
    assert not look.is_fresh(lease), "nothing was asked yet"
    before = counting.sent
    assert ids(reader.fetch(counting, start, 1000)) == ["a"]
    assert look.is_fresh(lease)
    assert counting.sent - before == 1
    other = outcomes.HeldLease(0, lease.epoch + 1, lease.token)
    assert not look.is_fresh(other)
    time.sleep(FRESH)
    assert not look.is_fresh(lease)


def test_a_lease_that_is_over_is_not_taken_for_ours(database, counting):
    lease, look = own(counting), LeaseLook(KEY, HOUR)
    reader, start = MessageReader(build_source(), lease_look=look), begin_now(counting)
    database.direct().execute("UPDATE outbox.processor_leases SET expires_at = clock_timestamp()")
    look.ask(lease)
    reader.fetch(counting, start, 1000)
    assert not look.is_fresh(lease)


PLACES = [Checkpoint(n, n) for n in (10, 20, 30)]


@pytest.mark.parametrize(
    ("expected", "new", "answer"),
    [
        (PLACES[0], PLACES[1], None),
        (BEGINNING, PLACES[0], StoreAnswer.IGNORED),
        (BEGINNING, PLACES[1], StoreAnswer.AHEAD),
        (PLACES[1], PLACES[2], StoreAnswer.OLDER),
    ],
    ids=["stored", "ignored", "ahead", "older"],
)
def test_a_checkpoint_without_effects_is_stored_in_one_round_trip(database, counting, expected, new, answer):
    lease, runner = own(counting), TransactionRunner(KEY, lease=60.0, timeout=60.0)
    runner.server_run = identity.fetch_run(counting, "outbox")
    assert isinstance(runner.run(counting, lease.epoch, StoreRequest(lease, None, PLACES[0])), outcomes.Stored)
    before = counting.sent
    told = runner.run(counting, lease.epoch, StoreRequest(lease, expected, new))
    if answer is None:
        assert (told, counting.sent - before) == (outcomes.Stored(new, 0), 1)
    else:
        assert told == outcomes.Rejected(answer, expected, new, PLACES[0])
    stored = checkpoints.load(database.direct(), KEY)
    assert stored is not None
    assert stored.pair == (new if answer is None else PLACES[0])
    assert counting.info.transaction_status == psycopg.pq.TransactionStatus.IDLE


@pytest.fixture
def watch(database):
    """What is told of our commits; nothing waits for the log."""
    found = WalWatch(partial(Session(database.files(), "test").another, "waiting"))
    found.note_own("0/0", "0/0")
    yield found
    found.close()


@pytest.mark.parametrize(
    "meanwhile", ["nothing", "a message", "in progress", "one that was in progress", "several units"]
)
def test_a_checkpoint_stored_alone_says_whether_a_look_would_be_in_vain(database, counting, watch, meanwhile):
    """Ids belong to the whole server: only sometimes no other test takes one meanwhile."""
    lease, reader, start = own(counting), MessageReader(build_source()), begin_now(counting)
    direct, writer = database.direct(), database.direct(autocommit=False)
    runner = TransactionRunner(KEY, lease=60.0, timeout=60.0, wal=watch, can_rest=meanwhile != "several units")
    stored: list[Checkpoint] = []

    def is_in_vain() -> bool:
        if meanwhile == "one that was in progress":
            insert(writer, "late")
        insert(direct, "a")
        examined = reader.fetch(counting, stored[-1] if stored else start, 1000).examined
        if meanwhile == "a message":
            insert(direct, "b")
        elif meanwhile == "in progress":
            insert(writer, "late")
        elif meanwhile == "one that was in progress":
            writer.commit()
        request = StoreRequest(lease, stored[-1] if stored else None, examined)
        before = counting.sent
        told = runner.run(counting, lease.epoch, request)
        writer.rollback()
        stored.append(examined)
        assert isinstance(told, outcomes.Stored)
        assert counting.sent - before == 1
        assert watch.take_own() is not told.saw_all, "a look is due unless it would be in vain"
        return told.saw_all

    if meanwhile == "nothing":
        wait_until(is_in_vain, "no other transaction took an id", 30.0)
    else:
        assert not any(is_in_vain() for _ in range(20))


def test_effects_may_store_messages_themselves_so_a_look_is_due_after_them(database, counting, watch):
    lease, reader, start = own(counting), MessageReader(build_source()), begin_now(counting)
    runner = TransactionRunner(KEY, lease=60.0, timeout=60.0, wal=watch, can_rest=True)
    expected, after = None, start
    for _ in range(20):
        insert(database.direct(), "a")
        after = reader.fetch(counting, after, 1000).examined
        told = runner.run(counting, lease.epoch, StoreRequest(lease, expected, after), lambda _: 1)
        assert told == outcomes.Stored(after, 1)
        assert watch.take_own()
        expected = after


@pytest.mark.parametrize("effects", [None, lambda _: 1], ids=["alone", "with effects"])
def test_what_ends_the_statement_behind_commit_leaves_it_unknown(database, counting, watch, monkeypatch, effects):
    """Cancelled by a person while COMMIT waits for the disk: the server commits, and ends what comes next."""
    lease, direct = own(counting), database.direct()
    runner = TransactionRunner(KEY, lease=60.0, timeout=60.0, wal=watch)
    monkeypatch.setattr(transaction, "_COMMIT_AND_PLACE", "COMMIT; SELECT pg_sleep(60)::text, ''")
    ours = (counting.info.backend_pid,)
    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(runner.run, counting, lease.epoch, StoreRequest(lease, None, PLACES[0]), effects)
        wait_until(
            lambda: direct.execute(
                "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE pid = %s AND wait_event = 'PgSleep'", ours
            ).fetchone(),
            "the statement behind COMMIT is cancelled",
        )  # fmt: skip
        doubt = told.result(timeout=30)
    assert isinstance(doubt, outcomes.CommitUnknown)
    assert (doubt.new, doubt.committing, counting.closed) == (PLACES[0], True, False)
    stored = checkpoints.load(direct, KEY)
    assert stored is not None
    assert stored.pair == PLACES[0]


def test_nothing_is_stored_without_the_lease_or_in_another_run_of_the_server(database, counting):
    lease, runner = own(counting), TransactionRunner(KEY, lease=60.0, timeout=60.0)
    request = StoreRequest(lease, None, PLACES[0])
    runner.server_run = str(uuid4())
    assert isinstance(runner.run(counting, lease.epoch, request), outcomes.Failed)
    runner.server_run = identity.fetch_run(counting, "outbox")
    database.direct().execute("UPDATE outbox.processor_leases SET expires_at = clock_timestamp()")
    told = runner.run(counting, lease.epoch, request)
    assert told == outcomes.Rejected(StoreAnswer.NOT_OWNER, None, PLACES[0], None)
    assert checkpoints.load(database.direct(), KEY) is None


def test_while_nothing_comes_a_look_does_not_read(database, counting):
    """An unchanged snapshot says that nothing came; after a few looks in vain it is asked for first."""
    reader, after = MessageReader(build_source()), begin_now(counting)
    for _ in range(3):
        assert reader.fetch(counting, after, 1000).messages == ()
    assert '"outbox"' in counting.last
    assert reader.fetch(counting, after, 1000).messages == ()
    assert '"outbox"' not in counting.last
    insert(database.direct(), "a")
    assert ids(reader.fetch(counting, after, 1000)) == ["a"]
