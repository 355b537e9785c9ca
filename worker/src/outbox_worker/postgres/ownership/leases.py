"""Claim (which resource) and lease (which process): two records, both judged by the database's clock.

All of it is decided in SQL (`sql/functions`); a refusal is an answer, not an error. Each call is one short statement,
meant for a connection in autocommit or a transaction of its own, never for the batch's.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from psycopg import sql

from outbox_core.report import ResourceRef
from outbox_sql.guide import quote
from outbox_worker.postgres.call import call, call_row, compose_call, fetch_one, fetch_row, in_schema, load
from outbox_worker.postgres.errors import translated

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime, timedelta
    from uuid import UUID

    from outbox_core.processor.outcomes import HeldLease
    from outbox_worker.postgres.connection import Connection
    from outbox_worker.postgres.key import ProcessorKey

FRESH: Final = 0.05
"""Seconds for which an answer about a lease counts."""


@dataclass(frozen=True, slots=True)
class ClaimAnswer:
    """Who holds the processor after the call.

    Attributes:
        granted: it is the caller.
        holder: the resource that holds it; None while none does.
        claimed_at: since when.
        vacated_at: its last process left without saying why; others may claim 30 s later.

    """

    granted: bool
    holder: ResourceRef | None
    claimed_at: datetime | None
    vacated_at: datetime | None


@dataclass(frozen=True, slots=True)
class LeaseAnswer:
    """Who holds the lease after the call.

    Attributes:
        acquired: the caller, under `epoch`.
        epoch: the row's number; None if the lease was never held.
        pod: its holder; None when it was released.
        expires_at: by the database's clock.

    """

    acquired: bool
    epoch: int | None
    pod: str | None
    expires_at: datetime | None


def claim(
    connection: Connection,
    key: ProcessorKey,
    resource: ResourceRef,
    *,
    force: bool = False,
    sweep_uids: Sequence[str] = (),
) -> ClaimAnswer:
    """Ask for the processor, or say again that it is ours; free of writes when nothing changes.

    `force` takes it from its holder and ends that resource's leases. `sweep_uids` are resources of the same cluster
    that are gone for certain. Refused although open: the holder is committing right now, ask again.
    """
    row = call_row(
        connection, key.schema, "claim_processor", processor_id=key.processor_id, cluster=resource.cluster,
        namespace=resource.namespace, name=resource.name, uid=resource.uid, force=force, sweep_uids=list(sweep_uids),
    )  # fmt: skip
    return _claim_answer(row)


def fetch_claim(connection: Connection, key: ProcessorKey) -> ClaimAnswer:
    """Say who holds the processor without asking for it."""
    row = fetch_row(connection, in_schema("fetch_claim", key.schema), {"processor_id": key.processor_id})
    return _claim_answer(row)


def _claim_answer(row: tuple[Any, ...] | None) -> ClaimAnswer:
    if row is None or row[4] is None:
        return ClaimAnswer(granted=False, holder=None, claimed_at=None, vacated_at=None)
    granted, cluster, namespace, name, uid, claimed_at, vacated_at = row
    holder = ResourceRef(cluster=cluster, namespace=namespace, name=name, uid=uid)
    return ClaimAnswer(granted=granted, holder=holder, claimed_at=claimed_at, vacated_at=vacated_at)


def vacate_claim(connection: Connection, key: ProcessorKey, uid: str) -> bool:
    """Start the claim's grace. False: it was not ours, or vacated already."""
    return call(connection, key.schema, "vacate_claim", processor_id=key.processor_id, uid=uid) is True


def release_claim(connection: Connection, key: ProcessorKey, uid: str) -> bool:
    """Give the claim up with its leases. False: it was not ours."""
    return call(connection, key.schema, "release_claim", processor_id=key.processor_id, uid=uid) is True


def hand_over_claim(connection: Connection, key: ProcessorKey, uid: str, successor: ResourceRef) -> bool:
    """Give the claim to another resource, found by its cluster, namespace and name. False: it was not ours."""
    given = call(
        connection, key.schema, "hand_over_claim", processor_id=key.processor_id, uid=uid, to_cluster=successor.cluster,
        to_namespace=successor.namespace, to_name=successor.name,
    )  # fmt: skip
    return given is True


def acquire_lease(
    connection: Connection,
    key: ProcessorKey,
    *,
    claim_uid: str,
    pod: str,
    token: UUID,
    lease: timedelta,
) -> LeaseAnswer:
    """Become the owner under a fresh epoch.

    Refused while another process is alive, the claim is not `claim_uid`'s, or a conflict waits for a person. `token` is
    random and new for each process.
    """
    row = call_row(
        connection, key.schema, "acquire_lease", **key.names, claim_uid=claim_uid, pod=pod, token=token, lease=lease
    )
    return LeaseAnswer(*row)


def renew_lease(connection: Connection, key: ProcessorKey, held: HeldLease, lease: timedelta) -> bool:
    """Extend the lease. False: it lapsed or is another's; it never comes back."""
    return call(connection, key.schema, "renew_lease", **key.names, **_compared(held), lease=lease) is True


