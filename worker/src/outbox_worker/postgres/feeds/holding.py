"""Held messages and dead letters: held until they are tried again, dead until a person decides.

All of it is decided in SQL, under the partition's lease. Nothing here is called for a batch while nothing is held,
delayed or failing. Statements over a range of the outbox get the reader's relation, so payloads stay in the database.
A message at which its processor stands is given up by a person (`outbox`), and found by the worker.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from psycopg import sql

from outbox_core.message import Batch, Delayed, Held, Message
from outbox_core.part import Places
from outbox_core.processor.outcomes import Review
from outbox_core.progress.checkpoint import Checkpoint, parse_checkpoint
from outbox_core.report import BlockedKey, FailureSummary
from outbox_worker.postgres.call import call, call_row, fetch_one, fetch_row, fetch_rows, in_schema, load
from outbox_worker.postgres.errors import translated
from outbox_worker.postgres.progress.checkpoints import leased, pair_parameters
from outbox_worker.postgres.reading.payloads import shipped_columns
from outbox_worker.postgres.reading.read_range import pair_literals
from outbox_worker.postgres.reading.table import within_python

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from outbox_core.processor.failing import Failure
    from outbox_core.processor.outcomes import HeldLease
    from outbox_worker.postgres.connection import Connection
    from outbox_worker.postgres.key import ProcessorKey
    from outbox_worker.postgres.reading.payloads import PayloadBound

COUNT_CAP: Final = 10_000
"""Held messages and dead letters are counted exactly up to here."""
NOT_OURS: Final = "the lease went before what became of a held message was written down"
KEYS_NAMED: Final = 5
"""Blocked keys that a report names."""


@dataclass(frozen=True, slots=True)
class Taken:
    """Held messages to be tried now; without any: when, in seconds (None: not by itself), and whether keys are blocked.

    `owned` False: the lease is another's, and nothing was looked at.
    """

    owned: bool
    next_in: float | None
    blocking: bool
    held: tuple[Held, ...] = ()
    messages: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True)
class FoundMessage:
    """A message at which a processor stands, as a person knows it."""

    place: Checkpoint
    message_id: str
    message_type: str | None
    key: str | None


@dataclass(frozen=True, slots=True)
class Seen:
    """What the heartbeat saw of one partition: a held message is due; something blocks later messages."""

    due: bool
    blocking: bool


def carry(connection: Connection, rows: sql.Composable) -> sql.Composed:
    """Read a range in the source's database; return a SELECT of the same rows for the checkpoint's database.

    As the batch itself, they travel as one JSON value.
    """
    (carried,) = fetch_one(connection, load("carry_rows").format(rows=rows))
    return load("carried_relation").format(rows=sql.Literal(carried))


def survey(
    connection: Connection, key: ProcessorKey, rows: sql.Composable, *, with_places: bool
) -> tuple[Places, tuple[Checkpoint, ...]]:
    """Return where the messages of a range are that are to be handled now, and those that are not, both in order.

    The first are left out without `with_places`: the search for messages that fail needs them, nothing else.
    """
    statement = load("survey_range").format(rows=rows, all=sql.Literal(with_places), **_identified(key))
    *found, ids, positions = fetch_one(connection, statement)
    out = zip(ids or (), positions or (), strict=True)
    return Places(*(each or () for each in found)), tuple(Checkpoint(int(t), position) for t, position in out)


def find_delayed(connection: Connection, rows: sql.Composable) -> tuple[Delayed, int] | None:
    """Return the first message of a range whose time has not come, and how many come before it."""
    row = fetch_row(connection, load("find_delayed").format(rows=rows))
    if row is None:
        return None
    t, position, message_id, seconds, before = row
    return Delayed(Checkpoint(int(t), position), message_id, seconds), before


def cut_at_delayed(connection: Connection, batch: Batch, rows: sql.Composable, read: Callable[[int], Batch]) -> Batch:
    """Return the part of the batch before its first message whose time has not come; the same batch without one.

    `read` reads at most so many messages from where the batch began.
    """
    found = find_delayed(connection, rows)
    if found is None:
        return batch
    waits_for, before = found
    if before:
        return replace(read(before), full=False, waits_for=waits_for)
    return Batch(batch.after, batch.after, (), 0, full=False, partition=batch.partition, waits_for=waits_for)


def list_range(connection: Connection, rows: sql.Composable, excluded: Iterable[Checkpoint]) -> Places:
    """Return where the messages of a range are, with their keys, in order, those `excluded` left out."""
    row = fetch_one(connection, load("list_range").format(rows=rows, **_pairs(excluded)))
    return Places(*(each or () for each in row))


def hold(
    connection: Connection,
    key: ProcessorKey,
    lease: HeldLease,
    rows: sql.Composable,
    *,
    excluded: Iterable[Checkpoint],
    failed: Sequence[Failure],
) -> str | None:
    """Keep, in the open transaction, `excluded` and those that failed; `rows` has them.

    Returns:
        None: they are kept. Else why not; roll back, and load again what is stored: passing them would lose them.

    """
    wanted = frozenset((*excluded, *(each.checkpoint for each in failed)))
    statement = load("hold_messages").format(
        rows=rows,
        epoch=sql.Literal(lease.epoch),
        token=sql.Literal(str(lease.token)),
        decisions=sql.Literal(_decisions(failed)),
        **_pairs(wanted),
        **_identified(key),
    )
    kept, found = fetch_one(connection, statement)
    if kept < 0:
        return NOT_OURS
    missing = len(wanted) - found
    return f"{missing} of {len(wanted)} messages that are to be held were not found in the outbox" if missing else None


def take_due(
    connection: Connection,
    key: ProcessorKey,
    lease: HeldLease,
    *,
    limit: int,
    payloads: PayloadBound | None = None,
) -> Taken:
    """Return the held messages to be tried now, at most `limit`; one that processes died of comes alone.

    `payloads`: they come with their payloads, and fewer where those have too many bytes.
    """
    if payloads is None:
        return _take_due(connection, key, lease, limit, None)

    def find(pairs: Sequence[Checkpoint]) -> tuple[sql.Composable, sql.Composable]:
        return load("held_payloads").format(**_pairs(pairs), **_identified(key)), sql.SQL("place")

    return payloads.read(connection, limit, lambda most: _take_due(connection, key, lease, most, payloads.small), find)


def _take_due(connection: Connection, key: ProcessorKey, lease: HeldLease, limit: int, small: int | None) -> Taken:
    payload = small is not None
    parameters = leased(key, lease) | {"limit": limit, "payload": payload}
    statement = load("take_due_messages").format(
        schema=sql.Identifier(key.schema), scheduled=within_python(sql.Identifier("scheduled")),
        payload=shipped_columns("due", small),
    )  # fmt: skip
    rows = fetch_rows(connection, statement, parameters)
    owned, next_in, blocking = rows[0][:3]
    if not owned or rows[0][3] is None:
        return Taken(bool(owned), next_in, bool(blocking))
    held = tuple(Held(Checkpoint(int(row[3]), row[4]), row[5], row[6], row[13], row[14]) for row in rows)
    messages = tuple(Message(int(row[3]), row[4], *row[6:13]) for row in rows) if payload else ()
    return Taken(owned=True, next_in=0.0, blocking=True, held=held, messages=messages)


def settle(connection: Connection, key: ProcessorKey, lease: HeldLease, held: Iterable[Held]) -> int:
    """Say, in the transaction of the effects, that these are handled; return how many were held, -1: not the owner."""
    pairs = [each.checkpoint for each in held]
    settled: int = call(
        connection, key.schema, "settle_held_messages", **leased(key, lease),
        transaction_ids=[str(pair.transaction_id) for pair in pairs], positions=[pair.position for pair in pairs],
    )  # fmt: skip
    return settled


def fail(connection: Connection, key: ProcessorKey, lease: HeldLease, failed: Sequence[Failure]) -> int:
    """Write down what becomes of held messages that failed again; return how many are still held, -1: not the owner."""
    held: int = call(connection, key.schema, "fail_held_messages", **leased(key, lease), decisions=_decisions(failed))
    return held


def review(
    connection: Connection, key: ProcessorKey, lease: HeldLease, *, generation: int, forgive: bool
) -> Review | None:
    """Look at what former owners left, and let what was given up be tried again; None: not the owner."""
    owned, any_held, blocking, *counts = call_row(
        connection, key.schema, "review_partition", **leased(key, lease), generation=generation, forgive=forgive
    )
    return Review(any_held, blocking, *(count or 0 for count in counts)) if owned else None


def find_last(connection: Connection, rows: sql.Composable) -> Checkpoint | None:
    """Return the place of a range's last message: its own, which no snapshot range or counter changes."""
    row = fetch_row(connection, load("find_last").format(rows=rows))
    return None if row is None else Checkpoint(int(row[0]), row[1])


