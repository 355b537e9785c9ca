"""Mode Competing in the database: join, take a batch, complete it, give it back. The rules are in `sql/functions/`.

Each call is a fixed number of statements, however many messages a batch has.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import sql

from outbox_core.errors import ConfigurationError, PermanentError
from outbox_core.processor.claimed_batch import ClaimedBatch
from outbox_core.processor.failing import shown_error
from outbox_core.processor.outcomes import NothingTaken
from outbox_core.processor.turns import Turn
from outbox_core.progress.checkpoint import BEGINNING, Checkpoint
from outbox_core.progress.snapshot import Snapshot
from outbox_core.progress.snapshot_range import SnapshotRange
from outbox_core.report import Lag, Reason, Unfinished
from outbox_sql.guide import quote
from outbox_worker.postgres.call import call, call_row, fetch_one, fetch_row, fetch_rows, in_schema, load
from outbox_worker.postgres.errors import translate
from outbox_worker.postgres.feeds.next_messages import NextMessages, dispatch_positions_of
from outbox_worker.postgres.identity import crashed
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.ownership.leases import end_stuck_attempts
from outbox_worker.postgres.progress.checkpoints import pair_parameters
from outbox_worker.postgres.progress.starts import start_pair
from outbox_worker.postgres.reading.dispatch_reader import DispatchReader
from outbox_worker.postgres.reading.messages import LAG_CAP
from outbox_worker.postgres.reading.read_range import ReadRange
from outbox_worker.postgres.transactions.transaction import roll_back

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import timedelta

    from outbox_core.processor.claimed_batch import Refusal
    from outbox_core.spec import Competing, Source, StartFrom
    from outbox_worker.postgres.admin.overview import ProcessorView
    from outbox_worker.postgres.connection import Connection
    from outbox_worker.postgres.feeds.next_messages import Found
    from outbox_worker.postgres.ownership.leases import Stuck
    from outbox_worker.postgres.reading.payloads import PayloadBound

SEGMENT_BYTES: Final = 32 * 1024 * 1024
"""A queue's segment that is larger is left for the next one, to be emptied."""
PROMOTED: Final = 1000
"""Delayed messages of a queue that one look makes available. Looks are two a second: a batch's size is no bound."""


@dataclass(frozen=True, slots=True)
class Consumer:
    """One process that takes batches: `owner` is pod UID and nonce, `pod` is for people."""

    owner: str
    pod: str
    claim_uid: str
    lease: timedelta


def ensure_queue(connection: Connection, schema: str, queue: str, *, create: bool) -> None:
    """See to it that the queue's table is there.

    Raises:
        ConfigurationError: it is not, and may not be made.

    """
    if fetch_row(connection, in_schema("fetch_queue", schema), {"queue": queue}) is not None:
        return
    if not create:
        raise ConfigurationError(
            f"there is no queue {queue!r}: run SELECT {quote(schema)}.create_queue('{queue}') as the schema's owner, "
            "or set source.schema: Manage",
            reason=Reason.SCHEMA_MISSING,
        )
    call(connection, schema, "create_queue", queue=queue)


def is_begun(connection: Connection, key: ProcessorKey) -> bool:
    """Say whether the processor's messages are handed out to consumers."""
    names = {"processor_id": key.processor_id}
    return fetch_row(connection, in_schema("fetch_competing", key.schema), names) is not None


def join(
    connection: Connection,
    key: ProcessorKey,
    consumer: Consumer,
    source: Source,
    competing: Competing,
    start_from: StartFrom,
) -> bool | None:
    """Join the processor; true: this call wrote down where it starts; None: the claim is not this resource's.

    Raises:
        ConfigurationError: it is over something else, or has checkpoints of another mode.

    """
    known = is_begun(connection, key)
    # A queue is handled from its beginning: what is in it is there to be handled.
    start = BEGINNING if known or competing.queue else start_pair(connection, source, start_from)
    horizon = max(1, start.transaction_id)
    try:
        owned, queue, begun = call_row(
            connection, key.schema, "begin_competing", processor_id=key.processor_id, claim_uid=consumer.claim_uid,
            queue=competing.queue, lower=str(Snapshot(horizon, horizon)), **pair_parameters(after=start),
        )  # fmt: skip
    except PermanentError as err:
        if not isinstance(err.__cause__, psycopg.errors.ObjectNotInPrerequisiteState):
            raise
        raise ConfigurationError(
            f"processor {key.processor_id!r} has checkpoints of another mode here: use another processorId",
            reason=Reason.PARTITIONS_DIFFER,
        ) from err
    if not owned:
        return None
    if queue != competing.queue:
        if queue is None and not known:
            raise ConfigurationError(
                f"queue {competing.queue!r} is another processor's: use its processorId, or another queue",
                reason=Reason.PARTITIONS_DIFFER,
            )
        there = "the outbox" if queue is None else f"queue {queue!r}"
        raise ConfigurationError(
            f"processor {key.processor_id!r} works over {there} here: use another processorId",
            reason=Reason.PARTITIONS_DIFFER,
        )
    return bool(begun)


