"""`outbox try --on`: says which outbox a database has and what it takes to read it, and writes nothing."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from typing import TYPE_CHECKING

import pytest

from outbox_cli.manifest import read_manifest
from outbox_cli.try_out.run import main
from outbox_sql.recognise import recognise
from tests.integration.cli.conftest import Cli
from tests.support.database.concurrency import background, wait_until_blocked
from tests.unit.sql import test_recognise as known

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.servers.postgres import Database

TABLES = {
    "scaled": known.SCALED,
    "debezium": known.DEBEZIUM,
    "rails_outbox": known.RAILS,
    "res_outbox": known.RES,
    "NServiceBusOutbox": known.NSERVICEBUS,
    "OutboxMessage": known.MASSTRANSIT,
    "Outbox Messages$": known.EF_SCALED,
    "wolverine_outgoing": known.WOLVERINE,
}
READABLE = [name for name in TABLES if name != "wolverine_outgoing"]


def look(uri: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(["--on", uri])
    return status, out.getvalue(), err.getvalue()


def make(database: Database, name: str, more: str = "") -> None:
    columns = ", ".join(f'"{column}" {type_}' for column, type_ in TABLES[name].items())
    database.direct().execute(f'CREATE TABLE public."{name}" ({columns}) {more}'.encode())


def next_transaction_id(database: Database) -> int:
    row = database.direct().execute("SELECT pg_snapshot_xmax(pg_current_snapshot())::text").fetchone()
    assert row is not None
    return int(row[0])


@pytest.mark.parametrize("name", READABLE)
def test_a_known_outbox_is_named_with_what_adopting_it_does_and_a_manifest_that_is_valid(
    empty_database: Database, name: str, tmp_path: Path
):
    make(empty_database, name)
    status, said, _ = look(empty_database.uri())
    assert status == 0
    kind = recognise(TABLES[name])
    assert kind is not None
    assert re.search(rf'^public\."?{re.escape(name)}"? is {re.escape(kind.kind.title)}: about 0 rows', said), said
    assert "  missing indexes: (position), (transaction_id, position)\n" in said
    table = re.escape(shlex.quote(f"public.{name}"))
    command = rf"`outbox adopt --table {table}( --ordered-by \w+)?( --only-where-null \w+)?` would:"
    assert re.search(rf"{command}\n +add transaction_id and position", said), said
    assert "SHARE UPDATE EXCLUSIVE; inserts go on" in said
    manifest = re.search(r"  its processor:\n((?:    .*\n)+)", said)
    assert manifest
    (tmp_path / "processor.yaml").write_text("\n".join(line[4:] for line in manifest[1].splitlines()))
    source = read_manifest([tmp_path / "processor.yaml"]).processor.spec.source
    assert source.table is not None
    assert source.table.name == name


@pytest.mark.parametrize("name", READABLE)
def test_the_printed_commands_adopt_it(empty_database: Database, name: str):
    make(empty_database, name)
    _, said, _ = look(empty_database.uri())
    assert "the command `outbox` comes with pip install '.[cli]' in a clone" in said
    for statement in re.findall(r"^    (CREATE INDEX .*;)$", said, re.MULTILINE):
        empty_database.direct().execute(statement)
    (command,) = re.findall(r"`outbox (adopt .*)` would:", said)
    done = Cli(empty_database.files().directory).run(*shlex.split(command))
    assert done.returncode == 0, done.stderr
    _, said, _ = look(empty_database.uri())
    assert "  missing indexes: none\n" in said
    assert "` would:" not in said


def test_a_partitioned_table_is_not_offered_for_adoption(empty_database: Database):
    make(empty_database, "scaled", "PARTITION BY RANGE (occurred_on_utc)")
    status, said, _ = look(empty_database.uri())
    assert status == 0
    assert "it is partitioned, and only an ordinary table can be adopted" in said
    assert "outbox adopt" not in said


def test_an_outbox_that_cannot_be_read_says_why(empty_database: Database):
    make(empty_database, "wolverine_outgoing")
    status, said, _ = look(empty_database.uri())
    assert status == 0
    assert "it cannot be read: its body is a binary envelope (bytea) that only Wolverine reads" in said


def test_oldest_row_that_waits_is_told_and_nothing_is_written(empty_database: Database):
    make(empty_database, "scaled")
    writing = empty_database.direct()
    writing.execute(
        "INSERT INTO scaled (id, type, content, occurred_on_utc, processed_on_utc) VALUES"
        " (gen_random_uuid(), 'a', '{}', now() - interval '9 days', now()),"
        " (gen_random_uuid(), 'b', '{}', now() - interval '3 hours', NULL)"
    )
    before = next_transaction_id(empty_database)
    status, said, _ = look(empty_database.uri())
    assert status == 0
    assert re.search(r"its oldest row that is not handled is of .*, 3h.* old \(occurred_on_utc\)", said), said
    assert next_transaction_id(empty_database) == before


@pytest.mark.parametrize("other", [("--seconds", "3"), ("--folder", "/tmp/x"), ("--keep",)])
def test_what_a_run_is_told_goes_not_with_it(other, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["--on", "postgresql://guest@127.0.0.1:1/shop", *other])
    assert ended.value.code == 2
    assert "--on starts nothing: leave out --seconds, --folder and --keep" in capsys.readouterr().err


def test_our_own_outbox_is_known_among_its_tables_and_is_ready(database: Database):
    status, said, _ = look(database.uri())
    assert status == 0
    assert said.count(" is this product's own outbox") == 1
    assert "  missing indexes: none\n" in said
    assert "it is ready; `outbox status` says what reads it" in said


def test_a_database_without_an_outbox_is_told_what_makes_one(empty_database: Database):
    empty_database.direct().execute("CREATE TABLE letters (id int)")
    status, said, _ = look(empty_database.uri())
    assert status == 0
    assert "no outbox that is known is among the 1 tables" in said
    assert "`outbox migrate` makes one" in said


def test_a_table_that_another_session_has_locked_is_told_with_what_to_do(database: Database):
    make(database, READABLE[0])
    with database.direct(autocommit=False) as holder:
        holder.execute(f'LOCK TABLE public."{READABLE[0]}"'.encode())
        status, _, said = look(database.uri())
    assert status == 1
    assert "another session has locked a table that is to be looked at; run this again once that is over" in said


def test_a_role_that_may_not_read_is_told_the_grants(database: Database):
    status, said, err = look(database.uri("stranger"))
    assert (status, err) == (0, "")
    assert "role stranger may not read it" in said
    assert "GRANT SELECT ON outbox.messages TO stranger;" in said


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("postgresql://guest:secret@127.0.0.1:1/shop", "database shop on 127.0.0.1 cannot be reached: "),
        ("not a uri", "--on takes a connection URI: postgresql://user@host:port/database"),
    ],
)
def test_what_cannot_be_reached_is_a_sentence_without_the_password(uri, said):
    status, out, err = look(uri)
    assert (status, out) == (1, "")
    assert err.startswith(f"outbox try: {said}")
    assert "secret" not in err
    assert "Traceback" not in err


@pytest.mark.parametrize("password", ["se@cret", "se/cret", "se?c@ret", "s/e?c@ret"])
def test_no_part_of_a_password_is_printed_that_has_to_be_written_otherwise(password):
    status, out, err = look(f"postgresql://guest:{password}@127.0.0.1:1/shop?application_name=x")
    assert (status, out) == (1, "")
    assert err == (
        "outbox try: in the URI of --on a user or password has @ or / in it: write %40 for @ and %2F for /\n"
    )


def test_connection_that_breaks_is_a_sentence(empty_database: Database):
    make(empty_database, "scaled")
    with empty_database.direct().transaction() as held:
        held.connection.execute("LOCK TABLE scaled")
        with background(lambda: look(empty_database.uri())) as looking:
            wait_until_blocked(empty_database, looking)
            empty_database.direct().execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'outbox-try'"
            )
            status, _, err = looking.result()
    assert status == 1
    assert re.fullmatch(r"outbox try: database \S+ on \S+ cannot be looked at: terminating connection .*\n", err), err
