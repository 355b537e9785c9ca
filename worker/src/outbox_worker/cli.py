"""`outbox`: what a person runs against the database, as the schema's owner.

    outbox migrate --connection DIR [--schema outbox] [--phase pre|post|all] [--dry-run]
    outbox adopt --connection DIR --table public.outbox [--ordered-by COLUMN] [--only-where-null COLUMN] [--dry-run]
    outbox confirm-identity keep|renew --connection DIR [--schema outbox]

The connection is a directory of files as a mounted Secret has them, or a file that holds a URI: passwords do not
belong on a command line, where every user of the machine reads them.
"""

from __future__ import annotations

import argparse
import getpass
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql

from outbox_core.errors import OutboxError
from outbox_sql import adopt, runner
from outbox_worker.postgres.connection import ConnectionFiles, connect_uri
from outbox_worker.postgres.errors import translate

if TYPE_CHECKING:
    from collections.abc import Sequence

FAILED = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; exit status 0, 1 (failed, the reason on stderr) or 2 (usage)."""
    options = _parser().parse_args(arguments)
    try:
        with _connect(options) as connection:
            options.run(connection, options)
    except psycopg.Error as err:
        return _fail(str(translate(err)))
    except (OutboxError, runner.MigrationError, adopt.AdoptionError) as err:
        return _fail(str(err))
    return 0


def _fail(message: str) -> int:
    print(f"outbox: {message}", file=sys.stderr)  # noqa: T201  # a command line speaks
    return FAILED


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201  # a command line speaks


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="outbox", description="Prepare a database for outbox processors.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    shared = argparse.ArgumentParser(add_help=False)
    where = shared.add_mutually_exclusive_group(required=True)
    where.add_argument("--connection", type=Path, help="directory with uri, or host, port, database, user, password")
    where.add_argument("--dsn-file", type=Path, help="file that holds a connection URI")
    shared.add_argument("--schema", default="outbox", help="schema of checkpoints and functions (default: outbox)")
    shared.add_argument("--dry-run", action="store_true", help="say what would be done")

    migrate = commands.add_parser("migrate", parents=[shared], help="bring the schema to this version")
    migrate.add_argument(
        "--phase", choices=["pre", "post", "all"], default="pre", help="post: after the last old worker"
    )
    migrate.set_defaults(run=_migrate)

    adoption = commands.add_parser("adopt", parents=[shared], help="make an outbox that exists already readable")
    adoption.add_argument("--table", required=True, help="schema.name of the table")
    adoption.add_argument("--transaction-id-column", default="transaction_id")
    adoption.add_argument("--position-column", default="position")
    adoption.add_argument("--ordered-by", help="column whose order old rows get; without it they are never read")
    adoption.add_argument("--only-where-null", help="backfill only rows where this column is NULL: processed_on_utc")
    adoption.add_argument("--publication-column", help="column of publications, to be indexed too")
    adoption.add_argument("--batch", type=int, default=5_000, help="rows in one transaction of the backfill")
    adoption.set_defaults(run=_adopt)

    identity = commands.add_parser("confirm-identity", parents=[shared], help="after a copy, a move or a restore")
    identity.add_argument("action", choices=["keep", "renew"], help="keep: it moved here. renew: the original lives on")
    identity.set_defaults(run=_confirm_identity)
    return parser


def _connect(options: argparse.Namespace) -> psycopg.Connection[Any]:
    if options.connection is not None:
        return ConnectionFiles(options.connection).connect("outbox-cli", autocommit=True)
    return connect_uri(options.dsn_file, "outbox-cli")


def _migrate(connection: psycopg.Connection[Any], options: argparse.Namespace) -> None:
    phases = tuple(runner.Phase) if options.phase == "all" else (runner.Phase(options.phase),)
    if options.dry_run:
        missing = runner.pending(runner.fetch_applied(connection, options.schema), phases, runner.load_migrations())
        _say("\n".join(f"would apply {migration.name}" for migration in missing) or "nothing to apply")
        return
    done = runner.migrate(connection, options.schema, phases=phases, announce=lambda name: _say(f"applied {name}"))
    if not done:
        _say("nothing to apply")


def _adopt(connection: psycopg.Connection[Any], options: argparse.Namespace) -> None:
    schema, dot, table = options.table.partition(".")
    if not dot:
        schema, table = "public", schema
    adopt.adopt(
        connection,
        adopt.Adoption(
            schema=schema,
            table=table,
            transaction_id=options.transaction_id_column,
            position=options.position_column,
            ordered_by=options.ordered_by,
            only_where_null=options.only_where_null,
            publication_id=options.publication_column,
            batch=options.batch,
        ),
        dry_run=options.dry_run,
        announce=_say,
    )


def _confirm_identity(connection: psycopg.Connection[Any], options: argparse.Namespace) -> None:
    if options.dry_run:
        _say(f"would {options.action} the identity of schema {options.schema}")
        return
    statement = sql.SQL("SELECT {}.confirm_identity(%s, %s)").format(sql.Identifier(options.schema))
    row = connection.execute(statement, (options.action, getpass.getuser())).fetchone()
    _say(f"this database is now {row[0] if row else 'unknown'}")


if __name__ == "__main__":
    sys.exit(main())
