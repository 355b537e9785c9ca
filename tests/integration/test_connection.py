"""Connections from mounted Secrets: every mistake has its reason, nothing secret is said, a rotated file is used."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from datetime import UTC, datetime
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from outbox_core.errors import ConfigurationError, OutboxError, TransientError
from outbox_core.report import Reason
from outbox_worker.postgres.connection import IDLE_SECONDS, ConnectionFiles, connect_uri, is_misread, limited
from outbox_worker.postgres.errors import translate, translated
from tests.support.servers.postgres import wait_until

SECRET = "open sesame"


def write(directory, **files):
    for name, text in files.items():
        (directory / name.replace("ca_crt", "ca.crt")).write_text(text)
    return ConnectionFiles(directory)


def keys(place, **changes):
    return {
        "host": "127.0.0.1", "port": str(place.server.port), "database": place.name, "user": "locked",
        "password": f"{SECRET}\n", **changes,
    }  # fmt: skip


def test_by_single_keys(database, tmp_path):
    with write(tmp_path, **keys(database)).connect("a name") as connection:
        row = connection.execute("SELECT current_user, current_setting('application_name'), current_database()")

        assert row.fetchone() == ("locked", "a name", database.name)
        assert connection.prepare_threshold is None
        assert connection.autocommit


def test_by_uri(database, tmp_path):
    uri = f"postgresql://locked:open%20sesame@127.0.0.1:{database.server.port}/{database.name}\n"

    with write(tmp_path, uri=uri, sslmode="prefer").connect("x") as connection:
        assert connection.execute("SELECT current_user").fetchone() == ("locked",)


def test_a_uri_may_carry_parameters_of_its_own(database, tmp_path):
    uri = database.uri()
    uri += f"{'&' if '?' in uri else '?'}application_name=theirs&connect_timeout=3&options=-c%20work_mem%3D5MB"
    shown = "SELECT current_setting('application_name'), current_setting('work_mem')"

    with write(tmp_path, uri=uri).connect("ours") as connection:
        assert connection.execute(shown).fetchone() == ("ours", "5MB")
    with connect_uri(tmp_path / "uri", "the cli") as connection:
        assert connection.execute(shown).fetchone() == ("the cli", "5MB")


@pytest.mark.parametrize("setting", ["client_encoding = SQL_ASCII", "client_encoding = LATIN1", "DateStyle = German"])
def test_settings_of_a_role_do_not_change_how_text_and_times_are_read(database, setting):
    role = sql.Identifier("processor"), sql.Identifier(database.name)
    with database.direct() as admin:
        admin.execute(sql.SQL("ALTER ROLE {} IN DATABASE {} SET " + setting).format(*role))
    connection = database.connect("processor")
    read = connection.execute("SELECT 'größer 10 €', timestamptz '2026-11-28 10:00+00'").fetchone()
    assert read == ("größer 10 €", datetime(2026, 11, 28, 10, tzinfo=UTC))


def test_a_rotated_password_is_used_at_the_next_connect(database, tmp_path):
    files = write(tmp_path, **keys(database, password="old"))
    with pytest.raises(TransientError) as caught:
        files.connect("x")
    assert caught.value.reason is Reason.AUTHENTICATION_FAILED

    (tmp_path / "password").write_text(SECRET)

    with files.connect("x") as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        pytest.param({"password": "wrong"}, Reason.AUTHENTICATION_FAILED, id="wrong password"),
        pytest.param({"password": ""}, Reason.AUTHENTICATION_FAILED, id="no password"),
        pytest.param({"user": "nobody"}, Reason.AUTHENTICATION_FAILED, id="no such role"),
        pytest.param({"database": "nowhere", "user": "postgres"}, Reason.DATABASE_UNAVAILABLE, id="no such database"),
        pytest.param({"port": "1"}, Reason.DATABASE_UNAVAILABLE, id="nobody listens"),
        pytest.param({"host": "no-such-host.invalid"}, Reason.DATABASE_UNAVAILABLE, id="no such host"),
        pytest.param({"sslmode": "require"}, Reason.DATABASE_UNAVAILABLE, id="TLS where there is none"),
        pytest.param({"ca_crt": "a CA"}, Reason.DATABASE_UNAVAILABLE, id="a CA, and a server without TLS"),
    ],
)
def test_what_may_mend_is_transient(database, tmp_path, changes, reason):
    with pytest.raises(TransientError) as caught:
        write(tmp_path, **keys(database, **changes)).connect("x")

    assert caught.value.reason is reason
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "files",
    [
        pytest.param({}, id="empty"),
        pytest.param({"port": "5432"}, id="no host"),
        pytest.param({"uri": f"postgres//{SECRET}"}, id="no URI"),
        pytest.param({"uri": f"postgresql://u:{SECRET}@h:port/db"}, id="a port that is none"),
        pytest.param({"uri": f"postgresql://u:p@h/db?password_of={SECRET}"}, id="an unknown parameter"),
        pytest.param({"host": "h", "user": "u", "database": "d", "port": f"five {SECRET}"}, id="a port in words"),
        pytest.param(
            {"host": "h", "user": "u", "database": "d", "sslmode": f"sometimes {SECRET}"}, id="an unknown sslmode"
        ),
    ],
)
def test_what_makes_no_sense_names_the_secret_and_says_none(tmp_path, files):
    with pytest.raises(ConfigurationError) as caught:
        write(tmp_path, **files).connect("x")

    assert caught.value.reason is Reason.CONNECTION_SECRET_INVALID
    assert str(tmp_path) in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("password", ["open@sesame", "open/sesame", "1/sesame", "op@en@sesame", "o?p@sesame"])
def test_no_part_of_a_password_is_taken_for_the_host_and_named(tmp_path, password):
    files = write(tmp_path, uri=f"postgresql://u:{password}@127.0.0.1:1/db?connect_timeout=2")
    for connect in (lambda: files.connect("x"), lambda: connect_uri(tmp_path / "uri", "x")):
        with pytest.raises(ConfigurationError, match="write %40 for @ and %2F for /") as caught:
            connect()
        assert caught.value.reason is Reason.CONNECTION_SECRET_INVALID
        assert not any(part in str(caught.value).replace(str(tmp_path), "") for part in ("sesame", "open@", "op@"))


@pytest.mark.parametrize("place", ["u:p%40q@127.0.0.1:1/db?user=me@there", "127.0.0.1:1/db?user=me@there/x", "[::1]:1"])
def test_parameters_of_a_uri_may_have_such_characters(place):
    assert not is_misread(f"postgresql://{place}")


def test_a_parameter_that_is_misspelt_is_told(tmp_path):
    with pytest.raises(ConfigurationError, match=r"behind `\?` a parameter that libpq does not know"):
        write(tmp_path, uri="postgresql://u:p@h/db?sslmod=require").connect("x")


def test_a_folder_behind_a_link_is_named_itself(tmp_path):
    """`outbox run` links what a person named into a folder of its own, which goes with it."""
    (tmp_path / "orders-db").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "orders-db")
    with pytest.raises(ConfigurationError) as caught:
        ConnectionFiles(tmp_path / "link", "db").connect("x")
    assert str(caught.value).startswith(f"the Secret db, mounted at {tmp_path}/orders-db, is not a database connection")


def test_a_key_that_cannot_be_read_says_why(tmp_path):
    (tmp_path / "uri").mkdir()
    with pytest.raises(ConfigurationError, match=r"its key `uri` cannot be read \(Is a directory\)"):
        ConnectionFiles(tmp_path).connect("x")
    (tmp_path / "uri").rmdir()
    (tmp_path / "uri").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match="its key `uri` is not text in UTF-8"):
        ConnectionFiles(tmp_path).connect("x")


def test_a_file_that_is_not_text_is_a_sentence(tmp_path):
    (tmp_path / "uri").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match="holds no connection URI"):
        connect_uri(tmp_path / "uri", "x")


def test_the_mark_with_which_editors_begin_a_file_is_not_part_of_its_text(database, tmp_path):
    files = write(tmp_path, uri=f"\ufeff{database.uri()}\r\n")
    for connection in (files.connect("x"), connect_uri(tmp_path / "uri", "x")):
        with connection:
            assert connection.execute("SELECT current_database()").fetchone() == (database.name,)


@pytest.mark.parametrize(
    ("named", "missing"),
    [
        pytest.param({"username": "u", "database": "db"}, "no `user`;", id="username"),
        pytest.param({"user": "u", "dbname": "db"}, "no `database`;", id="dbname"),
        pytest.param({"username": "u"}, "no `user` and no `database`;", id="neither"),
    ],
)
def test_a_key_that_is_misspelt_is_named(tmp_path, named, missing):
    """Libpq would log in as the user of the operating system, or to a database of the user's name."""
    with pytest.raises(ConfigurationError, match=missing) as caught:
        write(tmp_path, host="127.0.0.1", port="1", password=SECRET, **named).connect("x")
    assert caught.value.reason is Reason.CONNECTION_SECRET_INVALID


