"""A dump restored into a younger server: nothing runs until `outbox repair`, then every processor goes on exactly."""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from outbox_core.errors import ConfigurationError
from outbox_core.progress.checkpoint import BEGINNING, MAX_POSITION, Checkpoint
from outbox_core.report import Reason
from outbox_worker.postgres import identity
from outbox_worker.postgres.admin.repair import Outbox, Repairer
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.progress import checkpoints
from outbox_worker.postgres.reading.messages import MessageReader
from tests.integration.cli.conftest import Cli
from tests.support.servers.postgres import build_source, wait_until
from tests.support.servers.restore import age, dump, next_id, restored, use_up

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg

    from tests.support.servers.postgres import Database, Servers

SOURCE = build_source()
READER = MessageReader(SOURCE)
AHEAD = 20_000
FOREIGN, FAR = "of-another-database", Checkpoint(7_000_000_000, 7)
"""A projection's checkpoint: its ids are of the database that it reads."""


def produce(connection: psycopg.Connection[Any], name: str) -> None:
    connection.execute("INSERT INTO outbox.messages (message_id, message_type, data) VALUES (%s, 'm', '{}')", (name,))


def produce_overlapping(database: Database, count: int, chance: random.Random, name: str) -> None:
    """Transactions that overlap, with savepoints and rollbacks: positions are not monotonic along the ids."""
    writers = [database.direct(autocommit=False) for _ in range(5)]
    for number in range(count):
        writer = chance.choice(writers)
        if chance.random() < 0.3:
            writer.execute("SELECT pg_current_xact_id()")
        if chance.random() < 0.3:
            with writer.transaction():
                produce(writer, f"{name}-{number}")
        else:
            produce(writer, f"{name}-{number}")
        if chance.random() < 0.6:
            (writer.rollback if chance.random() < 0.15 else writer.commit)()
    for writer in writers:
        writer.commit()
        writer.close()


def in_order(connection: psycopg.Connection[Any]) -> list[tuple[Checkpoint, str]]:
    rows = connection.execute(
        "SELECT o.transaction_id::text AS t, o.position, o.message_id FROM outbox.messages AS o "
        "ORDER BY o.transaction_id, o.position"
    ).fetchall()
    return [(Checkpoint(int(t), position), name) for t, position, name in rows]


def store(connection: psycopg.Connection[Any], processor: str, partition: int, pair: Checkpoint) -> None:
    connection.execute(
        "INSERT INTO outbox.processor_checkpoints VALUES (%s, %s, %s::text::xid8, %s)",
        (processor, partition, str(pair.transaction_id), pair.position),
    )


def read_on(database: Database, processor: str, partition: int = 0) -> list[str]:
    """Everything that a processor would still handle, read as workers read."""
    connection = database.connect()
    stored = checkpoints.load(connection, ProcessorKey("outbox", processor, partition))
    assert stored is not None
    names: list[str] = []
    after = stored.pair
    while (batch := READER.fetch(connection, after, 7)).messages:
        names += [message.message_id for message in batch]
        after = batch.examined
    return names


@dataclass
class Restored:
    """A restored outbox, what each processor had not handled when it was dumped, and what was stored here since."""

    database: Database
    expected: dict[tuple[str, int], list[str]]
    since: list[str]

    @property
    def cli(self) -> Cli:
        return Cli(self.database.files().directory)

    def assert_goes_on(self) -> None:
        for (processor, partition), names in self.expected.items():
            assert read_on(self.database, processor, partition) == names + self.since, processor


SEEN = """
    SELECT w.id, array_agg(o.message_id ORDER BY o.message_id)
                 FILTER (WHERE pg_visible_in_snapshot(o.transaction_id, w.seen))
    FROM outbox.seen AS w CROSS JOIN outbox.messages AS o GROUP BY w.id ORDER BY w.id"""
LISTED = """
    SELECT array_agg(o.message_id ORDER BY o.message_id) FROM outbox.seen AS w
    JOIN outbox.messages AS o ON o.transaction_id = ANY (w.listed)"""


