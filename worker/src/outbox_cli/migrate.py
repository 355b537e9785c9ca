"""`migrate` and `confirm-identity` against a database, as the schema's owner."""

from __future__ import annotations

import getpass
from typing import TYPE_CHECKING, Any

from psycopg import sql

from outbox_cli.command import against_database
from outbox_cli.context import DEFAULT_SCHEMA
from outbox_cli.errors import Exit
from outbox_sql import runner

if TYPE_CHECKING:
    import psycopg

    from outbox_cli.command import Context


@against_database
def migrate(connection: psycopg.Connection[Any], context: Context) -> Exit:
    """Bring the schema to this version."""
    options, console = context.options, context.console
    schema = options.schema or DEFAULT_SCHEMA
    phases = tuple(runner.Phase) if options.phase == "all" else (runner.Phase(options.phase),)
    missing = runner.pending(runner.fetch_applied(connection, schema), phases, runner.load_migrations())
    if options.dry_run:
        names = [migration.name for migration in missing]
        console.document({"schema": schema, "pending": names})
        console.say("\n".join(f"would apply {name}" for name in names) or "nothing to apply")
        return Exit.DONE
    done: list[str] = []
    with console.progress("migrations", len(missing)) as progress:

        def announce(name: str) -> None:
            done.append(name)
            console.say(f"applied {name}")
            progress.reach(len(done))

        runner.migrate(connection, schema, phases=phases, announce=announce)
    console.document({"schema": schema, "applied": done})
    if not done:
        console.say("nothing to apply")
    return Exit.DONE


@against_database
def confirm_identity(connection: psycopg.Connection[Any], context: Context) -> Exit:
    """Say what a database is after a copy, a move or a restore."""
    options, console = context.options, context.console
    schema = options.schema or DEFAULT_SCHEMA
    statement = sql.SQL("SELECT {}.confirm_identity(%s, %s)").format(sql.Identifier(schema))
    if options.dry_run:
        # The act itself, rolled back: what would refuse it says so now.
        with connection.transaction(force_rollback=True):
            connection.execute("SELECT set_config('lock_timeout', '2s', true)")
            connection.execute(statement, (options.action, getpass.getuser()))
        console.document({"schema": schema, "action": options.action, "done": False})
        console.say(f"would {options.action} the identity of schema {schema}")
        return Exit.DONE
    row = connection.execute(statement, (options.action, getpass.getuser())).fetchone()
    database = str(row[0]) if row else None
    console.document({"schema": schema, "action": options.action, "done": True, "database": database})
    console.say(f"this database is now {database or 'unknown'}")
    return Exit.DONE
