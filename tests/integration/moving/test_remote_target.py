"""A projection into another database: effects, checkpoint and owner there; the source is only read."""

from __future__ import annotations

import os
import random
import signal
from functools import partial

import pytest

from outbox_core.progress.checkpoint import Checkpoint
from outbox_core.progress.snapshot import parse_snapshot
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.progress import checkpoints, conflicts
from outbox_worker.postgres.remote_target import forget_source
from tests.integration.moving.conftest import BOTH, STATEMENT, Apart
from tests.support.nightly import at_night
from tests.support.servers.postgres import POOLED, wait_until
from tests.support.servers.proxy import CommitCutter, Cut, Relay
from tests.support.worker import SQL_TARGET, HandlerGate, Outbox, build_config

HANDLER = """
import pathlib, time
def handle(batch, connection):
    with connection.cursor() as cursor:
        cursor.executemany(
            "INSERT INTO seen (message_id, total) VALUES (%s, %s)", [(m.message_id, m.json()["total"]) for m in batch]
        )
    while pathlib.Path("hold").exists():
        pathlib.Path("entered").touch()
        time.sleep(0.01)
"""
PYTHON = {"python": {"module": "orders", "function": "handle", "configMapRef": {"name": "handlers"}}}


def has_rows(connection, table, count):
    return connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (count,)


def has_seen(apart, count):
    return len(apart.handled()) >= count


def wait_examined(apart):
    """The checkpoint says so of the last message there is."""
    wait_until(lambda: apart.has_examined(apart.outbox.last()), "the checkpoint is at the last message")


def kept_in_the_source(apart):
    return apart.outbox.connection.execute(
        "SELECT (SELECT count(*) FROM outbox.processor_checkpoints), (SELECT count(*) FROM outbox.processor_claims), "
        "(SELECT count(*) FROM outbox.processor_leases)"
    ).fetchone()


@pytest.mark.parametrize(
    ("target", "checkpoint", "cursor"),
    [
        pytest.param(None, "AfterHandling", "TransactionOrder", id="sql"),
        pytest.param(None, "BeforeHandling", "TransactionOrder", id="sql, checkpoint first", marks=pytest.mark.nightly),
        pytest.param(PYTHON, "AfterHandling", "TransactionOrder", id="python", marks=pytest.mark.nightly),
        pytest.param(PYTHON, "BeforeHandling", "TransactionOrder", id="python, checkpoint first"),
        pytest.param(None, "BeforeHandling", "Snapshot", id="sql, checkpoint first, Snapshot"),
        pytest.param(PYTHON, "AfterHandling", "Snapshot", id="python, Snapshot"),
    ],
    indirect=["cursor"],
)
def test_each_message_once_in_order(apart, target, checkpoint):
    first = apart.outbox.produce(2500)
    worker = apart.start(target=target, handler=HANDLER, delivery={"checkpoint": checkpoint})
    apart.wait_handled(first)
    second = apart.outbox.produce(3, start=2500)
    apart.wait_handled(first + second)
    wait_examined(apart)
    report = worker.wait_for("everything is stored", lambda r: r.checkpoints[0].pair == apart.stored())
    assert (report.handled, report.start_from_used) == (2503, True)
    worker.wait_for("the source is observed", lambda r: r.lag is not None and r.high_water_mark is not None)
    assert worker.terminate() == 0
    assert kept_in_the_source(apart) == (0, 0, 0)


