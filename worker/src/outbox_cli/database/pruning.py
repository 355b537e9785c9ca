"""`outbox prune`: deletes messages that every registered processor has examined. Nothing deletes by itself."""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Final

from outbox_cli.context import APPLICATION_NAME, Context, against_source, need_reason, whoami
from outbox_cli.errors import Exit, RefusedError, UsageError
from outbox_core.errors import OutboxError
from outbox_core.plain import plain_count
from outbox_core.span import format_age
from outbox_worker.postgres import remote_target
from outbox_worker.postgres.admin import pruning
from outbox_worker.postgres.admin.mappings import list_mappings
from outbox_worker.postgres.admin.overview import record_audit_entry
from outbox_worker.postgres.connection import Connection, ConnectionFiles
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.progress import checkpoints
from outbox_worker.postgres.reading.table import OutboxTable
from outbox_worker.postgres.remote_target import read_durably

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox_core.spec import Source
    from outbox_worker.postgres.admin.pruning import Reader

_START: Final = ("0", -(2**63))
_REMOTE: Final = (
    "a projection into another database keeps its checkpoint there, and this database does not know of it: name each "
    "such database with --readers DIR, or say with --no-remote-readers that there is none"
)


@against_source
def prune(connection: Connection, context: Context) -> Exit:
    """Delete what every processor has examined, in short transactions, the oldest first."""
    options, console = context.options, context.console
    need_reason(options)
    with ExitStack() as closing:
        remote = [closing.enter_context(ConnectionFiles(each).connect(APPLICATION_NAME)) for each in options.readers]
        job = _Job(connection, context, remote)
        readers = job.find_readers()
        remote_known = remote or options.no_remote_readers
        if not remote_known and not options.dry_run:
            raise RefusedError(_REMOTE)
        for reader in readers:
            console.note(f"{reader.name} has examined up to {reader.view.pair}")
        record = {"table": job.name, "readers": sorted({each.name for each in readers})}
        if options.dry_run:
            looked, chosen = job.run(delete=False)
            if not remote_known:
                console.note(_REMOTE)
            return console.tell(
                record | {"rows": looked, "prunable": chosen, "deleted": 0},
                f"{chosen} of {plain_count(looked, 'message')} would be deleted from {job.name}",
            )
        console.confirm(f"Delete what all of them have examined{job.age}? It cannot be undone")
        looked, deleted = job.run(delete=True)
        return console.tell(
            record | {"rows": looked, "deleted": deleted},
            f"{plain_count(deleted, 'message')} deleted from {job.name}; recorded in the audit log for {whoami()}",
        )


class _Job:
    """One run over one table."""

    def __init__(self, connection: Connection, context: Context, remote: list[Connection]) -> None:
        self._connection = connection
        self._context = context
        self._remote = remote
        self._source = _find_source(connection, context)
        self._table = OutboxTable.of(self._source)
        self.name = f"{self._table.schema}.{self._table.name}"
        self._identity = remote_target.identify(connection, self._source).identity if remote else ""
        self._schemas = pruning.list_schemas(connection)
        named = context.schema
        self._logs = [(connection, each) for each in sorted(self._schemas, key=lambda each: each != named)]
        if context.options.older_than is not None and self._table.columns.scheduled is None:
            raise RefusedError(
                f"--older-than needs a column that says when a message was stored, and the mapping of {self.name} "
                "names none (source.table.columns.scheduled)"
            )

    @property
    def age(self) -> str:
        """The limit of age in words."""
        older = self._context.options.older_than
        return "" if older is None else f" and is older than {format_age(older.total_seconds())}"

    def find_readers(self) -> list[Reader]:
        """Return the processors that read the table, or refuse: one has no checkpoint that can be believed."""
        found = [(self._connection, each) for each in pruning.find_readers(self._connection, self._table)]
        for connection in self._remote:
            # A crash there must not take back a checkpoint whose messages were deleted here.
            there = read_durably(
                connection, partial(pruning.find_remote_readers, connection, self._table, self._identity), bool
            )
            found += [(connection, each) for each in there]
            if there and not self._logs:  # nothing of ours is beside the messages
                self._logs = [(connection, there[0].schema)]
        ignored = set(self._context.options.ignore)
        if unknown := ignored - {reader.view.processor_id for _, reader in found}:
            raise RefusedError(f"no processor {', '.join(sorted(unknown))} reads this table: look at `outbox status`")
        kept, refused = [], []
        for connection, reader in found:
            if reader.view.processor_id not in ignored:
                kept.append(reader)
                refused.append(_find_doubt(connection, reader))
            elif reader.view.live:
                refused.append(f"{reader.name} is being run by {reader.view.pod}: it cannot be left out")
        refused.append(pruning.find_rebased(self._connection, self._source, self._schemas, kept))
        if refused := [each for each in refused if each]:  # all at once: who put one right would only meet the next
            raise RefusedError("; ".join(dict.fromkeys(refused)))
        _check_partitioning(kept)
        if not kept:
            raise RefusedError(f"no processor has a checkpoint on {self.name}: nothing says what was handled")
        return kept

    def run(self, *, delete: bool) -> tuple[int, int]:
        """Go through the table; return how many rows were looked at and how many are deleted, or would be."""
        options, console = self._context.options, self._context.console
        looked = done = 0
        after, began = _START, time.monotonic()
        found = self.find_readers()
        examined = pruning.find_examined(found)
        readers = "behind " + ", ".join(f"{each.name} at {each.view.pair}" for each in found[:20])
        batch = options.batch if options.rate is None else max(1, min(options.batch, int(options.rate)))
        plan = pruning.Pruning(self._table, self._schemas, options.older_than, batch, delete)
        ended = "ended"
        if delete:
            self._record(f"prune of {self.name} begins: {options.reason}{self.age}, {readers}", must=True)
        try:
            with console.progress("messages deleted" if delete else "messages looked at") as progress:
                while True:
                    page = pruning.prune_page(self._connection, plan, examined, after)
                    looked, done = looked + page.rows, done + (page.deleted if delete else page.chosen)
                    progress.reach(done if delete else looked)
                    if page.last is None or page.rows < batch:
                        return looked, done
                    after = page.last
                    if options.rate is not None and delete:
                        time.sleep(max(0.0, began + done / options.rate - time.monotonic()))
                    # Looked at again: a processor may have been rewound, or have begun, meanwhile.
                    examined = pruning.find_examined(self.find_readers())
        except BaseException as err:
            ended = "was stopped" if isinstance(err, KeyboardInterrupt) else "failed"
            if delete:
                console.note(f"{done} were deleted before this; the same command goes on with the rest")
            raise
        finally:
            if delete:
                self._record(f"prune of {self.name} {ended}: {done} deleted")

    def _record(self, what: str, *, must: bool = False) -> None:
        """Write the audit log entry; `must`: nothing is deleted that is not recorded."""
        connection, schema = self._logs[0]
        try:
            record_audit_entry(connection, schema, action="Prune", processor_id=None, reason=what, decided_by=whoami())
        except OutboxError:
            if must:
                raise


