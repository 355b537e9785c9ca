"""`outbox` as a person runs it: a real process, its output, its exit status."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from outbox_sql import runner
from tests.integration.cli.conftest import Cli

PROGRAM = Path(sys.executable).with_name("outbox")


@pytest.fixture
def outbox(empty_database):
    secret = empty_database.files().directory

    def run(*arguments, where=("--connection", str(secret))):
        return subprocess.run([PROGRAM, *arguments, *where], check=False, capture_output=True, text=True, timeout=60)

    return run


def test_migrate(outbox):
    dry, first, again = outbox("migrate", "--dry-run"), outbox("migrate"), outbox("migrate")
    after = [outbox("migrate", "--phase", phase) for phase in ("post", "all")]

    assert {each.returncode for each in (dry, first, again, *after)} == {0}
    assert dry.stdout.splitlines()[0] == "would apply 0001_pre_schema"
    assert first.stdout == dry.stdout.replace("would apply", "applied")
    assert again.stdout == "nothing to apply\n"
    assert [each.stdout for each in after] == ["nothing to apply\n", "nothing to apply\n"]


def test_who_may_not_migrate_is_told_who_may(empty_database):
    """A grant would not help: who may create in the schema does not own what is in it."""
    remedy = "migrate as the owner of schema outbox and of all that is in it, or, where there is no such schema yet, as"

    def refusal():
        done = Cli(empty_database.files("processor").directory).run("migrate")
        assert done.returncode == 1
        return done.stderr

    missing = refusal()
    empty_database.direct().execute("CREATE SCHEMA outbox; GRANT USAGE ON SCHEMA outbox TO processor")
    not_granted = refusal()
    empty_database.direct().execute("GRANT CREATE ON SCHEMA outbox TO processor")
    connection = empty_database.direct()
    runner.migrate(connection, "outbox")
    connection.execute("UPDATE outbox.applied_migrations SET name = 'functions_0001' WHERE name LIKE 'functions%'")
    connection.execute("GRANT SELECT ON ALL TABLES IN SCHEMA outbox TO processor")
    not_owned = refusal()

    assert missing.startswith(f"outbox: permission denied for database {empty_database.name}: {remedy}")
    assert not_granted.startswith(f"outbox: permission denied for schema outbox: {remedy}")
    assert not_owned.startswith("outbox: must be owner of function ")
    assert remedy in not_owned


def test_adopt(outbox, empty_database):
    empty_database.direct().execute("CREATE TABLE public.t (x int); INSERT INTO public.t VALUES (1)")

    done, refused = outbox("adopt", "--table", "t"), outbox("adopt", "--table", "nowhere.t")

    assert (done.returncode, refused.returncode) == (0, 1)
    assert "old rows keep a NULL pair and are never read" in done.stdout
    assert refused.stderr == "outbox: there is no table nowhere.t\n"
    columns = empty_database.direct().execute("SELECT * FROM public.t").description
    assert [column.name for column in columns] == ["x", "transaction_id", "position"]


def test_adopting_shows_a_bar_at_a_terminal(empty_database):
    empty_database.direct().execute(
        "CREATE TABLE public.t (n int PRIMARY KEY); INSERT INTO public.t SELECT generate_series(1, 25); "
        "ANALYZE public.t"
    )
    cli = Cli(empty_database.files().directory)
    arguments = ("adopt", "--table", "t", "--ordered-by", "n", "--batch", "10")
    status, said, shown = cli.at_a_terminal(*arguments, answer="")
    assert status == 0
    assert "backfilled 25 old rows in the order of n" in said
    assert "rows numbered [" in shown
    assert "10/25" in shown


def test_in_json_each_is_one_document(empty_database):
    cli = Cli(empty_database.files().directory)
    names = cli.json("migrate", "--dry-run")["pending"]
    assert names[0] == "0001_pre_schema"
    assert cli.json("migrate") == {"schema": "outbox", "applied": names}
    assert cli.json("confirm-identity", "renew", "--dry-run")["done"] is False
    assert len(cli.json("confirm-identity", "renew")["database"]) == 36
    empty_database.direct().execute("CREATE TABLE public.t (n int)")
    assert cli.json("adopt", "--table", "t")["table"] == "public.t"


def test_confirm_identity(outbox, empty_database):
    assert outbox("confirm-identity", "keep").returncode == 1
    outbox("migrate")

    done = outbox("confirm-identity", "renew")

    (uuid,) = empty_database.direct().execute("SELECT database_uuid::text FROM outbox.database_identity").fetchone()
    assert (done.returncode, done.stdout) == (0, f"this database is now {uuid}\n")


def test_confirm_identity_names_a_user_without_a_name(empty_database, monkeypatch):
    """As in a container that runs as a uid of the cluster's choice."""

    def no_name():
        raise KeyError("getpwuid(): uid not found: 1000680000")

    cli = Cli(empty_database.files().directory)
    assert cli.run("migrate").returncode == 0
    monkeypatch.setattr("getpass.getuser", no_name)
    assert cli.run("confirm-identity", "keep", "--dry-run").returncode == 0
    assert cli.run("confirm-identity", "keep").returncode == 0
    (act,) = cli.json("audit")
    assert act["decidedBy"] == f"uid {os.getuid()}@{socket.gethostname()}"


@pytest.mark.parametrize("action", ["keep", "renew"])
def test_a_dry_run_of_confirm_identity_is_refused_as_the_act_is(outbox, empty_database, action):
    outbox("migrate")
    connection = empty_database.direct()
    (before,) = connection.execute("SELECT database_uuid FROM outbox.database_identity").fetchone()
    assert outbox("confirm-identity", action, "--dry-run").returncode == 0
    assert connection.execute("SELECT database_uuid FROM outbox.database_identity").fetchone() == (before,)
    assert connection.execute("SELECT count(*) FROM outbox.audit_log").fetchone() == (0,)
    connection.execute(
        "INSERT INTO outbox.messages (message_type, data, transaction_id) VALUES ('Restored', '{}', '99999999')"
    )
    preview, act = (outbox("confirm-identity", action, *more) for more in (("--dry-run",), ()))
    assert (preview.returncode, act.returncode) == (1, 1)
    assert "run `outbox repair` first" in preview.stderr
    assert preview.stderr == act.stderr


def test_errors_have_no_traceback_and_no_secret(outbox, tmp_path):
    (tmp_path / "dsn").write_text("postgresql://postgres:open-sesame@127.0.0.1:1/x")

    unreachable = outbox("migrate", where=("--dsn-file", str(tmp_path / "dsn")))
    missing = outbox("migrate", where=("--connection", str(tmp_path / "absent")))
    usage = outbox("migrate", where=())

    assert (unreachable.returncode, missing.returncode, usage.returncode) == (1, 1, 2)
    assert unreachable.stderr.startswith("outbox: ")
    assert "Traceback" not in unreachable.stderr + missing.stderr
    assert "open-sesame" not in unreachable.stderr


def test_by_a_file_that_holds_a_uri(outbox, empty_database, tmp_path):
    (tmp_path / "dsn").write_text(empty_database.uri() + "\n")

    assert outbox("migrate", "--schema", "other", where=("--dsn-file", str(tmp_path / "dsn"))).returncode == 0
    assert empty_database.direct().execute("SELECT count(*) FROM other.messages").fetchone() == (0,)
