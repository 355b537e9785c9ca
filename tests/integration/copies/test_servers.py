"""A whole server that is copied, promoted or upgraded: who may go on by himself, and who waits for a person."""

from __future__ import annotations

import contextlib
import signal
import time
from functools import partial
from typing import TYPE_CHECKING

import pytest

from outbox_core.errors import ConfigurationError, TransientError
from outbox_core.progress.checkpoint import BEGINNING, Checkpoint
from outbox_core.report import Reason
from outbox_worker.postgres import identity
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.progress import conflicts
from outbox_worker.postgres.reading.messages import MessageReader
from outbox_worker.postgres.remote_target import forget_source
from tests.integration.cli.conftest import Cli
from tests.integration.moving.conftest import Apart
from tests.support.servers.clone import Clone, Primary
from tests.support.servers.postgres import Database, PgBouncer, build_source, wait_until
from tests.support.servers.restore import next_id, use_up
from tests.support.worker import PICKY_HANDLER, PYTHON_TARGET, SQL_TARGET, Outbox, Workers, build_config

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import psycopg

SOURCE = build_source()
OTHER = {"name": "staging", "uid": "uid-staging"}
COLUMNS = {"position": "position", "transactionId": "transaction_id", "messageId": "message_id",
           "messageType": "message_type", "data": "data"}  # fmt: skip
MAPPED = {"table": {"schemaName": "outbox", "name": "messages", "columns": COLUMNS}}
"""Our own table, as any other."""


@pytest.fixture
def primary() -> Iterator[Primary]:
    server = Primary()
    yield server
    server.stop()


def outbox_on(primary: Primary) -> Outbox:
    """A migrated database of the primary, with its own identity."""
    name = primary.create("outbox_template")
    with primary.connect(name) as connection:
        connection.execute(
            "UPDATE outbox.database_identity SET database_oid = (SELECT oid FROM pg_database "
            "WHERE datname = current_database())"
        )
    return Outbox(Database(primary, name, primary.port))


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    running = Workers(tmp_path)
    yield running
    running.stop()


def either(primary: Primary, standby: Clone, name: str) -> str:
    """Where applications with a standby point: whichever of the two can be written."""
    return (
        f"postgresql://postgres@127.0.0.1:{primary.port},127.0.0.1:{standby.port}/{name}"
        "?target_session_attrs=read-write"
    )


def produce(connection: psycopg.Connection, names: list[str]) -> list[str]:
    for name in names:
        connection.execute(
            "INSERT INTO outbox.messages (message_id, message_type, data) VALUES (%s, 'm', '{\"total\": 1}')", (name,)
        )
    return names


def handled(connection: psycopg.Connection) -> list[str]:
    return [row[0] for row in connection.execute("SELECT message_id FROM handled ORDER BY n").fetchall()]


def cut_off(standby: Clone) -> None:
    with standby.connect("postgres") as there:
        there.execute("ALTER SYSTEM SET primary_conninfo = ''")
        there.execute("SELECT pg_reload_conf()")
        wait_until(lambda: there.execute("SELECT count(*) FROM pg_stat_wal_receiver").fetchone() == (0,), "cut off")


@contextlib.contextmanager
def a_query_at_the_standby_that_keeps_dead_rows_here(primary: Primary, standby: Clone) -> Iterator[None]:
    """hot_standby_feedback: it holds what vacuum may remove, and must not hold what may be read."""
    with standby.connect("postgres") as there, primary.connect("postgres") as here:
        there.execute("ALTER SYSTEM SET hot_standby_feedback = on")
        there.execute("ALTER SYSTEM SET wal_receiver_status_interval = '1s'")
        there.execute("SELECT pg_reload_conf()")
        there.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1")
        held = "SELECT count(*) FROM pg_stat_replication WHERE backend_xmin IS NOT NULL"
        wait_until(lambda: here.execute(held).fetchone() == (1,), "the standby's snapshot holds dead rows")
        yield
        assert here.execute(held).fetchone() == (1,)
        there.execute("ROLLBACK")


