"""The demo's producers, gate, ledger and examples against real servers: what the demo proves stands on them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import psycopg
import pytest
import yaml

from tests.support.servers.postgres import wait_until
from tests.support.servers.rabbitmq import RabbitmqServer
from tests.support.worker import Worker, Workers, build_config
from tests.tools.demo.database import Database as DemoDatabase
from tests.tools.demo.producing.transactions import LARGE_BYTES
from tests.tools.ledger.account import Order, compare, compare_sums
from tests.tools.ledger.amqp import BrokerError
from tests.tools.ledger.commitlog import read_commit_logs
from tests.tools.ledger.plant import check_list, check_sums
from tests.tools.ledger.targets import read_rows, read_sums

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.servers.postgres import Database
    from tests.tools.ledger.commitlog import Committed

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples"
MESSAGES = 1500
PROJECT = """
INSERT INTO projection.handled_orders (message_id, order_key, order_sequence, cents)
SELECT message_id, data->>'orderKey', (data->>'sequence')::int, (data->>'cents')::bigint
  FROM outbox.messages ORDER BY transaction_id, position
"""


@pytest.fixture
def shop(database: Database) -> Database:
    """A database with the tables of the examples and the demo's gate."""
    with psycopg.connect(database.uri(), autocommit=True) as connection:
        connection.execute((EXAMPLES / "orders.sql").read_bytes())
        connection.execute((ROOT / "tests/tools/demo/gate.sql").read_bytes())
    return database


@pytest.fixture
def produced(shop: Database, tmp_path: Path) -> list[Committed]:
    """The commit log of a short run of the producers."""
    environment = {"PGHOST": "127.0.0.1", "PGPORT": str(shop.port), "PGUSER": "postgres", "PGDATABASE": shop.name}
    command = [
        sys.executable,
        "-m",
        "tests.tools.demo.producing.producers",
        "--log-dir",
        str(tmp_path / "log"),
        "--seed",
        "11",
    ]
    subprocess.run(
        [*command, "--messages", str(MESSAGES), "--seconds", "3"],
        cwd=ROOT,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        check=True,
        timeout=120,
    )
    return read_commit_logs(tmp_path / "log")


@pytest.fixture
def connection(shop: Database) -> Iterator[psycopg.Connection]:
    with psycopg.connect(shop.uri(), autocommit=True) as opened:
        yield opened


def test_commit_logs_are_the_outbox_in_its_own_order(produced, connection) -> None:
    assert len(produced) >= MESSAGES
    outbox = connection.execute(
        "SELECT message_id, transaction_id::text::bigint, position, partition_key FROM outbox.messages "
        "ORDER BY transaction_id, position"
    ).fetchall()
    assert [(m.message_id, *m.pair, m.key) for m in produced] == outbox


def test_producers_make_an_outbox_that_is_hard_to_read(produced, connection) -> None:
    positions = [m.pair[1] for m in produced]
    assert positions != sorted(positions), "positions commit out of order"
    assert max(positions) > len(positions), "rolled back transactions leave gaps"
    assert {m.producer for m in produced} == set(range(8))
    large = connection.execute("SELECT count(*) FROM outbox.messages WHERE length(data::text) > 8192").fetchone()
    assert large is not None
    assert large[0] > 0
    assert LARGE_BYTES > 8192


def test_true_projection_has_a_clean_account_and_the_self_test_finds_all(produced, connection) -> None:
    connection.execute(PROJECT)
    handled = read_rows(connection, "projection", "handled_orders")
    assert compare("rows", produced, handled).is_exact()
    assert check_list(produced, handled, Random(1)) == []


@pytest.mark.parametrize(
    ("spoil", "counts"),
    [
        pytest.param("DELETE FROM {} WHERE handled_id = 700", (1, 0, 0), id="loss"),
        pytest.param(
            "INSERT INTO {} (message_id, order_key, order_sequence, cents) "
            "SELECT message_id, order_key, order_sequence, cents FROM {} WHERE handled_id = 700",
            (0, 1, 0),
            id="duplicate",
        ),
        pytest.param(
            "UPDATE {} a SET (message_id, order_key, order_sequence, cents) = "
            "(SELECT b.message_id, b.order_key, b.order_sequence, b.cents FROM {} b "
            "WHERE b.handled_id = 1401 - a.handled_id) WHERE a.handled_id IN (700, 701)",
            (0, 0, 1),
            id="swap",
        ),
    ],
)
def test_fault_planted_in_the_table_itself_is_found(spoil, counts, produced, connection) -> None:
    connection.execute(PROJECT)
    connection.execute(spoil.replace("{}", "projection.handled_orders"))
    account = compare("rows", produced, read_rows(connection, "projection", "handled_orders"))
    assert (account.lost, account.duplicated, account.out_of_order) == counts


def test_sums_by_minute_are_read_as_the_commit_log_has_them(produced, connection) -> None:
    connection.execute(
        "INSERT INTO analytics.orders_per_minute (minute, messages, cents) "
        "SELECT date_trunc('minute', (data->>'placedAt')::timestamptz), count(*), sum((data->>'cents')::bigint) "
        "FROM outbox.messages GROUP BY 1"
    )
    sums = read_sums(connection, "analytics", "orders_per_minute", "minute")
    assert compare_sums("minutes", produced, sums).is_exact()
    assert check_sums(produced, sums) == []


