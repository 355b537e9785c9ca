"""`migrate`, `confirm-identity` and `adopt` against a database, as the owner of schema and tables."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import psycopg

from outbox_cli.context import DEFAULT_SCHEMA, Context, against_database, against_source, whoami
from outbox_cli.errors import CommandError
from outbox_sql import adopt as adoption
from outbox_sql import runner
from outbox_sql.guide import build_grants, build_manifest, describe_change_over, quote
from outbox_sql.recognise import Recognised, guess_columns, recognise
from outbox_worker.postgres.call import call

if TYPE_CHECKING:
    from outbox_cli.errors import Exit
    from outbox_worker.postgres.connection import Connection

_NEEDED: Final = ("messageId", "messageType", "data")
_UNKNOWN: Final = "NAME-THE-COLUMN"


@against_database
def migrate(connection: Connection, context: Context) -> Exit:
    """Bring the schema to this version."""
    schema = context.options.schema or DEFAULT_SCHEMA
    try:
        return _migrate(connection, context, schema)
    except psycopg.errors.InsufficientPrivilege as err:
        raise CommandError(
            f"{err.diag.message_primary}: migrate as the owner of schema {schema} and of all that is in it, or, where "
            "there is no such schema yet, as a role that has CREATE on the database"
        ) from err


def _migrate(connection: Connection, context: Context, schema: str) -> Exit:
    options, console = context.options, context.console
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


@against_source
def adopt(connection: Connection, context: Context) -> Exit:
    """Add what is missing, and print manifest, grants and the change-over."""
    options, console = context.options, context.console
    schema, dot, table = options.table.rpartition(".")
    schema = schema if dot else "public"
    said: list[str] = []

    def announce(line: str) -> None:
        said.append(line)
        console.say(line)

    named = wanted = adoption.Adoption(
        schema=schema,
        table=table,
        transaction_id=options.transaction_id_column,
        position=options.position_column,
        ordered_by=options.ordered_by,
        only_where_null=options.only_where_null,
        publication_id=options.publication_column,
        batch=options.batch,
    )
    known = recognise(adoption.inspect(connection, named).columns)
    if known is not None and known.columns["messageType"] in known.missing:
        wanted = replace(named, message_type=(known.columns["messageType"], known.kind.name))
    if known is not None:
        announce(f"{schema}.{table} is {known.kind.title}")
        if known.faults:
            raise adoption.AdoptionError(f"{schema}.{table} cannot be read: {'; '.join(known.faults)}")
        if known.ordered_by is not None and options.ordered_by is None:
            some = f" --only-where-null {known.handled_at}" if known.handled_at is not None else ""
            announce(f"to have the rows read that wait in it now: --ordered-by {known.ordered_by}{some}")
    with console.progress("rows numbered") as progress:
        adoption.adopt(connection, wanted, dry_run=options.dry_run, announce=announce, watch=progress.reach)
    told = _tell(context, wanted, known, adoption.inspect(connection, named).columns)
    return console.tell({"table": f"{schema}.{table}", "dryRun": options.dry_run, "steps": said} | told)


def _tell(
    context: Context, wanted: adoption.Adoption, known: Recognised | None, columns: dict[str, str]
) -> dict[str, Any]:
    """Print what a person does next; return it for programs."""
    console, schema, table = context.console, wanted.schema, wanted.table
    pair = {"position": wanted.position, "transactionId": wanted.transaction_id}
    mapped = (guess_columns(columns) if known is None else known.columns) | pair
    if wanted.publication_id is not None:
        mapped = mapped | {"publicationId": wanted.publication_id}
    unknown = [role for role in _NEEDED if role not in mapped]
    is_ours = known is not None and not known.is_mapped
    manifest = build_manifest(
        schema=schema, table=table,
        columns=None if is_ours else mapped | dict.fromkeys(unknown, _UNKNOWN),
    )  # fmt: skip
    functions = context.options.schema or DEFAULT_SCHEMA
    grants = build_grants(schema, table, functions=functions)
    kind = None if known is None else known.kind
    handled = None if wanted.only_where_null is None else f"{quote(wanted.only_where_null)} IS NOT NULL"
    steps = describe_change_over(
        schema, table, transaction_id=wanted.transaction_id,
        poller="the program that reads it today" if kind is None else kind.poller,
        handled=handled if known is None else known.is_handled, backfilled=wanted.ordered_by is not None,
        note="" if kind is None else kind.note,
    )  # fmt: skip
    console.say(f"\nthe manifest:\n\n{manifest}\n")
    if unknown:
        console.say(f"its columns have no usual names: say which one is {', '.join(unknown)}\n")
    console.say(
        f"grants, for the role of the Secret where it is not the owner of schema {functions}, who runs `outbox "
        "migrate` first (producers need none):\n"
    )
    for grant in grants:
        console.say(f"  {grant}")
    console.say("\nthe change-over, with nothing lost and nothing handled twice:\n")
    for number, step in enumerate(steps, 1):
        console.say(f"  {number}. {step}")
    return {"kind": None if kind is None else kind.name, "manifest": manifest, "grants": grants, "changeOver": steps}
