"""Reads what the ledger compares: commit logs, the outbox, the processors' lines, and what people decided."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from psycopg import sql

from outbox_cli.try_out.ledger import Account, Message, Reasons, compare
from outbox_cli.try_out.screen import STALLED_AFTER
from outbox_cli.try_out.shop import read_commit_logs

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from outbox_cli.try_out.processors import Processor, Worker
    from outbox_worker.postgres.connection import Connection

_STORED: Final = "SELECT message_id, partition_key, transaction_id::text, position FROM outbox.messages"
_DECIDED: Final = """
SELECT from_transaction_id::text, from_position, to_transaction_id::text, to_position
FROM outbox.audit_log
WHERE processor_id = %(processor_id)s AND action IN ('Accept', 'Rewind') AND to_transaction_id IS NOT NULL
UNION ALL
SELECT to_transaction_id::text, to_position - 1, to_transaction_id::text, to_position
FROM outbox.audit_log
WHERE processor_id = %(processor_id)s AND action IN ('GiveUp', 'Skip', 'DropHeldMessage', 'DropDeadLetter')
"""
"""Where a checkpoint was moved by decision, as `skip-to` is recorded too; and each single message that was given up."""
_OPEN: Final = """
SELECT code, expected_transaction_id::text || ':' || expected_position,
       stored_transaction_id::text || ':' || stored_position
FROM outbox.processor_conflicts WHERE processor_id = %s AND needs_person AND resolved_at IS NULL ORDER BY id LIMIT 1
"""
_WAITS: Final = """
SELECT EXISTS (
    SELECT FROM outbox.messages m
    WHERE NOT EXISTS (SELECT FROM {} l WHERE l.message_id = m.message_id) AND NOT EXISTS (
        SELECT FROM ({}) AS d (from_id, from_position, to_id, to_position)
        WHERE (d.to_id <> '0' OR d.to_position = 0)
          AND (m.transaction_id, m.position) > (coalesce(d.from_id, '0')::xid8, coalesce(d.from_position, 0))
          AND (m.transaction_id, m.position) <= (d.to_id::xid8, d.to_position)))
"""
"""Whether a message waits that no decision passed over (`Reasons.skips`).

A checkpoint without pairs that was moved may have passed over anything, or nothing: each message is waited for.
"""


def is_all_handled(connection: Connection, workers: Sequence[Worker]) -> bool:
    """Say whether every processor that can still go on has a line of every message that no decision passed over."""
    return not any(
        _waits_for_one(connection, processor)
        for processor in _processors(workers)
        if _stopped(connection, processor) is None
    )


def _waits_for_one(connection: Connection, processor: Processor) -> bool:
    query = sql.SQL(_WAITS).format(_table(processor), sql.SQL(_DECIDED))
    row = connection.execute(query, {"processor_id": processor.processor_id}).fetchone()
    return row is not None and bool(row[0])


def count(connection: Connection, committed: Path, workers: Sequence[Worker]) -> list[Account]:
    """Compare, for each processor."""
    produced, undone = read_commit_logs(committed)
    known = {message.message_id for message in produced}
    for message_id, key, transaction_id, position in connection.execute(_STORED):
        if message_id not in known:
            produced.append(Message(message_id, key, (int(transaction_id), position), by_reader=True))
    accounts = []
    for processor in _processors(workers):
        query = sql.SQL("SELECT message_id FROM {} ORDER BY line").format(_table(processor))
        lines = (row[0] for row in connection.execute(query))
        stopped = _stopped(connection, processor) or _held_back(processor, workers)
        reasons = Reasons(_moves(connection, processor), stopped)
        accounts.append(
            compare(processor.processor_id, produced, lines, order=processor.order, undone=undone, reasons=reasons)
        )
    return accounts


def _processors(workers: Sequence[Worker]) -> list[Processor]:
    return list({worker.processor.processor_id: worker.processor for worker in workers}.values())


def _table(processor: Processor) -> sql.Identifier:
    return sql.Identifier(*processor.lines.split("."))


def _moves(connection: Connection, processor: Processor) -> Any:
    moves = []
    for from_id, from_position, to_id, to_position in connection.execute(
        _DECIDED, {"processor_id": processor.processor_id}
    ):
        start = None if from_id is None else (int(from_id), int(from_position))
        # A checkpoint of the cursor Snapshot counts snapshot ranges: its transaction id is 0.
        moves.append(None if to_id == "0" and to_position else (start, (int(to_id), int(to_position))))
    return tuple(moves)


def _held_back(processor: Processor, workers: Sequence[Worker]) -> str | None:
    """Name the transaction that a processor must wait for, by its workers' last reports."""
    for worker in workers:
        if worker.processor is processor and worker.report:
            mark = worker.report.get("highWaterMark") or {}
            if processor.waits and mark.get("holder") and mark["ageSeconds"] >= STALLED_AFTER:
                return f"the high-water mark is held by {mark['holder']}"
    return None


def _stopped(connection: Connection, processor: Processor) -> str | None:
    row = connection.execute(_OPEN, [processor.processor_id]).fetchone()
    if row is None:
        return None
    code, expected, stored = row
    return f"code {code}: its checkpoint was {expected}, and {stored or 'nothing'} of another writer is stored now"
