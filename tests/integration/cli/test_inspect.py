"""What a person sees: status, lag, who holds the high-water mark, what was decided."""

from __future__ import annotations

import psycopg
import pytest

from outbox_core.spec import Source
from outbox_worker.postgres.admin import mappings
from tests.integration.cli.conftest import Cli


def test_status_of_an_empty_database_says_so(cli):
    done = cli.run("status")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "no processor has ever worked on schema outbox\n"
    assert cli.json("status") == []


def test_status_names_owner_checkpoint_and_lag(cli, shop):
    first, _, _ = shop.produce(3)
    shop.store(first)
    shop.own(live=True)

    (record,) = cli.json("status", "orders")
    table = cli.run("status").stdout.splitlines()

    assert record["claim"] == "test/shop/orders"
    assert (record["state"], record["pod"], record["epoch"]) == ("Running", "pod-a", 2)
    assert (record["checkpoint"], record["openConflict"], record["conflicts"]) == (str(first), None, 0)
    assert (record["lag"]["messages"], record["lag"]["atLeast"]) == (2, False)
    assert table[0].split() == [
        "PROCESSOR", "PARTITION", "STATE", "REASON", "CLAIM", "POD", "EPOCH", "CHECKPOINT", "STORED", "LAG",
        "CONFLICTS", "OPEN",
    ]  # fmt: skip
    assert table[1].split()[:8] == ["orders", "0", "Running", "-", "test/shop/orders", "pod-a", "2", str(first)]


def test_status_tells_blocked_claimed_and_free_apart(cli, shop):
    (first,) = shop.produce(1)
    shop.store(first)
    assert cli.json("status")[0]["state"] == "Claimed"
    number = shop.refuse(first, None)
    (record,) = cli.json("status")
    assert (record["state"], record["openConflict"]) == ("Blocked", number)
    shop.connection.execute("UPDATE outbox.processor_conflicts SET needs_person = false")
    shop.connection.execute("DELETE FROM outbox.processor_claims")
    assert cli.json("status")[0]["state"] == "Free"


def test_an_unknown_processor_is_refused(cli):
    done = cli.run("status", "nothing")
    assert (done.returncode, done.stderr) == (3, "outbox: schema outbox knows no processor nothing\n")


def test_lag_limits_are_told_by_the_exit_status(cli, shop):
    first, *_ = shop.produce(5)
    shop.store(first)
    assert cli.json("lag", "--max-messages", "4")[0]["messages"] == 4
    assert cli.json("lag", "--max-messages", "3", status=4)[0]["messages"] == 4
    assert cli.json("lag", "--max-seconds", "0", status=4)[0]["seconds"] > 0
    assert cli.json("lag", "--cap", "2", "--max-messages", "3", status=4)[0]["messages"] == 4
    assert cli.json("lag", "--cap", "2", "--max-messages", "4")[0]["atLeast"] is False
    capped = cli.json("lag", "--cap", "2")[0]
    assert (capped["messages"], capped["atLeast"]) == (2, True)
    assert "2+" in cli.run("lag", "--cap", "2").stdout


def test_a_processor_without_a_checkpoint_may_be_behind_by_anything(cli, shop):
    first, *_ = shop.produce(2)
    shop.own()
    new = cli.run("lag")
    assert (new.returncode, new.stdout) == (0, "")
    assert "orders has no checkpoint: how much waits is not known\n" in new.stderr
    assert cli.run("lag", "--max-messages", "9").returncode == 4
    shop.store(first)
    assert cli.run("lag", "--max-messages", "9").returncode == 0
    shop.connection.execute("DELETE FROM outbox.processor_checkpoints")
    assert cli.run("lag", "--max-seconds", "9000").returncode == 4
    assert cli.json("lag", "orders", "--max-messages", "9", status=4) == []
    shop.connection.execute("DELETE FROM outbox.processor_claims")
    assert cli.run("lag", "--max-messages", "9").returncode == 0, "it is gone: nothing waits for it"


def test_lag_counts_what_the_manifest_filters(cli, shop, tmp_path):
    first, *_ = shop.produce(3)
    shop.produce(2, "OrderPaid")
    shop.store(first)
    manifest = tmp_path / "orders.yaml"
    manifest.write_text(
        "apiVersion: outbox-operator.dev/v1alpha1\nkind: OutboxProcessor\nmetadata: {name: orders}\nspec:\n"
        "  source: {connection: {secretRef: {name: db}}, messageTypes: [OrderPaid]}\n  target: {log: {}}\n"
    )
    assert cli.json("lag")[0]["messages"] == 4
    assert cli.json("lag", "-f", str(manifest))[0]["messages"] == 2


