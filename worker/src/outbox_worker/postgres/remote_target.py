"""Messages in one database, effects and checkpoint in another: which source it is, and whether it can be that one.

A pair means nothing but in the database that its transaction ids are of. So the first claim writes down, beside the
checkpoint, which database is read; a worker that reads another one is refused. A standby that was promoted may lack the
last commits, and hands out their ids again: it is another one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

from outbox_core.errors import ConfigurationError, TransientError
from outbox_core.progress.snapshot import parse_snapshot
from outbox_core.report import Reason
from outbox_worker.postgres.call import call, call_row, fetch_one, fetch_row, in_schema, load
from outbox_worker.postgres.errors import translated
from outbox_worker.postgres.identity import check_identity, fetch_behind
from outbox_worker.postgres.transactions.transaction import roll_back

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox_core.progress.checkpoint import Checkpoint
    from outbox_core.spec import Source
    from outbox_worker.postgres.connection import Connection
    from outbox_worker.postgres.key import ProcessorKey


@dataclass(frozen=True, slots=True)
class SourceIdentity:
    """Which database messages are read from.

    Attributes:
        identity: what is compared: the database, how often its ids were rebased, and the timeline of its server. With
            our own table the database is its uuid, which survives a move; with a mapped one, beside which nothing of
            ours need be, it is server and database.
        described: for people.
        next_transaction_id: ids below it were handed out.
        timeline: that its server is on.

    """

    identity: str
    described: str
    next_transaction_id: int
    timeline: int


def identify(connection: Connection, source: Source) -> SourceIdentity:
    """Say which database this is; only reads.

    Raises:
        ConfigurationError: `DatabaseCopied` or `DatabaseBehind`, or what the role lacks.

    """
    system, oid, name, timeline, following = fetch_one(connection, load("fetch_place"))
    identity = f"{system}/{oid}"
    if source.table is None:
        ours = check_identity(connection, source)
        identity = f"{ours.uuid}{_REBASED}{ours.rebased}" if ours.rebased else ours.uuid
    elif (found := fetch_behind(connection, source)) is not None:
        raise _behind(found[1], found[0])
    described = f"database {name} of server {system} on timeline {timeline}"
    return SourceIdentity(f"{identity}{_TIMELINE}{timeline}", described, int(following), timeline)


def database_of(identity: str) -> str:
    """Return which database an identity names, on any timeline and with any ids."""
    return _without_timeline(identity).partition(_REBASED)[0]


def _behind(following: object, stored: object) -> ConfigurationError:
    return ConfigurationError(
        f"the source's server is at transaction id {following}, below {stored} which is stored: a restore into a "
        "younger server. New messages would stay unread until it gets there: see docs/restoring.md",
        reason=Reason.DATABASE_BEHIND,
    )


def check_reach(source: SourceIdentity, stored: Checkpoint | None) -> None:
    """Refuse a checkpoint that the source has not reached.

    Raises:
        ConfigurationError: `DatabaseBehind`.

    """
    if stored is None:
        return
    reached = stored.transaction_id
    if stored.snapshot_range is not None and stored.snapshot_range.end is not None:
        reached = parse_snapshot(stored.snapshot_range.end).xmax - 1
    if reached >= source.next_transaction_id:
        raise _behind(source.next_transaction_id, reached)


_T = TypeVar("_T")


def read_durably(
    connection: Connection,
    read: Callable[[], _T],
    is_new: Callable[[_T], bool],
    timeline: int | None = None,
) -> _T:
    """Read on a connection in autocommit; once this returns, no crash of its server can take back what was read.

    Beside its messages a checkpoint is as durable as they are. In another server it outlives what the source had not
    flushed: messages whose commit nothing waited for, and ids of rolled back transactions, which are then handed out
    again. So all is one transaction, which a crash would end, and at its end the source's WAL is flushed.

    Args:
        connection: to the source.
        read: the statements, on the same connection.
        is_new: whether there is anything in the answer that will be remembered.
        timeline: that the server has to be on; None: any.

    Raises:
        TransientError: it is on another one: a pooler leads the connection to a promoted standby by now.

    """
    try:
        _begin_durable_read(connection, timeline)
        found = read()
        with translated():
            connection.execute(load("end_durable_read") if is_new(found) else "COMMIT")
    except BaseException:
        roll_back(connection)
        raise
    return found


def _begin_durable_read(connection: Connection, timeline: int | None) -> None:
    with translated():
        row = connection.execute(load("begin_durable_read")).set_result(-1).fetchone()
    if timeline is not None and (row is None or row[0] != timeline):
        raise TransientError(
            "the source's server is on another timeline than before: which server it is, is looked at again",
            reason=Reason.DATABASE_UNAVAILABLE,
        )


def bind(connection: Connection, key: ProcessorKey, claim_uid: str, source: SourceIdentity | None) -> None:
    """Write down which database the processor reads, as the claim's holder; None: this very one.

    Raises:
        ConfigurationError: `SourceDiffers`: it reads another one.

    """
    bound, identity, described = call_row(
        connection, key.schema, "bind_processor_source", processor_id=key.processor_id, claim_uid=claim_uid,
        source=None if source is None else source.identity, described=None if source is None else source.described,
    )  # fmt: skip
    if bound:
        return
    here = "the database of its checkpoint" if source is None else source.described
    written = described or "the database of its checkpoint"
    if source is not None and identity is not None:
        _refuse_changed_ids(key, identity, written, source)
    raise ConfigurationError(
        f"the checkpoint of processor {key.processor_id!r} belongs to messages of {written}, and {here} is to be read: "
        "its pairs mean nothing there. Use another processorId; where the source only moved, `outbox forget-source`",
        reason=Reason.SOURCE_DIFFERS,
    )


_REBASED: Final = "/rebased-"
_TIMELINE: Final = "/timeline-"


def _without_timeline(identity: str) -> str:
    return identity.partition(_TIMELINE)[0]


def _refuse_changed_ids(key: ProcessorKey, before: str, written: str, source: SourceIdentity) -> None:
    """Raise ConfigurationError where it is the same database, and only its ids are not those of before."""
    if database_of(before) != database_of(source.identity):
        return
    if _without_timeline(before) != _without_timeline(source.identity):
        raise ConfigurationError(
            f"the transaction ids of {source.described} were rebased by `outbox repair` since processor "
            f"{key.processor_id!r} stored its checkpoint, which names the ids of before. Messages kept their "
            "positions: look there for the transaction_id of the one at the checkpoint's position; suspend the "
            "processor, `outbox forget-source`, `outbox rewind` to it, and resume (docs/restoring.md)",
            reason=Reason.SOURCE_DIFFERS,
        )
    raise ConfigurationError(
        f"processor {key.processor_id!r} stored its checkpoint of {written}, and the source is {source.described}: a "
        "promoted standby, or a backup recovered elsewhere. It may lack the last messages, and hands out their ids "
        "again, which the checkpoint passes over. Suspend the processor, `outbox forget-source`, `outbox rewind` to "
        "before the failover if in doubt, and resume (docs/restoring.md)",
        reason=Reason.SOURCE_DIFFERS,
    )


@dataclass(frozen=True, slots=True)
class WrittenSource:
    """What is written down; `identity` is None once it was forgotten."""

    identity: str | None
    described: str


def fetch_source(connection: Connection, key: ProcessorKey) -> WrittenSource | None:
    """Say which other database the processor reads; None: this one."""
    row = fetch_row(connection, in_schema("fetch_source", key.schema), {"processor_id": key.processor_id})
    return None if row is None else WrittenSource(*row)


def forget_source(connection: Connection, key: ProcessorKey, *, reason: str, decided_by: str) -> int:
    """Let the next claim write down what it reads; 1 done, 0 nothing is written down, 4 an owner is live."""
    answer: int = call(
        connection, key.schema, "forget_processor_source", processor_id=key.processor_id, reason=reason,
        decided_by=decided_by,
    )  # fmt: skip
    return answer
