"""`dead-letters`, `held` and `redrive`: messages that wait for a person, and what the person decides.

Long work goes in pieces, each one recorded transaction: killed halfway, what is done is done once, and the same command
goes on with the rest. What dies after it was asked is another decision: a message that dies again has another number.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from outbox_cli.console import Record, record_of
from outbox_cli.context import Context, against_database, need_reason, whoami
from outbox_cli.database.inspect import find_partitions
from outbox_cli.errors import Exit, RefusedError, UsageError
from outbox_core.errors import OutboxError, TransientError
from outbox_core.plain import plain_count
from outbox_core.report import Reason
from outbox_worker.postgres.admin import dead_letters
from outbox_worker.postgres.feeds import holding
from outbox_worker.postgres.key import ProcessorKey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from outbox_worker.postgres.admin.dead_letters import Filter, HeldView
    from outbox_worker.postgres.connection import Connection

PIECE: Final = 500
"""Messages in one transaction, where no rate makes it less."""
_PATIENCE: Final = 30.0
"""Seconds for which a busy owner is asked again."""
_DEAD: Final = {
    "ID": "id", "PROCESSOR": "processorId", "KEY": "key", "MESSAGE": "messageId", "TYPE": "messageType",
    "ATTEMPTS": "attempts", "CLASS": "errorClass", "BEHIND": "behind", "DIED": "diedAt", "ERROR": "shortError",
}  # fmt: skip
_HELD: Final = {
    "PROCESSOR": "processorId", "PARTITION": "partition", "KEY": "key", "MESSAGE": "messageId", "STATE": "state",
    "ATTEMPTS": "attempts", "CLASS": "errorClass", "BEHIND": "behind", "NEXT": "nextAttemptAt", "ERROR": "shortError",
}  # fmt: skip
_SHORT: Final = 60
_PARTITION: Final = attrgetter("partition")


def _filter(context: Context) -> Filter:
    """Read which messages the options mean."""
    options = context.options
    return dead_letters.Filter(
        processor_id=context.processor_id,
        ids=options.id,
        keys=options.key,
        message_ids=options.message_id,
        types=options.type,
        classes=options.error_class,
        text=options.error,
        since=options.since,
        until=options.until,
    )


@against_database
def list_dead(connection: Connection, context: Context) -> Exit:
    """List dead letters."""
    options = context.options
    found = dead_letters.list_dead(
        connection, context.schema, _filter(context), limit=options.limit, payload=options.payload
    )
    unsaid = () if options.payload else ("data",)
    records = [record_of(each, but=unsaid) | {"shortError": _short(each.error)} for each in found]
    context.console.show(_for_people(context, records), _DEAD, empty="no dead letters")
    _note_limit(context, len(found))
    return Exit.FOUND if options.check and found else Exit.DONE


@against_database
def list_held(connection: Connection, context: Context) -> Exit:
    """List held messages that are the first of their key, and those behind it that are named."""
    found = dead_letters.list_held(
        connection, context.schema, _filter(context), limit=context.options.limit,
        stopped=context.options.stopped,
    )  # fmt: skip
    records = [_held_record(each) for each in found]
    context.console.show(_for_people(context, records), _HELD, empty="no message is held")
    _note_limit(context, len(found))
    return Exit.DONE


def _note_limit(context: Context, found: int) -> None:
    if found == context.options.limit:
        context.console.note(f"the first {found}; see --limit")


@against_database
def add(connection: Connection, context: Context) -> Exit:
    """Let a processor that stopped at a message go on without it: the worker makes it a dead letter."""
    options, console = context.options, context.console
    need_reason(options)
    key = ProcessorKey(context.schema, context.needed_processor, options.partition)
    find_partitions(connection, key.schema, key.processor_id, key.partition)
    record = {"processorId": key.processor_id, "partition": key.partition, "at": str(options.at)}
    sentence = (
        f"the message at {options.at} is tried once more when {key.processor_id} stands at it, and if it fails it is a "
        "dead letter"
    )
    if not options.dry_run:
        holding.give_up(connection, key, options.at, reason=options.reason, decided_by=whoami())
        sentence = f"recorded in the audit log for {whoami()}: {sentence} (outbox dead-letters list {key.processor_id})"
    return console.tell(record | {"done": not options.dry_run}, sentence)


@against_database
def decide(connection: Connection, context: Context, *, drop: bool) -> Exit:
    """Have messages handled again, in the order of their keys unless consumers compete; or give them up for good."""
    options, console, schema = context.options, context.console, context.schema
    wanted = _filter(context)
    if wanted == dead_letters.Filter(processor_id=wanted.processor_id) and not options.all:
        raise UsageError(
            "which ones? --id, --key, --message-id, --type, --since, --until, --error, --error-class, or --all"
        )
    _ = context.needed_processor
    need_reason(options)
    dead = dead_letters.find_dead(connection, schema, wanted)
    stopped = _stopped(connection, schema, wanted)
    record = {"deadLetters": len(dead), "stopped": len(stopped)}
    verb = "dropped, never handled" if drop else "handled again"
    letters, halted = plain_count(len(dead), "dead letter"), plain_count(len(stopped), "stopped message")
    sentence = f"{letters} and {halted} would be {verb}"
    if options.dry_run:
        some = dead_letters.list_dead(connection, schema, wanted, limit=20)
        lines = (
            f"  {each.id}: {_cut(each.message_id)} of key {_cut(each.key or '-')}, {each.behind} behind it"
            for each in some
        )
        return console.tell(record | {"done": 0}, sentence, *lines)
    if not dead and not stopped:
        raise RefusedError("no dead letter and no stopped message is so")
    console.note(sentence)
    console.confirm("Drop them?" if drop else "Redrive them?")
    done = _work(connection, context, wanted, dead, stopped, drop=drop)
    sentence = f"{done} {'dropped' if drop else 'redriven'}; recorded in the audit log for {whoami()}"
    return console.tell(record | {"done": done}, sentence)


def _stopped(connection: Connection, schema: str, wanted: Filter) -> list[HeldView]:
    """Return held messages that wait for a person; only dead letters have numbers, types and times to ask for."""
    if wanted.ids or wanted.types or wanted.classes or wanted.text or wanted.since or wanted.until:
        return []
    return dead_letters.list_held(connection, schema, wanted, limit=1_000_000, stopped=True)


def _work(
    connection: Connection,
    context: Context,
    wanted: Filter,
    dead: list[int],
    stopped: list[HeldView],
    *,
    drop: bool,
) -> int:
    """Go through them piece by piece, no faster than asked."""
    options, schema = context.options, context.schema
    piece = PIECE if options.rate is None else max(1, min(PIECE, int(options.rate)))
    done, began = 0, time.monotonic()
    told: dict[str, Any] = {"drop": drop, "reason": options.reason, "decided_by": whoami()}
    try:
        with context.console.progress("messages decided about", len(dead) + len(stopped)) as progress:
            for act, partition, numbers in _pieces(connection, schema, wanted, dead, stopped, piece):
                key = ProcessorKey(schema, context.needed_processor, partition)
                done += _patiently(partial(act, connection, key, numbers, **told))
                progress.reach(done)
                if options.rate is not None:
                    time.sleep(max(0.0, began + done / options.rate - time.monotonic()))
    except OutboxError:
        verb = "dropped" if drop else "redriven"
        context.console.note(f"{done} were {verb} before this; the same command goes on with the rest")
        raise
    return done


def _pieces(
    connection: Connection, schema: str, wanted: Filter, dead: list[int], stopped: list[HeldView], size: int
) -> Iterator[tuple[Callable[..., int], int, list[int]]]:
    """Give out by partition what is to be decided, with the act for it; of dead letters what is left, and none new."""
    for partition, held in groupby(sorted(stopped, key=_PARTITION), _PARTITION):
        places = [each.place for each in held]
        for first in range(0, len(places), size):
            yield dead_letters.decide_held, partition, places[first : first + size]
    for first in range(0, len(dead), size):
        some = replace(wanted, ids=dead[first : first + size])
        letters = sorted(dead_letters.list_dead(connection, schema, some, limit=size), key=_PARTITION)
        for partition, numbers in groupby(letters, _PARTITION):
            yield dead_letters.decide_dead, partition, [each.id for each in numbers]


def _patiently(act: Callable[[], int]) -> int:
    """Do it again while the owner is in the middle of a batch: it is waited for two seconds each time."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            return act()
        except TransientError as err:
            # A connection that is lost stays lost, and answers at once.
            if err.reason is not Reason.STATEMENT_FAILED or time.monotonic() > deadline:
                raise


def _state(held: HeldView) -> str:
    if held.is_behind:
        return "Behind"
    return "Stopped" if held.next_attempt_at is None else "Failing" if held.attempts else "Waiting"


def _held_record(held: HeldView) -> Record:
    short = None if held.error is None else _short(held.error)
    return record_of(held, but=("place", "is_behind")) | {"state": _state(held), "shortError": short}


def _for_people(context: Context, records: list[Record]) -> list[Record]:
    """Cut long keys and ids in a table, where each row is as wide as the widest; JSON has them whole."""
    if context.console.is_json:
        return records
    return [each | {name: each[name] and _cut(each[name]) for name in ("key", "messageId")} for each in records]


def _short(text: str) -> str:
    return _cut(" ".join(text.split()))


def _cut(text: str) -> str:
    return text if len(text) <= _SHORT else f"{text[: _SHORT - 1]}…"