def lose_ids(primary: Primary, name: str) -> int:
    """Roll back after the last flush, let a worker look, and crash; return the next id that there was."""
    with primary.connect(name) as admin:
        admin.execute("SET synchronous_commit = on; CREATE TABLE flushed (); DROP TABLE flushed")
    with primary.connect(name, autocommit=False) as idle:
        for _ in range(200):
            idle.execute("SELECT pg_current_xact_id()")
            idle.rollback()
        looked_at = next_id(idle)
    time.sleep(0.5)  # the worker looks, and stores nothing that could be waited for
    primary.kill()
    primary.start()
    return looked_at


def hands_out_again(primary: Primary, name: str, looked_at: int) -> bool:
    with primary.connect(name) as again:
        return next_id(again) < looked_at


def test_transaction_ids_that_a_crash_makes_free_again_hide_no_message(primary: Primary, workers: Workers) -> None:
    """What rolled back need not be on disk: the crashed server hands out its ids again, and a look had passed them."""
    with primary.connect("postgres") as admin:
        admin.execute("ALTER SYSTEM SET wal_writer_delay = '10s'")
        admin.execute("SELECT pg_reload_conf()")
    outbox = outbox_on(primary)
    config = build_config(outbox.database, SQL_TARGET, source={"cursor": "Snapshot"}, delivery={"pollInterval": "10ms"})
    worker = workers.start(config, outbox.database.uri())
    before = outbox.produce(3)
    outbox.wait_handled(before)
    name = outbox.database.name
    outbox.database.close()
    for _ in range(5):  # a heartbeat may have stored something meanwhile, and so what was rolled back too
        worker.wait_state("Active")
        if is_again := hands_out_again(primary, name, lose_ids(primary, name)):
            break
    assert is_again
    with primary.connect(name) as again:
        after = produce(again, ["after"])
        wait_until(lambda: handled(again) == before + after, "it is handled", 30)
    worker.wait_for("they are counted", lambda report: report.handled == 4)


@pytest.mark.parametrize("received", [True, False], ids=["all was received", "the last batches were not received"])
def test_a_worker_goes_on_at_the_promoted_standby(primary, workers, received):
    outbox = outbox_on(primary)
    name = outbox.database.name
    with primary.copied(standby=True) as standby:
        with standby.connect(name) as reading, pytest.raises(TransientError) as refused:
            identity.refuse_standby(reading)
        assert refused.value.reason is Reason.DATABASE_UNAVAILABLE
        workers.start(build_config(outbox.database, SQL_TARGET), either(primary, standby, name))
        with a_query_at_the_standby_that_keeps_dead_rows_here(primary, standby):
            outbox.wait_handled(outbox.produce(20))
        primary.wait_received(standby)
        kept = outbox.handled()
        if not received:
            cut_off(standby)
            outbox.wait_handled(kept + outbox.produce(20, start=20))
        outbox.database.close()
        primary.kill()
        standby.promote()

        with standby.connect(name) as there:
            # Ids that the lost transactions had are handed out again: what the worker remembers means nothing here.
            later = produce(there, [f"later-{number}" for number in range(10)])
            wait_until(lambda: len(handled(there)) >= len(kept) + 10, "the rest is handled", 40)
            assert handled(there) == kept + later, "once each, in order"


@pytest.fixture
def pool(primary: Primary) -> Iterator[PgBouncer]:
    pool = PgBouncer(primary)
    yield pool
    pool.stop()