def test_the_batch_looks_the_same_as_in_the_source(outbox, apart):
    """Every column of the relation, by the same statement run in both databases."""
    columns = (
        "position, transaction_id, message_id, message_type, publication_id, partition_key, data, metadata, scheduled, "
        "ordinal"
    )
    statement = f"INSERT INTO whole SELECT {columns} FROM batch WHERE '%s $1' <> '' ORDER BY transaction_id, position"
    table = (
        "CREATE TABLE whole (position bigint, transaction_id xid8, message_id text, message_type text, "
        "publication_id text, partition_key text, data jsonb, metadata jsonb, scheduled timestamptz, ordinal bigint)"
    )
    for connection in (outbox.connection, apart.connection):
        connection.execute(table)
    outbox.connection.execute(
        """INSERT INTO outbox.messages (message_type, publication_id, partition_key, data, metadata, scheduled) VALUES
           ('Größe "x"', 'shop', NULL, '{"a": 1.50,
             "t": "line\\nfeed \\" quote \\\\ back", "u": "\\u00e9\\ud83d\\ude00"}', NULL,
            '2026-02-03 04:05:06.123456+00'),
           ('}], "t": "1"', 'x''y', 'k"ey', '[1e400, -0.000000000000000000000001, null]', '{"m": []}',
             '0001-02-03 00:00Z'),
           ('B', 'shop', 'k', '"}, {"', '3', now())"""
    )
    apart.workers.start(build_config(outbox.database, {"sql": {"statement": statement}}), outbox.database.uri())
    apart.start(statement=statement)
    rows = []
    for connection in (outbox.connection, apart.connection):
        wait_until(partial(has_rows, connection, "whole", 3), "all three are there")
        rows.append(connection.execute("SELECT w::text FROM whole w ORDER BY transaction_id, position").fetchall())
    assert rows[0] == rows[1]


def test_a_batch_is_two_statements_however_large(apart):
    """Fixed by the batch, never by the message: BEGIN, the user's statement, the store, COMMIT."""
    ids = apart.outbox.produce(300)
    apart.target.direct().execute(f"ALTER DATABASE \"{apart.target.name}\" SET log_statement = 'all'")
    log = apart.target.server._daemon.directory / "log"
    before = len(log.read_text())
    apart.start(delivery={"batchSize": 300})
    apart.wait_handled(ids)
    inserts = [line for line in log.read_text()[before:].splitlines() if "INSERT INTO seen" in line]
    assert len(inserts) == 1


def test_through_pgbouncer(servers, workers):
    with servers.database(POOLED) as source, servers.database(POOLED, template="empty_template") as target:
        apart = Apart(Outbox(source), target, workers)
        ids = apart.outbox.produce(500)
        worker = apart.start(delivery={"batchSize": 50})
        apart.wait_handled(ids)
        assert worker.terminate() == 0
        assert apart.has_examined(apart.outbox.last())


@BOTH
def test_the_source_needs_only_rights_to_read(apart):
    """The grants of docs/moving.md, and no more."""
    ids = apart.outbox.produce(20)
    apart.outbox.connection.execute(
        "GRANT USAGE ON SCHEMA outbox TO stranger; "
        "GRANT SELECT ON outbox.messages, outbox.database_identity TO stranger; "
        "GRANT EXECUTE ON FUNCTION outbox.current_timeline() TO stranger"
    )
    writing = apart.outbox.connection.execute(
        "SELECT c.relname FROM pg_class AS c WHERE c.relnamespace = 'outbox'::regnamespace AND c.relkind IN ('r', 'p') "
        "AND has_table_privilege('stranger', c.oid, 'INSERT, UPDATE, DELETE, TRUNCATE') UNION ALL "
        "SELECT s.relname FROM pg_class AS s WHERE s.relnamespace = 'outbox'::regnamespace "
        "AND CASE s.relkind WHEN 'S' THEN has_sequence_privilege('stranger', s.oid, 'USAGE, UPDATE') END"
    ).fetchall()
    assert writing == []
    assert not apart.outbox.connection.execute(
        "SELECT has_schema_privilege('stranger', 'outbox', 'CREATE') OR "
        "has_database_privilege('stranger', current_database(), 'CREATE')"
    ).fetchone()[0]
    worker = apart.start(source_uri=apart.outbox.database.uri("stranger"))
    apart.wait_handled(ids)
    worker.wait_for("the source is observed", lambda r: r.lag is not None and r.lag.messages == 0)
    wait_examined(apart)
    assert worker.terminate() == 0
    assert kept_in_the_source(apart) == (0, 0, 0)


