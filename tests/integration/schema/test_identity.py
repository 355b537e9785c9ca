"""Which database is this? A copy, a restore elsewhere and a server behind its own rows are noticed."""

from __future__ import annotations

import pytest
from psycopg import sql

from outbox_core.errors import ConfigurationError
from outbox_core.progress.checkpoint import BEGINNING
from outbox_core.report import Reason
from outbox_worker.postgres import identity
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.reading.messages import MessageReader
from tests.support.database.contract import own, put
from tests.support.database.messages import insert
from tests.support.servers.postgres import VERSIONS, build_source, mostly_nightly
from tests.support.servers.restore import next_id, use_up

SOURCE = build_source()
KEY = ProcessorKey("outbox", "orders")
TOKEN = "00000000-0000-0000-0000-000000000001"


def refusal(connection, key=None):
    with pytest.raises(ConfigurationError) as caught:
        identity.check_identity(connection, SOURCE, key)
    return caught.value


@pytest.fixture(params=mostly_nightly(*VERSIONS))
def anywhere(servers, request):
    with servers.database(request.param) as database:
        yield database


@pytest.fixture
def copy(anywhere):
    """A copy of the database on the same server, as a template or a dump makes one."""
    own(anywhere, TOKEN)
    put(anywhere.direct(), (1, 1))
    original = identity.check_identity(anywhere.connect(), SOURCE)
    with anywhere.server.connect("postgres") as admin:
        admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (anywhere.name,))
        admin.execute(
            sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(
                sql.Identifier(f"{anywhere.name}_copy"), sql.Identifier(anywhere.name)
            )
        )
    with anywhere.server.connect(f"{anywhere.name}_copy") as connection:
        yield connection, original
    anywhere.server.drop(f"{anywhere.name}_copy")


def test_a_copy_is_noticed_and_the_original_is_not(anywhere, copy):
    connection, original = copy

    error = refusal(connection)

    assert error.reason is Reason.DATABASE_COPIED
    assert "outbox confirm-identity keep" in str(error)
    assert identity.check_identity(anywhere.connect(), SOURCE) == original


def test_keep_says_that_it_moved(copy):
    connection, original = copy
    connection.execute("SELECT outbox.confirm_identity('keep', 'me')")

    assert identity.check_identity(connection, SOURCE) == original
    assert connection.execute("SELECT count(*) FROM outbox.processor_claims").fetchone() == (1,)
    acts = connection.execute("SELECT action, reason, decided_by FROM outbox.audit_log").fetchall()
    assert acts == [("ConfirmIdentity", "keep", "me")]


def test_renew_makes_it_another_database_without_owners(copy):
    connection, original = copy
    connection.execute("SELECT outbox.confirm_identity('renew')")

    assert identity.check_identity(connection, SOURCE) != original
    assert connection.execute("SELECT count(*) FROM outbox.processor_claims").fetchone() == (0,)
    leases = connection.execute("SELECT count(*) FROM outbox.processor_leases WHERE expires_at > clock_timestamp()")
    assert leases.fetchone() == (0,)
    assert connection.execute("SELECT count(*) FROM outbox.processor_checkpoints").fetchone() == (1,)


def test_an_empty_identity_is_a_copy_too(anywhere):
    anywhere.direct().execute("DELETE FROM outbox.database_identity")

    assert refusal(anywhere.connect()).reason is Reason.DATABASE_COPIED


def test_a_server_behind_its_own_rows_is_noticed(anywhere):
    """Fault 6: rows restored from a server that was further on would stay invisible, and nobody would say so."""
    anywhere.direct().execute(
        "INSERT INTO outbox.messages (transaction_id, message_type, data) VALUES ('987654321', 'restored', '{}')"
    )
    assert MessageReader(SOURCE).fetch(anywhere.connect(), BEGINNING, 10).messages == ()

    error = refusal(anywhere.connect())

    assert error.reason is Reason.DATABASE_BEHIND
    assert "987654321" in str(error)


def test_a_checkpoint_that_the_server_has_not_reached_is_noticed_unless_a_person_is_asked_already(anywhere):
    put(anywhere.direct(), (987654321, 1))
    assert refusal(anywhere.connect(), KEY).reason is Reason.DATABASE_BEHIND
    identity.check_identity(anywhere.connect(), SOURCE, ProcessorKey("outbox", "other"))

    anywhere.direct().execute(
        "INSERT INTO outbox.processor_conflicts (processor_id, partition, code, pod, needs_person) "
        "VALUES ('orders', 0, 2, 'pod', true)"
    )

    identity.check_identity(anywhere.connect(), SOURCE, KEY)


AT = "INSERT INTO outbox.processor_checkpoints VALUES ('orders', 0, {next}, 1); "
SHADOW = "SELECT outbox.store_shadow_checkpoint('orders', 0)"
IN_A_RANGE = (
    "INSERT INTO outbox.processor_checkpoints (processor_id, partition, last_processed_transaction_id, "
    "last_processed_position, cursor_kind, lower_snapshot) VALUES ('orders', 0, '0', 5, 'Snapshot', {snapshot}); "
)
HANDED_OUT = (
    "INSERT INTO outbox.competing_dispatch_positions (id, processor_id, priority, lower_snapshot) "
    "VALUES (1, 'orders', 7, {snapshot}); "
)


@pytest.mark.parametrize("place", [AT + SHADOW, IN_A_RANGE + SHADOW, HANDED_OUT], ids=["pair", "range", "consumers"])
def test_a_checkpoint_of_a_restore_is_noticed_also_when_the_counter_has_passed_it(anywhere, place):
    """Nothing else would show by then that what was stored here since lies below it."""
    connection = anywhere.direct()
    ahead = next_id(connection) + 20
    connection.execute(place.format(next=f"'{ahead}'", snapshot=f"'{ahead}:{ahead}:'"))
    assert refusal(anywhere.connect(), KEY).reason is Reason.DATABASE_BEHIND
    use_up(connection, ahead + 5)

    error = refusal(anywhere.connect(), KEY)

    assert error.reason is Reason.DATABASE_BEHIND
    assert f"the checkpoint names transaction id {ahead}" in str(error).replace(str(ahead - 1), str(ahead))
    assert "outbox repair" in str(error)


def test_what_is_stored_here_is_not_taken_for_a_restore(anywhere):
    """The writer of a row is known by 32 bits of its id: those of many years ago are completed to a later one."""
    insert(anywhere, "last")
    connection = anywhere.direct()
    now = next_id(connection) - 1
    for place in (AT + SHADOW, HANDED_OUT):
        connection.execute(place.format(next=f"'{now}'", snapshot="pg_current_snapshot()"))
    identity.check_identity(anywhere.connect(), SOURCE, KEY)

    connection.execute("VACUUM FREEZE outbox.processor_checkpoints; ")

    identity.check_identity(anywhere.connect(), SOURCE, KEY)


def test_the_last_row_of_a_healthy_server_is_not_behind(anywhere):
    insert(anywhere, "last")
    open_writer = anywhere.direct(autocommit=False)
    insert(open_writer, "open")

    identity.check_identity(anywhere.connect(), SOURCE, KEY)
    identity.check_identity(open_writer, SOURCE, KEY)
