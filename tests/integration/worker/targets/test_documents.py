"""The statement and the function that the pages show do what they say, over more than one message of an order."""

from __future__ import annotations

from pathlib import Path

import yaml

from tests.support.servers.postgres import wait_until
from tests.support.worker import PYTHON_TARGET, build_config

ROOT = Path(__file__).resolve().parents[4]
ORDERS = [("a", 250), ("b", 100), ("a", 50)]


def produce(connection):
    """Store the messages of all orders in one transaction, so that one batch has them."""
    with connection.transaction():
        for order, cents in ORDERS:
            connection.execute(
                "INSERT INTO outbox.messages (message_type, data) "
                "VALUES ('OrderPlaced', jsonb_build_object('orderId', %s::text, 'cents', %s::int))",
                (order, cents),
            )


def shown_in(page, language):
    return (ROOT / page).read_text().split(f"```{language}\n")[1].split("```")[0]


def test_the_statement_of_the_readme(outbox, workers):
    connection = outbox.connection
    connection.execute("CREATE SCHEMA sales; CREATE TABLE sales.order_totals (order_id text PRIMARY KEY, cents bigint)")
    target = yaml.safe_load(shown_in("README.md", "yaml"))["spec"]["target"]
    worker = workers.start(build_config(outbox.database, target), outbox.database.uri())
    produce(connection)
    worker.wait_for("three messages are handled", lambda report: report.handled == 3)
    produce(connection)
    totals = "SELECT order_id, cents FROM sales.order_totals ORDER BY order_id"
    wait_until(lambda: connection.execute(totals).fetchall() == [("a", 600), ("b", 200)], "both rounds are added up")
    worker.wait_for("they are counted", lambda report: report.handled == 6)


def test_the_function_of_the_workers_page(outbox, workers):
    connection = outbox.connection
    connection.execute("CREATE SCHEMA loyalty; CREATE TABLE loyalty.points (message_id text PRIMARY KEY, points int)")
    config = build_config(outbox.database, PYTHON_TARGET)
    worker = workers.start(config, outbox.database.uri(), handler=shown_in("worker/README.md", "python"))
    produce(connection)
    points = "SELECT points FROM loyalty.points ORDER BY points"
    wait_until(lambda: connection.execute(points).fetchall() == [(0,), (1,), (2,)], "every message has its points")
    assert worker.wait_for("it has counted them", lambda report: report.handled == 3).conflicts.count == 0