def remember_snapshots(database: Database, chance: random.Random) -> None:
    """A partitioned table of the schema that holds snapshots, as mode Competing's does, taken under open writers."""
    connection = database.direct()
    connection.execute(
        "CREATE TABLE outbox.seen (id serial PRIMARY KEY, seen pg_snapshot, listed xid8[]) PARTITION BY HASH (id);"
        "CREATE TABLE outbox.seen_0 PARTITION OF outbox.seen FOR VALUES WITH (MODULUS 2, REMAINDER 0);"
        "CREATE TABLE outbox.seen_1 PARTITION OF outbox.seen FOR VALUES WITH (MODULUS 2, REMAINDER 1)"
    )
    for number in range(4):
        connection.execute("INSERT INTO outbox.seen (seen) VALUES (pg_current_snapshot())")
        open_writer = database.direct(autocommit=False)
        produce(open_writer, f"old-open-{number}")
        produce_overlapping(database, 5, chance, f"old-snapshot range-{number}")
        connection.execute("INSERT INTO outbox.seen (seen) VALUES (pg_current_snapshot())")
        open_writer.commit()
    connection.execute("UPDATE outbox.seen SET listed = ARRAY(SELECT transaction_id FROM outbox.messages LIMIT 5)")


def fill(database: Database, chance: random.Random) -> dict[tuple[str, int], list[str]]:
    """Messages, some of them deleted by retention, and checkpoints of every kind."""
    remember_snapshots(database, chance)
    produce_overlapping(database, 60, chance, "old")
    connection = database.direct()
    before = in_order(connection)
    pairs: dict[tuple[str, int], Checkpoint] = {
        ("new", 0): BEGINNING,
        ("caught-up", 0): before[-1][0],
        ("started-at-the-end", 0): Checkpoint(before[-1][0].transaction_id + 3, MAX_POSITION),
    }
    for partition in range(3):
        pairs["divided", partition] = chance.choice(before)[0]
    gone = chance.choice(before)
    pairs["passed-what-is-gone", 0] = gone[0]
    connection.execute("DELETE FROM outbox.messages WHERE message_id = %s", (gone[1],))
    for (processor, partition), pair in pairs.items():
        store(connection, processor, partition, pair)
    store(connection, FOREIGN, 0, FAR)
    connection.execute(
        "INSERT INTO outbox.processor_sources (processor_id, source, described) VALUES (%s, 'x', 'another database')",
        (FOREIGN,),
    )
    left = in_order(connection)
    return {who: [name for at, name in left if at > pair] for who, pair in pairs.items()}


@dataclass(frozen=True)
class Dumped:
    """A dump, where it goes, and what each processor had not handled."""

    content: bytes
    version: str
    expected: dict[tuple[str, int], list[str]]
    chance: random.Random


def make_dump(servers: Servers, old: str, new: str) -> Dumped:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    chance = random.Random(seed)
    with servers.database(old) as source:
        age(servers, source, new, AHEAD)
        expected = fill(source, chance)
        return Dumped(dump(source), new, expected, chance)


@pytest.fixture(scope="module")
def dumped(servers: Servers) -> Dumped:
    return make_dump(servers, "15", "18")


@contextlib.contextmanager
def restore(servers: Servers, dumped: Dumped) -> Iterator[Restored]:
    """Restore it, and let producers store messages before anybody notices."""
    with restored(dumped.content, servers.get(dumped.version)) as database:
        produce_overlapping(database, 12, dumped.chance, "since")
        since = [name for _, name in in_order(database.direct()) if name.startswith("since")]
        yield Restored(database, dict(dumped.expected), since)


@pytest.fixture
def outbox(servers: Servers, dumped: Dumped) -> Iterator[Restored]:
    with restore(servers, dumped) as made:
        yield made


def refusal(database: Database) -> ConfigurationError:
    with pytest.raises(ConfigurationError) as caught:
        identity.check_identity(database.connect(), SOURCE)
    return caught.value


def test_a_restore_runs_nothing_until_it_is_repaired_and_confirmed(outbox):
    error = refusal(outbox.database)
    assert error.reason is Reason.DATABASE_COPIED
    assert "run `outbox repair` first" in str(error)
    seen = outbox.database.direct().execute(SEEN).fetchall()
    listed = outbox.database.direct().execute(LISTED).fetchone()
    too_early = outbox.cli.run("confirm-identity", "keep")
    assert (too_early.returncode, "outbox repair" in too_early.stderr) == (1, True)

    done = outbox.cli.run("repair", "--yes", "--reason", "restored on Friday")

    assert done.returncode == 0, done.stderr
    assert refusal(outbox.database).reason is Reason.DATABASE_COPIED, "who it is, is another question"
    assert outbox.cli.run("confirm-identity", "keep").returncode == 0
    found = identity.check_identity(outbox.database.connect(), SOURCE, ProcessorKey("outbox", "caught-up"))
    assert found.rebased == 1
    foreign = checkpoints.load(outbox.database.connect(), ProcessorKey("outbox", FOREIGN))
    assert foreign is not None
    assert foreign.pair == FAR
    outbox.assert_goes_on()
    assert outbox.database.direct().execute(LISTED).fetchone() == listed
    seen_before = [[name for name in names or [] if not name.startswith("since")] for _, names in seen]
    assert [names or [] for _, names in outbox.database.direct().execute(SEEN).fetchall()] == seen_before
    acts = outbox.database.direct().execute(
        "SELECT action, processor_id, reason FROM outbox.audit_log "
        "WHERE action = 'Rebase' AND processor_id = 'caught-up'"
    )
    assert acts.fetchall() == [("Rebase", "caught-up", "restored on Friday")]


