"""`status`, `lag`, `stall` and `audit` against a database: nothing is changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from outbox_cli.console import Record, record_of
from outbox_cli.context import Context, against_database, against_source
from outbox_cli.database.sources import Sources
from outbox_cli.errors import Exit, RefusedError
from outbox_core.errors import ConfigurationError
from outbox_core.plain import plain_count
from outbox_core.processor.summary import TELLING
from outbox_core.report import Lag, WorkerState
from outbox_core.span import format_age
from outbox_worker.observe.change import look_at_change
from outbox_worker.postgres.admin.mappings import list_mappings
from outbox_worker.postgres.admin.overview import ProcessorView, list_audit_log, list_processors
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.ownership.process_statuses import StoredStatus, list_statuses
from outbox_worker.postgres.progress.rebuilds import list_rebuilds
from outbox_worker.postgres.reading.messages import LAG_CAP, MessageReader
from outbox_worker.postgres.reading.stall import Writer, describe, list_writers, missing_grant, remedy
from outbox_worker.postgres.remote_target import fetch_source

if TYPE_CHECKING:
    from collections.abc import Iterable

    from outbox_worker.postgres.connection import Connection

_STATUS: Final = {
    "PROCESSOR": "processorId", "PARTITION": "partition", "STATE": "state", "REASON": "reasonText", "CLAIM": "claim",
    "POD": "pod", "EPOCH": "epoch", "CHECKPOINT": "checkpoint", "STORED": "storedAt", "LAG": "lagText",
    "CONFLICTS": "conflicts", "OPEN": "openConflict",
}  # fmt: skip
_LAG: Final = {
    "PROCESSOR": "processorId", "PARTITION": "partition", "CHECKPOINT": "checkpoint", "MESSAGES": "messages",
    "AGE": "seconds",
}  # fmt: skip
_AUDIT: Final = {
    "ID": "id", "TIME": "time", "ACTION": "action", "PROCESSOR": "processorId", "FROM": "from", "TO": "to",
    "BY": "decidedBy", "REASON": "reason",
}  # fmt: skip
TROUBLED: Final = frozenset({"Stopped", "Retrying", "Unavailable", "Blocked"})
"""States of a process that are the processor's state too."""
_ORDER: Final = {state.value: number for number, state in enumerate(TELLING)}


def status_record(view: ProcessorView, lag: Lag | None, status: StoredStatus | None) -> Record:
    """Write one partition for a person or a program."""
    return {
        "processorId": view.processor_id,
        "partition": view.partition,
        "state": state_of(view, status),
        "process": process_record(status),
        "claim": None if view.holder is None else str(view.holder),
        "vacatedAt": view.vacated_at,
        "pod": view.pod if view.live else None,
        "epoch": view.epoch,
        "leaseExpiresAt": view.expires_at if view.live else None,
        "checkpoint": None if view.pair is None else str(view.pair),
        "storedAt": view.stored_at,
        "lag": None if lag is None else lag.model_dump(by_alias=True),
        "conflicts": view.conflicts,
        "openConflict": view.open_conflict,
    }


def format_lag(lag: Lag | None) -> str | None:
    """Write how much waits, and since when."""
    if lag is None:
        return None
    if not lag.messages and not lag.at_least:
        return "0"
    return f"{lag.messages}{'+' if lag.at_least else ''} ({format_age(lag.seconds)})"


def find_partitions(
    connection: Connection, schema: str, processor_id: str | None, partition: int | None = None
) -> list[ProcessorView]:
    """Read all processors, the one asked for, or one partition of that; refuse what the database does not know."""
    views = list_processors(connection, schema, processor_id)
    if not views and processor_id is not None:
        raise RefusedError(f"schema {schema} knows no processor {processor_id}")
    if partition is None:
        return views
    if not (found := [view for view in views if view.partition == partition]):
        raise RefusedError(f"processor {processor_id} has no partition {partition}")
    return found