def keep_lease(connection: Connection, key: ProcessorKey, held: HeldLease, lease: timedelta) -> bool:
    """Say whether the lease is ours, with four fifths of its time or more. False: it never comes back under this epoch.

    Written only where it has less, so that it can be asked before each batch.
    """
    return call(connection, key.schema, "keep_lease", **key.names, **_compared(held), lease=lease) is True


def release_lease(connection: Connection, key: ProcessorKey, held: HeldLease) -> bool:
    """Let a standby in at once. False: it was not ours any more."""
    return call(connection, key.schema, "release_lease", **key.names, **_compared(held)) is True


def _compared(held: HeldLease) -> dict[str, Any]:
    return {"epoch": held.epoch, "token": held.token}


@dataclass(frozen=True, slots=True)
class Stuck:
    """What came of transactions that former owners left open.

    Attributes:
        ended: how many were ended.
        left: one that our role may not see or not end, and what would let it; empty where there is none.

    """

    ended: int = 0
    left: str = ""


def end_stuck_transactions(connection: Connection, key: ProcessorKey, epochs: Mapping[int, int | None]) -> Stuck:
    """End transactions of former owners that hold locks while the server waits for their process.

    Does nothing while another owner is live; `epochs` are our own, of each partition that is asked about, None before
    we have one. Sessions of other roles need pg_read_all_stats to be seen and pg_signal_backend to be ended.
    """
    # The first epoch is 1. In a list a null would be the word NULL where array_nulls is off.
    return _end_stuck(connection, key, "former_epochs", {
        "partitions": list(epochs), "epochs": [epoch or 0 for epoch in epochs.values()],
        "lock_names": [replace(key, partition=partition).lock_name for partition in epochs],
    })  # fmt: skip


def end_stuck_attempts(connection: Connection, key: ProcessorKey, *, batch: int, owner: str, attempt: int) -> Stuck:
    """End such transactions of former attempts of a batch, where the named attempt is its last and has not begun one.

    Otherwise like `end_stuck_transactions`.
    """
    return _end_stuck(connection, key, "former_attempts", {
        "lock_name": key.lock_name, "batch": batch, "owner": owner, "attempt": attempt,
    })  # fmt: skip


def _end_stuck(connection: Connection, key: ProcessorKey, former: str, names: dict[str, Any]) -> Stuck:
    """End stuck transactions that hold one of the locks that the statement `former` names."""
    statement = load("end_stuck_transactions").format(former=in_schema(former, key.schema))
    ended, *left = fetch_one(connection, statement, names | {"processor_id": key.processor_id})
    return Stuck(ended, "" if left[0] is None else _describe_left(*left))


def _describe_left(pid: int, role: str, hidden: bool, barred: bool, reader: str) -> str:
    """Name a session that stays, and the remedy."""
    grants = [name for name, lacking in (("pg_read_all_stats", hidden), ("pg_signal_backend", barred)) if lacking]
    if grants:
        remedy = f"GRANT {', '.join(grants)} TO {quote(reader)} would let this one, or run both as the same role"
    else:
        remedy = "it is a superuser's, end it as one"
    return f"session {pid} of role {role}, a former owner's, may keep others waiting until it is ended; {remedy}"


def limit_transaction(connection: Connection, lease: timedelta) -> None:
    """Bound how long a frozen owner's open transaction can keep a standby from taking over.

    For the current transaction only. From the call on, the server ends the session when it sits idle in this
    transaction, or cannot hand over a result, for four fifths of the lease. Call it at the latest with the store: from
    there on the transaction holds the lock that a takeover waits for.
    """
    limit = f"{max(1, round(lease.total_seconds() * 800))}ms"
    with translated():
        connection.execute(load("limit_transaction"), {"limit": limit})


class LeaseLook:
    """Asks whether the lease of one unit is ours in the round trip that reads a batch, instead of in one of its own.

    What is handed over cannot be recalled, so the answer counts for a moment only, from before the question was sent: a
    process that was frozen meanwhile, or a read that took long, has to ask again.
    """

    def __init__(self, key: ProcessorKey, lease: timedelta) -> None:
        """Ask about nothing yet; `lease` is how long a lease lasts."""
        self._key = key
        self._seconds = lease
        self._lease: HeldLease | None = None
        self._statement: sql.Composable = sql.SQL("SELECT NULL")
        self._fresh_until = 0.0

    def ask(self, lease: HeldLease) -> None:
        """Ask about this lease from now on."""
        self._fresh_until = 0.0
        if lease != self._lease:
            key, self._lease = self._key, lease
            self._statement = compose_call(
                key.schema, "keep_lease", **key.names, **_compared(lease), lease=self._seconds
            )

    def is_fresh(self, lease: HeldLease) -> bool:
        """Say whether the database just said that this lease is ours, with four fifths of its time or more."""
        return self._lease == lease and time.monotonic() < self._fresh_until

    def read(self, connection: Connection, statement: sql.Composable) -> list[tuple[Any, ...]]:
        """Return the rows of a statement that has no parameters, and take what is said of the lease after it."""
        asked = time.monotonic()
        with translated():
            cursor = connection.execute(sql.SQL("{}; {}").format(statement, self._statement))
            rows: list[tuple[Any, ...]] = cursor.fetchall()
            kept = cursor.fetchone() if cursor.nextset() else None
        if kept is not None and kept[0] is True:
            self._fresh_until = asked + FRESH
        return rows