def test_the_dry_run_shows_what_changes_and_changes_nothing(outbox):
    before = in_order(outbox.database.direct())

    shown = outbox.cli.json("repair", "--dry-run")
    table = outbox.cli.run("repair", "--dry-run").stdout

    assert shown["restored"]["messages"] == sum(not name.startswith("since") for _, name in before)
    assert shown["writtenHere"]["messages"] == len(outbox.since)
    assert len(shown["checkpoints"]) == len(outbox.expected)
    assert "checkpoint caught-up partition 0" in table
    assert in_order(outbox.database.direct()) == before
    assert refusal(outbox.database).reason is Reason.DATABASE_COPIED
    assert outbox.cli.run("repair", "--yes").returncode == 2, "an act needs a reason"


def test_order_is_kept_strictly_and_what_is_stored_later_sorts_after(outbox):
    before = [name for _, name in in_order(outbox.database.direct())]
    writer = outbox.database.direct(autocommit=False)
    produce(writer, "in flight")
    repairer = Repairer(outbox.database.direct(), "outbox", [Outbox("outbox", "messages")])
    assert repairer.preview().use_up == 0, "there is room below the open transaction"
    begun = repairer.begin("r", "me")
    repairer.rewrite(begun, 1, lambda _done, _total: None)
    writer.commit()
    repairer.finish(begun)
    produce(outbox.database.direct(), "later")

    after = [name for _, name in in_order(outbox.database.direct())]

    old = [name for name in before if name.startswith("old")]
    assert after == [*old, *outbox.since, "in flight", "later"]
    outbox.since += ["in flight", "later"]
    outbox.assert_goes_on()


def test_room_is_made_below_open_transactions_or_they_are_named(outbox):
    """More ids than the young server has handed out."""
    writer = outbox.database.direct(autocommit=False)
    count = next_id(writer) + 500
    connection = outbox.database.direct()
    connection.execute(
        "INSERT INTO outbox.messages (transaction_id, message_id, message_type, data) "
        "SELECT (n + 1000000)::text::xid8, 'far-' || n, 'm', '{}' FROM generate_series(1, %s) AS n",
        (count,),
    )
    writer.execute("SET LOCAL application_name = 'nightly-report'; SELECT pg_current_xact_id()")

    blocked = outbox.cli.run("repair", "--yes", "--reason", "r")
    writer.rollback()
    status, said, shown = outbox.cli.at_a_terminal("repair", "--reason", "r", answer="y")

    assert (blocked.returncode, "nightly-report" in blocked.stderr) == (1, True)
    assert status == 0, shown
    assert "Rebase these ids?" in shown
    assert f"messages and {len(outbox.expected)} checkpoints rebased" in said
    assert outbox.cli.run("confirm-identity", "keep").returncode == 0


def test_a_repair_that_was_killed_goes_on_where_it_was(outbox):
    connection = outbox.database.direct()
    repairer = Repairer(connection, "outbox", [Outbox("outbox", "messages")])
    plan = repairer.preview()
    if plan.use_up:
        repairer.use_up(plan.use_up + 1000, lambda _: None)
    begun = repairer.begin("first", "me")

    class KilledError(Exception):
        pass

    def die(_done: int, _total: int) -> None:
        raise KilledError

    with pytest.raises(KilledError):
        repairer.rewrite(begun, 1, die)
    outbox.cli.run("confirm-identity", "keep")
    assert refusal(outbox.database).reason in (Reason.DATABASE_BEHIND, Reason.DATABASE_COPIED)
    produce(connection, "meanwhile")
    assert "goes on where it was" in outbox.cli.run("repair", "--dry-run").stdout

    done = outbox.cli.run("repair", "--yes")

    assert done.returncode == 0, done.stderr
    assert outbox.cli.run("confirm-identity", "keep").returncode == 0
    outbox.since.append("meanwhile")
    outbox.assert_goes_on()
    again = outbox.cli.run("repair", "--yes", "--reason", "again")
    assert (again.returncode, "nothing to repair" in again.stdout) == (0, True)


