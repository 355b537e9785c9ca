"""When `outbox try` has nothing more to wait for: the database says so, and sends no message that is left."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from typing_extensions import override

from outbox_cli.try_out import shop
from outbox_cli.try_out.counting import is_all_handled
from outbox_cli.try_out.processors import build_processors

TOTALS = build_processors()[0]
WORKERS: Any = [SimpleNamespace(processor=TOTALS)]
MANY = 5000


class Sized(psycopg.Cursor[Any]):
    """Remembers the largest result that the server sent."""

    most = 0

    @override
    def execute(self, *args, **kwargs):
        super().execute(*args, **kwargs)
        Sized.most = max(Sized.most, self.rowcount)
        return self


@pytest.fixture
def connection(database):
    made = database.direct()
    made.execute((Path(shop.__file__).parent / "shop.sql").read_text())
    yield made
    made.execute("DROP SCHEMA shop CASCADE")


def produce(connection, first, last):
    connection.execute(
        "INSERT INTO outbox.messages (message_id, message_type, data) "
        "SELECT 'message-' || n, 'T', '{}' FROM generate_series(%s::int, %s) AS n ORDER BY n",
        (first, last),
    )


def handle(connection, first, last):
    connection.execute(
        "INSERT INTO shop.totals_lines (message_id) SELECT 'message-' || n FROM generate_series(%s::int, %s) AS n",
        (first, last),
    )


def decide(connection, act, start, end):
    connection.execute(
        "INSERT INTO outbox.audit_log (action, processor_id, from_transaction_id, from_position, to_transaction_id, "
        "to_position, reason, decided_by) VALUES (%s, %s, %s, %s, %s, %s, 'test', 'me')",
        (act, TOTALS.processor_id, *start, *end),
    )


def pair(connection, number):
    query = "SELECT transaction_id::text, position FROM outbox.messages WHERE message_id = %s"
    return connection.execute(query, (f"message-{number}",)).fetchone()


def test_what_waits_is_not_fetched(connection, database):
    looking = database.direct()
    looking.cursor_factory = Sized
    assert is_all_handled(looking, WORKERS)
    produce(connection, 1, MANY)
    assert not is_all_handled(looking, WORKERS)
    handle(connection, 1, MANY - 1)
    assert not is_all_handled(looking, WORKERS)
    handle(connection, MANY, MANY)
    assert is_all_handled(looking, WORKERS)
    assert Sized.most == 1


def test_what_a_decision_passed_over_is_not_waited_for(connection):
    for number in range(1, 7):
        produce(connection, number, number)
    handle(connection, 1, 1)
    decide(connection, "Accept", pair(connection, 2), pair(connection, 4))
    handle(connection, 5, 6)
    assert not is_all_handled(connection, WORKERS), "the second is where it was moved from"
    handle(connection, 2, 2)
    assert is_all_handled(connection, WORKERS)
    connection.execute("DELETE FROM shop.totals_lines WHERE message_id = 'message-5'")
    assert not is_all_handled(connection, WORKERS), "the fifth is behind the place that it was moved to"
    decide(connection, "Skip", (None, None), pair(connection, 5))
    assert is_all_handled(connection, WORKERS)


@pytest.mark.parametrize("start", [(None, None), ("0", 1)])
def test_where_a_decision_says_no_place_each_message_is_waited_for(connection, start):
    produce(connection, 1, 3)
    decide(connection, "Rewind", start, ("0", 7))
    assert not is_all_handled(connection, WORKERS)
    handle(connection, 1, 3)
    assert is_all_handled(connection, WORKERS)


def test_a_move_from_no_checkpoint_passes_over_all_before_it(connection):
    produce(connection, 1, 3)
    decide(connection, "Accept", (None, None), pair(connection, 3))
    assert is_all_handled(connection, WORKERS)