class BatchTaker:
    """Takes batches of one processor for one consumer."""

    def __init__(
        self, key: ProcessorKey, consumer: Consumer, source: Source, competing: Competing, batch_size: int,
        payloads: PayloadBound | None = None,
    ) -> None:  # fmt: skip
        """Keep the settings; `payloads` bounds the bytes that are read at once, None: nothing does."""
        self.reader = DispatchReader(source, competing, key.processor_id, payloads)
        self._key = key
        self._consumer = consumer
        self._competing = competing
        self._limit = batch_size
        self.server_run: str | None = None
        """Of the server, in which this consumer took what it has in hand; None: not asked yet."""
        self.is_alone = True
        """No other consumer takes what this one reads ahead."""
        self._next = NextMessages(self.reader, competing.ageing)
        self._names = {"processor_id": key.processor_id, "claim_uid": consumer.claim_uid, "owner": consumer.owner,
                       "pod": consumer.pod, "lease": consumer.lease}  # fmt: skip
        named = {"schema": sql.Identifier(key.schema), "processor_id": sql.Literal(key.processor_id)}
        self._lock_statement = load("lock_dispatch_position").format(**named, claim_uid=sql.Literal(consumer.claim_uid))
        delayed: sql.Composable = sql.SQL("NULL::timestamptz")
        if self.reader.is_queue:
            delayed = load("first_delayed").format(table=self.reader.table.identifier)
        self._next_due_statement = load("fetch_next_due").format(**named, delayed=delayed)

    def take_left(self, connection: Connection, turn: Turn, limit: int | None = None) -> ClaimedBatch | None:
        """Take what is there already: a batch handed back or lapsed, or at most `limit` messages that are due.

        Turn.AGAIN: of messages that failed before; those of a queue are handed out with its others, once promoted.
        """
        again = turn is Turn.AGAIN
        most = self._most(limit)
        if self._competing.queue is not None and not again:
            self.promote(connection, PROMOTED, failed=False)
        row = fetch_row(
            connection, in_schema("take_waiting", self._key.schema), self._names | {"limit": most, "failed": again}
        )
        return None if row is None else _claimed(row, again=again)

    def promote(self, connection: Connection, limit: int, *, failed: bool) -> int:
        """Let at most `limit` messages of the queue whose time has come be handed out; return how many.

        `failed`: of those that failed before; else of the others.
        """
        promoted: int = call(
            connection, self._key.schema, "promote_waiting", queue=self._competing.queue, limit=limit, failed=failed
        )
        return promoted

    def _most(self, limit: int | None) -> int:
        return self._limit if limit is None else min(limit, self._limit)

    def claim_next(self, connection: Connection, limit: int | None = None) -> ClaimedBatch | NothingTaken:
        """Take the next batch from the dispatch position, under its lock.

        At most `limit` messages, or as the resource says.
        """
        most = self._most(limit)
        self.reader.take_ahead(connection)
        try:
            rows = connection.execute(self._lock_statement).set_result(-1).fetchall()
            dispatch_positions, now = dispatch_positions_of(rows)
            if not dispatch_positions:
                return NothingTaken(contended=True)
            found = self._next.find(connection, dispatch_positions, now, most)
            return NothingTaken() if found is None else self._claim(connection, found)
        except psycopg.Error as err:
            raise translate(err) from err
        finally:
            roll_back(connection)

    def is_any_left(self, connection: Connection) -> bool:
        """Say whether `claim_next` may find something, or why not. It takes no lock: one is written to the log."""
        rows = fetch_rows(connection, in_schema("fetch_dispatch_positions", self._key.schema), self._names)
        return not rows or self._next.find(connection, *dispatch_positions_of(rows), self._limit) is not None

    def find_next_due(self, connection: Connection) -> float:
        """Return the seconds until what waits may be handled, if nothing is written meanwhile; inf: nothing waits."""
        (seconds,) = fetch_one(connection, self._next_due_statement)
        return inf if seconds is None else float(seconds)

    def _claim(self, connection: Connection, found: Found) -> ClaimedBatch | NothingTaken:
        place, wanted, examined = found.dispatch_position, found.wanted, found.examined
        self._next.note_handed_out(found)
        values = self._names | pair_parameters(after=place.after, upto=examined.upto) | {
            "priority": place.priority, "dispatch_position": place.id, "lower": place.snapshot_range.lower,
            "upper": place.snapshot_range.upper, "whole": found.whole, "messages": examined.matched,
            "keys": examined.keys,
        }  # fmt: skip
        statement = load("claim_next").format(
            schema=sql.Identifier(self._key.schema),
            delayed=self.reader.copies(wanted, examined.upto, examined.delayed) if examined.delayed else sql.NULL,
            **{name: sql.Literal(value) for name, value in values.items()},
        )
        (number,) = fetch_one(connection, statement)
        if number is None:
            return NothingTaken(moved=True)
        if self.is_alone and self.server_run is not None and wanted.limit == self._limit and not found.whole:
            self.reader.read_ahead(wanted._replace(after=examined.upto), self.server_run)
        return ClaimedBatch(
            number, place.priority, 1, place.snapshot_range, (), place.after, examined.upto, examined.matched,
            excluded=examined.delayed,
        )  # fmt: skip

    def complete(self, connection: Connection, claimed: ClaimedBatch, upto: Checkpoint, messages: int) -> bool:
        """Say that so many messages are done, in the connection's open transaction or by itself; false: it is lost."""
        return self._settle(connection, "complete_batch", claimed, upto, messages)

    def defer(
        self,
        connection: Connection,
        claimed: ClaimedBatch,
        upto: Checkpoint,
        messages: int,
        failed: Iterable[Refusal],
    ) -> bool:
        """Say that so many messages are behind, and let those that failed leave the batch; false: it is lost."""
        rows = json.dumps([_refusal_row(each) for each in failed], ensure_ascii=False)
        return self._settle(connection, "defer_messages", claimed, upto, messages, failed=rows)

    def _settle(
        self, connection: Connection, statement: str, claimed: ClaimedBatch, upto: Checkpoint,
        messages: int, **more: str,
    ) -> bool:  # fmt: skip
        """Say whether the batch was still this consumer's.

        Raises:
            TransientError: the server recovered from a crash since it was taken.

        """
        parameters = self._names | more | pair_parameters(upto=upto) | {
            "batch": claimed.id, "attempt": claimed.attempt, "messages": messages, "server_run": self.server_run,
        }  # fmt: skip
        (settled,) = fetch_one(connection, in_schema(statement, self._key.schema), parameters)
        if settled is None:
            raise crashed()
        return bool(settled)

    def renew(self, connection: Connection, claimed: ClaimedBatch) -> int:
        """Heartbeat: whether this attempt of the batch is still this consumer's, 1 or 0."""
        renewed: int = call(
            connection, self._key.schema, "renew_batches", processor_id=self._key.processor_id,
            owner=self._consumer.owner, lease=self._consumer.lease, batch=claimed.id, attempt=claimed.attempt,
        )  # fmt: skip
        return renewed

    def end_stuck_attempts(self, connection: Connection, claimed: ClaimedBatch) -> Stuck:
        """End what former attempts of the batch left open while the server waits for their process.

        Only before a transaction of this attempt is begun: its session would be taken for one of theirs.
        """
        return end_stuck_attempts(
            connection, self._key, batch=claimed.id, owner=self._consumer.owner, attempt=claimed.attempt
        )

    def hand_back(self, connection: Connection) -> int:
        """Give everything back that is in this consumer's name."""
        returned: int = call(
            connection, self._key.schema, "hand_back_batches", processor_id=self._key.processor_id,
            owner=self._consumer.owner,
        )  # fmt: skip
        return returned