def find_message(connection: Connection, rows: sql.Composable) -> FoundMessage | None:
    """Return the first message of a range; None: its row is gone."""
    row = fetch_row(connection, load("name_message").format(rows=rows))
    return None if row is None else FoundMessage(Checkpoint(int(row[0]), row[1]), *row[2:])


def give_up(connection: Connection, key: ProcessorKey, place: Checkpoint, *, reason: str, decided_by: str) -> None:
    """Write down that the processor goes on without the message at this place, should it stand there."""
    parameters = key.names | pair_parameters(at=place) | {"reason": reason, "decided_by": decided_by}
    with translated():
        connection.execute(in_schema("record_giving_up", key.schema), parameters)


def is_given_up(connection: Connection, key: ProcessorKey, place: str) -> bool:
    """Say whether a person gave the message at this place up, since the processor was last rewound."""
    parameters = key.names | pair_parameters(at=parse_checkpoint(place))
    return bool(fetch_one(connection, in_schema("find_giving_up", key.schema), parameters)[0])


def mark_in_flight(
    connection: Connection,
    key: ProcessorKey,
    lease: HeldLease,
    pair: Checkpoint,
    *,
    in_flight: int,
    generation: int,
) -> int:
    """Write down that so many messages are tried now, the last of them at this pair.

    Returns how many processes that one killed when it was tried alone, -1: not the owner.
    """
    killed: int = call(
        connection, key.schema, "begin_in_flight", **leased(key, lease), transaction_id=str(pair.transaction_id),
        position=pair.position, in_flight=in_flight, generation=generation,
    )  # fmt: skip
    return killed