def test_ids_that_the_server_reached_meanwhile_are_still_known_to_be_restored(servers):
    """The trap: once the counter is past the restored ids nothing looks wrong, and new messages are passed over."""
    with restore(servers, make_dump(servers, "14", "15")) as outbox:
        connection = outbox.database.direct()
        use_up(connection, max(pair.transaction_id for pair, _ in in_order(connection)) + 10)

        assert outbox.cli.run("confirm-identity", "keep").returncode == 1
        assert outbox.cli.run("repair", "--yes", "--reason", "r").returncode == 0
        assert outbox.cli.run("confirm-identity", "renew").returncode == 0
        outbox.assert_goes_on()


def test_it_is_refused_while_an_owner_is_live(database):
    connection = database.direct()
    connection.execute(
        "INSERT INTO outbox.messages (transaction_id, message_type, data) VALUES ('987654321', 'forged', '{}');"
        "INSERT INTO outbox.processor_leases (processor_id, pod, expires_at) VALUES ('orders', 'pod-a', 'infinity')"
    )
    cli = Cli(database.files().directory)

    refused = cli.run("repair", "--yes", "--reason", "r")

    assert refused.returncode == 3
    assert "pod-a of orders" in refused.stderr
    connection.execute("UPDATE outbox.processor_leases SET expires_at = 'epoch'")
    assert cli.run("repair", "--yes", "--reason", "r").returncode == 0
    wait_until(lambda: len(READER.fetch(database.connect(), BEGINNING, 9).messages) == 1, "it can be read")
    identity.check_identity(database.connect(), SOURCE)


HAS_BEGUN = "INSERT INTO outbox.competing_processors (processor_id) VALUES ('orders')"
A_MEMBER = (
    "INSERT INTO outbox.processor_members (processor_id, token, pod, claim_uid, expires_at) "
    "VALUES ('orders', gen_random_uuid(), 'pod-a', 'uid', 'infinity')"
)
A_BATCH = (
    "INSERT INTO outbox.competing_batches (id, processor_id, priority, owner, pod, expires_at, lower_snapshot, "
    "upper_snapshot, after_transaction_id, after_position, upto_transaction_id, upto_position, messages) "
    "VALUES (1, 'orders', 0, 'uid/token', 'pod-a', 'infinity', '3:3:', '9:9:', '0', 0, '5', 5, 1)"
)


@pytest.mark.parametrize("lives", [A_MEMBER, A_BATCH], ids=["a member", "with a batch in hand"])
def test_it_is_refused_while_a_consumer_is_live(database, lives):
    """In mode Competing no process has a lease; what a consumer handed out meanwhile would be lost."""
    connection = database.direct()
    connection.execute(
        "INSERT INTO outbox.messages (transaction_id, message_type, data) VALUES ('987654321', 'forged', '{}')"
    )
    connection.execute(HAS_BEGUN)
    connection.execute(lives)
    cli = Cli(database.files().directory)

    refused = cli.run("repair", "--yes", "--reason", "r")

    assert cli.json("repair", "--dry-run")["liveOwners"] == ["consumer pod-a of orders"]
    assert refused.returncode == 3
    assert "consumer pod-a of orders; suspend it first" in refused.stderr
    connection.execute("DELETE FROM outbox.processor_members; DELETE FROM outbox.competing_batches")
    assert cli.run("repair", "--yes", "--reason", "r").returncode == 0


def test_a_healthy_database_has_nothing_to_repair(database):
    produce_overlapping(database, 30, random.Random(1), "m")
    before = in_order(database.direct())

    said = Cli(database.files().directory).run("repair", "--yes", "--reason", "r")

    assert (said.returncode, "nothing to repair" in said.stdout) == (0, True)
    assert in_order(database.direct()) == before