def advance_checkpoint(connection: Connection, key: ProcessorKey) -> None:
    """Store how far everything is done."""
    call(connection, key.schema, "advance_competing_checkpoint", processor_id=key.processor_id)


def empty_tables(connection: Connection, key: ProcessorKey, competing: Competing) -> list[str]:
    """Empty tables that hold only dead rows; return their names. In no transaction: until its end they are locked."""
    parameters = {
        "processor_id": key.processor_id, "keep": competing.keep_done, "segment_bytes": SEGMENT_BYTES,
    }  # fmt: skip
    (emptied,) = fetch_one(connection, in_schema("rotate_competing", key.schema), parameters)
    return list(emptied)


def count_unfinished(connection: Connection, key: ProcessorKey, cap: int = LAG_CAP) -> Unfinished:
    """Count what is handed out and not done; of messages that wait for another attempt at most `cap`."""
    parameters = {"processor_id": key.processor_id, "cap": cap}
    row = fetch_one(connection, in_schema("count_unfinished", key.schema), parameters)
    names = ("messages", "batches", "free", "retries", "consumers", "oldest_seconds")
    return Unfinished(**dict(zip(names, row, strict=True)))


def with_consumers(connection: Connection, schema: str, view: ProcessorView) -> ProcessorView:
    """Say of a processor in mode Competing how many consumers are at work: it has no lease.

    One that has just begun has a batch before its first heartbeat makes it a member.
    """
    found = count_unfinished(connection, ProcessorKey(schema, view.processor_id))
    count = max(found.consumers, int(found.batches > found.free))
    return replace(view, live=count > 0, pod=f"{count} consumer{'' if count == 1 else 's'}")


