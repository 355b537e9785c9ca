"""`migrate` and `confirm-identity` against a database, as the schema's owner."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox_cli.command import against_database, whoami
from outbox_cli.context import DEFAULT_SCHEMA
from outbox_sql import runner
from outbox_worker.postgres.call import call

if TYPE_CHECKING:
    from outbox_cli.context import Context
    from outbox_cli.errors import Exit
    from outbox_worker.postgres.connection import Connection


@against_database
def migrate(connection: Connection, context: Context) -> Exit:
    """Bring the schema to this version."""
    options, console = context.options, context.console
    schema = options.schema or DEFAULT_SCHEMA
    phases = tuple(runner.Phase) if options.phase == "all" else (runner.Phase(options.phase),)
    missing = runner.pending(runner.fetch_applied(connection, schema), phases, runner.load_migrations())
    if options.dry_run:
        names = [migration.name for migration in missing]
        return console.tell(
            {"schema": schema, "pending": names},
            "\n".join(f"would apply {name}" for name in names) or "nothing to apply",
        )
    done: list[str] = []
    with console.progress("migrations", len(missing)) as progress:

        def announce(name: str) -> None:
            done.append(name)
            console.say(f"applied {name}")
            progress.reach(len(done))

        runner.migrate(connection, schema, phases=phases, announce=announce)
    return console.tell({"schema": schema, "applied": done}, *([] if done else ["nothing to apply"]))


@against_database
def confirm_identity(connection: Connection, context: Context) -> Exit:
    """Say what a database is after a copy, a move or a restore."""
    options, console = context.options, context.console
    schema = options.schema or DEFAULT_SCHEMA
    record = {"schema": schema, "action": options.action, "done": not options.dry_run}
    # To look is the act itself, rolled back: what would refuse it says so now.
    with connection.transaction(force_rollback=options.dry_run):
        if options.dry_run:
            connection.execute("SELECT set_config('lock_timeout', '2s', true)")
        database = str(call(connection, schema, "confirm_identity", action=options.action, decided_by=whoami()))
    if options.dry_run:
        return console.tell(record, f"would {options.action} the identity of schema {schema}")
    return console.tell(record | {"database": database}, f"this database is now {database}")
