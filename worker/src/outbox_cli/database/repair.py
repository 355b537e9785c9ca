"""`outbox repair`: a database whose transaction ids are behind its own rows is made readable again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox_cli.console import Console, Record, record_of
from outbox_cli.context import Context, against_database, need_reason, whoami
from outbox_cli.errors import CommandError, Exit, RefusedError, UsageError
from outbox_cli.table import format_rows
from outbox_core.plain import plain_count
from outbox_worker.postgres.admin.repair import MOST_USED_UP, Outbox, Repairer, RepairError, find_outboxes
from outbox_worker.postgres.reading.table import OutboxTable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outbox_worker.postgres.admin.repair import Moved, Plan, Repair, Rows
    from outbox_worker.postgres.connection import Connection


@against_database
def repair(connection: Connection, context: Context) -> Exit:
    """Rebase what a restore brought along, or go on with a repair that was begun."""
    options, console = context.options, context.console
    repairer = Repairer(connection, context.schema, _tables(connection, context))
    begun = repairer.find_open()
    if begun is not None:
        return _go_on(context, repairer, begun)
    plan = repairer.preview()
    if not plan.needed:
        return console.tell(
            {"needed": False, "done": False},
            f"no id that is stored in schema {context.schema} is ahead of this server: nothing to repair",
        )
    live = repairer.live_owners()
    if options.dry_run:
        return _show(console, plan, live)
    need_reason(options)
    if live:
        raise RefusedError(f"a live owner works here: {live[0]}; suspend it first (`kubectl outbox pause`)")
    if plan.use_up > MOST_USED_UP:
        raise RefusedError(
            f"the server would have to hand out {plan.use_up:,} transaction ids first, too many at once: let "
            "its administrator advance the counter (pg_resetwal on the stopped server), then look again"
        )
    if not console.is_json:
        _show(console, plan, live)
    console.confirm("Rebase these ids? Nothing runs until it is done; producers go on.")
    if plan.use_up:
        with console.progress("transaction ids used up", plan.use_up) as progress:
            # What producers store meanwhile needs room too.
            repairer.use_up(plan.use_up + plan.use_up // 10 + 1000, progress.reach)
    return _carry_out(context, repairer, repairer.begin(options.reason, whoami()))


def _go_on(context: Context, repairer: Repairer, begun: Repair) -> Exit:
    console = context.console
    if context.options.dry_run:
        return console.tell(
            {"needed": True, "unfinished": begun.id, "done": False},
            f"repair {begun.id} was begun and not finished: without --dry-run it goes on where it was",
        )
    console.note(f"repair {begun.id} was begun and not finished: going on")
    return _carry_out(context, repairer, begun)


def _carry_out(context: Context, repairer: Repairer, begun: Repair) -> Exit:
    console = context.console
    with console.progress("pages rewritten") as progress:
        changed = repairer.rewrite(begun, context.options.pages, progress.reach)
    try:
        moved = repairer.finish(begun)
    except RepairError as err:
        raise CommandError(f"{err}. Nothing runs until `outbox repair` is finished") from err
    return console.tell(
        {"needed": True, "done": True, "messages": changed, "checkpoints": [_moved(each) for each in moved]},
        f"{plain_count(changed, 'message')} and {plain_count(len(moved), 'checkpoint')} rebased; "
        f"recorded in the audit log for {whoami()}",
        "workers go on by themselves; if the database was copied too: `outbox confirm-identity keep` or `renew`",
    )


def _tables(connection: Connection, context: Context) -> list[Outbox]:
    """The schema's own outboxes, the one that the manifest maps, and those that are named."""
    mapped = OutboxTable.of(context.source)
    found = [*find_outboxes(connection, context.schema)]
    found.append(Outbox(mapped.schema, mapped.name, mapped.columns.transaction_id))
    for text in context.options.table:
        schema, dot, name = text.partition(".")
        if not dot:
            raise UsageError(f"--table {text}: name it as schema.table, or schema.table.column")
        name, dot, column = name.partition(".")
        found.append(Outbox(schema, name, column) if dot else Outbox(schema, name))
    return list(dict.fromkeys(found))


def _show(console: Console, plan: Plan, live: list[str]) -> Exit:
    columns = [f"{table}.{column}" for table, column in plan.columns]
    document = {
        "needed": True,
        "done": False,
        "restored": _rows(plan.restored),
        "writtenHere": _rows(plan.written_here),
        "ids": plan.ids,
        "useUp": plan.use_up,
        "checkpoints": [_moved(each) for each in plan.checkpoints],
        "columns": columns,
        "otherTables": list(plan.others),
        "liveOwners": live,
    }
    lines = [
        *format_rows([("WHAT", "FROM", "TO", "ROWS"), *_changes(plan)]),
        f"{plan.ids} different ids in all; also in {', '.join(sorted(set(columns)))}",
    ]
    if plan.use_up:
        lines.append(f"the server hands out about {plan.use_up:,} transaction ids first, to make room")
    console.tell(document, *lines)
    if not console.is_json:
        for name in plan.others:
            console.note(
                f"{name} looks like an outbox too and is not part of this: name it with --table, or its manifest with "
                "-f"
            )
        for owner in live:
            console.note(f"now it would be refused: {owner} is live")
    return Exit.DONE


def _changes(plan: Plan) -> Iterator[tuple[str, str, str, str]]:
    for what, rows in (("restored messages", plan.restored), ("messages stored here since", plan.written_here)):
        if rows is not None:
            yield what, f"ids {rows.lowest} to {rows.highest}", "the lowest ids, in order", str(rows.count)
    for each in plan.checkpoints:
        what = f"checkpoint {each.processor_id} partition {each.partition}"
        yield what, str(each.before), str(each.after), "-"


def _rows(rows: Rows | None) -> Record | None:
    return None if rows is None else {"messages": rows.count, "lowest": str(rows.lowest), "highest": str(rows.highest)}


def _moved(each: Moved) -> Record:
    return record_of(each, but=("before", "after")) | {"from": each.before, "to": each.after}
