"""Deletes messages that every registered processor has examined, by the checkpoint contract's own comparison.

A processor's readers are found in every schema of ours in the database of the messages, and in the databases that are
named: a projection elsewhere keeps its checkpoint there, and nothing of it is known in the source.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Final

from psycopg import sql

from outbox_core.progress.coverage import as_snapshot_range, meet
from outbox_core.progress.snapshot import parse_snapshot
from outbox_worker.postgres.admin.mappings import list_mappings
from outbox_worker.postgres.admin.overview import list_processors
from outbox_worker.postgres.admin.repair import is_unfinished
from outbox_worker.postgres.call import fetch_one, fetch_rows, in_schema, load
from outbox_worker.postgres.feeds import competing
from outbox_worker.postgres.identity import fetch_behind, fetch_checkpoint_ahead
from outbox_worker.postgres.reading.table import OutboxTable
from outbox_worker.postgres.remote_target import database_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from datetime import timedelta

    from outbox_core.progress.snapshot_range import SnapshotRange
    from outbox_core.spec import Source
    from outbox_worker.postgres.admin.overview import ProcessorView
    from outbox_worker.postgres.connection import Connection

_NO_COPY: Final = sql.SQL("SELECT 1 WHERE false")


@dataclass(frozen=True, slots=True)
class Reader:
    """One partition of a processor that reads the table, or may.

    Attributes:
        schema: where its checkpoint is.
        source: what it reads; None: it has not said so since that is written down, so it may read any table.
        outdated: its checkpoint is in another database than the messages, and of ids before a failover or a repair.

    """

    schema: str
    view: ProcessorView
    source: Source | None
    outdated: bool = False

    @property
    def name(self) -> str:
        """For people."""
        part = f" partition {self.view.partition}" if self.view.partitioning is not None else ""
        return f"{self.view.processor_id}{part}"


@dataclass(frozen=True, slots=True)
class Pruning:
    """What may go, and how much of it at a time.

    Attributes:
        schemas: of ours, whose held messages, dead letters and retries keep their rows.
        older_than: only what was stored longer ago; None: all.
        batch: rows that one statement looks at.
        delete: False only counts.

    """

    table: OutboxTable
    schemas: Sequence[str]
    older_than: timedelta | None
    batch: int
    delete: bool


@dataclass(frozen=True, slots=True)
class Page:
    """What came of one page: rows looked at, of these to be deleted, and deleted; the last pair, None: no row left."""

    rows: int
    chosen: int
    deleted: int
    last: tuple[str, int] | None


def list_schemas(connection: Connection) -> list[str]:
    """Return the schemas of ours in the database."""
    return [row[0] for row in fetch_rows(connection, load("list_schemas"))]


def find_readers(connection: Connection, table: OutboxTable) -> list[Reader]:
    """Return every processor with a checkpoint, claim or lease in this database that reads the table, or may."""
    found: list[Reader] = []
    for schema in list_schemas(connection):
        queues = competing.list_competing(connection, schema)
        elsewhere = {name for name, _ in fetch_rows(connection, in_schema("list_remote_targets", schema))}
        for view, source in _list_readers(connection, schema, table):
            name = view.processor_id
            if name in elsewhere or queues.get(name) is not None:
                continue
            seen = competing.with_consumers(connection, schema, view) if name in queues else view
            found.append(Reader(schema, seen, source))
    return found


def find_remote_readers(connection: Connection, table: OutboxTable, identity: str) -> list[Reader]:
    """Return the processors whose checkpoint is in this other database and whose source is the one of `identity`."""
    found: list[Reader] = []
    for schema in list_schemas(connection):
        rows = fetch_rows(connection, in_schema("list_remote_targets", schema))
        # A source that was forgotten may be any.
        reading = {name: read for name, read in rows if read is None or database_of(read) == database_of(identity)}
        for view, source in _list_readers(connection, schema, table):
            if view.processor_id in reading:
                found.append(Reader(schema, view, source, outdated=reading[view.processor_id] not in (None, identity)))
    return found


def _list_readers(
    connection: Connection, schema: str, table: OutboxTable
) -> Iterator[tuple[ProcessorView, Source | None]]:
    """Yield the processors of a schema that are not replaced and read a table of this name, or may."""
    mappings = list_mappings(connection, schema)
    superseded = {name for (name,) in fetch_rows(connection, in_schema("list_superseded", schema))}
    for view in list_processors(connection, schema):
        source = mappings.get(view.processor_id)
        if view.processor_id not in superseded and (source is None or _is_of(table, source)):
            yield view, source


def find_examined(readers: Iterable[Reader]) -> list[SnapshotRange]:
    """Return what each of them has examined, none of it twice. Each must have a checkpoint."""
    found = [as_snapshot_range(reader.view.pair) for reader in readers if reader.view.pair is not None]
    return list(dict.fromkeys(found))


def find_rebased(connection: Connection, source: Source, schemas: Sequence[str], readers: Sequence[Reader]) -> str:
    """Say why the ids that are stored here do not tell what was handled; empty where they do.

    After a restore into a younger server what is stored since sorts below the checkpoints that came along; during a
    repair some messages have their new ids, and the checkpoints their old ones.
    """
    for schema in schemas:
        if is_unfinished(connection, schema):
            return f"a repair of schema {schema} was begun and is not finished: run `outbox repair` again"
    remedy = "a restore into a younger server: run `outbox repair` first"
    if (behind := fetch_behind(connection, source)) is not None:
        return f"this server is at transaction id {behind[1]}, below {behind[0]} which is stored here, {remedy}"
    (following,) = fetch_one(connection, "SELECT pg_snapshot_xmax(pg_current_snapshot())::text")
    for reader in readers:
        end = None if reader.view.pair is None else as_snapshot_range(reader.view.pair).end
        if end is not None and parse_snapshot(end).xmax > int(following):
            return f"{reader.name} is at {reader.view.pair}, which this server has not reached, {remedy}"
    for schema in schemas:
        units = {(each.view.processor_id, each.view.partition): each for each in readers if each.schema == schema}
        if units and (ahead := fetch_checkpoint_ahead(connection, schema, units)) is not None:
            unit, why = ahead
            return f"{units[unit].name}: {why}: run `outbox repair` first"
    return ""


def prune_page(
    connection: Connection, pruning: Pruning, examined: Sequence[SnapshotRange], after: tuple[str, int]
) -> Page:
    """Look at the next rows after a pair; delete those of them that may go, in one short statement."""
    table = pruning.table
    end = reduce(meet, (each.end for each in examined))
    if end is None:
        return Page(0, 0, 0, None)
    copies = [in_schema("find_copies", schema) for schema in pruning.schemas]
    statement = load("prune_page").format(
        **table.names,
        moment=sql.SQL("NULL::timestamptz")
        if table.columns.scheduled is None
        else sql.SQL("o.{}").format(sql.Identifier(table.columns.scheduled)),
        copies=sql.SQL(" UNION ALL ").join(copies or [_NO_COPY]),
    )
    ranges = [{"lower": each.lower, "upper": each.upper, "place": each.position} for each in examined]
    parameters = {
        "t": after[0], "p": after[1], "end": end, "examined": json.dumps(ranges), "older_than": pruning.older_than,
        "batch": pruning.batch, "delete": pruning.delete,
    }  # fmt: skip
    rows, chosen, deleted, t, p = fetch_one(connection, statement, parameters)
    return Page(rows, chosen, deleted, None if t is None else (t, p))


def _is_of(table: OutboxTable, source: Source) -> bool:
    other = OutboxTable.of(source)
    return (other.schema, other.name) == (table.schema, table.name)
