"""`outbox adopt`: makes an outbox that exists already readable, and says how to go over to it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from outbox_cli.command import against_source
from outbox_cli.context import DEFAULT_SCHEMA
from outbox_sql import adopt as adoption
from outbox_sql.guide import build_grants, build_manifest, describe_change_over, quote
from outbox_sql.recognise import guess_columns, recognise

if TYPE_CHECKING:
    from outbox_cli.context import Context
    from outbox_cli.errors import Exit
    from outbox_sql.recognise import Recognised
    from outbox_worker.postgres.connection import Connection

_NEEDED: Final = ("messageId", "messageType", "data")
_UNKNOWN: Final = "NAME-THE-COLUMN"


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
    grants = build_grants(schema, table, functions=context.options.schema or DEFAULT_SCHEMA)
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
    console.say("grants, for the role of the Secret (producers need none):\n")
    for grant in grants:
        console.say(f"  {grant}")
    console.say("\nthe change-over, with nothing lost and nothing handled twice:\n")
    for number, step in enumerate(steps, 1):
        console.say(f"  {number}. {step}")
    return {"kind": None if kind is None else kind.name, "manifest": manifest, "grants": grants, "changeOver": steps}
