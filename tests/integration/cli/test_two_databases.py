"""Commands about processors whose messages are in another database than their checkpoint, or that are divided."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typing_extensions import override

from outbox_core.processor.outcomes import HeldLease
from outbox_core.progress.checkpoint import BEGINNING
from outbox_worker.postgres import remote_target
from outbox_worker.postgres.admin import mappings
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.ownership import leases as ownership
from outbox_worker.postgres.progress import rebuilds
from tests.integration.cli.conftest import SCHEMA, Cli, Shop
from tests.support.servers.postgres import build_source, wait_until
from tests.support.servers.proxy import Relay

WHY = ("--reason", "invoices were wrong")


@pytest.fixture
def target(servers):
    with servers.database() as found:
        yield found


@pytest.fixture
def there(shop, target):
    """The processor `orders` of the shop's messages, with claim and checkpoint in the target's database."""
    home = Shop(target, target.direct(), shop.key, shop.resource)
    assert ownership.claim(home.connection, home.key, home.resource).granted
    remote_target.bind(home.connection, home.key, "uid-orders", remote_target.identify(shop.connection, build_source()))
    pairs = shop.produce(4)
    home.store(pairs[2])
    return home, pairs


@pytest.fixture
def both(database, target):
    return ("--connection", str(database.files().directory), "--target-connection", str(target.files().directory))


class Both(Cli):
    """Runs `outbox` with two databases named."""

    def __init__(self, where):
        super().__init__(Path(where[1]))
        self._where = where

    @property
    @override
    def where(self):
        return self._where


def run(where, *arguments):
    return Both(where).run(*arguments)


def test_what_waits_is_counted_in_the_source(there, both):
    done = run(both, "lag", "orders", "-o", "json")
    assert done.returncode == 0, done.stderr
    (record,) = json.loads(done.stdout)
    assert (record["messages"], record["checkpoint"]) == (1, str(there[1][2]))
    (status,) = json.loads(run(both, "status", "-o", "json").stdout)
    assert status["lag"]["messages"] == 1


def test_without_the_source_nothing_is_made_up(there, target):
    cli = Cli(target.files().directory)
    (status,) = cli.json("status")
    assert (status["checkpoint"], status["lag"]) == (str(there[1][2]), None)
    assert "in another database" in cli.run("status").stdout
    done = cli.run("lag", "orders")
    assert done.returncode == 3
    assert "--target-connection" in done.stderr
    assert cli.run("rewind", "orders", "--to-beginning", "--yes", *WHY).returncode == 3
    assert there[0].stored() == there[1][2]


def test_another_source_is_refused(there, target, servers):
    with servers.database() as other:
        where = ("--connection", str(other.files().directory), "--target-connection", str(target.files().directory))
        done = run(where, "rewind", "orders", "--to-beginning", "--yes", *WHY)
    assert done.returncode == 3
    assert "is not the source you name" in done.stderr


def test_a_rewind_is_previewed_in_the_source_and_recorded_in_the_target(there, both):
    home, pairs = there
    seen = json.loads(run(both, "rewind", "orders", "--to", str(pairs[0]), "--dry-run", "-o", "json").stdout)
    assert (seen["messages"], seen["done"]) == (2, False)
    assert home.audit_log() == []
    done = run(both, "rewind", "orders", "--to", str(pairs[0]), "--yes", *WHY)
    assert done.returncode == 0, done.stderr
    assert home.stored() == pairs[0]
    assert [act[:3] for act in home.audit_log()] == [("Rewind", str(pairs[2]), str(pairs[0]))]
    end = run(both, "skip-to", "orders", "--to-end", "--yes", *WHY)
    assert end.returncode == 0, end.stderr
    assert home.stored() > pairs[3]


def test_forgetting_the_source_is_recorded_in_the_audit_log(there, target, shop):
    home, _ = there
    cli = Cli(target.files().directory)
    seen = cli.json("forget-source", "orders", "--dry-run")
    assert (seen["done"], shop.database.name in seen["described"]) == (False, True)
    assert cli.run("forget-source", "orders", "--yes", *WHY).returncode == 0
    assert home.audit_log()[0][0] == "ForgetSource"
    again = cli.run("forget-source", "orders", "--yes", *WHY)
    assert (again.returncode, "forgotten already" in again.stderr) == (3, True)
    new = remote_target.SourceIdentity("new", "database new", 1, 1)
    remote_target.bind(home.connection, home.key, "uid-orders", new)
    found = remote_target.fetch_source(home.connection, home.key)
    assert found == remote_target.WrittenSource("new", "database new")


def test_a_source_that_failed_over_is_read_again_once_it_is_forgotten(there, both):
    home, pairs = there
    home.connection.execute("UPDATE outbox.processor_sources SET source = replace(source, 'timeline-1', 'timeline-7')")
    rewind = ("rewind", "orders", "--to", str(pairs[0]), "--yes", *WHY)
    assert run(both, *rewind).returncode == 3
    (status,) = json.loads(run(both, "status", "-o", "json").stdout)
    assert (status["checkpoint"], status["lag"]) == (str(pairs[2]), None)
    assert run(both, "forget-source", "orders", "--yes", *WHY).returncode == 0
    done = run(both, *rewind)
    assert done.returncode == 0, done.stderr
    assert home.stored() == pairs[0]


class TestDivided:
    @pytest.fixture
    def divided(self, shop):
        """Two partitions by the key: one stands at the third message, the other at the first."""
        pairs = []
        for number in range(6):
            row = shop.connection.execute(
                "INSERT INTO outbox.messages (message_type, partition_key, data) VALUES ('T', %s, '{}') "
                "RETURNING transaction_id::text, position",
                (f"key-{number}",),
            ).fetchone()
            pairs.append(type(BEGINNING)(int(row[0]), row[1]))
        shop.connection.execute("INSERT INTO outbox.processor_partitions VALUES ('orders', 2, 'partition key')")
        for partition, pair in enumerate((pairs[2], pairs[0])):
            shop.connection.execute(
                "INSERT INTO outbox.processor_checkpoints VALUES ('orders', %s, %s::text::xid8, %s)",
                (partition, str(pair.transaction_id), pair.position),
            )
        return pairs

    def stored(self, shop):
        return [
            Shop(shop.database, shop.connection, ProcessorKey(SCHEMA, "orders", partition), shop.resource).stored()
            for partition in range(2)
        ]

    @pytest.mark.usefixtures("divided")
    def test_each_partitions_own_messages_are_counted(self, cli, shop):
        slots = shop.connection.execute(
            "SELECT count(*) FILTER (WHERE mod(outbox.hash_slot(partition_key), 2) = 0), count(*) FROM outbox.messages"
        ).fetchone()
        found = cli.json("rewind", "orders", "--to-beginning", "--dry-run")
        assert [each["partition"] for each in found] == [0, 1]
        lags = {each["partition"]: each["messages"] for each in cli.json("lag", "orders")}
        counts = {each["partition"]: each["messages"] for each in found}
        assert counts[0] + lags[0] == slots[0]
        assert counts[1] + lags[1] == slots[1] - slots[0]

    @pytest.mark.usefixtures("divided")
    def test_all_partitions_move_in_one_act_each(self, cli, shop):
        assert cli.run("rewind", "orders", "--to-beginning", "--yes", *WHY).returncode == 0
        assert self.stored(shop) == [BEGINNING, BEGINNING]
        assert [act[0] for act in shop.audit_log()] == ["Rewind", "Rewind"]

    def test_only_those_on_the_other_side_move(self, cli, shop, divided):
        assert cli.run("rewind", "orders", "--to", str(divided[1]), "--yes", *WHY).returncode == 0
        assert self.stored(shop) == [divided[1], divided[0]]

    def test_one_that_is_named_moves_alone(self, cli, shop, divided):
        assert cli.run("rewind", "orders", "--partition", "1", "--to-beginning", "--yes", *WHY).returncode == 0
        assert self.stored(shop) == [divided[2], BEGINNING]

    def test_one_live_owner_refuses_all(self, cli, shop, divided):
        Shop(shop.database, shop.connection, ProcessorKey(SCHEMA, "orders", 1), shop.resource).own(live=True)
        done = cli.run("rewind", "orders", "--to-beginning", "--yes", *WHY)
        assert (done.returncode, "is the live owner" in done.stderr) == (3, True)
        assert self.stored(shop) == [divided[2], divided[0]]


class TestRebuild:
    MANIFEST = """
