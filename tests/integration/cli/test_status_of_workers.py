"""`outbox status` and `outbox lag` beside real workers: the last word of each, and what waits in its own table."""

from __future__ import annotations

import signal

import pytest

from tests.integration.cli.conftest import SCHEMA, Cli
from tests.support.servers.postgres import wait_until
from tests.support.worker import SQL_TARGET, Outbox, build_config

FAILING = {"sql": {"statement": "INSERT INTO nowhere SELECT message_id FROM batch"}}
PARTITIONED = {"mode": "Partitioned", "partitions": {"count": 2}, "blocks": "Partition"}
MODES = {
    "Ordered by transaction": ({}, {}),
    "Ordered by snapshot": ({}, {"cursor": "Snapshot"}),
    "Partitioned": (PARTITIONED, {}),
}
COMPETING = ({"mode": "Competing", "competing": {"leaseDuration": "2s"}}, {"cursor": None})
ONCE = {"retry": {"maxAttempts": 1, "initialBackoff": "50ms", "maxBackoff": "100ms"}, "whenExhausted": "Stop"}
MAPPED = """
CREATE TABLE public.shop_outbox (
    n bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, tx xid8 NOT NULL DEFAULT pg_current_xact_id(),
    id uuid NOT NULL DEFAULT gen_random_uuid(), kind text NOT NULL DEFAULT 'OrderPlaced',
    customer text, payload jsonb NOT NULL DEFAULT '{"total": 1}'
);
CREATE INDEX ON public.shop_outbox (tx, n);
"""
TABLE = {
    "schemaName": "public",
    "name": "shop_outbox",
    "columns": {"position": "n", "transactionId": "tx", "messageId": "id", "messageType": "kind", "data": "payload",
                "partitionKey": "customer"},
}  # fmt: skip


def start(workers, database, mode, target=SQL_TARGET, **source):
    delivery, of_source = mode
    config = build_config(database, target, delivery=ONCE | delivery, source=of_source | source)
    return workers.start(config, database.uri(), pod="pod-a")


def wait_for(cli, what, condition, seconds=30.0):
    """Ask until the answer is as it should be; return it."""
    last: list[list[dict[str, object]]] = []

    def holds():
        last[:] = [cli.json("status")]
        return bool(last[0]) and condition(last[0])

    try:
        wait_until(holds, what, seconds)
    except AssertionError as err:
        raise AssertionError(f"{err}: {last}") from err
    return last[0]


@pytest.fixture
def cli(database) -> Cli:
    return Cli(database.files().directory)


@pytest.mark.parametrize("mode", [*MODES.values()], ids=[*MODES])
def test_a_processor_whose_attempts_ran_out_is_stopped_and_says_why(cli, outbox, workers, database, mode):
    outbox.produce(7)
    start(workers, database, mode, FAILING)
    records = wait_for(cli, "Stopped is told", lambda found: any(each["state"] == "Stopped" for each in found))
    process = next(each["process"] for each in records if each["state"] == "Stopped")
    assert (process["reason"], process["pod"], process["fresh"]) == ("AttemptsExhausted", "pod-a", True)
    assert "nowhere" in process["message"]
    done = cli.run("status")
    assert "AttemptsExhausted" in done.stdout
    assert "Stopped (AttemptsExhausted)" in done.stderr


def test_a_consumer_that_fails_says_so(cli, outbox, workers, database):
    outbox.produce(3)
    delivery, source = COMPETING
    retry = {"retry": {"maxAttempts": 50, "initialBackoff": "20s", "maxBackoff": "20s"}, "whenExhausted": "DeadLetter"}
    start(workers, database, (delivery | retry, source), FAILING)
    (record,) = wait_for(cli, "a consumer speaks", lambda found: bool(found[0].get("process")))
    assert (record["process"]["pod"], record["process"]["fresh"]) == ("pod-a", True)


@pytest.mark.parametrize("mode", [*MODES.values(), COMPETING], ids=[*MODES, "Competing"])
def test_of_a_mapped_table_it_counts_what_waits_there(cli, outbox, workers, database, mode):
    outbox.connection.execute(MAPPED)
    outbox.connection.execute("CREATE INDEX ON public.shop_outbox (n)")
    worker = start(workers, database, mode, table=TABLE)
    outbox.connection.execute("INSERT INTO public.shop_outbox (customer) SELECT 'c-' || i FROM generate_series(1, 5) i")
    wait_until(lambda: outbox.count() == 5, "five handled")
    wait_for(cli, "nothing waits", lambda found: sum(each["lag"]["messages"] for each in found) == 0)
    worker.kill()
    outbox.connection.execute("INSERT INTO public.shop_outbox (customer) SELECT 'c-' || i FROM generate_series(1, 3) i")

    assert sum(each["lag"]["messages"] for each in cli.json("status")) == 3
    assert sum(each["messages"] for each in cli.json("lag", "orders", "--max-messages", "0", status=4)) == 3
    assert cli.run("lag", "--max-messages", "5").returncode == 0