def test_stall_without_a_holder(cli):
    assert cli.json("stall", "--check")["holder"] is None
    assert "nothing holds the high-water mark back" in cli.run("stall").stdout


def test_stall_names_a_session_of_another_database(cli, shop, servers):
    server = shop.database.server
    other = server.create("empty_template")
    stranger = psycopg.connect(server.uri(other), application_name="nightly-report")
    try:
        stranger.execute("SELECT pg_current_xact_id()")
        pid = stranger.info.backend_pid
        shop.produce(1)

        found = cli.json("stall", "--check", status=4)
        text = cli.run("stall").stdout

        holder = found["holder"]
        assert (holder["pid"], holder["application"], holder["database"]) == (pid, "nightly-report", other)
        assert holder["ageSeconds"] > 0
        assert found["messagesWait"] is True
        assert f"session {pid} of role postgres in database {other}, application 'nightly-report'" in text
        assert f"pg_terminate_backend({pid})" in text
    finally:
        stranger.close()
        server.drop(other)


def test_stall_looks_into_each_table_that_a_processor_reads(cli, shop, tmp_path):
    shop.connection.execute("CREATE TABLE public.legacy (id uuid DEFAULT gen_random_uuid(), type text, payload jsonb)")
    assert cli.run("adopt", "--table", "public.legacy").returncode == 0
    shop.own()
    columns = {"messageId": "id", "messageType": "type", "data": "payload"}
    table = {"schemaName": "public", "name": "legacy", "columns": columns}
    source = {"connection": {"secretRef": {"name": "db"}}, "table": table}
    mappings.note(shop.connection, shop.key, shop.resource.uid, Source.model_validate(source))
    with shop.database.direct(autocommit=False) as other:
        other.execute("SELECT pg_current_xact_id()")
        assert cli.json("stall", "--check")["messagesWait"] is False
        shop.connection.execute("INSERT INTO public.legacy (type) VALUES ('OrderPlaced')")
        assert cli.json("stall", "--check", status=4)["messagesWait"] is True
        shop.connection.execute("ALTER TABLE public.legacy RENAME TO gone")
        done = cli.run("stall")
        assert (done.returncode, "no committed message waits behind it" in done.stdout) == (0, True)
        assert "orders: whether a message waits is not known: " in done.stderr


def test_stall_names_a_prepared_transaction(cli, shop):
    other = shop.database.direct(autocommit=False)
    other.execute("SELECT pg_current_xact_id()")
    other.execute("PREPARE TRANSACTION 'it''s mine'")

    found = cli.json("stall")
    text = cli.run("stall").stdout

    assert (found["holder"]["preparedTransaction"], found["holder"]["pid"]) == ("it's mine", None)
    assert "ROLLBACK PREPARED 'it''s mine'" in text
    assert "no committed message waits behind it" in text


def test_stall_lists_who_comes_next(cli, shop):
    first, second = (shop.database.direct(autocommit=False) for _ in range(2))
    pids = [c.execute("SELECT pg_backend_pid() FROM pg_current_xact_id()").fetchone()[0] for c in (first, second)]
    found = cli.json("stall", "--all")
    assert [writer["pid"] for writer in found["writers"]] == pids
    assert found["holder"]["pid"] == pids[0]


def test_stall_says_which_grant_shows_the_rest(database, shop):
    stranger = database.direct(autocommit=False)
    stranger.execute("SELECT pg_current_xact_id()")
    admin = database.direct()
    admin.execute("GRANT USAGE ON SCHEMA outbox TO processor; GRANT SELECT ON ALL TABLES IN SCHEMA outbox TO processor")
    done = Cli(database.files("processor").directory).run("stall")
    assert done.returncode == 0
    assert "application 'stranger'" in done.stdout
    assert "GRANT pg_read_all_stats" in done.stderr


@pytest.mark.parametrize("command", ["status", "lag", "stall", "audit"])
def test_without_the_schema_it_says_what_to_run(empty_database, command):
    done = Cli(empty_database.files().directory).run(command)
    assert done.returncode == 1
    assert "run `outbox migrate`" in done.stderr


def test_looking_takes_no_transaction_id(cli, shop):
    (first,) = shop.produce(1)
    shop.store(first)
    query = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text"
    before = shop.connection.execute(query).fetchone()
    for command in ("status", "lag", "stall", "audit"):
        assert cli.run(command).returncode == 0
    assert cli.run("conflicts", "list").returncode == 0
    assert shop.connection.execute(query).fetchone() == before
