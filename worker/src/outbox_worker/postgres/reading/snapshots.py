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
from outbox_worker.postgres.call import fetch_row
from outbox_worker.postgres.queries import load
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
    return check_snapshot(found[0], lower), found[0][2], messages


def fetch_snapshot(connection: Connection) -> str:
    """Take a snapshot; otherwise like `fetch_present`."""
    return fetch_present(connection)[0]


def fetch_present(connection: Connection, lower: str | None = None) -> tuple[str, bool]:
    """Take a snapshot, and say whether no transaction was in progress. Not to be asked twice in one transaction.

    Raises:
        ConfigurationError: as `check_snapshot` says.
        TransientError: likewise.

    """
    row = fetch_row(connection, load("fetch_snapshot"))
    return check_snapshot(row, lower), row is not None and row[2]


def check_snapshot(row: tuple[Any, ...] | None, lower: str | None) -> str:
    """Return the snapshot of a row, which says beside it whether the server is a standby.

    Raises:
        ConfigurationError: it is.
        TransientError: the snapshot does not see all that `lower` does.

    """
    if row is None or row[1]:
        raise ConfigurationError(
            "cursor Snapshot cannot read from a hot standby: its snapshots do not say which transactions are in "
            "progress, so messages would be lost. Let source.connection name the primary",
            reason=Reason.DATABASE_UNAVAILABLE,
        )
    snapshot = str(row[0])
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
    """
    if remote_target is None:
        return fetch_snapshot(connection)
    row = fetch_row(connection, load("fetch_newest").format(newest=remote_target.newest()))
    if row is None or row[1]:
        return fetch_snapshot(connection)  # which says why not
    return cut(row[0], None if row[2] is None else int(row[2]), lower)


def is_later(snapshot: str, other: str | None) -> bool:
    """Say whether a snapshot sees all that another one does."""
    return other is None or parse_snapshot(snapshot).covers(parse_snapshot(other))