def test_of_a_filtered_processor_it_counts_what_it_handles(cli, outbox, workers, database):
    worker = start(workers, database, MODES["Ordered by snapshot"], messageTypes=["OrderPaid"])
    worker.wait_state("Active")
    wait_for(cli, "it has a checkpoint", lambda found: found[0]["checkpoint"] is not None)
    worker.kill()
    outbox.produce(4)
    outbox.produce(2, start=4, message_type="OrderPaid")
    assert cli.json("lag")[0]["messages"] == 2


@pytest.mark.parametrize("mode", [*MODES.values(), COMPETING], ids=[*MODES, "Competing"])
def test_the_status_of_a_killed_worker_is_called_old(cli, outbox, workers, database, mode):
    outbox.produce(3)
    worker = start(workers, database, mode)
    wait_for(cli, "it speaks", lambda found: all(each["process"] and each["process"]["fresh"] for each in found))
    assert {each["state"] for each in cli.json("status")} == {"Running"}
    worker.kill()
    records = wait_for(cli, "it is silent", lambda found: not any(each["process"]["fresh"] for each in found))
    wait_for(cli, "nobody works", lambda found: {each["state"] for each in found} == {"Claimed"})
    assert {each["process"]["ended"] for each in records} == {False}
    done = cli.run("status")
    assert "silent" in done.stdout
    assert "nothing was heard of pod pod-a" in done.stderr


def test_a_worker_that_ends_leaves_what_was_before(cli, outbox, workers, database):
    outbox.produce(2)
    worker = start(workers, database, MODES["Ordered by transaction"], FAILING)
    wait_for(cli, "it is stopped", lambda found: found[0]["state"] == "Stopped")
    worker.send(signal.SIGINT)
    assert worker.process.wait(20) == 0
    (record,) = cli.json("status")
    assert (record["state"], record["process"]["state"], record["process"]["ended"]) == ("Vacated", "Stopped", True)
    assert "pod pod-a ended" in cli.run("status").stderr
    # The next process's word takes its place.
    start(workers, database, MODES["Ordered by transaction"])
    (record,) = wait_for(cli, "another speaks", lambda found: found[0]["state"] == "Running")
    count = outbox.connection.execute("SELECT count(*) FROM outbox.process_statuses").fetchone()
    assert count == (1,)


def test_a_worker_that_cannot_begin_says_why(cli, outbox, workers, database):
    outbox.produce(2)
    target = {"python": {"module": "absent", "function": "handle", "configMapRef": {"name": "handlers"}}}
    config = build_config(database, target)
    workers.start(config, database.uri(), pod="pod-a", handler="")
    (record,) = wait_for(cli, "Unavailable is told", lambda found: found[0]["state"] == "Unavailable")
    assert record["process"]["reason"] == "HandlerInvalid"


def test_blocked_is_told_with_its_reason(cli, outbox, workers, database):
    outbox.produce(2)
    worker = start(workers, database, MODES["Ordered by transaction"])
    worker.wait_for("all is handled", lambda report: report.handled == 2)
    outbox.connection.execute("UPDATE outbox.processor_checkpoints SET last_processed_position = 900")
    outbox.produce(1, start=2)
    (record,) = wait_for(
        cli,
        "Blocked is told",
        lambda found: found[0]["state"] == "Blocked" and (found[0]["process"] or {}).get("state") == "Blocked",
    )
    assert record["process"]["reason"] in ("CheckpointAhead", "CheckpointOlder")


def test_no_status_holds_a_password(cli, outbox, workers, database):
    outbox.produce(1)
    start(workers, database, MODES["Ordered by transaction"], FAILING)
    wait_for(cli, "it is stopped", lambda found: found[0]["state"] == "Stopped")
    rows = outbox.connection.execute(
        f"SELECT statuses::text FROM {SCHEMA}.process_statuses "
        f"UNION ALL SELECT columns::text FROM {SCHEMA}.processor_mappings"
    ).fetchall()
    assert not any("postgresql://" in (row[0] or "") for row in rows)


def test_a_table_that_is_gone_hides_no_other_processor(cli, outbox, workers, database):
    outbox.connection.execute(MAPPED)
    worker = start(workers, database, MODES["Ordered by transaction"], table=TABLE)
    wait_for(cli, "it has a checkpoint", lambda found: found[0]["checkpoint"] is not None)
    worker.kill()
    outbox.connection.execute("DROP TABLE public.shop_outbox")
    done = cli.run("status")
    assert done.returncode == 0
    assert "unknown" in done.stdout


@pytest.fixture
def outbox(database):
    return Outbox(database)
