"""Refusals as the database keeps them, and what people decided about them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from outbox_core.config import ResolutionAction
from outbox_core.errors import ConfigurationError
from outbox_core.processor.outcomes import OpenConflict
from outbox_core.progress.checkpoint import Checkpoint, StoreAnswer, parse_checkpoint
from outbox_core.report import Conflict, ConflictSummary, ResourceRef
from outbox_worker.postgres.call import call, fetch_dicts, fetch_rows, in_schema
from outbox_worker.postgres.progress.checkpoints import build_pair, pair_parameters

if TYPE_CHECKING:
    from outbox_core.config import Resolution
    from outbox_worker.postgres.connection import Connection
    from outbox_worker.postgres.key import ProcessorKey


class ResolveAnswer(IntEnum):
    """What `resolve_conflict` answers."""

    ALREADY = 0
    """Resolved before: nothing changed."""
    DONE = 1
    """Carried out and recorded."""
    PAIR_DIFFERS = 2
    """The stored pair is not the one that the person saw."""
    UNKNOWN = 3
    """No such conflict, or one that waits for no decision."""
    OWNER_LIVE = 4
    """An owner is live: stop it first."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """What a worker was told, and by which pairs.

    Attributes:
        code: the answer; everything but STORED is a refusal.
        expected: the pair that the worker had read.
        stored: the pair that is there, read again after the rollback; None where there is no row.
        new: the pair that it wanted to store.
        epoch: under which it asked.
        pod: who it is.
        claim_uid: for which resource.
        needs_person: the conflict is open: no lease on the partition is granted until a person decides.

    """

    code: StoreAnswer
    expected: Checkpoint | None
    stored: Checkpoint | None
    new: Checkpoint | None
    epoch: int | None
    pod: str
    claim_uid: str | None
    needs_person: bool


def record_refusal(connection: Connection, key: ProcessorKey, refusal: Refusal) -> int:
    """Record a refusal and return its number; in a transaction of its own, because the refused one rolls back."""
    number: int | None = call(
        connection, key.schema, "record_refusal", **key.names, code=int(refusal.code),
        **pair_parameters(expected=refusal.expected, stored=refusal.stored, new=refusal.new), epoch=refusal.epoch,
        pod=refusal.pod, claim_uid=refusal.claim_uid,
        needs_person=refusal.needs_person,
    )  # fmt: skip
    return number or 0


def summary(connection: Connection, key: ProcessorKey) -> ConflictSummary:
    """Read the conflicts of the processor, over all pods, partitions and restarts."""
    parameters = {"processor_id": key.processor_id}
    counts = fetch_rows(connection, in_schema("count_conflicts", key.schema), parameters)
    unowned_calls = call(connection, key.schema, "unowned_calls", processor_id=key.processor_id)
    rows = fetch_dicts(connection, in_schema("fetch_conflicts", key.schema), parameters)
    waiting = [row for row in rows if row["needs_person"] and row["resolved_at"] is None]
    return ConflictSummary(
        count=sum(count for _, count in counts),
        by_code={str(code): count for code, count in counts},
        last=_conflict(rows[-1]) if rows else None,
        open=_conflict(waiting[-1]) if waiting else None,
        unowned_calls=unowned_calls,
    )


def find_open(connection: Connection, key: ProcessorKey) -> OpenConflict | None:
    """Return the conflict of this partition that waits for a person."""
    rows = fetch_dicts(connection, in_schema("fetch_open_conflict", key.schema), key.names)
    if not rows:
        return None
    row = rows[0]
    expected = build_pair(row["expected_transaction_id"], row["expected_position"])
    stored = build_pair(row["stored_transaction_id"], row["stored_position"])
    return OpenConflict(row["id"], row["code"], expected, stored)


def resolve(connection: Connection, schema: str, resolution: Resolution) -> ResolveAnswer:
    """Carry out a person's decision; before a lease is acquired, and in one transaction.

    Raises:
        ConfigurationError: the decision names no pair.

    """
    if resolution.pair is None:
        raise ConfigurationError(
            f"the decision about conflict {resolution.conflict_id} names no checkpoint: "
            "write it as <conflict id>=<transaction_id>:<position>"
        )
    pair = parse_checkpoint(resolution.pair)
    answer = call(
        connection, schema, "resolve_conflict", conflict_id=resolution.conflict_id,
        action=ResolutionAction(resolution.action).value, transaction_id=str(pair.transaction_id),
        position=pair.position, decided_by=resolution.decided_by,
    )  # fmt: skip
    return ResolveAnswer(answer)


def rewind(connection: Connection, key: ProcessorKey, pair: Checkpoint, *, reason: str, decided_by: str) -> bool:
    """Put the checkpoint where a person says, back or forward, and record it. False: an owner is live."""
    snapshot_range = pair.snapshot_range
    if snapshot_range is None:
        answer = call(
            connection, key.schema, "rewind_processor_checkpoint", **key.names, transaction_id=str(pair.transaction_id),
            position=pair.position, reason=reason, decided_by=decided_by,
        )  # fmt: skip
    else:
        answer = call(
            connection, key.schema, "rewind_processor_range", **key.names, lower=snapshot_range.lower,
            upper=snapshot_range.upper, position=snapshot_range.position, reason=reason, decided_by=decided_by,
        )  # fmt: skip
    return bool(answer == StoreAnswer.STORED)


def fetch_moved_from(connection: Connection, key: ProcessorKey) -> Checkpoint | None:
    """Return the pair that the last rewind of this partition found stored; None: no row.

    In the transaction of a rewind that is the one of its own: no other decision about the partition is made meanwhile.
    """
    rows = fetch_rows(connection, in_schema("fetch_moved_from", key.schema), key.names)
    return build_pair(*rows[0]) if rows else None


def _conflict(row: dict[str, Any]) -> Conflict:
    holder = {name: row[f"holder_{name}"] for name in ("cluster", "namespace", "name", "uid")}
    same = ("id", "code", "partition", "epoch", "pod", "holder_pod")
    return Conflict(
        expected=_pair(row, "expected"),
        stored=_pair(row, "stored"),
        new=_pair(row, "new"),
        time=row["recorded_at"],
        holder=None if holder["uid"] is None else ResourceRef(**holder),
        needs_person=row["needs_person"] and row["resolved_at"] is None,
        **{name: row[name] for name in same},
    )


def _pair(row: dict[str, Any], name: str) -> str | None:
    transaction_id = row[f"{name}_transaction_id"]
    return None if transaction_id is None else f"{transaction_id}:{row[f'{name}_position']}"