def test_the_snapshot_of_a_batch_that_fails_is_forgotten_when_a_standby_is_promoted(primary, pool, workers):
    """A pool keeps the connection. Ids that rolled back on the old server are in progress on the new one."""
    outbox = outbox_on(primary)
    name = outbox.database.name
    delivery = {"leaseDuration": "60s", "retry": {"initialBackoff": "3s", "maxBackoff": "3s", "jitter": 0}}
    config = build_config(
        outbox.database, PYTHON_TARGET, source={"cursor": "Snapshot"}, delivery=delivery | {"blocks": "Partition"}
    )
    worker = workers.start(config, outbox.database.uri(port=pool.port), handler=PICKY_HANDLER)
    with primary.copied(standby=True) as standby:
        outbox.wait_handled(outbox.produce(1))
        worker.send(signal.SIGSTOP)
        outbox.connection.execute("SET synchronous_commit = on")
        (failing,) = outbox.produce(1, start=1)
        (worker.directory / "bad").write_text("order-2")
        primary.wait_received(standby)
        cut_off(standby)
        with primary.connect(name) as busy:
            first = next_id(busy)
            use_up(busy, first + 300)
        worker.send(signal.SIGCONT)
        worker.wait_state("Retrying")
        worker.send(signal.SIGSTOP)
        (worker.directory / "bad").unlink()
        outbox.database.close()
        primary.kill()
        standby.promote()

        with standby.connect(name) as there, standby.connect(name) as producer:
            use_up(there, first)
            assert next_id(there) < first + 300, "ids are handed out again"
            with producer.transaction():
                late = produce(producer, ["late"])
                pool.lead_to(standby.port)
                worker.send(signal.SIGCONT)
                wait_until(lambda: failing in handled(there), "the batch that failed is handled", 30)
            wait_until(lambda: late[0] in handled(there), "what was in progress then is handled", 30)
            assert handled(there)[-2:] == [failing, *late]
            assert there.execute("SELECT action FROM outbox.audit_log").fetchall() == [("AdoptTimeline",)]
            assert there.execute("SELECT count(*) FROM outbox.processor_conflicts").fetchone() == (0,)
        report = worker.wait_state("Active")
        assert report.conflicts.open is None


@pytest.mark.parametrize(
    ("source", "cursor", "mode"),
    [
        pytest.param(MAPPED, "TransactionOrder", {}, id="mapped"),
        pytest.param(MAPPED, "Snapshot", {"mode": "Partitioned", "partitions": {"count": 2}}, id="mapped, partitioned"),
        pytest.param({}, "Snapshot", {}, id="ours, Snapshot"),
    ],
)
def test_a_projection_of_a_source_that_lost_messages_waits_for_a_person(
    primary, workers, servers, source, cursor, mode
):
    """Its checkpoint, in another database, passes over the messages that get the lost ones' transaction ids."""
    outbox = outbox_on(primary)
    name = outbox.database.name
    if mode:
        source = {"table": source["table"] | {"columns": COLUMNS | {"partitionKey": "partition_key"}}}
    with servers.database(template="empty_template") as target, primary.copied(standby=True) as standby:
        apart = Apart(outbox, target, workers, cursor)
        worker = apart.start(source_uri=either(primary, standby, name), source=source, delivery=mode)
        kept = outbox.produce(20)
        wait_until(lambda: sorted(apart.handled()) == sorted(kept), "what the standby receives is projected")
        primary.wait_received(standby)
        cut_off(standby)
        lost = produce(outbox.connection, [f"lost-{number}" for number in range(20)])
        wait_until(lambda: sorted(apart.handled()) == sorted(kept + lost), "what it does not receive is projected")
        outbox.database.close()
        primary.kill()
        standby.promote()

        with standby.connect(name) as there:
            if not source:
                there.execute("SELECT outbox.confirm_identity('keep')")
            later = produce(there, [f"later-{number}" for number in range(10)])
            report = worker.wait_state("Unavailable", "SourceDiffers")
            assert "on timeline 1, and" in report.message
            assert "on timeline 2: a promoted standby" in report.message
            assert sorted(apart.handled()) == sorted(kept + lost)
            assert worker.terminate() == 0
            first = there.execute("SELECT transaction_id::text::int8, position FROM outbox.messages "
                                  "WHERE message_id = 'later-0'").fetchone()  # fmt: skip
            assert first is not None
            use_up(there, first[0] + 300)  # a snapshot range waits until its end is reached again
        before = Checkpoint(0, first[1]) if cursor == "Snapshot" else Checkpoint(first[0], 0)
        for partition in range(2 if mode else 1):
            key = ProcessorKey("outbox", "orders", partition)
            rewind = partial(conflicts.rewind, apart.connection, key, before, reason="failover", decided_by="operator")
            wait_until(rewind, "the lease is over, and the checkpoint is moved back")
        assert forget_source(apart.connection, key, reason="failover", decided_by="operator") == 1
        apart.start(source_uri=standby.uri(name), source=source, delivery=mode)
        wait_until(lambda: sorted(apart.handled()) == sorted(kept + lost + later), "the rest is projected")


