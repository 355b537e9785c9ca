"""What a processor's processes say of themselves in the database, for `outbox status`.

Written with the heartbeat, after it, and once more when a process ends. Messages are those of the worker's
report: never a payload, never a secret.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from outbox_core.processor.failing import storable_text
from outbox_worker.postgres.call import call, fetch_rows
from outbox_worker.postgres.queries import in_schema

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime, timedelta
    from uuid import UUID

    from outbox_core.report import Reason, WorkerState
    from outbox_worker.postgres.connection import Connection
    from outbox_worker.postgres.key import ProcessorKey


@dataclass(frozen=True, slots=True)
class Word:
    """What a process says of one partition."""

    partition: int
    state: WorkerState
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Saying:
    """What is said: by which resource's process, and the words as JSON."""

    claim_uid: str
    pod: str
    words: str


@dataclass(frozen=True, slots=True)
class SaidWord:
    """A word as the database has it.

    Attributes:
        state: one of `WorkerState`, in the words of the version that said it.
        age_seconds: since it was said, by the database's clock.
        is_fresh: the process has been heard of within its lease and has not ended.
        ended: it was said at the process's regular end.

    """

    processor_id: str
    partition: int
    token: UUID
    pod: str
    state: str
    reason: str
    message: str
    said_at: datetime
    age_seconds: float
    is_fresh: bool
    ended: bool


def format_words(words: Iterable[Word]) -> str:
    """Write words as the JSON that the database keeps. A handler's error may hold what jsonb refuses."""
    return json.dumps([asdict(each) | {"message": storable_text(each.message)} for each in words])


def say(
    connection: Connection,
    key: ProcessorKey,
    saying: Saying,
    *,
    token: UUID,
    lease: timedelta,
    ended: bool = False,
) -> None:
    """Say it; `ended`: the process ends."""
    call(
        connection, key.schema, "say_word", processor_id=key.processor_id, claim_uid=saying.claim_uid, pod=saying.pod,
        token=token, words=saying.words, lease=lease, ended=ended,
    )  # fmt: skip


def list_words(connection: Connection, schema: str, processor_id: str | None = None) -> list[SaidWord]:
    """Read what was last said, the latest first."""
    rows = fetch_rows(connection, in_schema("list_words", schema), {"processor_id": processor_id})
    return [
        SaidWord(
            found, word["partition"], token, pod, word["state"], word["reason"], word["message"], said_at, age,
            fresh, ended,
        )
        for found, token, pod, words, said_at, age, fresh, ended in rows
        for word in words
    ]  # fmt: skip
