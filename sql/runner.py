"""Applies the numbered migrations and the functions to one schema of one database.

Safe to run twice and from two places at once: each migration is one transaction that first takes an advisory
*transaction* lock (session locks do not survive PgBouncer in transaction mode) and then looks again what is applied.
Locks on tables are waited for briefly and tried again, so that a migration never queues all producers behind a long
transaction. The role needs to own the schema, or CREATE on the database where the schema is missing; nothing here
needs a superuser.

The functions are one more entry behind the migrations, `functions_NNNN`: all files of `functions/`, applied together
where no set with this number or a higher one is recorded. So an older worker never puts its own texts back.

A database that has every migration is only read: a worker's start costs one query and no transaction id. Names it
does not know are a newer version's, and no error: an older worker goes on beside a newer schema until a `post`
migration.
"""

from __future__ import annotations

import hashlib
import re
import time
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import sql

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

LOCK_KEY: Final = 0x6F757462  # "outb": one migration run at a time in a database
LOCK_TIMEOUT: Final = "3s"
IDLE_TIMEOUT: Final = "30s"
"""Frozen between two statements, a run must not keep its locks, nor others from migrating."""
DEADLINE_SECONDS: Final = 60.0

FUNCTIONS_VERSION: Final = 4
"""Rises with every change of a text in `functions/` (tests/migration compares the checksum)."""

_FIRST: Final = "0001_pre_schema"

_VARIABLE: Final = re.compile(r""":(?:"schema"|'schema')""")
_INCLUDE: Final = re.compile(r"^\\ir \.\./functions/(\w+)\.sql$", re.MULTILINE)
"""psql's own command, relative to the file that it stands in."""
_FUNCTIONS: Final = "functions_"


class Phase(StrEnum):
    """When a migration may run, seen from a rollout of new workers."""

    PRE = "pre"
    """Before the new image: what a running older worker calls still works."""
    POST = "post"
    """After the last old worker is gone."""


@dataclass(frozen=True, slots=True)
class Migration:
    """One file, `NNNN_{pre|post}_slug.sql`, or the set of functions, `functions_NNNN`."""

    name: str
    phase: Phase
    text: str

    @property
    def checksum(self) -> str:
        """SHA-256 of the text with Unix line ends."""
        return hashlib.sha256(self.text.replace("\r\n", "\n").encode()).hexdigest()


class MigrationError(Exception):
    """The schema cannot be brought to this version; the message says what to do."""


class ChecksumMismatchError(MigrationError):
    """An applied migration is not the one this version ships."""


class MigrationBusyError(MigrationError):
    """Another transaction held a lock for longer than the deadline; try again later."""


def load_migrations() -> tuple[Migration, ...]:
    """Read the shipped migrations in order, and behind them the functions."""
    migrations = (Migration(name, Phase(name.split("_")[1]), text) for name, text in _read("migrations"))
    functions = "\n".join(text for _, text in _read("functions"))
    return (*migrations, Migration(f"{_FUNCTIONS}{FUNCTIONS_VERSION:04d}", Phase.PRE, functions))


def _read(folder: str) -> list[tuple[str, str]]:
    """Return name and text of each SQL file in a folder, in the order of their names."""
    files = (file for file in resources.files(f"outbox_sql.{folder}").iterdir() if file.name.endswith(".sql"))
    return sorted((file.name.removesuffix(".sql"), file.read_text()) for file in files)


def render(text: str, schema: str) -> sql.SQL:
    """Do what psql would do: include functions, and put the schema's name for `:"schema"` and `:'schema'`."""
    folder = resources.files("outbox_sql.functions")
    text = _INCLUDE.sub(lambda match: folder.joinpath(f"{match[1]}.sql").read_text(), text)
    identifier = '"' + schema.replace('"', '""') + '"'
    literal = "'" + schema.replace("'", "''") + "'"
    rendered = _VARIABLE.sub(lambda match: identifier if match[0][1] == '"' else literal, text)
    return sql.SQL(rendered)


def fetch_applied(connection: psycopg.Connection[Any], schema: str) -> dict[str, str]:
    """Return the applied migrations' checksums by name; empty where there is no schema yet."""
    table = connection.execute(
        """SELECT 1 FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
           WHERE n.nspname = %s AND c.relname = 'applied_migrations'""",
        (schema,),
    ).fetchone()
    if table is None:
        return {}
    query = sql.SQL("SELECT name, checksum FROM {}").format(sql.Identifier(schema, "applied_migrations"))
    return {str(name): str(checksum) for name, checksum in connection.execute(query).fetchall()}


