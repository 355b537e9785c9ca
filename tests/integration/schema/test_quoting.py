"""A server with `quote_all_identifiers` writes the names of types and functions in quotes: they are the same."""

from __future__ import annotations

import pytest
from psycopg import sql

from outbox_cli.try_out.existing import find_outboxes
from outbox_sql import adopt
from outbox_sql.adopt import Adoption
from outbox_worker.postgres import schema
from outbox_worker.postgres.admin.repair import find_outboxes as find_written
from outbox_worker.postgres.reading.table import OutboxTable
from tests.integration.cli.conftest import Cli
from tests.support.servers.postgres import build_source

AHEAD = "10000000"


@pytest.fixture(autouse=True)
def quoting(database):
    with database.direct() as admin:
        name = sql.Identifier(database.name)
        admin.execute(sql.SQL("ALTER DATABASE {} SET quote_all_identifiers = on").format(name))


def test_our_own_table_is_in_order(database):
    source, connection = build_source(), database.connect()
    schema.ensure_schema(connection, source)
    table = OutboxTable.of(source)
    assert schema.find_faults(table, schema.fetch_columns(connection, table)) == []


def test_another_outbox_is_known_and_adopted(database):
    direct = database.direct()
    direct.execute(
        "CREATE TABLE public.outboxevent (id uuid PRIMARY KEY, aggregatetype varchar(255) NOT NULL, "
        "aggregateid varchar(255) NOT NULL, type varchar(255) NOT NULL, payload jsonb, created_at timestamptz);"
        "INSERT INTO public.outboxevent SELECT gen_random_uuid(), 'order', '7', 'old', '{}' FROM generate_series(1, 3)"
    )
    (found,) = [each for each in find_outboxes(direct)[0] if each.name == "outboxevent"]
    assert (found.kind.kind.name, found.kind.faults) == ("debezium", ())
    adopt.adopt(direct, Adoption("public", "outboxevent"), announce=lambda _: None)
    columns = {"messageId": "id", "messageType": "type", "data": "payload", "scheduled": "created_at"}
    mapped = {"schemaName": "public", "name": "outboxevent", "columns": columns}
    schema.ensure_schema(database.connect(), build_source(table=mapped))


def test_a_restored_outbox_is_found_and_repaired(database):
    direct = database.direct()
    assert [each.name for each in find_written(direct, "outbox")] == ["messages"]
    direct.execute(
        "INSERT INTO outbox.messages (transaction_id, message_id, message_type, data) "
        f"VALUES ('{AHEAD}', 'restored', 't', '{{}}');"
        f"INSERT INTO outbox.processor_checkpoints VALUES ('orders', 0, '{AHEAD}', 1)"
    )
    done = Cli(database.files().directory).run("repair", "--yes", "--reason", "restored")
    assert done.returncode == 0, done.stderr
    checkpoint = "SELECT last_processed_transaction_id FROM outbox.processor_checkpoints"
    (at,) = direct.execute(f"SELECT transaction_id::text::bigint, ({checkpoint})::text::bigint FROM outbox.messages")
    assert at[0] == at[1] < int(AHEAD)


def test_the_lock_of_a_claim_is_the_same_for_every_session(database):
    direct, key = database.direct(), "SELECT outbox.claim_key('orders')"
    quoted = direct.execute(key).fetchone()
    direct.execute("SET quote_all_identifiers = off")
    assert direct.execute(key).fetchone() == quoted
