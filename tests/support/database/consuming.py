"""Consumers without a process: what they take and complete, by calls into the database."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from outbox_core.processor.claimed_batch import Refusal
from outbox_core.processor.outcomes import NothingTaken
from outbox_core.processor.turns import Turn
from outbox_core.report import ResourceRef
from outbox_core.spec import Competing, StartFrom
from outbox_worker.postgres.feeds import competing
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.ownership import leases as ownership
from outbox_worker.postgres.reading.read_range import ReadRange
from tests.support.servers.postgres import build_source

if TYPE_CHECKING:
    import psycopg

    from outbox_core.errors import OutboxError
    from outbox_core.message import Message
    from outbox_core.processor.claimed_batch import ClaimedBatch, RefusalDecision
    from outbox_core.spec import Source
    from outbox_worker.postgres.feeds.competing import BatchTaker
    from outbox_worker.postgres.reading.payloads import PayloadBound

KEY = ProcessorKey("outbox", "orders")
HOUR = timedelta(hours=1)
OVER = timedelta(0)
SETTINGS = Competing()
JOBS = Competing(queue="jobs")
SOURCE = build_source()


def claim(connection: psycopg.Connection[Any]) -> None:
    resource = ResourceRef(cluster="c", namespace="n", name="a", uid="u1")
    assert ownership.claim(connection, KEY, resource).granted


def taker(
    owner: str = "one",
    lease: timedelta = HOUR,
    limit: int = 10,
    uid: str = "u1",
    source: Source = SOURCE,
    settings: Competing = SETTINGS,
    payloads: PayloadBound | None = None,
) -> BatchTaker:
    consumer = competing.Consumer(owner, f"pod-{owner}", uid, lease)
    return competing.BatchTaker(KEY, consumer, source, settings, limit, payloads)


def join(
    connection: psycopg.Connection[Any],
    settings: Competing = SETTINGS,
    start_from: StartFrom | None = None,
    uid: str = "u1",
    source: Source = SOURCE,
) -> bool | None:
    consumer = competing.Consumer("one", "pod-one", uid, HOUR)
    return competing.join(connection, KEY, consumer, source, settings, start_from or StartFrom())


def produce(
    connection: psycopg.Connection[Any], count: int, message_type: str = "t", *, deliver_after: str | None = None
) -> list[int]:
    """`deliver_after` is an interval from now."""
    rows = connection.execute(
        "INSERT INTO outbox.messages (message_type, data, deliver_after) "
        "SELECT %s, jsonb_build_object('n', n), clock_timestamp() + %s::interval "
        "FROM generate_series(1, %s) AS n RETURNING position",
        (message_type, deliver_after, count),
    ).fetchall()
    return [row[0] for row in rows]


def put(connection: psycopg.Connection[Any], count: int, **columns: object) -> list[int]:
    """Messages of the queue `jobs`."""
    names = "".join(f", {name}" for name in columns)
    values = "".join(f", %({name})s" for name in columns)
    rows = connection.execute(
        f"INSERT INTO outbox.queue_jobs (message_type, data{names}) SELECT 't', jsonb_build_object('n', n){values} "
        "FROM generate_series(1, %(count)s) AS n RETURNING position",
        columns | {"count": count},
    ).fetchall()
    return [row[0] for row in rows]


def find(connection: psycopg.Connection[Any], by: BatchTaker) -> ClaimedBatch | None:
    """Cut the next batch, if there is one."""
    claimed = by.claim_next(connection)
    while isinstance(claimed, NothingTaken) and claimed.moved:
        claimed = by.claim_next(connection)
    return None if isinstance(claimed, NothingTaken) else claimed


def cut(connection: psycopg.Connection[Any], by: BatchTaker) -> ClaimedBatch:
    """Cut the next batch, which must be there."""
    claimed = find(connection, by)
    assert claimed is not None
    return claimed


def left(connection: psycopg.Connection[Any], by: BatchTaker) -> ClaimedBatch:
    """Take what is there already, which must be there."""
    claimed = look(connection, by)
    assert claimed is not None
    return claimed


def look(connection: psycopg.Connection[Any], by: BatchTaker) -> ClaimedBatch | None:
    """Take what is there already, of either kind."""
    if by.reader.is_queue:
        by.promote(connection, 1000, failed=True)
    return by.take_left(connection, Turn.FRESH) or by.take_left(connection, Turn.AGAIN)


def defer(
    connection: psycopg.Connection[Any], by: BatchTaker, claimed: ClaimedBatch, message: Message,
    decision: RefusalDecision, error: OutboxError, wait: timedelta = OVER,
) -> bool:  # fmt: skip
    """Let the first message of the batch leave it."""
    failed = Refusal(message, error, replace(decision, wait=wait.total_seconds()))
    return by.defer(connection, claimed, message.checkpoint, 1, [failed])


def positions(connection: psycopg.Connection[Any], by: BatchTaker, claimed: ClaimedBatch) -> list[int]:
    return [m.checkpoint.position for m in by.reader.fetch(connection, ReadRange.of(claimed))]


def drain(connection: psycopg.Connection[Any], by: BatchTaker) -> list[int]:
    """Take and complete until nothing is left; return the positions in the order they were taken."""
    found: list[int] = []
    while (claimed := look(connection, by) or find(connection, by)) is not None:
        found += positions(connection, by, claimed)
        assert by.complete(connection, claimed, claimed.upto, claimed.count)
    return found


def maintain(connection: psycopg.Connection[Any], settings: Competing = SETTINGS) -> list[str]:
    """Do what a consumer's heartbeat does for the processor; return the tables that it emptied."""
    competing.advance_checkpoint(connection, KEY)
    return competing.empty_tables(connection, KEY, settings)


def count(connection: psycopg.Connection[Any], table: str) -> int:
    row = connection.execute(f"SELECT count(*) FROM outbox.{table}").fetchone()
    return int(row[0]) if row else 0