def test_every_partition_of_a_table_is_rewritten(database):
    """A partitioned table has no pages of its own, and its partitions have different numbers of them."""
    connection = database.direct()
    connection.execute(
        "CREATE TABLE public.parts (position bigserial, transaction_id xid8 NOT NULL DEFAULT pg_current_xact_id(), "
        "message_id text NOT NULL, message_type text NOT NULL, data jsonb NOT NULL DEFAULT '{}') "
        "PARTITION BY LIST (message_type);"
        "CREATE TABLE public.short PARTITION OF public.parts FOR VALUES IN ('short');"
        "CREATE TABLE public.long PARTITION OF public.parts DEFAULT PARTITION BY HASH (position);"
        "CREATE TABLE public.long_0 PARTITION OF public.long FOR VALUES WITH (MODULUS 2, REMAINDER 0);"
        "CREATE TABLE public.long_1 PARTITION OF public.long FOR VALUES WITH (MODULUS 2, REMAINDER 1);"
        "INSERT INTO public.parts (transaction_id, message_id, message_type) "
        "SELECT (987654321 + n)::text::xid8, n, CASE WHEN n <= 3 THEN 'short' ELSE 'long' END "
        "FROM generate_series(1, 1000) AS n"
    )
    store(connection, "orders", 0, Checkpoint(987654323, 2))

    done = Cli(database.files().directory).run(
        "repair", "--table", "public.parts", "--pages", "1", "--yes", "--reason", "r"
    )

    assert done.returncode == 0, done.stderr
    assert "1000 messages and 1 checkpoint rebased" in done.stdout
    reader = MessageReader(build_source(table={"schemaName": "public", "name": "parts"}))
    wait_until(lambda: len(reader.fetch(database.connect(), BEGINNING, 2000).messages) == 1000, "all can be read")
    stored = checkpoints.load(database.connect(), ProcessorKey("outbox", "orders"))
    assert stored is not None
    names = [message.message_id for message in reader.fetch(database.connect(), stored.pair, 2000).messages]
    assert names == [str(n) for n in range(3, 1001)], "what was handled is not handled again, and the order is kept"


def test_a_queue_is_mapped_once(database):
    """It is a partitioned table of the schema. New ids are among the old ones: what is mapped twice loses its place."""
    connection = database.direct()
    connection.execute("SELECT outbox.create_queue('jobs')")
    connection.execute(
        "INSERT INTO outbox.queue_jobs (transaction_id, message_id, message_type, data, deliver_after) "
        "SELECT (n * n + 3)::text::xid8, n, 'm', '{}', CASE WHEN n % 2 = 0 THEN now() END "
        "FROM generate_series(1, 2000) AS n"
    )
    cli = Cli(database.files().directory)
    shown = cli.json("repair", "--dry-run")
    assert shown["restored"]["messages"] == 2000
    assert not any(column.startswith("queue_jobs") for column in shown["columns"]), "they are messages"

    done = cli.run("repair", "--yes", "--reason", "r")

    assert done.returncode == 0, done.stderr
    after = connection.execute("SELECT message_id::int, transaction_id::text::int FROM outbox.queue_jobs ORDER BY 1")
    assert after.fetchall() == [(n, n + 2) for n in range(1, 2001)]


STAND = "SELECT outbox.rewind_processor_checkpoint('orders', 0, '5000000', 25000, 'it came with a dump', 'test')"
CAME = (
    "INSERT INTO outbox.messages (transaction_id, position, message_type, data) "
    "SELECT (4999000 + n)::text::xid8, 20000 + n, 'm', '{}' FROM generate_series(1, 2000) n"
)
PRUNE = ("prune", "--no-remote-readers", "--yes", "--reason", "the disk is full")


@pytest.mark.parametrize(
    ("came", "said"),
    [
        pytest.param(CAME, "below 5001000 which is stored here", id="messages"),
        pytest.param("SELECT 1", "orders is at 5000000:25000, which this server has not reached", id="checkpoints"),
    ],
)
def test_what_was_stored_since_a_restore_is_not_pruned(database, came, said):
    """It lies below the checkpoints that came along, and no processor has handled it."""
    connection = database.direct()
    connection.execute(came)
    connection.execute(STAND)
    produce(connection, "new")

    done = Cli(database.files().directory).run(*PRUNE)

    assert (done.returncode, said in done.stderr, "run `outbox repair` first" in done.stderr) == (3, True, True)
    assert "new" in [name for _, name in in_order(connection)]


def test_nothing_is_pruned_or_moved_before_the_repair_is_finished(database):
    """Some messages have their new ids, which are low, and the checkpoints their old ones."""
    cli, connection = Cli(database.files().directory), database.direct()
    connection.execute(CAME)
    connection.execute(STAND)
    repairer = Repairer(database.connect(), "outbox", [Outbox("outbox", "messages")])
    repairer.use_up(5000, lambda _: None)
    repairer.rewrite(repairer.begin("restored", "test"), 1000, lambda *_: None)

    for command in (PRUNE, ("rewind", "orders", "--to-position", "20500", "--yes", "--reason", "again")):
        refused = cli.run(*command)
        assert (refused.returncode, "a repair of schema outbox was begun" in refused.stderr) == (3, True)
    assert cli.run("repair", "--yes", "--reason", "restored").returncode == 0
    assert cli.json(*PRUNE)["deleted"] == 1000
