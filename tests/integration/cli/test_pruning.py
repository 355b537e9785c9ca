"""`outbox prune`: what every reader has examined may go, and nothing else, whatever happens beside it."""

from __future__ import annotations

import json
import random
import subprocess
import threading
import time
from uuid import uuid4

import pytest
from typing_extensions import override

from outbox_core.partition import partition_of
from outbox_core.processor.outcomes import HeldLease
from outbox_core.progress.checkpoint import Checkpoint
from outbox_core.spec import Source
from outbox_worker.engine.partition_steps import PASSING_SECONDS
from outbox_worker.postgres import remote_target
from outbox_worker.postgres.ownership import leases as ownership
from outbox_worker.postgres.progress import checkpoints
from tests.integration.cli.conftest import PROGRAM, Cli
from tests.support.nightly import at_night
from tests.support.servers.postgres import Servers, build_source, find_memory, wait_until
from tests.support.worker import Outbox, build_config

REMOTE = "--no-remote-readers"
ACT = (REMOTE, "--yes", "--reason", "the disk is full")
RUNNING = {
    "by-transaction": ({}, {}),
    "by-snapshot": ({}, {"cursor": "Snapshot"}),
    "divided": ({"mode": "Partitioned", "partitions": {"count": 2}}, {"cursor": "Snapshot"}),
    "consumers": ({"mode": "Competing", "competing": {"leaseDuration": "2s"}}, {"cursor": None}),
}


@pytest.fixture(scope="module")
def servers():
    """Servers of their own: transactions of other databases hold back what a queue's checkpoint says."""
    own = Servers(parent=find_memory())
    yield own
    own.stop()


@pytest.fixture
def cli(database) -> Cli:
    return Cli(database.files().directory)


@pytest.fixture
def outbox(database):
    made = Outbox(database)
    made.connection.execute("CREATE TABLE seen (processor text, message_id text)")
    return made


def left(outbox) -> list[str]:
    rows = outbox.connection.execute("SELECT message_id FROM outbox.messages ORDER BY position").fetchall()
    return [row[0] for row in rows]


def start(workers, database, name):
    delivery, source = RUNNING[name]
    target = {"sql": {"statement": f"INSERT INTO seen SELECT '{name}', message_id FROM batch"}}
    config = build_config(
        database, target, processor_id=name, delivery=delivery, source=source,
        resource={"name": name, "uid": f"uid-{name}"},
    )  # fmt: skip
    return workers.start(config, database.uri(), pod=name)


def seen(outbox, name):
    rows = outbox.connection.execute("SELECT message_id FROM seen WHERE processor = %s", (name,)).fetchall()
    return {row[0] for row in rows}


def test_what_is_examined_goes_and_the_rest_stays(cli, shop):
    first, second, *_ = shop.produce(4)
    shop.store(second)
    dry = cli.json("prune", "--dry-run")
    assert (dry["prunable"], dry["deleted"]) == (2, 0)
    assert cli.json("prune", *ACT)["deleted"] == 2
    rows = shop.connection.execute("SELECT position FROM outbox.messages ORDER BY position").fetchall()
    assert [row[0] for row in rows] == [second.position + 1, second.position + 2]
    acts = [(act[0], act[3]) for act in shop.audit_log()]
    assert [act for act, _ in acts] == ["Prune", "Prune"]
    assert "the disk is full" in acts[0][1]
    assert "2 deleted" in acts[1][1]
    assert first < second


def test_a_late_committer_with_a_low_position_is_kept(cli, outbox, workers, database):
    """The default cursor passes a row that is not committed; an old time and a low position say nothing."""
    late = database.direct(autocommit=False)
    late.execute(
        "INSERT INTO outbox.messages (message_id, message_type, data, scheduled) "
        "VALUES ('late', 't', '{}', now() - interval '90 days')"
    )
    outbox.produce(20)
    start(workers, database, "by-snapshot")
    wait_until(lambda: len(seen(outbox, "by-snapshot")) == 20, "twenty are handled")
    wait_until(lambda: cli.json("lag", "by-snapshot")[0]["messages"] == 0, "and stored")
    assert cli.json("prune", *ACT)["deleted"] == 20
    late.commit()
    cli.run("prune", *ACT)
    wait_until(lambda: "late" in seen(outbox, "by-snapshot"), "the late one is handled")