def test_gate_holds_one_session_and_lets_all_others_pass(shop, connection) -> None:
    database = DemoDatabase("127.0.0.1", shop.port, "", user="postgres", name=shop.name)
    insert = "INSERT INTO loyalty.handled_orders (message_id, order_key, order_sequence, cents) VALUES ('m', 'k', 1, 1)"
    count = "SELECT count(*) FROM loyalty.handled_orders"

    def insert_elsewhere() -> None:
        with psycopg.connect(shop.uri(), autocommit=True, application_name="held") as first:
            first.execute(insert)

    thread = threading.Thread(target=insert_elsewhere)
    with database.hold_next_batch("loyalty.handled_orders", thread.start) as pid:
        assert database.application_of(pid) == "held"
        connection.execute(insert)
        assert connection.execute(count).fetchone() == (1,), "the others pass, the held one does not"
        held = connection.execute("SELECT backend_xid IS NULL FROM pg_stat_activity WHERE pid = %s", [pid]).fetchone()
        assert held == (True,), "it holds nobody's high-water mark back"
    thread.join(20)
    assert connection.execute(count).fetchone() == (2,)
    database.close()


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    running = Workers(tmp_path)
    yield running
    running.stop()


def test_example_with_sql_projects_every_message_once_and_in_order(produced, shop, connection, workers) -> None:
    spec = yaml.safe_load((EXAMPLES / "orders-projection.yaml").read_text())["spec"]
    worker = workers.start(build_config(shop, spec["target"]), shop.uri())
    worker.wait_for("all is handled", lambda report: report.handled >= len(produced), seconds=60)
    assert compare("rows", produced, read_rows(connection, "projection", "handled_orders")).is_exact()
    totals = read_sums(connection, "projection", "order_totals", "order_key")
    assert compare_sums("totals", produced, totals, by="key").is_exact()


def test_example_with_python_handles_every_message_once_and_in_order(produced, shop, connection, workers) -> None:
    spec = yaml.safe_load((EXAMPLES / "orders-loyalty/processor.yaml").read_text())["spec"]
    code = yaml.safe_load((EXAMPLES / "orders-loyalty/handler.yaml").read_text())["data"]["loyalty.py"]
    home = workers.prepare(build_config(shop, spec["target"]), shop.uri(), handler="")
    (home / "handler/loyalty.py").write_text(code)
    worker = workers.launch(home)
    worker.wait_for("all is handled", lambda report: report.handled >= len(produced), seconds=60)
    assert compare("rows", produced, read_rows(connection, "loyalty", "handled_orders")).is_exact()
    points = connection.execute("SELECT sum(points) FROM loyalty.points").fetchone()
    assert points == (sum(m.cents // 100 for m in produced),)


def start_example(workers: Workers, shop: Database, name: str) -> Worker:
    spec = yaml.safe_load((EXAMPLES / "orders-modes" / name).read_text())["spec"]
    source = {"cursor": spec["source"]["cursor"]} if "cursor" in spec["source"] else {}
    delivery = spec["delivery"]
    return workers.start(build_config(shop, spec["target"], source=source, delivery=delivery), shop.uri())


def test_example_of_mode_competing_handles_every_message_once(produced, shop, connection, workers) -> None:
    start_example(workers, shop, "competing.yaml")
    parcels = DemoDatabase("127.0.0.1", shop.port, "", user="postgres", name=shop.name)
    wait_until(lambda: parcels.unhandled("parcels") == 0, "all parcels", 60)
    assert compare("parcels", produced, read_rows(connection, "parcels", "handled_orders"), order=Order.NONE).is_exact()


def test_example_of_mode_partitioned_keeps_the_order_of_each_key(produced, shop, connection, workers) -> None:
    start_example(workers, shop, "partitioned.yaml")
    search = DemoDatabase("127.0.0.1", shop.port, "", user="postgres", name=shop.name)
    wait_until(lambda: search.unhandled("search") == 0, "all is found", 60)
    assert compare("search", produced, read_rows(connection, "search", "handled_orders"), order=Order.KEY).is_exact()


@pytest.fixture(scope="session")
def rabbitmq() -> Iterator[RabbitmqServer]:
    server = RabbitmqServer()
    yield server
    server.close()


def test_queue_is_drained_in_order_with_ids_headers_and_large_bodies(rabbitmq) -> None:
    with rabbitmq.queue("ledger", "ledger-exchange") as client:
        bodies = [
            {"orderKey": "order-1", "sequence": n + 1, "cents": n, "note": "x" * (300_000 if n == 3 else 1)}
            for n in range(50)
        ]
        for n, body in enumerate(bodies):
            headers = {"x-outbox-pod": "worker-a", "x-outbox-epoch": 7}
            client.publish("ledger", f"id-{n}", json.dumps(body).encode(), headers)
        wait_until(lambda: client.count("ledger") == 50, "the broker has them")
        taken = [delivery.as_handled() for delivery in client.drain("ledger")]
    assert [(t.message_id, t.sequence, t.handler) for t in taken] == [
        (f"id-{n}", n + 1, "worker-a (epoch 7)") for n in range(50)
    ]


def test_queue_that_is_not_there_is_an_error_and_an_empty_one_is_not(rabbitmq) -> None:
    with rabbitmq.queue("empty") as client:
        assert client.drain("empty") == []
    with rabbitmq.client() as client, pytest.raises(BrokerError, match="404"):
        client.count("no-such-queue")