def clear_in_flight(connection: Connection, key: ProcessorKey, lease: HeldLease) -> None:
    """Write down that the attempt was answered, with or without success: this process did not die of it."""
    call(connection, key.schema, "end_in_flight", **leased(key, lease))


def held_relation(key: ProcessorKey, ids: sql.Composable, positions: sql.Composable) -> sql.Composed:
    """Return the SELECT of the held messages with these pairs under the names of the relation `batch`."""
    return load("held_relation").format(transaction_ids=ids, positions=positions, **_identified(key))


def without_excluded(rows: sql.Composed, excluded: Iterable[Checkpoint]) -> sql.Composed:
    """Return the SELECT of a range without its excluded messages."""
    return load("without_excluded").format(rows=rows, **_pairs(excluded))


def observe(connection: Connection, key: ProcessorKey) -> tuple[FailureSummary, Mapping[int, Seen]]:
    """Look at all partitions of the processor, for people and for runners whose messages a person redrove."""
    names = {"processor_id": key.processor_id}
    held, dead = fetch_one(connection, in_schema("count_failures", key.schema), names | {"cap": COUNT_CAP})
    blocked = in_schema("list_blocked_keys", key.schema)
    keys = fetch_rows(connection, blocked, names | {"limit": KEYS_NAMED}) if held or dead else []
    seen = fetch_rows(connection, in_schema("observe_held", key.schema), names)
    summary = FailureSummary(
        held=min(held, COUNT_CAP),
        dead_letters=min(dead, COUNT_CAP),
        at_least=max(held, dead) > COUNT_CAP,
        blocked_keys=[
            BlockedKey(
                key=name, partition=partition, message_id=message_id, attempts=attempts, error_class=error_class,
                next_attempt_at=at, dead_letter=is_dead,
            )
            for name, partition, message_id, attempts, error_class, at, is_dead in keys
        ],
    )  # fmt: skip
    return summary, {partition: Seen(due, blocking) for partition, due, blocking in seen}


def _decisions(failed: Iterable[Failure]) -> str:
    return json.dumps(
        [
            {
                "t": str(each.checkpoint.transaction_id), "p": each.checkpoint.position,
                "action": each.decision.action.value, "attempts": each.decision.attempts,
                "class": each.decision.error_class, "error": each.decision.error, "wait": each.decision.wait,
                "blocks": each.decision.blocks,
            }
            for each in failed
        ]
    )  # fmt: skip


def _identified(key: ProcessorKey) -> dict[str, sql.Composable]:
    return {
        "schema": sql.Identifier(key.schema),
        "processor_id": sql.Literal(key.processor_id),
        "partition": sql.Literal(key.partition),
    }


def _pairs(pairs: Iterable[Checkpoint]) -> dict[str, sql.Composable]:
    ids, positions = pair_literals(pairs)
    return {"transaction_ids": ids, "positions": positions}
