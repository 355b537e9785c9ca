"""`claim show` and `claim release` against a database."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from outbox_cli.context import Context, against_database, need_reason, whoami
from outbox_cli.database.inspect import find_partitions
from outbox_cli.errors import Exit, RefusedError
from outbox_worker.postgres.admin.overview import ProcessorView, record_audit_entry
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.ownership import leases as ownership

if TYPE_CHECKING:
    from outbox_cli.console import Record
    from outbox_worker.postgres.connection import Connection

_COLUMNS: Final = {
    "PROCESSOR": "processorId", "CLUSTER": "cluster", "NAMESPACE": "namespace", "NAME": "name", "SINCE": "claimedAt",
    "VACATED": "vacatedAt", "PODS": "pods",
}  # fmt: skip


@against_database
def show(connection: Connection, context: Context) -> Exit:
    """Say which resource of which cluster holds each processor, and which pods work on it."""
    by_id: dict[str, list[ProcessorView]] = {}
    for view in find_partitions(connection, context.schema, context.processor_id):
        by_id.setdefault(view.processor_id, []).append(view)
    records = [_record(views) for views in by_id.values() if views[0].holder is not None]
    return context.console.show(records, _COLUMNS, empty="no processor is claimed")


@against_database
def release(connection: Connection, context: Context) -> Exit:
    """Take the claim away from a resource that will not give it up: its cluster is lost, say."""
    options, console = context.options, context.console
    need_reason(options)
    key = ProcessorKey(context.schema, context.needed_processor)
    views = find_partitions(connection, context.schema, context.processor_id)
    holder = views[0].holder
    if holder is None:
        raise RefusedError(f"no resource holds the claim on {key.processor_id}")
    console.note(f"{key.processor_id} is claimed by {holder} since {views[0].claimed_at}")
    record = _record(views)
    if record["pods"]:
        console.note(
            f"it is alive ({', '.join(record['pods'])}): a batch that it holds is rolled back, and at its next "
            "heartbeat it claims it again, unless another resource has claimed it"
        )
    if options.dry_run:
        return console.tell(record | {"done": False}, f"would release the claim of {holder}")
    if not options.force:
        raise RefusedError("a claim belongs to its resource: delete that, or say --force")
    console.confirm(f"Release the claim of {holder}?")
    with connection.transaction():
        if not ownership.release_claim(connection, key, holder.uid):
            raise RefusedError("the claim changed hands meanwhile; nothing was changed, look again")
        record_audit_entry(
            connection,
            context.schema,
            action="ReleaseClaim",
            processor_id=key.processor_id,
            reason=f"claim of {holder} released by force: {options.reason}",
            decided_by=whoami(),
        )
    return console.tell(record | {"done": True}, f"released; recorded in the audit log for {whoami()}")


def _record(views: list[ProcessorView]) -> Record:
    first = views[0]
    return {
        "processorId": first.processor_id,
        **(first.holder.model_dump() if first.holder else {}),
        "claimedAt": first.claimed_at,
        "vacatedAt": first.vacated_at,
        "pods": sorted({view.pod for view in views if view.live and view.pod}),
    }
