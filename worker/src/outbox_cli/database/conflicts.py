"""`conflicts list` and `conflicts accept` against a database."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from outbox_cli.console import Record, record_of
from outbox_cli.context import Context, against_database, whoami
from outbox_cli.database.inspect import find_partitions
from outbox_cli.database.moves import heed_answer, preview, tell_resource
from outbox_cli.database.sources import Sources
from outbox_cli.errors import Exit, RefusedError
from outbox_core.config import Resolution, ResolutionAction
from outbox_worker.postgres.admin.overview import ConflictView, list_conflicts
from outbox_worker.postgres.progress import conflicts

if TYPE_CHECKING:
    from outbox_worker.postgres.connection import Connection

_COLUMNS: Final = {
    "ID": "id", "PROCESSOR": "processorId", "PARTITION": "partition", "CODE": "code", "EXPECTED": "expected",
    "STORED": "stored", "NEW": "new", "POD": "pod", "TIME": "time", "OPEN": "open", "DECIDED": "resolution",
    "BY": "decidedBy",
}  # fmt: skip


@against_database
def list_all(connection: Connection, context: Context) -> Exit:
    """List the conflicts that wait for a person; with --all every refusal that is recorded."""
    options = context.options
    found = list_conflicts(
        connection, context.schema, processor_id=context.processor_id, resolved=options.all, limit=options.limit
    )
    empty = "no conflict is recorded" if options.all else "no conflict waits for a person"
    context.console.show([_record(conflict) for conflict in found], _COLUMNS, empty=empty)
    # Asked for by itself: with --all an open one may be behind more refusals than are listed.
    is_open = options.check and list_conflicts(connection, context.schema, processor_id=context.processor_id, limit=1)
    return Exit.FOUND if is_open else Exit.DONE


@against_database
def accept(connection: Connection, context: Context) -> Exit:
    """Go on from the pair that is stored now."""
    options, console = context.options, context.console
    found = list_conflicts(connection, context.schema, conflict_id=options.conflict, resolved=True)
    if not found:
        raise RefusedError(f"there is no conflict {options.conflict} in schema {context.schema}")
    (conflict,) = found
    if not conflict.is_open:
        raise RefusedError(f"conflict {conflict.id} does not wait for a person: {conflict.resolution or 'told only'}")
    if (asked := context.processor_id) not in (None, conflict.processor_id):
        raise RefusedError(
            f"conflict {conflict.id} is of processor {conflict.processor_id}, and the manifest of {asked}: look at "
            "`outbox conflicts list`"
        )
    (view,) = find_partitions(connection, context.schema, conflict.processor_id, conflict.partition)
    if view.pair is None:
        raise RefusedError("the checkpoint's row is gone, so there is no pair to accept: `outbox rewind` puts one back")
    if options.pair is not None and options.pair != view.pair:
        raise RefusedError(f"the stored pair is {view.pair}, not {options.pair}: look again")
    with Sources(connection, context) as sources:
        move = preview(sources, context, view, conflict.expected, view.pair)
    if options.dry_run:
        return console.tell(move.record(done=False), move.sentence())
    if options.yes and options.pair is None:
        raise RefusedError(f"with --yes name the pair that you saw: --pair {view.pair}")
    console.note(move.sentence())
    console.confirm(f"Accept {view.pair} for conflict {conflict.id}?")
    decided_by = whoami() if options.reason is None else f"{whoami()}: {options.reason}"
    decision = Resolution(
        conflict_id=conflict.id, action=ResolutionAction.ACCEPT, pair=str(view.pair), decided_by=decided_by
    )
    heed_answer(conflicts.resolve(connection, context.schema, decision), conflict.id)
    console.tell(move.record(done=True), f"accepted {view.pair}; recorded in the audit log for {whoami()}")
    tell_resource(context, view, "accept {}", conflict.id)
    return Exit.DONE


def _record(conflict: ConflictView) -> Record:
    return record_of(conflict, but=("needs_person",)) | {"open": conflict.is_open}
