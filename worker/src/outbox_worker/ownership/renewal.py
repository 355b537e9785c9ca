"""What the heartbeat renews in each mode: a lease, the leases of the partitions that are ours, or a batch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Protocol

from typing_extensions import override

from outbox_core.processor.outcomes import HeldLease
from outbox_worker.logs import get_logger
from outbox_worker.postgres.ownership import leases as calls
from outbox_worker.postgres.ownership import partitions

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import timedelta

    from outbox_worker.competing.consumer import ThisConsumer
    from outbox_worker.ownership.heartbeat import Ownership
    from outbox_worker.ownership.membership import Membership
    from outbox_worker.postgres.connection import Connection
    from outbox_worker.postgres.key import ProcessorKey

OBSERVE_SECONDS: Final = 2.0
LOOK_SECONDS: Final = 0.7
"""Between two looks at who owns which partition: a takeover takes the lease and less than this."""
_log = get_logger("outbox.heartbeat")


class Renewal(Protocol):
    """What one mode renews, on the heartbeat's connection and in its thread, while the claim is ours."""

    seconds: float
    """At most between two ticks of the heartbeat."""

    def renew(self, connection: Connection) -> bool:
        """Renew what this process holds; say whether something was lost."""

    def look(self, connection: Connection) -> bool:
        """See who else is there; say whether this process shall do something else than before."""
        del connection
        return False

    def end(self, connection: Connection) -> None:
        """Give back what is renewed beside the leases: before the process ends, after its heartbeat stopped."""
        del connection


@dataclass(slots=True)
class LeaseRenewal(Renewal):
    """One lease: of a processor that is not partitioned."""

    _key: ProcessorKey
    _lease: timedelta
    _ownership: Ownership
    seconds: float = OBSERVE_SECONDS

    @override
    def renew(self, connection: Connection) -> bool:
        held = self._ownership.lease
        if held is None:
            return False
        renewed = calls.renew_lease(connection, self._key, held, self._lease)
        _note(self._ownership, held, renewed=renewed)
        if renewed:
            _end_stuck_transactions(connection, self._key, [held])
        return not renewed


@dataclass(slots=True)
class MembershipRenewal(Renewal):
    """Membership and all leases of a partitioned processor at once; it also looks who shall own what."""

    _key: ProcessorKey
    _lease: timedelta
    _ownerships: Sequence[Ownership]
    _membership: Membership
    _claim_uid: str
    _pod: str
    seconds: float = LOOK_SECONDS
    _unwanted: frozenset[HeldLease] = frozenset()
    _leaving: list[HeldLease] = field(default_factory=list)
    _orphans: frozenset[HeldLease] = frozenset()

    @override
    def renew(self, connection: Connection) -> bool:
        # Before the call: a lease that the main thread acquires meanwhile is not among the answers.
        held = [(ownership, lease) for ownership in self._ownerships if (lease := ownership.lease) is not None]
        if not any(ownership.claimed for ownership in self._ownerships):
            return False
        if not (held or self._membership.is_able):
            partitions.end_membership(connection, self._key, self._membership.token)
            return False
        epochs = partitions.renew_membership(
            connection, self._key, claim_uid=self._claim_uid, pod=self._pod, token=self._membership.token,
            lease=self._lease,
        )  # fmt: skip
        renewed = {lease for _, lease in held if epochs.get(lease.partition) == lease.epoch}
        for ownership, lease in held:
            _note(ownership, lease, renewed=lease in renewed)
        if renewed:
            _end_stuck_transactions(connection, self._key, renewed)
        self._find_orphans(epochs)
        return len(renewed) < len(held)

    def _find_orphans(self, epochs: Mapping[int, int]) -> None:
        """Let go of what is renewed with this token and no runner knows of: the answer to acquiring it was lost.

        Not at first sight: a runner may be told of it at this moment.
        """
        known = {ownership.lease for ownership in self._ownerships}
        token = self._membership.token
        orphans = frozenset(HeldLease(partition, epoch, token) for partition, epoch in epochs.items()) - known
        self._leaving += sorted((orphans & self._orphans) - set(self._leaving), key=lambda lease: lease.partition)
        self._orphans = orphans

    @override
    def look(self, connection: Connection) -> bool:
        seen = partitions.fetch_owners(
            connection, self._key, claim_uid=self._claim_uid, count=self._membership.count
        )  # fmt: skip
        self._give_back(connection)
        self._membership.note_count(seen.found)
        return self._membership.note(seen) or self._membership.outdated

    def _give_back(self, connection: Connection) -> None:
        """Give back what another process shall own, where the main thread is too busy with one partition to do so.

        Not at first sight: as a rule the main thread does it at once. What could not be released is tried again; else
        it would be renewed without end.
        """
        held = {lease: ownership for ownership in self._ownerships if (lease := ownership.lease) is not None}
        unwanted = frozenset(lease for lease in held if lease.partition not in self._membership.assigned)
        self._leaving += [lease for lease in unwanted & self._unwanted if held[lease].give_back(lease)]
        self._unwanted = unwanted
        while self._leaving:
            lease = self._leaving[0]
            calls.release_lease(connection, replace(self._key, partition=lease.partition), lease)
            del self._leaving[0]

    @override
    def end(self, connection: Connection) -> None:
        partitions.end_membership(connection, self._key, self._membership.token)


@dataclass(slots=True)
class BatchRenewal(Renewal):
    """The batch that a consumer has in hand, and that the consumer lives.

    One in its name that it does not know, because the answer to its taking was lost, runs out and is another's.
    """

    _key: ProcessorKey
    _ownership: Ownership
    _consumer: ThisConsumer
    seconds: float = OBSERVE_SECONDS

    @override
    def renew(self, connection: Connection) -> bool:
        decided = self._ownership.decided
        if not self._ownership.claimed or decided is None or not decided.joined:
            return False
        if decided.claimed is not None:
            self._consumer.taker.renew(connection, decided.claimed)
        self._consumer.renew_membership(connection)
        return False  # a batch that was lost is noticed when it is completed

    @override
    def end(self, connection: Connection) -> None:
        """Hand back what is unfinished, so that others go on with it at once."""
        returned = self._consumer.taker.hand_back(connection)
        self._consumer.end_membership(connection)
        _log.info("handed back", extra={"batches": returned})


def _note(ownership: Ownership, lease: HeldLease, *, renewed: bool) -> None:
    if renewed:
        ownership.note_renewal(lease)
    else:
        ownership.lose_lease(lease, f"the lease of epoch {lease.epoch} lapsed or is another's")


def _end_stuck_transactions(connection: Connection, key: ProcessorKey, leases: Iterable[HeldLease]) -> None:
    stuck = calls.end_stuck_transactions(connection, key, {lease.partition: lease.epoch for lease in leases})
    if stuck.ended:
        _log.warning("ended transactions that a former owner left stuck", extra={"count": stuck.ended})