def test_a_source_without_the_right_to_read_is_refused_with_the_remedy(apart):
    worker = apart.start(source_uri=apart.outbox.database.uri("stranger"))
    report = worker.wait_state("Unavailable")
    assert report.reason in ("SchemaMissing", "PermissionDenied")
    assert "outbox" in report.message


def test_a_mapped_table_beside_which_nothing_is_ours(servers, workers):
    with servers.database(template="empty_template") as source, servers.database(template="empty_template") as target:
        connection = source.direct()
        connection.execute(
            "CREATE TABLE log (seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, "
            "xid xid8 NOT NULL DEFAULT pg_current_xact_id(), id text, kind text, body text); "
            "CREATE INDEX ON log (xid, seq); "
            "INSERT INTO log (id, kind, body) "
            "SELECT 'message-' || n, 'K', '{\"total\": 1}' FROM generate_series(1, 9) n"
        )
        columns = {"position": "seq", "transactionId": "xid", "messageId": "id", "messageType": "kind", "data": "body"}
        table = {"schemaName": "public", "name": "log", "columns": columns}
        target.direct().execute("CREATE TABLE seen (n serial PRIMARY KEY, message_id text, total int, pair text)")
        config = build_config(
            source, {"sql": {"statement": STATEMENT, "connection": {"secretRef": {"name": "x"}}}},
            source={"table": table},
        )  # fmt: skip
        workers.start(config, source.uri(), target=target.uri())
        looking = target.direct()
        wait_until(lambda: looking.execute("SELECT count(*) FROM seen").fetchone() == (9,), "all are projected")
        assert source.direct().execute("SELECT to_regnamespace('outbox')").fetchone() == (None,)


@BOTH
def test_partitioned(apart):
    ids = apart.outbox.produce(700)
    workers = [
        apart.start(delivery={"mode": "Partitioned", "partitions": {"count": 4}, "batchSize": 40}) for _ in range(2)
    ]
    wait_until(lambda: len(apart.handled()) >= len(ids), "all are projected")
    assert sorted(apart.handled()) == sorted(ids)
    numbers = [int(each.removeprefix("message-")) for each in apart.handled()]
    for key in range(7):
        of_key = [n for n in numbers if n % 7 == key]
        assert of_key == sorted(of_key)
    assert all(worker.terminate() == 0 for worker in workers)


class TestTheCheckpointKnowsItsSource:
    def test_another_source_is_refused(self, apart, servers):
        ids = apart.outbox.produce(5)
        worker = apart.start()
        apart.wait_handled(ids)
        worker.terminate()
        with servers.database() as other:
            other.direct().execute(
                "INSERT INTO outbox.messages (message_type, data) SELECT 'X', '{}' FROM generate_series(1, 9)"
            )
            second = apart.start(source_uri=other.uri())
            report = second.wait_state("Unavailable", "SourceDiffers")
            assert apart.outbox.database.name in report.message
            assert other.name in report.message
            assert second.report().lease is None
        assert apart.handled() == ids

    def test_a_checkpoint_of_the_database_itself_is_not_taken_for_one_of_another(self, apart, servers):
        """The connection was added to a resource that had run without: its pairs are of the target's own messages."""
        with servers.database() as target:
            own = Outbox(target)
            ids = own.produce(3)
            first = apart.workers.start(build_config(target, SQL_TARGET), target.uri())
            own.wait_handled(ids)
            first.terminate()
            worker = apart.start(target_uri=target.uri())
            report = worker.wait_state("Unavailable", "SourceDiffers")
            assert "the database of its checkpoint" in report.message
            assert own.handled() == ids

    def test_a_checkpoint_of_another_database_is_not_taken_for_one_of_this(self, apart):
        ids = apart.outbox.produce(3)
        worker = apart.start()
        apart.wait_handled(ids)
        worker.terminate()
        second = apart.workers.start(build_config(apart.target, {"sql": {"statement": STATEMENT}}), apart.target.uri())
        report = second.wait_state("Unavailable", "SourceDiffers")
        assert apart.handled() == ids
        assert report.lease is None
        assert apart.connection.execute(
            "SELECT count(*) FROM outbox.processor_leases WHERE expires_at > clock_timestamp()"
        ).fetchone() == (0,)

    def test_a_source_that_a_former_version_wrote_down_without_its_timeline_is_the_same(self, apart):
        ids = apart.outbox.produce(3)
        worker = apart.start()
        apart.wait_handled(ids)
        worker.terminate()
        written = apart.connection.execute("SELECT source FROM outbox.processor_sources").fetchone()
        apart.connection.execute("UPDATE outbox.processor_sources SET source = split_part(source, '/timeline-', 1)")
        apart.start()
        apart.wait_handled(ids + apart.outbox.produce(2, start=3))
        assert apart.connection.execute("SELECT source FROM outbox.processor_sources").fetchone() == written

    def test_a_target_that_is_a_copy_runs_nothing(self, apart):
        ids = apart.outbox.produce(3)
        worker = apart.start()
        apart.wait_handled(ids)
        worker.terminate()
        apart.connection.execute("UPDATE outbox.database_identity SET database_oid = 1")
        apart.start().wait_state("Unavailable", "DatabaseCopied")
        assert apart.handled() == ids


