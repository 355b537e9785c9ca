"""A worker looks for messages when the server wrote something, and polls where it cannot know that."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import pytest

from outbox_core.processor import outcomes
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.reading.wal_watch import LONGEST, WalWatch
from outbox_worker.postgres.transactions.transaction import TransactionRunner
from outbox_worker.session import Session
from tests.support.servers.postgres import POOLED, VERSIONS, mostly_nightly, wait_until
from tests.support.worker import PYTHON_HANDLER, PYTHON_TARGET, SQL_TARGET, build_config

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.servers.postgres import Database, Servers
    from tests.support.worker import Outbox, Workers

RARELY = {"pollInterval": "20s"}
DIVIDED = {"mode": "Partitioned", "partitions": {"count": 4}}
COMPETING = {"mode": "Competing", "competing": {}}
WAITING = (
    "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND query LIKE '%pg_current_wal_insert_lsn()%' "
    "AND pid <> pg_backend_pid()"
)
KEPT_WAITING = f"{WAITING} AND clock_timestamp() - query_start > interval '500 ms'"

INSERT = (
    "INSERT INTO outbox.messages (publication_id, partition_key, message_id, message_type, data) "
    "VALUES ('shop', 'a', gen_random_uuid()::text, 'OrderPlaced', '{}')"
)
PLACE = "SELECT pg_current_wal_insert_lsn()::text, pg_current_wal_flush_lsn()::text"
KEY = ProcessorKey("outbox", "orders", 0)


@pytest.fixture(params=mostly_nightly(*VERSIONS))
def watch(servers: Servers, request: pytest.FixtureRequest) -> Iterator[tuple[WalWatch, Database]]:
    """What waits for messages of a fresh database, and the database."""
    with servers.database(request.param) as database:
        found = WalWatch(partial(Session(database.files(), "test").another, "waiting"))
        yield found, database
        found.close()


def await_news(watch: WalWatch, seconds: float = 2 * LONGEST) -> int | None:
    """Wait as the loop does; None: nothing was written."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        watch.begin()
        if (useless := watch.take()[0]) is not None:
            return useless
        time.sleep(0.0005)
    return None


def settle(watch: WalWatch) -> None:
    """Wait until the server writes nothing by itself."""
    wait_until(lambda: await_news(watch) is None, "the log rests", 30.0)


def write(database: Database) -> None:
    database.direct().execute(INSERT)


def test_a_commit_ends_the_wait(watch):
    waiting, database = watch
    settle(waiting)

    def is_looked_at_often() -> bool:
        """Said of a log that rests; the server may write something by itself just then."""
        waiting.found = True
        return await_news(waiting, LONGEST) is None

    wait_until(is_looked_at_often, "the log rests", 30.0)
    began = time.monotonic()
    write(database)
    assert await_news(waiting) is not None
    assert time.monotonic() - began < LONGEST / 2, "the statement ended by itself"


def test_looks_in_vain_are_counted_until_something_is_found_or_the_log_rests(watch):
    waiting, database = watch
    settle(waiting)
    counted: list[int | None] = []
    for _ in range(3):
        write(database)
        counted.append(await_news(waiting))
    assert counted[0] == 0
    known = [each for each in counted if each is not None]
    assert len(known) == 3
    assert known == sorted(set(known)), "an insert and its commit may be told as two"
    waiting.found = True
    write(database)
    assert await_news(waiting) == 0
    settle(waiting)
    write(database)
    assert await_news(waiting) == 0


def test_what_is_written_between_two_waits_is_seen(watch):
    waiting, database = watch
    settle(waiting)
    write(database)
    assert await_news(waiting) is not None
    write(database)  # while nothing waits
    time.sleep(0.05)
    assert await_news(waiting, LONGEST / 2) is not None


@pytest.mark.parametrize("under_way", [True, False], ids=["a statement waits", "none waits"])
def test_a_commit_of_ours_is_no_news_and_what_follows_it_is(watch, under_way):
    waiting, database = watch
    ours = database.direct()
    ours.execute("SET synchronous_commit = on")  # or the flush, later, would be news

    def is_no_news() -> bool:
        """Said of one commit; the server may write something by itself just then."""
        settle(waiting)
        if under_way:
            assert waiting.begin() is not None
        ours.execute(INSERT)
        waiting.note_own(*(ours.execute(PLACE).fetchone() or ("", "")))
        assert [waiting.take_own() for _ in range(2)] == [True, False], "one look is due"
        return await_news(waiting, LONGEST / 4) is None

    wait_until(is_no_news, "a commit of ours is no news", 30.0)
    ours.execute(INSERT)
    assert await_news(waiting) == 0