def test_it_prunes_where_the_word_null_in_a_list_is_a_word(cli, outbox, workers, database):
    """array_nulls = off, as a setting of the database: a snapshot range that is read to its end has no position."""
    database.configure("array_nulls", "off")
    outbox.produce(3)
    start(workers, database, "by-snapshot")
    wait_until(lambda: len(seen(outbox, "by-snapshot")) == 3, "three are handled")
    wait_until(lambda: cli.json("lag", "by-snapshot")[0]["messages"] == 0, "and stored")
    assert cli.json("prune", *ACT)["deleted"] == 3


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        pytest.param(("--yes", "--reason", "r"), 3, "--readers DIR", id="readers elsewhere"),
        pytest.param((REMOTE, "--yes"), 2, "--reason", id="no reason"),
        pytest.param((*ACT, "--ignore", "nothing"), 3, "no processor nothing", id="unknown"),
        pytest.param((*ACT, "--source", "public.t"), 3, "that it reads public.t", id="unknown table"),
    ],
)  # fmt: skip
def test_it_is_refused_without_what_it_must_know(cli, shop, arguments, status, said):
    shop.store(shop.produce(1)[0])
    done = cli.run("prune", *arguments)
    assert (done.returncode, said in done.stderr) == (status, True), done.stderr
    assert shop.connection.execute("SELECT count(*) FROM outbox.messages").fetchone() == (1,)


def test_a_rewind_while_it_waits_for_its_rate_is_heeded(cli, shop):
    pairs = shop.produce(4)
    shop.store(pairs[-1])
    count = "SELECT count(*) FROM outbox.messages"
    done = []
    pruning = threading.Thread(target=lambda: done.append(cli.run("prune", *ACT, "--rate", "1")))
    pruning.start()
    wait_until(lambda: shop.connection.execute(count).fetchone() == (3,), "one is deleted")
    shop.connection.execute("SELECT outbox.rewind_processor_checkpoint('orders', 0, '0', 0, 'again', 'test')")
    pruning.join()
    assert shop.connection.execute(count).fetchone() == (3,)
    assert done[0].returncode == 0, done[0].stderr


def test_told_to_stop_as_a_pod_is_it_ends_after_a_batch_and_says_so(cli, shop):
    shop.store(shop.produce(4)[-1])
    count = "SELECT count(*) FROM outbox.messages"
    pruning = subprocess.Popen(
        [str(PROGRAM), "prune", *ACT, "--rate", "1", *cli.where], stderr=subprocess.PIPE, text=True
    )
    wait_until(lambda: shop.connection.execute(count).fetchone() == (3,), "one is deleted")
    pruning.terminate()
    _, said = pruning.communicate(timeout=30)
    assert (pruning.returncode, "1 were deleted before this" in said) == (130, True), said
    assert shop.connection.execute(count).fetchone() == (3,)
    assert "was stopped: 1 deleted" in shop.audit_log()[-1][3]


def test_it_is_refused_while_a_processor_has_no_checkpoint(cli, shop):
    shop.store(shop.produce(1)[0])
    shop.connection.execute("SELECT outbox.claim_processor('newcomer', 'c', 'n', 'newcomer', 'uid-2')")
    done = cli.run("prune", *ACT)
    assert done.returncode == 3
    assert "newcomer has no checkpoint yet" in done.stderr
    assert cli.json("prune", *ACT, "--ignore", "newcomer")["deleted"] == 1


def test_every_processor_for_which_it_is_refused_is_named_at_once(cli, shop):
    shop.store(shop.produce(1)[0])
    for name in ("newcomer", "another"):
        shop.connection.execute("SELECT outbox.claim_processor(%s, 'c', 'n', %s, 'uid-2')", (name, name))
    done = cli.run("prune", *ACT)
    assert done.returncode == 3
    assert [f"{name} has no checkpoint yet" in done.stderr for name in ("newcomer", "another")] == [True, True]


def test_it_is_refused_without_any_processor(cli, shop):
    shop.produce(1)
    assert cli.run("prune", *ACT).returncode == 3


def test_it_is_refused_where_a_checkpoint_is_in_question(cli, shop):
    first, second = shop.produce(2)
    shop.store(first)
    shop.connection.execute("UPDATE outbox.processor_checkpoints SET last_processed_position = 900")
    assert "edited by hand" in cli.run("prune", *ACT).stderr
    shop.refuse(first, second)
    assert "is open" in cli.run("prune", *ACT).stderr
    assert shop.connection.execute("SELECT count(*) FROM outbox.messages").fetchone() == (2,)