@pytest.mark.parametrize("cursor", ["TransactionOrder", *at_night("Snapshot")], indirect=True)
def test_killed_again_and_again_nothing_is_lost_or_doubled(apart):
    seed = int(os.environ.get("OUTBOX_SEED", "0")) or random.randrange(1 << 30)
    chance = random.Random(seed)
    print("seed", seed)
    ids: list[str] = []
    for _ in range(int(os.environ.get("OUTBOX_KILLS", "5"))):
        worker = apart.start(delivery={"batchSize": 20})
        ids += apart.outbox.produce(400, start=len(ids))
        at = len(apart.handled()) + chance.randrange(1, 200)
        wait_until(partial(has_seen, apart, min(at, len(ids))), f"{at} messages are projected")
        worker.kill()
    apart.start()
    apart.wait_handled(ids)
    wait_examined(apart)
    (pair,) = apart.connection.execute("SELECT pair FROM seen ORDER BY n DESC LIMIT 1").fetchone()
    assert pair == apart.outbox.last()
    assert apart.handled() == ids


@BOTH
def test_a_frozen_owner_cannot_commit_in_the_other_database(apart):
    ids = apart.outbox.produce(10)
    home = apart.prepare(target=PYTHON, handler=HANDLER)
    gate = HandlerGate(home)
    gate.close()
    owner = apart.workers.launch(home, pod="pod-a")
    gate.wait_entered()
    second = apart.start(pod="pod-b")
    second.wait_state("Standby")
    owner.send(signal.SIGSTOP)
    apart.wait_handled(ids)
    gate.open()
    owner.send(signal.SIGCONT)
    owner.wait_state("Standby", "LeaseHeld")
    more = apart.outbox.produce(5, start=10)
    apart.wait_handled(ids + more)
    wait_examined(apart)
    assert apart.handled() == ids + more


def test_a_range_ends_at_the_last_message_not_at_what_a_crash_of_the_source_would_take_back(apart):
    """Ids of transactions that rolled back, or wrote no message, may be handed out again when it has crashed."""
    apart.cursor = "Snapshot"
    ids = apart.outbox.produce(5)
    (last,) = apart.outbox.connection.execute("SELECT max(transaction_id::text::int8) FROM outbox.messages").fetchone()
    worker = apart.start()
    apart.wait_handled(ids)
    for _ in range(3):
        with apart.outbox.database.direct(autocommit=False) as lost:
            lost.execute("INSERT INTO outbox.messages (message_type, data) VALUES ('Lost', '{}')")
            lost.rollback()
    wait_examined(apart)
    assert worker.terminate() == 0
    (lower,) = apart.connection.execute("SELECT lower_snapshot::text FROM outbox.processor_checkpoints").fetchone()
    assert parse_snapshot(lower).xmax == last + 1
    more = apart.outbox.produce(2, start=5)
    apart.start()
    apart.wait_handled(ids + more)