@against_database
def status(connection: Connection, context: Context) -> Exit:
    """Say who owns each processor, how far it is, and what waits for a person."""
    views = find_partitions(connection, context.schema, context.processor_id)
    statuses = list_statuses(connection, context.schema, context.processor_id)
    rebuilds = list_rebuilds(connection, context.schema, context.processor_id)
    replaced = {row.of: row.processor_id for row in rebuilds if row.swapped_at is not None}
    records, notes = [], []
    with Sources(connection, context) as sources:
        changes = look_at_changes(connection, context.schema, views, sources)
        for view in map(sources.with_consumers, views):
            # A process of one that was replaced may say nothing more.
            said = None if view.processor_id in replaced else choose_status(view, statuses)
            lag, unknown = _measure(sources, view)
            record = status_record(view, lag, said)
            record |= {"change": changes.get(view.processor_id)} | sources.unfinished(view)
            shown = {"lagText": unknown or format_lag(lag), "reasonText": format_reason(said)}
            records.append(record if context.console.is_json else record | shown)
            if (note := describe_status(view, said)) is not None:
                notes.append(note)
    context.console.show(records, _STATUS, empty=f"no processor has ever worked on schema {context.schema}")
    for note in notes:
        context.console.note(note)
    for processor_id, change in changes.items():
        context.console.note(f"{processor_id}: {change['message']}")
    for processor_id in {view.processor_id: None for view in views if view.processor_id in replaced}:
        context.console.note(
            f"{processor_id}: processor {replaced[processor_id]} replaced it; it never runs again: delete its resource"
        )
    return Exit.DONE


def _measure(sources: Sources, view: ProcessorView) -> tuple[Lag | None, str | None]:
    """Count what waits; or say why that is not known here. One table that is gone hides no other processor."""
    if view.pair is None:
        return None, None
    try:
        reading = sources.find(view.processor_id)
        return (None, "in another database") if reading is None else (sources.lag(view, reading, LAG_CAP), None)
    except (ConfigurationError, RefusedError) as err:
        return None, f"unknown: {err}"


def look_at_changes(
    connection: Connection, schema: str, views: list[ProcessorView], sources: Sources
) -> dict[str, Record]:
    """Say of each processor whose number of partitions is to change how far that is."""
    changing = {
        view.processor_id: view.partitioning for view in views if view.partitioning and view.partitioning.next_count
    }
    found: dict[str, Record] = {}
    for name, partitioning in changing.items():
        pairs = {view.partition: view.pair for view in views if view.processor_id == name and view.pair}
        change = look_at_change(connection, ProcessorKey(schema, name), sources.source_of(name), partitioning, pairs)
        found[name] = change.model_dump(by_alias=True)
    return found


@against_database
def lag(connection: Connection, context: Context) -> Exit:
    """Count what waits behind each checkpoint; with limits, say by the exit status whether one is exceeded."""
    options = context.options
    # A limit above the cap would never be seen to be exceeded.
    cap = max(options.cap or LAG_CAP, 0 if options.max_messages is None else options.max_messages + 1)
    limited = options.max_messages is not None or options.max_seconds is not None
    records: list[Record] = []
    exceeded = False
    with Sources(connection, context) as sources:
        for view in find_partitions(connection, context.schema, context.processor_id):
            if view.pair is None:
                if view.holder is not None or view.live or view.open_conflict is not None:
                    context.console.note(f"{name_of(view)} has no checkpoint: how much waits is not known")
                    exceeded |= limited
                continue
            reading = sources.need if context.processor_id is not None else sources.find
            source = reading(view.processor_id)
            if source is None:
                context.console.note(f"{view.processor_id} reads another database: left out; name it to see it")
                continue
            found = sources.lag(view, source, cap)
            exceeded |= _exceeds(found, options.max_messages, options.max_seconds)
            counted = f"{found.messages}+" if found.at_least and not context.console.is_json else found.messages
            records.append(
                {
                    "processorId": view.processor_id,
                    "partition": view.partition,
                    "checkpoint": str(view.pair),
                    "messages": counted,
                    "atLeast": found.at_least,
                    "seconds": found.seconds,
                }
            )
    context.console.show(records, _LAG, empty=f"no processor has a checkpoint in schema {context.schema}")
    return Exit.FOUND if exceeded else Exit.DONE


def _exceeds(found: Lag, messages: int | None, seconds: float | None) -> bool:
    """Say whether a limit is exceeded, or may be: counting stopped before it was clear."""
    too_many = messages is not None and (found.messages > messages or found.at_least)
    return too_many or (seconds is not None and found.seconds > seconds)


@against_source
def stall(connection: Connection, context: Context) -> Exit:
    """Name who holds the high-water mark back; with --all every open transaction that has written."""
    found = list_writers(connection)
    waits = _has_waiting(connection, context)
    holder = found.holder
    others = max(0, len(found.writers) - 1)
    record: Record = {"highWaterMark": found.high_water_mark, "messagesWait": waits, "others": others}
    record["holder"] = None if holder is None else _writer(holder)
    lines = [f"nothing holds the high-water mark back (transaction id {found.high_water_mark})"]
    if holder is not None:
        lines = [f"the high-water mark stands at transaction id {found.high_water_mark}, held by {describe(holder)}"]
        if others:
            one = "more open transaction has written and holds it next (--all names it)"
            many = "more open transactions have written and hold it next (--all names them)"
            lines.append(plain_count(others, one, many))
        lines.append("committed messages wait behind it" if waits else "no committed message waits behind it")
        lines.append(f"to end it: {remedy(holder)}")
    if context.options.all:
        record["writers"] = [_writer(writer) for writer in found.writers]
        lines += [f"{writer.transaction_id}: {describe(writer)}" for writer in found.writers]
    context.console.tell(record, *lines)
    if (grant := missing_grant(found)) is not None:
        context.console.note(grant)
    return Exit.FOUND if context.options.check and holder is not None and waits else Exit.DONE