def test_the_slowest_reader_decides_and_one_that_is_gone_can_be_left_out(cli, shop):
    first, _, third = shop.produce(3)
    shop.store(third)
    slow = type(shop.key)("outbox", "slow")
    shop.connection.execute("SELECT outbox.claim_processor('slow', 'c', 'n', 'slow', 'uid-slow')")
    token = uuid4()
    (epoch,) = shop.connection.execute(
        "SELECT epoch FROM outbox.acquire_lease('slow', 0, 'uid-slow', 'pod', %s, interval '1 hour')", (token,)
    ).fetchone()
    checkpoints.store(shop.connection, slow, HeldLease(0, epoch, token), new=first, expected=None)
    assert cli.json("prune", *ACT)["deleted"] == 1
    assert "cannot be left out" in cli.run("prune", *ACT, "--ignore", "slow").stderr
    shop.connection.execute("SELECT outbox.release_lease('slow', 0, %s, %s)", (epoch, token))
    assert cli.json("prune", *ACT, "--ignore", "slow")["deleted"] == 2


def test_consumers_that_are_behind_cannot_be_left_out_while_they_live(cli, shop, workers, database):
    """Mode Competing has no lease: its consumers are members. What they have not handled would be deleted."""
    shop.connection.execute("CREATE TABLE seen (processor text, message_id text)")
    worker = start(workers, database, "consumers")
    worker.wait_state("Active")
    wait_until(lambda: cli.json("status", "consumers")[0]["checkpoint"] is not None, "it has a checkpoint")
    blocker = database.direct(autocommit=False)
    blocker.execute("LOCK TABLE seen")
    with shop.connection.transaction():  # one commit: a consumer woken by the first of three would take that one alone
        pairs = shop.produce(3)
    shop.store(pairs[-1])
    wait_until(lambda: cli.json("status", "consumers")[0]["unfinished"]["messages"] == 3, "it has them in hand")
    done = cli.run("prune", *ACT, "--ignore", "consumers")
    assert done.returncode == 3, done.stdout
    assert "consumers is being run by 1 consumer: it cannot be left out" in done.stderr
    assert len(left(shop)) == 3
    blocker.rollback()
    wait_until(lambda: len(seen(shop, "consumers")) == 3, "it has handled them")
    wait_until(lambda: cli.json("status", "consumers")[0]["pod"] == "1 consumer", "and is a member")
    assert cli.run("prune", *ACT, "--ignore", "consumers").returncode == 3
    assert worker.terminate() == 0
    assert cli.json("prune", *ACT, "--ignore", "consumers")["deleted"] == 3


def test_nothing_is_deleted_that_cannot_be_recorded(cli, shop):
    shop.store(shop.produce(1)[0])
    shop.connection.execute(
        "CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'no acts today'; END $$; "
        "CREATE TRIGGER refuse BEFORE INSERT ON outbox.audit_log FOR EACH ROW EXECUTE FUNCTION public.refuse()"
    )
    done = cli.run("prune", REMOTE, "--yes", "--reason", "r")
    assert done.returncode == 1
    assert "no acts today" in done.stderr
    assert len(left(shop)) == 1


def test_only_what_is_old_enough_and_not_held_goes(cli, shop):
    pairs = shop.produce(5)
    shop.store(pairs[-1])
    shop.connection.execute("UPDATE outbox.messages SET scheduled = now() - interval '8 days' WHERE position < %s",
                            (pairs[3].position,))  # fmt: skip
    shop.connection.execute(
        "INSERT INTO outbox.dead_letters (processor_id, key, transaction_id, position, message_id, message_type, "
        "publication_id, data, attempts, error_class, error) "
        "SELECT 'orders', 'k', transaction_id, position, message_id, message_type, "
        "publication_id, data, 3, 'E', 'e' FROM outbox.messages ORDER BY position LIMIT 1"
    )
    assert cli.json("prune", "--older-than", "168h", *ACT)["deleted"] == 2
    rows = shop.connection.execute("SELECT position FROM outbox.messages ORDER BY position").fetchall()
    assert [row[0] for row in rows] == [pairs[0].position, pairs[3].position, pairs[4].position]