@BOTH
@pytest.mark.parametrize("cut", [Cut.BEFORE, Cut.AFTER], ids=["not committed", "committed"])
def test_a_commit_without_an_answer_is_settled(apart, cut):
    cutter = CommitCutter(apart.target.server.port)
    try:
        worker = apart.start(target_uri=cutter.uri(apart.target.uri()))
        worker.wait_state("Active")
        cutter.arm(cut, after=b"INSERT INTO seen", once=True)
        ids = apart.outbox.produce(30)
        apart.wait_handled(ids)
        assert cutter.cuts == 1
        more = apart.outbox.produce(3, start=30)
        apart.wait_handled(ids + more)
        assert worker.report().conflicts.count == 0
    finally:
        cutter.close()


@pytest.fixture
def relays(apart):
    found = [Relay(apart.outbox.database.server.port), Relay(apart.target.server.port)]
    yield found
    for relay in found:
        relay.close()


def started(apart, relays, **fields):
    source, target = relays
    ids = apart.outbox.produce(10)
    worker = apart.start(
        source_uri=source.uri(apart.outbox.database.uri()), target_uri=target.uri(apart.target.uri()), **fields
    )
    apart.wait_handled(ids)
    return worker, ids


@pytest.mark.parametrize("which", ["source", "target"])
def test_a_database_that_is_down_is_named_and_waited_for(apart, relays, which):
    worker, ids = started(apart, relays, delivery={"leaseDuration": "15s"})  # on a busy machine 2 s are soon over
    relay = relays[which == "target"]
    relay.cut()
    worker.wait_for(
        "the outage is told",
        lambda r: (
            (r.state, r.reason) == ("Unavailable", "DatabaseUnavailable") and f"the {which}'s database" in r.message
        ),
    )
    ids += apart.outbox.produce(10, start=10)
    relay.heal()
    apart.wait_handled(ids)
    worker.wait_state("Active")
    assert worker.report().conflicts.count == 0


def test_a_source_that_does_not_answer_costs_no_lease(apart, relays):
    """The heartbeat is in the target's database, and must not wait for the other."""
    worker, ids = started(apart, relays)
    epoch = worker.wait_for("it owns", lambda r: r.lease is not None and r.lease.held).lease.epoch
    second = apart.start(pod="pod-b")
    second.wait_state("Standby")
    relays[0].hang()
    apart.connection.execute("CREATE TEMPORARY TABLE renewals (at timestamptz)")

    def renewed_often():
        apart.connection.execute("INSERT INTO renewals SELECT renewed_at FROM outbox.processor_leases")
        (count,) = apart.connection.execute("SELECT count(DISTINCT at) FROM renewals").fetchone()
        return count > 5

    wait_until(renewed_often, "the lease is renewed for longer than it lasts")
    relays[0].heal()
    ids += apart.outbox.produce(10, start=10)
    apart.wait_handled(ids)
    assert apart.connection.execute("SELECT epoch FROM outbox.processor_leases").fetchone() == (epoch,)