def list_competing(connection: Connection, schema: str) -> dict[str, str | None]:
    """Return the queue of each processor in mode Competing, None: the outbox."""
    return dict(fetch_rows(connection, in_schema("list_competing", schema)))


def measure_lag(connection: Connection, key: ProcessorKey, reader: DispatchReader, cap: int = LAG_CAP) -> Lag:
    """Count what is not done: waiting, to be tried again (of each of the two at most about `cap`), or handed out."""
    rows = fetch_rows(connection, in_schema("fetch_dispatch_positions", key.schema), {"processor_id": key.processor_id})
    dispatch_positions, now = dispatch_positions_of(rows)
    unfinished = count_unfinished(connection, key, cap + 1)
    counts = [partial(reader.count_waiting, connection, cap + 1)] if reader.is_queue else []
    for each in dispatch_positions:
        parts = [ReadRange(each.after, limit=cap + 1, snapshot_range=each.snapshot_range, priority=each.priority)]
        if each.snapshot_range.upper != now:
            parts.append(
                ReadRange(
                    limit=cap + 1, snapshot_range=SnapshotRange(each.snapshot_range.upper, now), priority=each.priority
                )
            )
        counts += [partial(reader.count, connection, part) for part in parts]
    messages, looked_at, seconds = unfinished.messages + unfinished.retries, 0, unfinished.oldest_seconds
    for count in counts:
        if looked_at <= cap:
            matched, seen, age = count()
            messages, looked_at, seconds = messages + matched, looked_at + seen, max(seconds, age)
    return Lag(messages=messages, at_least=max(looked_at, unfinished.retries) > cap, seconds=max(0.0, seconds))


def _refusal_row(refusal: Refusal) -> dict[str, object]:
    message, error, decision = refusal.message, refusal.error, refusal.decision
    return {
        "t": str(message.transaction_id), "p": message.position, "action": decision.action.value,
        "wait": decision.wait, "attempts": decision.attempts, "id": message.message_id, "type": message.message_type,
        "publication": message.publication_id, "key": message.partition_key, "data": message.data,
        "metadata": message.metadata, "scheduled": None if message.scheduled is None else message.scheduled.isoformat(),
        "error_class": error.error_class, "error": shown_error(error),
    }  # fmt: skip


def _claimed(row: tuple[Any, ...], *, again: bool = False) -> ClaimedBatch:
    number, priority, attempt, lower, upper, after_t, after_p, upto_t, upto_p, count, chunk, crash_count, *rest = row
    ids, positions, attempts, excluded = rest
    listed = zip(ids or (), positions or (), attempts or (), strict=True)
    return ClaimedBatch(
        number, priority, attempt,
        SnapshotRange(lower, upper) if lower else None,
        tuple((Checkpoint(int(t), p), tries) for t, p, tries in listed),
        Checkpoint(int(after_t), after_p), Checkpoint(int(upto_t), upto_p), count, chunk, crash_count,
        tuple(excluded or ()), again,
    )  # fmt: skip