def test_a_mapped_table_is_pruned_by_the_mapping_of_its_reader(cli, outbox, workers, database):
    outbox.connection.execute(
        "CREATE TABLE public.shop_outbox (n bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, tx xid8 NOT NULL DEFAULT "
        "pg_current_xact_id(), id uuid NOT NULL DEFAULT gen_random_uuid(), kind text NOT NULL DEFAULT 't', data jsonb "
        "NOT NULL DEFAULT '{}'); CREATE INDEX ON public.shop_outbox (tx, n)"
    )
    columns = {"position": "n", "transactionId": "tx", "messageId": "id", "messageType": "kind"}
    table = {"schemaName": "public", "name": "shop_outbox", "columns": columns}
    target = {"sql": {"statement": "INSERT INTO seen SELECT 'mapped', message_id FROM batch"}}
    config = build_config(database, target, source={"table": table, "cursor": "Snapshot"})
    outbox.connection.execute("INSERT INTO public.shop_outbox SELECT FROM generate_series(1, 9)")
    workers.start(config, database.uri())
    wait_until(lambda: len(seen(outbox, "mapped")) == 9, "nine are handled")
    wait_until(lambda: cli.json("lag", "orders")[0]["messages"] == 0, "and stored")
    outbox.produce(2)
    assert "nothing says what was handled" in cli.run("prune", *ACT).stderr, "it reads another table than our own"
    assert cli.json("prune", "--source", "public.shop_outbox", "--batch", "4", *ACT)["deleted"] == 9
    assert len(left(outbox)) == 2


def test_of_a_partitioned_table_only_what_was_examined_goes(cli, outbox, workers, database):
    """Every partition has a first row of its own: where a row is says nothing without its partition."""
    connection = outbox.connection
    connection.execute(
        "CREATE SEQUENCE public.numbers; CREATE TABLE public.parts (position bigint NOT NULL DEFAULT "
        "nextval('public.numbers'), transaction_id xid8 NOT NULL DEFAULT pg_current_xact_id(), message_id text "
        "NOT NULL DEFAULT gen_random_uuid(), message_type text NOT NULL, data jsonb NOT NULL DEFAULT '{}') "
        "PARTITION BY LIST (message_type); CREATE INDEX ON public.parts (transaction_id, position); "
        "CREATE TABLE public.read PARTITION OF public.parts FOR VALUES IN ('read'); "
        "CREATE TABLE public.unread PARTITION OF public.parts FOR VALUES IN ('unread')"
    )
    target = {"sql": {"statement": "INSERT INTO seen SELECT 'parts', message_id FROM batch"}}
    table = {"schemaName": "public", "name": "parts"}
    worker = workers.start(build_config(database, target, source={"table": table}), database.uri())
    connection.execute("INSERT INTO public.parts (message_type) SELECT 'read' FROM generate_series(1, 9)")
    wait_until(lambda: len(seen(outbox, "parts")) == 9, "nine are handled")
    worker.terminate()
    connection.execute("INSERT INTO public.parts (message_type) SELECT 'unread' FROM generate_series(1, 5)")

    assert cli.json("prune", "--source", "public.parts", "--batch", "4", *ACT)["deleted"] == 9
    left = connection.execute("SELECT message_type, count(*) FROM public.parts GROUP BY 1").fetchall()
    assert left == [("unread", 5)]


def test_a_reader_elsewhere_is_counted(cli, shop, servers):
    """Its checkpoint is in another database, and says which source it is of."""
    first, second, third = shop.produce(3)
    shop.store(third)
    with servers.database() as other:
        remote = other.direct()
        identity = remote_target.identify(shop.connection, build_source()).identity
        remote.execute("SELECT outbox.claim_processor('far', 'c', 'n', 'far', 'uid-far')")
        remote.execute("SELECT outbox.bind_processor_source('far', 'uid-far', %s, 'the shop')", (identity,))
        directory = str(other.files().directory)
        options = ("--readers", directory, "--yes", "--reason", "r")
        assert "far has no checkpoint yet" in cli.run("prune", *options).stderr
        token = uuid4()
        (epoch,) = remote.execute(
            "SELECT epoch FROM outbox.acquire_lease('far', 0, 'uid-far', 'pod', %s, interval '1 hour')", (token,)
        ).fetchone()
        key = type(shop.key)("outbox", "far")
        checkpoints.store(remote, key, HeldLease(0, epoch, token), new=second, expected=None)
        assert cli.json("prune", *options)["deleted"] == 2
    assert first < second