@pytest.mark.parametrize(
    ("mode", "cursor"),
    [
        pytest.param({"mode": "Partitioned", "partitions": {"count": 2}}, "TransactionOrder", id="partitioned"),
        pytest.param({}, "TransactionOrder", id="ordered"),
        pytest.param({"mode": "Partitioned", "partitions": {"count": 2}}, "Snapshot", id="partitioned, Snapshot"),
    ],
    indirect=["cursor"],
)
def test_a_failing_message_blocks_its_key_only_and_is_held_where_the_checkpoint_is(apart, mode):
    """Each batch has a message that fails, and but for the first also some that wait behind an earlier one."""
    apart.connection.execute("ALTER TABLE seen ADD CONSTRAINT refused CHECK (message_id NOT IN ('m2', 'm13', 'm24'))")
    apart.outbox.connection.execute(
        "INSERT INTO outbox.messages (partition_key, message_id, message_type, data) "
        "SELECT 'key-' || n % 5, 'm' || n, 'Größe', jsonb_build_object('total', n) FROM generate_series(0, 29) AS n"
    )
    retry = {"maxAttempts": 1000, "initialBackoff": "50ms", "maxBackoff": "100ms"}
    worker = apart.start(delivery={"blocks": "Key", "batchSize": 10, "retry": retry} | mode)
    waiting = {f"m{n}" for failed in (2, 13, 24) for n in range(failed, 30, 5)}
    free = {f"m{n}" for n in range(30)} - waiting
    wait_until(lambda: set(apart.handled()) == free, "the other keys are projected")
    worker.wait_for(
        "three keys wait",
        lambda r: r.failures is not None and (r.failures.held, len(r.failures.blocked_keys)) == (len(waiting), 3),
    )
    assert has_rows(apart.outbox.connection, "outbox.held_messages", 0)
    apart.connection.execute("ALTER TABLE seen DROP CONSTRAINT refused")
    wait_until(lambda: has_seen(apart, 30), "what was held is projected")
    handled = apart.handled()
    for key in range(5):
        of_key = [name for name in handled if int(name[1:]) % 5 == key]
        assert of_key == [f"m{n}" for n in range(key, 30, 5)]
    wait_until(partial(has_rows, apart.connection, "outbox.held_messages", 0), "nothing is held")


def test_a_source_whose_ids_were_rebased_is_refused_until_a_person_names_the_new_pair(apart):
    ids = apart.outbox.produce(10)
    worker = apart.start()
    apart.wait_handled(ids)
    assert worker.terminate() == 0
    # As `outbox repair` leaves it: other ids in the same order, the same positions.
    source = apart.outbox.connection
    source.execute("UPDATE outbox.messages SET transaction_id = '5'")
    source.execute("UPDATE outbox.database_identity SET rebased = rebased + 1")
    more = apart.outbox.produce(3, start=10)

    worker = apart.start()

    report = worker.wait_state("Unavailable", "SourceDiffers")
    assert "rebased by `outbox repair`" in report.message
    assert apart.handled() == ids
    key = ProcessorKey("outbox", "orders")
    stored = checkpoints.load(apart.connection, key)
    assert stored is not None
    pair = Checkpoint(5, stored.pair.position)
    assert conflicts.rewind(apart.connection, key, pair, reason="rebased", decided_by="somebody")
    assert forget_source(apart.connection, key, reason="rebased", decided_by="somebody") == 1
    apart.wait_handled(ids + more)


@BOTH
def test_a_message_of_nulls_is_carried_and_can_be_kept(outbox, apart, cursor):
    for column in ("message_type", "publication_id", "data", "scheduled"):
        outbox.connection.execute(f"ALTER TABLE outbox.messages ALTER {column} DROP NOT NULL")
    outbox.connection.execute(
        "INSERT INTO outbox.messages (message_id, message_type, publication_id, data, scheduled) "
        "VALUES ('none', NULL, NULL, NULL, NULL), ('bad', NULL, NULL, NULL, NULL), ('some', 't', 'p', '{}', now())"
    )
    statement = (
        "INSERT INTO seen (message_id, pair, total) "
        "SELECT message_id, concat_ws(',', message_type, publication_id, data, extract(year FROM scheduled) > 2000), "
        "CASE WHEN message_id = 'bad' THEN message_id::int END FROM batch ORDER BY ordinal"
    )
    retry = {"maxAttempts": 2, "initialBackoff": "50ms", "maxBackoff": "50ms"}
    apart.start(statement=statement, delivery={"blocks": "Nothing", "whenExhausted": "DeadLetter", "retry": retry})
    dead = "SELECT message_id, data, scheduled FROM outbox.dead_letters"
    wait_until(
        lambda: has_seen(apart, 2) and apart.connection.execute(dead).fetchall() == [("bad", None, None)],
        "one is dead, two are handled",
    )
    rows = apart.connection.execute("SELECT message_id, pair FROM seen ORDER BY n").fetchall()
    assert rows == [("none", ""), ("some", "t,p,{},t")]