apiVersion: outbox-operator.dev/v1alpha1
kind: OutboxProcessor
metadata: {name: orders-v2}
spec:
  source: {connection: {secretRef: {name: db}}}
  target: {sql: {statement: SELECT 1 FROM batch}}
  rebuildOf:
    processorId: orders
    swapStatement: "STATEMENT"
"""

    def test_status_shows_both_checkpoints_and_what_lies_between(self, cli, shop):
        pairs = shop.produce(5)
        shop.store(pairs[3])
        key = ProcessorKey(SCHEMA, "orders-v2")
        new = Shop(shop.database, shop.connection, key, shop.resource.model_copy(update={"uid": "uid-v2"}))
        new.store(pairs[0])
        epoch, token = new.own(live=True)
        assert rebuilds.note(shop.connection, key, HeldLease(0, epoch, token), "orders").swapped_at is None
        (found,) = cli.json("rebuild", "status")
        assert (found["processorId"], found["of"], found["state"], found["behind"]) == (
            "orders-v2",
            "orders",
            "Running",
            3,
        )

    def test_status_counts_a_mapped_table_as_its_owner_wrote_it_down(self, cli, shop):
        shop.connection.execute(
            "CREATE TABLE public.log (LIKE outbox.messages INCLUDING ALL); "
            "CREATE INDEX ON public.log (transaction_id, position)"
        )
        pairs = shop.produce(5)
        shop.connection.execute("INSERT INTO public.log SELECT * FROM outbox.messages WHERE position <= %s",
                                (pairs[1].position,))  # fmt: skip
        shop.store(pairs[3])
        key = ProcessorKey(SCHEMA, "orders-v2")
        new = Shop(shop.database, shop.connection, key, shop.resource.model_copy(update={"uid": "uid-v2"}))
        new.store(pairs[0])
        epoch, token = new.own(live=True)
        source = build_source(table={"schemaName": "public", "name": "log"})
        mappings.note(shop.connection, key, "uid-v2", source)
        rebuilds.note(shop.connection, key, HeldLease(0, epoch, token), "orders")
        (found,) = cli.json("rebuild", "status")
        assert found["behind"] == 1, "the table has two rows, of which one is behind"

    def test_the_swap_is_tried_and_rolled_back(self, cli, shop, tmp_path):
        manifest = tmp_path / "v2.yaml"
        manifest.write_text(self.MANIFEST.replace("STATEMENT", "CREATE VIEW public.tried AS SELECT 1"))
        found = cli.json("rebuild", "try", "-f", str(manifest))
        assert (found["of"], found["works"]) == ("orders", True)
        assert shop.connection.execute("SELECT to_regclass('public.tried')").fetchone() == (None,)
        manifest.write_text(self.MANIFEST.replace("STATEMENT", "DROP VIEW no_such"))
        done = cli.run("rebuild", "try", "-f", str(manifest))
        assert (done.returncode, 'view "no_such" does not exist' in done.stderr) == (1, True)
        manifest.write_text(self.MANIFEST.replace("STATEMENT", "SELECT 1; COMMIT"))
        assert cli.run("rebuild", "try", "-f", str(manifest)).returncode == 3

    def test_a_connection_that_is_lost_meanwhile_is_no_fault_of_the_statement(self, shop, tmp_path):
        relay = Relay(shop.database.server.port)
        manifest = tmp_path / "v2.yaml"
        manifest.write_text(self.MANIFEST.replace("STATEMENT", "SELECT pg_sleep(60)"))
        cli = Cli(shop.database.files(port=relay.port).directory)
        sleeping = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'"
        with ThreadPoolExecutor() as pool:
            trying = pool.submit(cli.process, "rebuild", "try", "-f", str(manifest))
            wait_until(lambda: shop.connection.execute(sleeping).fetchone() == (1,), "the statement runs")
            relay.cut()
            done = trying.result(30)
        relay.close()
        assert done.returncode == 1
        assert "None" not in done.stderr
        assert "closed" in done.stderr