def test_a_source_without_a_schema_of_ours_is_pruned_and_recorded_beside_its_reader(
    empty_database, shop, servers, tmp_path
):
    """Only a mapped table is there: the act is written where the first of the readers keeps its checkpoint."""
    connection = empty_database.direct()
    connection.execute(
        "CREATE TABLE public.shop_outbox (n bigint GENERATED ALWAYS AS IDENTITY, tx xid8 NOT NULL DEFAULT "
        "pg_current_xact_id(), id uuid DEFAULT gen_random_uuid(), kind text DEFAULT 't', data jsonb DEFAULT '{}'); "
        "CREATE INDEX ON public.shop_outbox (tx, n); INSERT INTO public.shop_outbox SELECT FROM generate_series(1, 3)"
    )
    columns = {"position": "n", "transactionId": "tx", "messageId": "id", "messageType": "kind", "data": "data"}
    source = {
        "connection": {"secretRef": {"name": "shop"}},
        "table": {"schemaName": "public", "name": "shop_outbox", "columns": columns},
    }
    (manifest := tmp_path / "orders.yaml").write_text(
        json.dumps({
            "apiVersion": "outbox-operator.dev/v1alpha1", "kind": "OutboxProcessor", "metadata": {"name": "orders"},
            "spec": {"source": source, "target": {"sql": {"connection": {"secretRef": {"name": "far"}},
                                                          "statement": "SELECT 1 FROM batch"}}},
        })
    )  # fmt: skip
    read = remote_target.identify(connection, Source.model_validate(source))
    (tx,) = connection.execute("SELECT max(tx)::text FROM public.shop_outbox").fetchone()
    assert ownership.claim(shop.connection, shop.key, shop.resource).granted
    remote_target.bind(shop.connection, shop.key, "uid-orders", read)
    shop.store(Checkpoint(int(tx), 2))
    cli = Cli(empty_database.files().directory)
    with servers.database() as other:  # it has no reader
        readers = (str(each.files().directory) for each in (other, shop.database))
        options = ("-f", str(manifest), *(part for each in readers for part in ("--readers", each)))
        change = "UPDATE outbox.processor_sources SET source = replace(source, %s, %s)"
        shop.connection.execute(change, ("timeline-1", "timeline-7"))
        refused = cli.run("prune", *options, "--yes", "--reason", "monthly")
        assert (refused.returncode, "before a failover" in refused.stderr) == (3, True)
        shop.connection.execute(change, ("timeline-7", "timeline-1"))
        assert cli.json("prune", *options, "--dry-run")["prunable"] == 2
        assert cli.json("prune", *options, "--yes", "--reason", "monthly")["deleted"] == 2
    assert connection.execute("SELECT n FROM public.shop_outbox").fetchall() == [(3,)]
    assert [act[3].split(":")[0] for act in shop.audit_log()] == [
        "prune of public.shop_outbox begins", "prune of public.shop_outbox ended"
    ]  # fmt: skip


class Producers(threading.Thread):
    """Four connections that insert, commit late and roll back; they write down what they committed."""

    def __init__(self, database, stop: threading.Event, number: int) -> None:
        super().__init__(daemon=True)
        self._connection = database.direct(autocommit=False)
        self._stopping, self._number = stop, number
        self.committed: list[str] = []

    @override
    def run(self) -> None:
        chance = random.Random(self._number)
        turn = 0
        while not self._stopping.is_set():
            turn += 1
            ids = [f"{self._number}-{turn}-{n}" for n in range(chance.randint(1, 4))]
            for each in ids:
                self._connection.execute(
                    "INSERT INTO outbox.messages (message_id, partition_key, message_type, data, scheduled) "
                    "VALUES (%s, %s, 't', '{}', now() - interval '30 days')",
                    (each, f"key-{chance.randint(1, 9)}"),
                )
            time.sleep(chance.choice([0, 0, 0.01, 0.3]))
            if chance.random() < 0.25:
                self._connection.rollback()
            else:
                self._connection.commit()
                self.committed += ids