def _has_waiting(connection: Connection, context: Context) -> bool:
    """Say whether a message waits in the manifest's table; without one, in ours or in any that is read here."""
    if MessageReader(context.source).has_waiting(connection):
        return True
    mapped = {} if context.manifest else list_mappings(connection, context.schema)
    for processor_id, source in mapped.items():
        if source.table is None or fetch_source(connection, ProcessorKey(context.schema, processor_id)) is not None:
            continue  # our own, or in another database
        try:
            if MessageReader(source).has_waiting(connection):
                return True
        except ConfigurationError as err:
            context.console.note(f"{processor_id}: whether a message waits is not known: {err}")
    return False


def _writer(writer: Writer) -> Record:
    more = {"processor": writer.processor, "preparedTransaction": writer.prepared}
    return record_of(writer, but=("holds", "prepared", "backend_type")) | more


@against_database
def audit(connection: Connection, context: Context) -> Exit:
    """List what people decided."""
    records = [
        record_of(entry, but=("before", "after", "decided_at"))
        | {"time": entry.decided_at, "from": entry.before, "to": entry.after}
        for entry in list_audit_log(connection, context.schema, context.processor_id, context.options.limit)
    ]
    return context.console.show(records, _AUDIT, empty="the audit log is empty")


def choose_status(view: ProcessorView, statuses: Iterable[StoredStatus]) -> StoredStatus | None:
    """Return the status that says how the partition is; None: no process ever said anything.

    That of the process that has the lease; without one, of the processes that live the one that most needs attention;
    else the latest of all.
    """
    said = [each for each in statuses if (each.processor_id, each.partition) == (view.processor_id, view.partition)]
    if view.live and view.token is not None:
        return next((each for each in said if each.token == view.token), None)
    fresh = [each for each in said if each.is_fresh]
    if fresh:
        return min(fresh, key=lambda each: _ORDER.get(each.state, len(_ORDER)))
    return min(said, key=lambda each: each.age_seconds, default=None)


def name_of(view: ProcessorView) -> str:
    """Name a processor's partition; the first one, which may be all of it, by the processor alone."""
    return view.processor_id if not view.partition else f"{view.processor_id} partition {view.partition}"


def state_of(view: ProcessorView, status: StoredStatus | None = None) -> str:
    """One word for people: Blocked, Stopped, Retrying, Unavailable, Running, Vacated, Claimed or Free."""
    if view.open_conflict is not None:
        return "Blocked"
    told = status.state if status is not None and status.is_fresh and status.state in TROUBLED else None
    if view.live:
        return told or "Running"
    if view.holder is None:
        return "Free"
    return told or ("Claimed" if view.vacated_at is None else "Vacated")


def process_record(status: StoredStatus | None) -> Record | None:
    """Write a process's status for a program."""
    if status is None:
        return None
    return record_of(status, but=("processor_id", "partition", "token", "is_fresh")) | {"fresh": status.is_fresh}


def format_reason(status: StoredStatus | None) -> str | None:
    """Write the reason for a table: an old one says how old it is."""
    if status is None or status.is_fresh:
        return None if status is None else status.reason
    return f"{status.reason}, {'ended' if status.ended else 'silent'} {format_age(status.age_seconds)}"


def describe_status(view: ProcessorView, status: StoredStatus | None) -> str | None:
    """Write a sentence where a person should read one; None: all goes on."""
    if status is None:
        return None
    name = name_of(view)
    message = f": {status.message}" if status.message else ""
    if status.is_fresh:
        return f"{name}: {status.state} ({status.reason}){message}" if status.state in TROUBLED else None
    age = format_age(status.age_seconds)
    state = "Running" if status.state == WorkerState.ACTIVE else status.state
    if status.ended:
        if status.state not in TROUBLED:
            return None
        return f"{name}: pod {status.pod} ended {age} ago; before that it was {state} ({status.reason}){message}"
    return (
        f"{name}: nothing was heard of pod {status.pod} for {age}: it was killed, is frozen, or cannot reach this "
        f"database; it last said {state} ({status.reason}){message}"
    )