def test_a_transaction_of_the_worker_says_where_the_log_is_after_it(watch):
    waiting, database = watch
    connection = database.connect(autocommit=True)
    runner = TransactionRunner(KEY, lease=60.0, timeout=60.0, wal=waiting)
    runner.run(connection, 1, None)
    assert not waiting.take_own(), "not before this server has told it once"
    settle(waiting)
    assert isinstance(runner.run(connection, 1, None), outcomes.Stored)
    assert waiting.take_own()


def test_a_lost_session_is_silent_and_is_not_made_again_at_once(watch):
    waiting, database = watch
    settle(waiting)
    assert waiting.begin() is not None
    database.direct().execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'test waiting'"
    )
    wait_until(lambda: waiting.take()[0] is None and waiting.begin() is None, "it pauses", 5.0)


def has_handled(outbox: Outbox, count: int) -> bool:
    return outbox.count() == count


@pytest.mark.parametrize(
    "delivery", [RARELY, RARELY | DIVIDED, RARELY | COMPETING], ids=["ordered", "partitioned", "competing"]
)
def test_a_message_does_not_wait_for_the_poll(delivery, outbox: Outbox, workers: Workers):
    config = build_config(outbox.database, PYTHON_TARGET, delivery=delivery)
    worker = workers.start(config, outbox.database.uri(), handler=PYTHON_HANDLER)
    worker.wait_state("Active")
    for handled in range(3):
        time.sleep(3.0)  # the next look is seconds away by now
        began = time.monotonic()
        outbox.produce(1, start=handled)
        wait_until(partial(has_handled, outbox, handled + 1), "the message is handled", 20.0)
        assert time.monotonic() - began < 1.0


def test_while_the_server_writes_nothing_the_poll_is_rare(outbox: Outbox, workers: Workers):
    config = build_config(outbox.database, SQL_TARGET, delivery={"pollInterval": "100ms", "leaseDuration": "60s"})
    worker = workers.start(config, outbox.database.uri())
    worker.wait_state("Active")
    outbox.wait_handled(outbox.produce(3))
    time.sleep(3.0)
    before = count_scans(outbox)
    time.sleep(8.0)
    assert count_scans(outbox) - before < 30, "a poll every 100 ms would be 80"
    outbox.wait_handled([f"message-{n}" for n in range(1, 4)] + outbox.produce(2, start=3), seconds=1.0)


def test_a_checkpoint_beside_which_nothing_else_was_committed_is_followed_by_no_look(outbox: Outbox, workers: Workers):
    config = build_config(outbox.database, {"log": {}}, delivery=RARELY, source={"cursor": "Snapshot"})
    worker = workers.start(config, outbox.database.uri())
    worker.wait_state("Active")
    outbox.produce(5)
    time.sleep(3.0)
    before = count_scans(outbox)
    for number in range(80):
        outbox.produce(1, start=5 + number)
        time.sleep(0.05)
    worker.wait_for("all are handled", lambda report: report.handled == 85, 20.0)
    time.sleep(3.0)
    assert count_scans(outbox) - before < 150, "with two for each message, and the observer's, it would be 190"


def count_scans(outbox: Outbox) -> int:
    """How often an index of the outbox was asked, as far as sessions have told: they do so every second or two."""
    row = outbox.connection.execute(
        "SELECT idx_scan FROM pg_stat_user_tables WHERE relid = 'outbox.messages'::regclass"
    ).fetchone()
    assert row is not None
    return int(row[0])


def test_a_worker_whose_waiting_session_ends_polls_and_says_nothing(outbox: Outbox, workers: Workers):
    config = build_config(outbox.database, SQL_TARGET)
    worker = workers.start(config, outbox.database.uri())
    worker.wait_state("Active")
    wait_until(lambda: outbox.connection.execute(WAITING).fetchone() == (1,), "a session waits", 10.0)
    told = worker.log()
    outbox.connection.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE '% waiting'"
    )
    outbox.wait_handled(outbox.produce(3))
    assert outbox.connection.execute(WAITING).fetchone() == (0,)
    assert "terminat" not in worker.log().removeprefix(told)
    assert worker.report().state == "Active"


@pytest.mark.parametrize("each_database", [POOLED], indirect=True)
def test_behind_a_pooler_no_session_is_kept_waiting(each_database: Database, workers: Workers):
    looking = each_database.direct()
    looking.execute("CREATE TABLE handled (n serial PRIMARY KEY, message_id text, total int)")
    worker = workers.start(build_config(each_database, SQL_TARGET), each_database.uri())
    worker.wait_state("Active")
    until = time.monotonic() + 3.0
    while time.monotonic() < until:
        assert looking.execute(KEPT_WAITING).fetchone() == (0,)
        time.sleep(0.01)
    write(each_database)
    wait_until(
        lambda: looking.execute("SELECT count(*) FROM handled").fetchone() == (1,), "the message is handled", 10.0
    )