def _find_doubt(connection: Connection, reader: Reader) -> str:
    """Say why a reader's checkpoint does not tell what was handled; empty where it does."""
    view = reader.view
    if view.pair is None:
        return (
            f"{reader.name} has no checkpoint yet, so every message may be needed: let it begin, delete its "
            f"resource and say --ignore {view.processor_id}, or wait"
        )
    if view.open_conflict is not None:
        return f"conflict {view.open_conflict} of {reader.name} is open: its checkpoint is in question"
    if reader.outdated:
        return (
            f"{reader.name} stored its checkpoint before a failover or a repair of this database, so that it says "
            f"nothing of what was handled: start the processor and do what its SourceDiffers says, or delete its "
            f"resource and say --ignore {view.processor_id}"
        )
    try:
        checkpoints.load_untampered(connection, ProcessorKey(reader.schema, view.processor_id, view.partition))
    except checkpoints.TamperedError:
        return (
            f"the checkpoint of {reader.name} was edited by hand and says nothing of what was handled: start the "
            "processor, and decide the conflict that it reports"
        )
    return ""


def _find_source(connection: Connection, context: Context) -> Source:
    """Return table and columns: the manifest's, those that processors wrote down for --source, or our own."""
    options = context.options
    if options.source is None:
        return context.source
    if options.file:
        raise UsageError("--source and -f both name a table: which of the two?")
    schema, dot, name = options.source.rpartition(".")
    wanted = (schema if dot else "public", name)
    found = [
        source
        for ours in pruning.list_schemas(connection)
        for source in list_mappings(connection, ours).values()
        if source.table is not None and (source.table.schema_name, source.table.name) == wanted
    ]
    if not found:
        raise RefusedError(
            f"no processor has said that it reads {'.'.join(wanted)}: name a manifest with -f, or start one of its "
            "processors with this version"
        )
    places = {(s.table.columns.transaction_id, s.table.columns.position) for s in found if s.table is not None}
    if len(places) > 1:
        raise RefusedError(f"processors read {'.'.join(wanted)} by different columns: prune each by its manifest (-f)")
    return max(found, key=lambda source: source.table is not None and source.table.columns.scheduled is not None)


def _check_partitioning(readers: Sequence[Reader]) -> None:
    """Refuse a partitioned processor of which a partition is missing."""
    there = {(reader.schema, reader.view.processor_id, reader.view.partition) for reader in readers}
    for reader in readers:
        name, partitioning = reader.view.processor_id, reader.view.partitioning
        for partition in range(partitioning.count) if partitioning is not None else ():
            if (reader.schema, name, partition) not in there:
                raise RefusedError(
                    f"{name} has no checkpoint of partition {partition} yet, so every message may be needed: let it "
                    "begin, or wait"
                )