def test_a_secret_that_is_not_mounted(tmp_path):
    with pytest.raises(ConfigurationError, match="there is no such folder"):
        ConnectionFiles(tmp_path / "absent").connect("x")


@contextlib.contextmanager
def files_left(count):
    """Let this process open so many files more."""
    limits, opened = resource.getrlimit(resource.RLIMIT_NOFILE), []
    highest = max(int(each.name) for each in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 10, limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                opened.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(count):
            os.close(opened.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for each in opened:
            os.close(each)


def test_a_process_with_too_many_open_files_says_so_and_connects_later(database, tmp_path):
    files = write(tmp_path, **keys(database))
    files.connect("x").close()  # what is imported at the first connect is there
    with files_left(1), pytest.raises(TransientError) as caught:
        files.connect("x")
    assert caught.value.reason is Reason.DATABASE_UNAVAILABLE
    assert "open files" in str(caught.value)
    files.connect("x").close()


def test_a_server_that_does_not_answer_is_given_up(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as mute:
        files = write(tmp_path, uri=f"postgresql://u@127.0.0.1:{mute.getsockname()[1]}/db?connect_timeout=2")
        with pytest.raises(TransientError) as caught:
            files.connect("x")

    assert caught.value.reason is Reason.DATABASE_UNAVAILABLE


@pytest.mark.parametrize(
    ("statement", "kind", "reason"),
    [
        ("SELECT * FROM outbox.nothing", ConfigurationError, Reason.SCHEMA_MISSING),
        ("SELECT * FROM nowhere.nothing", ConfigurationError, Reason.SCHEMA_MISSING),
        ("SELECT outbox.nothing()", ConfigurationError, Reason.SCHEMA_MISSING),
        ("SELECT nothing FROM outbox.messages", ConfigurationError, Reason.SCHEMA_MISSING),
        ("SET ROLE stranger; SELECT * FROM outbox.messages", ConfigurationError, Reason.PERMISSION_DENIED),
        ("SELECT 1 / 0", OutboxError, Reason.STATEMENT_FAILED),
        ("SELECT nonsense nonsense nonsense", OutboxError, Reason.STATEMENT_FAILED),
        ("SET statement_timeout = '10ms'; SELECT pg_sleep(5)", TransientError, Reason.STATEMENT_FAILED),
        ("SELECT pg_terminate_backend(pg_backend_pid())", TransientError, Reason.DATABASE_UNAVAILABLE),
        ("BEGIN READ ONLY; CREATE TABLE made ()", TransientError, Reason.DATABASE_UNAVAILABLE),
    ],
)
def test_statements_that_fail(database, statement, kind, reason):
    with pytest.raises(kind) as caught, translated():
        database.connect().execute(statement)

    assert caught.value.reason is reason


def test_a_statement_that_was_cancelled_is_told_with_the_setting_that_may_have_done_it(database):
    with pytest.raises(TransientError) as caught, translated():
        database.connect().execute("SET statement_timeout = '10ms'; SELECT pg_sleep(5)")
    assert str(caught.value) == (
        "canceling statement due to statement timeout (57014): if statement_timeout of the server, the database or the "
        "role did it, raise it for the role of this connection; it is tried again"
    )


@pytest.mark.parametrize("statement", ["SELECT outbox.nothing()", "SELECT nothing FROM public.shop_outbox"])
def test_what_is_missing_may_be_ours_or_what_the_resource_maps(database, statement):
    database.direct().execute("CREATE TABLE public.shop_outbox (n int)")
    with pytest.raises(ConfigurationError) as caught, translated():
        database.connect().execute(statement)
    assert str(caught.value).endswith(
        " does not exist: if it is the product's own, run `outbox migrate` as its owner; if source.table maps it, "
        "correct that"
    )


def test_what_a_row_holds_is_not_passed_on(database):
    with pytest.raises(OutboxError) as caught, translated():
        database.connect().execute(
            "INSERT INTO outbox.messages (message_type, data) VALUES (NULL, %s)", (f'{{"card": "{SECRET}"}}',)
        )

    assert SECRET in str(caught.value.__cause__), "the driver's own text quotes the row"
    assert SECRET not in str(caught.value)


def test_every_lost_connection_is_transient():
    lost = [psycopg.OperationalError("server closed the connection unexpectedly"), psycopg.InterfaceError("closed")]

    assert [(type(e), e.reason) for e in map(translate, lost)] == [(TransientError, Reason.DATABASE_UNAVAILABLE)] * 2


def test_a_session_that_ends_behind_a_pool_before_a_command_of_the_drivers_own_is_lost(servers):
    """The pool says why, and that it ends the connection: the driver calls it two results of COMMIT."""
    with servers.database("pgbouncer") as pooled:
        connection, admin = pooled.connect(autocommit=False), pooled.direct()
        connection.execute("SELECT 1")
        admin.execute(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity "
            "WHERE datname = current_database() AND state = 'idle in transaction'"
        )
        with pytest.raises(TransientError) as caught, translated():
            connection.commit()
    assert caught.value.reason is Reason.DATABASE_UNAVAILABLE


def test_a_process_that_freezes_in_a_limited_transaction_keeps_no_message_from_others(database):
    """Frozen, it sends nothing; so does this one."""
    open_for = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s AND backend_xid IS NOT NULL"
    connection, other = database.connect(), database.connect()
    pid = connection.info.backend_pid

    def is_open():
        return other.execute(open_for, (pid,)).fetchone()[0] == 1

    transaction = contextlib.ExitStack()
    transaction.enter_context(limited(connection, 1.0))
    connection.execute("SELECT pg_current_xact_id()")
    assert is_open()
    wait_until(lambda: not is_open(), "the server ended it", seconds=IDLE_SECONDS + 10)
    with pytest.raises(psycopg.errors.IdleInTransactionSessionTimeout):
        transaction.close()
