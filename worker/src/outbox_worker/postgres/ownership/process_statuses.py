"""What a processor's processes say of themselves in the database, for `outbox status`.

Written with the heartbeat, after it, and once more when a process ends. Messages are those of the worker's
report: never a payload, never a secret.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from outbox_core.processor.failing import storable_text
from outbox_worker.postgres.call import call, fetch_rows, in_schema

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime, timedelta
    from uuid import UUID

    from outbox_core.report import Reason, WorkerState
    from outbox_worker.postgres.connection import Connection
    from outbox_worker.postgres.key import ProcessorKey


@dataclass(frozen=True, slots=True)
class PartitionState:
    """What a process says of one partition."""

    partition: int
    state: WorkerState
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class ProcessStatusRow:
    """What a process says of its partitions, as JSON, and of which resource it is."""

    claim_uid: str
    pod: str
    statuses: str


@dataclass(frozen=True, slots=True)
class StoredStatus:
    """What a process last said of one partition, as the database has it.

    Attributes:
        state: one of `WorkerState`, as the version that stored it calls it.
        age_seconds: since it was stored, by the database's clock.
        is_fresh: the process stored something within its lease and has not ended.
        ended: it was stored at the process's regular end.

    """

    processor_id: str
    partition: int
    token: UUID
    pod: str
    state: str
    reason: str
    message: str
    stored_at: datetime
    age_seconds: float
    is_fresh: bool
    ended: bool


def format_statuses(statuses: Iterable[PartitionState]) -> str:
    """Write them as the JSON that the database keeps. A handler's error may hold what jsonb refuses."""
    return json.dumps([asdict(each) | {"message": storable_text(each.message)} for each in statuses])


def store_status(
    connection: Connection,
    key: ProcessorKey,
    row: ProcessStatusRow,
    *,
    token: UUID,
    lease: timedelta,
    ended: bool = False,
) -> None:
    """Store it in place of what the process said before; `ended`: the process ends."""
    call(
        connection, key.schema, "store_process_status", processor_id=key.processor_id, claim_uid=row.claim_uid,
        pod=row.pod, token=token, statuses=row.statuses, lease=lease, ended=ended,
    )  # fmt: skip


def list_statuses(connection: Connection, schema: str, processor_id: str | None = None) -> list[StoredStatus]:
    """Read what was last said, the latest first."""
    rows = fetch_rows(connection, in_schema("list_statuses", schema), {"processor_id": processor_id})
    return [
        StoredStatus(
            found, each["partition"], token, pod, each["state"], each["reason"], each["message"], stored_at, age,
            fresh, ended,
        )
        for found, token, pod, statuses, stored_at, age, fresh, ended in rows
        for each in statuses
    ]  # fmt: skip