def test_a_pool_hides_no_failover_of_a_projections_source(primary, pool, workers, servers):
    """The pool keeps the worker's connection, and leads it to the promoted standby."""
    outbox = outbox_on(primary)
    name = outbox.database.name
    with servers.database(template="empty_template") as target, primary.copied(standby=True) as standby:
        apart = Apart(outbox, target, workers)
        uri = outbox.database.uri(port=pool.port)
        worker = apart.start(source_uri=uri, source=MAPPED, delivery={"leaseDuration": "60s"})
        kept = outbox.produce(5)
        apart.wait_handled(kept)
        primary.wait_received(standby)
        cut_off(standby)
        lost = produce(outbox.connection, [f"lost-{number}" for number in range(20)])
        apart.wait_handled(kept + lost)
        worker.wait_state("Active", "Idle")
        worker.send(signal.SIGSTOP)
        outbox.database.close()
        primary.kill()
        standby.promote()
        with standby.connect(name) as there:
            produce(there, ["later"])
        pool.lead_to(standby.port)
        worker.send(signal.SIGCONT)
        worker.wait_state("Unavailable", "SourceDiffers")
        assert apart.handled() == kept + lost


@pytest.mark.nightly
def test_a_base_backup_run_as_another_system_runs_nothing_until_a_person_says_what_it_is(primary, workers, tmp_path):
    outbox = outbox_on(primary)
    name = outbox.database.name
    worker = workers.start(build_config(outbox.database, SQL_TARGET), primary.uri(name))
    outbox.wait_handled(outbox.produce(5))
    with primary.copied(standby=True) as copy:
        copy.promote()
        staging = build_config(outbox.database, SQL_TARGET, resource=OTHER)
        stranger = workers.start(staging, copy.uri(name))
        new = workers.start(
            build_config(outbox.database, SQL_TARGET, resource=OTHER, processor_id="new"), copy.uri(name)
        )

        report = stranger.wait_state("Unavailable", "DatabaseCopied")
        assert "timeline 2" in report.message
        new.wait_state("Unavailable", "DatabaseCopied")
        (tmp_path / "secret").mkdir()
        (tmp_path / "secret" / "uri").write_text(copy.uri(name))
        assert Cli(tmp_path / "secret").run("confirm-identity", "renew").returncode == 0
        with copy.connect(name) as there:
            produce(there, ["copy"])
            wait_until(lambda: handled(there)[5:] != [], "the copy has an owner of its own")
            stranger.wait_state("Active")
            new.wait_state("Active")
        assert worker.report().state == "Active"
    outbox.wait_handled(outbox.handled() + outbox.produce(1, start=9))
    outbox.database.close()


@pytest.mark.nightly
def test_a_base_backup_without_a_timeline_of_its_own_is_kept_by_the_originals_claim(primary, workers):
    outbox = outbox_on(primary)
    name = outbox.database.name
    workers.start(build_config(outbox.database, SQL_TARGET), primary.uri(name))
    outbox.wait_handled(outbox.produce(5))
    with primary.copied(standby=False) as copy:
        stranger = workers.start(build_config(outbox.database, SQL_TARGET, resource=OTHER), copy.uri(name))
        assert "test/shop/orders owns this processorId" in stranger.wait_state("ClaimRefused", "ClaimHeld").message
    outbox.database.close()


@pytest.mark.nightly
def test_an_upgraded_server_keeps_its_ids_and_waits_for_keep(tmp_path):
    old = Primary("14")
    try:
        outbox = outbox_on(old)
        name = outbox.database.name
        ids = outbox.produce(5)
        reached = next_id(outbox.connection)
        outbox.database.close()
        with old.upgraded() as new, new.connect(name) as connection:
            assert next_id(connection) >= reached
            with pytest.raises(ConfigurationError, match="it was copied, restored or moved") as refused:
                identity.check_identity(connection, SOURCE)
            assert refused.value.reason is Reason.DATABASE_COPIED
            (tmp_path / "uri").write_text(new.uri(name))
            cli = Cli(tmp_path)
            assert "nothing to repair" in cli.run("repair", "--dry-run").stdout
            assert cli.run("confirm-identity", "keep").returncode == 0
            identity.check_identity(connection, SOURCE)
            batch = MessageReader(SOURCE).fetch(connection, BEGINNING, 9)
            assert [message.message_id for message in batch] == ids
    finally:
        old.stop()