def test_pruned_again_and_again_beside_everything_nothing_is_lost(cli, outbox, workers, database):
    """Late commits, rollbacks, a killed worker, all modes and both cursors: the ledger counts what was committed."""
    running = {name: start(workers, database, name) for name in RUNNING}
    for worker in running.values():
        worker.wait_state("Active")
    wait_until(lambda: cli.run("prune", *ACT).returncode == 0, "every processor has a checkpoint")
    stop = threading.Event()
    producers = [Producers(database, stop, number) for number in range(4)]
    for producer in producers:
        producer.start()
    deleted, until, killed = 0, time.monotonic() + 8, False
    while time.monotonic() < until:
        done = cli.run("prune", "--batch", "50", "--output", "json", *ACT)
        assert done.returncode in (0, 3), done.stderr
        deleted += int(done.stdout.split('"deleted": ')[1].split("\n")[0]) if done.returncode == 0 else 0
        if not killed and time.monotonic() > until - 5:
            killed = True
            running["by-snapshot"].kill()
            start(workers, database, "by-snapshot")
    stop.set()
    for producer in producers:
        producer.join()
    committed = {each for producer in producers for each in producer.committed}
    assert len(committed) > 300
    wait_until(
        lambda: all(seen(outbox, name) >= committed for name in RUNNING), "each has handled all that was committed"
    )
    assert {name: seen(outbox, name) - committed for name in RUNNING} == {name: set() for name in RUNNING}
    total = {"deleted": deleted}

    def empty():
        total["deleted"] += cli.json("prune", *ACT)["deleted"]
        return not left(outbox)

    try:
        wait_until(empty, "all is pruned once all is handled")
    except AssertionError as err:
        rows = outbox.connection.execute(
            "SELECT processor_id || ' ' || c::text FROM outbox.processor_checkpoints c UNION ALL "
            "SELECT f::text FROM outbox.competing_dispatch_positions f UNION ALL "
            "SELECT b::text FROM outbox.competing_batches b "
            "UNION ALL SELECT m.transaction_id::text FROM outbox.messages m UNION ALL "
            "SELECT concat_ws(' ', pid, datname, state, backend_xid, query) FROM pg_stat_activity WHERE state <> 'idle'"
        ).fetchall()
        raise AssertionError("\n".join([str(err), *(row[0] for row in rows)])) from err
    assert total["deleted"] == len(committed)
    assert deleted > 0, "some was deleted while all was running"
    assert [r[0] for r in outbox.connection.execute("SELECT processor_id FROM outbox.processor_conflicts")] == []


def test_it_stops_between_batches_and_says_how_far_it_came(cli, shop):
    pairs = shop.produce(40)
    shop.store(pairs[-1])
    began = time.monotonic()
    assert cli.json("prune", "--batch", "10", "--rate", "40", *ACT)["deleted"] == 40
    assert time.monotonic() - began > 0.5, "no faster than asked"


@pytest.mark.parametrize("cursor", [*at_night("TransactionOrder"), "Snapshot"])
def test_an_idle_partition_does_not_keep_what_the_others_handled(cli, outbox, workers, database, cursor):
    """Its own last message was long ago: that it has looked further is stored, and once, not again and again."""
    target = {"sql": {"statement": "INSERT INTO seen SELECT 'divided', message_id FROM batch"}}
    delivery = {"mode": "Partitioned", "partitions": {"count": 2}}
    workers.start(
        build_config(database, target, processor_id="divided", delivery=delivery, source={"cursor": cursor}),
        database.uri(),
    )
    busy = next(key for key in map(str, range(99)) if partition_of(key, 2) == 1)
    for count in (1, 2):
        outbox.connection.execute(
            "INSERT INTO outbox.messages (message_id, partition_key, message_type, data) VALUES (%s, %s, 't', '{}')",
            (str(count), busy),
        )
        wait_until(lambda: len(seen(outbox, "divided")) == len(left(outbox)), f"message {count} is handled")
    wait_until(lambda: cli.json("prune", *ACT)["deleted"] >= 0 and not left(outbox), "all of it goes", 30)
    stored = "SELECT partition, stored_at FROM outbox.processor_checkpoints ORDER BY 1"
    time.sleep(PASSING_SECONDS + 1)  # each partition passes what it has looked at, by a clock of its own
    before = outbox.connection.execute(stored).fetchall()
    time.sleep(PASSING_SECONDS + 1)
    assert outbox.connection.execute(stored).fetchall() == before