def pending(applied: dict[str, str], phases: Iterable[Phase], migrations: Iterable[Migration]) -> tuple[Migration, ...]:
    """Decide what is missing.

    Raises:
        ChecksumMismatchError: an applied migration differs from the shipped one.
        MigrationError: a version before the first release made the schema.

    """
    wanted = set(phases)
    latest = max((name for name in applied if name.startswith(_FUNCTIONS)), default="")
    missing = []
    for migration in migrations:
        checksum = applied.get(migration.name)
        if checksum is None:
            if migration.name == _FIRST and applied:
                raise MigrationError(
                    f"this schema has migrations of a version before the first release ({min(applied)}), which no "
                    "release upgrades: name another schema, or drop this one"
                )
            is_superseded = migration.name.startswith(_FUNCTIONS) and migration.name < latest
            if migration.phase in wanted and not is_superseded:
                missing.append(migration)
        elif checksum != migration.checksum:
            raise ChecksumMismatchError(
                f"migration {migration.name} was applied with other contents than this version ships; "
                "released migrations are never edited: use the release that made this schema, or compare the two"
            )
    return tuple(missing)


def migrate(
    connection: psycopg.Connection[Any],
    schema: str,
    *,
    phases: Iterable[Phase] = (Phase.PRE,),
    migrations: tuple[Migration, ...] | None = None,
    announce: Callable[[str], None] = lambda _: None,
) -> tuple[str, ...]:
    """Apply what is missing, each in its own short transaction, and return the names that this call applied.

    The connection must be outside a transaction; it ends outside one.

    Raises:
        ChecksumMismatchError: an applied migration differs from the shipped one.
        MigrationError: a version before the first release made the schema, or its name has a per cent sign.
        MigrationBusyError: a lock was not to be had for a minute.
        psycopg.Error: the server refused a statement (no right to create, connection lost …).

    """
    if "%" in schema:  # psycopg takes it for a place of a parameter, in every statement of ours
        raise MigrationError(f"the schema {schema!r} has a per cent sign in its name: choose a name without one")
    shipped = load_migrations() if migrations is None else migrations
    with connection.transaction():
        missing = pending(fetch_applied(connection, schema), phases, shipped)
    done = []
    for migration in missing:
        if _apply_with_retry(connection, schema, migration):
            announce(migration.name)
            done.append(migration.name)
    return tuple(done)


def _apply_with_retry(connection: psycopg.Connection[Any], schema: str, migration: Migration) -> bool:
    deadline = time.monotonic() + DEADLINE_SECONDS
    wait = 0.1
    while True:
        try:
            with connection.transaction():
                return _apply(connection, schema, migration)
        except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected) as err:
            if time.monotonic() > deadline:
                raise MigrationBusyError(
                    f"migration {migration.name} found its tables locked for {DEADLINE_SECONDS:.0f} s: "
                    "look for a long transaction in pg_stat_activity, then run it again"
                ) from err
            time.sleep(wait)
            wait = min(wait * 2, 2.0)


def _apply(connection: psycopg.Connection[Any], schema: str, migration: Migration) -> bool:
    """Run one migration inside the open transaction unless another run did meanwhile."""
    connection.execute(sql.SQL("SET LOCAL lock_timeout = {}").format(sql.Literal(LOCK_TIMEOUT)))
    connection.execute(sql.SQL("SET LOCAL idle_in_transaction_session_timeout = {}").format(sql.Literal(IDLE_TIMEOUT)))
    connection.execute("SELECT pg_advisory_xact_lock(%s)", (LOCK_KEY,))
    _ensure_bookkeeping(connection, schema)
    applied = fetch_applied(connection, schema)
    if not pending(applied, (migration.phase,), (migration,)):
        return False
    # SQL functions call each other: their bodies are checked when they are called, not in the order of the files.
    connection.execute("SET LOCAL check_function_bodies = off")
    connection.execute(render(migration.text, schema))
    connection.execute(
        sql.SQL("INSERT INTO {} (name, checksum) VALUES (%s, %s)").format(sql.Identifier(schema, "applied_migrations")),
        (migration.name, migration.checksum),
    )
    return True


def _ensure_bookkeeping(connection: psycopg.Connection[Any], schema: str) -> None:
    """Create schema and list only where they are missing: IF NOT EXISTS asks for the right to create even then."""
    found = connection.execute(
        """SELECT n.oid IS NOT NULL, c.oid IS NOT NULL
           FROM (VALUES (%s)) AS wanted (nspname)
           LEFT JOIN pg_catalog.pg_namespace n USING (nspname)
           LEFT JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = 'applied_migrations'""",
        (schema,),
    ).fetchone()
    has_schema, has_table = found if found is not None else (False, False)
    if not has_schema:
        connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)))
    if not has_table:
        connection.execute(
            sql.SQL(
                """CREATE TABLE {} (
                       name       text        NOT NULL PRIMARY KEY,
                       checksum   text        NOT NULL,
                       applied_at timestamptz NOT NULL DEFAULT clock_timestamp(),
                       applied_by text        NOT NULL DEFAULT session_user
                   )"""
            ).format(sql.Identifier(schema, "applied_migrations"))
        )
