"""Takes snapshots, and reads a small new snapshot range with the statement that takes its upper one.

What a statement's own snapshot sees and the lower one does not is what the range has: the upper snapshot need not be
known before, so a look is one round trip instead of two, and the statement is planned in a third of the time. Most
looks at an outbox that is not behind find nothing or little. A range that has more is left to `range_reader.py`, which
can read it in pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from outbox_core.errors import ConfigurationError, TransientError
from outbox_core.progress.coverage import cut
from outbox_core.progress.snapshot import parse_snapshot
from outbox_core.report import Reason
from outbox_worker.postgres.call import fetch_one, load
from outbox_worker.postgres.reading.payloads import shipped_columns
from outbox_worker.postgres.reading.range_scan import SIZE
from outbox_worker.postgres.reading.read_range import Lookup
from outbox_worker.postgres.reading.table import build_messages

if TYPE_CHECKING:
    from collections.abc import Callable

    from psycopg import sql

    from outbox_core.message import Message
    from outbox_worker.postgres.connection import Connection
    from outbox_worker.postgres.reading.range_scan import RangeScan
    from outbox_worker.postgres.reading.read_range import Templates

FEW: Final = 100
"""Messages, and transactions that were in progress at the range's beginning, each of which is looked up."""


def fetch_news(
    read: Callable[[sql.Composed], list[tuple[Any, ...]]],
    scan: RangeScan,
    templates: Templates,
    lower: str,
    limit: int,
    small: int | None,
) -> tuple[str, bool, tuple[Message, ...]] | None:
    """Read all that came since `lower`, in order, at most `limit` messages, payloads as text; `read` executes it.

    Payloads of more than `small` bytes are empty; None: none is.

    Returns:
        The snapshot that ends the range, whether no transaction was in progress, and the messages. None: there may be
        more than a few of them.

    Raises:
        ConfigurationError: as `check_snapshot` says.
        TransientError: likewise.

    """
    few = min(limit, FEW)
    if len(parse_snapshot(lower).in_progress) > few:
        return None
    wanted = Lookup(lower, None, size=few + 1)

    def compose() -> sql.Composed:
        rows = scan.news(scan.table.outline(small), wanted)
        return load("fetch_news").format(rows=rows, payload=shipped_columns("n", small), size=SIZE)

    found = read(templates.fill("news", wanted, compose))
    messages = build_messages(row[3:] for row in found if row[3] is not None)
    if len(messages) > few:
        return None
    snapshot, is_standby, saw_all = found[0][:3]
    return check_snapshot(snapshot, lower, is_standby=is_standby), saw_all, messages


def fetch_snapshot(connection: Connection) -> str:
    """Take a snapshot; otherwise like `fetch_present`."""
    return fetch_present(connection)[0]


def fetch_present(connection: Connection, lower: str | None = None) -> tuple[str, bool]:
    """Take a snapshot, and say whether no transaction was in progress. Not to be asked twice in one transaction.

    Raises:
        ConfigurationError: as `check_snapshot` says.
        TransientError: likewise.

    """
    snapshot, is_standby, saw_all = fetch_one(connection, load("fetch_snapshot"))
    return check_snapshot(snapshot, lower, is_standby=is_standby), saw_all


def check_snapshot(snapshot: str, lower: str | None, *, is_standby: bool) -> str:
    """Return a snapshot up to which a range that begins at `lower` can be read.

    Raises:
        ConfigurationError: it is a standby's.
        TransientError: it does not see all that `lower` does.

    """
    if is_standby:
        raise ConfigurationError(
            "cursor Snapshot cannot read from a hot standby: its snapshots do not say which transactions are in "
            "progress, so messages would be lost. Let source.connection name the primary",
            reason=Reason.DATABASE_UNAVAILABLE,
        )
    if not is_later(snapshot, lower):
        raise TransientError(
            f"the server's snapshot {snapshot} does not see all that the checkpoint has examined, {lower}: the "
            "server recovered from a crash, or is another one",
            reason=Reason.DATABASE_UNAVAILABLE,
        )
    return snapshot


def take_snapshot(connection: Connection, remote_target: RangeScan | None, lower: str | None = None) -> str:
    """Take a snapshot for a range that begins at `lower`; with `remote_target` to be kept in another server.

    A transaction that rolled back is over before a crash could no more undo that: the server may hand out its id again.
    Beside its messages a checkpoint is as durable as they are; in another server it must not know such an id.

    Raises:
        ConfigurationError: as `check_snapshot` says.
        TransientError: likewise.

    """
    if remote_target is None:
        return fetch_snapshot(connection)
    now, is_standby, newest = fetch_one(connection, load("fetch_newest").format(newest=remote_target.newest()))
    snapshot = now if is_standby else cut(now, None if newest is None else int(newest), lower)
    return check_snapshot(snapshot, lower, is_standby=is_standby)


def is_later(snapshot: str, other: str | None) -> bool:
    """Say whether a snapshot sees all that another one does."""
    return other is None or parse_snapshot(snapshot).covers(parse_snapshot(other))
